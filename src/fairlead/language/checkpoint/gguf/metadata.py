"""Reads values of a GGUF's metadata by key. Every error is a `LoadFailed` with the file and the key."""

from pathlib import Path
from typing import Any

from fairlead.base.errors import LoadFailed
from fairlead.language.checkpoint.gguf.header import StoredArray

_MOST_BOUND = 1 << 31


class Metadata:
    """The metadata of the file at `path`. `default`: the value of an absent key; None: it is required."""

    def __init__(self, path: Path, values: dict[str, Any]) -> None:
        self.path = path
        self._values = values

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def keys(self) -> list[str]:
        return list(self._values)

    def fails(self, key: str, reason: str) -> LoadFailed:
        """Return the error to raise for `key`."""
        return LoadFailed(f"{self.path}: {key}: {reason}")

    def integer(self, key: str, default: int | None = None, *, least: int = 0) -> int:
        value = self.value(key, default)
        if type(value) is not int or not least <= value < _MOST_BOUND:
            raise self.fails(key, f"must be an integer from {least}, not {value!r:.100}")
        return value

    def same_integer(self, key: str, count: int, default: int | None = None) -> int:
        """Return an integer, or the one number that a list has `count` times: one for each layer."""
        if not isinstance(self._values.get(key), StoredArray):
            return self.integer(key, default, least=1)
        values = self.items(key, int)
        if len(values) != count or len(set(values)) != 1 or values[0] < 1:
            raise self.fails(key, f"must be the same positive number for all of the {count} layers")
        return int(values[0])

    def number(self, key: str, default: float | None = None) -> float:
        value = self.value(key, default)
        if type(value) not in (int, float):
            raise self.fails(key, f"must be a number, not {value!r:.100}")
        return float(value)

    def flag(self, key: str, *, default: bool) -> bool:
        value = self.value(key, default)
        if type(value) is not bool:
            raise self.fails(key, f"must be true or false, not {value!r:.100}")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self.value(key, default)
        if type(value) is not str:
            raise self.fails(key, f"must be a string, not {value!r:.100}")
        return value

    def items(self, key: str, kind: type) -> list[Any]:
        """Return a list of values of one type."""
        value = self.value(key, None)
        if not isinstance(value, StoredArray):
            raise self.fails(key, f"must be a list, not {value!r:.100}")
        try:
            values = value.values()
        except UnicodeDecodeError as error:
            raise self.fails(key, f"has a string that is not UTF-8: {error}") from None
        if values and type(values[0]) is not kind:
            raise self.fails(key, f"must be a list of {kind.__name__}, not of {type(values[0]).__name__}")
        return values

    def value(self, key: str, default: object) -> Any:
        """Return a value of any type: an array as it is stored."""
        value = self._values.get(key, default)
        if value is None:
            raise self.fails(key, "is missing")
        return value
