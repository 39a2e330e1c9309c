"""One request as the routes see it, whether it came through Quart or past it, and what a route answers.

Knows no framework. `Headers` is what both kinds of requests have in common: the first value of a name,
whatever its case.
"""

from collections.abc import AsyncIterable, Awaitable, Callable, Iterable
from typing import NamedTuple, Protocol, overload

import msgspec
import trio

from fairlead.config import ApiKey

NO_SNIFFING = {"X-Content-Type-Options": "nosniff"}

_encode = msgspec.json.Encoder().encode


class Headers(Protocol):
    """The headers of a request."""

    @overload
    def get(self, name: str) -> str | None: ...
    @overload
    def get(self, name: str, default: str) -> str: ...


class FirstHeaders:
    """`Headers` over what ASGI gives: pairs of bytes, the names in lower case."""

    __slots__ = ("_values",)

    def __init__(self, pairs: Iterable[tuple[bytes, bytes]]) -> None:
        self._values: dict[str, str] = {}
        for name, value in pairs:
            self._values.setdefault(name.decode("latin-1"), value.decode("latin-1"))

    @overload
    def get(self, name: str) -> str | None: ...
    @overload
    def get(self, name: str, default: str) -> str: ...
    def get(self, name: str, default: str | None = None) -> str | None:
        """Return the first value of that name."""
        return self._values.get(name.lower(), default)


class Call:
    """One request. `nursery` is of all that is done for it, and is cancelled when its client leaves.

    `read` returns the whole body, once, or raises as `IncomingBody.read` does; `leave_body` is called when
    the request does not need it any more. `address` is the client's. `request_id` and `api_key` are what the
    door made of its headers; `body_bytes` is 0 until it was read. `user` is the user that the body names,
    once it was parsed. `is_job`: the gateway has it from here on, and says what became of it. `method` and
    `path` are for the log. `is_open_to_pages`: pages of other servers may be answered, where the
    configuration allows any (`cors`).
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


class Reply(NamedTuple):
    """An answer: its body whole, or in pieces as they come.

    Nobody closes what makes the pieces: it must hold nothing, and so be no generator.
    """

    body: bytes | AsyncIterable[bytes]
    status: int
    headers: dict[str, str]


def json_reply(document: object, status: int = 200, headers: dict[str, str] | None = None) -> Reply:
    """Return an answer in JSON; bytes are taken as JSON already.

    Some contain what another server wrote, so browsers are told not to guess another type.
    """
    body = document if isinstance(document, bytes) else _encode(document)
    return Reply(body, status, {"Content-Type": "application/json", **NO_SNIFFING, **(headers or {})})
