"""Tools in chats: what a job gets of them."""

import json

import pytest

from fairlead.base.job import AnswerParts
from server.routes.conftest import client_of, small_model
from server.routes.written_answers import CHAT, HERMES, SIMPLE, accepts, call, refusal, tool, vocabulary_of

TOOLS = [tool("weather"), tool("time", {"type": "object"})]
STRICT = [tool("weather", strict=True), tool("time", {"type": "object"}, strict=True)]
NAMED = {"type": "function", "function": {"name": "weather"}}
OSLO = '{"city": "Oslo", "days": 3}'
WEATHER_CALL, TIME_CALL = call("weather", OSLO), call("time", "{}")
BROKEN = call("weather", '{"town": "Oslo"}')


def allowed(mode, *names):
    listed = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": listed}}


@pytest.fixture(scope="module")
def hermes(tmp_path_factory):
    return small_model(tmp_path_factory.mktemp("hermes"), HERMES)


@pytest.fixture(scope="module")
def vocabulary(hermes):
    return vocabulary_of(hermes)


@pytest.fixture
def hermes_client(hermes):
    return client_of(hermes)


# What a request has; for each of these answers, whether its grammar allows it.
ANSWERS = ("hello", WEATHER_CALL, TIME_CALL, WEATHER_CALL + "\n" + TIME_CALL, BROKEN)
CHOICES = [
    ({"tools": STRICT}, (True, True, True, True, False)),
    ({"tools": TOOLS}, (True, True, True, True, False)),
    ({"tools": STRICT, "tool_choice": "auto"}, (True, True, True, True, False)),
    ({"tools": STRICT, "tool_choice": "required"}, (False, True, True, True, False)),
    ({"tools": TOOLS, "tool_choice": "required"}, (False, True, True, True, False)),
    ({"tools": STRICT, "parallel_tool_calls": False}, (True, True, True, False, False)),
    (
        {"tools": STRICT, "tool_choice": "required", "parallel_tool_calls": False},
        (False, True, True, False, False),
    ),
    ({"tools": STRICT, "tool_choice": NAMED}, (False, True, False, False, False)),
    ({"tools": STRICT, "tool_choice": allowed("auto", "time")}, (True, False, True, False, False)),
    ({"tools": STRICT, "tool_choice": allowed("required", "weather")}, (False, True, False, False, False)),
    (
        {"tools": STRICT, "response_format": {"type": "json_object"}},
        (False, True, True, True, False),
    ),
]


@pytest.mark.parametrize(("fields", "is_allowed"), CHOICES, ids=lambda value: str(value)[-60:])
async def test_tool_choice_decides_which_answers_are_possible(
    hermes_client, hermes, vocabulary, chat, fields, is_allowed
):
    reply = await hermes_client.post(CHAT, chat(**fields))
    assert reply.status == 200, reply.body
    grammar = hermes_client.gateway.job.sampling.grammar
    possible = [grammar is None or accepts(hermes, vocabulary, grammar, answer) for answer in ANSWERS]
    assert possible == list(is_allowed)


async def test_tools_are_part_of_the_prompt_unless_none_may_be_called(hermes_client, hermes, chat):
    shown = []
    for fields in ({}, {"tool_choice": "none"}, {"tool_choice": allowed("auto", "time")}):
        hermes_client.gateway.jobs.clear()
        await hermes_client.post(CHAT, chat(tools=TOOLS, **fields))
        shown.append("It does weather." in hermes.tokenizer.decode(hermes_client.gateway.job.prompts[0]))
    assert shown == [True, False, True]


async def test_choice_of_no_tool_keeps_text_and_its_form(hermes_client, hermes, vocabulary, chat):
    await hermes_client.post(CHAT, chat(tools=TOOLS, tool_choice="none"))
    job = hermes_client.gateway.job
    assert (job.sampling.grammar, job.parts) == (None, AnswerParts(None, False, False))
    hermes_client.gateway.jobs.clear()
    form = {"response_format": {"type": "json_object"}}
    await hermes_client.post(CHAT, chat(tools=TOOLS, tool_choice="none", **form))
    grammar = hermes_client.gateway.job.sampling.grammar
    assert accepts(hermes, vocabulary, grammar, "{}")
    assert not accepts(hermes, vocabulary, grammar, WEATHER_CALL)


