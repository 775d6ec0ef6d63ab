"""Running a Training without Everstep, and with it through crashes, and comparing everything."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from models import Training

import everstep
from everstep.errors import HiddenEditWarning, InexactWarning
from support import crash, equal

Build = Callable[[int], Training]
SEED = 1234
TORCHS_OWN = "Sparse invariant checks are implicitly disabled"


# ------------------------------------------------------------------------------------------ everything


def copied(value: Any) -> Any:
    """A deep copy with the keys of plain dicts sorted: their order means nothing."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, np.ndarray):
        return value.copy()
    if type(value) is dict:
        return {k: copied(value[k]) for k in sorted(value, key=lambda k: (str(type(k)), k))}
    if isinstance(value, dict):
        return type(value)(value)
    if isinstance(value, (list, tuple)):
        return type(value)([copied(v) for v in value])
    return value


def random_states() -> dict[str, Any]:
    version, words, gauss = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(),
        "random": [version, np.array(words, np.uint64), gauss],
    }


def everything(t: Training) -> dict[str, Any]:
    """All that the next turns of the loop depend on, copied."""
    models, names = {}, {}
    for key, model in t.models.items():
        params = dict(model.named_parameters(remove_duplicate=False))
        names.update({id(p): f"{key}.{n}" for n, p in reversed(params.items())})
        models[key] = {
            "params": params,
            "requires_grad": {n: p.requires_grad for n, p in params.items()},
            "grads": {n: p.grad for n, p in params.items()},
            "strides": {n: p.stride() for n, p in params.items()},
            "buffers": dict(model.named_buffers(remove_duplicate=False)),
            "training": model.training,
        }
    names.update({id(p): name for name, p in t.loose.items()})
    models["loose"] = {name: [p, p.grad] for name, p in t.loose.items()}
    optimizers = {}
    for key, optimizer in t.optimizers.items():
        optimizers[key] = {
            "state": {names[id(p)]: values for p, values in optimizer.state.items()},
            "groups": [{**g, "params": [names[id(p)] for p in g["params"]]} for g in optimizer.param_groups],
            "state_dict": optimizer.state_dict(),
        }
    extras = {name: extra.state_dict() for name, extra in t.extras.items()}
    return copied({"models": models, "optimizers": optimizers, "extras": extras, "random": random_states()})


def public(t: Training) -> dict[str, Any]:
    """What History.state should return for this moment."""
    plain = {key: getattr(model, "_orig_mod", model) for key, model in t.models.items()}
    names = {id(p): n for m in plain.values() for n, p in m.named_parameters()} | {id(p): n for n, p in t.loose.items()}
    models = {key: dict(model.state_dict()) for key, model in plain.items()}
    optimizers = {
        key: {
            "state": {names[id(p)]: values for p, values in o.state.items()},
            "param_groups": [{**g, "params": [names[id(p)] for p in g["params"]]} for g in o.param_groups],
        }
        for key, o in t.optimizers.items()
    }
    state = {
        "model": models["model"] if list(models) == ["model"] else models,
        "optimizer": optimizers["optimizer"] if list(optimizers) == ["optimizer"] else optimizers,
        "extras": {name: extra.state_dict() for name, extra in t.extras.items()},
    }
    return copied(state)


def must_equal(got: Any, expected: Any, what: str) -> None:
    """Fail with the first differences in type, value or bits."""
    differences = equal(expected, got)
    assert not differences, f"{what}: {len(differences)} differences (expected / got):\n" + "\n".join(differences[:12])


# ------------------------------------------------------------------------------------------ without Everstep


@dataclass
class Truth:
    """An uninterrupted run that never used Everstep."""

    after: dict[int, dict[str, Any]] = field(default_factory=dict)
    """By number of batches: everything at the end of that turn."""
    public: dict[int, dict[str, Any]] = field(default_factory=dict)
    turns: list[tuple[int, tuple[int, ...], float]] = field(default_factory=list)
    end: dict[str, Any] = field(default_factory=dict)
    """Everything after the loop."""


def run_plainly(build: Build, style: str = "nested") -> Truth:
    """The loop as it is without Everstep."""
    t = build(SEED)
    truth = Truth(public={0: public(t)})

    def note() -> None:
        truth.after[t.progress.batches] = everything(t)
        truth.public[t.progress.batches] = public(t)

    if style == "hand":
        for n in range(hand_steps(t)):
            t.turn(hand_batch(t, n))
            note()
    else:
        for epoch in range(t.epochs):
            if t.options.num_workers:
                t.loader.dataset.set_epoch(epoch)  # type: ignore[attr-defined]
            for batch in t.loader:
                t.turn(batch)
                note()
                if style == "broken" and t.progress.batches % 3 == 0:
                    break
            if style != "flat":
                t.end_epoch()
            if style == "broken":
                # Nobody can tell that the loop was left before the next pass begins: its last step ends there.
                truth.public[t.progress.batches] = public(t)
    truth.turns = t.turns
    truth.end = everything(t)
    return truth


