"""The shadow: real processes, killed, stopped and found again. What it holds is what the trainer has, bit for bit."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import shadow_training
import torch
from harness import SEED, copied, everything, must_equal
from models import Training, build
from shadow_training import OPTIONS, SMALL, Program, alive, folder_of, kill, shadows_in, turn, without_everstep
from torch import nn

import everstep
from everstep import cursor as cursors
from everstep.errors import LinkRefused, RunBusyError, UnprotectedWarning, UsageError
from everstep.follow import recover
from everstep.follow.serve import SOCKET, no_payload
from everstep.link import addresses, sockets
from everstep.link.messages import VERSION, Hello, Status, StatusReply
from everstep.link.protocol import encode
from everstep.link.sockets import Channel
from everstep.restore.apply import apply
from everstep.store import shared
from everstep.store.runs import RunPath, read_listing
from support import crash

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled"),
    # A weight that reaches the clamp of a WGAN for the first time late in the run is reported.
    pytest.mark.filterwarnings("default::everstep.errors.HiddenEditWarning"),
]


# ------------------------------------------------------------------------------------------ what every test needs


@pytest.fixture
def attach(memory: Path) -> Iterator[Callable[..., everstep.Run]]:
    """everstep.attach in this process; what a test has not closed ends as a kill would end it."""
    made: list[everstep.Run] = []

    def make(t: Training, path: Path, **options: Any) -> everstep.Run:
        options = {"mode": "shadow", **OPTIONS, "quiet": True, **options}
        made.append(everstep.attach(t.model, t.optimizer, path, extras=t.extras, **options))
        return made[-1]

    yield make
    for run in made:
        if not run._closed:
            crash(run)


def wait_for(true: Callable[[], Any], what: str = "", seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"waited in vain {what}"
        time.sleep(0.005)


def used_bytes(folder: Path, pattern: str = "**/*") -> int:
    """Memory, not sizes: the file that holds the state is larger than what is in it."""
    total = 0
    for file in folder.glob(pattern):
        with contextlib.suppress(FileNotFoundError):
            if file.is_file():
                total += file.stat().st_blocks * 512
    return total


def status_of(path: Path) -> dict[str, Any]:
    """What the shadow says of itself."""
    run = RunPath(path).read_run().run
    with Channel(addresses.connect(f"unix://{folder_of(path)}/{SOCKET}"), no_payload) as channel:
        sockets.introduce(channel, Hello(VERSION, run, str(path), 0, 0, 0, "status", {}))
        channel.send(Status())
        (received,) = channel.receive(10)
        assert isinstance(received.message, StatusReply)
        return json.loads(received.message.text)


def must_hold(path: Path, step: int, expected: dict[str, Any], case: dict[str, Any]) -> int:
    """The shadow hands out the state of this step, with all that `everything` sees; its pid."""
    found = recover.find(RunPath(path), RunPath(path).read_run().run)
    assert found is not None, "no shadow, or it holds nothing"
    try:
        assert found.step == step
        state = found.fetch()
        t = build(**case, seed=SEED - 1)
        apply(state, t.models, t.optimizers)
        cursor = cursors.decode(state.cursor)
        cursors.load_extras(t.extras, cursor["extras"])
        apply(state, t.models, t.optimizers)  # schedulers touch groups
        got, expected = everything(t), copied(expected)
        for part in (got, expected):
            part.pop("random")
        for name, model in got["models"].items():
            # Gradients which a loop clears before it makes new ones are no part of the state.
            for gone in [n for n, g in model.get("grads", {}).items() if g is None]:
                del model["grads"][gone], expected["models"][name]["grads"][gone]
        must_equal(got, expected, f"the shadow's step {step}")
        return found.pid
    finally:
        found.release()


def manifests(path: Path) -> dict[int, Any]:
    return {n: m for t in read_listing(RunPath(path)).timelines.values() for n, m in t.bases.items()}


# ------------------------------------------------------------------------------------------ 1. bit for bit


CASES: dict[str, dict[str, Any]] = {
    "fused AdamW, clipped, scheduled": {"setup": "transformer", "family": "adamw-fused"},
    "SGD that writes into gradients, scaler that skips, BatchNorm": {
        "setup": "cnn", "family": "sgd-nesterov-foreach", "scale": 2.0**10, "infs": tuple(range(3, 400, 4)), "size": 8,
    },
}  # fmt: skip
MORE_CASES: dict[str, dict[str, Any]] = {
    "sparse and dense": {"setup": "embedding", "family": "adamw-foreach", "sparse": "sparse-adam"},
    "two models, a clamp through .data": {"setup": "gan", "family": "rmsprop", "clamp": True},
    "foreach AdamW": {"setup": "mlp", "family": "adamw-foreach", "clip": "value", "schedule": "plateau"},
    "Adam, scaler that skips": {"setup": "mlp", "family": "adam", "scale": 2.0**10, "infs": (5, 6, 40, 90)},
    "fused SGD with momentum, BatchNorm, channels last": {
        "setup": "cnn", "family": "sgd-momentum-fused", "channels_last": True,
    },
    "layers that thaw": {"setup": "lstm", "family": "adamw"},
    "gradients kept": {"setup": "mlp", "family": "adamw-fused", "zero": "before-zeros", "accumulate": 2},
    "moving average": {"setup": "mlp", "family": "adam-amsgrad-foreach", "average": True},
    "Muon": {"setup": "mlp", "family": "muon"},
    "Adafactor": {"setup": "transformer", "family": "adafactor-foreach"},
    "bfloat16": {"setup": "mlp", "family": "adamw-foreach", "dtype": torch.bfloat16},
    "load_state_dict in mid-run": {"setup": "mlp", "family": "nadam", "reload": 77},
    "spectral norm": {"setup": "gan", "family": "adam", "spectral": True},
    "registered": {"setup": "mlp", "family": "own-registered"},
}  # fmt: skip


@pytest.mark.parametrize("name", [*CASES, *(pytest.param(n, marks=pytest.mark.long) for n in MORE_CASES)])
@pytest.mark.sampled(2)
def test_the_shadow_holds_what_the_trainer_has_after_200_steps(
    name: str, attach: Callable[..., everstep.Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = {**CASES, **MORE_CASES}[name]
    monkeypatch.setenv("PYTHONPATH", str(Path(shadow_training.__file__).parent.parent / "exactness"), prepend=os.pathsep)
    t = build(**case, seed=SEED)
    run = attach(t, tmp_path / "run", base_interval=60)
    run.resume()
    for goal in (120, 230):
        while t.progress.batches < goal:
            turn(t)
            run.commit()
        run.flush()
        wait_until_held(run)
        must_hold(tmp_path / "run", run.step, everything(t), case)
    assert run.stats()["shadows"] == 1, "the same all the time"
    told = (folder_of(tmp_path / "run") / "shadow.log").read_text()
    assert "Error" not in told and "differs" not in told, told
    run.close()
    assert "folded" in {m.audit for m in manifests(tmp_path / "run").values()}


def wait_until_held(run: everstep.Run) -> None:
    wait_for(lambda: run.stats()["folded_step"] == run.step, f"for the shadow: {run.stats()}")


def train(t: Training, run: everstep.Run, batches: int) -> None:
    while t.progress.batches < batches:
        turn(t)
        run.commit()


@pytest.mark.long
def test_a_log_of_frames_above_4_mb_uses_the_same_few_files_again(memory: Path, tmp_path: Path) -> None:
    torch.manual_seed(SEED)
    model = nn.Sequential(nn.Linear(1100, 1100), nn.BatchNorm1d(1100))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    run = everstep.attach(model, optimizer, tmp_path / "run", mode="shadow", quiet=True, **OPTIONS)
    inodes: set[int] = set()
    most = files = 0
    try:
        run.resume()
        wait_for(lambda: run.stats()["folded_step"] == 0, "for the shadow")
        for n in range(100):
            model(torch.randn(4, 1100)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            run.commit()
            # No more than usual may be on the way: then no more memory than that is needed.
            wait_for(lambda: run.stats()["folded_step"] >= run.step - 2, "for the shadow")
            if n >= 10:
                log = folder_of(tmp_path / "run") / "log-0001-00000"
                found = []
                for file in log.iterdir():
                    with contextlib.suppress(FileNotFoundError):  # it has just got another name
                        found.append(file.stat())
                inodes |= {s.st_ino for s in found}
                most, files = max(most, sum(s.st_size for s in found)), max(files, len(found))
        run.flush()
        assert run.stats()["bytes_a_step"] > 4 << 20
        assert files <= 8
        assert most <= 8 * (6 << 20)
        assert len(inodes) <= 8, "90 segments, and few files"
        wait_for(lambda: run.stats()["folded_step"] == run.step)
        offer = recover.find(RunPath(tmp_path / "run"), RunPath(tmp_path / "run").read_run().run)
        assert offer is not None
        state = offer.fetch()
        held = {a.name: state.tensors[a.uid] for a in state.layout.atoms}
        offer.release()
        must_equal(held, {n: model.state_dict()[n] for n in held}, "the shadow's tensors")
        run.close()
    finally:
        if not run._closed:
            crash(run)


def test_steps_that_are_made_durable_in_batches_reach_the_shadow_all_the_same(
    attach: Callable[..., everstep.Run], tmp_path: Path
) -> None:
    t = build(**SMALL, seed=SEED)
    run = attach(t, tmp_path / "run", durability="batch", batch_steps=4)
    run.resume()
    train(t, run, 42)
    run.flush()
    wait_until_held(run)
    must_hold(tmp_path / "run", 42, everything(t), SMALL)


# ------------------------------------------------------------------------------------------ 2. the trainer is killed


def kill_often(program: Program, num_kills: int, batches: int, choose: random.Random) -> int:
    """Kill the trainer again and again at random moments; how many of the restarts took the shadow's state."""
    from_shadow = 0
    program.start(batches, "save")
    for n in range(num_kills):
        seen = program.last.get("batches", 0)
        goal = seen + choose.randint(1, (batches - seen) // (num_kills - n))
        # The first is killed early, before it has a shadow; from the second on there is one.
        program.wait_now(lambda line, n=n, goal=goal: line["batches"] >= goal and (n == 0 or line["folded_step"] >= 0))
        time.sleep(choose.uniform(0, 0.02))
        committed = program.kill()["step"]
        told = len(program.output())
        resumed = program.start(batches, "save")
        assert committed - 2 <= resumed <= committed + 1, f"{committed} was committed, resumed at {resumed}"
        from_shadow += "from the memory of its shadow" in program.output()[told:]
    program.wait_ended()
    return from_shadow


@pytest.mark.parametrize(
    "case", [SMALL, *(pytest.param(c, marks=pytest.mark.long) for c in (*CASES.values(), *MORE_CASES.values()))], ids=str
)
def test_a_run_whose_trainer_is_killed_ten_times_ends_as_if_it_never_was(
    case: dict[str, Any], program: Callable[..., Program]
) -> None:
    if case.get("dtype"):
        pytest.skip("not in JSON")
    made = program(case, pause_s=0.005, base_interval=30)
    from_shadow = kill_often(made, 10, 220, random.Random(str(case)))
    assert from_shadow >= 9, made.output()
    must_equal(made.result(), without_everstep(case, 220), "after 220 batches and 10 kills")
    status = status_of(made.run)
    assert status["generation"] == 11
    left = sorted(f.name for f in folder_of(made.run).glob("log-*/*"))
    assert len(left) <= 8, f"segments of the dead stay in memory: {left}"


def test_frames_that_come_before_the_shadow_has_heard_of_the_resume_are_not_lost(program: Callable[..., Program]) -> None:
    made = program()
    made.start(20)
    pid = made.wait_folded(20)["shadow_pid"]
    made.kill()
    for goal in (40, 60, 80):
        made.start(goal)
        os.kill(pid, signal.SIGSTOP)  # as if it were busy
        made.wait_now(lambda line, goal=goal: line["batches"] == goal)
        os.kill(pid, signal.SIGCONT)
        assert made.wait_folded(goal)["shadow_pid"] == pid
        must_hold(made.run, goal, without_everstep(SMALL, goal), SMALL)
        made.kill()


def test_a_connection_that_was_given_up_does_not_keep_the_next_trainer_out(program: Callable[..., Program]) -> None:
    made = program()
    made.start(10)
    pid = made.wait_folded(10)["shadow_pid"]
    made.kill()
    wait_for(lambda: not status_of(made.run)["trainer"])
    os.kill(pid, signal.SIGSTOP)
    run = RunPath(made.run).read_run().run
    for _ in range(3):
        stale = addresses.connect(f"unix://{folder_of(made.run)}/{SOCKET}")
        stale.sendall(encode(Hello(VERSION, run, str(made.run), 1, 2, 0, "train", {})))
        stale.close()
    os.kill(pid, signal.SIGCONT)
    assert made.start(20) == 10
    assert made.wait_folded(20)["shadow_pid"] == pid


def test_what_was_taken_from_a_shadow_does_not_change_when_the_shadow_goes_on(
    attach: Callable[..., everstep.Run], tmp_path: Path
) -> None:
    def make() -> Training:
        torch.manual_seed(SEED)
        first = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        first[3].requires_grad_(False)
        second = nn.ParameterList(nn.Parameter(torch.randn(16)) for _ in range(200))
        optimizers = {
            "often": torch.optim.AdamW(first.parameters(), lr=0.1), "seldom": torch.optim.Adam(second.parameters(), lr=0.1)
        }  # fmt: skip
        return Training({"first": first, "second": second}, optimizers, [], 1, shadow_training.plain_options())

    def learn(t: Training, *names: str) -> None:
        first, second = t.models["first"], t.models["second"]
        x = torch.randn(3, 8)
        for layer in first:
            x = layer(x).tanh()
        (x.sum() + torch.stack([p.square().sum() for p in second]).sum()).backward()
        for name in names:
            t.optimizers[name].step()
        for optimizer in t.optimizers.values():
            optimizer.zero_grad()

    t = make()
    run = attach(t, tmp_path / "run")
    run.resume()
    for _ in range(5):
        learn(t, "often", "seldom")
        run.commit()
    run.flush()
    wait_until_held(run)
    crash(run)
    t = make()
    run = attach(t, tmp_path / "run")
    assert run.resume() == 5
    before = everything(t)["optimizers"]["seldom"]
    t.models["first"][3].requires_grad_(True)  # new moments: the shadow's memory is filled anew
    for _ in range(5):
        learn(t, "often")
        run.commit()
        run.flush()
        wait_until_held(run)
        offer = recover.find(RunPath(run.path), run._opened.run)
        assert offer is not None and offer.step == run.step
        offer.release()
    must_equal(everything(t)["optimizers"]["seldom"], before, "an optimizer that did not step")
    assert run.stats()["hidden_edits"] == 0


# ------------------------------------------------------------------------------------------ 3. the shadow is killed


def test_training_goes_on_without_its_shadow_and_a_new_one_takes_over(program: Callable[..., Program]) -> None:
    made = program(pause_s=0.01)
    made.start(30)
    pid = made.wait_folded(30)["shadow_pid"]
    os.kill(pid, signal.SIGSTOP)  # so that it dies with frames that it has not seen
    made.order(40)
    made.wait_now(lambda line: line["batches"] == 40)
    made.hold.touch()
    kill(pid)
    made.order(60)
    lost = made.wait_now(lambda line: line["batches"] == 60)
    assert 30 <= lost["unprotected_since"] < 60 and lost["shadow_pid"] is None
    made.hold.unlink()
    made.order(400)
    found = made.wait_now(lambda line: line["unprotected_since"] is None and line["folded_step"] > lost["step"])
    made.order(found["batches"] + 20)
    last = made.wait_folded(found["batches"] + 20)
    alone = sorted({n["step"] for n in made.read() if "batches" in n and n["shadow_pid"] is None and n["step"] > 40})
    assert len(alone) > 5 and alone == list(range(alone[0], alone[-1] + 1)), "steps went on being committed"
    assert last["shadows"] == 2 and last["shadow_pid"] != pid
    assert "UnprotectedWarning" in made.output() and f"pid {pid}) died" in made.output()
    assert "protected again" in made.output()
    arenas = list(folder_of(made.run).glob("state-*"))
    assert len(arenas) <= 2 and not any(str(pid) in a.name for a in arenas), f"the dead shadow's memory is left: {arenas}"
    committed = made.kill()["step"]
    assert made.start(last["batches"] + 1, "save") == committed == last["step"]
    made.wait_ended()
    must_equal(made.result(), without_everstep(SMALL, last["batches"] + 1), "going on from what the new shadow held")
    assert "from the memory of its shadow" in made.output()


def test_with_the_log_on_disk_no_step_that_the_shadow_called_durable_is_lost_with_it(
    program: Callable[..., Program], memory: Path
) -> None:
    case = {"setup": "mlp", "family": "adamw-foreach"}
    made = program(case, pause_s=0.003, log="disk")
    durable = 0
    for goal in (60, 120):
        assert made.start(goal) >= durable, f"step {durable} was durable"
        made.wait_folded(goal)
        made.order(goal + 500)
        made.wait_now(lambda line, goal=goal: line["batches"] > goal + 5)
        durable = status_of(made.run)["durable"]
        assert durable >= goal
        kill(made.last["shadow_pid"])
        made.kill()
        for pid in shadows_in(memory):
            kill(pid)
    shutil.rmtree(folder_of(made.run))  # the host is lost
    resumed = made.start(0)
    assert resumed >= durable, f"step {durable} was durable"
    made.order(resumed + 1, "save")
    made.wait_ended()
    must_equal(made.result(), without_everstep(case, resumed + 1), f"going on from step {resumed}, from disk")
    assert max(manifests(made.run)) < 20, "all that was not in a base came from the log"


def test_with_the_log_on_disk_a_run_that_closes_before_its_shadow_is_up_keeps_every_step(
    attach: Callable[..., everstep.Run], tmp_path: Path
) -> None:
    t = build(**SMALL, seed=SEED)
    run = attach(t, tmp_path / "run", log="disk", base_interval=20)
    run.resume()
    train(t, run, 30)
    run.close()
    assert everstep.open(tmp_path / "run").steps == list(range(31))


@pytest.mark.long
def test_a_run_whose_shadows_cannot_live_goes_on_without_and_says_why(
    attach: Callable[..., everstep.Run], tmp_path: Path
) -> None:
    case = {"setup": "mlp", "family": "own-registered"}  # of a module that the shadow cannot import
    t = build(**case, seed=SEED)
    run = attach(t, tmp_path / "run", base_interval=20)
    run.resume()
    with pytest.warns(UnprotectedWarning, match="(?s)going on without.*models") as told:
        deadline = time.monotonic() + 60
        while not told.list and time.monotonic() < deadline:
            train(t, run, t.progress.batches + 1)
            time.sleep(0.05)
    last = t.progress.batches + 30
    train(t, run, last)
    run.flush()
    assert run.stats()["base_step"] > 0, "bases come from the trainer"
    crash(run)
    t = build(**case, seed=SEED - 1)
    run = attach(t, tmp_path / "run")
    assert run.resume() == last
    train(t, run, last + 1)
    must_equal(everything(t), without_everstep(case, last + 1), "going on from disk")


# ------------------------------------------------------------------------------------------ 4. the shadow is slow


LARGER = {"setup": "mlp", "family": "adamw-fused", "size": 8}
"""About 160 KB a frame: a segment in memory is full after some 25 steps."""


def test_while_the_shadow_stands_still_the_log_goes_to_disk_and_memory_is_bounded(program: Callable[..., Program]) -> None:
    made = program(LARGER, max_lag_bytes=6 << 20)
    made.start(20)
    pid = made.wait_folded(20)["shadow_pid"]
    os.kill(pid, signal.SIGSTOP)
    made.order(150)
    last = made.wait_now(lambda line: line["batches"] == 150)
    assert last["spilled_steps"] > 50
    assert used_bytes(folder_of(made.run), "log-*/*") <= (6 << 20) + 3 * (shared.SEGMENT_BYTES + (2 << 20))
    os.kill(pid, signal.SIGCONT)
    made.pause_s = 0.005
    made.wait_now(lambda line: line["folded_step"] == 150)
    made.order(170)
    assert made.wait_folded(170)["shadow_pid"] == pid
    must_hold(made.run, 170, without_everstep(LARGER, 170), LARGER)
    back = made.last["spilled_steps"]
    made.order(190)
    assert made.wait_folded(190)["spilled_steps"] == back, "the log is in memory again"
    assert "has caught up" in made.output()

    os.kill(pid, signal.SIGSTOP)
    made.order(300)
    assert made.wait_now(lambda line: line["batches"] == 300)["spilled_steps"] > back
    made.kill()
    os.kill(pid, signal.SIGCONT)
    assert 296 <= made.start(310, "save") <= 300  # at most max_inflight_steps had not been written
    made.wait_ended()
    must_equal(made.result(), without_everstep(LARGER, 310), "from a log partly on disk")


def test_a_trainer_that_rather_waits_stalls_until_the_shadow_goes_on(program: Callable[..., Program]) -> None:
    made = program(LARGER, max_lag_bytes=6 << 20, on_lag="wait")
    made.start(20)
    pid = made.wait_folded(20)["shadow_pid"]
    os.kill(pid, signal.SIGSTOP)
    made.order(200)
    before = -1
    while made.last["step"] != before:
        before = made.last["step"]
        time.sleep(1.0)
    assert before < 100, "it stands still"
    os.kill(pid, signal.SIGCONT)
    last = made.wait_folded(200)
    assert last["stall_s"] > 0.5 and last["spilled_steps"] == 0
    must_hold(made.run, 200, without_everstep(LARGER, 200), LARGER)


# ------------------------------------------------------------------------------------------ 5. both are killed


def test_when_both_are_killed_the_run_goes_on_from_disk_and_what_is_left_in_memory(program: Callable[..., Program]) -> None:
    made = program(base_interval=25)
    made.start(60)
    last = made.wait_folded(60)
    wait_for(lambda: status_of(made.run)["base"] > 0, "for a base")
    kill(made.pid)
    kill(last["shadow_pid"])
    assert made.start(80) == 60, "frames in memory outlive both"
    assert "from the memory of its shadow" not in made.output()
    made.wait_folded(80)
    newest = max(manifests(made.run))
    kill(made.pid)
    kill(made.last["shadow_pid"])
    shutil.rmtree(folder_of(made.run))  # the host is lost
    resumed = made.start(100, "save")
    assert resumed in (newest, max(manifests(made.run)))
    made.wait_ended()
    must_equal(made.result(), without_everstep(SMALL, 100), "after the loss of the host")


@pytest.mark.parametrize("mode", ["delta", "snapshot"])
def test_a_mode_without_a_shadow_brings_what_is_left_in_memory_to_disk_before_it_stands_on_it(
    program: Callable[..., Program], mode: str
) -> None:
    made = program()
    made.hold.touch()  # no shadow ever comes: its frames are in memory, and a base of step 0 on disk
    made.start(20)
    made.wait_now(lambda line: line["batches"] == 20 and line["durable_step"] == 20)
    made.kill()
    assert made.start(30, mode=mode) == 20
    made.wait_now(lambda line: line["batches"] == 30 and line["durable_step"] == 30)
    wait_for(lambda: not folder_of(made.run).exists(), "for what is in memory to go: nobody else removes it")
    made.kill()
    assert made.start(40, "save", mode=mode) == 30
    made.wait_ended()
    must_equal(made.result(), without_everstep(SMALL, 40), "after the loss of the memory")
    assert everstep.open(made.run).verify().ok


# ------------------------------------------------------------------------------------------ 6. who may not


def test_strangers_second_trainers_and_the_dead_are_refused(program: Callable[..., Program]) -> None:
    made = program()
    made.start(10)
    pid = made.wait_folded(10)["shadow_pid"]
    t = build(**SMALL, seed=1)
    for mode in ("shadow", "delta"):
        with pytest.raises(RunBusyError):
            everstep.attach(t.model, t.optimizer, made.run, extras=t.extras, mode=mode, quiet=True)
    run = RunPath(made.run).read_run().run

    def hello(who: str, generation: int, purpose: str) -> None:
        with Channel(addresses.connect(f"unix://{folder_of(made.run)}/{SOCKET}"), no_payload) as channel:
            sockets.introduce(channel, Hello(VERSION, who, str(made.run), 1, generation, 0, purpose, {}))  # type: ignore

    for purpose in ("train", "fetch", "status"):
        with pytest.raises(LinkRefused, match=run):
            hello("f" * 32, 1, purpose)
    with pytest.raises(LinkRefused, match="another trainer"):
        hello(run, 1, "train")
    with pytest.raises(LinkRefused, match="superseded"):
        hello(run, 0, "train")
    made.order(20)
    assert made.wait_folded(20)["shadow_pid"] == pid, "and training went on"


def test_a_shadow_of_an_older_generation_is_not_used(program: Callable[..., Program]) -> None:
    made = program(base_interval=25)
    made.start(60)
    pid = made.wait_folded(60)["shadow_pid"]
    wait_for(lambda: status_of(made.run)["base"] > 0, "for a base")
    made.order(65)
    made.wait_folded(65)
    made.kill()
    os.kill(pid, signal.SIGSTOP)
    folder = folder_of(made.run)
    os.rename(folder, f"{folder}.away")  # socket, lock and log: as if it were on another host
    assert made.start(70) == max(manifests(made.run)) < 65, "from the last base"
    assert made.wait_folded(70)["shadow_pid"] != pid
    other = made.last["shadow_pid"]
    made.kill()
    kill(other)
    shutil.rmtree(folder)
    os.rename(f"{folder}.away", folder)
    os.kill(pid, signal.SIGCONT)
    told = len(made.output())
    resumed = made.start(90, "save")
    assert resumed <= 70 and "stale" in made.output()[told:]
    made.wait_ended()
    must_equal(made.result(), without_everstep(SMALL, 90), "not from the stale shadow")


# ------------------------------------------------------------------------------------------ 7. the end


def test_close_ends_the_shadow_and_leaves_a_base_and_no_memory(program: Callable[..., Program], memory: Path) -> None:
    made = program()
    made.start(10)
    made.wait_folded(10)
    made.kill()
    made.start(25)  # the shadow is not this trainer's child
    pid = made.wait_folded(25)["shadow_pid"]
    folder = folder_of(made.run)
    made.order(30, "close")
    made.wait_gone()
    wait_for(lambda: not alive(pid), "for the shadow to end")
    assert not folder.exists() and used_bytes(memory) == 0
    assert max(manifests(made.run)) == 30
    must_equal(made.result(), without_everstep(SMALL, 30), "closed")
    assert everstep.open(made.run).verify().ok
    assert made.start(31, "save") == 30


def test_closing_before_the_shadow_is_there_leaves_nothing_behind(
    attach: Callable[..., everstep.Run], memory: Path, tmp_path: Path
) -> None:
    t = build(**SMALL, seed=SEED)
    run = attach(t, tmp_path / "run")
    run.resume()
    train(t, run, 3)
    run.close()
    assert shadows_in(memory) == []
    assert used_bytes(memory) == 0
    assert max(manifests(tmp_path / "run")) == 3


def test_a_shadow_that_is_left_alone_leaves_a_base_at_its_last_step_and_ends(
    program: Callable[..., Program], memory: Path
) -> None:
    made = program(shadow_idle_s=1.0)
    made.start(33)
    pid = made.wait_folded(33)["shadow_pid"]
    step = made.kill()["step"]
    wait_for(lambda: not alive(pid), "for the shadow to end")
    found = manifests(made.run)
    assert max(found) == step
    assert found[step].audit == "folded"
    assert used_bytes(memory, "**/*.frames") == 0, "what is on disk is not kept in memory"
    assert made.start(40, "save") == step
    made.wait_ended()
    must_equal(made.result(), without_everstep(SMALL, 40), "from the base that was left")


def test_the_shadow_follows_a_fork_and_ends_when_the_run_goes_on_without_one(program: Callable[..., Program]) -> None:
    made = program(base_interval=20)
    made.start(30)
    pid = made.wait_folded(30)["shadow_pid"]
    made.order(70)
    made.wait_folded(70)
    older = min(n for n in manifests(made.run) if n)
    assert older < 70
    made.kill()
    assert made.start(older + 10, resume=older) == older
    last = made.wait_folded(older + 10)
    assert last["shadow_pid"] == pid, "the same shadow"
    must_hold(made.run, older + 10, without_everstep(SMALL, older + 10), SMALL)
    assert status_of(made.run)["timeline"] == 2
    made.kill()
    told = len(made.output())
    assert made.start(older + 20, "save", mode="delta") == older + 10
    assert f"from the memory of its shadow, pid {pid}" in made.output()[told:]
    made.wait_ended()
    must_equal(made.result(), without_everstep(SMALL, older + 20), "without a shadow")
    wait_for(lambda: not alive(pid), "for the shadow to end")
    made.kill()
    assert made.start(older + 21, "save", mode="delta") == older + 20, "from disk"


# ------------------------------------------------------------------------------------------ 9. nobody else's business


def test_only_the_owner_can_open_what_is_in_memory(attach: Callable[..., everstep.Run], tmp_path: Path) -> None:
    t = build(**SMALL, seed=SEED)
    run = attach(t, tmp_path / "run")
    run.resume()
    train(t, run, 3)
    wait_until_held(run)
    folder = folder_of(tmp_path / "run")
    assert stat.S_IMODE((folder / SOCKET).stat().st_mode) == 0o600
    for each in (folder, folder.parent, *(f for f in folder.iterdir() if f.is_dir())):
        assert stat.S_IMODE(each.stat().st_mode) == 0o700, each
    for file in folder.rglob("*"):
        if file.is_file() and (file.suffix == ".frames" or file.name.startswith("state-")):
            assert stat.S_IMODE(file.stat().st_mode) == 0o600, file
    run.close()


@pytest.mark.parametrize("what", ["readable by others", "a link", "a file"])
def test_a_folder_in_the_way_is_refused(
    what: str, attach: Callable[..., everstep.Run], memory: Path, tmp_path: Path
) -> None:
    place = memory / f"everstep-{os.getuid()}"
    if what == "readable by others":
        place.mkdir()
        place.chmod(0o755)
    elif what == "a link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        place.symlink_to(tmp_path / "elsewhere")
    else:
        place.write_text("")
    t = build(**SMALL, seed=SEED)
    run = attach(t, tmp_path / "run")
    with pytest.raises(UsageError, match="EVERSTEP_SHARED"):
        run.resume()
    assert shadows_in(memory) == []


def test_a_place_whose_name_is_too_long_for_a_socket_is_refused(
    attach: Callable[..., everstep.Run], memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = memory / ("d" * 80)
    deep.mkdir()
    monkeypatch.setenv("EVERSTEP_SHARED", str(deep))
    t = build(**SMALL, seed=SEED)
    with pytest.raises(UsageError, match="long"):
        attach(t, tmp_path / "run").resume()


def test_a_shadow_that_is_told_to_end_ends_even_if_it_can_leave_no_base(
    attach: Callable[..., everstep.Run], tmp_path: Path
) -> None:
    t = build(**SMALL, seed=SEED)
    run = attach(t, tmp_path / "run")
    run.resume()
    train(t, run, 5)
    run.flush()
    wait_until_held(run)
    pid = run.stats()["shadow_pid"]
    crash(run)
    shutil.rmtree(tmp_path / "run")
    os.kill(pid, signal.SIGTERM)
    wait_for(lambda: not alive(pid), "for the shadow to end")
