"""Headers: the first value of a name, in any case, and the date of a response."""

from collections.abc import Iterable
from functools import lru_cache
from time import time
from typing import Protocol, overload
from wsgiref.handlers import format_date_time

# In which a client with a trusted key names its user: Open WebUI, and a Fairlead that relays jobs to a node.
USER_HEADER = "X-OpenWebUI-User-Id"


class Headers(Protocol):
    """The headers of a request."""

    @overload
    def get(self, name: str) -> str | None: ...
    @overload
    def get(self, name: str, default: str) -> str: ...


class FirstHeaders:
    """`Headers` over ASGI's pairs of bytes, with names in lower case."""

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


def http_date() -> bytes:
    """Return the current time as the value of a `Date` header."""
    return _format_date(int(time()))


@lru_cache(maxsize=1)
def _format_date(second: int) -> bytes:
    return format_date_time(second).encode()
