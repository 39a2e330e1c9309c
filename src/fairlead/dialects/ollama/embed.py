"""Ollama's embeddings of texts: `POST /api/embed`, and the older `POST /api/embeddings`."""

import math
import struct
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from fairlead.base.config import Limits
from fairlead.base.errors import NodeFailed
from fairlead.base.job import Delta
from fairlead.dialects.answer_events import TokenUsage
from fairlead.dialects.body import BodyParser, invalid_field
from fairlead.dialects.dialect import AnswerContext, Dialect, GenerationRequest
from fairlead.dialects.fields import NonEmpty, PositiveCount
from fairlead.dialects.ollama import shapes
from fairlead.dialects.ollama.fields import KeepAlive, OllamaEnvelope
from fairlead.dialects.ollama.reader import LineReader
from fairlead.dialects.ollama.writer import OllamaErrors, statistics
from fairlead.dialects.openai.common import encode, encode_member
from fairlead.dialects.openai.embeddings import MAX_INPUTS
from fairlead.language.text.truncation import Truncation


class EmbedOptions(msgspec.Struct, frozen=True):
    """Options of a request for embeddings, of which none has an effect here."""


class EmbedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /api/embed`.

    input: A text, or a list of texts; None: the request loads the model.
    model: The model.
    truncate: Cut the ends of texts that are too long, which is the default; false: they are refused.
    dimensions: Truncate each vector to its first numbers, for models that were trained for that.
    options: Have no effect.
    keep_alive: How long the model stays loaded after the request.
    """

    input: str | Annotated[list[NonEmpty], Meta(max_length=MAX_INPUTS)] | None = None
    model: str | None = None
    truncate: bool | None = None
    dimensions: PositiveCount | None = None
    options: EmbedOptions | None = None
    keep_alive: KeepAlive | None = None


class PromptEmbeddingRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /api/embeddings`.

    prompt: One text; None: the request loads the model.
    model: The model.
    options: Have no effect.
    keep_alive: How long the model stays loaded after the request.
    """

    prompt: str | None = None
    model: str | None = None
    options: EmbedOptions | None = None
    keep_alive: KeepAlive | None = None


_AT_END = Truncation(None, "right")
_parse = BodyParser(EmbedRequest)
_parse_prompt = BodyParser(PromptEmbeddingRequest)


class EmbedDialect(OllamaErrors, Dialect):
    """Embeddings, scaled to length 1. Their `options` are the number of dimensions, None for all."""

    name = "ollama"
    path = "/api/embed"
    body_type: ClassVar[Any] = EmbedRequest
    answer_type: ClassVar[Any] = shapes.OllamaEmbeddings
    job_prefix = "embed"
    read_envelope = BodyParser(OllamaEnvelope)
    reader = LineReader()

    def decode(self, body: bytes, limits: Limits) -> GenerationRequest:
        """Return the request in a body."""
        request = _parse(body, limits)
        inputs = [request.input] if isinstance(request.input, str) else request.input or []
        if "" in inputs:
            raise invalid_field("input", "has an empty text")
        return GenerationRequest(
            prompts=inputs,
            prompts_field="input",
            embed=True,
            dimensions=request.dimensions,
            truncation=None if request.truncate is False else _AT_END,
            options=request.dimensions,
        )

    def write_response(self, context: AnswerContext, deltas: list[Delta]) -> bytes:
        """Return the vectors in the order of their texts."""
        vectors = [encode_member(_scale(_numbers(context, delta)[: context.options])) for delta in deltas]
        counts = statistics(context, TokenUsage(context.job.prompt_tokens, 0, 0, 0))
        shown = ("total_duration", "load_duration", "prompt_eval_count")
        return encode(
            shapes.OllamaEmbeddings(
                model=context.job.model, embeddings=vectors, **{name: counts[name] for name in shown}
            )
        )


class PromptEmbeddingDialect(EmbedDialect):
    """The embedding of one text, as the model makes it."""

    path = "/api/embeddings"
    body_type = PromptEmbeddingRequest
    answer_type = shapes.OllamaEmbedding

    def decode(self, body: bytes, limits: Limits) -> GenerationRequest:
        """Return the request in a body."""
        prompt = _parse_prompt(body, limits).prompt or ""
        return GenerationRequest(prompts=[prompt], embed=True, truncation=_AT_END)

    def write_response(self, context: AnswerContext, deltas: list[Delta]) -> bytes:
        """Return the body of a response; `deltas` has one per choice, in order."""
        return encode(shapes.OllamaEmbedding(list(_numbers(context, deltas[0]))))


def _numbers(context: AnswerContext, delta: Delta) -> tuple[float, ...]:
    """Return the numbers of a vector. Raises `NodeFailed` if it is not one of this model."""
    width = len(delta.vector) // 4
    settings = context.model.embedding if context.model is not None else None
    if 4 * width != len(delta.vector) or (settings is not None and width != settings.width):
        raise NodeFailed(f"the model made a vector of {len(delta.vector)} bytes")
    return struct.unpack(f"<{width}f", delta.vector)


def _scale(numbers: tuple[float, ...]) -> list[float]:
    # A zero vector has no direction and is not scaled.
    length = math.hypot(*numbers) or 1.0
    return [number / length for number in numbers]
