"""Generates Markdown tables of all settings, one for each struct, from its docstrings. Pure."""

from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

import msgspec

from fairlead.config import CommandConfig, ModelConfig
from fairlead.config.documentation import documentation_of, summary_of
from fairlead.config.spelling import Setting, Shape, read_time, settings_of
from fairlead.configfile.schema import plain_default
from fairlead.configfile.sections import FileSettings

_MODEL = "models.NAME"
# The roots of the tables, in their order: the whole file, then each kind of model.
_ROOTS: tuple[tuple[str, type[msgspec.Struct]], ...] = (
    ("", FileSettings),
    (f"{_MODEL} (with path)", ModelConfig),
    (f"{_MODEL} (with cmd)", CommandConfig),
)


def tables() -> str:
    """Return the tables, each headed by the paths of its struct in a file."""
    places: dict[type[msgspec.Struct], list[str]] = {}
    for place, kind in _ROOTS:
        _find(kind, place, places)
    return "\n".join(line for kind, found in places.items() for line in _table(kind, found))


def _find(kind: type[msgspec.Struct], place: str, places: dict[type[msgspec.Struct], list[str]]) -> None:
    """Record the path of a struct, then those of the structs in its settings."""
    known = kind in places
    places.setdefault(kind, []).append(place)
    for setting in settings_of(kind):
        inner, at = _held(setting, place.partition(" ")[0])
        if inner is not None and not (known and inner in places and at in places[inner]):
            _find(inner, at, places)


def _held(setting: Setting, place: str) -> tuple[type[msgspec.Struct] | None, str]:
    """Return the struct in a setting, or None, and its path."""
    at = f"{place}.{setting.spelling}".removeprefix(".")
    shape = setting.shape
    if shape.item is not None:
        at += ".NAME" if get_origin(shape.kind) is dict else "[]"
        shape = shape.item
    kind = shape.kind
    is_struct = isinstance(kind, type) and issubclass(kind, msgspec.Struct)
    return (kind if is_struct else None), at


def _table(kind: type[msgspec.Struct], places: list[str]) -> Iterator[str]:
    texts = documentation_of(kind)
    fields = {field.name: field for field in msgspec.structs.fields(kind)}
    rows = [
        (
            f"`{setting.spelling}`",
            _default(kind, fields[setting.name], setting.shape),
            _text(setting.shape, text),
        )
        for setting in settings_of(kind)
        if (text := texts.get(setting.name))
    ]
    if not rows:
        return
    at = ", ".join(f"`{place}`" if " " not in place else _first_word_as_code(place) for place in places)
    yield f"**{at}**: {summary_of(kind)}" if places != [""] else f"**At the top**: {summary_of(kind)}"
    yield ""
    yield "| setting | default | |"
    yield "|---|---|---|"
    yield from (f"| {name} | {default} | {text} |" for name, default, text in rows)
    yield ""


def _first_word_as_code(place: str) -> str:
    word, _, rest = place.partition(" ")
    return f"`{word}` {rest}"


def _default(kind: type, field: msgspec.structs.FieldInfo, shape: Shape) -> str:
    if field.required:
        return "required"
    value: Any = plain_default(kind, field)
    if value is None:
        return ""
    if shape.meta("read") is read_time:
        return f"`{value:g}s`" if value else "`0`"
    if isinstance(value, list):
        return f"`[{', '.join(map(str, value))}]`"
    return f"`{str(value).lower()}`" if isinstance(value, bool) else f"`{value}`"


def _text(shape: Shape, text: str) -> str:
    """Return the text for a table cell, with the choices of the setting, if any."""
    choices = get_args(shape.kind) if get_origin(shape.kind) is Literal else ()
    description = f"{text} One of {', '.join(f'`{choice}`' for choice in choices)}." if choices else text
    return description.replace("|", "\\|")
