"""SQLite killed at every call that changes the disk: acknowledged changes stay, and no batch counts twice.

The store runs in a forked child, with the real SQLite. Its system calls go through `DyingCalls`, which ends
the process in the middle of one, as SIGKILL does: half of a write's bytes are in the file. SQLite offers this
for its own tests (`xSetSystemCall`). The next process must find each change whole or not at all.
"""

import _sqlite3
import ctypes
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from fairlead.base.config import Budget
from fairlead.base.errors import NotFound
from fairlead.store.database import Database
from fairlead.store.records import (
    AddKey,
    KeySet,
    RevokeKey,
    RotateKey,
    Secret,
    SetBudget,
    StoredKey,
    UsageBatch,
    UsageCounts,
    UsageKey,
    UsageQuery,
)
from fairlead.store.sqlite import Sqlite

HOUR = 1_795_870_800
ANA = UsageKey(HOUR, "key-1", "ana", "research", "small", "/v1/chat/completions", "success", minute=7)
ONE = UsageCounts(1, 10, 4, 5, 1500, 20, 700, 15)
ALL = UsageQuery(start=HOUR, end=HOUR + 3600)
STEPS = 8
KILLED = 9


class Vfs(ctypes.Structure):
    """The beginning of `sqlite3_vfs`, to the member that replaces a system call."""

    _fields_ = (
        ("version", ctypes.c_int),
        ("file_size", ctypes.c_int),
        ("path_length", ctypes.c_int),
        *((name, ctypes.c_void_p) for name in ("next", "name", "data")),
        *((f"method{number}", ctypes.c_void_p) for number in range(13)),
        ("set_call", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)),
    )


