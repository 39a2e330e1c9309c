"""Writing to a disk that may lose what was not synchronized, and a process that may end at any time.

A file appears whole or not at all; a journal keeps whole lines. Nothing here knows what they contain.
"""

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Self

READ_BYTES = 1024 * 1024


class NewFile:
    """A file that appears at `path` when `publish` returns, and not before. `close` removes it otherwise.

    Until then it has the same name with `.new`, which a later one of the same name replaces. A block opens
    and closes it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._new = path.with_name(path.name + ".new")
        self._file: IO[bytes] | None = None

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        self.close()

    def open(self) -> None:
        """Create the file."""
        self._file = self._new.open("wb")

    def close(self) -> None:
        """Remove the file, unless it has appeared."""
        if self._file is not None:
            self._file.close()
            self._file = None
            self._new.unlink(missing_ok=True)

    def write(self, data: bytes) -> None:
        """Append data."""
        assert self._file is not None
        self._file.write(data)

    def publish(self) -> None:
        """Make the file appear, in place of any other. After this it survives a power failure."""
        assert self._file is not None
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._file = None
        self._new.replace(self._path)
        sync_folder(self._path.parent)


def write_whole(path: Path, data: bytes) -> None:
    """Write a file that appears whole or not at all, in place of any other."""
    with NewFile(path) as file:
        file.write(data)
        file.publish()


def append_lines(path: Path, lines: bytes) -> None:
    """Append whole lines to a journal, and wait until they survive a power failure."""
    assert lines.endswith(b"\n")
    is_new = not path.exists()
    with path.open("ab", buffering=0) as file:
        left = memoryview(lines)
        while left:
            left = left[file.write(left) :]
        os.fsync(file.fileno())
    if is_new:
        sync_folder(path.parent)


def repair_journal(path: Path, is_valid: Callable[[bytes], bool]) -> None:
    """Cut a journal before its first line that is invalid or has no end: it was not synchronized."""
    if not path.exists():
        return
    size = 0
    with path.open("rb") as file:
        for line in file:
            if not (line.endswith(b"\n") and is_valid(line)):
                break
            size += len(line)
    with path.open("r+b") as file:
        file.truncate(size)
        os.fsync(file.fileno())


def read_pieces(path: Path, start: int, size: int) -> bytes:
    """Return up to `size` bytes of a file from `start` on; fewer only at its end."""
    with path.open("rb") as file:
        return os.pread(file.fileno(), size, start)


def lines_of(path: Path, longest: int) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file that are not blank, each with its offset. Longer ones are cut at `longest`.

    Takes memory for one line.
    """
    with path.open("rb") as file:
        start = 0
        while line := file.readline(longest + 1):
            end = start + len(line)
            is_cut = len(line) > longest and not line.endswith(b"\n")
            while is_cut and (rest := file.readline(READ_BYTES)):
                end += len(rest)
                if rest.endswith(b"\n"):
                    break
            if line.strip():
                yield start, line
            start = end


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class FolderLock:
    """The right to work in a folder, of one process at a time. The kernel frees it when a process ends."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[bytes] | None = None

    def acquire(self) -> bool:
        """Take the lock, unless another process has it; return whether it is held now."""
        if self._file is None:
            file = self._path.open("ab")
            with suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._file = file
                return True
            file.close()
            return False
        return True

    def release(self) -> None:
        """Give the lock back, if it is held."""
        if self._file is not None:
            self._file.close()
            self._file = None
