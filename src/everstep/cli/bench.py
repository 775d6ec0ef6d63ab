"""`everstep bench overhead` and `everstep bench restore`: the numbers of this machine."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from everstep.cli.output import Json, Told, console, megabytes, print_json

if TYPE_CHECKING:
    from everstep.bench.workloads import Workload

app = typer.Typer(help="Measure on this machine.", no_args_is_help=True)

Folder = Annotated[
    str | None, typer.Option("--dir", help="Folder to write runs in; without it the temporary one.", show_default=False)
]
Quick = Annotated[bool, typer.Option("--quick", help="A tiny model and few blocks: to see that it works.")]
Frames = Annotated[int, typer.Option(min=1, help="Steps to replay.")]
Repetitions = Annotated[int, typer.Option(min=1)]


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
        int | None, typer.Option(min=1, help="Steps a block; without it as many as take 3 s.", show_default=False)
    ] = None,
    base_interval: Annotated[
        int | None, typer.Option(min=1, help="Steps between bases; without it four in each half.", show_default=False)
    ] = None,
    peers: Annotated[bool, typer.Option(help="Also measure torch.save and DCP async_save at every step.")] = True,
    mode: Annotated[str, typer.Option(help="delta or shadow.")] = "delta",
    tcp: Annotated[bool, typer.Option("--tcp", help="With --mode shadow: a shadow behind TCP on loopback.")] = False,
    early: Annotated[bool, typer.Option("--early", help="Gradients are handed over during backward.")] = False,
    codec: Annotated[
        str, typer.Option(help="Compress gradients, with and without Everstep: none, topk, quantize, fp16, bf16.")
    ] = "none",
    rss: Annotated[bool, typer.Option("--rss", help="Measure the growth of memory instead.")] = False,
    quick: Quick = False,
    folder: Folder = None,
    json: Json = False,
) -> None:
    """Time of training with every step saved over time without."""
    from everstep.bench import machine, recover
    from everstep.bench import overhead as bench
    from everstep.bench.workloads import CODECS

    if codec not in CODECS:
        raise typer.BadParameter(f"--codec must be one of {', '.join(CODECS)}, not {codec!r}")
    folder = _folder(folder)
    found = _begin("overhead", folder)
    found["measurements"] = []
    with Told() as told, recover.tcp_shadow(folder, base_interval or 200) if tcp else contextlib.nullcontext("") as address:
        for num_threads in _threads(threads, machine.num_cores()):
            for count in tokens or [1024]:
                settings = bench.Settings(
                    workload=_workload(count, quick), num_threads=num_threads,
                    num_pairs=min(pairs, 4) if quick else pairs, block_steps=block_steps or (4 if quick else None),
                    base_interval=base_interval or (32 if quick else None),
                    num_peer_pairs=(1 if quick else 3) if peers else 0, folder=folder,
                    wait_for_follower=not quick, mode=mode, shadow=address, early=early, codec=codec,
                )  # fmt: skip
                if rss:
                    last = 120 if quick else 500
                    measured = bench.measure_rss(settings, first_step=last // 5, last_step=last, progress=told)
                else:
                    measured = bench.measure(settings, told)
                found["measurements"].append(measured)
    _tell(found, json, _print_rss if rss else _print_overhead)


@app.command("frames")
def frames_(
    steps: Annotated[int, typer.Option(min=1, help="Frames that are measured, for each way to compress.")] = 4,
    quick: Quick = False,
    folder: Folder = None,
    json: Json = False,
) -> None:
    """Bytes of a frame, by how gradients are compressed, against the full state."""
    from everstep.bench import frames as bench

    folder = _folder(folder)
    found = _begin("frames", folder)
    with Told() as told:
        measured = bench.measure(_workload(256, quick), num_steps=steps, folder=folder, progress=told)
    _tell(found | measured, json, _print_frames)


@app.command("restore")
def restore(
    tokens: Annotated[int, typer.Option(min=1, help="Tokens a step of the run that is restored.")] = 256,
    frames: Frames = 48,
    repetitions: Repetitions = 5,
    peers: Annotated[bool, typer.Option(help="Also measure torch.load and DCP load of the same state.")] = True,
    quick: Quick = False,
    folder: Folder = None,
    json: Json = False,
) -> None:
    """Time to restore a step over that of the reading and the arithmetic it takes."""
    from everstep.bench import restore as bench

    folder = _folder(folder)
    found = _begin("restore", folder)
    settings = bench.Settings(
        workload=_workload(tokens, quick), num_frames=min(frames, 6) if quick else frames,
        num_repetitions=min(repetitions, 2) if quick else repetitions, folder=folder, peers=peers,
    )  # fmt: skip
    with Told() as told:
        measured = bench.measure(settings, told)
    _tell(found | measured, json, _print_restore)


@app.command("recover")
def recover_(
    repetitions: Annotated[int, typer.Option(min=1, help="Kills for each way to recover.")] = 5,
    quick: Quick = False,
    folder: Folder = None,
    json: Json = False,
) -> None:
    """From SIGKILL of a trainer to its next completed step: from its shadow's memory, from disk, by torch.load."""
    from everstep.bench import recover as bench

    folder = _folder(folder)
    found = _begin("recover", folder)
    with Told() as told:
        measured = bench.measure(
            _workload(256, quick), num_repetitions=2 if quick else repetitions, folder=folder,
            progress=told,
        )  # fmt: skip
    _tell(found | measured, json, _print_recover)


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
) -> None:
    """Time to load a run under another number of ranks (FSDP2) over that of one that so many ranks wrote."""
    from everstep.bench import reshard as bench

    folder = _folder(folder)
    found = _begin("reshard", folder)
    settings = bench.Settings(
        workload=_workload(256, quick), source=source, targets=tuple(targets or (4, 1)),
        num_frames=min(frames, 3) if quick else frames, num_repetitions=1 if quick else repetitions, folder=folder,
        peers=peers,
    )  # fmt: skip
    with Told() as told:
        measured = bench.measure(settings, told)
    _tell(found | measured, json, _print_reshard)


