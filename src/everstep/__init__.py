"""Everstep makes every optimizer step of a PyTorch training run a committed, recoverable point.

                         ┌─> log on disk ────> lazy follower (compaction) ──> bases ─┐
    capture ──> codec ───┤                                                           ├──> restore
       └── the state itself, tensor by tensor (snapshot) ──────────────> bases ──────┘

    import everstep

    with everstep.attach(model, optimizer, "runs/gpt", extras={"sched": scheduler}) as run:
        for batch in run.steps(loader):      # starts where the run stopped; commits every step
            ...
"""

from typing import TYPE_CHECKING, Any

from everstep import errors
from everstep.errors import EverstepError

if TYPE_CHECKING:
    from everstep import compress, data, layout, tune
    from everstep.capture.early import early_hook
    from everstep.fold import register
    from everstep.restore.history import History
    from everstep.restore.history import open_run as open
    from everstep.run import Run, attach
    from everstep.store.retention import Retention

__version__ = "0.1.0"

__all__ = [
    "EverstepError", "History", "Retention", "Run", "attach", "compress", "data", "early_hook", "errors", "layout", "open",
    "register", "tune",
]  # fmt: skip

# torch is imported by the first name that needs it, not by `everstep --help`.
_WHERE = {
    "History": ("everstep.restore.history", "History"),
    "Retention": ("everstep.store.retention", "Retention"),
    "Run": ("everstep.run", "Run"),
    "attach": ("everstep.run", "attach"),
    "compress": ("everstep.compress", ""),
    "data": ("everstep.data", ""),
    "early_hook": ("everstep.capture.early", "early_hook"),
    "layout": ("everstep.layout", ""),
    "open": ("everstep.restore.history", "open_run"),
    "register": ("everstep.fold", "register"),
    "tune": ("everstep.tune", ""),
}


def __getattr__(name: str) -> Any:
    import importlib

    if name not in _WHERE:
        raise AttributeError(f"module 'everstep' has no attribute {name!r}")
    module, attribute = _WHERE[name]
    found = importlib.import_module(module)
    value = getattr(found, attribute) if attribute else found
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
