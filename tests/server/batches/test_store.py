"""Files and batches on disk: how long they are kept, and what uploads leave."""

import os
from pathlib import Path

from fairlead.server.batches.records import BatchState
from server.batches.played import DAY_S, Execution, Folder, lines_for


async def test_old_files_and_batches_are_removed(tmp_path):
    folder = Folder(tmp_path, lines_for(1))
    folder.offset_s += 31 * DAY_S
    folder.store.expire()
    assert folder.store.find_file(folder.file.id, "ana") is None
    assert folder.store.path_of(folder.file).exists(), "a batch that has not ended needs it"
    assert folder.store.find_batch(folder.record.id, "ana") is not None
    folder.store.set_state(folder.record.id, BatchState(status="cancelled"))
    folder.store.expire()
    folder.store.expire()
    assert list(tmp_path.glob("*/*")) == []


async def test_requests_that_did_not_run_in_time_are_errors(autojump_clock, tmp_path):
    folder = Folder(tmp_path, lines_for(5))
    folder.offset_s += DAY_S
    state = await folder.run_to_the_end(Execution())
    assert (state.status, state.counts.total, state.counts.failed) == ("expired", 5, 5)
    assert folder.ids(state.error_file_id) == [f"id-{index}" for index in range(5)]


async def test_batch_whose_results_do_not_fit_fails_and_keeps_those_that_do(autojump_clock, tmp_path):
    folder = Folder(tmp_path, lines_for(500), tenant_bytes=2 * 4096 + 60_000)
    execution = Execution(takes_s=2, concurrency=1)
    state = await folder.run_to_the_end(execution)
    assert (state.status, state.faults[0].code) == ("failed", "storage_full")
    assert 0 < len(folder.results()) < 500


def test_what_an_upload_left_is_removed_after_a_day(tmp_path):
    folder = Folder(tmp_path, lines_for(1))
    path = tmp_path / "files" / f"file-{'1' * 32}.new"
    path.write_bytes(b"half")
    os.utime(path, (folder.offset_s, folder.offset_s))
    folder.store.expire()
    assert path.exists()
    folder.offset_s += DAY_S + 1
    folder.store.expire()
    assert not path.exists()
    assert folder.store.find_file(folder.file.id, "ana") is not None


def test_other_users_of_the_machine_cannot_read_the_folder(tmp_path):
    folder = Folder(tmp_path / "made", lines_for(1))
    assert all(Path(path).stat().st_mode & 0o077 == 0 for path in (folder.path, *folder.path.glob("*/")))
