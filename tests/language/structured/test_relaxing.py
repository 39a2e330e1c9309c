"""What is left of schemas that cannot be followed as a whole."""

import json
from typing import Any

import pytest

from fairlead.language.structured.relaxing import relax_schema, shape_of

DEEP: dict[str, Any] = {"type": "integer"}
for _ in range(5000):
    DEEP = {"type": "array", "items": DEEP}


def test_schema_with_keywords_that_are_not_supported_is_kept_as_it_is() -> None:
    schema = {"type": "array", "uniqueItems": True, "maxItems": 3}
    assert relax_schema(schema) is schema


def test_shape_has_types_names_and_values_only() -> None:
    schema = {
        "type": "object",
        "description": "words",
        "properties": {
            "a": {"type": "string", "pattern": "(?=x)", "maxLength": 10**6, "format": "odd"},
            "b": {"oneOf": [{"const": 1}, {"enum": ["x"]}], "multipleOf": 9973},
            "c": {"$ref": "#/$defs/c"},
            "d": {"type": "array", "items": {"minimum": 3}, "minItems": 2},
            "e": True,
        },
        "required": ["a"],
        "additionalProperties": False,
        "$defs": {"c": {"allOf": [{"type": "integer", "multipleOf": 9967}]}},
        "not": {},
    }
    assert shape_of(schema) == {
        "type": "object",
        "properties": {
            "a": {"type": "string"},
            "b": {"anyOf": [{"const": 1}, {"enum": ["x"]}]},
            "c": {"$ref": "#/$defs/c"},
            "d": {"type": "array", "items": {}},
            "e": True,
        },
        "required": ["a"],
        "additionalProperties": False,
        "$defs": {"c": {"allOf": [{"type": "integer"}]}},
    }


def test_shape_keeps_what_its_draft_and_its_references_need() -> None:
    schema = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "$id": "http://example.com/root.json",
        "type": "object",
        "properties": {
            "a": {"$ref": "other.json", "minimum": 3},
            "b": {"type": "array", "items": [{"type": "string", "minLength": 3}, {"type": "null"}]},
        },
        "definitions": {"other": {"$id": "other.json", "type": "integer", "multipleOf": 9967}},
    }
    expected = json.loads(json.dumps(schema))
    del expected["properties"]["a"]["minimum"]
    del expected["properties"]["b"]["items"][0]["minLength"]
    del expected["definitions"]["other"]["multipleOf"]
    assert shape_of(schema) == expected


@pytest.mark.parametrize(
    "schema",
    [
        {"$schema": "http://json-schema.org/draft-07/schema#"},
        *(None, 5, [], {}, True, {"description": "x"}, {"type": "xyz"}, {"required": 5}),
        *({"enum": []}, {"anyOf": []}, {"$ref": "#"}, {"$ref": 5}),
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}},
    ],
)
def test_schema_without_a_shape_has_none(schema: Any) -> None:
    assert shape_of(schema) is None


def test_shape_of_a_schema_ends_where_it_is_too_deep() -> None:
    assert shape_of(DEEP) is None
    assert relax_schema({"properties": {"a": DEEP}, "required": ["a"]}) is None
