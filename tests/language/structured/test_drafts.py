"""Schemas of older drafts, formats, and references, by the values that their grammars accept."""

from datetime import date
from typing import Any

import pytest
from llguidance import LLMatcher

from fairlead.language.structured.drafts import modern
from fairlead.language.structured.grammar import JsonAnswer, answer_grammar
from fairlead.language.structured.schema import SchemaFault, check_schema
from language.structured.rendering import dumped, vocabulary
from language.structured.test_escapes import Walk

DRAFT = "http://json-schema.org/draft-{}/schema#"
NEWEST = "https://json-schema.org/draft/2020-12/schema"


def accepts(schema: Any, *values: Any) -> list[bool]:
    """Return which of the values an answer with a schema may be."""
    check_schema(schema)
    made = vocabulary("hermes")
    begun = LLMatcher(made.matching, answer_grammar(JsonAnswer(schema)))
    assert not begun.is_error(), begun.get_error()
    found = []
    for value in values:
        matcher, ids = begun.deep_copy(), made.ids(dumped(value))
        found.append(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())
    return found


def test_exclusive_bounds_of_draft_4_are_booleans() -> None:
    bounds = {"type": "integer", "minimum": 3, "exclusiveMinimum": True, "maximum": 9}
    assert accepts(bounds, 3, 4, 9) == [False, True, True]
    assert accepts({**bounds, "exclusiveMaximum": True}, 4, 9) == [True, False]
    assert accepts({**bounds, "exclusiveMinimum": False}, 2, 3) == [False, True]
    assert accepts({"type": "integer", "exclusiveMinimum": 3}, 3, 4) == [False, True]


def test_list_of_items_is_a_tuple() -> None:
    schema = {"type": "array", "items": [{"type": "integer"}, {"type": "null"}], "additionalItems": False}
    assert accepts(schema, [], [1], [1, None], [None], [1, None, 2]) == [True, True, True, False, False]
    open_tuple = {"type": "array", "items": [{"type": "integer"}]}
    assert accepts(open_tuple, [1, "x"], ["x"]) == [True, False]


def test_keywords_beside_a_reference_count_from_2019_on() -> None:
    schema = {
        "definitions": {"a": {"type": "string"}},
        "properties": {"x": {"$ref": "#/definitions/a", "maxLength": 1}},
    }
    old = {"$schema": DRAFT.format("07"), **schema}
    assert accepts(old, {"x": "long"}) == [True]
    assert accepts({"$schema": NEWEST, **schema}, {"x": "long"}, {"x": "l"}) == [False, True]


def test_keyword_that_a_draft_does_not_have_has_no_effect() -> None:
    schema = {"properties": {"a": {"const": 1}}, "if": {}, "then": False}
    assert accepts({"$schema": DRAFT.format("04"), **schema}, {"a": 2}) == [True]
    with pytest.raises(SchemaFault, match="if: is not supported"):
        check_schema(schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"$id": "http://x/y", "$ref": "z", "$defs": {"a": {"$id": "z", "type": "integer"}}},
        {"$ref": "#named", "$defs": {"a": {"$anchor": "named", "type": "integer"}}},
        {"$schema": DRAFT.format("04"), "$ref": "#n", "definitions": {"a": {"id": "#n", "type": "integer"}}},
        {"$ref": "#/$defs/a%25b~1c", "$defs": {"a%b/c": {"type": "integer"}}},
        {"allOf": [{"$ref": "#/x-own/a"}], "x-own": {"a": {"type": "integer"}}},
    ],
)
def test_reference_finds_its_target(schema: Any) -> None:
    assert accepts(schema, 1, "x") == [True, False]


@pytest.mark.parametrize("reference", ["#/$defs/none", "other.json", "http://x/y", "#none", 5])
def test_reference_to_what_is_not_in_the_schema_is_refused(reference: Any) -> None:
    with pytest.raises(SchemaFault) as caught:
        check_schema({"properties": {"a": {"$ref": reference}}})
    assert caught.value.path == "properties.a.$ref"


