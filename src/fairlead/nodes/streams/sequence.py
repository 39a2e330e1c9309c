"""One choice of a job in an engine: tokens in, deltas out."""

import hashlib
from collections.abc import Callable

import msgspec

from fairlead.base.errors import FairleadError
from fairlead.base.grant import Grant
from fairlead.base.job import Job
from fairlead.base.messages import Output
from fairlead.language.text.answer import ChoiceText
from fairlead.nodes.engines.sequence_client import SequenceClient
from fairlead.nodes.streams.sink import Sink


class NodeSequence:
    """The `Receiver` for one choice.

    sequences: the engine.
    sink: gets the deltas.
    choice: makes them of outputs.
    failed: called with the error, if one ends the choice.
    ended: called when its last delta has been put.
    """

    __slots__ = ("_choice", "_ended", "_key", "_sequences", "_sink", "failed")

    def __init__(
        self,
        sequences: SequenceClient,
        sink: Sink,
        choice: ChoiceText,
        failed: Callable[[FairleadError], None],
        ended: Callable[[], None] = lambda: None,
    ) -> None:
        self._ended = ended
        self._sequences = sequences
        self._sink = sink
        self._choice = choice
        self.failed = failed
        self._key: int | None = None

    def submit(
        self,
        job: Job,
        index: int,
        *,
        max_output_tokens: int | None,
        timeout_s: float | None,
        salt: bytes,
        grant: Grant | None = None,
    ) -> None:
        prompt, number = divmod(index, job.n)
        sampling = job.sampling
        if max_output_tokens is not None and sampling.max_tokens > max_output_tokens:
            sampling = msgspec.structs.replace(
                sampling,
                max_tokens=max_output_tokens,
                min_tokens=min(sampling.min_tokens, max_output_tokens),
            )
        if sampling.seed is not None and number:
            # The same seed would give the same choice n times.
            sampling = msgspec.structs.replace(sampling, seed=sampling.seed + number)
        self._key = self._sequences.submit(
            job.prompts[prompt],
            sampling,
            self,
            priority=job.priority,
            timeout_s=timeout_s,
            salt=salt,
            grant=grant,
            tenant=_number_of(job.tenant),
        )

    def abort(self) -> None:
        if self._key is not None:
            self._sequences.abort(self._key)

    def suspend(self) -> None:
        """Pause, without an effect on what is generated; one that has ended is ignored."""
        if self._key is not None:
            self._sequences.suspend(self._key)

    def resume(self) -> None:
        """Go on after `suspend`."""
        if self._key is not None:
            self._sequences.resume(self._key)

    def receive_token(self, token_id: int) -> None:
        delta = self._choice.push_token(token_id)
        if delta is not None:
            self._sink.put(delta)
            if delta.finish_reason is not None:
                self.abort()  # a stop string: the engine, which has no text, would go on
                self._ended()

    def receive(self, output: Output) -> None:
        delta = self._choice.push(output)
        if delta is not None:
            self._sink.put(delta)
        if self._choice.ended and output.finish_reason is None:
            self.abort()  # as above
        if self._choice.ended or output.finish_reason is not None:
            self._ended()


def _number_of(tenant: str) -> int:
    """Return a number that is the same for a tenant in every process, and does not show its name."""
    digest = hashlib.blake2b(tenant.encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
