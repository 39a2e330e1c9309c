"""Invalid bodies of Anthropic's Messages: each is a 400 in its format that names the field."""

import json
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlead.base.config import Limits
from fairlead.base.errors import InvalidRequest
from fairlead.dialects.anthropic.requests import message_request
from server.routes.message_events import PATH
from server.routes.schema_values import ANYTHING

HELLO = {"role": "user", "content": "hello"}
BODY = {"max_tokens": 10, "messages": [HELLO]}
SCHEMA = {"type": "object"}
TOOL = {"name": "f", "input_schema": SCHEMA}
# Values of every kind of JSON.
KINDS = [None, True, 5, 0.5, "a", [], ["a"], {}, {"a": 1}]
# By field: which of these values it accepts.
FIELDS = {
    "model": [None, "a"],
    "max_tokens": [5],
    "messages": [],
    "system": [None, "a", []],
    "stream": [None, True],
    "temperature": [None, 0.5],
    "top_p": [None, 0.5],
    "top_k": [None, 5],
    "min_p": [None, 0.5],
    "seed": [None, 5],
    "stop_sequences": [None, [], ["a"]],
    "tools": [None, []],
    "tool_choice": [None],
    "thinking": [None],
    "output_config": [None, {}, {"a": 1}],
    "output_format": [None],
    "metadata": [None, {}, {"a": 1}],
    "user": [None, "a"],
    "chat_template_kwargs": [None, {}, {"a": 1}],
    "priority": [None, 5],
    "container": [None],
    "mcp_servers": [None, []],
    "response_format": [None],
    "structured_outputs": [None],
    "prompt_logprobs": [None],
    "logit_bias": [None, {}],
    "stop_token_ids": [None, []],
}
# By the path of a member: the value around it, and what it accepts.
MEMBERS = {
    "messages[0].role": (lambda x: {"messages": [{"role": x, "content": "a"}]}, []),
    "messages[0].content": (lambda x: {"messages": [{"role": "user", "content": x}]}, ["a", []]),
    "messages[0].content[0].type": (
        lambda x: {"messages": [{"role": "user", "content": [{"type": x, "text": "a"}]}]},
        [],
    ),
    "messages[0].content[0].text": (
        lambda x: {"messages": [{"role": "user", "content": [{"type": "text", "text": x}]}]},
        ["a"],
    ),
    "messages[0].content[0].thinking": (
        lambda x: {"messages": [answer({"type": "thinking", "thinking": x}), HELLO]},
        ["a"],
    ),
    "messages[0].content[0].signature": (
        lambda x: {"messages": [answer({"type": "thinking", "thinking": "a", "signature": x}), HELLO]},
        [None, "a"],
    ),
    "messages[0].content[0].data": (
        lambda x: {"messages": [answer({"type": "redacted_thinking", "data": x}), HELLO]},
        [None, "a"],
    ),
    "messages[0].content[0].id": (lambda x: {"messages": [answer(used(id=x)), HELLO]}, ["a"]),
    "messages[0].content[0].name": (lambda x: {"messages": [answer(used(name=x)), HELLO]}, ["a"]),
    "messages[0].content[0].input": (
        lambda x: {"messages": [answer(used(input=x)), HELLO]},
        [{}, {"a": 1}],
    ),
    "messages[0].content[0].tool_use_id": (lambda x: {"messages": [result(tool_use_id=x)]}, ["a"]),
    "messages[0].content[0].content": (lambda x: {"messages": [result(content=x)]}, [None, "a", []]),
    "messages[0].content[0].is_error": (lambda x: {"messages": [result(is_error=x)]}, [None, True]),
    "messages[0].content[0].content[0].type": (
        lambda x: {"messages": [result(content=[{"type": x, "text": "a"}])]},
        [],
    ),
    "messages[0].content[0].content[0].tool_name": (
        lambda x: {"messages": [result(content=[{"type": "tool_reference", "tool_name": x}])]},
        ["a"],
    ),
    "messages[0].clear_at": (
        lambda x: {"messages": [{"role": "system", "content": "a", "clear_at": x}, HELLO]},
        [None],
    ),
    "system[0].text": (lambda x: {"system": [{"type": "text", "text": x}]}, ["a"]),
    "system[0].type": (lambda x: {"system": [{"type": x, "text": "a"}]}, []),
    "tools[0].name": (lambda x: {"tools": [TOOL | {"name": x}]}, ["a"]),
    "tools[0].type": (lambda x: {"tools": [TOOL | {"type": x}]}, [None]),
    "tools[0].description": (lambda x: {"tools": [TOOL | {"description": x}]}, [None, "a"]),
    "tools[0].input_schema": (lambda x: {"tools": [TOOL | {"input_schema": x}]}, [{}, {"a": 1}]),
    "tools[0].strict": (lambda x: {"tools": [TOOL | {"strict": x}]}, [None, True]),
    "tools[0].defer_loading": (lambda x: {"tools": [TOOL | {"defer_loading": x}]}, [None, True]),
    "tool_choice.type": (lambda x: {"tools": [TOOL], "tool_choice": {"type": x}}, []),
    "tool_choice.name": (lambda x: {"tools": [TOOL], "tool_choice": {"type": "tool", "name": x}}, []),
    "tool_choice.disable_parallel_tool_use": (
        lambda x: {"tools": [TOOL], "tool_choice": {"type": "auto", "disable_parallel_tool_use": x}},
        [None, True],
    ),
    "thinking.type": (lambda x: {"thinking": {"type": x}}, []),
    "thinking.budget_tokens": (lambda x: {"thinking": {"type": "enabled", "budget_tokens": x}}, [5]),
    "thinking.display": (lambda x: {"thinking": {"type": "adaptive", "display": x}}, [None]),
    "output_config.effort": (lambda x: {"output_config": {"effort": x}}, [None, "a"]),
    "output_config.format": (lambda x: {"output_config": {"format": x}}, [None]),
    "output_config.format.type": (lambda x: {"output_config": {"format": {"type": x, "schema": {}}}}, []),
    "output_config.format.schema": (
        lambda x: {"output_config": {"format": {"type": "json_schema", "schema": x}}},
        [True, {}, {"a": 1}],
    ),
    "output_format.schema": (
        lambda x: {"output_format": {"type": "json_schema", "schema": x}},
        [True, {}, {"a": 1}],
    ),
    "metadata.user_id": (lambda x: {"metadata": {"user_id": x}}, [None, "a"]),
}


