"""`everstep bench`: the numbers of this machine. Every verb measures and then tells, by `_measured`."""

from __future__ import annotations

import contextlib
import itertools
import os
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from everstep.cli.output import Json, Table, Told, megabytes, print_json, print_shown

if TYPE_CHECKING:
    from everstep.bench.workloads import Workload

app = typer.Typer(help="Measure on this machine.", no_args_is_help=True)

Folder = Annotated[
    str | None, typer.Option("--dir", help="Folder to write runs in; without it the temporary one.", show_default=False)
]
Markdown = Annotated[bool, typer.Option("--markdown", help="Print tables as Markdown.")]
Quick = Annotated[bool, typer.Option("--quick", help="A tiny model and few blocks: to see that it works.")]
Frames = Annotated[int, typer.Option(min=1, help="Steps to replay.")]
Repetitions = Annotated[int, typer.Option(min=1)]

Found = dict[str, Any]
Shown = Iterable[Table | str]


def _measured(
    benchmark: str, measure: Callable[[str, Told], Found], show: Callable[[Found], Shown], *, folder: str | None, json: bool,
    markdown: bool,
) -> None:  # fmt: skip
    """Measure in this folder, with progress on stderr; tell what was found and on which machine, as it was before."""
    from everstep.bench import machine

    place = _folder(folder)
    found = {"benchmark": benchmark, "machine": machine.facts(place)}
    with Told() as told:
        found |= measure(place, told)
    if json:
        print_json(found)
    else:
        print_shown([_machine(found), *show(found)], markdown=markdown)


