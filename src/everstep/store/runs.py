"""A run's folder: its documents, its lock, and the listing from which everything else is planned."""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import json
import os
import re
import socket
import struct
import time
import uuid
from dataclasses import dataclass, field

import xxhash

from everstep.atoms import Layout
from everstep.errors import CorruptionError, FormatError, NotARunError, RunBusyError, UsageError
from everstep.format import documents
from everstep.format.documents import (
    FORMAT_MAJOR,
    FORMAT_MINOR,
    KNOWN,
    GenerationDocument,
    KeptDocument,
    Manifest,
    RunDocument,
    TimelineDocument,
    TuningDocument,
)
from everstep.format.parts import Part
from everstep.format.segment import parse_name
from everstep.store import bases, files, pools, shared
from everstep.store.segments import Segment

RUN_FILE = "run.json"
LOCK_FILE = "lock"
TUNING_FILE = "tuning.json"
_OURS = {RUN_FILE, LOCK_FILE, TUNING_FILE, "timelines", "pool"}


class RunPath:
    """Where the parts of a run are."""

    def __init__(
        self, path: str | os.PathLike[str], rank: int = 0, bad_slots: set[tuple[int, int]] | None = None
    ) -> None:
        """`rank`: whose part of it. Documents are the run's; log, bases, retention and lock are a rank's own.

        `bad_slots`: (generation, step) of slots of pools that turned out to be damaged, and do not count.
        """
        if not isinstance(path, (str, os.PathLike)) or "://" in os.fspath(path):
            raise UsageError(f"a run is at the path of a folder on a mounted file system, not at {path!r}")
        self.path = os.path.abspath(os.fspath(path))
        self.rank = rank
        self.bad_slots: set[tuple[int, int]] = set() if bad_slots is None else bad_slots

    def part(self, rank: int) -> RunPath:
        """The same run, seen as another rank's."""
        return RunPath(self.path, rank, self.bad_slots)

    def run_file(self) -> str:
        return os.path.join(self.path, RUN_FILE)

    def timelines(self) -> str:
        return os.path.join(self.path, "timelines")

    def timeline(self, number: int) -> str:
        return os.path.join(self.timelines(), f"{number:04d}")

    def generations(self, timeline: int) -> str:
        return os.path.join(self.timeline(timeline), "generations")

    def layouts(self, timeline: int) -> str:
        return os.path.join(self.timeline(timeline), "layouts")

    def bases(self, timeline: int) -> str:
        """Rank 0's are where those of a run of one process are; the others' are below."""
        folder = os.path.join(self.timeline(timeline), "bases")
        return os.path.join(folder, f"rank-{self.rank:05d}") if self.rank else folder

    def log(self, timeline: int) -> str:
        return os.path.join(self.timeline(timeline), "log", f"rank-{self.rank:05d}")

    def kept(self, timeline: int) -> str:
        name = f"kept-{self.rank:05d}.json" if self.rank else "kept.json"
        return os.path.join(self.timeline(timeline), name)

    def pool(self, folder: str) -> str:
        """Where a generation's pools are, from what its document says."""
        return os.path.join(self.path, folder)

    def pool_name(self, run: str, place: str) -> str:
        """For pools in this place, what a generation's document says; empty: in the run's own folder."""
        # A copy of a run is another run, and must not write into its pools.
        own = os.path.basename(shared.shared_folder(run, self.path))
        return os.path.join(os.path.abspath(place), f"everstep-pool-{own}") if place else "pool"

    def is_own_pool(self, run: str, folder: str) -> bool:
        """Whether nobody but this run, at this path, writes pools there."""
        return folder in (self.pool("pool"), self.pool(self.pool_name(run, os.path.dirname(folder))))

    def tuning(self) -> str:
        return os.path.join(self.path, f"tuning-{self.rank:05d}.json" if self.rank else TUNING_FILE)

    def lock(self) -> str:
        return os.path.join(self.path, f"{LOCK_FILE}-{self.rank:05d}" if self.rank else LOCK_FILE)

    def exists(self) -> bool:
        """Whether there is a run here. NotARunError if something else is in the way."""
        if os.path.isfile(self.run_file()):
            return True
        if not os.path.lexists(self.path):
            return False
        if not os.path.isdir(self.path):
            raise NotARunError(f"{self.path} is a file, not a folder: give the path of a run, or of a new folder")
        if any(files.listing(os.path.join(self.timelines(), t)) for t in files.listing(self.timelines())):
            if os.path.isfile(self.run_file()):
                return True  # another process has just made it
            raise CorruptionError(
                f"{self.run_file()} is missing, though there are timelines beside it: this was a run. Put the file back "
                "from a copy, or give another path"
            )
        others = [
            n for n in files.listing(self.path)
            if n not in _OURS and not n.endswith(".tmp") and not n.startswith(f"{LOCK_FILE}-")
        ]  # fmt: skip
        if others:
            raise NotARunError(
                f"{self.path} is a folder with other things in it ({', '.join(others[:3])}), not an Everstep run: "
                "give the path of a run, or of a new or empty folder"
            )
        return False

    def must_exist(self) -> None:
        """NotARunError unless there is a run here."""
        if not self.exists():
            what = "an empty folder" if os.path.isdir(self.path) else "nothing"
            raise NotARunError(f"no Everstep run at {self.path}: there is {what}. Check the path")

    def read_run(self) -> RunDocument:
        """run.json. FormatError if this version must not read the run."""
        data = files.read_whole(self.run_file())
        told = documents.told_format(data)
        if told is not None and told[0] > FORMAT_MAJOR:
            raise FormatError(
                f"{self.path} has format {told[0]}.{told[1]}; this version of Everstep reads up to {FORMAT_MAJOR}."
                f"{FORMAT_MINOR}. Upgrade Everstep to use this run"
            )
        document = documents.decode(data, RunDocument, self.run_file())
        unknown = [feature for feature in document.incompatible if feature not in KNOWN]
        if document.format[0] > FORMAT_MAJOR or unknown:
            features = f", features {', '.join(unknown)}" if unknown else ""
            raise FormatError(
                f"{self.path} has format {document.format[0]}.{document.format[1]}{features}; this version of Everstep "
                f"reads up to {FORMAT_MAJOR}.{FORMAT_MINOR}. Upgrade Everstep to use this run"
            )
        return document

    def create(self) -> RunDocument:
        """run.json and what it needs; durable on return. The folder is there and locked."""
        now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        document = RunDocument(uuid.uuid4().hex, (FORMAT_MAJOR, FORMAT_MINOR), now)
        files.make_dir(self.timelines())
        files.write_whole(self.run_file(), documents.encode(document))
        return document

    def require(self, *features: str) -> None:
        """From now on readers must know these features. Only for the writer; durable on return."""
        document = self.read_run()
        new = tuple(feature for feature in features if feature not in document.incompatible)
        if new:
            document.incompatible += new
            files.write_whole(self.run_file(), documents.encode(document))

    def create_timeline(self, document: TimelineDocument) -> None:
        """Folders of a new timeline; its document last."""
        top = self.timeline(document.timeline)
        files.make_dir(top)
        for folder in (self.generations, self.layouts, self.bases):
            files.make_dir(folder(document.timeline))
        files.make_dir(os.path.join(top, "log"))
        files.make_dir(self.log(document.timeline))
        files.write_whole(os.path.join(top, "timeline.json"), documents.encode(document))

    def generation_file(self, timeline: int, generation: int) -> str:
        return os.path.join(self.generations(timeline), f"{generation:06d}.json")

    def write_generation(self, document: GenerationDocument) -> None:
        files.write_whole(self.generation_file(document.timeline, document.generation), documents.encode(document))

    def log_has_begun(self, timeline: int, generation: int) -> None:
        """This rank's log of the generation is on disk from now on: should it be missing, that is damage. Durable."""
        files.write_whole(os.path.join(self.generations(timeline), f"{generation:06d}.log-{self.rank:05d}"), b"begun\n")

    def pool_has_begun(self, timeline: int, generation: int) -> None:
        """This rank's pool of the generation holds a step from now on: should it be missing, something is lost. Durable."""
        files.write_whole(self._pool_mark(timeline, generation), b"begun\n")

    def pool_is_not_needed(self, timeline: int, generation: int) -> None:
        """All that it holds is in bases: it may go."""
        if os.path.exists(self._pool_mark(timeline, generation)):
            files.remove(self._pool_mark(timeline, generation))
            files.sync_dir(self.generations(timeline))

    def _pool_mark(self, timeline: int, generation: int) -> str:
        return os.path.join(self.generations(timeline), f"{generation:06d}.pool-{self.rank:05d}")

    def read_generation(self, timeline: int, generation: int) -> GenerationDocument:
        path = self.generation_file(timeline, generation)
        return documents.decode(files.read_whole(path), GenerationDocument, path)

    def write_layout(self, timeline: int, layout: Layout) -> None:
        """Durable on return."""
        files.write_whole(os.path.join(self.layouts(timeline), f"{layout.id}.json"), documents.encode(layout))

    def sync(self, paths: list[str]) -> None:
        """Make these files and all folders above them, up to the run's own name, durable."""
        folders = {os.path.dirname(self.path)}
        for path in [self.run_file(), *paths]:
            files.sync_file(path)
            folder = os.path.dirname(path)
            while len(folder) >= len(self.path):
                folders.add(folder)
                folder = os.path.dirname(folder)
        for folder in sorted(folders, reverse=True):
            files.sync_dir(folder)

    def read_kept(self, timeline: int) -> KeptDocument:
        """Which steps may be missing; none if nothing was ever removed."""
        file = self.kept(timeline)
        try:
            return documents.decode(files.read_whole(file), KeptDocument, file)
        except FileNotFoundError:
            return KeptDocument(0)

    def write_kept(self, timeline: int, document: KeptDocument) -> None:
        files.write_whole(self.kept(timeline), documents.encode(document))

    def read_tuning(self) -> TuningDocument:
        """What the tuner knew; empty if there was none."""
        try:
            return documents.decode(files.read_whole(self.tuning()), TuningDocument, self.tuning())
        except FileNotFoundError:
            return TuningDocument()

    def write_tuning(self, document: TuningDocument) -> None:
        files.write_whole(self.tuning(), documents.encode(document))

    def make_part(self, timeline: int) -> None:
        """The folders of this rank's own; durable on return."""
        for folder in (self.bases(timeline), self.log(timeline)):
            if not os.path.isdir(folder):
                files.make_dir(folder)

    def clean(self, timeline: int) -> None:
        """Remove what crashes have left unfinished: bases without a manifest, temporary files. Only for the writer."""
        for name in files.listing(self.bases(timeline)):
            folder = os.path.join(self.bases(timeline), name)
            litter = name.endswith(".tmp") or (name.isdigit() and not bases.is_there(folder))
            if os.path.isdir(folder) and litter:
                bases.remove_base(folder)
        if self.rank:
            return
        for folder in (self.path, self.timeline(timeline), self.generations(timeline), self.layouts(timeline)):
            for name in files.listing(folder):
                if name.endswith(".tmp"):
                    files.remove(os.path.join(folder, name))

    def remove_after(self, timeline: int, step: int) -> None:
        """Remove this rank's bases of later steps: a generation has just begun at this one, and they count no more. Nor
        must they look like those that it will write."""
        for name in files.listing(self.bases(timeline)):
            folder = os.path.join(self.bases(timeline), name)
            if name.isdigit() and int(name) > step and os.path.isdir(folder):
                bases.remove_base(folder)

    def read_layout(self, layout_id: str, timelines: list[int]) -> Layout:
        """A layout by its id, wherever it was written."""
        failures = []
        for timeline in timelines:
            path = os.path.join(self.layouts(timeline), f"{layout_id}.json")
            try:
                data = files.read_whole(path)
                layout = documents.decode(data, Layout, path)
                found = xxhash.xxh3_128_hexdigest(documents.body(data))[:16]
                if found == layout_id:
                    return layout
                failures.append(f"{path} is not what its name says: it is layout {found}")
            except FileNotFoundError:
                continue
            except CorruptionError as e:
                failures.append(str(e))
        raise CorruptionError("; ".join(failures) or f"layout {layout_id} of {self.path} is missing")


