"""The pipeline of all requests that a model answers, in any dialect: from the body to a job and the response.

A request for a model of another server is relayed as it is, and its response is streamed back as it arrives.
Only its envelope is read: the model, the user, the size, and whether an answer is repeatable. The rest of its
body, and whether it is valid, is left to the server that answers it.
"""

import time
from collections.abc import Callable
from collections.abc import Sequence as ReadOnlySequence
from typing import Any

import msgspec

from fairlead.answer.relay import rewritten
from fairlead.answer.reported import BYTES_A_TOKEN
from fairlead.api.body import invalid_field
from fairlead.api.dialects.dialect import (
    AnswerContext,
    AnswerWriter,
    Dialect,
    GenerationRequest,
    Prompt,
    RelayDialect,
    StreamingDialect,
)
from fairlead.api.dialects.fields import MAX_INT32, Envelope
from fairlead.api.encoding import encode_pairs, encode_prompts
from fairlead.api.job_service import JobService
from fairlead.api.loading import loading_progress
from fairlead.api.request import Request, Response, json_response
from fairlead.api.sampling import sampling_of
from fairlead.api.sse import is_large
from fairlead.api.structuring import GrammarCheck, check_combinations, structure_of
from fairlead.errors import FairleadError, quoted
from fairlead.job import AnswerParts, Delta, Job, Relay, Sampling
from fairlead.text.model import TextModel

# The assumed length of an answer without a limit in its request: the other server's limit is unknown.
USUAL_TOKENS = 256


class GenerationPipeline:
    """Serves requests in all dialects."""

    def __init__(self, jobs: JobService) -> None:
        self._jobs = jobs
        self._services = jobs.services
        self._grammars = GrammarCheck()

    async def respond(
        self, request: Request, dialect: RelayDialect, *, adapt: Callable[[Any], RelayDialect] | None = None
    ) -> Response:
        """Return the response: whole, or a stream from its first delta on. Raises a `FairleadError`.

        `adapt` returns the dialect for a request, from its envelope, where it depends on the state of others.
        """
        # This frame exists as long as the job, which needs neither the body nor what was decoded from it.
        body, envelope = await self._jobs.take(request, dialect.read_envelope)
        if adapt is not None:
            dialect = adapt(envelope)
        job, context = await self._prepare(request, dialect, body, envelope)
        del body, envelope
        writer = None
        if context is not None and job.stream:
            assert isinstance(dialect, StreamingDialect)
            writer = dialect.stream_writer(context)
        if job.stream:
            loading = loading_progress(self._services, dialect, job)
            stream = RelayWriter(dialect, writer) if writer is None or job.relay is not None else writer
            return await self._jobs.stream(request, job, dialect, stream, loading=loading)
        deltas, headers = await self._jobs.collect(request, job)
        if context is None or deltas[0].raw:
            return json_response(b"".join(deltas[0].raw), headers=headers)
        assert isinstance(dialect, Dialect)
        if is_large(deltas):
            body = await self._jobs.offload.write(request, dialect.write_response, context, deltas)
        else:
            body = dialect.write_response(context, deltas)
        return json_response(body, headers=headers)

    async def _prepare(
        self, request: Request, dialect: RelayDialect, body: bytes, envelope: Envelope
    ) -> tuple[Job, AnswerContext | None]:
        """Return the request's job, and the context of our engine's answer; None if it is only relayed."""
        request.user = envelope.user or envelope.safety_identifier
        body, name = self._find(request, body, envelope)
        model = self._services.models.get(name)
        if model is None:
            return self._relayed_job(request, dialect, name, body, envelope), None
        if not isinstance(dialect, Dialect):
            raise invalid_field("model", f"{quoted(name)} is not served under {dialect.path}")
        generation = await self._jobs.offload.decode(request, body, dialect.decode)
        model.check_purpose(*generation.tasks)
        self._check_limits(generation, model)
        prompts = await self._encode(request, generation, model)
        texts: tuple[str, ...] = ()
        if generation.echo:
            texts = await self._jobs.offload.encode(request, _decoded, model, generation.prompts)
        sampling, parts = Sampling(max_tokens=1, temperature=0), None
        if not generation.embed:
            sampling, parts = await self._sampling(request, generation, model, prompts)
        streams = envelope.wants_stream and dialect.streams
        job = self._jobs.job(
            request,
            envelope,
            name,
            prefix=dialect.job_prefix,
            prompts=prompts,
            sampling=sampling,
            n=generation.n,
            stop=generation.stop,
            stream=streams,
            relay=_relay(dialect, body, streams) if self._services.fleet.is_relayed(name) else None,
            embed=generation.embed,
            parts=parts,
        )
        return job, AnswerContext(job, model, int(time.time()), generation.options, texts)

    async def _sampling(
        self,
        request: Request,
        generation: GenerationRequest,
        model: TextModel,
        prompts: tuple[ReadOnlySequence[int], ...],
    ) -> tuple[Sampling, AnswerParts | None]:
        """Return the sampling parameters, with the grammar of the answer, and the parts of its text."""
        sampling = sampling_of(generation, model, prompts)
        if generation.answer is None and not generation.is_chat:
            return sampling, None
        offload = self._jobs.offload
        structure = await offload.encode(request, structure_of, generation, model, prompts[0])
        grammar = structure.grammar
        check_combinations(generation, grammar)
        if grammar is not None and not self._grammars.has_passed(grammar):
            await offload.in_thread(request, self._grammars.check, grammar, structure.grammar_field)
        if grammar is not None or structure.reasoning_limit is not None:
            sampling = msgspec.structs.replace(
                sampling, grammar=grammar, reasoning_limit=structure.reasoning_limit
            )
        return sampling, structure.parts

    def _find(self, request: Request, body: bytes, envelope: Envelope) -> tuple[bytes, str]:
        """Return the body, and the canonical name of its model. Raises as `ModelAccess.find` does.

        In a body for a selector, the model is replaced by the one that the job gets.
        """
        models = self._jobs.models
        if envelope.model is not None and models.selectors.has(envelope.model):
            target = models.selectors.take(request, envelope.model)
            return rewritten(body, target.name), target.model
        return body, models.find(request, envelope.model)

    def _check_limits(self, generation: GenerationRequest, model: TextModel) -> None:
        if generation.embed:
            width = model.embedding.width if model.embedding is not None else 0
            if generation.dimensions is not None and generation.dimensions > width:
                reason = f"{generation.dimensions} is too many: this model's are {width}"
                raise invalid_field("dimensions", reason)
            return
        choices = max(1, len(generation.prompts)) * generation.n
        self._check_choices(choices, "n" if generation.n > 1 else generation.prompts_field)

    def _check_choices(self, choices: int, param: str) -> None:
        most = self._services.config.limits.sequences
        if choices > most:
            raise invalid_field(param, f"{choices} answers were requested; one request may have {most}")

    async def _encode(
        self, request: Request, generation: GenerationRequest, model: TextModel
    ) -> tuple[ReadOnlySequence[int], ...]:
        """Return the prompts' token ids. Raises as `Offload.encode` does."""
        encode = self._jobs.offload.encode
        if generation.messages is not None:
            chat = await encode(
                request,
                model.encode_chat,
                generation.messages,
                tools=generation.tools,
                variables=generation.template_variables,
            )
            return (chat,)
        limits = self._services.config.limits
        if generation.pairs is not None:
            return await encode(request, encode_pairs, model, generation.pairs, limits)
        return await encode(
            request,
            encode_prompts,
            model,
            generation.prompts,
            limits,
            generation.prompts_field,
            special_tokens=generation.special_tokens,
            suffix=generation.suffix,
        )

    def _relayed_job(
        self, request: Request, dialect: RelayDialect, model: str, body: bytes, envelope: Envelope
    ) -> Job:
        streams = envelope.wants_stream and dialect.streams
        self._check_choices(envelope.choices, "n")
        return self._jobs.job(
            request,
            envelope,
            model,
            prefix="relay",
            sampling=_relayed_sampling(dialect, envelope),
            n=envelope.choices,
            stream=streams,
            relay=_relay(dialect, body, streams),
            prompt_estimate=len(body) // BYTES_A_TOKEN,
        )


