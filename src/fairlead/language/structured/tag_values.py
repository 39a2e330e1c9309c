"""How values are written in tags of their own: strings as plain text, anything else as JSON."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from fairlead.language.structured.schema import JSON_TYPES, resolved

_MAX_DEPTH = 8
_MAX_BRANCHES = 1000
_OF_OBJECTS = frozenset({"properties", "required", "additionalProperties", "patternProperties"})
_OF_ARRAYS = frozenset({"items", "prefixItems", "minItems", "maxItems"})
_OF_NUMBERS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})


class TagValue(NamedTuple):
    """The alternatives of a value: schemas of its strings, and of its other values."""

    texts: tuple[Mapping[str, Any], ...] = ()
    others: tuple[Any, ...] = ()

    @property
    def is_text(self) -> bool:
        """Whether it is written as plain text always."""
        return not self.others

    def is_other(self, text: str, value: Any) -> bool:
        """Return whether a text, which is JSON of `value`, is not a string of the schema."""
        if any(text in one.get("enum", ()) for one in self.texts):
            return False
        names = {name for one in self.others for name in _types(one)}
        kind = JSON_TYPES[type(value)]
        return not self.texts or kind in names or (kind == "integer" and "number" in names)


def tag_value(schema: Any, root: Any) -> TagValue:
    """Return the alternatives of a value of `schema`, which is a part of the schema `root`.

    Raises ValueError if they are too many, or refer to each other.
    """
    texts: list[Mapping[str, Any]] = []
    others: list[Any] = []
    for is_text, one in _branches(schema, root, iter(range(_MAX_BRANCHES))):
        (texts if is_text else others).append(one)
    return TagValue(tuple(texts), tuple(others))


def _branches(schema: Any, root: Any, budget: Iterator[int], depth: int = 0) -> Iterator[tuple[bool, Any]]:
    """Yield the alternatives, each with whether it is a string. `budget`: one for each that is looked at."""
    schema = resolved(schema, root)
    if not isinstance(schema, Mapping):
        yield True, {}
        return
    if depth == _MAX_DEPTH or next(budget, None) is None:
        raise ValueError(
            "anyOf of an argument has too many alternatives for this model's syntax of tool calls"
        )
    for name in ("anyOf", "oneOf", "allOf"):
        if not isinstance(parts := schema.get(name), list):
            continue
        if name != "allOf" and not schema.keys() & _OF_OBJECTS:
            for one in parts:
                yield from _branches(one, root, budget, depth + 1)
        else:
            yield (
                any(is_text for one in parts for is_text, _ in _branches(one, root, budget, depth + 1)),
                schema,
            )
        return
    if "const" in schema or isinstance(schema.get("enum"), list):
        yield from _values(schema)
        return
    types = _types(schema)
    if "string" in types:
        yield True, schema
    others = [name for name in types if name != "string"]
    if others:
        yield False, {**schema, "type": others[0] if len(others) == 1 else others}


def _values(schema: Mapping[str, Any]) -> Iterator[tuple[bool, Any]]:
    values = schema.get("enum", [schema.get("const")])
    kept = {name: value for name, value in schema.items() if name not in ("enum", "const")}
    for is_text in (True, False):
        own = [value for value in values if isinstance(value, str) == is_text]
        if own:
            yield is_text, {**kept, "enum": own}


def _types(schema: Any) -> list[str]:
    """Return the types of a schema; if it names none, those that its other keywords are of, or string."""
    if isinstance(values := schema.get("enum"), list):
        return [JSON_TYPES[type(value)] for value in values]
    match schema.get("type"):
        case str(name):
            return [name]
        case list(names):
            return [name for name in names if isinstance(name, str)]
    groups = {"object": _OF_OBJECTS, "array": _OF_ARRAYS, "number": _OF_NUMBERS}
    return [name for name, keywords in groups.items() if keywords & schema.keys()] or ["string"]