_held: dict[tuple[int, int], int] = {}
"""(device, inode) of lock files held by this process -> descriptor"""


def _drop_in_child() -> None:
    """A forked child must not keep its parent's lock alive."""
    for fd in _held.values():
        with contextlib.suppress(OSError):
            os.close(fd)
    _held.clear()


os.register_at_fork(after_in_child=_drop_in_child)


def _lock(fd: int, *, take: bool = True) -> None:
    """OSError if another process holds it. The lock belongs to this open file: closing others does not give it away.

    Not `take`: it is nobody's any more, whatever descriptors of this open file a child has that was forked just now.
    """
    if hasattr(fcntl, "F_OFD_SETLK"):
        kind = fcntl.F_WRLCK if take else fcntl.F_UNLCK
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", kind, os.SEEK_SET, 0, 0, 0))
    else:  # not Linux
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB if take else fcntl.LOCK_UN)


class WriterLock:
    """The right to write a run: it dies with the process, and forked children let go of it at once."""

    def __init__(self, path: RunPath) -> None:
        self._file = path.lock()
        self._pid = os.getpid()
        deadline = time.monotonic() + 2.0
        while not self._try(path):
            # A killed holder's child may need a moment to let go; a living holder is believed at once.
            if time.monotonic() > deadline or _is_alive(self._before):
                holder = self._before.decode(errors="replace").strip() or "unknown"
                raise RunBusyError(
                    f"{path.path} is being written by another process: {holder}. Stop it first, attach to another path, "
                    "or use everstep.open(run) to read while it runs"
                )
            time.sleep(0.02)
        _held[self._key] = self._fd
        self._write((json.dumps(describe_writer()) + "\n").encode())
        self.used = False
        """Set when this holder has written to the run; else release() leaves no trace."""

    def _try(self, path: RunPath) -> bool:
        """Whether the lock on the file that now has the name was got."""
        self._made = not os.path.exists(self._file)
        if not self._made:
            with contextlib.suppress(FileNotFoundError):
                stat = os.stat(self._file)
                if (stat.st_dev, stat.st_ino) in _held:
                    raise RunBusyError(
                        f"{path.path} is already attached in this process. Close that Run first, or attach to another path"
                    )
        fd = files.open_lock(self._file)
        self._before = os.pread(fd, 4096, 0)
        try:
            _lock(fd)
            mine, named = os.fstat(fd), os.stat(self._file)
            if (mine.st_dev, mine.st_ino) == (named.st_dev, named.st_ino):
                self._fd, self._key = fd, (mine.st_dev, mine.st_ino)
                return True
        except OSError:
            pass
        os.close(fd)
        return False

    def _write(self, data: bytes) -> None:
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, data, 0)

    def release(self) -> None:
        if self._fd >= 0 and os.getpid() == self._pid:
            if not self.used:
                if self._made:
                    with contextlib.suppress(OSError):
                        os.unlink(self._file)
                else:
                    self._write(self._before)
            _held.pop(self._key, None)
            _lock(self._fd, take=False)
            os.close(self._fd)
        self._fd = -1


