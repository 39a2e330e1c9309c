"""A folder of batches, with requests that are answered by a function, and a clock that tests turn."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import trio

from fairlead.server.batches.records import BatchRecord, BatchState
from fairlead.server.batches.requests import BatchRequest
from fairlead.server.batches.runner import BatchRunner
from fairlead.server.batches.store import BatchStore, JournalLine

ENDPOINT = "/v1/chat/completions"
DAY_S = 86_400


class Execution:
    """Answers each request after a while. `ran` counts how often each has begun."""

    def __init__(self, takes_s: float = 1.0, concurrency: int = 3) -> None:
        self.ran: Counter[int] = Counter()
        self.takes_s = takes_s
        self.most_at_once = concurrency
        self.fails: Callable[[int], bool] = lambda number: number % 3 == 2

    def concurrency(self, record: BatchRecord) -> int:
        return self.most_at_once

    async def run(self, record: BatchRecord, number: int, request: BatchRequest) -> JournalLine:
        self.ran[number] += 1
        await trio.sleep(self.takes_s)
        result = {"id": "x", "custom_id": request.custom_id, "response": None, "error": None}
        return JournalLine(number, self.fails(number), msgspec.Raw(json.dumps(result).encode()))


def lines_for(count: int, **fields: Any) -> bytes:
    """Return an input file with so many requests."""
    requests = [
        {"custom_id": f"id-{index}", "method": "POST", "url": ENDPOINT, "body": {}, **fields}
        for index in range(count)
    ]
    return b"".join(json.dumps(request).encode() + b"\n" for request in requests)


class Folder:
    """A store in a folder, with one batch, and runs of it.

    path: The folder.
    content: The input file.
    now: The seconds since 1970; None: they pass with Trio's clock.
    """

    def __init__(self, path: Path, content: bytes, *, tenant_bytes: int = 10**9) -> None:
        self.path = path
        self.tenant_bytes = tenant_bytes
        self.offset_s = 1_000_000.0
        self.store = self.open()
        self.store.prepare()
        with self.store.new_file("ana", len(content)) as file:
            file.write(content)
            self.file = file.end(owner="ana", tenant="ana", filename="in.jsonl")
        self.record = BatchRecord(
            id=f"batch_{'0' * 32}",
            owner="ana",
            tenant="ana",
            key_id="",
            created_at=int(self.offset_s),
            expires_at=int(self.offset_s) + DAY_S,
            endpoint=ENDPOINT,
            input_file_id=self.file.id,
        )
        self.store.create_batch(self.record)

    def open(self) -> BatchStore:
        """Return a store as a new process opens it."""
        return BatchStore(
            self.path, tenant_bytes=self.tenant_bytes, keep_s=30 * DAY_S, now=lambda: self.offset_s
        )

    @property
    def state(self) -> BatchState:
        return self.store.state(self.record.id)

    async def run_to_the_end(self, execution: Execution, *, most_lines: int = 1000) -> BatchState:
        """Run as a new process, until the batch has ended."""
        runner = BatchRunner(
            self.open(),
            execution,
            most_lines=most_lines,
            most_line_bytes=1000,  # type: ignore[arg-type]
        )
        async with trio.open_nursery() as nursery:
            nursery.start_soon(runner.run)
            with trio.fail_after(1000):
                while not self.state.is_final:  # noqa: ASYNC110  # as another process would
                    await trio.sleep(0.5)
            nursery.cancel_scope.cancel()
        return self.state

    def ids(self, file_id: str | None) -> list[str]:
        """Return the custom ids in a file of results, in their order."""
        if file_id is None:
            return []
        file = self.open().find_file(file_id, "ana")
        assert file is not None
        lines = self.store.path_of(file).read_bytes().splitlines()
        return [json.loads(line)["custom_id"] for line in lines]

    def results(self) -> list[str]:
        """Return the custom ids in all files of results, sorted."""
        state = self.state
        return sorted(self.ids(state.output_file_id) + self.ids(state.error_file_id))
