"""The requested form of an answer, and the fields of its faults."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlead.language.structured.grammar import JsonAnswer, RegexAnswer
from fairlead.language.structured.request import MAX_GRAMMAR_BYTES, AnswerSpec, FaultyRequest, ToolSpec
from language.structured.rendering import WIRE_FORMATS, vocabulary, written_calls

STRICT = {
    "type": "object",
    "properties": {"n": {"type": "integer"}},
    "required": ["n"],
    "additionalProperties": False,
}


def tool(name: str = "f", parameters: Any = STRICT, *, is_strict: bool = True, index: int = 0) -> ToolSpec:
    return ToolSpec(name, parameters, is_strict, f"tools[{index}].function.parameters")


def accepts(spec: AnswerSpec, text: str) -> bool:
    made = vocabulary("hermes")
    grammar = spec.grammar(WIRE_FORMATS["hermes"], made.special)
    assert grammar is not None
    return made.accepts(grammar, text)


def written(name: str = "f", **arguments: Any) -> str:
    return written_calls("hermes", [(name, arguments)])


def test_request_without_a_form_has_no_grammar() -> None:
    assert AnswerSpec().grammar() is None
    AnswerSpec().check()


def test_automatic_choice_allows_text_and_calls() -> None:
    spec = AnswerSpec(tools=(tool(),))
    assert accepts(spec, "Hello")
    assert accepts(spec, written(n=1))
    assert not accepts(spec, written(n="x"))


def test_required_choice_allows_calls_only() -> None:
    spec = AnswerSpec(tools=(tool(), tool("g", index=1)), choice="required")
    assert accepts(spec, written(n=1) + written("g", n=2))
    assert not accepts(spec, "Hello")
    assert not accepts(AnswerSpec(tools=(tool(),), choice="required", parallel=False), written(n=1) * 2)


def test_named_function_is_called_once() -> None:
    spec = AnswerSpec(tools=(tool(), tool("g", index=1)), named="g")
    assert accepts(spec, written("g", n=1))
    assert not accepts(spec, written("f", n=1))
    assert not accepts(spec, written("g", n=1) * 2)
    assert not accepts(spec, "Hello")


@pytest.mark.parametrize("name", sorted(WIRE_FORMATS))
@pytest.mark.parametrize("choice", [{"choice": "required"}, {"named": "f"}, {"choice": "auto"}], ids=str)
@pytest.mark.parametrize("is_strict", [True, False])
def test_arguments_follow_the_schema_in_every_wire_format(
    name: str, choice: dict[str, Any], is_strict: bool
) -> None:
    spec = AnswerSpec(tools=(tool(is_strict=is_strict),), **choice).check()
    made = vocabulary(name)
    grammar = spec.grammar(WIRE_FORMATS[name], made.special)
    assert made.accepts(grammar, written_calls(name, [("f", {"n": 1})]))
    # Text that is not a call may be anything where calls are optional, if nothing marks its beginning.
    for arguments in ({}, {"n": "x"}, {"n": 1, "m": 2}):
        assert not made.accepts(grammar, written_calls(name, [("f", arguments)]))
    assert spec.warnings == []


def relaxed(parameters: Any, **arguments: Any) -> tuple[bool, list[str]]:
    """Return whether a tool that is not strict may be called so, and what the client is told."""
    others = {"properties": {"n": {"type": "integer"}}, "required": ["n"]}
    spec = AnswerSpec(
        tools=(tool("other", others, is_strict=False), tool("f", parameters, is_strict=False, index=1)),
        choice="required",
    ).check()
    assert not accepts(spec, written("other")), "the other tool was relaxed, too"
    return accepts(spec, written(**arguments)), spec.warnings


AT = "tools[1].function.parameters"


@pytest.mark.parametrize(
    ("keywords", "field", "reason"),
    [
        ({"not": {"required": ["x"]}}, "not", "is not supported"),
        ({"maxProperties": "many"}, "maxProperties", "must be a whole number that is not negative"),
        ({"properties": {"n": {"type": "integer", "minimum": "0"}}}, "properties.n.minimum", "a number"),
        ({"properties": {"n": {"type": "integer"}, "s": {"maxLength": 10**5}}}, "properties.s", "count more"),
    ],
)
def test_rest_of_a_schema_holds_where_a_part_is_faulty(keywords: Any, field: str, reason: str) -> None:
    schema = {"type": "object", **STRICT, "additionalProperties": True, **keywords}
    for arguments, expected in (({"n": 1}, True), ({}, False), ({"n": "x"}, False)):
        is_allowed, (warning,) = relaxed(schema, **arguments)
        assert is_allowed == expected, arguments
        assert warning.startswith(f"{AT}.{field}: ")
        assert reason in warning
        assert warning.endswith("(the rest of the schema holds)")


@pytest.mark.parametrize(
    ("schema", "field"),
    [
        ({"type": "nonsense"}, ".type"),
        ({"$ref": "https://example.com/schema"}, ".$ref"),
        ({"type": "object", "required": [5]}, ".required"),
        ({"enum": ["x" * MAX_GRAMMAR_BYTES]}, ""),
    ],
    ids=lambda value: str(value)[:40],
)
def test_arguments_are_any_object_where_no_part_of_a_schema_can_be_followed(schema: Any, field: str) -> None:
    is_allowed, (warning,) = relaxed(schema, anything=["x"])
    assert is_allowed
    assert warning.startswith(f"{AT}{field}: ")
    assert warning.endswith("(any object is allowed)")


def test_faulty_schema_of_a_strict_tool_is_refused_beside_one_that_is_not() -> None:
    odd = tool("g", {"type": "xyz"}, is_strict=False)
    with pytest.raises(FaultyRequest, match=r"tools\[1\].function.parameters.type"):
        AnswerSpec(tools=(odd, tool("f", {"type": "xyz"}, index=1))).check()


def test_tool_without_a_schema_takes_any_object() -> None:
    assert relaxed(None, anything=1) == (True, [])
    assert relaxed({}, anything=1) == (True, [])


@pytest.mark.parametrize("schema", [{"type": "string"}, {"type": ["array", "null"]}])
def test_arguments_are_an_object_whatever_the_schema_says(schema: Any) -> None:
    strict = AnswerSpec(tools=(tool(parameters=schema),))
    with pytest.raises(FaultyRequest, match="the arguments of a function are an object"):
        strict.grammar(WIRE_FORMATS["hermes"])
    loose = AnswerSpec(tools=(tool(parameters=schema, is_strict=False),)).fit(WIRE_FORMATS["hermes"])
    assert accepts(loose, written(a=1))


@pytest.mark.parametrize(
    "schema", [{"required": ["n"]}, {"anyOf": [{"required": ["n"]}, {"type": "string"}]}]
)
def test_arguments_are_an_object_where_the_schema_leaves_it_open(schema: Any) -> None:
    spec = AnswerSpec(tools=(tool(parameters=schema),), choice="required").check()
    call = written(n=1)
    assert accepts(spec, call)
    assert not accepts(spec, call.replace('{"n": 1}', '"n"'))


def test_size_of_all_schemas_is_bounded_and_small_ones_are_followed() -> None:
    large = {"enum": ["x" * (MAX_GRAMMAR_BYTES // 2)]}
    tools = [tool(f"large{index}", large, is_strict=False) for index in range(3)]
    small = {"type": "object", **STRICT}
    spec = AnswerSpec(tools=(*tools, tool("f", small, is_strict=False)), choice="required").check()
    assert [one.name for one in spec.tools if one.relaxed is not None] == ["large1", "large2"]


def test_form_of_the_text_holds_unless_there_is_a_call() -> None:
    spec = AnswerSpec(tools=(tool(),), answer=RegexAnswer("[0-9]+"))
    assert accepts(spec, "12")
    assert accepts(spec, written(n=1))
    assert not accepts(spec, "Hello")


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        (AnswerSpec(answer=JsonAnswer({"type": "xyz"}), answer_field="a.schema"), "a.schema.type"),
        (AnswerSpec(answer=JsonAnswer(5), answer_field="a.schema"), "a.schema"),
        (
            AnswerSpec(tools=(tool(), tool("g", {"properties": {"a": {"not": {}}}}, index=1))),
            "tools[1].function.parameters.properties.a.not",
        ),
    ],
)
def test_fault_names_the_field_of_the_request(spec: AnswerSpec, field: str) -> None:
    with pytest.raises(FaultyRequest) as caught:
        spec.check()
    assert caught.value.field == field


def test_lenient_request_ignores_unsupported_keywords() -> None:
    spec = AnswerSpec(answer=JsonAnswer({"type": "array", "contains": {}}), is_lenient=True)
    spec.check()
    assert accepts(spec, "[1]")


def test_grammar_that_a_wire_format_does_not_support_is_a_fault_of_the_tools() -> None:
    parameters = {"properties": {"d": {"type": "string", "allOf": [{"minLength": 1}, {"maxLength": 9}]}}}
    spec = AnswerSpec(tools=(tool(parameters=parameters),))
    with pytest.raises(FaultyRequest, match=r"tools\[0\].function.parameters: allOf of a string"):
        spec.grammar(WIRE_FORMATS["qwen-xml"])


@pytest.mark.parametrize("name", ["qwen-xml", "glm", "gemma"])
def test_schema_that_a_wire_format_does_not_support_relaxes_only_its_tool(name: str) -> None:
    odd = {
        "properties": {"d": {"type": "string", "pattern": "a^b"}, "n": {"type": "integer"}},
        "required": ["n"],
    }
    spec = AnswerSpec(
        tools=(tool("f", odd, is_strict=False), tool("g", is_strict=False, index=1)), choice="required"
    ).check()
    made = vocabulary(name)
    fitted = spec.fit(WIRE_FORMATS[name], made.special)
    grammar = fitted.grammar(WIRE_FORMATS[name], made.special)
    for function, arguments, expected in (
        ("f", {"d": "any text", "n": 1}, True),
        ("f", {"d": "any text"}, False),
        ("g", {"n": 1}, True),
        ("g", {}, False),
    ):
        call = written_calls(name, [(function, arguments)])
        assert made.accepts(grammar, call) == expected, (function, arguments)
    (warning,) = fitted.warnings
    assert warning.startswith("tools[0].function.parameters: pattern: a^b")


@pytest.mark.parametrize("name", ["hermes", "mistral"])
def test_schema_without_a_value_is_a_fault_with_its_path(name: str) -> None:
    parameters = {"properties": {"d": {"type": "string", "minLength": 2, "maxLength": 1}}, "required": ["d"]}
    spec = AnswerSpec(tools=(tool(), tool("g", {"type": "object", **parameters}, index=1)))
    spec.check()
    with pytest.raises(FaultyRequest, match="minLength is above maxLength") as caught:
        spec.grammar(WIRE_FORMATS[name])
    assert caught.value.field == "tools[1].function.parameters.properties.d"
    answer = AnswerSpec(
        answer=JsonAnswer({"items": {"allOf": [{"type": "null"}, False]}, "minItems": 1, "type": "array"})
    )
    with pytest.raises(FaultyRequest) as caught:
        answer.grammar()
    assert caught.value.field == "response_format.items"


def test_schema_without_a_value_relaxes_a_tool_that_is_not_strict() -> None:
    text = {"type": "string", "minLength": 2, "maxLength": 1}
    spec = AnswerSpec(tools=(tool("f", {"properties": {"d": text}, "required": ["d"]}, is_strict=False),))
    (warning,) = spec.check().fit(WIRE_FORMATS["hermes"]).warnings
    assert warning.startswith("tools[0].function.parameters: properties.d: minLength is above maxLength")


def test_form_of_a_text_that_no_answer_has_is_no_part() -> None:
    spec = AnswerSpec(tools=(tool(),), choice="required", answer=JsonAnswer(False)).check()
    assert [part.field for part in spec.parts(WIRE_FORMATS["hermes"])] == ["tools[0].function.parameters"]


def test_grammar_is_bounded() -> None:
    spec = AnswerSpec(answer=JsonAnswer({"enum": [f"{n:01000}" for n in range(MAX_GRAMMAR_BYTES // 1000)]}))
    with pytest.raises(FaultyRequest, match=r"response_format: .* bytes"):
        spec.grammar()


# Anything that a client may send as the schema of a tool, mostly of the keywords of JSON Schema.
KEYWORDS = st.sampled_from(
    [
        *("type", "enum", "const", "required", "properties", "items", "prefixItems", "additionalProperties"),
        *("anyOf", "oneOf", "allOf", "not", "$ref", "$defs", "pattern", "format", "minLength", "maxLength"),
        *(
            "minimum",
            "exclusiveMinimum",
            "multipleOf",
            "minItems",
            "maxItems",
            "x-guidance",
            "a",
            "description",
        ),
    ]
)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 10**20),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from(
        ["string", "object", "integer", "array", "#", "#/$defs/a", "^a$", "(", "date", 'é\n"', ""]
    ),
)
ANYTHING = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYWORDS, inner, max_size=4),
    max_leaves=12,
)


@given(parameters=st.dictionaries(KEYWORDS, ANYTHING, max_size=5), name=st.sampled_from(sorted(WIRE_FORMATS)))
def test_any_schema_of_a_tool_that_is_not_strict_makes_a_grammar(parameters: Any, name: str) -> None:
    special = vocabulary(name).special
    spec = AnswerSpec(tools=(tool("f", parameters, is_strict=False), tool("g", index=1)), choice="required")
    fitted = spec.check().fit(WIRE_FORMATS[name], special)
    grammar = fitted.grammar(WIRE_FORMATS[name], special)
    assert grammar is not None
    assert json.loads(grammar)
    assert fitted.tools[1].relaxed is None
