"""The parser of answers: what is returned does not depend on how a text is cut, and takes linear time."""

import json
import random
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from fairlead.language import structured
from fairlead.language.structured.mark import MAX_BLANKS, MAX_CHARS
from fairlead.language.structured.parser import AnswerParser
from fairlead.language.structured.pieces import CallArguments, CallBegin, Content, Piece, Reasoning
from language.structured.rendering import WIRE_FORMATS, written_calls, written_reasoning

SOURCES = str(Path(str(structured.__file__)).parent)
formats = pytest.mark.parametrize("name", sorted(WIRE_FORMATS))
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


def pieces_of(name: str, texts: list[str], tools: Any = None, *, in_reasoning: bool = False) -> list[Piece]:
    parser = AnswerParser(WIRE_FORMATS[name], tools=tools or {}, in_reasoning=in_reasoning)
    return [piece for text in texts for piece in parser.push(text)] + parser.finish()


def merged(pieces: list[Piece]) -> list[Any]:
    """Return the pieces with adjacent texts of one kind joined."""
    found: list[Any] = []
    for piece in pieces:
        if found and type(found[-1]) is type(piece) and not isinstance(piece, CallBegin):
            found[-1] = found[-1]._replace(text=found[-1].text + piece.text)
        else:
            found.append(piece)
    return [piece for piece in found if isinstance(piece, CallBegin) or piece.text]


def cuts(text: str) -> list[list[str]]:
    """Return several ways to cut a text: not at all, everywhere, once at each place, and by chance."""
    ways = [[text], list(text), *([text[:at], text[at:]] for at in range(1, len(text)))]
    for seed in range(10):
        chance, rest, way = random.Random(seed), text, []
        while rest:
            length = chance.randint(1, 9)
            way.append(rest[:length])
            rest = rest[length:]
        ways.append(way)
    return ways


def parsed(name: str, text: str, tools: Any = None) -> list[Any]:
    """Return the pieces of a text, which must be the same however it is cut."""
    expected = merged(pieces_of(name, [text], tools))
    for way in cuts(text):
        assert merged(pieces_of(name, way, tools)) == expected, way
    return expected


def test_text_before_between_and_after_calls_is_content() -> None:
    found = parsed("hermes", f"one\n{CALL}\n\n{CALL} two")
    arguments = '{"a": 1}'
    assert found == [
        Content("one"),
        *(CallBegin(0, "f"), CallArguments(0, arguments)),
        *(CallBegin(1, "f"), CallArguments(1, arguments)),
        Content(" two"),
    ]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", "<tool_call> is a mark"),
        ("hermes", "a <tool_call>\n[1, 2]</tool_call>"),
        ("hermes", '<tool_call>{"name" "f"}'),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": 5, "arguments": {}}'),
        ("hermes", '<tool_call>{"name": "f'),
        ("hermes", '<tool_call>{"arguments": {"a": 1}, "na'),
        ("mistral", "[TOOL_CALLS]f[ARGS] none"),
        ("mistral-list", '[TOOL_CALLS] ["f"]'),
        ("gemma", "<|tool_call>call:f(1)"),
        ("llama-3", '{"name": "f'),
        ("llama-3", '{"name": {}} {"name": 1}'),
        ("llama-3", 'A { and {"title": 1}; {"n'),
        ("harmony", "<|channel|>other<|message|>"),
    ],
)
def test_text_that_only_begins_like_a_call_is_content(name: str, text: str) -> None:
    assert parsed(name, text) == [Content(text)]


def test_call_after_what_only_begins_like_one_is_found() -> None:
    found = parsed("hermes", f"<tool_call> no {CALL}")
    assert found == [Content("<tool_call> no"), CallBegin(0, "f"), CallArguments(0, '{"a": 1}')]
    found = parsed("llama-3", '{"name": 1} {"name": "f", "parameters": {}}')
    assert found == [Content('{"name": 1}'), CallBegin(0, "f"), CallArguments(0, "{}")]


def test_fault_after_the_name_leaves_what_was_returned() -> None:
    found = parsed("hermes", '<tool_call>{"name": "f", "arguments": {}, oops}</tool_call>')
    assert found == [CallBegin(0, "f"), CallArguments(0, "{}"), Content("oops}</tool_call>")]
    found = parsed("mistral-list", '[TOOL_CALLS][{"name": "f", "arguments": {}}; x')
    assert found == [CallBegin(0, "f"), CallArguments(0, "{}"), Content("; x")]