def _workload(tokens: int, quick: bool) -> Workload:
    from everstep.bench.workloads import Workload

    workload = Workload(tokens=tokens)
    return workload.quick() if quick else workload


def _begin(benchmark: str, folder: str) -> dict[str, Any]:
    """What is told of every measurement, as it is before it."""
    from everstep.bench import machine

    return {"benchmark": benchmark, "machine": machine.facts(folder)}


def _tell(found: dict[str, Any], json: bool, show: Callable[[dict[str, Any]], None]) -> None:
    if json:
        print_json(found)
    else:
        show(found)


def _print_frames(found: dict[str, Any]) -> None:
    console().print(f"{found['num_parameters']:,} parameters, full state {megabytes(found['state_bytes'])}")
    for codec, each in found["codecs"].items():
        size, times = megabytes(each["frame_bytes"]), each["times_smaller"]
        console().print(f"  {codec:9} {size:>10} a step, 1/{times:.1f} of the state")


def _print_reshard(found: dict[str, Any]) -> None:
    from rich.table import Table

    table = Table("ranks", "everstep", "what they wrote themselves", "times that", "dcp", "times its own")
    for n, seconds in found["median_s"]["everstep"].items():
        own = found["own_median_s"]["everstep"][n]
        dcp = found["median_s"].get("dcp", {}).get(n)
        ratios = [found["ratio_to_own"].get(way, {}).get(n) for way in ("everstep", "dcp")]
        mine, theirs = ("" if r is None else f"{r:.2f}" for r in ratios)
        table.add_row(
            f"{found['source_ranks']} -> {n}", f"{seconds:.3f} s", f"{own:.3f} s", mine,
            "" if dcp is None else f"{dcp:.3f} s", theirs,
        )  # fmt: skip
    _print_machine(found)
    console().print(table)


def _print_recover(found: dict[str, Any]) -> None:
    from rich.table import Table

    table = Table("from", "kill to next step", "start", "import and build", "fetch", "begin", "first step")
    parts = ("total_s", "start_s", "import_s", "fetch_s", "begin_s", "step_s")
    for name, m in found["ways"].items():
        table.add_row(name, *(f"{m[part]:.3f} s" for part in parts))
    _print_machine(found)
    console().print(table)
    console().print(
        f"one memcpy of the state ({megabytes(found['state_bytes'])}): {found['memcpy_s']:.3f} s; fetching from the shadow "
        f"takes {found['fetch_ratio']:.2f} times that; one into new memory: {found['memcpy_new_s']:.3f} s, "
        f"{found['fetch_ratio_new']:.2f} times that"
    )


def _folder(given: str | None) -> str:
    from everstep.errors import UsageError

    if given is not None and not os.path.isdir(given):
        raise UsageError(f"--dir {given} is not a folder: make it first, or give another")
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


def _print_overhead(found: dict[str, Any]) -> None:
    from rich.table import Table

    table = Table("threads", "tokens", "step", "saved with", "overhead (95 %)", "own time", "background CPU", "a step")
    for m in found["measurements"]:
        background = sum(m["background_cpu_s_a_step"].values())
        table.add_row(
            str(m["num_threads"]), str(m["tokens"]), f"{m['step_s'] * 1e3:.1f} ms", "everstep", _interval(m["ratio"]),
            f"{100 * m['training_thread_share']:.3f} %", f"{background * 1e3:.1f} ms", megabytes(m["bytes_a_step"]),
        )  # fmt: skip
        for name, peer in m.get("peers", {}).items():
            table.add_row("", "", "", name, _interval(peer["ratio"]), "", "", megabytes(peer["bytes_a_step"]))
    _print_machine(found)
    console().print(table)


def _print_rss(found: dict[str, Any]) -> None:
    from rich.table import Table

    table = Table("threads", "tokens", "process", "bytes a step (95 %)", "first quarter", "last quarter", "peak")
    for m in found["measurements"]:
        for name in ("trainer", "follower", "without"):
            grown, slope = m[name], m[name]["slope_bytes_a_step"]
            table.add_row(
                str(m["num_threads"]), str(m["tokens"]), name,
                f"{slope['median']:,.0f} ({slope['low']:,.0f} to {slope['high']:,.0f})",
                megabytes(grown["first_quarter_bytes"]), megabytes(grown["last_quarter_bytes"]),
                megabytes(grown["peak_bytes"]),
            )  # fmt: skip
    _print_machine(found)
    console().print(table)


def _print_restore(found: dict[str, Any]) -> None:
    from rich.table import Table

    table = Table("what", "median", "")
    for name, seconds in found["median_s"].items():
        table.add_row(name, f"{seconds:.3f} s", f"{found['num_bytes'] / seconds / 1e9:.2f} GB/s" if "load" not in name
                      else "")  # fmt: skip
    _print_machine(found)
    console().print(table)
    console().print(
        f"restore takes {found['ratio']:.2f} times the slower of raw read and raw fold "
        f"({found['num_frames']} frames, {megabytes(found['num_bytes'])})"
    )


def _print_machine(found: dict[str, Any]) -> None:
    m = found["machine"]
    console().print(
        f"{m['cpu']}, {m['cores']} cores, torch {m['torch']}, {m['file_system']}, load {m['load_average']:.1f}",
        markup=False,
    )
