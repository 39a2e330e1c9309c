"""The wire formats that are found for well-known model families, and a family that is added."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from fairlead.base.wire_formats import formats, wire_format
from fairlead.base.wire_formats.formats import FormatRecord
from fairlead.language.structured.grammar import Calls, ToolGrammar, answer_grammar
from fairlead.language.structured.instructions import explained
from fairlead.language.structured.parser import AnswerParser
from fairlead.language.structured.pieces import CallArguments, CallBegin
from fairlead.language.structured.probing import detect, reasoning_state
from fairlead.language.text.chat_template import ChatTemplate
from language.structured.families import FAMILIES
from language.structured.rendering import vocabulary
from language.text.published_templates import COUNT, FOLDER

families = pytest.mark.parametrize("family", FAMILIES)
QUESTION = {"role": "user", "content": "Hello"}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
ARGUMENTS = {"city": 'Köln "x"', "place": {"n": 1, "deep": "y"}}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "place": {"type": "object"}}}
CALL = {
    "id": "abcdefghi",
    "type": "function",
    "function": {"name": "get_weather", "arguments": json.dumps(ARGUMENTS)},
}
TOKENS = {"bos_token": "<bos>", "eos_token": "</s>"}


def template_of(family: str) -> ChatTemplate:
    return ChatTemplate(FAMILIES[family].template, special_tokens=TOKENS)


@families
def test_format_of_a_family_is_found(family: str) -> None:
    template, expected = template_of(family), FAMILIES[family]
    found = detect(template.render, template.literals)
    assert found.wire_format.name == expected.format
    assert found.explains_tools == expected.explains_tools
    assert (found.wire_format.reasoning is not None) == expected.has_reasoning


@families
def test_state_of_the_reasoning_is_found_at_the_end_of_a_prompt(family: str) -> None:
    template, expected = template_of(family), FAMILIES[family]
    found = detect(template.render, template.literals).wire_format
    for variables, state in expected.states:
        prompt = template.render([QUESTION], tools=[TOOL], **variables)
        assert reasoning_state(found.reasoning, prompt[-60:]) == state, variables


@families
def test_call_as_the_template_renders_it_is_parsed_back(family: str) -> None:
    template, expected = template_of(family), FAMILIES[family]
    if expected.explains_tools:
        return
    message = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    prompt = template.render([QUESTION], tools=[TOOL], add_generation_prompt=False)
    rendered = template.render([QUESTION, message], tools=[TOOL], add_generation_prompt=False)
    assert rendered.startswith(prompt)
    found = detect(template.render, template.literals).wire_format
    parser = AnswerParser(found, tools={"get_weather": SCHEMA})
    pieces = [piece for one in rendered[len(prompt) :] for piece in parser.push(one)] + parser.finish()
    assert [piece for piece in pieces if isinstance(piece, CallBegin)] == [CallBegin(0, "get_weather")]
    written = "".join(piece.text for piece in pieces if isinstance(piece, CallArguments))
    assert json.loads(written) == ARGUMENTS


FULL_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather.",
        "parameters": {**SCHEMA, "required": []},
    },
}
PUBLISHED = sorted(FOLDER.glob("*.jinja"))


@pytest.mark.parametrize("path", PUBLISHED or [None], ids=lambda path: path.stem if path else "none")
def test_who_explains_a_format_parses_it(path: Path | None) -> None:
    """Either the template does, which writes calls so that they are read back, or the system message."""
    if path is None:
        pytest.skip(
            f"{COUNT} templates are not here; tests/language/text/published_templates.py fetches them"
        )
    template = ChatTemplate(path.read_text(encoding="utf-8"), special_tokens=TOKENS)
    found = detect(template.render, template.literals)
    if found.explains_tools:
        system, *_ = explained([QUESTION], [FULL_TOOL])
        (text,) = re.findall("<tool_call>\n.*?\n</tool_call>", system["content"], re.DOTALL)
        text = text.replace("function name", "get_weather")
    else:
        message = {"role": "assistant", "content": "", "tool_calls": [CALL]}
        before = template.render([QUESTION], tools=[FULL_TOOL], add_generation_prompt=False)
        text = template.render([QUESTION, message], tools=[FULL_TOOL], add_generation_prompt=False)
        assert "get_weather" in before, "nobody explains the tools"
    parser = AnswerParser(found.wire_format, tools={"get_weather": SCHEMA})
    names = [one.name for one in parser.push(text) + parser.finish() if isinstance(one, CallBegin)]
    assert names[-1:] == ["get_weather"]


def test_reasoning_in_a_prompt_is_found_behind_blanks() -> None:
    marks = wire_format.read("hermes", formats.FORMATS[2].template).reasoning
    assert reasoning_state(marks, "assistant\n<think>\n\n") == "opened"
    assert reasoning_state(marks, "Explain <think> and </think>.\nassistant\n") == "not opened"


def test_new_family_is_one_record(monkeypatch: pytest.MonkeyPatch) -> None:
    record = FormatRecord(
        "functionary",
        {
            "fields": {
                "tool_calls": {
                    "open_pattern": r"\s*>>>(?P<name>[\w.]+)\n",
                    "close": "<<<",
                    "repeats": True,
                    "content": "json",
                    "transform": {"name": "{name}", "arguments": "{content}"},
                },
                "content": {},
            }
        },
        (">>>NAME\n", "KEY", "<<<"),
    )
    monkeypatch.setattr("fairlead.language.structured.probing.FORMATS", (*formats.FORMATS, record))
    template = ChatTemplate(
        "{{ tools | tojson if tools }}{% for m in messages %}{{ m.role }}: {{ m.content }}"
        "{% for call in m.tool_calls or [] %}>>>{{ call.function.name + '\\n' }}"
        "{{ call.function.arguments | tojson }}<<<{% endfor %}{% endfor %}"
    )
    found = detect(template.render, template.literals).wire_format
    assert found.name == "functionary"
    grammar = answer_grammar(Calls([ToolGrammar("f", SCHEMA)], is_required=False), found)
    assert vocabulary("hermes").accepts(grammar, 'One moment. >>>f\n{"city": "x"}<<<')
    assert not vocabulary("hermes").accepts(grammar, '>>>f\n{"city": 5}<<<')
    parser = AnswerParser(found, tools={})
    assert parser.push('>>>f\n{"city": "x"}<<<') == [CallBegin(0, "f"), CallArguments(0, '{"city": "x"}')]


@pytest.mark.parametrize(
    ("calls", "reason"),
    [
        ({"content": "json"}, "open or open_pattern"),
        ({"open": "", "content": "json"}, "must not be empty"),
        ({"open": ["<a>", ""], "content": "json"}, "must not be empty"),
        ({"open_pattern": r"\s*(?:x)?", "content": "json"}, "must not be empty"),
        ({"open": "<a>", "content": "kv-lines"}, "content kv-lines"),
        ({"open_pattern": "(?!a)b", "content": "json"}, "a group of this kind"),
        ({"open": "<a>", "content": "json", "transform": "{other}"}, "transform"),
        (
            {"open": "<a>", "content": "json", "transform": {"name": "{name}", "arguments": "{content}"}},
            "name",
        ),
        (
            {
                "open": "<a>",
                "content": "json",
                "transform": {"name": "{content.f.n}", "arguments": "{content.a}"},
            },
            "transform",
        ),
        ({"open": "<a>", "content": "json", "content_args": {"unquoted_keys": True}}, "transform"),
        (
            {
                "open_pattern": "<(?P<name>a)>",
                "content": "xml-inline",
                "transform": {"name": "{name}", "arguments": "{content}"},
            },
            "tag_pattern",
        ),
        ({"open": "<a>", "content": "json", "content_args": {"string_delims": "x"}}, "string_delims"),
    ],
)
def test_record_that_is_not_supported_is_refused(calls: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        wire_format.read("x", {"fields": {"tool_calls": calls, "content": {}}})