@pytest.mark.parametrize(
    ("name", "text", "arguments"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "Par', '{"a": "Par'),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"a": [1, 2', '{"a": [1, 2'),
        ("gemma", '<|tool_call>call:f{a:<|"|>Par<|"', '{"a":"Par'),
        ("qwen-xml", "<tool_call>\n<function=f>\n<parameter=a>\nPar</para", '{"a": "Par</para'),
        ("qwen-xml", "<tool_call>\n<function=f>\n", "{}"),
    ],
)
def test_unfinished_call_at_the_end_returns_what_was_read(name: str, text: str, arguments: str) -> None:
    assert parsed(name, text) == [CallBegin(0, "f"), CallArguments(0, arguments)]


def test_arguments_before_the_name_are_returned_after_it() -> None:
    found = parsed("hermes", '<tool_call>{"arguments": {"a": 1}, "id": "x", "name": "f"}</tool_call>')
    assert found == [CallBegin(0, "f"), CallArguments(0, '{"a": 1}')]


@formats
def test_call_without_arguments_has_an_empty_object(name: str) -> None:
    assert parsed(name, written_calls(name, [("f", {})])) == [CallBegin(0, "f"), CallArguments(0, "{}")]


def test_missing_arguments_are_an_empty_object() -> None:
    assert parsed("hermes", '<tool_call>{"name": "f"}</tool_call>') == [
        CallBegin(0, "f"),
        CallArguments(0, "{}"),
    ]


def test_calls_are_text_if_they_are_not_parsed() -> None:
    parser = AnswerParser(WIRE_FORMATS["hermes"], tools=None)
    assert merged(parser.push(CALL) + parser.finish()) == [Content(CALL)]


def test_calls_are_counted_from_their_beginning() -> None:
    parser = AnswerParser(WIRE_FORMATS["hermes"], tools={})
    parser.push('<tool_call>{"na')
    assert parser.calls == 0
    parser.push('me": "f"')
    assert parser.calls == 1
    parser.push(', "arguments": {}}</tool_call>')
    assert parser.calls == 1


@formats
def test_reasoning_that_the_prompt_opened_ends_at_its_mark(name: str) -> None:
    marks = WIRE_FORMATS[name].reasoning
    if marks is None:
        return
    _, after = written_reasoning(name, "hmm").split("hmm")
    found = merged(pieces_of(name, list(f"\nhmm{after}"), in_reasoning=True))
    assert found == [Reasoning("hmm")]
    parser = AnswerParser(WIRE_FORMATS[name], tools=None, in_reasoning=True)
    assert parser.is_reasoning
    parser.push(f"hmm{after}x")
    assert not parser.is_reasoning


def test_reasoning_without_an_end_is_reasoning() -> None:
    assert parsed("hermes", "<think>\nhmm </think") == [Reasoning("hmm </think")]


def test_mark_of_reasoning_within_the_answer_is_text() -> None:
    found = parsed("hermes", "<think>a</think>Write <think> and </think>.")
    assert found == [Reasoning("a"), Content("Write <think> and </think>.")]


REASONING_FIRST = [name for name, one in WIRE_FORMATS.items() if one.reasoning and one.content is None]


@pytest.mark.parametrize("name", REASONING_FIRST)
@pytest.mark.parametrize("before", ["Hello ", "\n.", "<"])
def test_reasoning_after_text_is_text_also_when_both_come_in_one_piece(name: str, before: str) -> None:
    """Otherwise the marks would vanish from an answer about them. `parsed` pushes both in every way."""
    text = f"{before}{written_reasoning(name, 'x')}bye"
    assert parsed(name, text) == [Content(text)]


def test_harmony_has_reasoning_between_its_texts() -> None:
    text = (
        "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>commentary<|message|>b<|end|>"
        "<|start|>assistant<|channel|>analysis<|message|>c<|end|>"
        "<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{}"
    )
    assert parsed("harmony", text) == [
        *(Reasoning("a"), Content("b"), Reasoning("c")),
        *(CallBegin(0, "f"), CallArguments(0, "{}")),
    ]


