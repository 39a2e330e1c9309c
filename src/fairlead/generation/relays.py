"""Requests that other servers may answer: their jobs, and the writer of streams with other servers' events.

A node gets a request as the client wrote it. Where a node of the model does not speak the dialect, the
request is decoded, too, and translated to a chat. That node's answer is written as one of our engine.
"""

import time
from collections.abc import Sequence

from fairlead.base.errors import FairleadError, InvalidRequest, quoted
from fairlead.base.job import CHAT_DIALECT, ChatRelay, Delta, Job, Relay, Sampling
from fairlead.base.reported import BYTES_A_TOKEN
from fairlead.dialects.chat_request import chat_request
from fairlead.dialects.dialect import (
    AnswerContext,
    AnswerTimes,
    AnswerWriter,
    Dialect,
    GenerationRequest,
    RelayDialect,
    RelayFollower,
)
from fairlead.dialects.fields import MAX_INT32, Envelope
from fairlead.generation.caller import Caller
from fairlead.generation.job_service import JobService

# The assumed length of an answer without a limit in its request: the other server's limit is unknown.
USUAL_TOKENS = 256
# Of the headers of one dialect. Anthropic's clients send two to five.
MOST_HEADERS = 16
LONGEST_HEADER_NAME = 64
LONGEST_HEADER = 4096


class Relays:
    """Makes what nodes get of a request. `model` is its canonical name, `requested` the one in the body."""

    def __init__(self, jobs: JobService) -> None:
        self._jobs = jobs
        self._fleet = jobs.services.fleet

    async def job(
        self,
        caller: Caller,
        dialect: RelayDialect,
        body: bytes,
        envelope: Envelope,
        *,
        model: str,
        requested: str,
    ) -> tuple[Job, AnswerContext | None]:
        """Return the job for a model of other servers only, and the context of a translated answer.

        That is None if no answer may be translated.
        """
        streams = caller.streams and dialect.streams
        generation = None
        if isinstance(dialect, Dialect) and self._needs_chat(model, dialect):
            generation = await self._jobs.offload.decode(caller, body, dialect.decode)
        relay = await self.relay(
            caller, dialect, body, generation, model=model, requested=requested, streams=streams
        )
        prefix = "relay"
        if isinstance(dialect, Dialect) and relay.chat is not None:
            prefix = dialect.job_prefix
        job = self._jobs.job(
            caller,
            model,
            prefix,
            prompts=(),
            sampling=_sampling(dialect, envelope, None if generation is None else generation.sampling.top_p),
            n=envelope.choices,
            stop=() if generation is None else generation.stop,
            stream=streams,
            relay=relay,
            prompt_estimate=len(body) // BYTES_A_TOKEN,
        )
        if generation is None or relay.chat is None:
            return job, None
        return job, AnswerContext(job, None, int(time.time()), generation.options, times=AnswerTimes())

    async def relay(
        self,
        caller: Caller,
        dialect: RelayDialect,
        body: bytes,
        generation: GenerationRequest | None,
        *,
        model: str,
        requested: str,
        streams: bool,
    ) -> Relay:
        """Return the request for nodes, also as a chat if one of them needs that and `generation` can be one.

        Raises `InvalidRequest`, and as `Offload.encode` does.
        """
        chat = None
        if generation is not None and self._needs_chat(model, dialect):
            encode = self._jobs.offload.encode
            chat = await encode(
                caller, chat_request, generation, model=requested, stream=streams, user=caller.user
            )
        return Relay(
            dialect.path,
            body,
            streams,
            dialect=dialect.name,
            chat=None if chat is None else ChatRelay(chat),
            headers=_check_headers(caller.headers, dialect.header_prefix),
        )

    def _needs_chat(self, model: str, dialect: RelayDialect) -> bool:
        """Return whether a node of the model may need a request of this dialect as a chat."""
        return dialect.name != CHAT_DIALECT and not self._fleet.speaks(model, dialect.name)


class RelayWriter:
    """A `StreamWriter` of other servers' events, which are passed on unchanged, including their end.

    What our own engine generates, or is translated, is written by `own`. After a failure, either may continue
    the other's answer.
    """

    def __init__(self, dialect: RelayDialect, own: AnswerWriter | None = None) -> None:
        self._dialect = dialect
        self._own = own
        self._follower: RelayFollower | None = own if isinstance(own, RelayFollower) else None
        self._is_relayed = own is None

    def write(self, deltas: list[Delta]) -> bytes:
        """Return the events for these deltas; empty if they have nothing to show yet."""
        events: list[bytes] = []
        for delta in deltas:
            if delta.raw:
                events += delta.raw
                self._is_relayed = True
                if self._follower is not None:
                    self._follower.follow(delta)
            elif self._own is not None:
                events.append(self._write_own(self._own, delta))
        return b"".join(events)

    def end(self) -> bytes:
        """See `StreamWriter`. If another server wrote last, it has ended the answer itself."""
        return b"" if self._own is None or self._is_relayed else self._own.end()

    def fail(self, error: FairleadError) -> bytes:
        """Return the events that end an incomplete answer, of which nothing may have been written yet."""
        if self._own is None or self._is_relayed:
            return self._dialect.error_event(error)
        return self._own.fail(error)

    def _write_own(self, own: AnswerWriter, delta: Delta) -> bytes:
        if self._is_relayed:
            self._is_relayed = False
            own.skip_beginnings()
        return own.write([delta])


def _check_headers(headers: Sequence[tuple[str, str]], prefix: str) -> tuple[tuple[str, str], ...]:
    """Return a request's headers for nodes. Raises `InvalidRequest` for too many, and for long ones."""
    if len(headers) > MOST_HEADERS:
        raise InvalidRequest(f"there may be at most {MOST_HEADERS} headers {prefix}*")
    for name, value in headers:
        if len(name) > LONGEST_HEADER_NAME:
            raise InvalidRequest(f"the name of the header {quoted(name)} is too long")
        if len(value) > LONGEST_HEADER or not (value.isascii() and value.isprintable()):
            message = f"{name}: must be at most {LONGEST_HEADER} printable characters in ASCII"
            raise InvalidRequest(message, param=name)
    return tuple(headers)


def _sampling(dialect: RelayDialect, envelope: Envelope, top_p: float | None) -> Sampling:
    """Return what the queue and a failover use: the longest possible answer, and if it is repeatable.

    Some dialects show `top_p` in their answers.
    """
    if not dialect.streams:  # nothing is generated
        return Sampling(max_tokens=1)
    temperature = 1.0 if envelope.temperature is None else envelope.temperature
    limit = min(envelope.token_limit or USUAL_TOKENS, MAX_INT32)
    return Sampling(max_tokens=limit, temperature=temperature, top_p=top_p or 1.0, seed=envelope.seed)
