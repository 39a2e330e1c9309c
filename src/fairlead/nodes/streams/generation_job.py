"""The sequences of a job that generates in an engine: each starts when it has a seat."""

from collections.abc import Callable
from functools import partial
from math import inf

import trio

from fairlead.base.errors import FairleadError
from fairlead.base.grant import Grant
from fairlead.base.job import Job
from fairlead.language.text.answer import ChoiceText
from fairlead.nodes.engines.sequence_client import SequenceClient
from fairlead.nodes.streams.sequence import NodeSequence
from fairlead.nodes.streams.sink import Sink


class GenerationJob:
    """A `SequenceRunner` for the choices of one job.

    sequences: the engine.
    sink: gets the deltas.
    job: the job.
    failed: called with the error, if one ends a choice.
    ended: called with the index of each choice that has ended, but not with the last one, which ends the job.
    choice: makes the text of a choice.
    max_output_tokens: a limit of the model, besides the job's own.
    deadline_s: when the engine has to end the sequences, by Trio's clock.
    salt: jobs with different salts share no cached prefixes.
    """

    def __init__(
        self,
        sequences: SequenceClient,
        sink: Sink,
        job: Job,
        failed: Callable[[FairleadError], None],
        ended: Callable[[int], None],
        *,
        choice: Callable[[Job, int], ChoiceText],
        max_output_tokens: int | None,
        deadline_s: float,
        salt: bytes,
    ) -> None:
        self.failed = failed
        self._sequences = sequences
        self._sink = sink
        self._job = job
        self._ended = ended
        self._choice = choice
        self._max_output_tokens = max_output_tokens
        self._deadline_s = deadline_s
        self._salt = salt
        self._open = job.sequences
        self._started: dict[int, NodeSequence] = {}

    def start(self, index: int, grant: Grant) -> None:
        """Submit a choice. Raises as `SequenceClient.submit` does."""
        choice = NodeSequence(
            self._sequences,
            self._sink,
            self._choice(self._job, index),
            self.failed,
            partial(self._end, index),
        )
        self._started[index] = choice
        remaining_s = self._deadline_s - trio.current_time()
        choice.submit(
            self._job,
            index,
            max_output_tokens=self._max_output_tokens,
            timeout_s=max(0.0, remaining_s) if remaining_s < inf else None,
            salt=self._salt,
            grant=grant,
        )

    def suspend(self, index: int) -> None:
        """Pause a choice, without an effect on what is generated."""
        if (choice := self._started.get(index)) is not None:
            choice.suspend()

    def resume(self, index: int) -> None:
        """Let a choice go on after `suspend`."""
        if (choice := self._started.get(index)) is not None:
            choice.resume()

    def abort(self) -> None:
        """Abort and forget the choices that have not ended."""
        while self._started:
            self._started.popitem()[1].abort()

    def _end(self, index: int) -> None:
        del self._started[index]
        self._open -= 1
        if self._open:
            self._ended(index)