@app.command("overhead")
def overhead(
    tokens: Annotated[
        list[int] | None, typer.Option(help="Tokens a step; may be given again; without it 1024.", show_default=False)
    ] = None,
    threads: Annotated[
        list[int] | None,
        typer.Option(help="Training threads; may be given again; without it 1 and as many as cores.", show_default=False),
    ] = None,
    pairs: Annotated[int, typer.Option(min=1, help="Pairs of two blocks with and two without.")] = 20,
    block_steps: Annotated[
        int | None, typer.Option(min=1, help="Steps a block; without it as many as take 8 s.", show_default=False)
    ] = None,
    base_interval: Annotated[
        int | None, typer.Option(min=1, help="Steps between bases; without it four in each half.", show_default=False)
    ] = None,
    peers: Annotated[bool, typer.Option(help="Also measure torch.save and DCP async_save at every step.")] = True,
    mode: Annotated[str, typer.Option(help="delta, shadow or snapshot.")] = "delta",
    pool: Annotated[str, typer.Option(help="With --mode snapshot: a folder for the pool; without it the run's own.")] = "",
    interval: Annotated[
        int, typer.Option(min=0, help="With --mode snapshot: steps between stored states; 0: as Everstep chooses.")
    ] = 1,
    tcp: Annotated[bool, typer.Option("--tcp", help="With --mode shadow: a shadow behind TCP on loopback.")] = False,
    early: Annotated[bool, typer.Option("--early", help="Gradients are handed over during backward.")] = False,
    codec: Annotated[
        str, typer.Option(help="Compress gradients, with and without Everstep: none, topk, quantize, fp16, bf16.")
    ] = "none",
    rss: Annotated[bool, typer.Option("--rss", help="Measure the growth of memory instead.")] = False,
    quick: Quick = False,
    folder: Folder = None,
    json: Json = False,
    markdown: Markdown = False,
) -> None:
    """Time of training with every step saved over time without."""
    from everstep.bench import hosts, machine
    from everstep.bench import overhead as bench
    from everstep.bench.workloads import CODECS

    if codec not in CODECS:
        raise typer.BadParameter(f"--codec must be one of {', '.join(CODECS)}, not {codec!r}")
    counts = _threads(threads, machine.num_cores())
    pool = _folder(pool, "--pool") if pool else ""

    def measure(place: str, told: Told) -> Found:
        measurements = []
        with hosts.tcp_shadow(place, base_interval or 200) if tcp else contextlib.nullcontext("") as address:
            for num_threads, count in itertools.product(counts, tokens or [1024]):
                settings = bench.Settings(
                    workload=_workload(count, quick), num_threads=num_threads,
                    num_pairs=min(pairs, 4) if quick else pairs, block_steps=block_steps or (4 if quick else None),
                    base_interval=base_interval or (32 if quick else None),
                    num_peer_pairs=(1 if quick else 3) if peers else 0, folder=place,
                    wait_for_follower=not quick, mode=mode, shadow=address, early=early, codec=codec,
                    pool=pool, snapshot_interval=interval or None,
                )  # fmt: skip
                if rss:
                    last = 120 if quick else 500
                    measured = bench.measure_rss(settings, first_step=last // 5, last_step=last, progress=told)
                else:
                    measured = bench.measure(settings, told)
                measurements.append(measured)
        return {"measurements": measurements}

    show = _show_rss if rss else _show_overhead
    _measured("overhead", measure, show, folder=folder, json=json, markdown=markdown)


@app.command("tune")
def tune_(
    tokens: Annotated[int, typer.Option(min=1, help="Tokens a step.")] = 1024,
    threads: Annotated[int, typer.Option(min=1, help="Training threads.")] = 1,
    pairs: Annotated[int, typer.Option(min=1, help="Pairs of two blocks with and two without.")] = 20,
    base_interval: Annotated[int, typer.Option(min=4, help="Steps between bases.")] = 40,
    codec: Annotated[str, typer.Option(help="Compress gradients: none, topk, quantize, fp16, bf16.")] = "none",
    quick: Quick = False,
    folder: Folder = None,
    json: Json = False,
    markdown: Markdown = False,
) -> None:
    """What the tuner's model predicts of overhead and recovery, against what is measured."""
    from everstep.bench import overhead as bench
    from everstep.bench import tune as prediction
    from everstep.bench.workloads import CODECS

    if codec not in CODECS:
        raise typer.BadParameter(f"--codec must be one of {', '.join(CODECS)}, not {codec!r}")

    def measure(place: str, told: Told) -> Found:
        settings = bench.Settings(
            workload=_workload(tokens, quick), num_threads=threads, num_pairs=min(pairs, 2) if quick else pairs,
            block_steps=4 if quick else None, base_interval=8 if quick else base_interval, num_peer_pairs=0, folder=place,
            wait_for_follower=not quick, codec=codec,
        )  # fmt: skip
        return prediction.measure(settings, told)

    _measured("tune", measure, _show_tune, folder=folder, json=json, markdown=markdown)


@app.command("frames")
def frames_(
    steps: Annotated[int, typer.Option(min=1, help="Frames that are measured, for each way to compress.")] = 4,
    quick: Quick = False,
    folder: Folder = None,
    json: Json = False,
    markdown: Markdown = False,
) -> None:
    """Bytes of a frame, by how gradients are compressed, against the full state."""
    from everstep.bench import frames as bench

    def measure(place: str, told: Told) -> Found:
        return bench.measure(_workload(256, quick), num_steps=steps, folder=place, progress=told)

    _measured("frames", measure, _show_frames, folder=folder, json=json, markdown=markdown)


@app.command("restore")
def restore(
    tokens: Annotated[int, typer.Option(min=1, help="Tokens a step of the run that is restored.")] = 256,
    frames: Frames = 48,
    repetitions: Repetitions = 5,
    peers: Annotated[bool, typer.Option(help="Also measure torch.load and DCP load of the same state.")] = True,
    quick: Quick = False,
    folder: Folder = None,
    json: Json = False,
    markdown: Markdown = False,
) -> None:
    """Time to restore a step over that of the reading and the arithmetic it takes."""
    from everstep.bench import restore as bench

    def measure(place: str, told: Told) -> Found:
        settings = bench.Settings(
            workload=_workload(tokens, quick), num_frames=min(frames, 6) if quick else frames,
            num_repetitions=min(repetitions, 2) if quick else repetitions, folder=place, peers=peers,
        )  # fmt: skip
        return bench.measure(settings, told)

    _measured("restore", measure, _show_restore, folder=folder, json=json, markdown=markdown)


@app.command("recover")
def recover_(
    repetitions: Annotated[int, typer.Option(min=1, help="Kills for each way to recover.")] = 5,
    quick: Quick = False,
    folder: Folder = None,
    json: Json = False,
    markdown: Markdown = False,
) -> None:
    """From SIGKILL of a trainer to its next step: from its shadow's memory, a pool, the log, by torch.load, by DCP."""
    from everstep.bench import recover as bench

    def measure(place: str, told: Told) -> Found:
        return bench.measure(
            _workload(256, quick), num_repetitions=2 if quick else repetitions, folder=place, progress=told
        )

    _measured("recover", measure, _show_recover, folder=folder, json=json, markdown=markdown)


@app.command("failures")
def failures_(
    failure: Annotated[
        list[str] | None,
        typer.Option(help="One of the table's; may be given again; without it all.", show_default=False),
    ] = None,
    repetitions: Annotated[int, typer.Option(min=1, help="Of each failure.")] = 3,
    quick: Quick = False,
    folder: Folder = None,
    json: Json = False,
    markdown: Markdown = False,
) -> None:
    """What failures cost a run with a shadow: its longest step, seconds until all is as before, steps lost."""
    from everstep.bench import failures as bench

    names = _some("--failure", failure, bench.FAILURES)

    def measure(place: str, told: Told) -> Found:
        return bench.measure(
            _workload(256, quick), names=names, num_repetitions=1 if quick else repetitions, folder=place, progress=told
        )

    _measured("failures", measure, _show_failures, folder=folder, json=json, markdown=markdown)


@app.command("reshard")
def reshard(
    source: Annotated[int, typer.Option(min=1, help="Ranks that write the run.")] = 2,
    targets: Annotated[
        list[int] | None,
        typer.Option("--target", help="Ranks that load it; may be given again; without it 4 and 1.", show_default=False),
    ] = None,
    frames: Frames = 8,
    repetitions: Repetitions = 5,
    peers: Annotated[bool, typer.Option(help="Also measure DCP's load of the same state.")] = True,
    quick: Quick = False,
    folder: Folder = None,
    json: Json = False,
    markdown: Markdown = False,
) -> None:
    """Time to load a run under another number of ranks (FSDP2) over that of one that so many ranks wrote."""
    from everstep.bench import reshard as bench

    def measure(place: str, told: Told) -> Found:
        settings = bench.Settings(
            workload=_workload(256, quick), source=source, targets=tuple(targets or (4, 1)),
            num_frames=min(frames, 3) if quick else frames, num_repetitions=1 if quick else repetitions, folder=place,
            peers=peers,
        )  # fmt: skip
        return bench.measure(settings, told)

    _measured("reshard", measure, _show_reshard, folder=folder, json=json, markdown=markdown)


@app.command("intervals")
def intervals(
    family: Annotated[
        list[str] | None, typer.Option(help="A model family; may be given again; without it all six.", show_default=False)
    ] = None,
    mode: Annotated[
        list[str] | None,
        typer.Option(help="A way to save, Everstep's or another; may be given again; without it all.", show_default=False),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="At each interval, of two blocks with and two without.")] = 5,
    quick: Quick = False,
    folder: Folder = None,
    json: Json = False,
    markdown: Markdown = False,
) -> None:
    """The smallest interval at which saving costs less than 5 % of training, for six model families and all ways to save."""
    from everstep.bench import intervals as bench
    from everstep.bench.families import FAMILIES
    from everstep.bench.savers import WAYS

    names, ways = _some("--family", family, FAMILIES), _some("--mode", mode, WAYS)
    small: dict[str, Any] = {"num_rounds": rounds}
    if quick:
        small = {"num_rounds": 1, "block_s": 0.05, "most_interval": 3, "base_interval": 1000}

    def measure(place: str, told: Told) -> Found:
        return bench.measure(bench.Settings(families=names, ways=ways, folder=place, quick=quick, **small), told)

    _measured("intervals", measure, _show_intervals, folder=folder, json=json, markdown=markdown)