def answer(block):
    return {"role": "assistant", "content": [block]}


def used(**members):
    return {"type": "tool_use", "id": "a", "name": "f", "input": {}} | members


def result(**members):
    return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a"} | members]}


async def refused(client, fields):
    reply = await client.post(PATH, json.dumps(BODY | fields).encode())
    assert reply.status == 400, (fields, reply.body)
    assert client.gateway.jobs == []
    assert set(reply.json) == {"type", "error"}
    assert reply.error["type"] == "invalid_request_error"
    assert reply.error["message"].startswith(reply.error["param"])
    return reply.error


def is_within(param, field):
    """Return whether a path is that of a field, or of one of its members."""
    return param == field or param.startswith((f"{field}.", f"{field}["))


@pytest.mark.parametrize("field", FIELDS)
async def test_field_of_a_wrong_type_is_refused_by_name(client, field):
    wrong = [value for value in KINDS if not any(is_same(value, right) for right in FIELDS[field])]
    for value in wrong:
        error = await refused(client, {field: value})
        assert is_within(error["param"], field)


@pytest.mark.parametrize("path", MEMBERS)
async def test_member_of_a_wrong_type_is_refused_by_its_path(client, path):
    make, right = MEMBERS[path]
    for value in [value for value in KINDS if not any(is_same(value, one) for one in right)]:
        error = await refused(client, make(value))
        assert is_within(error["param"], path)


def is_same(one, other):
    return type(one) is type(other) and one == other


@pytest.mark.parametrize("path", MEMBERS)
async def test_member_of_the_right_type_is_accepted(client, path):
    make, right = MEMBERS[path]
    for value in right:
        reply = await client.post(PATH, BODY | make(value))
        assert reply.status == 200, reply.body


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "a"}}
OUT_OF_RANGE = [
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens"),
    ({"tools": [TOOL, TOOL]}, "tools[1].name"),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
    ({"tools": [{"input_schema": {}}]}, "tools[0].name"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "code_execution_20250825", "name": "code"}]}, "tools[0].type"),
    ({"tools": [{"type": "web_search_20250305", "name": "search"}]}, "tools[0].type"),
    ({"tools": [TOOL | {"strict": True, "input_schema": {"not": {}}}]}, "tools[0].input_schema.not"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice.name"),
    (
        {"tools": [TOOL | {"defer_loading": True}], "tool_choice": {"type": "tool", "name": "f"}},
        "tool_choice.name",
    ),
    (
        {"output_config": {"format": {"type": "json_schema", "schema": {"not": {}}}}},
        "output_config.format.schema.not",
    ),
    (
        {
            "output_config": {"format": {"type": "json_schema", "schema": {}}},
            "output_format": {"type": "json_schema", "schema": {}},
        },
        "output_format",
    ),
    ({"container": "a"}, "container"),
    ({"mcp_servers": [{"name": "a"}]}, "mcp_servers"),
    ({"n": 2}, "n"),
    ({"stop": ["a"]}, "stop"),
    ({"min_tokens": 5, "tools": [TOOL], "tool_choice": {"type": "any"}}, "min_tokens"),
]


@pytest.mark.parametrize(("fields", "param"), OUT_OF_RANGE, ids=str)
async def test_value_that_is_not_served_is_refused_by_its_path(client, fields, param):
    assert (await refused(client, fields))["param"] == param


async def test_max_tokens_is_required(client):
    reply = await client.post(PATH, {"messages": [HELLO]})
    assert (reply.status, reply.error["message"]) == (400, "max_tokens: is missing")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [HELLO, {"role": "user", "content": [IMAGE]}]}, "messages[1].content[0].type"),
        ({"messages": [result(content=[IMAGE])]}, "messages[0].content[0].content[0].type"),
        ({"messages": [answer(IMAGE), HELLO]}, "messages[0].content[0].type"),
        ({"system": [IMAGE]}, "system[0].type"),
        ({"messages": [answer({"type": "tool_result"}), HELLO]}, "messages[0].content[0].type"),
    ],
)
async def test_refusal_of_a_block_says_which_are_served(client, fields, param):
    error = await refused(client, fields)
    assert error["param"] == param
    assert repr(IMAGE["type"]) in error["message"] or "'tool_result'" in error["message"]
    assert "only text, thinking, calls and their results" in error["message"]


blocks = st.lists(
    st.fixed_dictionaries(
        {"type": st.sampled_from(["text", "thinking", "tool_use", "tool_result", "image"])},
        optional={name: ANYTHING | st.just("a") for name in ("text", "id", "name", "input", "content")},
    ),
    max_size=3,
)
turns = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system"]), "content": blocks | st.text(max_size=3)}
    )
    | ANYTHING,
    max_size=4,
)


@given(fields=st.dictionaries(st.sampled_from([*FIELDS]), ANYTHING, max_size=3), messages=turns)
def test_any_body_is_a_request_or_an_invalid_request(fields, messages):
    body = json.dumps({"max_tokens": 5, "messages": messages} | fields).encode()
    with suppress(InvalidRequest):
        assert message_request(body, Limits()).messages is not None
