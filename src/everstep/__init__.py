"""Everstep makes every optimizer step of a PyTorch training run a committed, recoverable point.

                         ┌─> log on disk ────> lazy follower (compaction) ──> bases ─┐
    capture ──> codec ───┤                                                           ├──> restore
       └── the state itself, tensor by tensor (snapshot) ──────────────> bases ──────┘

    import everstep

    with everstep.attach(model, optimizer, "runs/gpt", extras={"sched": scheduler}) as run:
        for batch in run.steps(loader):      # starts where the run stopped; commits every step
            ...
"""

from everstep import data, errors
from everstep.errors import EverstepError
from everstep.fold import register
from everstep.restore.history import History
from everstep.restore.history import open_run as open
from everstep.run import Run, attach
from everstep.store.retention import Retention

__version__ = "0.1.0"

__all__ = ["EverstepError", "History", "Retention", "Run", "attach", "data", "errors", "open", "register"]