@app.command("schedule")
def schedule(
    steps: Annotated[int, typer.Option(min=1, help="That are measured in each regime.")] = 24,
    pictures: Annotated[
        str | None, typer.Option(help="A folder for drawings of a real step against its plan.", show_default=False)
    ] = None,
    quick: Quick = False,
    folder: Folder = None,
    json: Json = False,
    markdown: Markdown = False,
) -> None:
    """Stall and memory of snapshots as the schedule predicts them and as they are, in its three regimes, one thread."""
    from everstep.bench import schedule as bench

    def measure(place: str, told: Told) -> Found:
        return bench.measure(_workload(512, quick), num_steps=steps, folder=place, pictures=pictures, progress=told)

    _measured("schedule", measure, _show_schedule, folder=folder, json=json, markdown=markdown)


@app.command("layers")
def layers(
    ranks: Annotated[int, typer.Option(min=1, max=2, help="Processes: 2 train a smaller model by DDP over gloo.")] = 1,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens a step, of each rank.")] = 1024,
    rounds: Annotated[int, typer.Option(min=1, help="Of two blocks of each way to train.")] = 10,
    block_steps: Annotated[
        int | None, typer.Option(min=1, help="Steps a block; without it as many as take 4 s.", show_default=False)
    ] = None,
    pool: Annotated[str, typer.Option(help="A folder in memory.")] = "/dev/shm",
    slow: Annotated[bool, typer.Option(help="Also with a way out that a state takes nearly a step for.")] = True,
    quick: Quick = False,
    folder: Folder = None,
    json: Json = False,
    markdown: Markdown = False,
) -> None:
    """What layer-wise updates, and giving way to reductions, bring to snapshots of every step in memory."""
    from everstep.bench import layers as bench

    work = bench.workload(ranks, tokens)
    small: dict[str, Any] = {"workload": work, "num_rounds": rounds, "block_steps": block_steps}
    if quick:
        small = {"workload": work.quick(), "num_rounds": 2, "block_steps": 3}

    def measure(place: str, told: Told) -> Found:
        settings = bench.Settings(num_ranks=ranks, folder=place, pool=_folder(pool, "--pool"), **small)
        ways_out = [False, True] if slow else [False]
        return {"measurements": [bench.measure(replace(settings, slow=is_slow), told) for is_slow in ways_out]}

    _measured("layers", measure, _show_layers, folder=folder, json=json, markdown=markdown)


