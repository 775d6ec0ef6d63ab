"""What attach takes beside model, optimizer, run, mode and extras, and what of it is nonsense."""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from typing import Any

from everstep.capture.offload import DURABILITIES
from everstep.compress import Compressor, Tapped
from everstep.errors import UsageError
from everstep.follow.attend import ON_LAG
from everstep.follow.fetch import NUM_STREAMS
from everstep.follow.tuned import Ground
from everstep.layout import Pattern
from everstep.link import addresses
from everstep.naming import Rename
from everstep.store.retention import Retention
from everstep.tune.model import Limits, Setting


@dataclass(frozen=True, kw_only=True)
class Options:
    """What attach takes beside model, optimizer, run, mode and extras."""

    durability: str = "step"
    """`step`: every step is on stable storage; `batch`: every `batch_steps`; `os`: survives the process, not the host."""
    batch_steps: int = 8
    max_inflight_steps: int = 4
    """Steps that may be on their way to storage; training waits when there are more."""
    max_inflight_bytes: int = 4 << 30
    on_error: str = "raise"
    """`raise`: a storage error is raised at the next commit; `warn`: training goes on unprotected and protects itself
    again when storage is back."""
    audit: str = "auto"
    """`auto`: parameters at every step, optimizer state as time allows; `full`: everything at every step."""
    retention: Retention = field(default_factory=lambda: Retention(min_bytes=1 << 30))
    base_interval: int = 200
    """A new base after so many steps."""
    follower: bool = True
    """Let a low-priority process make bases from the log; False: the trainer takes them itself."""
    shadow: str = ""
    """mode="shadow": tcp://host:port of a shadow on another host (`everstep shadow`), or several, joined by commas, which
    share the atoms; empty: one of this host."""
    shadow_token: str | None = None
    """What that shadow was given as its token; None: the environment's EVERSTEP_TOKEN, or none."""
    shadow_cafile: str | None = None
    """TLS to that shadow, whose certificate this file (or one of its authorities) vouches for."""
    shadow_streams: int = NUM_STREAMS
    """Connections to each shadow on another host over which a state is fetched at once."""
    log: str = "memory"
    """mode="shadow": `disk` lets the shadow keep the log on disk too, for time travel and for when the shadow is lost."""
    on_lag: str = "spill"
    """mode="shadow": when the shadow is `max_lag_bytes` behind, write the log to disk (`spill`), or `wait`."""
    max_lag_bytes: int | None = None
    """None: 2 GiB, or four frames if they are larger."""
    shadow_idle_s: float = 600.0
    """A shadow without a trainer leaves a base and ends after so long."""
    pool: str = ""
    """mode="snapshot": the folder for the pool: in memory (tmpfs) it survives the process, on a disk or in persistent memory
    the host; empty: in the run's own folder."""
    pool_slots: int | None = None
    """mode="snapshot": states that the pool has places for, from 2 on (3 with several ranks); None: 3, or 4 with several."""
    pool_mode: str | None = None
    """mode="snapshot": `direct`: straight into the pool's file; `staged`: copied in memory first; `disk`: written by large
    requests from memory of our own; None: what fits the folder, and copies are made of what would be late."""
    pool_memory: int | None = None
    """mode="snapshot": bytes for such copies; None: as much as the state takes."""
    snapshot_interval: int | None = None
    """mode="snapshot": steps from one stored state to the next; None: as small as costs little (1 with several ranks)."""
    max_bandwidth: float | None = None
    """mode="snapshot": bytes a second that may leave for the pool."""
    layerwise: bool = False
    """mode="snapshot": parameters are updated in backward, each when its gradient is final, and leave from then on. Refused
    where gradients are changed between backward and step (clipping, scaling) or accumulated."""
    cursor: str = "keep"
    """`drop`: if the number of ranks has changed and the loader's position cannot be divided anew, begin its pass again."""
    rename: Rename = None
    """From names in the model to names in the run: a function, or prefixes and what stands for them. For pipeline stages
    that name their parameters anew."""
    early: bool = False
    """Hand gradients over during backward, as they become final, instead of at the step: they are on their way sooner. What
    was changed in between other than by one multiplication (clipping, unscaling) is sent again."""
    compress: Compressor[Any] | Tapped | None = None
    """What compresses the gradients (everstep.compress): its own state is then part of the run's."""
    layout: Sequence[Pattern] = ()
    """What the tensors of hand-written parallelism are: see everstep.layout. DTensors need none."""
    tune: bool = False
    """Let measurements set `base_interval`, whether lossless codecs are tried, `batch_steps` with durability="batch", and
    with a limit on bytes how many bases stay, within the limits below; what is given for these is where it begins. Not
    with shadows on other hosts, or of several ranks. mode="auto" does this too, and chooses the mode when the run is
    attached again."""
    max_overhead: float | None = None
    """tune: part of the training time that saving may cost, such as 0.01."""
    max_recovery_s: float | None = None
    """tune: what bringing a state back may take at the worst moment."""
    max_bytes: int | None = None
    """tune: what the run's folder may take at the worst moment."""
    mtbf_s: float | None = None
    """tune: seconds between failures; None: estimated from the run's own restarts."""
    segment_bytes: int = 256 << 20
    direct_io: bool | None = None
    """Bypass the page cache when writing; None: where the file system can."""
    quiet: bool = False

    def __post_init__(self) -> None:
        self._check_types()
        if self.durability not in DURABILITIES:
            raise UsageError(f"durability must be one of {', '.join(DURABILITIES)}, not {self.durability!r}")
        if self.on_error not in ("raise", "warn"):
            raise UsageError(f"on_error must be 'raise' or 'warn', not {self.on_error!r}")
        if self.audit not in ("auto", "full"):
            raise UsageError(f"audit must be 'auto' or 'full', not {self.audit!r}")
        if self.cursor not in ("keep", "drop"):
            raise UsageError(f"cursor must be 'keep' or 'drop', not {self.cursor!r}")
        if self.compress is not None and not isinstance(self.compress, (Compressor, Tapped)):
            raise UsageError(
                f"compress must be a compressor of everstep.compress, or tap(hook), not a {type(self.compress).__name__}"
            )
        if self.log not in ("memory", "disk"):
            raise UsageError(f"log must be 'memory' or 'disk', not {self.log!r}")
        if self.on_lag not in ON_LAG:
            raise UsageError(f"on_lag must be one of {', '.join(ON_LAG)}, not {self.on_lag!r}")
        found = [str(addresses.parse_address(address)) for address in self.shadows]
        if len(set(found)) != len(found):
            raise UsageError(f"shadow={self.shadow!r} names one shadow twice")
        if not 1 <= self.shadow_streams <= 64:
            raise UsageError(f"shadow_streams must be from 1 to 64, not {self.shadow_streams}")
        if isinstance(self.retention, dict):
            unknown = [name for name in self.retention if name not in Retention.__dataclass_fields__]
            if unknown:
                raise UsageError(f"retention has no {unknown[0]!r}; it has {', '.join(Retention.__dataclass_fields__)}")
            object.__setattr__(self, "retention", Retention(**self.retention))
        if not isinstance(self.retention, Retention):
            raise UsageError(f"retention must be an everstep.Retention, not {self.retention!r}")
        for name in ("batch_steps", "max_inflight_steps", "base_interval"):
            if not isinstance(getattr(self, name), Integral) or getattr(self, name) < 1:
                raise UsageError(f"{name} must be a whole number from 1 on, not {getattr(self, name)!r}")
        for name in ("max_inflight_bytes", "segment_bytes"):
            if not isinstance(getattr(self, name), Real) or not getattr(self, name) >= 1:
                raise UsageError(f"{name} must be a number from 1 on, not {getattr(self, name)!r}")
        if self.pool_mode not in (None, "direct", "staged", "disk"):
            raise UsageError(f"pool_mode must be 'direct', 'staged' or 'disk', not {self.pool_mode!r}")
        for name, least in (("pool_slots", 2), ("pool_memory", 0), ("snapshot_interval", 1)):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < least):
                raise UsageError(f"{name} must be a whole number from {least} on, not {value!r}")
        if self.max_bandwidth is not None and not (isinstance(self.max_bandwidth, int | float) and self.max_bandwidth > 0):
            raise UsageError(f"max_bandwidth must be a number of bytes a second above 0, not {self.max_bandwidth!r}")
        if self.mtbf_s is not None and not (isinstance(self.mtbf_s, int | float) and self.mtbf_s > 0):
            raise UsageError(f"mtbf_s must be a number above 0, not {self.mtbf_s!r}")
        limited = self.ground.limits != Limits()
        if self.tune and not self.follower:
            raise UsageError("tune=True needs follower=True: a base that the trainer takes is not measured")
        if not self.tune and (self.mtbf_s is not None or limited):
            raise UsageError("max_overhead, max_recovery_s, max_bytes and mtbf_s are for tune=True or mode='auto'")

    def _check_types(self) -> None:
        """Of what is used later, or elsewhere."""
        if not isinstance(self.pool, str):
            if not isinstance(self.pool, os.PathLike) or not isinstance(os.fspath(self.pool), str):
                raise UsageError(f"pool must be the path of a folder, not {self.pool!r}")
            object.__setattr__(self, "pool", os.fspath(self.pool))
        if not isinstance(self.shadow, str):
            raise UsageError(f"shadow must be an address, tcp://host:port, not {self.shadow!r}")
        for name in ("shadow_idle_s", "max_lag_bytes", "shadow_streams"):
            value = getattr(self, name)
            if not isinstance(value, Real) and (name, value) != ("max_lag_bytes", None):
                raise UsageError(f"{name} must be a number, not {value!r}")
        for name in ("follower", "layerwise", "early", "tune", "direct_io", "quiet"):
            value = getattr(self, name)
            if not isinstance(value, bool) and (name, value) != ("direct_io", None):
                raise UsageError(f"{name} must be True or False, not {value!r}")
        if self.rename is not None and not isinstance(self.rename, Mapping) and not callable(self.rename):
            raise UsageError(f"rename must be a function, or a dict of prefixes, not {self.rename!r}")
        if not isinstance(self.layout, Sequence) or isinstance(self.layout, str):
            raise UsageError(f"layout must be a list of patterns of everstep.layout, not {self.layout!r}")

    @property
    def of_snapshots(self) -> list[str]:
        """Which of the options that are for mode="snapshot" alone were given."""
        names = ("pool", "pool_slots", "pool_mode", "pool_memory", "snapshot_interval", "max_bandwidth", "layerwise")
        return [name for name in names if getattr(self, name) not in (None, "", False)]

    @property
    def ground(self) -> Ground:
        """What the tuner is told."""
        limits = Limits(max_overhead=self.max_overhead, max_recovery_s=self.max_recovery_s, max_bytes=self.max_bytes)
        return Ground(
            limits=limits, failure_rate=None if self.mtbf_s is None else 1 / self.mtbf_s,
            memory_bytes=self.max_inflight_bytes, segment_bytes=self.segment_bytes, keeps_log=self.log == "disk",
        )  # fmt: skip

    @property
    def setting(self) -> Setting:
        """Where the tuner begins."""
        batch = self.batch_steps if self.durability == "batch" else 1
        return Setting(base_interval=self.base_interval, batch_steps=batch, bases=self.retention.bases)

    def kept_by(self, setting: Setting) -> Retention:
        """Retention under a setting: what the user said, within the limit on bytes."""
        if self.max_bytes is None:
            return self.retention
        at_most = min(self.max_bytes, self.retention.max_bytes or self.max_bytes)
        least = min(self.retention.min_bytes, self.max_bytes)
        return replace(self.retention, bases=setting.bases, max_bytes=at_most, min_bytes=least)

    @property
    def shadows(self) -> list[str]:
        """Addresses of shadows on other hosts."""
        return [address.strip() for address in self.shadow.split(",")] if self.shadow else []

    @property
    def token(self) -> bytes | None:
        """What shadows on other hosts want to hear."""
        token = self.shadow_token or os.environ.get("EVERSTEP_TOKEN")
        return token.encode() if token else None

    @property
    def tls(self) -> ssl.SSLContext | None:
        return addresses.client_context(self.shadow_cafile) if self.shadow_cafile else None
