"""The texts of a job that embeds, on their way through the worker: tokens in, a vector each out.

One job may bring thousands, and the engine serves who came first. So only a few of a job's are there at a
time, and the next one goes when one is back: whoever comes meanwhile waits for those few.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import trio

from fairlead.errors import FairleadError
from fairlead.job import TEXTS_AT_ONCE, Delta, Job
from fairlead.nodes.sink import Sink
from fairlead.worker.client import Worker
from fairlead.worker.wire import Output


@contextmanager
def embedding(
    worker: Worker, into: Sink, job: Job, failed: Callable[[FairleadError], None], *, salt: bytes
) -> Iterator[None]:
    """Have the job's texts embedded; on exit nothing of them is left in the worker.

    `failed` is called with what ended a text that has no vector. The deadline in force when it is entered is
    told to the engine.
    """
    texts = _Texts(worker, into, job, failed, deadline_s=trio.current_effective_deadline(), salt=salt)
    try:
        for _ in range(min(TEXTS_AT_ONCE, job.sequences)):
            texts.submit()
        yield
    finally:
        texts.abort()


class _Texts:
    """Which of the job's texts have gone, and which of those are not back."""

    def __init__(
        self,
        worker: Worker,
        into: Sink,
        job: Job,
        failed: Callable[[FairleadError], None],
        *,
        deadline_s: float,
        salt: bytes,
    ) -> None:
        self.failed = failed
        self._worker = worker
        self._into = into
        self._job = job
        self._deadline_s = deadline_s
        self._salt = salt
        self._left = iter(range(job.sequences))
        self._keys: dict[int, int] = {}  # by index

    def submit(self) -> None:
        """Send the next text, if there is one left. Raises as `Worker.submit` does."""
        index = next(self._left, None)
        if index is None:
            return
        left_s = self._deadline_s - trio.current_time()
        self._keys[index] = self._worker.submit(
            self._job.prompts[index],
            self._job.sampling,
            _Text(self, index),
            priority=self._job.priority,
            timeout_s=max(0.0, left_s) if left_s < float("inf") else None,
            salt=self._salt,
            embed=True,
        )

    def came_back(self, index: int, vector: bytes) -> None:
        del self._keys[index]
        self._into.put(Delta(index, finish_reason="stop", vector=vector))
        try:
            self.submit()
        except FairleadError as error:
            self.failed(error)  # whoever brought the vector is not to blame

    def abort(self) -> None:
        self._left = iter(())
        for key in self._keys.values():
            self._worker.abort(key)


class _Text:
    """The worker's `Receiver` for one text."""

    __slots__ = ("_index", "_texts")

    def __init__(self, texts: _Texts, index: int) -> None:
        self._texts = texts
        self._index = index

    def receive(self, output: Output) -> None:
        self._texts.came_back(self._index, output.vector)

    def receive_token(self, token_id: int) -> None:
        raise AssertionError(f"a text to be embedded was continued with token {token_id}")

    def failed(self, error: FairleadError) -> None:
        self._texts.failed(error)
