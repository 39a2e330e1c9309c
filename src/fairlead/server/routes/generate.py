"""The view of every route that a model answers: from an HTTP request to a caller, and back to a response."""

from collections.abc import Awaitable, Callable
from typing import Any

from fairlead.dialects.dialect import CountingDialect, RelayDialect
from fairlead.generation.pipeline import GenerationPipeline
from fairlead.server.routes.answers import answer_response
from fairlead.server.routes.request import Request, Response, json_response
from fairlead.server.routes.request_reader import RequestReader


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
        # This frame exists as long as the job, which needs neither the body nor what was decoded from it.
        body, envelope = await self._reader.take(request, dialect.read_envelope)
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