class RelayWriter:
    """A `StreamWriter` of other servers' events, which are passed on unchanged, including their end.

    After a failure, another node may continue the answer: what our own engine generates is written by `own`.
    """

    def __init__(self, dialect: RelayDialect, own: AnswerWriter | None = None) -> None:
        self._dialect = dialect
        self._own = own
        self._is_relayed = own is None

    def write(self, deltas: list[Delta]) -> bytes:
        """See `StreamWriter`."""
        events: list[bytes] = []
        for delta in deltas:
            if delta.raw:
                events += delta.raw
                self._is_relayed = True
            elif self._own is not None:
                events.append(self._write_own(self._own, delta))
        return b"".join(events)

    def end(self) -> bytes:
        """See `StreamWriter`. If another server wrote last, it has ended the answer itself."""
        return b"" if self._own is None or self._is_relayed else self._own.end()

    def fail(self, error: FairleadError) -> bytes:
        """See `StreamWriter`."""
        if self._own is None or self._is_relayed:
            return self._dialect.error_event(error)
        return self._own.fail(error)

    def _write_own(self, own: AnswerWriter, delta: Delta) -> bytes:
        if self._is_relayed:
            self._is_relayed = False
            own.skip_beginnings()
        return own.write([delta])


def _relay(dialect: RelayDialect, body: bytes, streams: bool) -> Relay:
    return Relay(dialect.path, body, streams, reader=dialect.reader)


def _relayed_sampling(dialect: RelayDialect, envelope: Envelope) -> Sampling:
    """Return what the queue and a failover use: the longest possible answer, and if it is repeatable."""
    if not dialect.streams:  # nothing is generated
        return Sampling(max_tokens=1)
    temperature = 1.0 if envelope.temperature is None else envelope.temperature
    limit = min(envelope.token_limit or USUAL_TOKENS, MAX_INT32)
    return Sampling(max_tokens=limit, temperature=temperature, seed=envelope.seed)


def _decoded(model: TextModel, prompts: ReadOnlySequence[Prompt]) -> tuple[str, ...]:
    return tuple(prompt if isinstance(prompt, str) else model.tokenizer.decode(prompt) for prompt in prompts)
