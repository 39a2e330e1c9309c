"""A batch has each result once, wherever its process or its disk ends."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
import trio.testing

from fairlead.server.batches import disk
from fairlead.server.batches.records import FINAL
from fairlead.server.batches.store import JournalLine
from server.batches.played import Execution, Folder, lines_for

COUNT = 7
EXPECTED = sorted(f"id-{index}" for index in range(COUNT))


@pytest.fixture(autouse=True)
def _disk_without_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the disk at once: virtual time passes while a thread waits for a slow one."""

    async def call_now(call: Callable[..., Any], *arguments: object) -> Any:
        await trio.lowlevel.checkpoint()
        return call(*arguments)

    monkeypatch.setattr("fairlead.server.batches.runner.in_thread", call_now)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


class Killed(SystemExit):
    """The process has ended."""


class DyingDisk:
    """Ends the process at its system call number `at`, of those that change the disk.

    A write to the journal that is cut has written half of its bytes.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
        self.calls = 0
        self.at = at
        self.is_dead = False
        real_append, real_fsync = disk.append_lines, os.fsync
        real_replace, real_unlink = Path.replace, Path.unlink

        def append(path: Path, lines: bytes) -> None:
            if self.ends():
                with path.open("ab") as file:
                    file.write(lines[: len(lines) // 2])
                raise Killed
            real_append(path, lines)

        def fsync(descriptor: int) -> None:
            self.check()
            real_fsync(descriptor)

        def replace(path: Path, target: Path) -> Path:
            self.check()
            return real_replace(path, target)

        def unlink(path: Path, *, missing_ok: bool = False) -> None:
            if not path.name.endswith(".new"):  # which a dead process does not remove, and nobody reads
                self.check()
            real_unlink(path, missing_ok=missing_ok)

        monkeypatch.setattr("fairlead.server.batches.store.append_lines", append)
        monkeypatch.setattr(os, "fsync", fsync)
        monkeypatch.setattr(Path, "replace", replace)
        monkeypatch.setattr(Path, "unlink", unlink)

    def ends(self) -> bool:
        self.calls += 1
        self.is_dead |= self.calls == self.at
        return self.is_dead

    def check(self) -> None:
        if self.ends():
            raise Killed


def run(folder: Folder, execution: Execution) -> None:
    trio.run(folder.run_to_the_end, execution, clock=trio.testing.MockClock(autojump_threshold=0))


def killed(folder: Folder, execution: Execution) -> bool:
    """Run the batch; return whether its process was killed."""
    was_killed = False
    try:
        run(folder, execution)
    except* Killed:
        was_killed = True
    return was_killed


@pytest.mark.parametrize("step", range(8))
def test_process_that_is_killed_at_any_write_leaves_each_result_once(tmp_path, step):
    """Each step kills at every eighth call, so that the parts run side by side."""
    at = step + 1
    while True:
        folder = Folder(tmp_path / str(at), lines_for(COUNT))
        with pytest.MonkeyPatch.context() as monkeypatch:
            dying = DyingDisk(monkeypatch, at)
            was_killed = killed(folder, Execution())
        if not was_killed:
            assert dying.calls < at
            return
        again = Execution()
        run(folder, again)
        assert folder.state.status == "completed"
        assert folder.results() == EXPECTED, f"killed at {at}"
        assert folder.state.counts.completed + folder.state.counts.failed == COUNT
        folder.store.expire()
        assert not list(folder.path.glob("batches/*.results"))
        at += 8


def test_journal_that_is_cut_at_any_byte_has_its_whole_lines(tmp_path):
    folder = Folder(tmp_path, lines_for(COUNT))
    lines = [JournalLine(index, False, msgspec.Raw(b'{"custom_id":"\xc3\xa4"}')) for index in range(COUNT)]
    folder.store.append_results(folder.record, lines)
    (journal,) = folder.path.glob("batches/*.results")
    data = journal.read_bytes()
    for size in range(len(data) + 1):
        journal.write_bytes(data[:size])
        folder.store.repair_results(folder.record)
        kept = [result.number for result in folder.store.results(folder.record)]
        assert kept == list(range(data[:size].count(b"\n")))
        if len(kept) < COUNT:
            folder.store.append_results(folder.record, lines[len(kept) :])
        assert journal.read_bytes() == data


def test_batch_goes_on_after_the_last_whole_result(tmp_path):
    for kept in (0, 1, COUNT - 1, COUNT):
        folder = Folder(tmp_path / str(kept), lines_for(COUNT))
        lines = [JournalLine(index, False, _result(index)) for index in range(kept)]
        if lines:
            folder.store.append_results(folder.record, lines)
        with (folder.path / "batches" / f"{folder.record.id}.results").open("ab") as file:
            file.write(b'{"number":6,"failed":false,"result":{"custom')
        execution = Execution(takes_s=0)
        run(folder, execution)
        assert folder.results() == EXPECTED
        assert sorted(execution.ran.elements()) == list(range(kept, COUNT))


def _result(index: int) -> msgspec.Raw:
    return msgspec.Raw(b'{"custom_id":"id-%d"}' % index)


def test_mutant_a_journal_that_is_not_repaired_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr("fairlead.server.batches.store.BatchStore.repair_results", lambda *_: None)
    folder = Folder(tmp_path, lines_for(COUNT))
    (folder.path / "batches" / f"{folder.record.id}.results").write_bytes(b'{"number":0,"fai')

    async def main() -> None:
        with trio.move_on_after(20):
            await folder.run_to_the_end(Execution())

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    assert folder.results() != EXPECTED


async def test_two_processes_with_one_folder_run_a_batch_once_and_the_second_takes_over(
    autojump_clock, tmp_path
):
    folder = Folder(tmp_path, lines_for(COUNT))
    first, second = Execution(concurrency=1), Execution()
    with trio.move_on_after(3.5):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(folder.run_to_the_end, first)
            await trio.sleep(1)
            nursery.start_soon(folder.run_to_the_end, second)
    assert not second.ran
    assert folder.state.status not in FINAL
    await folder.run_to_the_end(second)
    assert folder.results() == EXPECTED
    assert sum(second.ran.values()) < COUNT
