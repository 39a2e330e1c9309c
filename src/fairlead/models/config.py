"""Reads a `config.json` of Hugging Face's layout and reports errors by file and key.

Defines no keys: each module that reads a key defines its meaning.
"""

import json
import math
from pathlib import Path
from typing import Any

from fairlead.errors import LoadFailed


class CheckpointConfig:
    """A JSON object from a file. Every reader raises `LoadFailed` with the file and the key at fault.

    A key that is null counts as absent, as in transformers. Without a `default` a key is required.
    """

    def __init__(self, path: Path, values: dict[str, Any], *, within: str = "") -> None:
        self.path = path
        self._values = values
        self._within = within

    @classmethod
    def read(cls, path: Path) -> "CheckpointConfig":
        """Parse the file at `path`."""
        try:
            values = json.loads(path.read_bytes())
        except OSError as error:
            raise LoadFailed(f"{path}: {error.strerror or error}") from error
        except (ValueError, RecursionError) as error:
            raise LoadFailed(f"{path}: not valid JSON: {error}") from error
        if not isinstance(values, dict):
            raise LoadFailed(f"{path}: must be a JSON object")
        return cls(path, values)

    def __contains__(self, key: str) -> bool:
        return self._values.get(key) is not None

    def keys(self) -> list[str]:
        """Return the keys that are present and not null."""
        return [key for key in self._values if key in self]

    def fails(self, key: str, reason: str) -> LoadFailed:
        """Return the error to raise for `key`."""
        return LoadFailed(f"{self.path}: {self._within}{key}: {reason}")

    def integer(self, key: str, default: int | None = None, *, least: int = 1, most: int = 2**31 - 1) -> int:
        """Return an integer from `least` to `most`."""
        value = self._value(key, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if type(value) is not int:
            raise self.fails(key, f"must be an integer, not {value!r}")
        if not least <= value <= most:
            raise self.fails(key, f"must be from {least} to {most}, not {value}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return a positive, finite number."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.fails(key, f"must be a number, not {value!r}")
        if not math.isfinite(value) or value <= 0:
            raise self.fails(key, f"must be positive and finite, not {value}")
        return float(value)

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

    def token_ids(self, key: str) -> tuple[int, ...]:
        """Return the ids of a key with one token id or a list of them; none when absent."""
        value = self._values.get(key)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if not all(type(token_id) is int and token_id >= 0 for token_id in ids):
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
        if value is None:
            value = default
        if value is None:
            raise self.fails(key, "is missing")
        return value
