"""A request as routes see it, whether it came through Quart or not, and the response that a route returns.

Independent of frameworks. `Headers` is the common interface of both kinds of requests: the first value of a
name, in any case.
"""

from collections.abc import AsyncIterable, Awaitable, Callable
from typing import NamedTuple

import msgspec
import trio

from fairlead.config import ApiKey
from fairlead.http.headers import Headers

NO_SNIFFING = {"X-Content-Type-Options": "nosniff"}

_encode = msgspec.json.Encoder().encode


class Request:
    """One request. All work for it runs in `nursery`, which is cancelled when the client disconnects.

    `read` returns the whole body, once, or raises as `IncomingBody.read` does. `leave_body` is called when
    the request no longer needs it. `address` is the client's. `Door.enter` sets `request_id` and `api_key`
    from the headers. `body_bytes` is 0 until the body was read. `user` is the user that the body names, once
    it was parsed. `is_job`: from here on the gateway accounts for the request. `method` and `path` are for
    the log. `is_open_to_pages`: pages of other servers may read the response, where `cors` allows any.
    """

    __slots__ = (
        *("address", "api_key", "body_bytes", "headers", "is_job", "leave_body", "nursery", "read"),
        *("is_open_to_pages", "method", "path", "request_id", "user"),
    )

    nursery: trio.Nursery

    def __init__(
        self,
        headers: Headers,
        address: str | None,
        read: Callable[[], Awaitable[bytes]],
        *,
        method: str = "",
        path: str = "",
    ) -> None:
        self.method = method
        self.path = path
        self.headers = headers
        self.address = address
        self.read = read
        self.leave_body: Callable[[], None] = _nothing
        self.request_id = ""
        self.api_key: ApiKey | None = None
        self.body_bytes = 0
        self.user: str | None = None
        self.is_job = False
        self.is_open_to_pages = False


def _nothing() -> None:
    """Do nothing: there is no body to stop counting."""


class Response(NamedTuple):
    """A response: its whole body, or an iterator of its pieces.

    The iterator is never closed. So it must hold no resources, and must not be a generator.
    """

    body: bytes | AsyncIterable[bytes]
    status: int
    headers: dict[str, str]


def json_response(document: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return a response in JSON; bytes are taken as JSON already.

    Some contain text of other servers, so browsers must not guess another content type.
    """
    body = document if isinstance(document, bytes) else _encode(document)
    return Response(body, status, {"Content-Type": "application/json", **NO_SNIFFING, **(headers or {})})