@pytest.mark.parametrize(
    ("written", "schema", "value"),
    [
        ("5", {"type": "integer"}, 5),
        ("5", {"type": "string"}, "5"),
        ("5", {"type": ["string", "integer"]}, 5),
        ("5", {"type": ["string", "number"]}, 5),
        ("5", {"type": ["string", "null"]}, "5"),
        ("null", {"anyOf": [{"type": "string"}, {"type": "null"}]}, None),
        ("None", {"anyOf": [{"type": "string"}, {"type": "null"}]}, None),
        ("null", {"type": "string"}, "null"),
        ("True", {"type": "boolean"}, True),
        ("maybe", {"type": "boolean"}, "maybe"),
        ("red", {"$ref": "#/$defs/colour"}, "red"),
        ("1", {"enum": ["1", 1]}, "1"),
        ('{"b": 1}', {"properties": {"b": {}}}, {"b": 1}),
        ("[1]", {"$ref": "#/$defs/missing"}, "[1]"),
        ("[1]", {"$ref": "#/$defs/loop"}, "[1]"),
        ("[1]", {"anyOf": 5, "type": 7, "enum": "x", "$ref": []}, "[1]"),
        ("[1]", {"anyOf": [5, None, {"type": [{}]}]}, "[1]"),
        ("[1]", True, "[1]"),
        ("[1]", {"$ref": "#/$defs/wide"}, "[1]"),
        ("[1]", {"allOf": [{"$ref": "#/$defs/wider"}, {}]}, "[1]"),
    ],
)
def test_value_in_a_tag_has_the_type_of_its_schema(written: str, schema: Any, value: Any) -> None:
    tools = {
        "f": {
            "properties": {"a": schema},
            "$defs": {
                "colour": {"type": "string", "enum": ["red"]},
                "loop": {"$ref": "#/$defs/loop"},
                "wide": {"anyOf": [{"$ref": "#/$defs/wide"}] * 1000},
                "wider": {"anyOf": [{"anyOf": [{"anyOf": [{"type": "null"}] * 1000}] * 1000}] * 1000},
            },
        }
    }
    text = f"<tool_call>\n<function=f>\n<parameter=a>\n{written}\n</parameter>\n</function>\n</tool_call>"
    begin, arguments = parsed("qwen-xml", text, tools)
    assert begin == CallBegin(0, "f")
    assert json.loads(arguments.text) == {"a": value}


@pytest.mark.parametrize(
    "schema", [None, True, False, [], 5, {"properties": 5}, {"required": 5}, {"$ref": "#"}]
)
def test_schema_that_is_none_does_not_stop_the_parser(schema: Any) -> None:
    text = written_calls("glm", [("f", {"a": "b"})])
    assert parsed("glm", text, {"f": schema}) == [CallBegin(0, "f"), CallArguments(0, '{"a": "b"}')]


@pytest.mark.parametrize("value", ["<", '<|"', '<|"|', "a{b", "k1", "12", 'say "x" \\ \n', "a:b,c"])
def test_strings_of_a_dialect_are_translated(value: str) -> None:
    arguments = {"key with space": value, "b": [value, {"c": None, "d": -1.5e3}], "e": True}
    begin, found = parsed("gemma", written_calls("gemma", [("f", arguments)]))
    assert begin == CallBegin(0, "f")
    assert json.loads(found.text) == arguments


@pytest.mark.parametrize("text", ["{a:nonsense}", "{a:01}", "{a:[1}", "{a:(}", '{a:"x"}'])
def test_faulty_dialect_is_content_from_its_fault_on(text: str) -> None:
    begin, *_, content = parsed("gemma", f"<|tool_call>call:f{text}")
    assert begin == CallBegin(0, "f")
    assert isinstance(content, Content)
    assert text.endswith(content.text)


def test_blanks_before_a_mark_are_dropped_up_to_a_limit() -> None:
    blanks = "\n" * (MAX_BLANKS + 10)
    found = parsed("hermes", f"a{blanks}{CALL}")
    assert found[0] == Content("a" + "\n" * 10)


def test_mark_that_never_ends_is_content() -> None:
    text = f"<tool_call>\n<function={'x' * 3 * MAX_CHARS}"
    parser = AnswerParser(WIRE_FORMATS["qwen-xml"], tools={})
    shown = merged([piece for at in range(0, len(text), 7) for piece in parser.push(text[at : at + 7])])
    assert len(shown[0].text) > MAX_CHARS
    assert merged([*shown, *parser.finish()]) == [Content(text)]


