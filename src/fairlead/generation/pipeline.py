"""The pipeline of all requests that a model answers, in any dialect: from a caller's body to the answer.

A request for a model of another server is relayed as it is, and its answer is streamed back as it arrives.
Only its envelope is read: the model, the user, the size, and whether an answer is repeatable. The rest of its
body, and whether it is valid, is left to the server that answers it, if that speaks the dialect (`relays`).
"""

import time
from collections.abc import Iterator
from collections.abc import Sequence as ReadOnlySequence
from contextlib import contextmanager
from functools import partial

import msgspec
import trio

from fairlead.base.config import Limits
from fairlead.base.errors import InvalidRequest, quoted
from fairlead.base.job import Job, Sampling
from fairlead.dialects.body import invalid_field
from fairlead.dialects.dialect import (
    AnswerContext,
    AnswerTimes,
    CountingDialect,
    Dialect,
    GenerationRequest,
    RelayDialect,
    StreamingDialect,
    check_texts,
)
from fairlead.dialects.fields import Envelope
from fairlead.generation.caller import Caller
from fairlead.generation.encoding import encode_conversation, encode_pairs, encode_prompts, pack_ids
from fairlead.generation.event_stream import is_large
from fairlead.generation.job_service import JobService, WrittenAnswer
from fairlead.generation.loading import loading_progress
from fairlead.generation.relays import Relays, RelayWriter
from fairlead.generation.sampling import sampling_of
from fairlead.generation.structuring import Structure, StructureTrials
from fairlead.language.text.model import TextModel
from fairlead.language.text.truncation import Truncation
from fairlead.nodes.streams.relay import rewrite_model

USUAL_CHARS_PER_TOKEN = 4


