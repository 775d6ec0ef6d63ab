"""Everything Everstep raises or warns with.

    EverstepError
    ├── RunError                     the run as a whole cannot be used
    │   ├── NotARunError             no run there: empty folder, a file, some other folder
    │   ├── RunBusyError             another live process writes this run
    │   ├── FormatError              written by a newer format than this version reads
    │   └── NothingToRestoreError    a run, but it holds no restorable step yet
    ├── MismatchError                model, optimizer or extras do not fit what the run holds
    ├── StepNotFoundError            this step cannot be restored; says which can
    ├── CorruptionError              bytes on disk are not what was written
    │   ├── CodecError               a payload that its codec cannot decode
    │   └── UnreadableError          bytes that the disk does not give back; also a StorageError
    ├── AuditError                   a replayed state does not have the hashes the trainer recorded
    ├── ReplayError                  an optimizer that cannot be built or replayed here
    ├── StorageError                 the disk refused: full, read-only, gone, I/O error
    ├── PoolError                    a pool's file cannot be used: it is gone, or another run's
    │   └── PoolFullError            what is to be stored does not fit into its place in the pool: make another pool
    ├── CursorError                  the recorded data position does not fit the loader
    ├── LinkError                    the other end of a link, or the way to it: bytes that are no message, a wrong token
    │   ├── LinkClosed               the connection ended, timed out or was never made
    │   └── LinkRefused              the other end says no, and why
    ├── UnsupportedValueError        a value that cannot be stored without pickle
    ├── NativeBuildError             the native part could not be built here; nothing depends on it
    ├── LayerwiseError               parameters were updated in backward, and then training did something else
    └── UsageError                   a call at the wrong time or with wrong arguments

    EverstepWarning (UserWarning)
    ├── InexactWarning               something will not be reproduced bit for bit; says what and how to mend it
    │   └── UnprovenWarning          a state came back that its audit does not prove to the last bit; says what of it
    ├── SetBackWarning               the newest state in a pool is damaged: an older one is taken
    ├── SlowResumeWarning            exact, but slower than it could be
    ├── CostWarning                  exact, but each step costs more than it need
    ├── HiddenEditWarning            state was changed behind the version counters; it was caught and recorded
    ├── NonFiniteWarning             a gradient with NaN or infinite elements was left uncompressed
    └── UnprotectedWarning           training goes on, but steps are not being stored

Each error says what happened, where, and what to do next.
"""

from __future__ import annotations


class EverstepError(Exception):
    """Base of every error that Everstep raises on purpose."""


class RunError(EverstepError):
    """The run as a whole cannot be used."""


class NotARunError(RunError):
    """There is no Everstep run at this path."""


class RunBusyError(RunError):
    """Another live process writes this run."""


class FormatError(RunError):
    """The run was written by a format that this version does not read."""


class NothingToRestoreError(RunError):
    """The run holds no restorable step yet."""


class MismatchError(EverstepError):
    """The live objects do not fit what the run holds; lists every difference."""


class StepNotFoundError(EverstepError):
    """The step asked for cannot be restored."""


class CorruptionError(EverstepError):
    """Bytes on disk are not what was written; names file and step."""

    step: int | None = None
    """The step whose frame (or base, if in_base) is damaged, where that is known."""
    in_base: bool = False


class CodecError(CorruptionError):
    """A payload that its codec cannot decode."""


class AuditError(EverstepError):
    """A replayed state differs from what the trainer had; names step and tensor, offers the last proven step."""

    def __init__(self, message: str, *, step: int | None = None, proven_step: int | None = None) -> None:
        super().__init__(message)
        self.step = step
        self.proven_step = proven_step


class ReplayError(EverstepError):
    """An optimizer that cannot be built or replayed in this process."""


class StorageError(EverstepError):
    """The storage refused an operation."""


class UnreadableError(CorruptionError, StorageError):
    """Bytes were written, and the disk does not give them back: a bad sector, a file that must not be read."""


class PoolError(EverstepError):
    """A pool's file cannot be used here."""


class PoolFullError(PoolError):
    """What is to be stored beside the tensors does not fit into the place that the pool has for it."""

    num_bytes: int = 0
    """What it would take."""


class CursorError(EverstepError):
    """The recorded data position does not fit the loader that was given."""


class LinkError(EverstepError):
    """What came over a link is not what a peer says; the connection cannot be used any more."""


class LinkClosed(LinkError):  # noqa: N818
    """The connection ended, timed out or was never made."""


class LinkRefused(LinkError):  # noqa: N818
    """The other end does not want this connection; says why."""


class UnsupportedValueError(EverstepError):
    """A value that cannot be stored without pickle; names its path and type."""


class LayerwiseError(EverstepError):
    """Parameters were updated during backward, and what came before step() means another update than that."""


class NativeBuildError(EverstepError):
    """The native part could not be built. Everything works without it."""


class UsageError(EverstepError, ValueError):
    """A call at the wrong time, or with arguments that do not fit."""


class EverstepWarning(UserWarning):
    """Base of every warning that Everstep gives."""


class InexactWarning(EverstepWarning):
    """Something will not be reproduced bit for bit."""


class UnprovenWarning(InexactWarning):
    """A restored state whose audit does not cover all of it; says what, and which step is proven whole."""


class SetBackWarning(EverstepWarning):
    """The newest state in a pool is damaged: an older step is taken instead; says which, and what is wrong."""


class SlowResumeWarning(EverstepWarning):
    """Resuming is exact, but slower than it could be."""


class CostWarning(EverstepWarning):
    """Every step is stored as it is, at a cost that a change of the training loop would save; says which."""


class HiddenEditWarning(EverstepWarning):
    """State was changed by means that no hook sees; it was caught."""


class NonFiniteWarning(EverstepWarning):
    """A gradient with NaN or infinite elements was not compressed: it goes on as it is."""


class UnprotectedWarning(EverstepWarning):
    """Training goes on, but its steps are not being stored."""
