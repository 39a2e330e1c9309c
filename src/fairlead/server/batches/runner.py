"""Runs the batches: from their input files to their files of results, whatever ends in between.

Of several processes with one folder, the one that holds its lock runs all batches. Any may create and cancel
them, and reads how far they are from the disk. When that process ends, the kernel frees the lock, and another
goes on. So fronts need no messages about batches, and the dispatcher, which must never wait for a disk, does
not know them.

What a batch does next follows from its state, its journal, its cancellation and the clock alone. So it goes
on after a crash as it would have without one.
"""

from collections.abc import Callable
from functools import partial
from math import inf
from typing import TypeVar

import msgspec
import structlog
import trio

from fairlead.base.errors import StorageFull
from fairlead.base.supervision import contain
from fairlead.server.batches.execution import BatchExecution, expired_result
from fairlead.server.batches.records import (
    BatchFault,
    BatchRecord,
    BatchState,
    BatchStatus,
    RequestCounts,
)
from fairlead.server.batches.requests import RequestFile
from fairlead.server.batches.store import BatchStore, JournalLine

POLL_S = 2.0
"""How often the folder is read for what other processes have created or cancelled."""
RETRY_S = 10.0
"""How long a batch rests after a failure of its disk."""
EXPIRE_INTERVAL_S = 600.0
PROGRESS_INTERVAL_S = 1.0
MOST_BYTES = 64 * 1024 * 1024
"""The lines of one batch that are in memory, in bytes; a longer one is there alone."""
LINES_AT_ONCE = 1000

Result = TypeVar("Result")

logger = structlog.get_logger("fairlead.server.batches")


class BatchRunner:
    """Runs the batches of a folder, while it holds its lock.

    store: The folder.
    execution: Runs their requests.
    most_lines: The most requests of a batch.
    most_line_bytes: The longest line.
    """

    def __init__(
        self, store: BatchStore, execution: BatchExecution, *, most_lines: int, most_line_bytes: int
    ) -> None:
        self._store = store
        self._execution = execution
        self._most_lines = most_lines
        self._most_line_bytes = most_line_bytes
        self._runs: dict[str, BatchRun] = {}
        self._ended: set[str] = set()
        self._wake = trio.Event()

    async def run(self) -> None:
        """Run until cancelled. What runs then goes on in the next process."""
        expires_at = 0.0
        try:
            async with trio.open_nursery() as nursery:
                while True:
                    self._wake = trio.Event()
                    if await in_thread(self._store.lock.acquire):
                        await self._start(nursery)
                        if trio.current_time() >= expires_at:
                            expires_at = trio.current_time() + EXPIRE_INTERVAL_S
                            await in_thread(self._store.expire)
                    with trio.move_on_after(POLL_S):
                        await self._wake.wait()
        finally:
            self._store.lock.release()

    def notice(self) -> None:
        """Look at once for what has been created or cancelled."""
        self._wake.set()
        for run in self._runs.values():
            run.notice()

    async def _start(self, nursery: trio.Nursery) -> None:
        """Start what was created here or elsewhere, or is left of an earlier process."""
        known = self._ended | self._runs.keys()
        for batch in await in_thread(self._store.unfinished, known):
            run = BatchRun(
                self._store,
                self._execution,
                batch,
                most_lines=self._most_lines,
                most_line_bytes=self._most_line_bytes,
            )
            self._runs[batch.id] = run
            nursery.start_soon(self._run, run)

    async def _run(self, run: "BatchRun") -> None:
        await contain("batch", run.run)
        if run.is_over:
            self._ended.add(run.record.id)
        else:
            await trio.sleep(RETRY_S)
        del self._runs[run.record.id]