class GenerationPipeline:
    """Serves requests in all dialects."""

    def __init__(self, jobs: JobService) -> None:
        self._jobs = jobs
        self._services = jobs.services
        self._structures = StructureTrials(jobs.offload)
        self._relays = Relays(jobs)

    async def answer(
        self, caller: Caller, dialect: RelayDialect, job: Job, context: AnswerContext | None
    ) -> WrittenAnswer:
        """Run a job that was prepared, and return its answer: whole, or a stream from its first delta on.

        Raises a `FairleadError`.
        """
        answer = await self._answer(caller, dialect, job, context)
        if context is None or not (context.warning or context.unread_fields):
            return answer
        notes = msgspec.structs.replace(
            answer.notes, warning=context.warning, unread_fields=context.unread_fields
        )
        return answer._replace(notes=notes)

    async def _answer(
        self, caller: Caller, dialect: RelayDialect, job: Job, context: AnswerContext | None
    ) -> WrittenAnswer:
        writer, times = None, context.times if context is not None else None
        if context is not None and job.stream:
            assert isinstance(dialect, StreamingDialect)
            writer = dialect.stream_writer(context)
        if job.stream:
            loading = loading_progress(self._services, dialect, job)
            stream = RelayWriter(dialect, writer) if writer is None or job.relay is not None else writer
            return await self._jobs.stream(caller, job, dialect, stream, loading=loading, times=times)
        deltas, notes = await self._jobs.collect(caller, job, times=times)
        if context is None or deltas[0].raw:
            return WrittenAnswer(b"".join(deltas[0].raw), notes)
        assert isinstance(dialect, Dialect)
        if is_large(deltas):
            body = await self._jobs.offload.write(caller, dialect.write_response, context, deltas)
        else:
            body = dialect.write_response(context, deltas)
        return WrittenAnswer(body, notes)

    async def count(self, caller: Caller, dialect: CountingDialect, body: bytes, model: TextModel) -> bytes:
        """Return the answer to a request for the number of tokens that a job with this body would have."""
        generation = await self._jobs.offload.decode(caller, body, dialect.decode)
        check_texts(generation)
        model.check_purpose("generate")
        estimate = caller.body_bytes // USUAL_CHARS_PER_TOKEN
        async with self._jobs.charge(caller, estimate, "messages", is_estimate=True) as charge:
            with _naming(generation.messages_field):
                ids = await self._jobs.offload.in_turn(caller, encode_conversation, model, generation)
            charge.correct_prompt(len(ids), trio.current_time())
        return dialect.write_count(len(ids))

    async def prepare(
        self, caller: Caller, dialect: RelayDialect, body: bytes, envelope: Envelope
    ) -> tuple[Job, AnswerContext | None]:
        """Return the job of a request with this body, and the context of an answer that the dialect writes.

        That is None if the answer can only be one that is relayed.
        """
        body, requested, name = self._find(caller, body, envelope)
        model = self._jobs.models.text_of(name)
        if model is None:
            self._check_choices(envelope.choices, "n")
            return await self._relays.job(caller, dialect, body, envelope, model=name, requested=requested)
        if not isinstance(dialect, Dialect):
            raise invalid_field("model", f"{quoted(name)} is not served under {dialect.path}")
        generation, unread = await self._jobs.offload.decode(caller, body, partial(_decode, dialect))
        check_texts(generation)
        model.check_purpose(*generation.tasks)
        self._check_limits(generation, model)
        prompts = await self._encode(caller, generation, model)
        texts: tuple[str, ...] = ()
        if generation.echo:
            shown = generation.prompts if generation.truncation is None else prompts
            texts = await self._jobs.offload.encode(caller, _decoded, model, shown)
        sampling, structure = Sampling(max_tokens=1, temperature=0), Structure()
        if not generation.embed:
            sampling, structure = await self._sampling(caller, generation, model, prompts)
        streams = caller.streams and dialect.streams
        relay = None
        if self._services.fleet.is_relayed(name):
            relay = await self._relays.relay(
                caller, dialect, body, generation, model=name, requested=requested, streams=streams
            )
        job = self._jobs.job(
            caller,
            name,
            dialect.job_prefix,
            prompts=prompts,
            sampling=sampling,
            n=generation.n,
            stop=generation.stop,
            stream=streams,
            relay=relay,
            embed=generation.embed,
            parts=structure.parts,
            grammar_field=structure.grammar_field,
        )
        context = AnswerContext(
            job,
            model,
            int(time.time()),
            generation.options,
            texts,
            AnswerTimes(),
            structure.warning if relay is None else "",
            unread if relay is None else (),
        )
        return job, context

    async def _sampling(
        self,
        caller: Caller,
        generation: GenerationRequest,
        model: TextModel,
        prompts: tuple[ReadOnlySequence[int], ...],
    ) -> tuple[Sampling, Structure]:
        """Return the sampling parameters, with the grammar of the answer, and its structure."""
        sampling = sampling_of(generation, model, prompts)
        if generation.answer is None and not generation.is_chat:
            return sampling, Structure()
        structure = await self._structures.structure(caller, generation, model, prompts[0])
        if structure.grammar is not None or structure.reasoning_limit is not None:
            sampling = msgspec.structs.replace(
                sampling,
                grammar=structure.grammar,
                grammar_bytes=structure.grammar_bytes,
                reasoning_limit=structure.reasoning_limit,
                close_at_limit=model.close_at_limit and structure.grammar is not None,
            )
        return sampling, structure

    def _find(self, caller: Caller, body: bytes, envelope: Envelope) -> tuple[bytes, str, str]:
        """Return the body, and its model: as requested, and the canonical name. Raises as `ModelAccess.find`.

        In a body for a selector, the model is replaced by the one that the job gets.
        """
        models = self._jobs.models
        if envelope.model is not None and models.selectors.has(envelope.model):
            target = models.selectors.take(caller, envelope.model)
            return rewrite_model(body, target.name), target.name, target.model
        name = models.find(caller.api_key, envelope.model)
        return body, envelope.model or name, name

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
        self, caller: Caller, generation: GenerationRequest, model: TextModel
    ) -> tuple[ReadOnlySequence[int], ...]:
        """Return the prompts' token ids. Raises as `Offload.encode` does."""
        encode = self._jobs.offload.encode
        if generation.messages is not None:
            with _naming(generation.messages_field):
                return (pack_ids(await encode(caller, encode_conversation, model, generation)),)
        limits = self._services.config.limits
        if generation.pairs is not None:
            return await encode(caller, encode_pairs, model, generation.pairs, limits, generation.truncation)
        return await encode(
            caller,
            encode_prompts,
            model,
            generation.prompts,
            limits,
            generation.prompts_field,
            special_tokens=generation.special_tokens,
            suffix=generation.suffix,
            truncation=_with_room(generation, model),
        )


def _decode(dialect: Dialect, body: bytes, limits: Limits) -> tuple[GenerationRequest, tuple[str, ...]]:
    """Return the request in a body, and the names of the fields that nothing reads."""
    return dialect.decode(body, limits), dialect.unread(body)


def _with_room(generation: GenerationRequest, model: TextModel) -> Truncation | None:
    """Return the truncation of prompts. One to as many as fit leaves room for the requested answer."""
    truncation = generation.truncation
    if truncation is None or truncation.tokens is not None or generation.max_tokens is None:
        return truncation
    room = model.max_model_len - generation.max_tokens
    return truncation._replace(tokens=max(1, min(model.longest_prompt, room)))


@contextmanager
def _naming(field: str) -> Iterator[None]:
    """Name the field that the messages are from in errors about them."""
    try:
        yield
    except InvalidRequest as error:
        if error.param == "messages":
            error.param = field
        raise


def _decoded(model: TextModel, prompts: ReadOnlySequence[str | ReadOnlySequence[int]]) -> tuple[str, ...]:
    return tuple(prompt if isinstance(prompt, str) else model.tokenizer.decode(prompt) for prompt in prompts)
