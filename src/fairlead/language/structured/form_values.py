"""The values of which forms of answers consist, as bytes for another process and back. Pure.

Nothing is unpickled in this program, and msgpack has neither the integers nor the strings that a schema may
have. So a value becomes a flat list of nodes in JSON. A node has its kind, its content, and where its parts
are in the list, and how many. A nested schema is no nested list, and only the types below can be made.

Example: `("a", {"b": 1})` becomes
`[["tuple", null, 1, 2], ["value", "a", 0, 0], ["json", "{\"b\":1}", 0, 0]]`.
"""

import dataclasses
import json
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from fairlead.base.wire_formats.pattern import Class, Literal, PatternGroup
from fairlead.base.wire_formats.wire_format import CallSyntax, JsonDialect, Marks, Slip, WireFormat
from fairlead.language.structured.forming import Formed
from fairlead.language.structured.grammar import ChoiceAnswer, JsonAnswer, LarkAnswer, RegexAnswer
from fairlead.language.structured.request import AnswerPart, AnswerSpec, Relaxation, ToolSpec

_STRUCTS: tuple[type, ...] = (AnswerSpec, ToolSpec, Relaxation)
_TUPLES: tuple[type, ...] = (Formed, AnswerPart, JsonAnswer, RegexAnswer, ChoiceAnswer, LarkAnswer)
_DATACLASSES: tuple[type, ...] = (
    WireFormat,
    Marks,
    CallSyntax,
    JsonDialect,
    Slip,
    Literal,
    Class,
    PatternGroup,
)
_TYPES: dict[str, Any] = {each.__name__: each for each in (*_STRUCTS, *_TUPLES, *_DATACLASSES)}
_NAMES = {each: name for name, each in _TYPES.items()}


def encode_values(value: Any) -> bytes:
    """Return a value as bytes. Raises TypeError for a type that is not part of a form."""
    values, nodes = [value], []
    for each in values:  # which grows
        kind, content, parts = _taken_apart(each)
        nodes.append((kind, content, len(values), len(parts)))
        values += parts
    return json.dumps(nodes).encode()


def decode_values(data: bytes) -> Any:
    """Return the value that `encode_values` has encoded. Raises ValueError for anything else."""
    nodes = json.loads(data)
    built: list[Any] = [None] * len(nodes)
    for index in range(len(nodes) - 1, -1, -1):  # parts are behind what consists of them
        kind, content, first, count = nodes[index]
        if count and first <= index:
            raise ValueError("a value that is a part of itself")
        built[index] = _put_together(kind, content, built[first : first + count])
    return built[0]


def _taken_apart(value: Any) -> tuple[str, Any, list[Any]]:
    """Return the kind of a value, its content, and its parts."""
    if value is None or isinstance(value, str | int | float):
        return "value", value, []
    if (name := _NAMES.get(type(value))) is not None:
        return name, None, [getattr(value, field) for field in _fields_of(type(value))]
    if isinstance(value, tuple):
        return "tuple", None, list(value)
    if isinstance(value, list | Mapping):
        try:  # in one piece, which is fast; it has nothing but JSON in it
            return "json", msgspec.json.encode(value).decode(), []
        except (UnicodeEncodeError, RecursionError):
            if isinstance(value, list):
                return "list", None, list(value)
            return "dict", list(value), list(value.values())
    raise TypeError(f"{type(value).__name__} is not part of a form")


def _put_together(kind: str, content: Any, parts: list[Any]) -> Any:
    match kind:
        case "value":
            return content
        case "json":
            return msgspec.json.decode(content)
        case "tuple":
            return tuple(parts)
        case "list":
            return parts
        case "dict":
            return dict(zip(content, parts, strict=True))
    made = _TYPES.get(kind)
    if made is None:
        raise ValueError(f"{kind} is not part of a form")
    return made(**dict(zip(_fields_of(made), parts, strict=True)))


def _fields_of(kind: Any) -> Iterable[str]:
    if dataclasses.is_dataclass(kind):
        return [field.name for field in dataclasses.fields(kind)]
    names: tuple[str, ...] = kind.__struct_fields__ if issubclass(kind, msgspec.Struct) else kind._fields
    return names
