"""SQLite as the store: one file, which only its owner may read. Several processes may use it."""

import os
import sqlite3
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

LOCKED_S = 2.0
"""How long a statement waits for another process that writes."""
STATEMENT_S = 10.0
"""How long a statement may run."""
_STEPS = 10_000  # of SQLite's machine between two looks at the clock


class Sqlite:
    """A file; its folder is made if it is missing."""

    # A transaction that reads first could not write if another process did so meanwhile.
    begin = "BEGIN IMMEDIATE"
    errors: tuple[type[Exception], ...] = (sqlite3.Error, OSError)
    data_errors: tuple[type[Exception], ...] = (sqlite3.DataError, OverflowError)

    def __init__(self, path: Path) -> None:
        self.path = path

    def connect(self) -> sqlite3.Connection:
        """Return a connection whose commits survive the end of this process and of the machine."""
        _make_folder(self.path.parent)
        # Only a file that is not there: closing another descriptor would drop all locks that connections of
        # this process have, and another process would remove what they have written.
        with suppress(FileExistsError):
            os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        connection = _Limited(
            self.path, timeout=LOCKED_S, isolation_level=None, check_same_thread=False, cached_statements=32
        )
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")
        except BaseException:
            connection.close()
            raise
        return connection

    def statement(self, text: str) -> str:
        """Return the statement as it is."""
        return text

    def prepare(self, cursor: Any) -> None:
        """Do nothing: the transaction excludes other writers."""


def _make_folder(folder: Path) -> None:
    """Make a folder and those above it that are missing. Only their owner may enter them.

    The mode is set afterwards: this is a thread, and while the program listens on a Unix socket its umask
    would make folders that nobody can enter.
    """
    if folder.exists():
        return
    _make_folder(folder.parent)
    try:
        folder.mkdir()
    except FileExistsError:  # by another process meanwhile
        return
    folder.chmod(0o700)


class _Limited(sqlite3.Connection):
    """A connection that interrupts a statement after `STATEMENT_S`."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._ends_at = 0.0
        self.set_progress_handler(self._is_late, _STEPS)

    def cursor(self, *arguments: Any, **options: Any) -> Any:
        """Return a cursor. Each transaction uses one of its own, so the time begins here."""
        self._ends_at = time.monotonic() + STATEMENT_S
        return super().cursor(*arguments, **options)

    def _is_late(self) -> bool:
        return time.monotonic() > self._ends_at
