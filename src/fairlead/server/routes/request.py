"""A request as views see it, and the response that they return. Independent of frameworks, and of the server.

A view is a function from one to the other. `generation_routes` and `exchange` call the same views.
"""

from collections.abc import AsyncIterable, Awaitable, Callable, Mapping
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

import msgspec
import trio

from fairlead.base.config import ApiKey
from fairlead.base.formats.headers import FirstHeaders
from fairlead.base.unread import UnreadBytes
from fairlead.generation.caller import call_at_end
from fairlead.server.auth.flow_control import NO_HINTS
from fairlead.server.listener.forwarded import FORWARDED

LOCAL = "local"  # the address of a client on a Unix socket
NO_SNIFFING = {"X-Content-Type-Options": "nosniff"}

_encode = msgspec.json.Encoder().encode


class Request:
    """One request. All work for it runs in `nursery`, which is cancelled when the client disconnects.

    `scope` is ASGI's. `read` returns the whole body, once, or raises as `IncomingBody.read` does. `open_body`
    returns the body, to be received piece by piece instead.
    `leave_body` is called when the request no longer needs it. `address` is the client's. `path_parameters`
    are the variable parts of the path. `RequestAuth.enter` sets `request_id`, `api_key` and `flow`.
    `unread` counts what of the response waits for the client; None: nothing does.
    `body_bytes` is 0 until the body was read. `user` is the user that the body names, once it was parsed.
    `is_job`: from here on the gateway accounts for the request. `is_open_to_pages`: pages of other servers
    may read the response, where `cors` allows any. `is_forwarded`: it says that it comes through a proxy, so
    its client may be anywhere, also if `address` is this machine's.
    """

    __slots__ = (
        *("address", "api_key", "body_bytes", "headers", "is_job", "is_open_to_pages", "leave_body"),
        "open_body",
        *("flow", "method", "nursery", "path", "path_parameters", "read", "request_id", "scope", "unread"),
        *("is_forwarded", "user"),
    )

    nursery: trio.Nursery

    def __init__(self, scope: Mapping[str, Any], read: Callable[[], Awaitable[bytes]]) -> None:
        client = scope.get("client")
        self.scope = scope
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.headers = FirstHeaders(scope["headers"])
        self.address: str | None = (client[0] or LOCAL) if client else None
        self.is_forwarded: bool = scope.get(FORWARDED, False)
        self.read = read
        self.leave_body: Callable[[], None] = _nothing
        self.open_body: Callable[[], Any] = _no_body
        self.path_parameters: Mapping[str, str] = {}
        self.request_id = ""
        self.api_key: ApiKey | None = None
        self.flow = NO_HINTS
        self.body_bytes = 0
        self.user: str | None = None
        self.unread: UnreadBytes | None = None
        self.is_job = False
        self.is_open_to_pages = False

    def at_end(self, call: Callable[..., None], *arguments: object) -> None:
        """Call a function when the request has ended."""
        call_at_end(self.nursery, call, *arguments)

    @property
    def query_string(self) -> bytes:
        """The query as it was sent."""
        query: bytes = self.scope.get("query_string", b"")
        return query

    def query(self, name: str) -> str | None:
        """Return the first value of a query parameter; None if it is absent."""
        pairs = parse_qsl(self.query_string.decode(errors="replace"), keep_blank_values=True)
        return next((value for key, value in pairs if key == name), None)

    @property
    def prefix(self) -> str:
        """The path below which the server is mounted; empty if it is not."""
        prefix: str = self.scope.get("prefix", "")
        return prefix


def _no_body() -> Any:
    raise AssertionError("the request has no body")


def _nothing() -> None:
    """Do nothing: there is no body to stop counting."""


class Response(NamedTuple):
    """A response: its whole body, or an iterator of its pieces.

    The iterator is never closed. So it must hold no resources, and must not be a generator. It raises
    `CutStream` after the last piece of an incomplete body.
    """

    body: bytes | AsyncIterable[bytes]
    status: int
    headers: dict[str, str]


View = Callable[[Request], Awaitable[Response]]


def json_response(document: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return a response in JSON; bytes are taken as JSON already.

    Some contain text of other servers, so browsers must not guess another content type.
    """
    body = document if isinstance(document, bytes) else _encode(document)
    return Response(body, status, {"Content-Type": "application/json", **NO_SNIFFING, **(headers or {})})
