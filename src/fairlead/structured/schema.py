"""What the schemas of clients may contain. Faults are found here, before a job waits in the queue.

JSON Schema 2020-12 and Draft 7, as far as llguidance generates valid texts for them.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any
from urllib.parse import unquote

from fairlead.structured.bounds import CountedText, Multiples, counted_text

MAX_DEPTH = 64
MAX_SUBSCHEMAS = 20_000
MAX_REFERENCES = 500
MAX_MULTIPLE = 20_000
MAX_COUNTED = 8_000
"""Bounds on schemas.

The second counts the values of `enum` too; the third, different references, because llguidance recurses along
a chain of them. The fourth bounds the least common multiple of the `multipleOf` for one number, which has a
state for each remainder (20,000: 0.1 s, 15 MB). The fifth bounds the characters that are counted by lengths
and repetitions, where equal ones count once: a lexer has a state for each, and at most 10,000.
"""
JSON_TYPES: Mapping[type, str] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    list: "array",
    dict: "object",
    type(None): "null",
}
TYPES = frozenset(JSON_TYPES.values())

_IN_MAPPING = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_IN_LIST = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = (
    *("items", "additionalProperties", "additionalItems", "not", "if", "then", "else", "contains"),
    *("propertyNames", "unevaluatedItems", "unevaluatedProperties"),
)
UNSUPPORTED = (
    *("not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems"),
    *("propertyNames", "dependencies", "dependentSchemas", "dependentRequired"),
    *("unevaluatedItems", "unevaluatedProperties", "$dynamicRef", "$recursiveRef", "contentSchema"),
)
_NEUTRAL = {"uniqueItems": False, "unevaluatedItems": True, "unevaluatedProperties": True}
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_NUMBERS = ("minimum", "maximum", "multipleOf")
_STRINGS = ("pattern", "format")


class SchemaFault(ValueError):
    """A fault of a schema. `path` is where, as in `properties.a.items`; empty for the whole."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}" if path else reason)
        self.path = path
        self.reason = reason


def check_schema(schema: Any, *, lenient: bool = False) -> None:
    """Raise `SchemaFault` for the first fault. `lenient`: keywords that are not supported are ignored."""
    references: set[str] = set()
    texts: set[CountedText] = set()
    multiples = Multiples(partial(_target, schema), MAX_MULTIPLE)
    for path, one in _subschemas(schema):
        _check_one(schema, path, one, lenient=lenient)
        if multiples.remainders(one) > MAX_MULTIPLE:
            reason = f"the least common multiple of the multipleOf for one number is above {MAX_MULTIPLE}"
            raise SchemaFault(path, reason)
        texts.add(counted_text(one))
        if sum(text.characters for text in texts) > MAX_COUNTED:
            reason = f"with it, lengths and repetitions count more than {MAX_COUNTED} characters"
            raise SchemaFault(path, reason)
        if isinstance(one, dict) and "$ref" in one:
            references.add(one["$ref"])
        if len(references) > MAX_REFERENCES:
            raise SchemaFault("", f"it has references to more than {MAX_REFERENCES} schemas in it")


def resolved(schema: Any, root: Any) -> Any:
    """Return a part of the schema `root` with its reference replaced by its target.

    The only element of `allOf` is replaced, too. Faulty references, of schemas that were not checked, are
    left out.
    """
    for _ in range(MAX_DEPTH):
        if not isinstance(schema, Mapping):
            return schema
        match schema:
            case {"$ref": reference}:
                found = _target(root, reference)
            case {"allOf": [found]}:
                pass
            case _:
                return schema
        own = {name: value for name, value in schema.items() if name not in ("$ref", "allOf")}
        schema = {**found, **own} if isinstance(found, Mapping) else own or found
    return True


def properties_of(schema: Any, root: Any) -> dict[str, Any]:
    """Return the schemas of an object's properties; one that is only required may be anything."""
    schema = resolved(schema, root)
    if not isinstance(schema, Mapping):
        return {}
    properties, required = schema.get("properties"), schema.get("required")
    found = dict(properties) if isinstance(properties, Mapping) else {}
    for name in required if isinstance(required, list) else ():
        if isinstance(name, str):
            found.setdefault(name, True)
    return found