class DyingCalls:
    """Ends the process at call number `at` of those that change the disk; counts them in `calls`."""

    def __init__(self, at: int) -> None:
        self.calls = 0
        self._at = at
        library = ctypes.CDLL(_sqlite3.__file__)
        library.sqlite3_vfs_find.restype = ctypes.POINTER(Vfs)
        vfs = library.sqlite3_vfs_find(None)
        size = ctypes.c_size_t
        calls = (
            ("write", ctypes.CFUNCTYPE(size, ctypes.c_int, ctypes.c_void_p, size), self.write),
            ("pwrite", ctypes.CFUNCTYPE(size, ctypes.c_int, ctypes.c_void_p, size, size), self.pwrite),
            ("pwrite64", ctypes.CFUNCTYPE(size, ctypes.c_int, ctypes.c_void_p, size, size), self.pwrite),
            ("ftruncate", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, size), self.ftruncate),
            ("unlink", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p), self.unlink),
        )
        self._kept = [(name, kind(call)) for name, kind, call in calls]
        for name, function in self._kept:
            pointer = ctypes.cast(function, ctypes.c_void_p)
            vfs.contents.set_call(ctypes.cast(vfs, ctypes.c_void_p), name.encode(), pointer)

    def write(self, descriptor: int, data: int, size: int) -> int:
        whole = ctypes.string_at(data, size)
        if self._dies():
            os.write(descriptor, whole[: size // 2])
            os._exit(KILLED)
        return os.write(descriptor, whole)

    def pwrite(self, descriptor: int, data: int, size: int, offset: int) -> int:
        whole = ctypes.string_at(data, size)
        if self._dies():
            os.pwrite(descriptor, whole[: size // 2], offset)
            os._exit(KILLED)
        return os.pwrite(descriptor, whole, offset)

    def ftruncate(self, descriptor: int, size: int) -> int:
        if self._dies():
            os._exit(KILLED)
        os.ftruncate(descriptor, size)
        return 0

    def unlink(self, path: bytes) -> int:
        if self._dies():
            os._exit(KILLED)
        Path(os.fsdecode(path)).unlink()
        return 0

    def _dies(self) -> bool:
        self.calls += 1
        return self.calls == self._at


def open_database(path: Path) -> Database:
    return Database(Sqlite(path), usage_days=400, now=lambda: HOUR)


def stored(number: int) -> StoredKey:
    secret = Secret(f"{number:064x}", "fl-…")
    return StoredKey(id=f"key-{number}", name="n", secrets=(secret,), created_at=1.0)


def batch(number: int) -> UsageBatch:
    return UsageBatch("w", number, ((ANA, ONE), (replace(ANA, user="ben"), ONE)))


Change = tuple[str, Callable[[Database], object]]
"""A change's name, and what makes it."""
CHANGES: list[Change] = [
    ("add 1", lambda database: database.change_key(AddKey(stored(1)))),
    ("batch 1", lambda database: database.write(batch(1))),
    ("add 2", lambda database: database.change_key(AddKey(stored(2)))),
    ("budget", lambda database: database.change_budget(SetBudget("team:a", Budget(tokens_per_day=5)))),
    ("rotate 1", lambda database: database.change_key(RotateKey("key-1", Secret("e" * 64, "x"), HOUR + 9.0))),
    ("batch 2", lambda database: database.write(batch(2))),
    ("revoke 2", lambda database: database.change_key(RevokeKey("key-2", float(HOUR)))),
    ("no budget", lambda database: database.change_budget(SetBudget("team:a", None))),
    ("batch 3", lambda database: database.write(batch(3))),
]


def found_changes(keys: KeySet, counts: UsageCounts) -> list[str]:
    """Return the names of the changes that are in the store, as far as its content tells."""
    by_id = {key.id: key for key in keys.keys}
    found = [f"add {number}" for number in (1, 2) if f"key-{number}" in by_id]
    if "key-1" in by_id and len(by_id["key-1"].secrets) == 2:
        found.append("rotate 1")
    if "key-2" in by_id and by_id["key-2"].revoked_at is not None:
        found.append("revoke 2")
    if "team:a" in keys.budgets:
        found.append("budget")
    assert counts == UsageCounts(*(counts.requests * each for each in (1, 10, 4, 5, 1500, 20, 700, 15)))
    return found + [f"batch {number}" for number in (1, 2, 3) if 2 * number <= counts.requests]


def total(database: Database, width_s: int = 3600) -> UsageCounts:
    return sum((counts for _, counts in database.usage(replace(ALL, width_s=width_s))), UsageCounts())


def run_child(path: Path, at: int) -> tuple[list[str], int]:
    """Make all changes in a child that ends at a call; return those that it acknowledged, and its status."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            calls = DyingCalls(at)  # SQLite calls it as long as the process lives
            database = open_database(path)
            for name, change in CHANGES:
                change(database)
                os.write(writing, f"{name}\n".encode())
            database.close()
            os._exit(0 if calls.calls < at else 1)
        finally:
            os._exit(1)
    os.close(writing)
    with os.fdopen(reading) as acknowledged:
        names = acknowledged.read().splitlines()
    return names, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def check(path: Path, acknowledged: list[str]) -> None:
    """Check what the next process finds, and that it can go on from there."""
    database = open_database(path)
    counts = total(database)
    found = set(found_changes(database.keys(-1), counts))
    if "no budget" in acknowledged:
        assert "budget" not in found
        found |= {"budget"}
    made = [name for name, _ in CHANGES if name != "no budget"]
    known = [name for name in acknowledged if name != "no budget"]
    # What was acknowledged is there, and at most the one change after it, of which the answer was lost.
    assert set(known) <= found <= set(made[: len(known) + 1]) | {"budget"}, acknowledged
    assert total(database, 60) == counts, "minutes and hours are written together"
    spent = sum(each.tokens for each in database.spent(["2026-11"], ["team:research"]))
    assert spent == counts.budget_tokens
    # The other process sends again what it does not know to be written.
    for number in (1, 2, 3):
        database.write(batch(number))
    assert total(database).requests == 6
    for number in (1, 2):
        try:
            database.change_key(RotateKey(f"key-{number}", Secret(f"f{number}" * 32, "x"), HOUR + 9.0))
        except NotFound:
            assert number == 2 or f"add {number}" not in found
    database.close()


@pytest.mark.parametrize("step", range(STEPS))
def test_process_that_is_killed_at_any_write_loses_no_acknowledged_change(tmp_path, step):
    """Each step kills at every eighth call, so that the parts run side by side."""
    at, kills = step + 1, 0
    while True:
        path = tmp_path / f"{at}" / "fairlead.db"
        acknowledged, status = run_child(path, at)
        assert status in (0, KILLED), acknowledged
        if status == 0:
            assert acknowledged == [name for name, _ in CHANGES]
        check(path, acknowledged)
        if status == 0:
            break
        kills += 1
        at += STEPS
    assert kills > 5


class WithoutTransactions(Database):
    """A mutant: each statement is committed on its own."""

    def _run(self, cursor, text, values):
        super()._run(cursor, text, values)
        if cursor.connection.in_transaction:
            cursor.execute("COMMIT")
            cursor.execute("BEGIN IMMEDIATE")

    def _run_all(self, cursor, text, rows):
        for row in rows:
            self._run(cursor, text, row)


def test_mutant_a_change_that_is_not_one_transaction_is_found(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "Database", WithoutTransactions)

    def kill_everywhere() -> None:
        for step in range(STEPS):
            test_process_that_is_killed_at_any_write_loses_no_acknowledged_change(tmp_path / str(step), step)

    with pytest.raises(AssertionError):
        kill_everywhere()
