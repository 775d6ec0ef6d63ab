"""The shadow's copy of the log: segments in memory, on disk too, the same bytes at the same places."""

from __future__ import annotations

import os

from everstep.errors import StorageError
from everstep.store import files, shared


class LogCopy:
    """Segments on their way from memory to a disk, one after the other. One thread.

    A copy gets the segment's name when it has more than what has that name already: so that what a shadow before this one
    has stored, or this one before an error, stays until then.
    """

    def __init__(self) -> None:
        self._path = ""
        self._file: files.Appender | None = None
        self._is_named = False
        self._stored_bytes = 0
        """So many are on stable storage under the segment's name."""

    def keep(self, path: str, reader: shared.MappedReader, end_offset: int) -> None:
        """Return when the segment is on stable storage up to here. After a StorageError it can be asked for again."""
        if path != self._path:
            self._begin(path)
        if end_offset <= self._stored_bytes:
            return
        try:
            file = self._file = self._file or self._create()
            file.put(reader.view(file.offset, end_offset - file.offset))
            file.sync()
            if not self._is_named:
                files.rename(f"{path}.tmp", path)
                self._is_named = True
        except StorageError:
            self.close()  # what it has is not known: the next attempt copies all
            raise
        self._stored_bytes = end_offset

    def _begin(self, path: str) -> None:
        self.close()
        stored_bytes = 0
        if os.path.exists(path):
            files.sync_file(path)  # who wrote it may have been killed before
            stored_bytes = os.path.getsize(path)
        self._path, self._stored_bytes = path, stored_bytes

    def _create(self) -> files.Appender:
        files.remove(f"{self._path}.tmp")  # of an attempt that failed, or of a shadow that was killed
        return files.Appender(f"{self._path}.tmp", direct=False)

    def close(self) -> None:
        """Let go of the file. Everything that keep() returned for is on stable storage."""
        if self._file is not None:
            self._file.abandon()
        self._file, self._is_named = None, False