def _is_alive(holder: bytes) -> bool:
    """Whether the process that a lock file names lives (or cannot be told: another host)."""
    try:
        found = json.loads(holder)
        if found["host"] != socket.gethostname():
            return True
        os.kill(found["pid"], 0)
    except ProcessLookupError:
        return False
    except (ValueError, KeyError, TypeError, OSError):
        return True
    return True


def describe_writer() -> dict[str, object]:
    """Who writes: for the lock file, generations and messages."""
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "since": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


@dataclass
class TimelineListing:
    document: TimelineDocument
    generations: dict[int, GenerationDocument] = field(default_factory=dict)
    unread: set[int] = field(default_factory=set)
    """Generations whose documents are damaged."""
    bases: dict[int, Manifest] = field(default_factory=dict)
    segments: list[Segment] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    damaged: dict[int, str] = field(default_factory=dict)
    """By step: bases that cannot be read, and why. Among the problems, too."""
    partial: list[str] = field(default_factory=list)
    """Bases of which only parts are here."""
    kept: KeptDocument = field(default_factory=lambda: KeptDocument(0))
    logs: set[int] = field(default_factory=set)
    """Generations whose log has been on disk."""
    pools: set[int] = field(default_factory=set)
    """Generations whose pool has held a step."""


@dataclass
class Listing:
    """All that a run's folder holds, read once."""

    run: RunDocument
    path: RunPath
    timelines: dict[int, TimelineListing]
    problems: list[str]
    shared: str = ""
    """The run's folder in this host's memory, if there is one."""
    slots: list[tuple[Manifest, str]] = field(default_factory=list)
    """Committed slots of pools, and the folders that these are in."""
    pool_problems: list[tuple[int, str]] = field(default_factory=list)
    """Pools that cannot be read, by generation. There may be bases in their stead."""

    def generations(self) -> dict[int, GenerationDocument]:
        return {n: g for t in self.timelines.values() for n, g in t.generations.items()}


