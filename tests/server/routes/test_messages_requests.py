"""Requests of Anthropic's Messages: what of them reaches the chat template, the sampling and the queue."""

import json

import pytest

from fairlead.base.config import ApiKey
from fake_fleet import FakeFleet
from server.routes.conftest import client_of, small_model
from server.routes.message_events import COUNT, PATH
from server.routes.remote_responses import complete_response
from server.routes.written_answers import (
    CHAT,
    HERMES,
    OPENED,
    accepts,
    call,
    client_writing,
    tool,
    vocabulary_of,
)

HELLO = {"role": "user", "content": "hello"}
SCHEMA = tool("weather")["function"]["parameters"]
WEATHER = {"name": "weather", "description": "It does weather.", "input_schema": SCHEMA}
TIME = {"name": "time", "input_schema": {"type": "object"}}
USED = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Oslo"}}
ASKED = [HELLO, {"role": "assistant", "content": [USED]}]
CACHED = {"cache_control": {"type": "ephemeral"}}
# Refuses system messages behind others, as Qwen's, and two messages of a role in a row, as Mistral's.
STRICT = """\
{%- for message in messages %}
{%- if message.role == 'system' and not loop.first %}{{ raise_exception('system comes first') }}{% endif %}
{%- if not loop.first and message.role == messages[loop.index0 - 1].role and message.role != 'tool' %}
{{- raise_exception('roles take turns') }}{% endif -%}
<|{{ message.role }}|>{{ message.reasoning_content or '' }}{{ message.content }}
{%- for call in message.tool_calls %}[{{ call.function.name }}]{% endfor %}
{% endfor %}
{%- if tools %}{{ tools | tojson }}{% endif %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""


@pytest.fixture(scope="module")
def hermes(tmp_path_factory):
    return small_model(tmp_path_factory.mktemp("hermes"), HERMES)


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    return small_model(tmp_path_factory.mktemp("opened"), OPENED)


@pytest.fixture(scope="module")
def strict(tmp_path_factory):
    return small_model(tmp_path_factory.mktemp("strict"), STRICT)


def body_of(*messages, **fields):
    return {"model": "small", "max_tokens": 100, "messages": messages or [HELLO], **fields}


async def job_of(model, body, path=PATH):
    client = client_of(model)
    reply = await client.post(path, body)
    assert reply.status == 200, reply.body
    return client.gateway.job


async def prompt_of(model, body, path=PATH):
    """Return the text of the prompt; the number of its tokens is what `count_tokens` returns."""
    (prompt,) = (await job_of(model, body, path)).prompts
    if path == PATH:
        counted = await client_of(model).post(COUNT, body)
        assert counted.json == {"input_tokens": len(prompt)}
    return model.tokenizer.decode(prompt)


async def chat_of(model, *messages, **fields):
    return await prompt_of(model, {"messages": messages, **fields}, CHAT)


# Messages and blocks -------------------------------------------------------------------------------


def text(said):
    return {"type": "text", "text": said, "citations": None, **CACHED}


def assistant(content, **more):
    return {"role": "assistant", "content": content, **more}


def result(content, **more):
    return {"type": "tool_result", "tool_use_id": "toolu_1", "content": content, **more, **CACHED}


def of_user(*blocks):
    return {"role": "user", "content": blocks}


CALLED = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": "toolu_1",
            "type": "function",
            "function": {"name": "weather", "arguments": '{"city": "Oslo"}'},
        }
    ],
}
THOUGHT = {"type": "thinking", "thinking": "It is easy.", "signature": "theirs"}
REDACTED = {"type": "redacted_thinking", "data": "secret"}
TOOL = {"role": "tool", "tool_call_id": "toolu_1", "content": "4"}
SAME_AS_IN_A_CHAT = {
    "a text": ([HELLO], [HELLO]),
    "blocks of text": ([of_user(text("a"), text("b"))], [of_user(text("a"), text("b"))]),
    "no blocks": ([of_user()], [{"role": "user", "content": ""}]),
    "an answer": ([HELLO, assistant("hi"), HELLO], [HELLO, assistant("hi"), HELLO]),
    "an answer in blocks": ([HELLO, assistant([text("hi")]), HELLO], [HELLO, assistant("hi"), HELLO]),
    "thinking": (
        [HELLO, assistant([THOUGHT, REDACTED, text("hi")]), HELLO],
        [HELLO, assistant("hi", reasoning_content="It is easy."), HELLO],
    ),
    "only redacted thinking": ([HELLO, assistant([REDACTED]), HELLO], [HELLO, assistant(""), HELLO]),
    "a call and its result": ([*ASKED, of_user(result("4"))], [HELLO, CALLED, TOOL]),
    "text before a call": (
        [HELLO, assistant([text("So:"), USED]), of_user(result("4"))],
        [HELLO, {**CALLED, "content": "So:"}, TOOL],
    ),
    "a result in blocks": (
        [*ASKED, of_user(result([text("4"), text("5")]))],
        [HELLO, CALLED, {**TOOL, "content": [text("4"), text("5")]}],
    ),
    "a result without content": (
        [*ASKED, of_user({"type": "tool_result", "tool_use_id": "toolu_1"})],
        [HELLO, CALLED, {**TOOL, "content": ""}],
    ),
    "results and a text": (
        [*ASKED, of_user(result("4"), result("5"), text("a"))],
        [HELLO, CALLED, TOOL, {**TOOL, "content": "5"}, {"role": "user", "content": "a"}],
    ),
    "a text and a result": (
        [*ASKED, of_user(text("a"), result("4"))],
        [HELLO, CALLED, {"role": "user", "content": "a"}, TOOL],
    ),
    "a failed call": (
        [*ASKED, of_user(result("no city", is_error=True))],
        [HELLO, CALLED, {**TOOL, "content": "Error: no city"}],
    ),
    "a failed call in blocks": (
        [*ASKED, of_user(result([text("no"), text("city")], is_error=True))],
        [HELLO, CALLED, {**TOOL, "content": [text("Error: no"), text("city")]}],
    ),
    "a system message": (
        [HELLO, {"role": "system", "content": "Be kind."}, HELLO],
        [HELLO, {"role": "system", "content": "Be kind."}, HELLO],
    ),
    "messages of a role in a row": ([HELLO, of_user(text("a"))], [HELLO, {"role": "user", "content": "a"}]),
}  # fmt: skip


@pytest.mark.parametrize("name", SAME_AS_IN_A_CHAT)
async def test_prompt_is_that_of_the_same_chat(hermes, strict, name):
    messages, chat = SAME_AS_IN_A_CHAT[name]
    for model in (hermes, strict):
        assert await prompt_of(model, body_of(*messages)) == await chat_of(model, *chat)


@pytest.mark.parametrize(
    ("system", "expected"),
    [
        ("Be kind.", "Be kind."),
        ([text("Be kind.")], "Be kind."),
        ([text("Be kind."), text("Be brief.")], [text("Be kind."), text("Be brief.")]),
    ],
)
async def test_system_prompt_is_the_first_message(hermes, system, expected):
    instructed = {"role": "system", "content": expected}
    assert await prompt_of(hermes, body_of(system=system)) == await chat_of(hermes, instructed, HELLO)


@pytest.mark.parametrize("system", ["", [], None, [text("")]])
async def test_empty_system_prompt_is_none(hermes, system):
    assert await prompt_of(hermes, body_of(system=system)) == await chat_of(hermes, HELLO)


BILLING = "x-anthropic-billing-header: cc_version=2.1.330.a1b; cc_entrypoint=cli; cch={};"


@pytest.mark.parametrize(
    "system",
    [
        [text(BILLING), text("Be kind.")],
        [text(BILLING + "\nBe kind.")],
        BILLING + "\n\nBe kind.",
    ],
)
async def test_billing_header_of_claude_code_is_not_in_the_prompt(hermes, system):
    expected = await chat_of(hermes, {"role": "system", "content": "Be kind."}, HELLO)
    for hashed in ("00000", "fa690"):
        body = json.loads(json.dumps(body_of(system=system)).replace("{}", hashed))
        assert await prompt_of(hermes, body) == expected
    alone = await prompt_of(hermes, body_of(system=[text(BILLING)]))
    assert alone == await chat_of(hermes, HELLO)


async def test_billing_header_within_a_text_is_kept(hermes):
    system = f"Be kind.\n{BILLING}"
    assert BILLING in await prompt_of(hermes, body_of(system=system))


async def test_system_messages_are_merged_to_the_front_where_the_template_refuses_others(strict):
    later = {"role": "system", "content": "Be brief."}
    messages = (HELLO, {"role": "assistant", "content": "hi"}, later, HELLO)
    prompt = await prompt_of(strict, body_of(*messages, system="Be kind."))
    assert prompt.startswith("<|system|>Be kind.\n\nBe brief.<|user|>hello")
    assert prompt == await chat_of(strict, {"role": "system", "content": "Be kind."}, *messages)


async def test_system_message_may_end_with_the_next_message_of_the_user(hermes):
    hint = {"role": "system", "content": "HINT", "clear_at": "next_user_message"}
    assert "HINT" in await prompt_of(hermes, body_of(HELLO, hint))
    assert "HINT" not in await prompt_of(hermes, body_of(HELLO, hint, assistant("hi"), HELLO))
    kept = {**hint, "clear_at": "never"}
    assert "HINT" in await prompt_of(hermes, body_of(HELLO, kept, assistant("hi"), HELLO))


# The beginning of the answer -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "last",
    [
        [assistant("The answer is")],
        [assistant([text("The answer "), text("is")])],
        [assistant("The answer "), assistant("is")],
    ],
)
async def test_last_answer_is_continued(hermes, last):
    expected = await chat_of(hermes, HELLO) + "The answer is"
    assert await prompt_of(hermes, body_of(HELLO, *last)) == expected
    client = client_writing(hermes, " four.")
    assert (await client.post(PATH, body_of(HELLO, *last))).json["content"][0]["text"] == " four."


@pytest.mark.parametrize("last", ["", [], [text("")]])
async def test_last_answer_without_text_is_not_there(hermes, last):
    assert await prompt_of(hermes, body_of(HELLO, assistant(last))) == await chat_of(hermes, HELLO)


async def test_control_tokens_in_a_continued_answer_remain_text(hermes):
    (prompt,) = (await job_of(hermes, body_of(HELLO, assistant("a<eos>b")))).prompts
    assert 0 not in prompt
    assert hermes.tokenizer.decode(prompt).endswith("a<eos>b")


async def test_answer_cannot_be_continued_where_the_template_opens_its_reasoning(opened):
    body = body_of(HELLO, assistant("The answer"))
    reply = await client_of(opened).post(PATH, body)
    assert (reply.status, reply.error["param"]) == (400, "messages")
    assert "reasoning" in reply.error["message"]
    prompt = await prompt_of(opened, {**body, "thinking": {"type": "disabled"}})
    assert prompt.endswith("<think>\n\n</think>\n\nThe answer")


@pytest.mark.parametrize(
    ("last", "fields", "param"),
    [
        ([USED], {}, "messages[1].content[0].type"),
        ([text("a"), THOUGHT], {}, "messages[1].content[1].type"),
        ("a", {"tools": [WEATHER], "tool_choice": {"type": "any"}}, "messages[1]"),
        ("a", {"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "weather"}}, "messages[1]"),
        ("a", {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}, "messages[1]"),
    ],
)
async def test_beginning_that_no_answer_can_have_is_refused(hermes, last, fields, param):
    reply = await client_of(hermes).post(PATH, body_of(HELLO, assistant(last), **fields))
    assert (reply.status, reply.error["param"]) == (400, param)


# Tools ---------------------------------------------------------------------------------------------


async def test_tools_reach_the_template_as_those_of_a_chat(hermes):
    chat = [
        tool("weather", strict=True),
        {"type": "function", "function": {"name": "time", "parameters": {"type": "object"}}},
    ]
    tools = [{**WEATHER, "strict": True, "type": "custom", **CACHED}, TIME]
    assert await prompt_of(hermes, body_of(tools=tools)) == await chat_of(hermes, HELLO, tools=chat)


CALL, OTHER = call("weather", '{"city": "Oslo"}'), call("time", "{}")


@pytest.mark.parametrize(
    ("choice", "accepted", "refused"),
    [
        (None, ["a", CALL, "a" + CALL + "\n" + OTHER], [call("weather", "{}")]),
        ({"type": "auto"}, ["a", CALL], [call("weather", "{}")]),
        ({"type": "auto", "disable_parallel_tool_use": True}, ["a", CALL], [CALL + "\n" + OTHER]),
        ({"type": "any"}, [CALL, OTHER, CALL + "\n" + OTHER], ["a"]),
        ({"type": "any", "disable_parallel_tool_use": True}, [CALL], ["a", CALL + "\n" + OTHER]),
        ({"type": "tool", "name": "time"}, [OTHER], ["a", CALL]),
    ],
    ids=str,
)
async def test_choice_of_tools_is_the_grammar_of_the_answer(hermes, choice, accepted, refused):
    body = body_of(tools=[{**WEATHER, "strict": True}, TIME], tool_choice=choice)
    grammar = (await job_of(hermes, body)).sampling.grammar
    vocabulary = vocabulary_of(hermes)
    for answer in accepted:
        assert accepts(hermes, vocabulary, grammar, answer)
    for answer in refused:
        assert not accepts(hermes, vocabulary, grammar, answer)


async def test_without_a_choice_the_model_has_no_tools(hermes):
    body = body_of(tools=[WEATHER], tool_choice={"type": "none"})
    assert await prompt_of(hermes, body) == await chat_of(hermes, HELLO)
    assert (await job_of(hermes, body)).sampling.grammar is None


def system(kind, name):
    return {"role": "system", "content": [{"type": kind, "tool": {"type": "tool_reference", "name": name}}]}


FOUND = of_user(result([{"type": "tool_reference", "tool_name": "time"}]))


@pytest.mark.parametrize(
    ("messages", "names"),
    [
        ([HELLO], ["weather"]),
        ([*ASKED, FOUND], ["weather", "time"]),
        ([HELLO, system("tool_addition", "time")], ["weather", "time"]),
        ([HELLO, system("tool_removal", "weather")], []),
        ([*ASKED, FOUND, system("tool_removal", "time")], ["weather"]),
        ([HELLO, system("tool_addition", "unknown")], ["weather"]),
    ],
)
async def test_deferred_tool_is_given_to_the_model_once_it_is_referred_to(hermes, messages, names):
    body = body_of(*messages, tools=[WEATHER, {**TIME, "defer_loading": True}])
    prompt = await prompt_of(hermes, body)
    found = json.loads(prompt.partition("<tools>")[2].partition("</tools>")[0] or "[]")
    assert [one["function"]["name"] for one in found] == names


@pytest.mark.parametrize(
    ("kind", "name", "allowed", "refused"),
    [
        ("bash_20250124", "bash", {"command": "ls"}, {"cmd": "ls"}),
        ("text_editor_20250728", "edit", {"command": "view", "path": "a"}, {"command": "view"}),
        ("computer_20250124", "computer", {"action": "left_click", "coordinate": [1, 2]}, {"action": "see"}),
        ("memory_20250818", "memory", {"command": "delete", "path": "/memories/a"}, {"command": "burn"}),
    ],
)
async def test_typed_tools_of_the_client_have_a_known_schema(hermes, kind, name, allowed, refused):
    typed = {"type": kind, "name": name, "display_width_px": 1024}
    body = body_of(tools=[typed], tool_choice={"type": "any"})
    grammar, vocabulary = (await job_of(hermes, body)).sampling.grammar, vocabulary_of(hermes)
    assert accepts(hermes, vocabulary, grammar, call(name, json.dumps(allowed)))
    assert not accepts(hermes, vocabulary, grammar, call(name, json.dumps(refused)))
    assert "display width px: 1024" in await prompt_of(hermes, body)


async def test_search_results_are_text(hermes):
    found = {
        "type": "search_result",
        "source": "https://a.example",
        "title": "On A",
        "content": [{"type": "text", "text": "A is first."}],
    }
    asked = {"role": "user", "content": [found, {"type": "text", "text": "What is A?"}]}
    for messages in ([asked], [*ASKED, of_user(result([found]))]):
        assert "On A (https://a.example)\nA is first." in await prompt_of(hermes, body_of(*messages))


async def test_reference_to_a_tool_is_the_text_of_a_result(hermes):
    prompt = await prompt_of(hermes, body_of(*ASKED, FOUND, tools=[WEATHER, TIME]))
    assert "<|tool|>The tool time is available." in prompt


# Format, thinking, sampling ------------------------------------------------------------------------


FORMAT = {"type": "json_schema", "schema": SCHEMA}


@pytest.mark.parametrize("fields", [{"output_config": {"format": FORMAT}}, {"output_format": FORMAT}])
async def test_format_is_the_grammar_of_the_text(hermes, fields):
    grammar = (await job_of(hermes, body_of(**fields))).sampling.grammar
    assert accepts(hermes, vocabulary_of(hermes), grammar, '{"city": "Oslo"}')
    assert not accepts(hermes, vocabulary_of(hermes), grammar, "{}")


@pytest.mark.parametrize(
    ("fields", "variables"),
    [
        ({}, {}),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False}),
        ({"thinking": {"type": "enabled", "budget_tokens": 7}}, {"enable_thinking": True}),
        ({"thinking": {"type": "adaptive"}}, {"enable_thinking": True}),
        ({"thinking": {"type": "between_tools"}}, {"enable_thinking": True}),
        ({"output_config": {"effort": "high"}}, {"reasoning_effort": "high"}),
        ({"chat_template_kwargs": {"reasoning_effort": "low"}}, {"reasoning_effort": "low"}),
    ],
)
async def test_thinking_and_effort_are_variables_of_the_template(opened, fields, variables):
    expected = await chat_of(opened, HELLO, chat_template_kwargs=variables)
    assert await prompt_of(opened, body_of(**fields)) == expected


async def test_budget_of_thinking_is_a_limit(opened):
    thinking = {"type": "enabled", "budget_tokens": 7}
    assert (await job_of(opened, body_of(thinking=thinking))).sampling.reasoning_limit.max_tokens == 7
    assert (await job_of(opened, body_of())).sampling.reasoning_limit is None


async def test_longer_answers_than_fit_may_be_requested(model):
    job = await job_of(model, body_of(max_tokens=64_000))
    assert job.sampling.max_tokens == 4096 - len(job.prompts[0])


IGNORED = {
    "service_tier": "auto",
    "cache_control": {"type": "ephemeral"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "betas": ["anything"],
    "inference_geo": "eu",
    "mcp_servers": [],
    "container": None,
}


async def test_fields_that_change_no_answer_are_ignored(model):
    headers = {"anthropic-version": "2099-01-01", "anthropic-beta": "a-2025-01-01,b"}
    reply = await client_of(model).post(f"{PATH}?beta=true", body_of(**IGNORED), headers=headers)
    assert reply.status == 200


async def test_metadata_names_the_user(model):
    metadata = {"user_id": "alice"}
    assert (await job_of(model, body_of(metadata=metadata))).tenant == "user/alice"
    assert (await job_of(model, body_of(metadata=metadata, user="bob"))).tenant == "user/alice"
    assert (await job_of(model, body_of(metadata={"user_id": None}, user="bob"))).tenant == "user/bob"
    client = client_of(model, ApiKey("sk-1", user="portal", trusted=True))
    await client.post(PATH, body_of(metadata=metadata), headers={"x-api-key": "sk-1"})
    assert client.gateway.job.tenant == "portal/alice"


async def test_metadata_names_the_user_of_a_relayed_request_too(client_with):
    client = client_with(fleet=FakeFleet([], ["remote"]), gateway_script=complete_response)
    body = json.dumps(body_of(model="remote", metadata={"user_id": "alice"}) | {"unknown": 1}).encode()
    await client.post(PATH, body)
    assert (client.gateway.job.tenant, client.gateway.job.relay.body) == ("user/alice", body)
