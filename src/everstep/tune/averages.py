"""What a run measures, as moving averages, and from them what the model wants to know."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from everstep.tune.model import AUTO, RAW, Codec, Measured, Setting

WEIGHT = 0.3
"""Of a new value in an average, once there are a few."""
NOISY_WEIGHT = 0.1
"""The same for what is a small difference of two large numbers."""
INTERFERENCE = 0.02
"""A base is never taken to cost training less than this part of the time that writing it takes."""
CONTENTION = 0.12
"""Of the processor time of background work, what training loses where there is a core to spare. Measured on the machine on
which Everstep was made: 0.9 % for 73 ms in steps of 0.8 s, 3.8 % for 65 ms in steps of 0.23 s."""
PRIOR_S = 86400.0
"""A run of which nothing is known yet is taken to fail once in so long."""

READ_SHARE = 1 / 3
"""Of what the writer takes for a frame, to read it: by all cores, without encoding or copying."""


@dataclass(kw_only=True)
class Spent:
    """What the writer thread has done with the pieces of tensors that a codec could make smaller."""

    tried_frames: int = 0
    """In which lossless codecs were tried."""
    choose_s: float = 0.0
    """In choosing and encoding …"""
    choose_cpu_s: float = 0.0
    """… of which this was processor time."""
    saved_bytes: int = 0
    """By them."""
    put_bytes: int = 0
    """Put into the log …"""
    put_s: float = 0.0
    put_cpu_s: float = 0.0
    """… of which this was processor time."""

    def since(self, begun: Spent) -> Spent:
        return Spent(**{each.name: getattr(self, each.name) - getattr(begun, each.name) for each in fields(self)})


@dataclass(frozen=True, kw_only=True)
class Counters:
    """Where a run's counters stand at one moment."""

    step: int
    trained_s: float
    """Time of the steps so far, pauses of the user's left out, stalls included."""
    waited_s: float
    """Training's waiting for the writer."""
    hook_s: float
    """The training thread's time in hooks and commits, and its other stalls."""
    log_bytes: int
    write_s: float
    """The writer thread's time, syncs included."""
    sync_s: float
    background_s: float = 0.0
    """Processor time of the threads that write and hash."""
    spent: Spent = field(default_factory=Spent)


@dataclass(frozen=True, kw_only=True)
class BaseMade:
    """What a follower tells of a base."""

    num_bytes: int
    write_s: float
    num_folded: int
    """Steps; 0 if it had to load a base first, which is no measure of folding."""
    fold_s: float
    fold_cpu_s: float
    """Of that, processor time."""
    num_cores: int = 1
    """That a recovery would fold on."""