def read_listing(path: RunPath, part: Part | None = None) -> Listing:
    """Read all documents and scan all segments; with `part`, that part of bases. Damage is collected in `problems`, not
    raised."""
    path.must_exist()
    run = path.read_run()
    while True:
        begun = _generation_names(path)
        listing = Listing(run, path, {}, [], shared.shared_folder(run.run, path.path))
        for name in _timeline_names(path):
            _read_timeline(listing, int(name), part)
        _read_slots(listing)
        if _generation_names(path) == begun:
            return listing
        # A generation has been opened meanwhile: what it wrote may have been read, and its document not.


def _timeline_names(path: RunPath) -> list[str]:
    return [name for name in files.listing(path.timelines()) if re.fullmatch(r"\d{4,}", name)]


def _generation_names(path: RunPath) -> list[tuple[str, str]]:
    """Of all documents of generations, damaged or not: timeline and file."""
    return [
        (timeline, name)
        for timeline in _timeline_names(path)
        for name in files.listing(path.generations(int(timeline)))
        if name.endswith(".json")
    ]


def _read_slots(listing: Listing) -> None:
    path, run, generations = listing.path, listing.run.run, listing.generations()
    held: set[int] = set()
    for folder in sorted({path.pool(g.pool) for g in generations.values() if g.pool}):
        found, problems = pools.read_pools(folder, run, path.rank)
        for manifest in found:
            # Where this run was copied from, its pools are now another's: a generation's slots are where it says.
            by = generations.get(manifest.generation)
            here = path.is_own_pool(run, folder) if by is None else path.pool(by.pool) == folder
            if here:
                held.add(manifest.generation)
            if here and (manifest.generation, manifest.step) not in path.bad_slots:
                listing.slots.append((manifest, folder))
        listing.pool_problems += problems
    _miss_pool(listing, generations, held | {generation for generation, _ in listing.pool_problems})


