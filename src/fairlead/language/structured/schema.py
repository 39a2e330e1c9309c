"""What the schemas of clients may contain. Faults are found here, before a job waits in the queue.

JSON Schema from draft 4 on, as far as a grammar can have only valid texts.
"""

from collections.abc import Mapping
from typing import Any

from fairlead.language.structured.bounds import CountedText, Multiples, counted_text
from fairlead.language.structured.drafts import (
    IN_LIST,
    IN_MAPPING,
    References,
    Subschema,
    TooMany,
    at,
    draft_of,
    known,
    walk,
)

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

UNSUPPORTED = (
    *("not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems"),
    *("propertyNames", "dependencies", "dependentSchemas", "dependentRequired"),
    *("unevaluatedItems", "unevaluatedProperties", "$dynamicRef", "$recursiveRef", "contentSchema"),
)
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "uniqueItems": (False,),
    **dict.fromkeys(("unevaluatedItems", "unevaluatedProperties"), (True,)),
    **dict.fromkeys(("dependencies", "dependentSchemas", "dependentRequired"), ({},)),
}
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_NUMBERS = ("minimum", "maximum", "multipleOf")
_EXCLUSIVE = ("exclusiveMinimum", "exclusiveMaximum")
_STRINGS = ("pattern", "format")
_CHECKED = frozenset(
    {*UNSUPPORTED, *IN_LIST, *IN_MAPPING, *_COUNTS, *_NUMBERS, *_EXCLUSIVE, *_STRINGS, "enum", "required"}
)


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
    counted = 0
    targets, draft = References(schema), draft_of(schema)
    multiples = Multiples(targets.target, MAX_MULTIPLE)
    for part in _subschemas(schema):
        path, one = part.path, part.schema
        if isinstance(one, dict):
            one = known(one, draft)
        _check_one(targets, part._replace(schema=one), lenient=lenient)
        if multiples.remainders(one) > MAX_MULTIPLE:
            reason = f"the least common multiple of the multipleOf for one number is above {MAX_MULTIPLE}"
            raise SchemaFault(path, reason)
        text = counted_text(one)
        if text not in texts:
            texts.add(text)
            counted += text.characters
        if counted > MAX_COUNTED:
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
                found = References(root).target(reference)
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


def _check_one(targets: References, part: Subschema, *, lenient: bool) -> None:
    path, schema = part.path, part.schema
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise SchemaFault(path, "a schema is an object")
    if "x-guidance" in schema:
        raise SchemaFault(at(path, "x-guidance"), "is not a keyword of JSON Schema")
    types = schema.get("type", [])
    for name in types if isinstance(types, list) else [types]:
        if not isinstance(name, str) or name not in TYPES:
            reason = f"is {str(name)[:50]!r}, and must be one of {', '.join(sorted(TYPES))}"
            raise SchemaFault(at(path, "type"), reason)
    for keyword, value in schema.items():
        if keyword not in _CHECKED:
            continue
        fault = _keyword_fault(keyword, value, lenient=lenient)
        if fault is not None:
            raise SchemaFault(at(path, keyword), fault)
    if "$ref" in schema:
        _check_reference(targets, part)


def _keyword_fault(keyword: str, value: Any, *, lenient: bool) -> str | None:
    is_neutral = (
        keyword in _NEUTRAL and value in _NEUTRAL[keyword] and type(value) is type(_NEUTRAL[keyword][0])
    )
    if keyword in UNSUPPORTED and not (lenient or is_neutral):
        return "is not supported"
    if keyword in (*IN_LIST, "enum") and not (isinstance(value, list) and value):
        return "must be a list that is not empty"
    if keyword in IN_MAPPING and not isinstance(value, dict):
        return "must be an object"
    if keyword in _COUNTS and not (_is_whole(value) and value >= 0):
        return "must be a whole number that is not negative"
    if keyword in _EXCLUSIVE and isinstance(value, bool):
        return None  # as draft 4 has it
    if keyword in (*_NUMBERS, *_EXCLUSIVE) and type(value) not in (int, float):
        return "must be a number"
    if keyword in _STRINGS and not isinstance(value, str):
        return "must be a string"
    if keyword == "required" and not (isinstance(value, list) and all(isinstance(one, str) for one in value)):
        return "must be a list of names"
    return None


def _is_whole(value: Any) -> bool:
    return type(value) is int or (type(value) is float and value.is_integer())


def _check_reference(targets: References, part: Subschema) -> None:
    """Check that a reference points to a part of the schema, and that the chain of references ends."""
    place, reference = at(part.path, "$ref"), part.schema["$ref"]
    seen: set[str] = set()
    while True:
        if not isinstance(reference, str):
            raise SchemaFault(place, "must refer to a part of the schema, as in #/$defs/name")
        if reference in seen:
            raise SchemaFault(place, f"{reference[:100]} refers to itself only")
        seen.add(reference)
        target = targets.target(reference, part.base)
        if target is None:
            reason = (
                "is not in the schema"
                if reference.startswith("#")
                else "is not in the schema, which may only refer to its own parts"
            )
            raise SchemaFault(place, f"{reference[:100]} {reason}")
        if not (isinstance(target, dict) and set(target) == {"$ref"}):
            return
        reference = target["$ref"]


def _subschemas(schema: Any) -> list[Subschema]:
    """Return each schema in a schema, itself included. Raises `SchemaFault` for too many or too deep ones."""
    found = []
    try:
        for one in walk(schema, MAX_SUBSCHEMAS):
            if one.depth > MAX_DEPTH:
                raise SchemaFault("", f"schemas are nested deeper than {MAX_DEPTH}")
            found.append(one)
    except TooMany as fault:
        raise SchemaFault(fault.path, f"there are more than {MAX_SUBSCHEMAS} schemas") from fault
    return found
