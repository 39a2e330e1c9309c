"""What the routes of every dialect do with the current request: read, encode, have a job served."""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar, cast

import msgspec
import trio
from quart import Response, g, request

from fairlead.api.access import tenant_of
from fairlead.api.body import Body, parse
from fairlead.api.exchange import FairleadRequest, read_body, unwrap
from fairlead.api.services import Answer, Services
from fairlead.job import Job

Encoded = TypeVar("Encoded")

# From here on, tokenizing could hold up everybody's next token: it goes to a thread.
LONG_BODY_BYTES = 20_000
ENCODING_THREADS = 2

_encode = msgspec.json.Encoder().encode


class Edge:
    """The routes' way to the services. Holds no state of a request: that is Quart's current request."""

    def __init__(self, services: Services) -> None:
        self.services = services
        self._threads = trio.CapacityLimiter(ENCODING_THREADS)

    async def read(self, decoder: msgspec.json.Decoder[Body]) -> Body:
        """Return the parsed body. Raises `InvalidRequest`, `BodyTooLarge` or `BodyTimeout`."""
        body = await read_body(_current_request())
        g.body_bytes = len(body)
        return parse(body, decoder)

    async def encode(self, encode: Callable[..., Encoded], *arguments: Any, **options: Any) -> Encoded:
        """Call a tokenizer's or template's function, in a thread if the body was long."""
        call = partial(encode, *arguments, **options)
        if g.body_bytes < LONG_BODY_BYTES:
            return call()
        return await trio.to_thread.run_sync(call, abandon_on_cancel=True, limiter=self._threads)

    def tenant(self, *, user: str | None, safety_identifier: str | None) -> str:
        """Return whom the current request is to be counted for."""
        client = _current_request().scope.get("client")
        return tenant_of(
            g.api_key,
            request.headers,
            client[0] if client else None,
            user=user,
            safety_identifier=safety_identifier,
        )

    async def serve(self, job: Job) -> Answer:
        """Have the job served, in a task that lives as long as the exchange. Raises a `FairleadError`."""
        try:
            answer = await _current_request().nursery.start(self.services.gateway.serve, job)
        except ExceptionGroup as group:
            raise unwrap(group) from group
        return cast(Answer, answer)


def json_response(document: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return a JSON answer; bytes are taken as JSON already."""
    body = document if isinstance(document, bytes) else _encode(document)
    return Response(body, status, headers, content_type="application/json")


def waiting_headers(answer: Answer) -> dict[str, str]:
    """Return what an answer that had to wait says about it (spec 2); nothing for one that did not."""
    headers = {}
    if answer.estimated_wait_s is not None:
        headers["X-Estimated-Wait"] = str(answer.estimated_wait_s)
    if answer.queue_position is not None:
        headers["X-Queue-Position"] = str(answer.queue_position)
    return headers


def _current_request() -> FairleadRequest:
    return cast(FairleadRequest, request)