def _some(option: str, given: list[str] | None, known: Iterable[str]) -> list[str]:
    """Those that were named, in any case; without any, all."""
    by_name = {name.lower(): name for name in known}
    for name in given or ():
        if name.lower() not in by_name:
            raise typer.BadParameter(f"{option} must be one of {', '.join(by_name.values())}, not {name!r}")
    return list(dict.fromkeys(by_name[name.lower()] for name in given or by_name))


def _workload(tokens: int, quick: bool) -> Workload:
    from everstep.bench.workloads import Workload

    workload = Workload(tokens=tokens)
    return workload.quick() if quick else workload


def _show_tune(found: Found) -> Shown:
    o, r = found["overhead"], found["recovery"]
    m = {end: f"{100 * value:.2f} %" for end, value in o["measured"].items()}
    rows = [
        ("overhead", f"{100 * o['predicted']:.2f} %", f"{m['median']} ({m['low']} to {m['high']})",
         f"{100 * o['difference']:+.2f} points"),
        *((f"recovery, {num_steps} steps to replay", f"{expected_s:.3f} s", f"{seconds:.3f} s",
           f"{100 * (ratio - 1):+.0f} %")
          for num_steps, expected_s, seconds, ratio in zip(
              r["steps"], r["predicted_s"], r["measured_s"], r["ratios"], strict=True)),
        ("recovery, median", "", "", f"{100 * (r['ratio'] - 1):+.0f} %"),
    ]  # fmt: skip
    yield Table(("", "predicted", "measured", "difference"), rows)
    yield "predicted overhead: " + ", ".join(f"{name} {100 * value:.2f} %" for name, value in o["parts"].items())


def _show_frames(found: Found) -> Shown:
    rows = [
        (codec, megabytes(each["frame_bytes"]), f"1/{each['times_smaller']:.1f}") for codec, each in found["codecs"].items()
    ]
    yield f"{found['num_parameters']:,} parameters, full state {megabytes(found['state_bytes'])}"
    yield Table(("compressed by", "a step", "of the state"), rows)


def _show_reshard(found: Found) -> Shown:
    rows = []
    for n, seconds in found["median_s"]["everstep"].items():
        dcp = found["median_s"].get("dcp", {}).get(n)
        ratios = [found["ratio_to_own"].get(way, {}).get(n) for way in ("everstep", "dcp")]
        ratios.append(found["cpu_ratio_to_own"]["everstep"].get(n))
        mine, theirs, cpu = ("" if r is None else f"{r:.2f}" for r in ratios)
        rows.append(
            (f"{found['source_ranks']} -> {n}", f"{seconds:.3f} s", f"{found['own_median_s']['everstep'][n]:.3f} s", mine,
             cpu, "" if dcp is None else f"{dcp:.3f} s", theirs)
        )  # fmt: skip
    head = ("ranks", "everstep", "what they wrote themselves", "times that", "CPU time: times that", "dcp", "times its own")
    yield Table(head, rows)


