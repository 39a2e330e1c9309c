"""Strict schemas in every wire format: valid arguments are accepted and parsed back, others are refused."""

from typing import Any, NamedTuple

import pytest

from fairlead.language.structured.grammar import Calls, ToolGrammar, answer_grammar
from fairlead.language.structured.schema import check_schema
from language.structured.rendering import WIRE_FORMATS, vocabulary, written_calls
from language.structured.test_wire_formats import parsed
from language.structured.trying import grammar_fault

formats = pytest.mark.parametrize("name", sorted(WIRE_FORMATS))
TAGGED = ("qwen-xml", "glm")


class Case(NamedTuple):
    """A schema of one property `x`, or of arguments, with values that are valid for it and others."""

    schema: dict[str, Any]
    valid: list[Any]
    invalid: list[Any]


COLOUR = {"type": "string", "enum": ["red", "dark blue"]}
POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}},
    "required": ["x"],
    "additionalProperties": False,
}
VALUES = {
    "enum": Case(COLOUR, ["red", "dark blue"], ["green", "re"]),
    "const": Case({"const": "a"}, ["a"], ["b"]),
    "mixed enum": Case({"enum": ["a", 1, None]}, ["a", 1, None], [2, "b"]),
    "bounds": Case({"type": "integer", "minimum": 3, "maximum": 12}, [3, 12], [2, 13, 1.5]),
    "above": Case({"type": "number", "exclusiveMinimum": 0}, [0.5, 3], [0, -1]),
    "lengths": Case({"type": "string", "minLength": 2, "maxLength": 4}, ["ab", "a\nbc"], ["a", "abcde"]),
    "pattern": Case({"type": "string", "pattern": "^[a-z]+/[0-9]{2}$"}, ["ab/12"], ["ab/1", "Ab/12", "/12"]),
    "found": Case({"type": "string", "pattern": "b+"}, ["abc", "b"], ["ac", ""]),
    "array": Case({"type": "array", "items": {"type": "integer"}}, [[], [1], [1, 2]], [["a"], [1, "b"], 1]),
    "lengths of arrays": Case(
        {"type": "array", "items": COLOUR, "minItems": 1, "maxItems": 2},
        [["red"], ["red", "dark blue"]],
        [[], ["red"] * 3, ["green"]],
    ),
    "optional": Case(POINT, [{"x": 1}, {"x": 1, "y": 2}], [{"y": 2}, {"x": "1"}, {"x": 1, "z": 3}]),
    "map": Case(
        {"type": "object", "additionalProperties": {"type": "integer"}}, [{}, {"a": 1, "b": 2}], [{"a": "x"}]
    ),
    "anyOf": Case({"anyOf": [{"type": "integer"}, POINT]}, [5, {"x": 1}], [True, {"y": 1}, [1]]),
    "null": Case({"anyOf": [COLOUR, {"type": "null"}]}, ["red", None], ["green", 1]),
    "list of types": Case({"type": ["integer", "null"]}, [1, None], [1.5, True]),
    "boolean": Case({"type": "boolean"}, [True, False], [1]),
    "reference": Case({"$ref": "#/$defs/colour"}, ["red"], ["green"]),
    "nested reference": Case({"$ref": "#/$defs/points"}, [[], [{"x": 1}, {"x": 2, "y": 3}]], [[{"y": 3}]]),
    "recursion": Case(
        {"$ref": "#/$defs/tree"}, [{"n": 1}, {"n": 1, "next": [{"n": 2, "next": []}]}], [{"next": []}]
    ),
    "format": Case({"type": "string", "format": "date"}, ["2024-02-29"], ["2023-02-29", "29.2.2024"]),
    "unknown format": Case({"type": "string", "format": "path"}, ["/etc", "a b"], []),
    "exclusive bound of draft 4": Case(
        {"type": "integer", "minimum": 3, "exclusiveMinimum": True}, [4, 10], [3, 2]
    ),
    "single allOf": Case({"allOf": [{"$ref": "#/$defs/colour"}], "title": "X"}, ["red"], ["green"]),
}
DEFINITIONS = {
    "colour": COLOUR,
    "point": POINT,
    "points": {"type": "array", "items": {"$ref": "#/$defs/point"}},
    "tree": {
        "type": "object",
        "properties": {
            "n": {"type": "integer"},
            "next": {"type": "array", "items": {"$ref": "#/$defs/tree"}},
        },
        "required": ["n"],
        "additionalProperties": False,
    },
}


