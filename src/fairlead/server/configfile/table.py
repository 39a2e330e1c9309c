"""Generates Markdown tables of all settings, one for each struct, from its docstrings. Pure."""

from collections.abc import Iterator
from typing import Any, get_origin

import msgspec

from fairlead.base.config import MODEL_KINDS
from fairlead.base.config.documentation import documentation_of, summary_of
from fairlead.base.config.spelling import Setting, Shape, read_time, settings_of
from fairlead.server.configfile.schema import plain_default
from fairlead.server.configfile.sections import FileSettings

# The roots of the tables, in their order: the whole file, then each kind of model.
_ROOTS: tuple[tuple[str, type[msgspec.Struct]], ...] = (
    ("", FileSettings),
    *((f"models.NAME (with {key})", kind) for key, kind in MODEL_KINDS.items()),
)


def tables() -> str:
    """Return the tables, each headed by the paths of its struct in a file."""
    paths: dict[type[msgspec.Struct], list[str]] = {}
    for path, kind in _ROOTS:
        _find(kind, path, paths)
    return "\n".join(line for kind, found in paths.items() for line in _table(kind, found))


def _find(kind: type[msgspec.Struct], path: str, paths: dict[type[msgspec.Struct], list[str]]) -> None:
    """Record the path of a struct, then those of the structs in its settings."""
    is_recorded = kind in paths
    paths.setdefault(kind, []).append(path)
    for setting in settings_of(kind):
        inner, at = _nested(setting, path.partition(" ")[0])
        if inner is not None and not (is_recorded and inner in paths and at in paths[inner]):
            _find(inner, at, paths)


def _nested(setting: Setting, path: str) -> tuple[type[msgspec.Struct] | None, str]:
    """Return the struct in a setting, or None, and its path."""
    at = f"{path}.{setting.spelling}".removeprefix(".")
    shape = setting.shape
    if shape.item is not None:
        at += ".NAME" if get_origin(shape.kind) is dict else "[]"
        shape = shape.item
    kind = shape.kind
    is_struct = isinstance(kind, type) and issubclass(kind, msgspec.Struct)
    return (kind if is_struct else None), at


def _table(kind: type[msgspec.Struct], paths: list[str]) -> Iterator[str]:
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
    at = ", ".join(f"`{path}`" if " " not in path else _first_word_as_code(path) for path in paths)
    yield f"**{at}**: {summary_of(kind)}" if paths != [""] else f"**At the top**: {summary_of(kind)}"
    yield ""
    yield "| setting | default | |"
    yield "|---|---|---|"
    yield from (f"| {name} | {default} | {text} |" for name, default, text in rows)
    yield ""


def _first_word_as_code(path: str) -> str:
    word, _, rest = path.partition(" ")
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
    choices = ", ".join(f"`{choice}`" for choice in shape.choices)
    if choices:
        text += f" One of {choices}." if len(shape.kinds) == 1 else f" Known: {choices}."
    return text.replace("|", "\\|")