def _parse_by_characters(name: str, text: str) -> None:
    parser = AnswerParser(WIRE_FORMATS[name], tools={"f": {"properties": {"n": {"type": "array"}}}})
    for character in text:
        parser.push(character)
    parser.finish()


def _seconds(name: str, text: str) -> float:
    begin = time.process_time()
    _parse_by_characters(name, text)
    return time.process_time() - begin


def _characters_processed(name: str, text: str) -> int:
    """Return how many characters the parser's functions are given, or keep in their objects, at each call."""
    count = 0

    def profile(frame: FrameType, event: str, _argument: object) -> None:
        nonlocal count
        if event == "call" and frame.f_code.co_filename.startswith(SOURCES):
            fields = getattr(frame.f_locals.get("self"), "__dict__", {})
            values = (*frame.f_locals.values(), *fields.values())
            count += sum(len(value) for value in values if isinstance(value, str))

    sys.setprofile(profile)
    try:
        _parse_by_characters(name, text)
    finally:
        sys.setprofile(None)
    return count


HOSTILE = {
    "string": lambda name, size: written_calls(name, [("f", {"a": "x" * size})]),
    "line breaks": lambda name, size: written_calls(name, [("f", {"a": "\n" * size})]),
    "numbers": lambda name, size: written_calls(name, [("f", {"n": [1] * (size // 3)})]),
    "unfinished": lambda name, size: written_calls(name, [("f", {"a": "x" * size})])[: size // 2],
    "blanks": lambda name, size: " " * size,
    "marks": lambda name, size: "<tool_call>" * (size // 11),
    "beginnings": lambda name, size: '{"name": ' * (size // 9),
    "nested": lambda name, size: '<tool_call>{"a":[' * (size // 17) + "]}" * (size // 17),
    "name": lambda name, size: "<tool_call>" + "x" * size,
    "function": lambda name, size: written_calls(name, [("x" * size, {})])[:size],
    "key": lambda name, size: '<tool_call>{"' + "x" * size,
    "early arguments": lambda name, size: '<tool_call>{"arguments": "' + "x" * size,
    "reasoning": lambda name, size: written_reasoning(name, " " * size),
}


def hostile(test: Any) -> Any:
    """Run a test for each hostile text in each of these formats."""
    test = pytest.mark.parametrize("kind", HOSTILE)(test)
    names = ["hermes", "qwen-xml", "gemma", "mistral-list", "deepseek", "llama-3"]
    return pytest.mark.parametrize("name", names)(test)


@hostile
def test_work_is_linear_in_the_length_however_small_the_pieces(
    monkeypatch: pytest.MonkeyPatch, name: str, kind: str
) -> None:
    # With low bounds, short texts are longer than what may be kept of them.
    for bound in ("mark.MAX_CHARS", "parser.MAX_CHARS", "dialect_parser._MAX_KEY_CHARS"):
        monkeypatch.setattr(f"fairlead.language.structured.{bound}", 32)
    short, long = (HOSTILE[kind](name, size) for size in (200, 400))
    if not short:
        return
    # Quadratic work would be four times as much.
    assert _characters_processed(name, long) < 3 * _characters_processed(name, short)


@pytest.mark.nightly  # it measures time, which other work on the machine may stretch
@hostile
def test_time_is_linear_in_the_length_however_small_the_pieces(name: str, kind: str) -> None:
    short, long = (HOSTILE[kind](name, size) for size in (1_000, 8_000))
    if not short:
        return
    _seconds(name, short)  # compiles the marks
    # Quadratic time would be 64 times as long.
    assert _seconds(name, long) < 24 * max(min(_seconds(name, short) for _ in range(3)), 0.01)


def test_long_argument_is_returned_while_it_arrives() -> None:
    arguments = {"a": "x\n" * 25_000}
    text = written_calls("hermes", [("f", arguments)])
    parser = AnswerParser(WIRE_FORMATS["hermes"], tools={})
    written = [piece.text for one in text for piece in parser.push(one) if isinstance(piece, CallArguments)]
    assert len(written) > 50_000
    assert json.loads("".join(written)) == arguments
