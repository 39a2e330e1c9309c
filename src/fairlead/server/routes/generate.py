"""The view of every route that a model answers: from an HTTP request to a caller, and back to a response."""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import msgspec

from fairlead.base.config import Limits
from fairlead.base.errors import InvalidRequest
from fairlead.dialects.body import BodyParser
from fairlead.dialects.dialect import CountingDialect, RelayDialect, RelayedBody
from fairlead.dialects.fields import TEXT_OR_TEXTS, describe_alternatives
from fairlead.dialects.openai.chat import ChatDialect
from fairlead.dialects.openai.completions import CompletionDialect
from fairlead.dialects.openai.embeddings import EmbeddingDialect
from fairlead.dialects.rerank.rerank import RerankDialect
from fairlead.dialects.rerank.score import ScoreDialect
from fairlead.generation.pipeline import GenerationPipeline
from fairlead.server.routes.answers import answer_response
from fairlead.server.routes.request import Request, Response, json_response
from fairlead.server.routes.request_reader import RequestReader

_INVOCATIONS: tuple[tuple[frozenset[str], RelayDialect], ...] = (
    (frozenset({"messages"}), ChatDialect()),
    (frozenset({"prompt"}), CompletionDialect()),
    (frozenset({"input"}), EmbeddingDialect()),
    (frozenset({"query", "documents"}), RerankDialect()),
    (frozenset({"text_1", "text_2"}), ScoreDialect()),
    (frozenset({"queries", "documents"}), ScoreDialect()),
)
INVOCATION_BODY = describe_alternatives(
    RelayedBody,
    {"messages": "array"},
    {"prompt": TEXT_OR_TEXTS},
    {"input": TEXT_OR_TEXTS},
    {"query": "string", "documents": "array"},
    {"text_1": TEXT_OR_TEXTS, "text_2": TEXT_OR_TEXTS},
    {"queries": TEXT_OR_TEXTS, "documents": TEXT_OR_TEXTS},
)
_read_fields = BodyParser(dict[str, msgspec.Raw])


def _read_envelope(dialect: RelayDialect, body: bytes, limits: Limits) -> tuple[RelayDialect, Any]:
    return dialect, dialect.read_envelope(body, limits)


def _read_invocation(body: bytes, limits: Limits) -> tuple[RelayDialect, Any]:
    """Return the dialect of a body, and its envelope. Raises `InvalidRequest` if it has no prompt."""
    fields = _read_fields(body, limits)
    for names, dialect in _INVOCATIONS:
        if names <= fields.keys():
            return _read_envelope(dialect, body, limits)
    known = ", ".join(" with ".join(sorted(names)) for names, _ in _INVOCATIONS)
    raise InvalidRequest(f"the body has none of these fields: {known}")


class GenerationViews:
    """Serves requests in all dialects."""

    def __init__(self, reader: RequestReader, pipeline: GenerationPipeline) -> None:
        self._reader = reader
        self._models = reader.jobs.models
        self._pipeline = pipeline

    async def respond(
        self,
        request: Request,
        dialect: RelayDialect,
        *,
        intercept: Callable[[Request, Any], Awaitable[Any]] | None = None,
    ) -> Response:
        """Return the response: whole, or a stream from its first delta on. Raises a `FairleadError`.

        `intercept` returns the envelope to use instead of the parsed one, or the response.
        """
        return await self._respond(request, partial(_read_envelope, dialect), intercept)

    async def invocations(self, request: Request) -> Response:
        """Handle `POST /invocations`: a request in the dialect that its fields show."""
        return await self._respond(request, _read_invocation)

    async def _respond(
        self,
        request: Request,
        read: Callable[[bytes, Limits], tuple[RelayDialect, Any]],
        intercept: Callable[[Request, Any], Awaitable[Any]] | None = None,
    ) -> Response:
        # This frame exists as long as the job, which needs neither the body nor what was decoded from it.
        body, (dialect, envelope) = await self._reader.take(request, read)
        if intercept is not None:
            envelope = await intercept(request, envelope)
            if isinstance(envelope, Response):
                return envelope
        caller = self._reader.identify(request, envelope, header_prefix=dialect.header_prefix)
        if isinstance(dialect, CountingDialect):
            model = self._models.known_text(caller.api_key, envelope.model)
            if model is not None:
                return json_response(await self._pipeline.count(caller, dialect, body, model))
        job, context = await self._pipeline.prepare(caller, dialect, body, envelope)
        del body, envelope
        return answer_response(await self._pipeline.answer(caller, dialect, job, context))
