"""The time that writing the grammar of a schema takes in Python, which a process shares with its streams."""

from typing import Any

import pytest

from fairlead.language.structured import bounds
from fairlead.language.structured.grammar import Calls, JsonAnswer, ToolGrammar, answer_grammar
from fairlead.language.structured.lark import WorkLeft
from fairlead.language.structured.schema import check_schema
from language.structured.rendering import WIRE_FORMATS


def doubling(depth: int) -> dict[str, Any]:
    """Alternatives of which each has two others behind it."""
    last: dict[str, Any] = {"type": "object"}
    definitions = {f"d{level}": {"anyOf": [{"$ref": f"#/$defs/d{level + 1}"}] * 2} for level in range(depth)}
    choices = [{"$ref": "#/$defs/d0"}, {"type": "null"}]
    return {"minProperties": 0, "$defs": {**definitions, f"d{depth}": last}, "anyOf": choices}


def without_values(count: int) -> dict[str, Any]:
    """Definitions of which each turns out to have no value only after the next one."""
    definitions: dict[str, Any] = {
        f"d{index}": {
            "required": ["a"],
            "type": "object",
            "properties": {"a": {"$ref": f"#/$defs/d{index + 1}"}},
        }
        for index in range(count)
    }
    return {"$defs": {**definitions, f"d{count}": False}, "anyOf": [{"$ref": "#/$defs/d0"}, {"type": "null"}]}


def merged(count: int) -> dict[str, Any]:
    """Objects that are all to be one."""
    return {
        "allOf": [{"properties": {f"p{index}_{other}": {} for other in range(20)}} for index in range(count)]
    }


def exclusive(count: int) -> dict[str, Any]:
    """Alternatives that are compared with each other."""
    names = [f"k{index}" for index in range(20)]
    return {
        "oneOf": [
            {"type": "object", "required": [*names, "z"], "properties": {"z": {"const": index}}}
            for index in range(count)
        ]
    }


@pytest.mark.parametrize(
    "schema",
    [
        doubling(60),
        without_values(400),
        merged(200),
        exclusive(200),
        {"type": "string", "pattern": "(" + "|".join(f"[à-ü]{index}" for index in range(3000)) + ")"},
        {"enum": [f"{index} {index}" for index in range(15_000)]},
        {"type": "object", "properties": {f"k{index}": {"type": "string"} for index in range(8000)}},
    ],
    ids=["doubling", "without values", "merged", "exclusive", "pattern", "enum", "properties"],
)
def test_schema_whose_rules_take_long_is_left_whole(schema: dict[str, Any]) -> None:
    check_schema(schema)
    grammar = answer_grammar(JsonAnswer(schema))
    assert "body: %json" in grammar
    assert "shared_" not in grammar, "the rules that were written before are left out"
    assert "TERMINAL_" not in grammar


def test_part_without_a_value_leaves_no_rules_behind() -> None:
    assert answer_grammar(JsonAnswer(without_values(5))) == answer_grammar(JsonAnswer(without_values(1)))


def test_length_of_each_pattern_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[str] = []
    expanded_size = bounds.expanded_size

    def counting(pattern: str) -> int:
        counted.append(pattern)
        return expanded_size(pattern)

    monkeypatch.setattr(bounds, "expanded_size", counting)
    patterns = [f"^a{{1}}{index}$" for index in range(300)]
    check_schema({"anyOf": [{"type": "string", "pattern": one} for one in patterns * 2]})
    assert sorted(counted) == sorted(patterns)


def test_large_schema_of_an_ordinary_form_is_written_here() -> None:
    fields = {f"k{index}": {"type": "integer", "minimum": 1} for index in range(1000)}
    grammar = answer_grammar(JsonAnswer({"type": "object", "properties": fields}))
    assert "%json" not in grammar


def test_schemas_of_many_tools_share_what_may_be_spent() -> None:
    parameters = {"properties": {f"k{index}": {"type": "integer"} for index in range(100)}}
    calls = [ToolGrammar(f"f{index}", parameters) for index in range(4)]

    def left(spent: int) -> int:
        grammar = answer_grammar(Calls(calls, is_required=True), WIRE_FORMATS["hermes"], work=WorkLeft(spent))
        return grammar.count("%json")

    assert (left(0), left(4000), left(100_000)) == (4, 3, 0)