def _miss_pool(listing: Listing, generations: dict[int, GenerationDocument], seen: set[int]) -> None:
    """Of the newest generations, which wrote to pools: whether the last one that held a step is there, and holds one.

    `seen`: generations of which there are slots, or problems that have been told.
    """
    path = listing.path
    found = generations.get(max(generations, default=0))
    while found is not None and found.pool:
        if found.generation in listing.timelines[found.timeline].pools:
            folder = path.pool(found.pool)
            if not pools.has_pools(folder, path.rank, found.generation):
                listing.pool_problems.append((
                    found.generation,
                    f"the pool of generation {found.generation} in {folder} is gone: it was removed, or its memory did not "
                    "survive the host",
                ))  # fmt: skip
            elif found.generation not in seen:
                listing.pool_problems.append((
                    found.generation,
                    f"the pool of generation {found.generation} in {folder} has held steps, and none of its slots has a "
                    "valid header any more",
                ))  # fmt: skip
            return
        found = generations.get(found.parent or 0)


def _read_kept(path: RunPath, number: int, timeline: TimelineListing) -> None:
    """After everything else: then it knows of all that retention has removed meanwhile."""
    try:
        timeline.kept = path.read_kept(number)
    except CorruptionError as e:
        timeline.problems.append(str(e))
    gone = [s for s in timeline.segments if s.is_gone and not s.in_memory]
    timeline.problems += [f"{s.path} is gone" for s in gone if s.first_step > timeline.kept.horizon]