def test_schema_may_have_itself_in_it() -> None:
    tree = {"type": "object", "properties": {"child": {"$ref": "#"}}, "additionalProperties": False}
    assert accepts(tree, {}, {"child": {"child": {}}}, {"child": 1}) == [True, True, False]
    both = {"allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]}
    inherited = {
        **both,
        "$defs": {
            name: {"type": "object", "properties": {"next": {"$ref": f"#/$defs/{name}"}}, "required": []}
            for name in ("a", "b")
        },
    }
    assert accepts(inherited, {"next": {"next": {}}}, {"next": 1}) == [True, False]


def test_schemas_are_merged_by_all_of() -> None:
    schema = {
        "allOf": [
            {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
            {"properties": {"a": {"minimum": 3}, "b": {"type": "null"}}, "required": ["b"]},
        ]
    }
    assert accepts(schema, {"a": 3, "b": None}, {"a": 2, "b": None}, {"a": 3}) == [True, False, False]
    tuples = {
        "type": "array",
        "allOf": [{"prefixItems": [{"minimum": 3}]}],
        "items": {"type": "integer", "minimum": 5},
    }
    assert accepts(tuples, [5], [4], ["x"]) == [True, False, False]


def test_alternatives_of_one_of_that_exclude_each_other_are_served() -> None:
    kinds = [
        {
            "type": "object",
            "properties": {"kind": {"const": kind}, kind: {"type": "integer"}},
            "required": ["kind"],
        }
        for kind in ("a", "b")
    ]
    assert accepts({"oneOf": kinds}, {"kind": "a", "a": 1}, {"kind": "c"}, {"kind": "b", "b": "x"}) == [
        True,
        False,
        False,
    ]


# Formats -------------------------------------------------------------------------------------------


def test_date_knows_leap_years() -> None:
    schema = {"type": "string", "format": "date"}
    years = [*range(1, 500), 1900, 2000, 2100, 2400, 9999]
    days = [f"{year:04}-02-29" for year in years]

    def is_date(text: str) -> bool:
        try:
            return bool(date.fromisoformat(text))
        except ValueError:
            return False

    assert accepts(schema, *days) == list(map(is_date, days))
    assert accepts(schema, "2023-04-30", "2023-04-31", "2023-13-01", "2023-1-1") == [
        True,
        False,
        False,
        False,
    ]


@pytest.mark.parametrize(
    ("text", "is_time"),
    [
        *(("23:59:60Z", True), ("23:59:60.5z", True), ("23:58:60Z", False), ("22:59:60Z", False)),
        *(
            ("01:29:60+01:30", True),
            ("15:59:60-08:00", True),
            ("23:29:60+23:30", True),
            ("00:29:60-23:30", True),
        ),
        *(
            ("23:59:60+01:00", False),
            ("23:59:60-00:30", False),
            ("00:59:60+01:00", True),
            ("12:00:61Z", False),
        ),
        *(("12:00:00+05:45", True), ("12:00:00", False), ("24:00:00Z", False)),
    ],
)
def test_second_60_is_at_23_59_utc_only(text: str, *, is_time: bool) -> None:
    assert accepts({"type": "string", "format": "time"}, text) == [is_time]
    assert accepts({"type": "string", "format": "date-time"}, f"2016-12-31T{text}") == [is_time]


@pytest.mark.parametrize(
    ("name", "valid", "invalid"),
    [
        ("email", ["a.b+c@example.com", "a@[127.0.0.1]"], ["a", "a@", "a..b@x.y"]),
        ("hostname", ["a-b.example", "x" * 63], ["-a", "a_b", "x" * 64, ".".join(["a" * 50] * 6)]),
        ("ipv4", ["127.0.0.1", "255.255.255.255"], ["256.0.0.1", "1.2.3", "01.2.3.4"]),
        ("ipv6", ["::1", "1:2:3:4:5:6:7:8", "::ffff:1.2.3.4", "1::8"], ["1:2", ":::", "1::2::3", "12345::"]),
        ("uuid", ["2eb8aa08-aa98-11ea-b4aa-73b441d16380"], ["2eb8aa08aa9811eab4aa73b441d16380"]),
        ("uri", ["http://a.b/c?d=e#f", "urn:isbn:123", "mailto:a@b.c"], ["a/b", "http://a b"]),
        ("duration", ["P1Y2M3DT4H5M6S", "P2W", "PT1S"], ["P", "PT1D", "1D"]),
        ("path", ["anything at all", ""], []),
        ("", ["x"], []),
    ],
)
def test_format(name: str, valid: list[str], invalid: list[str]) -> None:
    schema = {"type": "string", "format": name}
    assert accepts(schema, *valid) == [True] * len(valid)
    assert accepts(schema, *invalid) == [False] * len(invalid)
    assert accepts({"format": name}, 5) == [True]


def test_format_holds_beside_a_pattern() -> None:
    schema = {"type": "string", "format": "date", "pattern": "^2024"}
    assert accepts(schema, "2024-01-01", "2023-01-01", "2024") == [True, False, False]


# Ends ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
        {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
        {
            "$ref": "#/$defs/a",
            "$defs": {"a": {"anyOf": [{"type": "array", "items": {"$ref": "#/$defs/a"}, "minItems": 2}]}},
        },
        {"type": "string", "pattern": "^ab$", "maxLength": 1},
        {"type": "integer", "minimum": 1.2, "maximum": 1.8},
        {"type": "number", "minimum": 1, "exclusiveMaximum": 1},
    ],
)
def test_schema_of_which_no_value_ends_is_refused(schema: Any) -> None:
    check_schema(schema)
    with pytest.raises(ValueError, match=r"without end|no text|no number"):
        answer_grammar(JsonAnswer(schema))


def test_optional_property_without_a_value_does_not_begin() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^ab$", "maxLength": 1}}}
    closed = Walk(answer_grammar(JsonAnswer({**schema, "additionalProperties": False})))
    assert closed.refused_at('{"') == 1
    assert accepts(schema, {}, {"a": "ab"}) == [True, False]


@pytest.mark.parametrize(
    "schema", [{"type": "number"}, {"type": "integer"}, {"type": "number", "minimum": 2}, {}]
)
def test_number_ends(schema: Any) -> None:
    made = vocabulary("hermes")
    matcher = LLMatcher(made.matching, answer_grammar(JsonAnswer(schema)))
    assert matcher.try_consume_tokens(made.ids("3" * 100)) == 30
    assert matcher.is_accepting()


def test_modern_schema_has_only_keywords_of_2020() -> None:
    old = {
        "id": "x",
        "items": [{"type": "null"}],
        "additionalItems": {"$ref": "#/definitions/a"},
        "definitions": {"a": {}},
    }
    assert modern(old) == {
        "prefixItems": [{"type": "null"}],
        "items": {"$ref": "#/$defs/definitions.a"},
        "$defs": {"definitions.a": {}},
    }
