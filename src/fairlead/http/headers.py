"""Request headers: the first value of a name, in any case."""

from collections.abc import Iterable
from typing import Protocol, overload


class Headers(Protocol):
    """The headers of a request."""

    @overload
    def get(self, name: str) -> str | None: ...
    @overload
    def get(self, name: str, default: str) -> str: ...


class FirstHeaders:
    """`Headers` over ASGI's pairs of bytes, whose names are in lower case."""

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