def _show_recover(found: Found) -> Shown:
    parts = ("total_s", "start_s", "import_s", "fetch_s", "begin_s", "step_s")
    rows = [(name, *(f"{m[part]:.3f} s" for part in parts)) for name, m in found["ways"].items()]
    yield Table(("from", "kill to next step", "start", "import and build", "fetch", "begin", "first step"), rows)
    yield (
        f"one memcpy of the state ({megabytes(found['state_bytes'])}): {found['memcpy_s']:.3f} s; fetching from the shadow "
        f"takes {found['fetch_ratio']:.2f} times that; one into new memory: {found['memcpy_new_s']:.3f} s, "
        f"{found['fetch_ratio_new']:.2f} times that"
    )


def _show_failures(found: Found) -> Shown:
    rows, notes = [], []
    for name, m in found["failures"].items():
        if not m["all"]:
            rows.append((name, "not possible here", "", "", ""))
            continue
        longest, lost = m["longest_step"], m["lost_steps"]
        rows.append(
            (name, f"{m['step_s']:.3f} s", "" if longest is None else f"{longest:.2f} steps", f"{m['back_s']:.3f} s",
             "" if lost is None else str(lost))
        )  # fmt: skip
        for cost in m["all"]:
            told = ", ".join(f"{key} {value}" for key, value in cost["facts"].items())
            notes.append(f"{name}: back after {cost['back_s']:.3f} s; {told}")
    yield Table(("failure", "step", "longest step", "back after", "steps lost, at most"), rows)
    yield from notes


def _show_intervals(found: Found) -> Shown:
    names = [name for family in found["families"].values() for name in family["savers"]]
    names = list(dict.fromkeys(names))
    rows, details = [], []
    for family, f in found["families"].items():
        sizes = (f"{f['num_parameters'] / 1e6:.1f} M", megabytes(f["state_bytes"]), f"{f['step_s'] * 1e3:.0f} ms")
        rows.append((family, *sizes, *(_least(f["savers"][name]) for name in names)))
        for name in names:
            for point in f["savers"][name]["points"]:
                overhead = {key: 1 + value for key, value in point["overhead"].items()}
                details.append(
                    (family, name, str(point["interval"]), _interval(overhead), f"{point['save_s'] * 1e3:.1f} ms",
                     str(point["num_rounds"]), str(point["block_steps"]))
                )  # fmt: skip
    yield f"Smallest interval in steps at which saving costs less than {found['limit']:.0%} ({found['num_threads']} thread):"
    yield Table(("family", "parameters", "state", "step", *names), rows)
    yield "(~: one step less was not measured. >: over the limit up to there, which is as far as it was measured.)"
    yield Table(("family", "saved by", "every", "overhead (95 %)", "one save costs", "rounds", "steps a block"), details)
    yield (
        f"Bases of Everstep's every {found['base_interval']} steps; pools in memory on {found['memory_file_system']}; "
        f"measured in {found['seconds'] / 60:.0f} min."
    )


def _show_schedule(found: Found) -> Shown:
    yield (
        f"a state of {megabytes(found['state_bytes'])}; a step without Everstep takes {found['step_s'] * 1e3:.1f} ms, "
        f"{found['forward_backward_s'] * 1e3:.1f} of them forward and backward; the way out is throttled"
    )
    rows = [
        (regime, f"{megabytes(m['bandwidth'])}/s", m["planned_regime"], f"{m['planned_stall_s'] * 1e3:.1f} ms",
         f"{m['measured_stall_s'] * 1e3:.1f} ms", megabytes(m["planned_peak_bytes"]), megabytes(m["measured_peak_bytes"]))
        for regime, m in found["regimes"].items()
    ]  # fmt: skip
    yield Table(("regime", "way out", "planned as", "stall planned", "measured", "memory planned", "measured"), rows)


def _show_layers(found: Found) -> Shown:
    first = found["measurements"][0]
    yield (
        f"{first['num_parameters']:,} parameters, {first['num_ranks']} rank(s), {first['tokens']} tokens each, a step "
        f"{first['step_s'] * 1e3:.1f} ms, a rank's state {megabytes(first['state_bytes'])}, {first['num_rounds']} rounds of "
        f"two blocks of {first['block_steps']} steps, pool on {first['pool_file_system']}"
    )
    for m in found["measurements"]:
        limit = m["max_bandwidth"]
        yield "Way out: memory" if limit is None else f"Way out: {megabytes(limit)}/s (emulated)"
        rows = [
            (name, _interval(way["ratio"]), *(f"{1e3 * way[key]:.2f} ms" for key in _LAYER_TIMES),
             *(f"{100 * way[key]:.0f} %" for key in _LAYER_SHARES))
            for name, way in m["ways"].items()
        ]  # fmt: skip
        yield Table(
            ("way", "overhead (95 %)", "stall", "left before", "gave way", "reducing", "in backward", "early", "copied"),
            rows,
        )
        yield (
            "(A step's stall, giving way and reductions; how long before the next update the state had left; shares: "
            "updates made in backward, bytes that left before their commit, bytes that were copied first.)"
        )
        yield f"layerwise over snapshots: {_interval(m['layerwise_to_snapshots'])}"
        if m["giving_way_to_not"] is not None:
            yield f"giving way over not giving way: {_interval(m['giving_way_to_not'])}"
        yield f"bit-equal to training without: {'yes' if m['bit_equal_to_training_without'] else 'NO'}"