def grammar_of(name: str, schema: Any, **options: Any) -> str:
    body = Calls([ToolGrammar("f", schema)], is_required=True)
    made = vocabulary(name)
    return answer_grammar(body, WIRE_FORMATS[name], made.special, **options)


def parameters(schema: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"x": schema},
        "required": ["x"],
        "additionalProperties": False,
        "$defs": DEFINITIONS,
    }


@formats
@pytest.mark.parametrize("case", VALUES)
def test_value_is_accepted_only_if_it_is_valid(name: str, case: str) -> None:
    schema, valid, invalid = VALUES[case]
    strict = parameters(schema)
    check_schema(strict)
    grammar, made = grammar_of(name, strict), vocabulary(name)
    assert grammar_fault(grammar) is None
    for value in valid:
        text = written_calls(name, [("f", {"x": value})])
        assert made.accepts(grammar, text), value
        assert parsed(name, list(text), {"f": strict}).calls == [("f", {"x": value})]
    for value in invalid:
        assert not made.accepts(grammar, written_calls(name, [("f", {"x": value})])), value


@formats
@pytest.mark.parametrize("required", [[], ["b"], ["c"], ["a", "c"], ["a", "b", "c"], ["d"]])
def test_properties_may_be_left_out_unless_they_are_required(name: str, required: list[str]) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "string"}, "c": {"type": "boolean"}},
        "required": required,
        "additionalProperties": False,
    }
    if "d" in required:
        schema["additionalProperties"] = True
    grammar, made = grammar_of(name, schema), vocabulary(name)
    values = {"a": 1, "b": "x", "c": True, "d": "y"}
    for bits in range(16):
        arguments = {key: value for at, (key, value) in enumerate(values.items()) if bits >> at & 1}
        if "d" in arguments and "d" not in required:
            continue
        accepted = made.accepts(grammar, written_calls(name, [("f", arguments)]))
        assert accepted == (set(required) <= set(arguments)), arguments


@pytest.mark.parametrize("name", TAGGED)
def test_text_of_a_value_ends_where_the_parser_ends_it(name: str) -> None:
    end = "</parameter>" if name == "qwen-xml" else "</arg_value>"
    made = vocabulary(name)
    for schema in ({"type": "string"}, {"type": "string", "maxLength": 60}):
        text = written_calls(name, [("f", {"x": f"a{end}b"})])
        assert not made.accepts(grammar_of(name, parameters(schema)), text)


@pytest.mark.parametrize("name", TAGGED)
def test_line_breaks_at_the_ends_of_a_tag_do_not_count_as_its_text(name: str) -> None:
    grammar, made = grammar_of(name, parameters({"type": "string", "minLength": 1})), vocabulary(name)
    assert not made.accepts(grammar, written_calls(name, [("f", {"x": ""})]))
    assert made.accepts(grammar, written_calls(name, [("f", {"x": "a"})]))


@pytest.mark.parametrize("name", [*TAGGED, "gemma"])
@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"type": "string", "pattern": "a^b"}, "pattern"),
        ({"allOf": [{"type": "string"}, {"maxLength": 3}]}, "allOf"),
    ],
)
def test_unsupported_keyword_is_named_with_its_function(name: str, schema: Any, keyword: str) -> None:
    with pytest.raises(ValueError, match=f"the function f: {keyword}"):
        grammar_of(name, parameters(schema))


@pytest.mark.parametrize("name", [*TAGGED, "gemma"])
def test_unsupported_keyword_is_ignored_by_a_lenient_grammar(name: str) -> None:
    two = {"type": "string", "allOf": [{"maxLength": 3}, {"minLength": 1}]}
    grammar = grammar_of(name, parameters(two), lenient=True)
    assert vocabulary(name).accepts(grammar, written_calls(name, [("f", {"x": "any text"})]))


@formats
@pytest.mark.parametrize("schema", [True, {}, {"type": "object"}])
def test_schema_without_properties_takes_any_arguments(name: str, schema: Any) -> None:
    grammar = grammar_of(name, schema)
    for arguments in ({}, {"a": "b"}):
        assert vocabulary(name).accepts(grammar, written_calls(name, [("f", arguments)]))
    if name not in TAGGED:
        any_array: Any = [1]
        assert not vocabulary(name).accepts(grammar, written_calls(name, [("f", any_array)]))


@formats
def test_schema_without_arguments_takes_none(name: str) -> None:
    grammar = grammar_of(name, {"type": "object", "properties": {}, "additionalProperties": False})
    assert vocabulary(name).accepts(grammar, written_calls(name, [("f", {})]))
    assert not vocabulary(name).accepts(grammar, written_calls(name, [("f", {"a": "b"})]))
