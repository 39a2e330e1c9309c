"""All keys that a configuration file may have, from the types that define them."""

from collections.abc import Iterator
from typing import Any, get_origin

import msgspec

from fairlead.base.config import CommandConfig, ModelConfig
from fairlead.base.config.spelling import Shape, settings_of
from fairlead.server.configfile.sections import FileSettings

ROOTS: dict[str, type[msgspec.Struct]] = {
    "": FileSettings,
    "models.ENGINE": ModelConfig,
    "models.COMMAND": CommandConfig,
}
# Keys that a file may have besides the fields of these types.
MACRO_KEYS = ("macros", "models.ENGINE.macros", "models.COMMAND.macros")
# The name of a model is the key of its mapping, and the reader chooses a port.
NO_KEYS = ("models.ENGINE.name", "models.COMMAND.id", "models.COMMAND.port")


def keys() -> list[str]:
    """Return all keys, as `cut` takes them."""
    found = [key for path, kind in ROOTS.items() for key in _keys(kind, path)]
    return sorted({*found, *MACRO_KEYS} - {*NO_KEYS})


def _keys(kind: type[msgspec.Struct], path: str) -> Iterator[str]:
    for setting in settings_of(kind):
        key = f"{path}.{setting.spelling}".removeprefix(".")
        inner, inner_path = _inner_type(setting.shape, key)
        if inner is None:
            yield key
        else:
            yield from _keys(inner, inner_path)


def _inner_type(shape: Shape, key: str) -> tuple[type[msgspec.Struct] | None, str]:
    if shape.item is not None:
        key += ".NAME" if get_origin(shape.kind) is dict else "[]"
        shape = shape.item
    kind: Any = shape.kind
    return (kind if isinstance(kind, type) and issubclass(kind, msgspec.Struct) else None), key