_LAYER_TIMES = ("stall_s_a_step", "left_before_update_s", "gave_way_s_a_step", "reducing_s_a_step")
_LAYER_SHARES = ("in_backward_share", "early_share", "copied_share")


def _least(saver: Found) -> str:
    if saver["interval"] is None:
        return f">{max(point['interval'] for point in saver['points'])}"
    return f"{'' if saver['confirmed'] else '~'}{saver['interval']}"


def _folder(given: str | None, option: str = "--dir") -> str:
    from everstep.errors import UsageError

    if given is not None and not os.path.isdir(given):
        raise UsageError(f"{option} {given} is not a folder: make it first, or give another")
    return given or tempfile.gettempdir()


def _threads(given: list[int] | None, cores: int) -> list[int]:
    from everstep.errors import UsageError

    if given and min(given) < 1:
        raise UsageError(f"--threads must be at least 1, not {min(given)}")
    return list(dict.fromkeys(given or [1, cores]))


def _percent(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.1f} %"


def _interval(ratio: dict[str, float]) -> str:
    return f"{_percent(ratio['median'])} ({_percent(ratio['low'])} to {_percent(ratio['high'])})"


def _show_overhead(found: Found) -> Shown:
    rows = []
    for m in found["measurements"]:
        background = sum(m["background_cpu_s_a_step"].values())
        rows.append(
            (str(m["num_threads"]), str(m["tokens"]), f"{m['step_s'] * 1e3:.1f} ms", _saved_with(m), _interval(m["ratio"]),
             f"{100 * m['training_thread_share']:.3f} %", f"{background * 1e3:.1f} ms", megabytes(m["bytes_a_step"]))
        )  # fmt: skip
        for name, peer in m.get("peers", {}).items():
            rows.append(("", "", "", name, _interval(peer["ratio"]), "", "", megabytes(peer["bytes_a_step"])))
    yield Table(
        ("threads", "tokens", "step", "saved with", "overhead (95 %)", "own time", "background CPU", "a step"), rows
    )


def _saved_with(m: Found) -> str:
    every = m["snapshot_interval"]
    if every is None:
        return f"everstep, {m['mode']}"
    return f"everstep, {m['mode']} every {every:.3g}, pool on {m['pool_file_system']}"


def _show_rss(found: Found) -> Shown:
    rows = []
    for m in found["measurements"]:
        for name in ("trainer", "follower", "without"):
            grown, slope = m[name], m[name]["slope_bytes_a_step"]
            rows.append(
                (str(m["num_threads"]), str(m["tokens"]), name,
                 f"{slope['median']:,.0f} ({slope['low']:,.0f} to {slope['high']:,.0f})",
                 megabytes(grown["first_quarter_bytes"]), megabytes(grown["last_quarter_bytes"]),
                 megabytes(grown["peak_bytes"]))
            )  # fmt: skip
    yield Table(("threads", "tokens", "process", "bytes a step (95 %)", "first quarter", "last quarter", "peak"), rows)


def _show_restore(found: Found) -> Shown:
    rows = [
        (name, f"{seconds:.3f} s", "" if "load" in name else f"{found['num_bytes'] / seconds / 1e9:.2f} GB/s")
        for name, seconds in found["median_s"].items()
    ]
    yield Table(("what", "median", ""), rows)
    yield (
        f"restore takes {found['ratio']:.2f} times the slower of raw read and raw fold "
        f"({found['num_frames']} frames, {megabytes(found['num_bytes'])})"
    )


def _machine(found: Found) -> str:
    m = found["machine"]
    return f"{m['cpu']}, {m['cores']} cores, torch {m['torch']}, {m['file_system']}, load {m['load_average']:.1f}"
