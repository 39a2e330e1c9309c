"""The requested form of an answer, and the fields of its faults."""

from typing import Any

import pytest

from fairlead.structured.grammar import JsonAnswer, RegexAnswer
from fairlead.structured.request import MAX_GRAMMAR_BYTES, AnswerSpec, FaultyRequest, ToolSpec
from structured.rendering import WIRE_FORMATS, vocabulary, written_calls

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


def test_arguments_are_any_object_unless_strict() -> None:
    spec = AnswerSpec(tools=(tool(is_strict=False, parameters={"type": "nonsense"}),), choice="required")
    spec.check()
    assert accepts(spec, written(anything=["x"]))


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
    spec = AnswerSpec(tools=(tool(parameters={"properties": {"d": {"type": "string", "format": "date"}}}),))
    with pytest.raises(FaultyRequest, match="tools: the function f: format of a string"):
        spec.grammar(WIRE_FORMATS["qwen-xml"])


def test_grammar_is_bounded() -> None:
    spec = AnswerSpec(answer=JsonAnswer({"enum": ["x" * 1000] * (MAX_GRAMMAR_BYTES // 1000)}))
    with pytest.raises(FaultyRequest, match=r"response_format: .* bytes"):
        spec.grammar()
