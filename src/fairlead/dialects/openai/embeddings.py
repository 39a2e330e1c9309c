"""OpenAI's embeddings of texts: `POST /v1/embeddings`."""

import math
import struct
from base64 import b64encode
from typing import Annotated, Literal

from msgspec import Meta

from fairlead.base.config import Limits
from fairlead.base.errors import NodeFailed
from fairlead.base.job import Delta
from fairlead.dialects import shapes
from fairlead.dialects.body import BodyParser, invalid_field
from fairlead.dialects.dialect import AnswerContext, Dialect, GenerationRequest
from fairlead.dialects.fields import OF_ONE_KIND, NonEmpty, PositiveCount, Texts
from fairlead.dialects.openai.common import (
    OpenAIErrors,
    TruncationFields,
    encode,
    encode_member,
    prompt_usage,
    prompts_of,
    truncation_of,
)
from fairlead.dialects.openai.events import ChunkReader
from fairlead.dialects.unserved import EMBEDDING, capturing, refuse_unserved

MAX_INPUTS = 2048
"""Texts in one request: OpenAI's bound, by which its clients split their lists."""


class EmbeddingRequest(TruncationFields, frozen=True, kw_only=True):
    """`POST /v1/embeddings`. `input`: a text, token ids, or a list of either (all of one kind).

    `dimensions` truncates each vector to its first numbers, for models that were trained for that.
    """

    input: NonEmpty | Annotated[Texts, Meta(min_length=1, extra_json_schema=OF_ONE_KIND)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: PositiveCount | None = None


_parse = BodyParser(capturing(EmbeddingRequest, EMBEDDING))


class EmbeddingDialect(OpenAIErrors, Dialect):
    """Embeddings. Their `options` are the number of dimensions and the format, each None for the default."""

    path = "/v1/embeddings"
    body_type = EmbeddingRequest
    answer_type = shapes.EmbeddingList
    refused_fields = EMBEDDING
    job_prefix = "embd"
    reader = ChunkReader()

    def decode(self, body: bytes, limits: Limits) -> GenerationRequest:
        """Return the request in a body."""
        request = _parse(body, limits)
        refuse_unserved(request, EMBEDDING)
        inputs = prompts_of("input", request.input, empty="has an empty text")
        if len(inputs) > MAX_INPUTS:
            reason = f"{len(inputs)} texts are too many: a request may have {MAX_INPUTS}"
            raise invalid_field("input", reason)
        return GenerationRequest(
            prompts=inputs,
            prompts_field="input",
            embed=True,
            truncation=truncation_of(request.truncate_prompt_tokens, request.truncation_side or "right"),
            dimensions=request.dimensions,
            options=(request.dimensions, request.encoding_format),
        )

    def write_response(self, context: AnswerContext, deltas: list[Delta]) -> bytes:
        """Return the vectors in the order of their texts."""
        settings, job = context.own_model.embedding, context.job
        assert settings is not None
        dimensions, encoding_format = context.options
        data = []
        for delta in deltas:
            vector = delta.vector
            _check_width(vector, settings.width)
            if dimensions is not None and dimensions < settings.width:
                vector = shorten(vector, dimensions, normalized=settings.normalized)
            in_text = encoding_format == "base64"
            written = b64encode(vector).decode() if in_text else encode_member(_numbers(vector))
            data.append(shapes.TextVector("embedding", delta.index, written))
        return encode(shapes.EmbeddingList("list", data, job.model, prompt_usage(job)))


def shorten(vector: bytes, dimensions: int, *, normalized: bool) -> bytes:
    """Return a vector's first `dimensions` numbers, scaled to length 1 again if it was normalized."""
    numbers = _numbers(vector[: 4 * dimensions])
    # A zero vector has no direction and is not scaled.
    length = (math.hypot(*numbers) or 1.0) if normalized else 1.0
    return struct.pack(f"<{dimensions}f", *(number / length for number in numbers))


def numbers_of(vector: bytes, width: int) -> tuple[float, ...]:
    """Return the `width` numbers of a vector. Raises `NodeFailed` if it has more or fewer."""
    _check_width(vector, width)
    return _numbers(vector)


def _check_width(vector: bytes, width: int) -> None:
    if len(vector) != 4 * width:
        raise NodeFailed(f"the model made a vector of {len(vector)} bytes")


def _numbers(vector: bytes) -> tuple[float, ...]:
    return struct.unpack(f"<{len(vector) // 4}f", vector)