class Averages:
    """Moving averages by name; they outlive the process as a plain dict."""

    def __init__(self, kept: dict[str, tuple[float, int]] | None = None) -> None:
        self._values = dict(kept or {})

    def add(self, name: str, value: float, weight: float = WEIGHT) -> None:
        mean, count = self._values.get(name, (0.0, 0))
        self._values[name] = mean + max(weight, 1 / (count + 1)) * (value - mean), count + 1

    def get(self, name: str, otherwise: float = 0.0) -> float:
        return self._values.get(name, (otherwise, 0))[0]

    def count(self, name: str) -> int:
        return self._values.get(name, (0.0, 0))[1]

    def kept(self) -> dict[str, tuple[float, int]]:
        return dict(self._values)

    def quiet(self, begun: Counters, ended: Counters, batch_steps: int, *, in_memory: bool = False) -> None:
        """Between two bases: what steps and their frames cost. `in_memory`: the log was, so this tells nothing of disks."""
        steps = ended.step - begun.step
        if steps < 1:
            return
        step_s, waited_s, hook_s, sync_s, background_s = (
            (getattr(ended, name) - getattr(begun, name)) / steps
            for name in ("trained_s", "waited_s", "hook_s", "sync_s", "background_s")
        )
        write_s = max((ended.write_s - begun.write_s) / steps - sync_s, 0.0)
        spent = ended.spent.since(begun.spent)
        # Waiting for a writer that cannot keep up is the model's own business; only what is beyond that is a sync's.
        backlog_s = max(write_s + sync_s - (step_s - waited_s - hook_s), 0.0)
        self.add("step_s", step_s)
        self.add("waited_s", waited_s)
        self.add("hook_s", hook_s)
        self.add("background_s", background_s)
        self.add("frame_bytes", (ended.log_bytes - begun.log_bytes) / steps)
        self.add("raw_bytes", (ended.log_bytes - begun.log_bytes + spent.saved_bytes) / steps)
        self.add("other_s", max(write_s - (spent.choose_s + spent.put_s) / steps, 0.0))
        self.add("other_cpu_s", max(background_s - (spent.choose_cpu_s + spent.put_cpu_s) / steps, 0.0))
        if spent.tried_frames:
            self.add("choose_s", spent.choose_s / spent.tried_frames)
            self.add("choose_cpu_s", spent.choose_cpu_s / spent.tried_frames)
            self.add("saved_bytes", spent.saved_bytes / spent.tried_frames)
        if spent.put_bytes:
            self.add("memory_byte_s" if in_memory else "byte_s", spent.put_s / spent.put_bytes)
            self.add("byte_cpu_s", spent.put_cpu_s / spent.put_bytes)
        if not in_memory:
            self.add("write_s", write_s)
            self.add("sync_s", sync_s * batch_steps)
            self.add("batch_stall_s", max(waited_s - backlog_s, 0.0) * batch_steps)

    def base(self, begun: Counters, ended: Counters, made: BaseMade) -> None:
        """While a base was made: how much longer its steps took than those of quiet times. Noise may be below zero, and is
        kept so, or the average would only ever grow."""
        if self.count("step_s"):
            steps = ended.step - begun.step
            self.add("base_stall_s", ended.trained_s - begun.trained_s - steps * self.get("step_s"), NOISY_WEIGHT)
        self.add("base_s", made.write_s)
        self.add("state_bytes", made.num_bytes)
        if made.num_folded:
            self.add("fold_s", made.fold_s / made.num_folded)
            self.add("fold_by_all_s", made.fold_cpu_s / made.num_folded / made.num_cores)
            self.add("folded", made.num_folded)

    def recovered(self, seconds: float, num_steps: int) -> None:
        """A state was loaded and so many steps were replayed. What that took beyond what was expected is shared out to both
        parts by how far each may be off: as far as it is long."""
        load_s, replay_s = self._recovery()
        replayed_s = num_steps * replay_s
        total = load_s**2 + replayed_s**2
        if total <= 0:
            return
        off_s = seconds - load_s - replayed_s
        self.add("load_s", max(load_s + off_s * load_s**2 / total, load_s / 10))
        if num_steps:
            self.add("replay_s", max(replayed_s + off_s * replayed_s**2 / total, replayed_s / 10) / num_steps)

    def _recovery(self) -> tuple[float, float]:
        """Seconds to load a base and to replay a step. Until a recovery was seen: loading takes as long as writing, and
        replaying what the follower's folding takes on all cores, or reading."""
        otherwise_s = max(self.get("fold_by_all_s", self.get("fold_s")), READ_SHARE * self.get("write_s"))
        return self.get("load_s", self.get("base_s")), self.get("replay_s", otherwise_s)

    def ready(self) -> bool:
        """Whether enough was seen for an opinion."""
        return min(self.count("step_s"), self.count("base_stall_s"), self.count("fold_s")) >= 2

    def fetched(self, seconds: float) -> None:
        """A state was taken from a shadow of this host."""
        self.add("fetch_s", seconds)

    def measured(
        self, *, failure_rate: float, memory_bytes: float, segment_bytes: float, copy_bytes_s: float,
        contention: float = 0.0, setting: Setting | None = None, keeps_log: bool = False,
    ) -> Measured:  # fmt: skip
        """What the model wants to know; unless that was measured, a shadow's state and frames go at `copy_bytes_s`.
        `setting`: the one in force."""
        setting = setting or Setting()
        folds_always = setting.mode == "shadow"
        background_s = self.get("background_s") + (self.get("fold_s") if folds_always else 0.0)
        delays_s = self.get("waited_s") + self.get("hook_s") + contention * background_s
        step_s = max(self.get("step_s") - delays_s, 1e-6)
        # A lazy follower folds while a base is made; the model counts that by step.
        folding_s = 0.0 if folds_always else contention * self.get("fold_s") * self.get("folded")
        load_s, replay_s = self._recovery()
        codecs, disk_bytes_s = self._codecs(setting.codec)
        ship_s = self.get("memory_byte_s")
        return Measured(
            step_s=step_s, state_bytes=self.get("state_bytes"), codecs=codecs, disk_bytes_s=disk_bytes_s,
            sync_s=self.get("sync_s"), base_s=self.get("base_s"),
            load_s=load_s, replay_s=replay_s, fold_s=self.get("fold_s"), keeps_log=keeps_log,
            fetch_s=self.get("fetch_s", self.get("state_bytes") / copy_bytes_s),
            ship_bytes_s=1 / ship_s if ship_s else copy_bytes_s,
            hook_s=self.get("hook_s"), batch_stall_s=self.get("batch_stall_s"),
            base_stall_s=max(self.get("base_stall_s") - folding_s, INTERFERENCE * self.get("base_s")),
            failure_rate=failure_rate,
            memory_bytes=memory_bytes, segment_bytes=segment_bytes, contention=contention,
            background_s=self.get("other_cpu_s", self.get("background_s")),
        )  # fmt: skip

    def _codecs(self, in_force: str) -> tuple[tuple[Codec, ...], float]:
        """What frames cost with lossless codecs and without, and the bytes a second of the disk.

        One of them was measured; the other would put more or fewer bytes into the log, and choose or not. A sync is taken to
        take as long as its bytes are many, which is too long for raw frames where it is not so.
        """
        raw_bytes = self.get("raw_bytes", self.get("frame_bytes"))
        sizes = {AUTO: max(raw_bytes - self.get("saved_bytes"), 0.0), RAW: raw_bytes}
        byte_s, now_bytes = self.get("byte_s"), max(sizes[in_force], 1.0)
        other_s = self.get("other_s")
        if not byte_s:  # all pieces are small, or the log has been in memory only: then a base tells of the disk
            took_s, num_bytes = self.get("write_s"), self.get("frame_bytes")
            if not took_s:
                took_s, num_bytes = self.get("base_s"), self.get("state_bytes")
            else:
                other_s = 0.0
            byte_s = max(took_s, 1e-9) / max(num_bytes, 1.0)
        folding_s = self.get("fold_by_all_s", self.get("fold_s"))
        replaying_s = {name: max(folding_s, READ_SHARE * byte_s * size, 1e-9) for name, size in sizes.items()}
        return tuple(
            Codec(
                name=name, frame_bytes=size, encode_s=other_s + chooses * self.get("choose_s"),
                background_s=chooses * self.get("choose_cpu_s") + self.get("byte_cpu_s") * size,
                sync=max(size, 1.0) / now_bytes, replay=replaying_s[name] / replaying_s[in_force],
            )
            for name, size, chooses in ((AUTO, sizes[AUTO], 1), (RAW, sizes[RAW], 0))
        ), 1 / byte_s  # fmt: skip


def contention_of(num_threads: int, num_cores: int) -> float:
    """What training, which keeps so many cores busy, loses of background work's processor time: all, if no core is left."""
    return CONTENTION if num_threads < num_cores else 1.0


def estimated_rate(num_failures: int, up_s: float) -> float:
    """Failures a second of a run that has had so many in this time; without any, what one in PRIOR_S would have shown."""
    return (num_failures + 1) / (up_s + PRIOR_S)