def _check_one(root: Any, path: str, schema: Any, *, lenient: bool) -> None:
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise SchemaFault(path, "a schema is an object")
    if "x-guidance" in schema:
        raise SchemaFault(_at(path, "x-guidance"), "is not a keyword of JSON Schema")
    types = schema.get("type", [])
    for name in types if isinstance(types, list) else [types]:
        if not isinstance(name, str) or name not in TYPES:
            reason = f"is {str(name)[:50]!r}, and must be one of {', '.join(sorted(TYPES))}"
            raise SchemaFault(_at(path, "type"), reason)
    for keyword, value in schema.items():
        fault = _keyword_fault(keyword, value, lenient=lenient)
        if fault is not None:
            raise SchemaFault(_at(path, keyword), fault)
    if "$ref" in schema:
        _check_reference(root, _at(path, "$ref"), schema["$ref"])


def _keyword_fault(keyword: str, value: Any, *, lenient: bool) -> str | None:
    is_neutral = keyword in _NEUTRAL and value is _NEUTRAL[keyword]
    if keyword in UNSUPPORTED and not (lenient or is_neutral):
        return "is not supported"
    if keyword in (*_IN_LIST, "enum") and not (isinstance(value, list) and value):
        return "must be a list that is not empty"
    if keyword in _IN_MAPPING and not isinstance(value, dict):
        return "must be an object"
    if keyword in _COUNTS and not (type(value) is int and value >= 0):
        return "must be a whole number that is not negative"
    if keyword in _NUMBERS and type(value) not in (int, float):
        return "must be a number"
    if keyword in _STRINGS and not isinstance(value, str):
        return "must be a string"
    if keyword == "required" and not (isinstance(value, list) and all(isinstance(one, str) for one in value)):
        return "must be a list of names"
    return None


def _check_reference(root: Any, path: str, reference: Any) -> None:
    """Check that a reference points to a part of the schema, and that the chain of references ends."""
    seen: set[str] = set()
    while True:
        if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
            raise SchemaFault(path, "must refer to a part of the schema, as in #/$defs/name")
        if reference in seen:
            raise SchemaFault(path, f"{reference[:100]} refers to itself only")
        seen.add(reference)
        target = _target(root, reference)
        if target is None:
            raise SchemaFault(path, f"{reference[:100]} is not in the schema")
        if not (isinstance(target, dict) and set(target) == {"$ref"}):
            return
        reference = target["$ref"]


def _target(root: Any, reference: Any) -> Any:
    """Return the part of a schema that a reference points to; None if it has no such part."""
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        return None
    target = root
    for part in reference.split("/")[1:]:
        name = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(target, list) and name.isdecimal() and int(name) < len(target):
            target = target[int(name)]
        elif isinstance(target, dict) and name in target:
            target = target[name]
        else:
            return None
    return target


def _subschemas(schema: Any) -> Iterator[tuple[str, Any]]:
    """Yield each schema in a schema, itself included, with its path. Not recursive.

    Raises `SchemaFault` if they are too many or too deep.
    """
    pending = [("", schema, 0)]
    count = 1
    while pending:
        path, one, depth = pending.pop()
        if depth > MAX_DEPTH:
            raise SchemaFault("", f"schemas are nested deeper than {MAX_DEPTH}")
        yield path, one
        if not isinstance(one, dict):
            continue
        for keyword, value in one.items():
            in_list = isinstance(value, list) and keyword in (*_IN_LIST, "enum", "items")
            in_mapping = isinstance(value, dict) and keyword in _IN_MAPPING
            count += len(value) if in_list or in_mapping else keyword in _SINGLE
            if count > MAX_SUBSCHEMAS:
                raise SchemaFault(_at(path, keyword), f"there are more than {MAX_SUBSCHEMAS} schemas")
            pending += [(at, part, depth + 1) for at, part in _parts(_at(path, keyword), keyword, value)]


def _parts(at: str, keyword: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the schemas in the value of a keyword, which is at `at`, with their paths."""
    if isinstance(value, list) and keyword in (*_IN_LIST, "items"):
        yield from ((f"{at}[{index}]", part) for index, part in enumerate(value))
    elif keyword in _SINGLE:
        yield at, value
    elif keyword in _IN_MAPPING and isinstance(value, dict):
        yield from ((_at(at, name), part) for name, part in value.items())


def _at(path: str, keyword: str) -> str:
    return f"{path}.{keyword}" if path else keyword
