"""A disk that forgets: from the recorded I/O of a run to every tree of files that a crash could leave.

Rules of this disk:
- Bytes of a write, and a truncation, are volatile until a sync of that file that was *begun* after them.
- A name (create, mkdir, rename, exchange, unlink, rmdir) is volatile until a sync of its folder; syncing a file does not
  make its name durable, syncing a folder does not make the folder's own name durable.
- At a crash each volatile operation happened or did not, whatever the others did; a write may have reached any of its
  512-byte sectors. What a file claims to hold but never got is zeros, or bytes that were on that disk before.
- Of a mapped file any page may have been written at any time since its last sync, whatever became of the others: it
  holds a first part of what was stored to it, in order. (`Pages`; of persistent memory, any cache line.) A sync may be of
  a range of bytes only.
- A rename is atomic, and so is an exchange of two names. A process that is killed loses nothing of what it had handed to
  the operating system.
"""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import threading
from dataclasses import dataclass, field
from typing import TypeAlias

from everstep.store.files import Event

SECTOR = 512


@dataclass(frozen=True)
class Recorded:
    """One event, and how many events had been recorded when it was begun (matters for syncs)."""

    event: Event
    begun: int


class Recorder:
    """Observer and fault of files.observe: keeps everything, from all threads."""

    def __init__(self, after: int = 0) -> None:
        """`after`: so many events were recorded before by another one."""
        self.events: list[Recorded] = []
        self._after = after
        self._lock = threading.Lock()
        self._begun = threading.local()

    def begin(self, op: str, path: str) -> None:
        self._begun.at = self._after + len(self.events)

    def observe(self, event: Event) -> None:
        with self._lock:
            self.events.append(Recorded(event, getattr(self._begun, "at", 0)))


@dataclass
class File:
    """Contents on stable storage, and what has been written since."""

    stable: bytes = b""
    pending: list[tuple[int, int, bytes | None]] = field(default_factory=list)
    """(event index, offset, bytes; None: truncate to offset)"""

    def settle(self, before: int, first: int = 0, num_bytes: int = 0) -> None:
        """All that was written before this event is stable; if num_bytes, only so many bytes from `first` on."""
        data, left = bytearray(self.stable), []
        for index, offset, content in self.pending:
            if index >= before:
                left.append((index, offset, content))
            elif not num_bytes or content is None:
                assert not num_bytes, "a mapped file keeps its size"
                _apply(data, offset, content)
            else:
                low, high = max(offset, first), min(offset + len(content), first + num_bytes)
                if low >= high:
                    left.append((index, offset, content))
                    continue
                _apply(data, low, content[low - offset : high - offset])
                rest = ((offset, content[: low - offset]), (high, content[high - offset :]))
                left += [(index, at, part) for at, part in rest if part]
        self.stable, self.pending = bytes(data), left


@dataclass
class Folder:
    """Names on stable storage, changes since, and names as the running system sees them."""

    stable: dict[str, Node] = field(default_factory=dict)
    pending: list[tuple[int, dict[str, Node | None]]] = field(default_factory=list)
    live: dict[str, Node] = field(default_factory=dict)

    def change(self, index: int, names: dict[str, Node | None]) -> None:
        self.pending.append((index, names))
        _rename(self.live, names)

    def settle(self, before: int) -> None:
        for _, names in (p for p in self.pending if p[0] < before):
            _rename(self.stable, names)
        self.pending = [p for p in self.pending if p[0] >= before]


Node: TypeAlias = "File | Folder"
Tree: TypeAlias = dict[str, "bytes | None"]
"""Relative path -> content; None for a folder."""


def _rename(names: dict[str, Node], changes: dict[str, Node | None]) -> None:
    for name, node in changes.items():
        if node is None:
            names.pop(name, None)
        else:
            names[name] = node


def _apply(data: bytearray, offset: int, content: bytes | None) -> None:
    if content is None:
        del data[offset:]
        return
    if offset > len(data):
        data.extend(bytes(offset - len(data)))
    data[offset : offset + len(content)] = content


