"""The stages of one generation, connected: what records steps, where they go, and who makes bases of them."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from everstep.capture.capture import Capture
from everstep.capture.recorder import Destination
from everstep.capture.states import Settings, States
from everstep.fingerprint import fingerprint
from everstep.follow.attend import ShadowKeeper
from everstep.follow.keeper import Keeper
from everstep.follow.shares import Partition, coupled, share_out
from everstep.follow.ship import STAGE_BYTES, RemoteShadow
from everstep.follow.tuned import Tuned
from everstep.generation import Resumed
from everstep.opening import Opened
from everstep.store import files, shared
from everstep.store.log import DiskPlace, LogWriter
from everstep.store.medium import Synced, medium_for
from everstep.store.pools import Pools
from everstep.tune.averages import Counters, Spent
from everstep.tune.choice import MAX_BATCH
from everstep.tune.model import AUTO, Setting
from everstep.tune.throttle import Throttle


@dataclass(frozen=True, kw_only=True)
class Reports:
    """What a recorder tells and asks, from its own threads."""

    on_durable: Callable[[int], None]
    """Steps up to this one have reached storage."""
    durable_step: Callable[[], int]
    may_finish_base: Callable[[int], bool]


@dataclass
class Stages:
    """Those of the generation that `found` begins. To be called once each, in this order: record, keep, tune."""

    opened: Opened
    found: Resumed
    _log: LogWriter | None = field(default=None, init=False)
    _disk: DiskPlace | None = field(default=None, init=False)
    _memory: shared.MemoryPlace | None = field(default=None, init=False)

    def record(self, reports: Reports, pools_before: list[str]) -> Capture | States:
        """Watch the live objects from here on. `pools_before`: folders of earlier generations' pools."""
        opened, found = self.opened, self.found
        opened.lock.used = True
        folder = opened.path.log(found.timeline)
        asked = opened.options.direct_io
        destination = Destination(
            opened.run, found.timeline, found.generation, opened.path.bases(found.timeline),
            files.supports_direct(folder) if asked is None else asked, fingerprint(), opened.ranks.rank,
            opened.ranks.size > 1,
        )  # fmt: skip
        if opened.mode == "snapshot":
            return self._record_states(destination, reports, pools_before)
        return self._record_frames(destination, reports)

    def _record_frames(self, destination: Destination, reports: Reports) -> Capture:
        opened, options, path = self.opened, self.opened.options, self.opened.path
        timeline, generation, rank = destination.timeline, destination.generation, destination.rank
        disk = self._disk = DiskPlace(path.log(timeline), direct=destination.direct, segment_bytes=options.segment_bytes)
        memory = None
        if opened.mode == "shadow":
            in_memory = shared.log_folder(shared.shared_folder(opened.run, path.path), timeline, rank)
            memory = self._memory = shared.MemoryPlace(in_memory)
        log = self._log = LogWriter(
            memory or disk, run=opened.run, timeline=timeline, generation=generation, rank=rank,
            fingerprint=destination.fingerprint, chained=memory is None,
            on_begun=lambda: path.log_has_begun(timeline, generation), fine=opened.inventory().layout.fine,
        )  # fmt: skip
        compress = opened.training.compress
        capture = Capture(
            opened.inventory, opened.training.optimizers, self.found.step, log,
            lambda layout: path.write_layout(timeline, layout),
            destination, full_audit=options.audit == "full",
            durability="step" if memory is not None else options.durability,
            batch_steps=options.batch_steps, max_inflight_steps=options.max_inflight_steps,
            max_inflight_bytes=options.max_inflight_bytes, early=options.early,
            residual_interval=options.base_interval if getattr(compress, "residual", "log") == "base" else 1,
        )  # fmt: skip
        # What survives only the process must not be called durable in the log: after a crash of the host it may be gone.
        os_only = options.durability == "os" or memory is not None
        capture.offload.claim = (lambda: -1) if os_only else reports.durable_step
        capture.offload.on_durable = reports.on_durable
        capture.may_finish_base = reports.may_finish_base
        return capture

    def _record_states(self, destination: Destination, reports: Reports, pools_before: list[str]) -> States:
        opened, options, path, ranks = self.opened, self.opened.options, self.opened.path, self.opened.ranks
        timeline, generation = destination.timeline, destination.generation
        folder = path.pool(opened.pool_folder)
        files.make_dirs(folder)
        if options.pool:
            os.chmod(folder, 0o700)  # others use this place, too
        medium = medium_for(folder, options.pool_mode)
        pace = None if options.max_bandwidth is None else _pace(Throttle(options.max_bandwidth))
        if medium is Synced and pace is not None:  # it takes states in at once, and then writes them
            medium, pace = partial(Synced, pace=pace), None
        pools = Pools(
            folder, run=opened.run, rank=ranks.rank, generation=generation, world_size=ranks.size,
            num_slots=opened.num_slots, medium=medium, before=pools_before,
            on_begun=lambda: path.pool_has_begun(timeline, generation),
        )  # fmt: skip
        states = States(
            opened.inventory, opened.training.optimizers, self.found.step, pools, destination,
            lambda layout: path.write_layout(timeline, layout),
            Settings(
                interval=options.snapshot_interval or (None if ranks.size == 1 else 1), staged=options.pool_mode != "direct",
                copy_first=options.pool_mode == "staged", memory_bytes=options.pool_memory,
                max_bandwidth=options.max_bandwidth, layerwise=options.layerwise, pace=pace,
            ),
            opened.training.models,
        )  # fmt: skip
        states.on_durable = reports.on_durable
        states.may_finish_base = reports.may_finish_base
        return states

    def keep(self, capture: Capture | States) -> Keeper:
        """Look after the bases of what is being recorded."""
        opened, found, options = self.opened, self.found, self.opened.options
        if opened.mode == "shadow":
            assert isinstance(capture, Capture)
            return self._keep_by_shadows(capture)
        has_log = opened.mode != "snapshot"
        return Keeper(
            opened.path, found.timeline, found.generation, found.step, options.retention, options.base_interval,
            follower=options.follower and has_log, optimizers=opened.training.optimizers, say=opened.say,
            world_size=opened.ranks.size, has_log=has_log,
        )  # fmt: skip

    def _keep_by_shadows(self, capture: Capture) -> ShadowKeeper:
        opened, found, options = self.opened, self.found, self.opened.options
        assert self._log is not None and self._disk is not None and self._memory is not None
        partition = None
        if len(options.shadows) > 1:
            partition = Partition(self._shares(), lambda i: opened.path.read_layout(i, [found.timeline]))
        elsewhere = [
            partial(
                RemoteShadow, address=address, token=options.token, tls=options.tls, partition=partition, index=index,
                interval=options.base_interval, max_staged_bytes=min(options.max_lag_bytes or STAGE_BYTES, STAGE_BYTES),
            )
            for index, address in enumerate(options.shadows)
        ]  # fmt: skip
        keeper = ShadowKeeper(
            opened.path, found.timeline, found.generation, found.step, options.retention, options.base_interval,
            run=opened.run, log=self._log, memory=self._memory, disk=self._disk, optimizers=opened.training.optimizers,
            on_lag=options.on_lag, max_lag_bytes=options.max_lag_bytes, keep_log=options.log == "disk",
            idle_s=options.shadow_idle_s, say=opened.say, elsewhere=elsewhere, ranks=opened.ranks,
        )  # fmt: skip
        capture.offload.on_part = keeper.part_written
        return keeper

    def _shares(self) -> list[frozenset[int]]:
        """What each of several shadows keeps: what it has, if they have been asked."""
        num_shadows = len(self.opened.options.shadows)
        if len(self.found.shares) == num_shadows:
            return self.found.shares
        inventory = self.opened.inventory()
        return share_out(inventory.layout, num_shadows, coupled(inventory.layout, inventory.groups))

    def tune(self, capture: Capture | States, keeper: Keeper) -> None:
        """Hand base interval, batch size, codec and retention to the tuner, if it may have them."""
        opened, options = self.opened, self.opened.options
        if not options.tune or not isinstance(capture, Capture):
            return
        spent = Spent()
        capture.offload.spend(spent)

        def counters() -> Counters:
            return Counters(
                step=capture.step, trained_s=capture.trained_s, waited_s=capture.offload.waited_s,
                hook_s=capture.thread_s + capture.hook_s + capture.stall_s - capture.offload.waited_s,
                log_bytes=capture.stored_bytes, write_s=capture.offload.busy_s, sync_s=capture.offload.sync_s,
                background_s=capture.background_cpu_s(), spent=replace(spent),
            )  # fmt: skip

        def apply(setting: Setting) -> None:
            keeper.keep(setting.base_interval, options.kept_by(setting))
            capture.offload.set_batch(setting.batch_steps)
            capture.offload.set_lossless(setting.codec == AUTO)

        setting, ground = replace(options.setting, mode=opened.mode), options.ground
        max_batch = MAX_BATCH if options.durability == "batch" else 1
        if opened.mode == "shadow":  # which has its memory already, and gets every step at once
            setting, ground, max_batch = replace(setting, batch_steps=1), replace(ground, memory_bytes=math.inf), 1
        keeper.tuned = Tuned(
            opened.path, self.found.generation, setting, ground, max_batch=max_batch, counters=counters, apply=apply,
            mode=opened.decision,
        )  # fmt: skip
        if self.found.replayed:
            keeper.tuned.recovered(*self.found.replayed)
        elif self.found.source == "shadow":
            keeper.tuned.fetched(self.found.fetch_s)


def _pace(throttle: Throttle) -> Callable[[int], float]:
    return lambda num_bytes: throttle.delay(time.monotonic(), num_bytes)
