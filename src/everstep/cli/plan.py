"""`everstep plan`: what saving every step would cost, before there is a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from everstep.cli.output import Json, console, print_json
from everstep.errors import UsageError

if TYPE_CHECKING:
    from everstep.tune.planning import Plan, Row

_FACTORS = {"k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}


def plan(
    params: Annotated[str, typer.Option(help="Parameters of the whole model: 17M, 7B, or a number.", show_default=False)],
    step_s: Annotated[float, typer.Option(help="Seconds a step of training takes.", show_default=False)],
    mtbf_h: Annotated[float, typer.Option(help="Hours between failures of the whole job.")] = 24.0,
    precision: Annotated[str, typer.Option(help="Of parameters and gradients: fp32 (autocast too), bf16, fp16.")] = "fp32",
    optimizer: Annotated[str, typer.Option(help="sgd, momentum or adam: 0, 1 or 2 moments a parameter.")] = "adam",
    compression: Annotated[str, typer.Option(help="Of gradients in training: none, half or topk.")] = "none",
    topk_ratio: Annotated[float, typer.Option(help="With topk: the part of each gradient that a rank sends.")] = 0.01,
    ranks: Annotated[int, typer.Option(help="Processes that share the storing.")] = 1,
    disk_gbs: Annotated[float, typer.Option(help="GB a second that each rank can write, and read.")] = 1.3,
    sync_ms: Annotated[float, typer.Option(help="Milliseconds that making a write durable takes.")] = 0.3,
    link_gbs: Annotated[float, typer.Option(help="GB a second from each rank to a shadow on another host.")] = 1.2,
    copy_gbs: Annotated[float, typer.Option(help="GB a second to and from a shadow on the same host.")] = 2.0,
    fold_mparams: Annotated[float, typer.Option(help="Million parameters that one core updates in a second.")] = 500.0,
    cores: Annotated[int, typer.Option(help="Cores that replay at recovery, a rank.")] = 4,
    memory_gb: Annotated[float | None, typer.Option(help="Free memory of each rank; without it, enough.")] = None,
    restart_s: Annotated[float, typer.Option(help="Seconds from a failure until new processes ask for their state.")] = 30.0,
    host_share: Annotated[float, typer.Option(help="Part of the failures that take a host's memory with them.")] = 0.1,
    interference: Annotated[float, typer.Option(help="What making a base costs training, as a part of its time.")] = 0.02,
    contention: Annotated[
        float, typer.Option(help="What training loses of background work's processor time: 1 if it uses every core.")
    ] = 0.12,
    max_overhead: Annotated[float | None, typer.Option(help="Part of the training time that saving may cost.")] = None,
    max_recovery_s: Annotated[float | None, typer.Option(help="What bringing a state back may take at worst.")] = None,
    max_gb: Annotated[float | None, typer.Option(help="What the run may take on disk at worst, all ranks.")] = None,
    json: Json = False,
) -> None:
    """What each mode would cost: bytes, overhead, lost work, recovery, and the best settings."""
    from everstep.tune.model import Limits
    from everstep.tune.planning import Assumed
    from everstep.tune.planning import plan as make

    assumed = Assumed(
        params=count(params), step_s=step_s, mtbf_s=mtbf_h * 3600, precision=precision, optimizer=optimizer,
        compression=compression, topk_ratio=topk_ratio, ranks=ranks, disk_bytes_s=disk_gbs * 1e9, sync_s=sync_ms / 1e3,
        link_bytes_s=link_gbs * 1e9, copy_bytes_s=copy_gbs * 1e9, fold_params_s=fold_mparams * 1e6, cores=cores,
        restart_s=restart_s, host_share=host_share, interference=interference, contention=contention,
        memory_bytes=float("inf") if memory_gb is None else memory_gb * 1e9,
    )  # fmt: skip
    max_bytes = None if max_gb is None else max_gb * 1e9
    limits = Limits(max_overhead=max_overhead, max_recovery_s=max_recovery_s, max_bytes=max_bytes)
    found = make(assumed, limits)
    if json:
        print_json(found.as_dict())
    else:
        _print(found)


def count(text: str) -> float:
    """17M -> 17,000,000. UsageError if it is no number."""
    factor = _FACTORS.get(text[-1:].lower(), 1.0)
    try:
        return float(text[:-1] if factor != 1.0 else text) * factor
    except ValueError:
        raise UsageError(f"params must be a number such as 17000000, 17M or 7B, not {text!r}") from None


def _print(found: Plan) -> None:
    from rich.table import Table

    from everstep.tune.choice import seconds

    a = found.assumed
    out = console()
    out.print(
        f"{a.params / 1e6:,.0f}M parameters in {a.precision} with {a.optimizer}: state {size(a.state_bytes)}, a step's "
        f"frame {size(a.frame_bytes)} ({a.state_bytes / a.frame_bytes:.1f} times less), "
        f"{size(a.frame_bytes * 86400 / a.step_s)} of frames a day before retention",
        markup=False,
    )
    table = Table("", *(f"{row.name}{_mark(found, row)}" for row in found.rows), box=None)
    shown = [(row.decision.setting, row.decision.cost) for row in found.rows]
    for name, values in {
        "a base every": [f"{s.base_interval:,} steps" for s, _ in shown],
        "a sync every": [f"{s.batch_steps:,} steps" if s.mode == "delta" else "" for s, _ in shown],
        "overhead": [f"{c.overhead:.2%}" for _, c in shown],
        "work lost by a failure": [seconds(c.lost_s) for _, c in shown],
        "recovery": [seconds(c.recovery_s) for _, c in shown],
        "recovery at worst": [seconds(c.worst_recovery_s) for _, c in shown],
        "disk at worst": [size(c.kept_bytes * a.ranks) for _, c in shown],
        "memory": [size(c.memory_bytes * a.ranks) for _, c in shown],
        "goodput": [f"{c.goodput:.3%}" for _, c in shown],
    }.items():
        table.add_row(name, *values)
    out.print(table)
    if not found.best.decision.broken:
        out.print(f"* the best: {found.best.decision.reason}", markup=False)
    for row in found.rows:
        for broken in row.decision.broken:
            out.print(f"! {row.name}: cannot be within {broken}", markup=False)
    out.print("snapshot is for comparison: mode='auto' does not choose it.", markup=False)


def _mark(found: Plan, row: Row) -> str:
    return " (!)" if row.decision.broken else " *" if row is found.best else ""


def size(num_bytes: float) -> str:
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:,.1f} {name}"
    return f"{num_bytes / 1e3:,.1f} kB"