class BatchRun:
    """One batch in progress. `is_over`: its results are there.

    store: Keeps it.
    execution: Runs its requests.
    record: How it was created.
    most_lines: The most requests that it may have.
    most_line_bytes: The longest line.
    """

    def __init__(
        self,
        store: BatchStore,
        execution: BatchExecution,
        record: BatchRecord,
        *,
        most_lines: int,
        most_line_bytes: int,
    ) -> None:
        self.record = record
        self.is_over = False
        self._store = store
        self._execution = execution
        self._most_lines = most_lines
        self._most_line_bytes = most_line_bytes
        self._state = BatchState()
        self._requests: RequestFile
        self._done = bytearray()  # of each request, whether the journal has its result
        self._completed = self._failed = 0
        self._unwritten: list[JournalLine] = []
        self._arrived = trio.Event()
        self._freed = trio.Event()
        self._looks = trio.Event()
        self._running = self._running_bytes = 0
        self._checks_space_at = 0.0  # again

    def notice(self) -> None:
        """Look at once whether the batch was cancelled."""
        self._looks.set()

    async def run(self) -> None:
        """Run the batch to its end. Raises `OSError`; it may be run again then."""
        self._state = await in_thread(self._store.state, self.record.id)
        if not await self._check():
            return
        await self._read_journal()
        if self._is_complete or self._state.failed_at or self._state.expired_at:
            await self._finish()
            return
        if self._state.in_progress_at is None:
            await self._set_state("in_progress", in_progress_at=self._now())
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._watch, scope)
                nursery.start_soon(self._feed, nursery)
                await self._write()
                nursery.cancel_scope.cancel()
        await self._flush()
        await self._finish()

    @property
    def _is_complete(self) -> bool:
        return self._completed + self._failed == len(self._requests)

    # Before the first request --------------------------------------------------------------------------

    async def _check(self) -> bool:
        """Read where the requests are; return whether they can run. Otherwise the batch has failed."""
        file = await in_thread(self._store.find_file, self.record.input_file_id, self.record.owner)
        if file is None:
            faults: tuple[BatchFault, ...] = (
                BatchFault("file_not_found", "the input file is not there any more", "input_file_id"),
            )
        else:
            self._requests = RequestFile(self._store.path_of(file))
            check = partial(
                self._requests.check, most_lines=self._most_lines, most_bytes=self._most_line_bytes
            )
            faults = await in_thread(check, self.record.endpoint)
        if faults:
            await self._set_state("failed", failed_at=self._now(), faults=faults)
            self.is_over = True
        return not faults

    async def _read_journal(self) -> None:
        """Learn which requests have a result, after a crash."""
        self._done = bytearray(len(self._requests))

        def read() -> None:
            self._store.repair_results(self.record)
            for result in self._store.results(self.record):
                self._count(result)

        await in_thread(read)

    def _count(self, result: JournalLine) -> None:
        self._done[result.number] = True
        self._failed += result.failed
        self._completed += not result.failed

    # Meanwhile -----------------------------------------------------------------------------------------

    async def _watch(self, scope: trio.CancelScope) -> None:
        """Stop the requests when the batch is cancelled, or when its time is over."""
        while self._now() < self.record.expires_at:
            self._looks = trio.Event()
            if await in_thread(self._store.is_cancelled, self.record.id):
                break
            with trio.move_on_after(min(POLL_S, self.record.expires_at - self._store.now())):
                await self._looks.wait()
        scope.cancel()

    async def _feed(self, nursery: trio.Nursery) -> None:
        """Start the requests without a result, as many at a time as there may be seats for."""
        for number in range(len(self._requests)):
            if self._done[number]:
                continue
            size = self._requests.size(number)
            while self._running and (
                self._running >= self._execution.concurrency(self.record)
                or self._running_bytes + size > MOST_BYTES
            ):
                self._freed = trio.Event()
                with trio.move_on_after(POLL_S):  # meanwhile a node may have come up
                    await self._freed.wait()
            self._running += 1
            self._running_bytes += size
            nursery.start_soon(self._run_request, number, size)

    async def _run_request(self, number: int, size: int) -> None:
        request = await in_thread(self._requests.read, number)
        result = await self._execution.run(self.record, number, request)
        self._unwritten.append(result)  # `_flush` may have replaced the list meanwhile
        self._running -= 1
        self._running_bytes -= size
        self._freed.set()
        self._arrived.set()

    async def _write(self) -> None:
        """Write results until there is one for each request."""
        reports_at = trio.current_time()
        while not self._is_complete:
            if not self._unwritten:
                self._arrived = trio.Event()
                reported = self._state.counts.completed + self._state.counts.failed
                is_reported = reported == self._completed + self._failed
                with trio.move_on_at(inf if is_reported else reports_at):
                    await self._arrived.wait()
            await self._flush()
            if self._state.failed_at is not None:
                return
            if trio.current_time() >= reports_at:
                reports_at = trio.current_time() + PROGRESS_INTERVAL_S
                await self._set_state("in_progress")

    async def _flush(self) -> None:
        """Write the results that are there; all of them in one synchronization of the disk.

        What was taken to be written is written, also when the batch is cancelled meanwhile.
        """
        results, self._unwritten = self._unwritten, []
        if not results:
            return
        with trio.CancelScope(shield=True):
            if trio.current_time() >= self._checks_space_at and not await self._has_space(results):
                return
            await in_thread(self._store.append_results, self.record, results)
            for result in results:
                self._count(result)

    async def _has_space(self, results: list[JournalLine]) -> bool:
        """Return whether the tenant has space for results. Otherwise the batch has failed."""
        self._checks_space_at = trio.current_time() + PROGRESS_INTERVAL_S
        try:
            size = sum(len(result.result) for result in results)
            await in_thread(self._store.check_space, self.record.tenant, size)
        except StorageFull as error:
            fault = BatchFault("storage_full", error.message)
            await self._set_state("finalizing", failed_at=self._now(), faults=(fault,))
            return False
        return True

    # At the end ----------------------------------------------------------------------------------------

    async def _finish(self) -> None:
        """Make the files of results. Does the same when it is repeated after a crash."""
        status, changes = await self._outcome()
        await self._set_state("finalizing", finalizing_at=self._state.finalizing_at or self._now(), **changes)
        if status == "expired":
            await self._expire()
        output = await in_thread(self._store.write_results, self.record, "output")
        errors = await in_thread(self._store.write_results, self.record, "error")
        ends = {f"{status}_at": getattr(self._state, f"{status}_at") or self._now()}
        await self._set_state(status, output_file_id=output, error_file_id=errors, **ends)
        self.is_over = True
        await in_thread(self._store.drop_results, self.record)
        logger.info("batch ended", batch=self.record.id, status=status, **_counts(self._state.counts))

    async def _outcome(self) -> tuple[BatchStatus, dict[str, int]]:
        if self._state.failed_at is not None:
            return "failed", {}
        if self._state.expired_at is not None:
            return "expired", {}
        if self._is_complete:
            return "completed", {}
        if await in_thread(self._store.is_cancelled, self.record.id):
            return "cancelled", {"cancelling_at": self._state.cancelling_at or self._now()}
        return "expired", {"expired_at": self._now()}

    async def _expire(self) -> None:
        """Write an error for each request without a result."""
        left = [number for number, is_done in enumerate(self._done) if not is_done]
        for first in range(0, len(left), LINES_AT_ONCE):
            chunk = left[first : first + LINES_AT_ONCE]
            results = await in_thread(
                lambda chunk=chunk: [expired_result(each, self._requests.read(each)) for each in chunk]
            )
            await in_thread(self._store.append_results, self.record, results)
            for result in results:
                self._count(result)

    async def _set_state(self, status: BatchStatus, **changes: object) -> None:
        counts = RequestCounts(len(self._done), self._completed, self._failed)
        state = msgspec.structs.replace(self._state, status=status, counts=counts, **changes)
        await in_thread(self._store.set_state, self.record.id, state)
        self._state = state

    def _now(self) -> int:
        return int(self._store.now())


async def in_thread(call: Callable[..., Result], *arguments: object) -> Result:
    """Call a function that uses the disk. When cancelled, wait for it: it may be writing."""
    return await trio.to_thread.run_sync(call, *arguments)


def _counts(counts: RequestCounts) -> dict[str, int]:
    return {"requests": counts.total, "completed": counts.completed, "failed": counts.failed}