def hand_steps(t: Training) -> int:
    return t.epochs * len(t.loader)


def hand_batch(t: Training, n: int) -> Any:
    """Batch n of a loop that needs no loader: its indices follow from n."""
    size = t.loader.batch_size or 1
    order = np.random.default_rng(n).permutation(len(t.loader.dataset))[:size]  # type: ignore[arg-type]
    return torch.utils.data.default_collate([t.loader.dataset[int(i)] for i in order])


# ------------------------------------------------------------------------------------------ with Everstep


class Killed(BaseException):
    """Raised where a kill would have ended the process."""


@dataclass(frozen=True)
class Kill:
    """End the process in the turn of this batch: at its `count`-th moment of this kind."""

    batch: int
    moment: str = "end"
    count: int = 1


def _arm(t: Training, kill: Kill | None) -> None:
    if kill is None:
        return
    left = kill.count

    def moment(what: str) -> None:
        nonlocal left
        batch = t.progress.batches + (what == "fetched")
        # A turn that has no such moment ends the process at its end.
        if batch == kill.batch and what in (kill.moment, "end"):
            left -= 1
            if left <= 0 or what == "end":
                raise Killed

    t.moment = moment


def loop(t: Training, run: everstep.Run, style: str) -> Iterator[None]:
    """The user's program; yields after each turn."""
    if style == "hand":
        first = run.step if run._resumed is not None else run.resume()
        for n in range(first, hand_steps(t)):
            t.turn(hand_batch(t, n))
            yield
            run.commit()
    elif style == "flat":
        for batch in run.steps(t.loader, epochs=t.epochs):
            t.turn(batch)
            yield
    else:
        for _ in range(t.epochs):
            for batch in run.steps(t.loader):
                t.turn(batch)
                yield
                if style == "broken" and t.progress.batches % 3 == 0:
                    break
            t.end_epoch()


def run_through(
    build: Build, path: Path, truth: Truth, kills: list[Kill | None], *, style: str = "nested", **options: Any
) -> list[Any]:
    """Train with a kill in each process but the last, in fresh objects each time; compare with the plain run.

    Data and losses are compared in every turn, everything in the first turns of each process, in every fourth and at the
    end. Returns the warnings that Everstep gave.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        committed = 0
        for generation, kill in enumerate([*kills, None]):
            t = build(SEED if generation == 0 else SEED + 17 * generation)
            committed = _one_process(t, path, truth, kill, committed, style, options)
            if kill is None:
                must_equal(everything(t), truth.end, "after the loop")
    # A weight that reaches the clamp of a WGAN for the first time late in the run is reported.
    usual = (InexactWarning, HiddenEditWarning) if t.options.clamp else InexactWarning
    strange = [w for w in caught if not issubclass(w.category, usual) and TORCHS_OWN not in str(w.message)]
    assert not strange, f"unexpected warnings: {[str(w.message) for w in strange]}"
    return caught


def _one_process(
    t: Training, path: Path, truth: Truth, kill: Kill | None, committed: int, style: str, options: dict[str, Any]
) -> int:
    """Returns the step at the end."""
    _arm(t, kill)
    turns = {n: (indices, loss) for n, indices, loss in truth.turns}
    run = everstep.attach(t.model, t.optimizer, path, extras=t.extras, **{"quiet": True, **options})
    program = loop(t, run, style)
    first = True
    try:
        for _ in program:
            n, indices, loss = t.turns[-1]
            if first:
                may_lose = run._options.batch_steps if run._options.durability == "batch" else 0
                resumed = run.stats()["resumed_step"]
                assert committed - may_lose <= resumed <= committed, f"step {committed} was committed, {resumed} is there"
                first = False
            must_equal((indices, loss), turns[n], f"data and loss of batch {n}")
            if len(t.turns) <= 2 or n % 4 == 0:
                must_equal(everything(t), truth.after[n], f"after batch {n}")
        assert kill is None, f"the loop ended before {kill}"
        step = run.step
        run.close()
    except Killed:
        step = run.step
    finally:
        if not run._closed:
            crash(run)
        program.close()
    return step


def must_have_history(path: Path, truth: Truth, build: Build, choose: random.Random, *, offline: bool = True) -> None:
    """Some of the steps that can be restored are what the plain run had; `offline`: also without live objects."""
    history = everstep.open(path)
    steps = history.steps
    assert steps == list(range(steps[0], steps[-1] + 1))
    for n in {choose.choice(steps), steps[-1]} if offline else ():
        state = history.state(n)
        batches = state["extras"]["progress"]["batches"]
        must_equal(copied(state), truth.public[batches], f"state({n})")
    t = build(SEED - 1)
    n = choose.choice(steps)
    before = random_states()
    assert history.restore(t.model, t.optimizer, n, extras=t.extras) == n
    must_equal(random_states(), before, "random states, which History.restore leaves alone")
    must_equal(public(t), truth.public[t.progress.batches], f"restore({n})")
