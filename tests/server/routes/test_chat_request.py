"""Requests of other dialects as chat completions: everything that a chat can say, in its words."""

import json

import pytest

from fairlead.base.config import Limits
from fairlead.base.errors import InvalidRequest
from fairlead.dialects.chat_request import chat_request
from fairlead.dialects.dialect import GenerationRequest
from fairlead.dialects.fields import SamplingParameters
from fairlead.dialects.openai.chat import ChatDialect
from fairlead.language.structured.grammar import ChoiceAnswer, JsonAnswer, LarkAnswer, RegexAnswer
from fairlead.language.structured.request import AnswerSpec, ToolSpec

HELLO = [{"role": "user", "content": "hello"}]
SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}}


def tool(name, **more):
    return {"type": "function", "function": {"name": name, "parameters": SCHEMA, **more}}


def spec(*names, strict=(), **more):
    tools = tuple(ToolSpec(name, SCHEMA, name in strict, f"tools.{name}") for name in names)
    return AnswerSpec(tools=tools, **more)


def body_of(messages=HELLO, *, stream=False, user=None, **fields):
    """Return the body for a request, without the members that all bodies have here."""
    request = GenerationRequest(messages=messages, is_chat=True, **fields)
    body = json.loads(chat_request(request, model="m:high", stream=stream, user=user))
    assert body.pop("model") == "m:high"
    return body


def test_request_without_parameters_has_only_its_messages():
    assert body_of() == {"messages": HELLO}


def test_stream_includes_the_usage():
    assert body_of(stream=True) == {
        "messages": HELLO,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_parameters_have_their_names_in_chats():
    sampling = SamplingParameters(
        model="other",
        stream=True,
        user="not this one",
        temperature=0.0,
        top_p=0.5,
        top_k=7,
        min_p=0.1,
        seed=3,
        presence_penalty=0.5,
        logit_bias={5: 1.5},
        stop_token_ids=(1, 2),
        ignore_eos=False,
    )
    body = body_of(sampling=sampling, max_tokens=9, stop=("a", "b"), n=2, user="me", reasoning_tokens=100)
    assert body == {
        "messages": HELLO,
        "temperature": 0.0,
        "top_p": 0.5,
        "top_k": 7,
        "min_p": 0.1,
        "seed": 3,
        "presence_penalty": 0.5,
        "logit_bias": {"5": 1.5},
        "stop_token_ids": [1, 2],
        "ignore_eos": False,
        "max_tokens": 9,
        "stop": ["a", "b"],
        "n": 2,
        "user": "me",
        "thinking_token_budget": 100,
    }


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"reasoning_effort": "low"}, {"reasoning_effort": "low"}),
        ({"enable_thinking": False}, {"chat_template_kwargs": {"enable_thinking": False}}),
        (
            {"reasoning_effort": "none", "enable_thinking": False},
            {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": False}},
        ),
        ({}, {}),
    ],
)
def test_template_variables_are_sent(variables, expected):
    before = dict(variables)
    assert body_of(template_variables=variables) == {"messages": HELLO, **expected}
    assert variables == before


def test_tools_are_sent_with_the_choice():
    tools = [tool("f", description="It is f."), tool("g")]
    body = body_of(tools=tools, answer=spec("f", "g", strict="g", parallel=False))
    assert body == {
        "messages": HELLO,
        "tools": [tools[0], tool("g", strict=True)],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
    }


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"choice": "required"}, "required"),
        ({"named": "g"}, {"type": "function", "function": {"name": "g"}}),
        ({"choice": "required", "named": "g"}, {"type": "function", "function": {"name": "g"}}),
    ],
)
def test_choice_of_a_tool_is_sent(choice, expected):
    assert body_of(tools=[tool("f"), tool("g")], answer=spec("f", "g", **choice))["tool_choice"] == expected


def test_only_tools_that_may_be_called_are_sent():
    body = body_of(tools=[tool("f"), tool("g")], answer=spec("g"))
    assert body["tools"] == [tool("g")]
    assert set(body_of(tools=[tool("f")], answer=None)) == {"messages"}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"type": "object"}, {"type": "json_object"}),
        (
            SCHEMA,
            {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}},
        ),
    ],
)
def test_form_of_the_answer_is_sent(schema, expected):
    assert body_of(answer=AnswerSpec(answer=JsonAnswer(schema)))["response_format"] == expected


def test_calls_and_results_are_sent_as_clients_write_them():
    calls = [
        {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}},
        {"id": "b", "type": "function", "function": {"name": "g", "arguments": "{}"}},
    ]
    messages = [
        *HELLO,
        {
            "role": "assistant",
            "reasoning_content": "Hm.",
            "reasoning": "Hm.",
            "content": "",
            "tool_calls": calls,
        },
        {"role": "tool", "content": "2", "tool_call_id": "b"},
        {"role": "tool", "content": [{"type": "text", "text": "1"}], "tool_call_id": "a"},
    ]
    assert body_of(messages)["messages"] == messages


def test_calls_without_ids_get_some():
    calls = [{"function": {"name": "f", "arguments": {"x": 1}}}, {"function": {"name": "g"}}]
    messages = [
        {"role": "assistant", "tool_calls": calls},
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": "2"},
        {"role": "tool", "content": "of no call"},
        {"role": "assistant", "tool_calls": calls[:1]},
        {"role": "tool", "content": "3"},
    ]
    before = json.dumps(messages)
    written = body_of(messages)["messages"]
    assert written[0]["tool_calls"] == [
        {"id": "call_0_0", "type": "function", "function": {"name": "f", "arguments": '{"x":1}'}},
        {"id": "call_0_1", "type": "function", "function": {"name": "g", "arguments": "{}"}},
    ]
    ids = [message["tool_call_id"] for message in written if message["role"] == "tool"]
    assert ids == ["call_0_0", "call_0_1", "call_3", "call_4_0"]
    assert json.dumps(messages) == before


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": None, "prompts": ["hello"]},
        {"messages": None, "prompts": ["hello"], "embed": True},
        {"messages": HELLO, "logprobs": 0},
        {"messages": HELLO, "prompt_logprobs": 0},
        *(
            {"messages": HELLO, "answer": AnswerSpec(answer=answer)}
            for answer in (RegexAnswer("a"), ChoiceAnswer(["a"]), LarkAnswer('start: "a"'))
        ),
    ],
)
def test_what_a_chat_cannot_say_is_not_translated(fields):
    assert chat_request(GenerationRequest(**fields), model="m", stream=False) is None


def test_request_that_is_nested_too_deeply_is_refused():
    nested: list = []
    for _ in range(100_000):
        nested = [nested]
    request = GenerationRequest(messages=HELLO, template_variables={"x": nested})
    with pytest.raises(InvalidRequest, match="nested too deeply"):
        chat_request(request, model="m", stream=False)


def test_chat_is_translated_to_an_equal_chat():
    chat = {
        "model": "m",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "hello"}]},
        ],
        "tools": [tool("f", strict=True)],
        "tool_choice": "required",
        "temperature": 0.5,
        "max_tokens": 5,
        "stop": ["x"],
        "reasoning_effort": "high",
    }
    request = ChatDialect().decode(json.dumps(chat).encode(), Limits())
    assert json.loads(chat_request(request, model="m", stream=False)) == chat