@pytest.mark.parametrize("fields", [{}, {"tools": []}, {"tools": None}, {"tool_choice": "auto"}])
async def test_chat_without_tools_has_no_grammar(hermes_client, chat, fields):
    assert (await hermes_client.post(CHAT, chat(**fields, parallel_tool_calls=False))).status == 200
    assert hermes_client.gateway.job.sampling.grammar is None


FAULTY = [
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": "required", "tools": []}, "tool_choice"),
    ({"tool_choice": NAMED}, "tool_choice.function.name"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}, "tools": TOOLS}, "tool_choice"),
    ({"tool_choice": "any", "tools": TOOLS}, "tool_choice"),
    ({"tool_choice": {"type": "custom", "custom": {"name": "f"}}, "tools": TOOLS}, "tool_choice"),
    ({"tool_choice": {"type": "function", "name": "weather"}, "tools": TOOLS}, "tool_choice.function"),
    ({"tool_choice": {"type": "function", "function": {}}, "tools": TOOLS}, "tool_choice.function.name"),
    (
        {"tool_choice": allowed("auto", "time", "f"), "tools": TOOLS},
        "tool_choice.allowed_tools.tools[1].function.name",
    ),
    ({"tool_choice": allowed("auto"), "tools": TOOLS}, "tool_choice.allowed_tools.tools"),
    ({"tool_choice": allowed("none", "time"), "tools": TOOLS}, "tool_choice.allowed_tools.mode"),
    ({"tools": [*TOOLS, tool("time")]}, "tools[2].function.name"),
    ({"tools": [{"type": "retrieval", "function": {"name": "f"}}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0]"),
    ({"tools": "weather"}, "tools"),
    (
        {"tools": [tool("f", {"properties": {"a": {"not": {}}}}, strict=True)]},
        "tools[0].function.parameters.properties.a.not",
    ),
    ({"tools": [TOOLS[0], tool("f", {"type": "xyz"}, strict=True)]}, "tools[1].function.parameters.type"),
    ({"tools": TOOLS, "parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ({"tools": STRICT, "min_tokens": 3}, "min_tokens"),
    ({"tools": STRICT, "ignore_eos": True}, "ignore_eos"),
    ({"functions": [{"name": "f"}]}, "functions"),
]


@pytest.mark.parametrize(("fields", "param"), FAULTY, ids=lambda value: str(value)[:70])
async def test_faulty_tools_are_refused_by_the_name_of_the_field(hermes_client, chat, fields, param):
    field, message = await refusal(hermes_client, CHAT, chat(**fields))
    assert field.startswith(param)
    assert field in message


async def test_schema_of_a_tool_that_is_not_strict_may_be_anything(hermes_client, chat):
    odd = tool("f", {"type": "xyz", "not": {}})
    assert (await hermes_client.post(CHAT, chat(tools=[odd]))).status == 200


HISTORY = [
    {"role": "user", "content": "How is Oslo?"},
    {
        "role": "assistant",
        "content": None,
        "reasoning_content": "I look it up.",
        "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": OSLO}}
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "cold"},
]


async def test_earlier_calls_and_results_are_in_the_prompt(hermes_client, hermes):
    reply = await hermes_client.post(CHAT, {"messages": HISTORY, "tools": TOOLS})
    assert reply.status == 200, reply.body
    prompt = hermes.tokenizer.decode(hermes_client.gateway.job.prompts[0])
    assert f"<|assistant|><think>\nI look it up.\n</think>\n\n{WEATHER_CALL}" in prompt
    assert "<|tool|>cold" in prompt


@pytest.mark.parametrize("tools", [TOOLS, None])
async def test_template_without_tools_gets_calls_and_results_as_text(tmp_path, tools):
    model = small_model(tmp_path, SIMPLE)
    client = client_of(model)
    reply = await client.post(CHAT, {"messages": HISTORY, "tools": tools})
    assert reply.status == 200, reply.body
    prompt = model.tokenizer.decode(client.gateway.job.prompts[0])
    assert f"<|assistant|>{WEATHER_CALL}" in prompt
    assert "<|user|><tool_response>\ncold\n</tool_response>" in prompt
    assert ("It does weather." in prompt) == (tools is not None)


async def test_relayed_request_keeps_its_tools(relay_client):
    fields = {"tools": [{"type": "odd"}], "tool_choice": {"type": "odd"}, "parallel_tool_calls": 7}
    body = {"model": "remote", "messages": HISTORY, **fields}
    assert (await relay_client.post(CHAT, body)).status == 200
    assert json.loads(relay_client.gateway.job.relay.body) == body
