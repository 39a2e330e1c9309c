"""Every wire format: what is written in it is accepted by its grammar and parsed back."""

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.cli.serving.utils import _RESPONSE_TEMPLATE_FALLBACKS
from transformers.utils.chat_parsing import parse_response

from fairlead.base.wire_formats import wire_format
from fairlead.base.wire_formats.formats import FORMATS, FormatRecord
from fairlead.base.wire_formats.wire_format import WireFormat
from fairlead.language.structured.grammar import Calls, ToolGrammar, answer_grammar
from fairlead.language.structured.parser import AnswerParser
from fairlead.language.structured.pieces import CallArguments, CallBegin, Content, Piece, Reasoning
from language.structured.rendering import (
    SINGLE,
    WIRE_FORMATS,
    Call,
    vocabulary,
    written_calls,
    written_content,
    written_reasoning,
)

formats = pytest.mark.parametrize("name", sorted(WIRE_FORMATS))

# Texts that look like marks, quotation marks, and characters of several bytes.
FRAGMENTS = [
    "</tool_call>",
    '"',
    "\\",
    "'",
    "{",
    "}",
    "<",
    "é",
    "日本",
    "😀",
    "\n",
    "a",
    " b",
    ";",
    "</think",
    "}}",
]
texts = st.lists(st.sampled_from(FRAGMENTS), max_size=6).map("".join)
keys = st.sampled_from(["city", "n", "deep", "x_1", "straße"])
scalars = texts | st.integers(-(10**9), 10**9) | st.booleans() | st.none()
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
    max_leaves=5,
)
FUNCTIONS = ["f", "get_weather", "get-weather", "weather.now"]
calls_of = st.lists(
    st.tuples(st.sampled_from(FUNCTIONS), st.dictionaries(keys, values, max_size=3)), max_size=3
)
words = st.sampled_from(["", "Hello", "Hello < there", "a <tool b", "x\n\ny"])


def schema_of(value: Any) -> dict[str, Any]:
    """Return a schema that describes the value exactly as far as its types go."""
    match value:
        case bool():
            return {"type": "boolean"}
        case None:
            return {"type": "null"}
        case int():
            return {"type": "integer"}
        case str():
            return {"type": "string"}
        case list():
            return {"type": "array"}
    properties = {key: schema_of(one) for key, one in value.items()}
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


class Parsed:
    """The pieces of an answer, put together."""

    def __init__(self, pieces: Iterator[Piece]) -> None:
        self.reasoning = self.content = ""
        written: list[list[str]] = []
        for piece in pieces:
            match piece:
                case Reasoning(text):
                    self.reasoning += text
                case Content(text):
                    self.content += text
                case CallBegin(number, name):
                    assert number == len(written)
                    written.append([name, ""])
                case CallArguments(number, text):
                    assert number == len(written) - 1
                    written[number][1] += text
        self.calls: list[Call] = [(name, json.loads(arguments)) for name, arguments in written]


def parsed(name: str, pieces: list[str], tools: dict[str, Any]) -> Parsed:
    parser = AnswerParser(WIRE_FORMATS[name], tools=tools)

    def everything() -> Iterator[Piece]:
        for piece in pieces:
            yield from parser.push(piece)
        yield from parser.finish()

    return Parsed(everything())


def characters_of(name: str, text: str, seed: int) -> list[str]:
    del name, seed
    return list(text)


def tokens_of(name: str, text: str, seed: int) -> list[str]:
    del seed
    made = vocabulary(name)
    from fairlead.language.text.detokenizer import Detokenizer

    detokenizer = Detokenizer(made.tokenizer, skip_special_tokens=False)
    return [*(detokenizer.push([one]) for one in made.ids(text)), detokenizer.flush()]


def random_pieces(name: str, text: str, seed: int) -> list[str]:
    del name
    chance, pieces = random.Random(seed), []
    while text:
        length = chance.randint(1, 12)
        pieces.append(text[:length])
        text = text[length:]
    return pieces


def usable(name: str, calls: list[Call]) -> list[Call]:
    """Return the calls that the format can express; in tags the types of values are those of a function."""
    if name in SINGLE:
        return calls[:1]
    if name in ("qwen-xml", "glm"):
        return list(dict(calls).items())
    return calls


@formats
@pytest.mark.parametrize("cut", [characters_of, tokens_of, random_pieces])
@given(reasoning=words, content=words, calls=calls_of, seed=st.integers(0, 1000))
def test_written_answer_is_parsed_back_however_it_is_cut(
    name: str,
    cut: Callable[[str, str, int], list[str]],
    reasoning: str,
    content: str,
    calls: list[Call],
    seed: int,
) -> None:
    calls = usable(name, calls)
    tools = {function: schema_of(arguments) for function, arguments in calls}
    text = written_reasoning(name, reasoning) + written_content(name, content) + written_calls(name, calls)

    found = parsed(name, cut(name, text, seed), tools)

    assert found.calls == calls
    assert found.content.strip() == content.strip()
    has_reasoning = WIRE_FORMATS[name].reasoning is not None
    assert found.reasoning == (reasoning.strip() if has_reasoning else "")


@formats
@given(reasoning=words, calls=calls_of.filter(bool))
def test_grammar_accepts_written_calls(name: str, reasoning: str, calls: list[Call]) -> None:
    calls = list(dict(usable(name, calls)).items())
    made = vocabulary(name)
    text = written_reasoning(name, reasoning) + written_calls(name, calls)
    for is_strict in (True, False):
        tools = [
            ToolGrammar(function, schema_of(arguments) if is_strict else None)
            for function, arguments in calls
        ]
        for is_required in (True, False):
            body = Calls(tools, is_required=is_required)
            grammar = answer_grammar(body, WIRE_FORMATS[name], made.special, "not opened")
            assert made.accepts(grammar, text)


