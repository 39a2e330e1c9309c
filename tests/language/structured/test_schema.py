"""What is accepted as the schema of an answer, and where its faults are."""

import time
from typing import Any

import pytest

from fairlead.language.structured.grammar import JsonAnswer, answer_grammar
from fairlead.language.structured.json_grammar import NoValue
from fairlead.language.structured.schema import (
    MAX_DEPTH,
    MAX_SUBSCHEMAS,
    TYPES,
    UNSUPPORTED,
    SchemaFault,
    check_schema,
    properties_of,
    resolved,
)
from language.structured.trying import grammar_fault

NESTED = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
KEYWORD_VALUES: dict[str, Any] = {
    "uniqueItems": True,
    "minContains": 1,
    "maxContains": 1,
    "dependencies": {"a": ["b"]},
    "dependentRequired": {"a": ["b"]},
    "dependentSchemas": {"a": {"required": ["b"]}},
}


def fault(schema: Any, *, lenient: bool = False) -> SchemaFault:
    with pytest.raises(SchemaFault) as caught:
        check_schema(schema, lenient=lenient)
    return caught.value


@pytest.mark.parametrize(
    "schema",
    [
        *(True, False, {}, NESTED),
        {"type": sorted(TYPES)},
        {"type": "array", "items": [{"type": "integer"}, True], "additionalItems": False},
        {"type": "array", "prefixItems": [{"type": "integer"}], "items": False},
        {"properties": {"type": {"type": "string"}, "not": {"type": "string"}, "x-guidance": {}}},
        {"const": {"type": "nonsense", "x-guidance": 1}, "default": {"$ref": 5}},
        {"$ref": "#/$defs/a~1b~0c%20d", "$defs": {"a/b~c d": {"type": "string"}}},
        {"$ref": "#/anyOf/1", "anyOf": [{"type": "string"}, {"type": "integer"}]},
        {"type": "object", "properties": {"next": {"$ref": "#"}}},
        {"uniqueItems": False, "unevaluatedProperties": True},
        {"unknown keyword": [{"type": "nonsense"}]},
    ],
)
def test_schema_is_accepted(schema: Any) -> None:
    check_schema(schema)


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        (5, ""),
        (None, ""),
        ([], ""),
        ({"type": "xyz"}, "type"),
        ({"type": ["string", "xyz"]}, "type"),
        ({"type": {}}, "type"),
        ({"type": [[]]}, "type"),
        ({"properties": {"a": {"items": {"type": "xyz"}}}}, "properties.a.items.type"),
        ({"properties": {"a": 5}}, "properties.a"),
        ({"properties": []}, "properties"),
        ({"items": [{}, {"type": "xyz"}]}, "items[1].type"),
        ({"items": 5}, "items"),
        ({"anyOf": [{}, {"allOf": [{"type": "xyz"}]}]}, "anyOf[1].allOf[0].type"),
        ({"anyOf": []}, "anyOf"),
        ({"oneOf": {}}, "oneOf"),
        ({"enum": []}, "enum"),
        ({"enum": "a"}, "enum"),
        ({"$defs": {"a": {"type": "xyz"}}}, "$defs.a.type"),
        ({"additionalProperties": {"type": "xyz"}}, "additionalProperties.type"),
        ({"patternProperties": {"^a": {"type": "xyz"}}}, "patternProperties.^a.type"),
        ({"properties": {"a": {"minLength": "3"}}}, "properties.a.minLength"),
        ({"maxItems": -1}, "maxItems"),
        ({"maxItems": True}, "maxItems"),
        ({"minimum": "3"}, "minimum"),
        ({"pattern": 5}, "pattern"),
        ({"required": "a"}, "required"),
        ({"required": [1]}, "required"),
        ({"$ref": "#/$defs/a"}, "$ref"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}, "$ref"),
        ({"$ref": "#"}, "$ref"),
        ({"$ref": "http://example.com/schema"}, "$ref"),
        ({"$ref": "#anchor"}, "$ref"),
        ({"$ref": 5}, "$ref"),
        ({"items": {"$ref": "#/anyOf/7"}, "anyOf": [{}]}, "items.$ref"),
        ({"x-guidance": {"lenient": True}}, "x-guidance"),
        ({"properties": {"a": {"x-guidance": {}}}}, "properties.a.x-guidance"),
    ],
)
def test_fault_has_the_path_of_its_keyword(schema: Any, path: str) -> None:
    for lenient in (True, False):
        assert fault(schema, lenient=lenient).path == path


@pytest.mark.parametrize("keyword", UNSUPPORTED)
def test_unsupported_keyword_is_refused_unless_lenient(keyword: str) -> None:
    schema = {"properties": {"a": {keyword: KEYWORD_VALUES.get(keyword, {})}}}
    found = fault(schema)
    assert found.path == f"properties.a.{keyword}"
    assert str(found) == f"properties.a.{keyword}: is not supported"
    assert str(fault({keyword: None})) == f"{keyword}: is not supported"
    check_schema(schema, lenient=True)


@pytest.mark.parametrize("wrap", [lambda one: {"items": one}, lambda one: {"anyOf": [one]}])
def test_depth_is_bounded(wrap: Any) -> None:
    schema: Any = {"type": "string"}
    for _ in range(MAX_DEPTH):
        schema = wrap(schema)
    check_schema(schema)
    for _ in range(10_000):
        schema = wrap(schema)
    assert "deeper" in fault(schema).reason


@pytest.mark.parametrize(
    "schema",
    [
        {"anyOf": [{"type": "string"}] * 1_000_000},
        {"properties": {f"p{number}": {} for number in range(MAX_SUBSCHEMAS)}},
        {"enum": ["a"] * 1_000_000},
        {"items": {"anyOf": [{"anyOf": [{}] * 200}] * 200}},
    ],
)
def test_number_of_schemas_is_bounded(schema: Any) -> None:
    begin = time.process_time()
    assert "more than" in fault(schema).reason
    assert time.process_time() - begin < 1


def test_as_many_schemas_as_are_allowed_are_accepted() -> None:
    check_schema({"anyOf": [{"type": "string"}] * (MAX_SUBSCHEMAS - 100)})


def test_references_are_resolved_with_what_is_beside_them() -> None:
    root = {"$defs": {"a": {"$ref": "#/$defs/b", "title": "A"}, "b": {"type": "string"}}}
    found = {"type": "string", "title": "A", "description": "x"}
    assert resolved({"$ref": "#/$defs/a", "description": "x"}, root) == found
    assert resolved({"allOf": [{"$ref": "#/$defs/b"}]}, root) == {"type": "string"}
    assert resolved({"$ref": "#/$defs/none"}, root) is None
    assert resolved({"$ref": "#/$defs/a"}, {"$defs": {"a": {"$ref": "#/$defs/a"}}}) is True


def test_required_properties_without_a_schema_may_be_anything() -> None:
    assert properties_of({"properties": {"a": {}}, "required": ["b", "a"]}, {}) == {"a": {}, "b": True}
    assert properties_of({"properties": 5, "required": [5]}, {}) == {}


@pytest.mark.parametrize("schema", [True, NESTED, {"type": "array", "items": [{"type": "integer"}]}])
def test_accepted_schema_becomes_a_grammar(schema: Any) -> None:
    assert grammar_fault(answer_grammar(JsonAnswer(schema))) is None


def test_schema_that_is_false_has_no_grammar() -> None:
    with pytest.raises(NoValue):
        answer_grammar(JsonAnswer(False))
