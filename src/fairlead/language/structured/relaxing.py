"""What is left of a schema that cannot be followed as a whole, for tools that are not strict."""

from collections.abc import Mapping
from typing import Any

from fairlead.language.structured.schema import MAX_DEPTH, SchemaFault, check_schema

_NAMES = frozenset({"$schema", "$id", "id", "$anchor"})  # which references and drafts need
_KEPT = frozenset({"type", "enum", "const", "required", "$ref"}) | _NAMES
_OF_SCHEMAS = frozenset({"items", "additionalProperties"})
_OF_LISTS = frozenset({"anyOf", "oneOf", "allOf", "prefixItems", "items"})
_OF_MAPPINGS = frozenset({"properties", "$defs", "definitions"})


def relax_schema(schema: Any) -> Mapping[str, Any] | None:
    """Return the schema if its faults are only keywords that are not supported, or else its shape.

    None if its shape is faulty, too. What is returned is used with its unsupported keywords ignored.
    """
    if isinstance(schema, Mapping) and _is_good(schema):
        return schema
    return shape_of(schema)


def shape_of(schema: Any) -> Mapping[str, Any] | None:
    """Return the types, names and values of a schema, without what bounds or describes texts and numbers.

    None if that is faulty, or the shape of anything.
    """
    shape = _shape(schema, 0)
    return shape if isinstance(shape, Mapping) and shape.keys() - _NAMES and _is_good(shape) else None


def _is_good(schema: Any) -> bool:
    try:
        check_schema(schema, lenient=True)
    except SchemaFault:
        return False
    return True


def _shape(schema: Any, depth: int) -> Any:
    if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
        return schema if isinstance(schema, bool) else True
    shape: dict[str, Any] = {}
    for keyword, value in schema.items():
        if keyword in _KEPT:
            shape[keyword] = value
        elif keyword in _OF_SCHEMAS and isinstance(value, Mapping | bool):
            shape[keyword] = _shape(value, depth + 1)
        elif keyword in _OF_LISTS and isinstance(value, list):
            # Several schemas of a `oneOf` may fit one value, which no grammar excludes.
            name = "anyOf" if keyword == "oneOf" and "anyOf" not in schema else keyword
            shape[name] = [_shape(one, depth + 1) for one in value]
        elif keyword in _OF_MAPPINGS and isinstance(value, Mapping):
            shape[keyword] = {name: _shape(one, depth + 1) for name, one in value.items()}
    return shape