class Disk:
    """The state of the disk after the events fed to it so far."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.top = Folder()
        self.num_events = 0
        self._removed: dict[str, int] = {}
        """When files were, by their paths."""
        self.written = b""
        """Everything ever written to log files so far: what freed blocks may still hold."""

    def _parts(self, path: str) -> list[str]:
        relative = os.path.relpath(path, self.root)
        assert not relative.startswith(".."), f"{path} is outside of {self.root}"
        return [] if relative == "." else relative.split("/")

    def _folder(self, parts: list[str]) -> Folder:
        node: Node = self.top
        for i, name in enumerate(parts):
            assert isinstance(node, Folder)
            assert name in node.live, f"{'/'.join(parts[: i + 1])} was made without telling store/files.py"
            node = node.live[name]
        assert isinstance(node, Folder)
        return node

    def feed(self, recorded: Recorded) -> None:
        event, index = recorded.event, self.num_events
        self.num_events += 1
        outside = os.path.relpath(event.path, self.root).startswith("..")
        if event.op == "note" or (event.op == "syncdir" and outside):
            return
        parts = self._parts(event.path)
        if event.op == "syncdir":
            self._folder(parts).settle(recorded.begun)
            return
        folder, name = self._folder(parts[:-1]), parts[-1]
        if event.op == "mkdir":
            folder.change(index, {name: Folder()})
        elif event.op == "create":
            old = folder.live.get(name)
            if isinstance(old, File):
                old.pending.append((index, 0, None))
            else:
                folder.change(index, {name: File()})
        elif event.op in ("unlink", "rmdir"):
            folder.change(index, {name: None})
            self._removed[event.path] = index
        elif event.op == "rename":
            target = self._parts(event.target)
            assert target[:-1] == parts[:-1], "renames stay within a folder"
            folder.change(index, {name: None, target[-1]: folder.live[name]})
        elif event.op == "exchange":
            target = self._parts(event.target)
            assert target[:-1] == parts[:-1], "exchanges stay within a folder"
            folder.change(index, {name: folder.live[target[-1]], target[-1]: folder.live[name]})
        elif event.op == "sync" and name not in folder.live:
            # A segment's end is made durable while another process removes it, since a base has all of its steps.
            assert self._removed[event.path] >= recorded.begun, f"{event.path} was removed before it was synced"
        else:
            file = folder.live[name]
            assert isinstance(file, File), f"{event.op} of {event.path}"
            if event.op == "write":
                if name.endswith(".frames"):
                    self.written += event.data
                file.pending.append((index, event.offset, event.data))
            elif event.op == "truncate":
                file.pending.append((index, event.offset, None))
            elif event.op == "sync":
                file.settle(recorded.begun, event.offset, event.num_bytes)
            else:
                raise AssertionError(f"unknown operation {event.op}")

    @property
    def is_settled(self) -> bool:
        """Whether nothing is volatile."""
        return not _any_pending(self.top)

    def tree(self, crash: Crash) -> Tree:
        """What is there after this crash."""
        found: Tree = {}
        self._collect(self.top, "", crash, found)
        return found

    def _collect(self, folder: Folder, prefix: str, crash: Crash, found: Tree) -> None:
        names = dict(folder.stable)
        for index, changes in folder.pending:
            if crash.happened(index):
                _rename(names, changes)
        for name, node in names.items():
            path = prefix + name
            if isinstance(node, Folder):
                found[path] = None
                self._collect(node, path + "/", crash, found)
            else:
                found[path] = crash.content(node)


def _any_pending(node: Node) -> bool:
    if node.pending:
        return True
    return isinstance(node, Folder) and any(_any_pending(n) for n in (*node.stable.values(), *node.live.values()))


class Crash:
    """What became of volatile operations. This one: everything happened, as when only the process dies."""

    def happened(self, index: int) -> bool:
        return True

    def content(self, file: File) -> bytes:
        data = bytearray(file.stable)
        for index, offset, content in file.pending:
            if self.happened(index):
                _apply(data, offset, content)
        return bytes(data)


class Nothing(Crash):
    """No volatile operation reached the disk."""

    def happened(self, index: int) -> bool:
        return False


class Some(Crash):
    """Any of them did, and writes may be torn. `recycled` is what lay on the disk before."""

    def __init__(self, seed: int, recycled: bytes) -> None:
        self.seed = seed
        self._random = random.Random(seed)
        self._recycled = recycled

    def happened(self, index: int) -> bool:
        return random.Random(self.seed * 1_000_003 + index).random() < 0.5

    def content(self, file: File) -> bytes:
        data = bytearray(file.stable)
        for _, offset, content in file.pending:
            fate = self._random.choice(("whole", "lost", "torn", "torn", "torn"))
            if fate == "whole" or (fate == "torn" and content is None):
                _apply(data, offset, content)
            elif fate == "torn" and content:
                self._tear(data, offset, content)
        return bytes(data)

    def _tear(self, data: bytearray, offset: int, content: bytes) -> None:
        """Some sectors of a write, and the file as long as it would have been, or shorter."""
        r = self._random
        kind = r.choice(("prefix", "sectors", "last", "hole", "hole", "none"))
        num = -(-len(content) // SECTOR)
        low = r.randrange(num)
        high = low + 1 + r.randrange(min(8, num - low))
        kept = {
            "prefix": range(r.randrange(num + 1)),
            "sectors": [i for i in range(num) if r.random() < 0.5],
            "last": range(low, num),
            "hole": [i for i in range(num) if not low <= i < high],
            "none": (),
        }[kind]
        full = r.random() < 0.6
        end = offset + (len(content) if full else max((min((i + 1) * SECTOR, len(content)) for i in kept), default=0))
        if end > len(data):
            data.extend(self._filling(end - len(data)))
        for i in kept:
            part = content[i * SECTOR : (i + 1) * SECTOR]
            data[offset + i * SECTOR : offset + i * SECTOR + len(part)] = part

    def _filling(self, num_bytes: int) -> bytes:
        if self._random.random() < 0.5 or len(self._recycled) < num_bytes:
            return bytes(num_bytes)
        begin = self._random.randrange((len(self._recycled) - num_bytes) // SECTOR + 1) * SECTOR
        return self._recycled[begin : begin + num_bytes]


class Pages(Crash):
    """Any page (or `unit` of other size) of a file may have been written at any time since it was synced, by itself."""

    def __init__(self, seed: int, unit: int = 4096) -> None:
        self.seed = seed
        self._unit = unit
        self._random = random.Random(seed)
        self._eager = self._random.choice((0.05, 0.5, 0.5, 0.95))
        """How much has left, on the whole: nearly nothing and nearly everything are cases of their own."""

    def happened(self, index: int) -> bool:
        return random.Random(self.seed * 1_000_003 + index).random() < 0.5

    def content(self, file: File) -> bytes:
        data = bytearray(file.stable)
        stores: dict[int, list[tuple[int, bytes]]] = {}
        for _, offset, content in file.pending:
            assert content is not None
            if offset + len(content) > len(data):
                data.extend(bytes(offset + len(content) - len(data)))
            for at in range(offset // self._unit * self._unit, offset + len(content), self._unit):
                low, high = max(at, offset), min(at + self._unit, offset + len(content))
                stores.setdefault(at, []).append((low, content[low - offset : high - offset]))
        for at in sorted(stores):
            num = self._how_many(len(stores[at]))
            for low, part in stores[at][:num]:
                data[low : low + len(part)] = part
            if num < len(stores[at]) and self._random.random() < 0.3:  # it left while the next was being stored
                low, part = stores[at][num]
                for word in range(0, len(part), 8):
                    if self._random.random() < 0.5:
                        stored = part[word : word + 8]
                        data[low + word : low + word + len(stored)] = stored
        return bytes(data)

    def _how_many(self, num: int) -> int:
        return self._random.randint(0, num) if self._random.random() < 0.3 else num * (self._random.random() < self._eager)


class Images:
    """One folder that becomes one crash image after another; only what differs is written."""

    def __init__(self, root: str) -> None:
        self.root = root
        self._now: Tree = {}
        os.makedirs(root, exist_ok=True)

    def show(self, tree: Tree) -> None:
        for path in sorted((p for p in self._now if p not in tree or _kind(tree[p]) != _kind(self._now[p])), reverse=True):
            full = os.path.join(self.root, path)
            if self._now[path] is None:
                os.rmdir(full)
            else:
                os.unlink(full)
            del self._now[path]
        for path in sorted(tree):
            content = tree[path]
            full = os.path.join(self.root, path)
            if path not in self._now and content is None:
                os.mkdir(full)
            elif content is not None and self._now.get(path) != content:
                with open(full, "wb") as f:
                    f.write(content)
        self._now = dict(tree)

    def copy_to(self, folder: str) -> None:
        shutil.copytree(self.root, folder, dirs_exist_ok=True)


def _kind(content: bytes | None) -> bool:
    return content is None


def fingerprint_of(tree: Tree) -> bytes:
    h = hashlib.blake2b(digest_size=16)
    for path in sorted(tree):
        content = tree[path]
        h.update(f"{path}\0{-1 if content is None else len(content)}\0".encode())
        h.update(content or b"")
    return h.digest()
