"""Reads a `config.json` of Hugging Face's layout and reports errors by file and key.

Defines no keys: each module that reads a key defines its meaning.
"""

import json
import math
from collections.abc import Mapping
from typing import Any, Protocol

from fairlead.base.errors import LoadFailed


class CheckpointDocument(Protocol):
    """A document of a checkpoint, such as a file: a `Path` is one. Its text names it in errors."""

    @property
    def stem(self) -> str: ...

    def is_file(self) -> bool: ...

    def read_bytes(self) -> bytes: ...


class CheckpointConfig:
    """A JSON object from a file. Every reader raises `LoadFailed` with the file and the key at fault.

    path: the file.
    values: the object.
    within: where it is in the file.
    defaults: the family's values of keys that are absent.

    A key that is absent has its value in `defaults`, or else the reader's `default`. A key that is null has
    the reader's: null is not always the same as absent. Without any, a key is required. Whole numbers may be
    written as floats (2048.0), as Python's tools do.
    """

    def __init__(
        self,
        path: CheckpointDocument,
        values: dict[str, Any],
        *,
        within: str = "",
        defaults: Mapping[str, Any] | None = None,
    ) -> None:
        self.path = path
        self._values = values
        self._within = within
        self._defaults = defaults or {}

    @classmethod
    def read(cls, path: CheckpointDocument) -> "CheckpointConfig":
        """Parse a document."""
        try:
            values = json.loads(path.read_bytes())
        except OSError as error:
            raise LoadFailed(f"{path}: {error.strerror or error}") from error
        except (ValueError, RecursionError) as error:
            raise LoadFailed(f"{path}: not valid JSON: {error}") from error
        if not isinstance(values, dict):
            raise LoadFailed(f"{path}: must be a JSON object")
        return cls(path, values)

    def with_defaults(self, defaults: Mapping[str, Any]) -> "CheckpointConfig":
        """Return the same object with a family's values of absent keys."""
        return CheckpointConfig(self.path, self._values, within=self._within, defaults=defaults)

    def __contains__(self, key: str) -> bool:
        """Return whether the key has a value, its own or the family's."""
        return self._values.get(key, self._defaults.get(key)) is not None

    def keys(self) -> list[str]:
        """Return the keys that are present and not null."""
        return [key for key, value in self._values.items() if value is not None]

    def fails(self, key: str, reason: str) -> LoadFailed:
        """Return the error to raise for `key`."""
        return LoadFailed(f"{self.path}: {self._within}{key}: {reason}")

    def integer(self, key: str, default: int | None = None, *, least: int = 1, most: int = 2**31 - 1) -> int:
        """Return an integer.

        key: its key.
        default: its value if the key is absent or null; None: it is required.
        least: the least value.
        most: the largest value.
        """
        value = self._value(key, default)
        value = _whole(value)
        if type(value) is not int:
            raise self.fails(key, f"must be an integer, not {value!r}")
        if not least <= value <= most:
            raise self.fails(key, f"must be from {least} to {most}, not {value}")
        return value

    def number(self, key: str, default: float | None = None, *, may_be_zero: bool = False) -> float:
        """Return a positive, finite number; with `may_be_zero` also 0."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.fails(key, f"must be a number, not {value!r}")
        try:
            number = float(value)
        except OverflowError:  # an integer of hundreds of digits
            number = math.inf
        if not math.isfinite(number) or number < 0 or (number == 0 and not may_be_zero):
            raise self.fails(
                key, f"must be {'0 or more' if may_be_zero else 'positive'} and finite, not {value}"
            )
        return number

    def numbers(self, key: str) -> tuple[float, ...]:
        """Return a list of positive, finite numbers."""
        values = self._value(key, None)
        if not isinstance(values, list) or not all(
            type(value) in (int, float) and 0 < value < math.inf for value in values
        ):
            raise self.fails(key, "must be a list of positive, finite numbers")
        return tuple(map(float, values))

    def flag(self, key: str, default: bool | None = None) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self.fails(key, f"must be true or false, not {value!r}")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self.fails(key, f"must be a string, not {value!r}")
        return value

    def texts(self, key: str) -> list[str]:
        """Return a list of strings."""
        value = self._value(key, None)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.fails(key, f"must be a list of strings, not {value!r}")
        return value

    def token_ids(self, key: str, *, may_be_negative: bool = False) -> tuple[int, ...]:
        """Return the ids of a key with one token id or a list of them; none when absent.

        Null stands for no token, alone or in a list.
        """
        value = self._values.get(key)
        listed = value if isinstance(value, list) else [value]
        ids = [_whole(token_id) for token_id in listed if token_id is not None]
        if not all(type(token_id) is int and (may_be_negative or token_id >= 0) for token_id in ids):
            raise self.fails(key, f"must be a token id or a list of them, not {value!r}")
        return tuple(ids)

    def names(self, key: str) -> dict[str, str]:
        """Return an object that has only strings as values."""
        value = self._value(key, None)
        if not isinstance(value, dict) or not all(isinstance(item, str) for item in value.values()):
            raise self.fails(key, "must be an object of strings")
        return value

    def section(self, key: str) -> "CheckpointConfig":
        """Return a nested object."""
        value = self._value(key, None)
        if not isinstance(value, dict):
            raise self.fails(key, f"must be an object, not {value!r}")
        return CheckpointConfig(self.path, value, within=f"{self._within}{key}.")

    def _value(self, key: str, default: object) -> Any:
        value = self._values.get(key)
        if value is None and key not in self._values:
            value = self._defaults.get(key)
        if value is None:
            value = default
        if value is None:
            raise self.fails(key, "must not be null" if key in self._values else "is missing")
        return value


def _whole(value: object) -> Any:
    """Return a number without a fraction as an integer, any other value as it is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value
