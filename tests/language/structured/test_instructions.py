"""Tools for templates that ignore them."""

import copy
import json

import pytest

from fairlead.language.structured.instructions import explained
from fairlead.language.structured.parser import AnswerParser
from fairlead.language.structured.pieces import CallArguments, CallBegin
from language.structured.rendering import WIRE_FORMATS

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": "é"}'}}
QUESTION = {"role": "user", "content": "Hello"}


def test_tools_are_in_a_system_message() -> None:
    system, question = explained([QUESTION], [TOOL])
    assert system["role"] == "system"
    assert json.dumps(TOOL) in system["content"]
    assert question == QUESTION


def test_tools_follow_the_text_of_a_system_message() -> None:
    for content in ("Be brief.", [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}]):
        system, question = explained([{"role": "system", "content": content}, QUESTION], [TOOL])
        assert system["content"].startswith("Be")
        assert json.dumps(TOOL) in system["content"]
        assert question == QUESTION


def test_calls_and_results_become_text() -> None:
    messages = [
        QUESTION,
        {"role": "assistant", "content": "Wait.", "tool_calls": [CALL, CALL]},
        {"role": "tool", "content": "done", "tool_call_id": "1"},
        {"role": "tool", "content": [{"type": "text", "text": "done"}], "tool_call_id": "1"},
    ]
    before = copy.deepcopy(messages)
    _, _, calls, *results = explained(messages, [TOOL])
    assert messages == before
    assert calls["role"] == "assistant"
    assert calls["content"].startswith("Wait.\n<tool_call>")
    assert "tool_calls" not in calls
    assert results == [{"role": "user", "content": "<tool_response>\ndone\n</tool_response>"}] * 2


def test_calls_are_written_as_they_are_parsed() -> None:
    _, message = explained([{"role": "assistant", "content": None, "tool_calls": [CALL]}], [TOOL])
    parser = AnswerParser(WIRE_FORMATS["json"], tools={})
    assert parser.push(message["content"]) == [CallBegin(0, "f"), CallArguments(0, '{"a": "é"}')]


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        ({"arguments": "{broken"}, {"arguments": "{broken"}),
        ({"arguments": '["Bern"]'}, {"arguments": ["Bern"]}),
        ({"arguments": ""}, {}),
        ({"arguments": None}, {}),
        ({"arguments": "null"}, {}),
        ({}, {}),
        ({"arguments": {"a": 1}}, {"a": 1}),
    ],
)
def test_arguments_of_an_earlier_call_are_an_object(function, arguments) -> None:
    call = {"function": {"name": "f", **function}}
    (message,) = explained([{"role": "assistant", "content": "", "tool_calls": [call]}], [])
    written = message["content"].removeprefix("<tool_call>\n").removesuffix("\n</tool_call>")
    assert json.loads(written) == {"name": "f", "arguments": arguments}


def test_result_without_content_is_empty() -> None:
    (message,) = explained([{"role": "tool", "tool_call_id": "1"}], [])
    assert message == {"role": "user", "content": "<tool_response>\n\n</tool_response>"}