def _read_timeline(listing: Listing, number: int, part: Part | None) -> None:
    path = listing.path
    file = os.path.join(path.timeline(number), "timeline.json")
    try:
        document = documents.decode(files.read_whole(file), TimelineDocument, file)
    except FileNotFoundError:
        if not files.listing(path.generations(number)):
            return  # a crash while it was being made: nothing can be in it
        listing.problems.append(f"{file} is missing")
        document = TimelineDocument(number)
    except CorruptionError as e:
        # What it says can be told again from its generations, except for where it forked.
        listing.problems.append(str(e))
        document = TimelineDocument(number)
    if document.timeline != number:
        listing.problems.append(f"{file} is not what its name says: it is of timeline {document.timeline}")
    timeline = TimelineListing(document)
    listing.timelines[number] = timeline
    for name in files.listing(path.generations(number)):
        begun = re.fullmatch(r"(\d{6,})\.log-(\d{5,})", name)
        if begun and int(begun[2]) == path.rank:
            timeline.logs.add(int(begun[1]))
        filled = re.fullmatch(r"(\d{6,})\.pool-(\d{5,})", name)
        if filled and int(filled[2]) == path.rank:
            timeline.pools.add(int(filled[1]))
        if not re.fullmatch(r"\d{6,}\.json", name):
            continue
        file = os.path.join(path.generations(number), name)
        try:
            generation = documents.decode(files.read_whole(file), GenerationDocument, file)
            if (generation.timeline, f"{generation.generation:06d}.json") != (number, name):
                raise CorruptionError(f"{file} is not what its name says: it is of generation {generation.generation}")
            timeline.generations[generation.generation] = generation
        except (CorruptionError, FileNotFoundError) as e:
            timeline.problems.append(str(e) if isinstance(e, CorruptionError) else f"{file} leads nowhere")
            timeline.unread.add(int(name.removesuffix(".json")))
    for name in files.listing(path.bases(number)):
        if not re.fullmatch(r"\d{12,}", name):
            continue
        try:
            manifest = bases.read_manifest(os.path.join(path.bases(number), name), part)
        except CorruptionError as e:
            timeline.damaged[int(name)] = str(e)
            continue
        if manifest is None:
            here = bases.parts_there(os.path.join(path.bases(number), name))
            if here:
                timeline.partial.append(f"of step {int(name)} {here}")
            continue
        if (manifest.run, manifest.timeline, manifest.step) != (listing.run.run, number, int(name)):
            timeline.damaged[int(name)] = (
                f"{os.path.join(path.bases(number), name)} is not what its name says: it is step {manifest.step} of "
                f"timeline {manifest.timeline}"
            )
            continue
        timeline.bases[manifest.step] = manifest
    timeline.problems += timeline.damaged.values()
    for name in files.listing(path.log(number)):
        parsed = parse_name(name)
        if parsed is None:
            continue
        file = os.path.join(path.log(number), name)
        segment = Segment(file, listing.run.run, path.rank, *parsed)
        timeline.segments.append(segment)
        try:
            segment.scan()
        except CorruptionError as e:
            timeline.problems.append(str(e))
            segment.give_up()
        timeline.problems.extend(segment.problems)
    in_memory = shared.log_folder(listing.shared, number, path.rank)
    for name in files.listing(in_memory):
        parsed = parse_name(name)
        if parsed is not None:
            file = os.path.join(in_memory, name)
            timeline.segments.append(Segment(file, listing.run.run, path.rank, *parsed, in_memory=True).scan())
    _read_kept(path, number, timeline)
