"""The texts of an embedding job in an engine: tokens in, one vector per text out.

One job may have thousands of texts. They are submitted in portions, each when it has a seat, so that the
texts of others take turns with them.
"""

from collections.abc import Callable
from math import inf

import trio

from fairlead.base.errors import FairleadError
from fairlead.base.grant import Grant
from fairlead.base.job import Delta, Job, portions_of
from fairlead.base.messages import Output
from fairlead.nodes.engines.sequence_client import SequenceClient
from fairlead.nodes.streams.sink import Sink


class EmbeddingJob:
    """A `SequenceRunner` for the texts of one job; its sequences are portions of them (`portions_of`).

    sequences: the engine.
    sink: gets the vectors.
    job: the job.
    failed: called with the error of a text that has no vector.
    ended: called with the index of each portion that has all vectors, but not with the last one.
    deadline_s: when the engine has to end the texts, by Trio's clock.
    salt: texts with different salts share no cached prefixes.
    """

    def __init__(
        self,
        sequences: SequenceClient,
        sink: Sink,
        job: Job,
        failed: Callable[[FairleadError], None],
        ended: Callable[[int], None],
        *,
        deadline_s: float,
        salt: bytes,
    ) -> None:
        self.failed = failed
        self._sequences = sequences
        self._sink = sink
        self._job = job
        self._ended = ended
        self._deadline_s = deadline_s
        self._salt = salt
        self._portions = portions_of(job.prompts)
        self._open = len(self._portions)
        self._keys: dict[int, dict[int, int]] = {}  # by portion, then by text

    def start(self, index: int, grant: Grant) -> None:
        """Submit the texts of a portion. Raises as `SequenceClient.submit` does."""
        keys = self._keys[index] = {}
        remaining_s = self._deadline_s - trio.current_time()
        timeout_s = max(0.0, remaining_s) if remaining_s < inf else None
        for text in self._portions[index]:
            keys[text] = self._sequences.submit(
                self._job.prompts[text],
                self._job.sampling,
                _Text(self, index, text),
                priority=self._job.priority,
                timeout_s=timeout_s,
                salt=self._salt,
                embed=True,
                grant=grant,
            )

    def receive_vector(self, portion: int, text: int, vector: bytes) -> None:
        """Pass the vector of a text on; with the last one of its portion, give the seat back."""
        keys = self._keys[portion]
        del keys[text]
        self._sink.put(Delta(text, finish_reason="stop", vector=vector))
        if not keys:
            del self._keys[portion]
            self._open -= 1
            if self._open:
                self._ended(portion)

    def suspend(self, index: int) -> None:
        """Do nothing: a portion takes about one step."""

    def resume(self, index: int) -> None:
        """Do nothing; see `suspend`."""

    def abort(self) -> None:
        """Abort the texts that have no vector yet."""
        for keys in self._keys.values():
            for key in keys.values():
                self._sequences.abort(key)


class _Text:
    """The `Receiver` for one text."""

    __slots__ = ("_index", "_job", "_portion")

    def __init__(self, job: EmbeddingJob, portion: int, index: int) -> None:
        self._job = job
        self._portion = portion
        self._index = index

    def receive(self, output: Output) -> None:
        self._job.receive_vector(self._portion, self._index, output.vector)

    def receive_token(self, token_id: int) -> None:
        raise AssertionError(f"a text to be embedded was continued with token {token_id}")

    def failed(self, error: FairleadError) -> None:
        self._job.failed(error)
