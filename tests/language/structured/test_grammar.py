"""The grammar of an answer: its forms, the reasoning before it, and the tokens that may come next."""

import json
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher

from fairlead.base.wire_formats import wire_format
from fairlead.language.structured.grammar import (
    PLAIN,
    Calls,
    ChoiceAnswer,
    JsonAnswer,
    LarkAnswer,
    ReasoningState,
    RegexAnswer,
    ToolGrammar,
    answer_grammar,
)
from fairlead.language.structured.request import AnswerSpec, ToolSpec
from language.structured.rendering import (
    CONTROL_TOKENS,
    WIRE_FORMATS,
    vocabulary,
    written_calls,
    written_reasoning,
)
from language.structured.trying import grammar_fault

NUMBER = JsonAnswer({"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]})
REASONING = sorted(name for name, one in WIRE_FORMATS.items() if one.reasoning is not None)


def accepts(body: Any, text: str, name: str = "hermes", state: ReasoningState = "closed") -> bool:
    made = vocabulary(name)
    return made.accepts(answer_grammar(body, WIRE_FORMATS[name], made.special, state), text)


@pytest.mark.parametrize(
    ("body", "valid", "invalid"),
    [
        (
            NUMBER,
            ['{"n": 1}', '{"n":1}', '{\n  "n": 1\n}'],
            ["{}", '{"n": "1"}', "1", 'x {"n": 1}', '{"n": 1} x'],
        ),
        (JsonAnswer(True), ["{}", "[1]", '"a"'], ["a", ""]),
        (JsonAnswer({"type": "object"}), ["{}", '{"a": [null]}'], ["[]", "{"]),
        (RegexAnswer("[a-c]+/[0-9]"), ["a/1", "abc/9"], ["a", "d/1", "a/1 "]),
        (RegexAnswer(r"a\/b"), ["a/b"], [r"a\/b"]),
        (RegexAnswer("a\nb"), ["a\nb"], ["a b"]),
        (RegexAnswer("a|b"), ["a", "b"], ["ab", ""]),
        (
            ChoiceAnswer(["yes", "no", 'say "é"', "a\nb"]),
            ["yes", "no", 'say "é"', "a\nb"],
            ["ye", "yesno", ""],
        ),
        (ChoiceAnswer(["a", "ab"]), ["a", "ab"], ["b"]),
        (LarkAnswer('start: "x" number\nnumber: /[0-9]+/'), ["x1", "x12"], ["x", "1"]),
    ],
)
def test_answer_has_its_form(body: Any, valid: list[str], invalid: list[str]) -> None:
    for text in valid:
        assert accepts(body, text), text
        assert accepts(body, text, "mistral"), text
    for text in invalid:
        assert not accepts(body, text), text


def test_grammar_of_a_client_cannot_change_the_rest() -> None:
    body = LarkAnswer('start: "a" body\nbody: "b"\nthought: "c"')
    assert accepts(body, "<think>x</think>ab", state="not opened")
    assert not accepts(body, "c", state="not opened")


@pytest.mark.parametrize("name", REASONING)
def test_reasoning_precedes_the_answer_unless_the_prompt_closed_it(name: str) -> None:
    opening = "<|start|>assistant<|channel|>final<|message|>" if name == "harmony" else ""
    answer = f'{opening}{{"n": 1}}'
    thought = written_reasoning(name, "hmm {} </ x")
    opened = thought[len(thought.split("hmm")[0]) :]
    assert accepts(NUMBER, thought + answer, name, "not opened")
    assert accepts(NUMBER, answer, name, "not opened")
    assert accepts(NUMBER, opened + answer, name, "opened")
    assert not accepts(NUMBER, answer, name, "opened")
    assert accepts(NUMBER, answer, name, "closed")
    assert not accepts(NUMBER, thought + answer, name, "closed")
    assert not accepts(NUMBER, thought + opening + "text", name, "not opened")


@pytest.mark.parametrize("name", REASONING)
def test_calls_follow_the_reasoning(name: str) -> None:
    text = written_reasoning(name, "hmm") + written_calls(name, [("f", {"a": 1})])
    for is_required in (True, False):
        assert accepts(Calls([ToolGrammar("f")], is_required=is_required), text, name, "not opened")


@pytest.mark.parametrize("name", sorted(WIRE_FORMATS))
def test_answer_without_a_call_has_the_form_that_is_requested(name: str) -> None:
    body = Calls([ToolGrammar("f")], is_required=False, otherwise=NUMBER)
    opening = "<|start|>assistant<|channel|>final<|message|>" if name == "harmony" else ""
    assert accepts(body, f'{opening}{{"n": 1}}', name)
    assert accepts(body, written_calls(name, [("f", {"a": 1})]), name)
    assert not accepts(body, f"{opening}text", name)


@pytest.mark.parametrize(
    "text", ["{" + " " * 200 + '"n": 1}', '{"n":' + "\n" * 50 + "1}", " " * 50 + '{"n": 1}']
)
def test_white_space_of_json_is_bounded(text: str) -> None:
    assert not accepts(NUMBER, text)


@pytest.mark.parametrize("name", sorted(WIRE_FORMATS))
def test_white_space_before_a_required_call_is_bounded(name: str) -> None:
    body = Calls([ToolGrammar("f")], is_required=True)
    written = written_calls(name, [("f", {})])
    assert accepts(body, written, name)
    assert not accepts(body, "\n" * 20 + written, name)


def test_special_token_matches_no_text() -> None:
    made = vocabulary("mistral")
    token = made.special["[ARGS]"]
    for body in (RegexAnswer(".*"), JsonAnswer({"type": "string"}), ChoiceAnswer(["[ARGS]"])):
        matcher = LLMatcher(made.matching, answer_grammar(body, WIRE_FORMATS["mistral"], made.special))
        if isinstance(body, JsonAnswer):
            assert matcher.consume_tokens(made.ids('"'))
        mask = np.zeros((made.library.get_vocab_size() + 3 + 31) // 32, np.uint32)
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        assert not mask[token // 32] >> np.uint32(token % 32) & 1


def test_characters_of_several_bytes_may_be_divided_among_tokens() -> None:
    made = vocabulary("hermes")
    grammar = answer_grammar(ChoiceAnswer(["😀", "日本"]), WIRE_FORMATS["hermes"], made.special)
    single = {made.tokenizer.token_bytes(token): token for token in range(made.library.get_vocab_size())}
    for text, is_valid in (("😀", True), ("日本", True), ("日", False)):
        matcher = LLMatcher(made.matching, grammar)
        ids = [single[bytes([byte])] for byte in text.encode()]
        assert matcher.consume_tokens(ids)
        assert matcher.is_accepting() == is_valid
    matcher = LLMatcher(made.matching, grammar)
    assert not matcher.consume_tokens([single[b"\xf0"], single[b"\xe6"]])


def test_wire_format_without_calls_refuses_them() -> None:
    with pytest.raises(ValueError, match="no syntax of tool calls"):
        answer_grammar(Calls([ToolGrammar("f")], is_required=True), PLAIN)


def test_reasoning_without_an_end_cannot_be_constrained() -> None:
    fields = {"thinking": {"open": "<r>"}, "content": {}}
    with pytest.raises(ValueError, match="no single text at its end"):
        answer_grammar(NUMBER, wire_format.read("x", {"fields": fields}), {}, "not opened")


def test_marks_that_are_special_or_not_constrain_calls_in_a_text() -> None:
    """DeepSeek's marks are special tokens in some of its tokenizers, and text in others."""
    strict = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    body = Calls([ToolGrammar("f", strict)], is_required=False)
    for special in (vocabulary("deepseek").special, {}):
        name = "deepseek" if special else "hermes"
        made = vocabulary(name)
        grammar = answer_grammar(body, WIRE_FORMATS["deepseek"], special)
        assert made.accepts(grammar, "Hello" + written_calls("deepseek", [("f", {"n": 1})]))
        assert made.accepts(grammar, "Hello")
        assert not made.accepts(grammar, "Hello" + written_calls("deepseek", [("f", {"n": "x"})]))


def test_grammar_is_json_of_llguidance() -> None:
    found = json.loads(answer_grammar(LarkAnswer("start: /a/")))
    assert [one["name"] for one in found["grammars"]] == ["answer", "own"]


CLOSING = {
    "harmony": ("<|return|>", "<|end|>", "<|call|>"),
    "gemma": ("<tool_call|>",),
    "deepseek": ("<｜tool▁calls▁end｜>",),
}


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("name", sorted(WIRE_FORMATS))
def test_tools_can_be_called_whichever_mark_ends_answers(name, choice):
    """gpt-oss ends answers with `<|return|>` and `<|call|>`, which close its content and calls, too."""
    marks = dict.fromkeys((*CONTROL_TOKENS.get(name, ()), *CLOSING.get(name, ())))
    numbers = {mark: 300 + number for number, mark in enumerate(marks)}
    closing = CLOSING.get(name, ())
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    spec = AnswerSpec(tools=(ToolSpec("f", schema, False, "tools[0]"),), choice=choice).check()
    for ends in ((), closing, *((mark,) for mark in closing)):
        grammar = spec.grammar(WIRE_FORMATS[name], {**numbers, **dict.fromkeys(ends)}, "closed")
        assert grammar_fault(grammar) is None, ends