@formats
@pytest.mark.parametrize("is_required", [True, False])
def test_grammar_refuses_arguments_that_break_a_strict_schema(name: str, is_required: bool) -> None:
    made = vocabulary(name)
    schema = schema_of({"city": "x", "n": 1})
    body = Calls([ToolGrammar("f", schema)], is_required=is_required)
    grammar = answer_grammar(body, WIRE_FORMATS[name], made.special)
    assert made.accepts(grammar, written_calls(name, [("f", {"city": "x", "n": 1})]))
    for arguments in ({"city": "x", "n": "three"}, {"city": "x"}, {"city": "x", "n": 1, "other": 2}):
        assert not made.accepts(grammar, written_calls(name, [("f", arguments)]))
    assert not made.accepts(grammar, written_calls(name, [("another", {"city": "x", "n": 1})]))


@formats
@pytest.mark.parametrize("is_strict", [True, False])
def test_number_with_an_exponent_is_accepted_and_parsed_back(name: str, is_strict: bool) -> None:
    made = vocabulary(name)
    arguments = {"small": 8.854e-12, "large": -2.5e20, "listed": [1e-9, {"deep": 5e-7}]}
    number = {"type": "number"}
    schema = {"properties": {"small": number, "large": number, "listed": {"type": "array"}}}
    text = written_calls(name, [("f", arguments)])
    tools = [ToolGrammar("f", schema if is_strict else None)]
    grammar = answer_grammar(Calls(tools, is_required=True), WIRE_FORMATS[name], made.special)
    assert made.accepts(grammar, text)
    assert parsed(name, list(text), {"f": schema}).calls == [("f", arguments)]


@formats
def test_required_call_cannot_be_replaced_by_text(name: str) -> None:
    made = vocabulary(name)
    grammar = answer_grammar(Calls([ToolGrammar("f")], is_required=True), WIRE_FORMATS[name], made.special)
    assert not made.accepts(grammar, written_content(name, "Hello"))
    assert not made.accepts(grammar, "")


@formats
def test_text_without_a_call_is_accepted_where_calls_are_optional(name: str) -> None:
    made = vocabulary(name)
    grammar = answer_grammar(Calls([ToolGrammar("f")], is_required=False), WIRE_FORMATS[name], made.special)
    assert made.accepts(grammar, written_content(name, "Hello there"))


@pytest.mark.parametrize("name", sorted(set(WIRE_FORMATS) - SINGLE))
def test_second_call_is_refused_without_parallel_calls(name: str) -> None:
    made = vocabulary(name)
    two = written_calls(name, [("f", {}), ("f", {})])
    for parallel in (True, False):
        body = Calls([ToolGrammar("f")], is_required=True, parallel=parallel)
        grammar = answer_grammar(body, WIRE_FORMATS[name], made.special)
        assert made.accepts(grammar, two) == parallel
        assert made.accepts(grammar, written_calls(name, [("f", {})]))


def compared(template: dict[str, Any], wire: WireFormat, text: str, tools: dict[str, Any]) -> None:
    """Check that our parser and that of transformers agree about a text."""
    message = parse_response(text, template, prefix="")
    parser = AnswerParser(wire, tools=tools)
    found = Parsed(
        piece for piece in [*(one for char in text for one in parser.push(char)), *parser.finish()]
    )
    assert found.reasoning == message.get("reasoning_content", "")
    assert found.content.strip() == message.get("content", "")
    listed = message.get("tool_calls", [])
    calls = [listed] if isinstance(listed, dict) else listed
    assert found.calls == [(call["function"]["name"], call["function"]["arguments"]) for call in calls]


@pytest.mark.parametrize("record", FORMATS, ids=lambda record: record.name)
@given(reasoning=words, calls=calls_of)
@settings(max_examples=15)
def test_transformers_parses_the_same(record: FormatRecord, reasoning: str, calls: list[Call]) -> None:
    if record.name in ("llama-3", "mistral", "mistral-list"):
        return  # transformers needs a mark that ends a call
    if record.name in ("qwen-xml", "glm"):
        calls = [(name, {key: str(value).strip() for key, value in one.items()}) for name, one in calls]
    if record.name in ("hermes", "glm"):  # where it ends a call at its mark, also within a string
        calls = [call for call in calls if "</tool_call>" not in str(call)]
    if record.name == "gemma":  # where its keys are of ASCII letters only
        calls = [("f", {"city": str(one)}) for _, one in calls]
    calls = usable(record.name, calls)
    text = written_reasoning(record.name, reasoning) + written_content(record.name, "Hello")
    text += written_calls(record.name, calls)
    template = {"start_anchor": "<|im_start|>assistant\n", **record.template}
    compared(template, WIRE_FORMATS[record.name], text, {})


@pytest.mark.parametrize(
    ("family", "name"), [("qwen3", "hermes"), ("qwen3_5", "qwen-xml"), ("gemma4", "gemma")]
)
def test_records_of_transformers_are_read(family: str, name: str) -> None:
    record = next(one for names, one in _RESPONSE_TEMPLATE_FALLBACKS.items() if family in names)
    wire = wire_format.read(family, record)
    calls = [("f", {"city": 'Köln "x"', "n": "3"}), ("get_weather", {"city": "日本"})]
    text = written_reasoning(name, "hmm") + "Hello" + written_calls(name, calls)
    compared(record, wire, text, {})
    made = vocabulary(name)
    body = Calls([ToolGrammar("f", schema_of(calls[0][1])), ToolGrammar("get_weather")], is_required=True)
    assert made.accepts(answer_grammar(body, wire, made.special), written_calls(name, calls).lstrip())
