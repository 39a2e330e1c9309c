"""OpenAI's route for embeddings of texts: `POST /v1/embeddings`. Does not know sockets or the engine."""

import math
import struct
from base64 import b64encode
from collections.abc import Sequence as ReadOnlySequence
from functools import partial
from typing import Any

import msgspec

from fairlead.api import prepare, unserved
from fairlead.api.encoding import encode_prompts
from fairlead.api.job_service import JobService
from fairlead.api.proxy import EMBEDDINGS, Proxy
from fairlead.api.request import Request, Response
from fairlead.api.schemas import EmbeddingRequest
from fairlead.config import Limits
from fairlead.errors import NodeFailed
from fairlead.job import Delta, Job, Sampling
from fairlead.text.embedding import EmbeddingSettings
from fairlead.text.model import TextModel

MAX_INPUTS = 2048
"""Texts in one request: OpenAI's bound, by which its clients split their lists."""

_decoder = msgspec.json.Decoder(unserved.reading(EmbeddingRequest, unserved.EMBEDDING))
_encode = msgspec.json.Encoder().encode


class Embeddings:
    """The view of `/v1/embeddings`."""

    def __init__(self, edge: JobService, relaying: Proxy) -> None:
        self._edge = edge
        self._relaying = relaying
        self._services = edge.services

    async def embed(self, call: Request) -> Response:
        """Handle `POST /v1/embeddings`."""
        body, addressed, name = await self._relaying.read(call)
        if (model := self._services.models.get(name)) is None:
            return await self._relaying.pass_on(call, EMBEDDINGS, body, addressed, name)
        wanted = await self._edge.parse(call, body, _decoder)
        model.check_purpose(embed=True)
        assert model.embedding is not None
        unserved.refuse_unserved(wanted, unserved.EMBEDDING)
        if wanted.dimensions is not None and wanted.dimensions > model.embedding.width:
            raise prepare.refuse(
                "dimensions", f"{wanted.dimensions} is too many: this model's are {model.embedding.width}"
            )
        limits = self._services.config.limits
        prompts = await self._edge.encode(call, _encoded, model, wanted.input, limits)
        job = self._edge.job(
            call,
            wanted,
            name,
            kind="embd",
            prompts=prompts,
            sampling=Sampling(max_tokens=1, temperature=0),
            n=1,
            relay=self._relaying.beside(name, EMBEDDINGS, body, wanted),
            embed=True,
        )
        # This frame exists as long as the job, which no longer needs the texts.
        wanted = msgspec.structs.replace(wanted, input="")
        del body, addressed, prompts
        write = partial(embedding_list, job, embedding=model.embedding, wanted=wanted)
        return await self._relaying.whole(call, job, write)


def embedding_list(
    job: Job, answers: list[Delta], embedding: EmbeddingSettings, wanted: EmbeddingRequest
) -> bytes:
    """Return the response body: the vectors in the order of their texts."""
    data: list[dict[str, Any]] = []
    for answer in answers:
        if len(answer.vector) != 4 * embedding.width:
            raise NodeFailed(f"the model made a vector of {len(answer.vector)} bytes")
        vector = answer.vector
        if wanted.dimensions is not None and wanted.dimensions < embedding.width:
            vector = shortened(vector, wanted.dimensions, normalized=embedding.normalized)
        in_text = wanted.encoding_format == "base64"
        # Encoded one by one: one call for all of them would hold the GIL too long.
        written = b64encode(vector).decode() if in_text else msgspec.Raw(_encode(_numbers(vector)))
        data.append({"object": "embedding", "index": answer.index, "embedding": written})
    usage = {"prompt_tokens": job.prompt_tokens, "total_tokens": job.prompt_tokens}
    return _encode({"object": "list", "data": data, "model": job.model, "usage": usage})


def shortened(vector: bytes, dimensions: int, *, normalized: bool) -> bytes:
    """Return a vector's first `dimensions` numbers, scaled to length 1 again if it was normalized."""
    numbers = _numbers(vector[: 4 * dimensions])
    # A zero vector has no direction and is not scaled.
    length = (math.hypot(*numbers) or 1.0) if normalized else 1.0
    return struct.pack(f"<{dimensions}f", *(number / length for number in numbers))


def _numbers(vector: bytes) -> tuple[float, ...]:
    return struct.unpack(f"<{len(vector) // 4}f", vector)


def _inputs(wanted: str | list[Any]) -> list[prepare.Prompt]:
    """Return the inputs, each a text or token ids, from any of the four forms OpenAI allows."""
    kinds = {str} if isinstance(wanted, str) else set(map(type, wanted))
    if len(kinds) > 1:
        raise prepare.refuse("input", "must be a text, token ids, or a list of either, all of one kind")
    inputs = [wanted] if isinstance(wanted, str) or kinds == {int} else wanted
    if "" in inputs:
        raise prepare.refuse("input", "has an empty text")
    if len(inputs) > MAX_INPUTS:
        raise prepare.refuse("input", f"{len(inputs)} texts are too many: a request may have {MAX_INPUTS}")
    return inputs


def _encoded(model: TextModel, wanted: str | list[Any], limits: Limits) -> tuple[ReadOnlySequence[int], ...]:
    return encode_prompts(model, _inputs(wanted), limits, "input")
