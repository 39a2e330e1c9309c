"""The texts of an embedding job in an engine: tokens in, one vector per text out.

One job may have thousands of texts, and the engine serves them in order of arrival. So only a few of a job's
texts are submitted at a time, and the next one when one is done. Later jobs wait only for those few.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import trio

from fairlead.base.errors import FairleadError
from fairlead.base.grant import Grant
from fairlead.base.job import TEXTS_AT_ONCE, Delta, Job
from fairlead.base.messages import Output
from fairlead.nodes.engines.sequence_client import SequenceClient
from fairlead.nodes.streams.sink import Sink


@contextmanager
def embedding(
    sequences: SequenceClient,
    sink: Sink,
    job: Job,
    failed: Callable[[FairleadError], None],
    *,
    salt: bytes,
    grant: Grant | None = None,
) -> Iterator[None]:
    """Embed the job's texts; on exit none of them is left in the engine.

    sequences: the engine, which gets the deadline in force when the block is entered.
    sink: gets the vectors.
    job: the job.
    failed: called with the error of a text that has no vector.
    salt: texts with different salts share no cached prefixes.
    grant: that of the job's seat; None: the engine needs none.
    """
    deadline_s = trio.current_effective_deadline()
    texts = _Texts(sequences, sink, job, failed, deadline_s=deadline_s, salt=salt, grant=grant)
    try:
        for _ in range(min(TEXTS_AT_ONCE, job.sequences)):
            texts.submit()
        yield
    finally:
        texts.abort()


class _Texts:
    """The job's texts: which were submitted, and which of those have no vector yet."""

    def __init__(
        self,
        sequences: SequenceClient,
        sink: Sink,
        job: Job,
        failed: Callable[[FairleadError], None],
        *,
        deadline_s: float,
        salt: bytes,
        grant: Grant | None,
    ) -> None:
        self.failed = failed
        self._sequences = sequences
        self._sink = sink
        self._job = job
        self._deadline_s = deadline_s
        self._salt = salt
        self._grant = grant
        self._remaining = iter(range(job.sequences))
        self._keys: dict[int, int] = {}  # by index

    def submit(self) -> None:
        """Submit the next text, if there is another. Raises as `SequenceClient.submit` does."""
        index = next(self._remaining, None)
        if index is None:
            return
        remaining_s = self._deadline_s - trio.current_time()
        self._keys[index] = self._sequences.submit(
            self._job.prompts[index],
            self._job.sampling,
            _Text(self, index),
            priority=self._job.priority,
            timeout_s=max(0.0, remaining_s) if remaining_s < float("inf") else None,
            salt=self._salt,
            embed=True,
            grant=self._grant,
        )

    def receive_vector(self, index: int, vector: bytes) -> None:
        del self._keys[index]
        self._sink.put(Delta(index, finish_reason="stop", vector=vector))
        try:
            self.submit()
        except FairleadError as error:
            self.failed(error)  # the receiver of this vector must not fail for it

    def abort(self) -> None:
        self._remaining = iter(())
        for key in self._keys.values():
            self._sequences.abort(key)


class _Text:
    """The `Receiver` for one text."""

    __slots__ = ("_index", "_texts")

    def __init__(self, texts: _Texts, index: int) -> None:
        self._texts = texts
        self._index = index

    def receive(self, output: Output) -> None:
        self._texts.receive_vector(self._index, output.vector)

    def receive_token(self, token_id: int) -> None:
        raise AssertionError(f"a text to be embedded was continued with token {token_id}")

    def failed(self, error: FairleadError) -> None:
        self._texts.failed(error)
