"""Requests of OpenAI's Responses API: what the model gets of them, and what is refused."""

import json

import pytest
from openai.types.responses import Response

from fairlead.base.config import Limits
from fairlead.base.errors import InvalidRequest
from fairlead.dialects.responses.responses import ResponsesDialect
from server.routes.conftest import client_of, small_model
from server.routes.typed_responses import RESPONSES, events_of, final_response
from server.routes.written_answers import (
    CHAT,
    HERMES,
    WEATHER,
    accepts,
    client_writing,
    refusal,
    vocabulary_of,
)

FUNCTION = {"type": "function", "name": "weather", "description": "It does.", "parameters": WEATHER}
FUNCTION["strict"] = True
NAMESPACE = {"type": "namespace", "name": "home", "description": "The house.", "tools": [FUNCTION]}
OTHER = {"type": "function", "name": "time", "parameters": None, "strict": False}
CALL = {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": '{"city": "Oslo"}'}
RESULT = {"type": "function_call_output", "call_id": "call_1", "output": "4 degrees"}
THOUGHT = {"type": "reasoning", "id": "rs_1", "summary": []}
THOUGHT["content"] = [{"type": "reasoning_text", "text": "It is easy."}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FORM = {"type": "json_schema", "name": "thing", "schema": SCHEMA, "strict": True}


@pytest.fixture(scope="module")
def hermes(tmp_path_factory):
    return small_model(tmp_path_factory.mktemp("hermes"), HERMES)


@pytest.fixture
def client(hermes):
    return client_of(hermes)


def user(content="hello"):
    return {"role": "user", "content": content}


def texts(*values, kind="input_text"):
    return [{"type": kind, "text": value} for value in values]


def decoded(body, history=()):
    dialect = ResponsesDialect(history=history)
    return dialect.decode(json.dumps({"model": "small", **body}).encode(), Limits())


def messages_of(*items, **fields):
    return decoded({"input": list(items), **fields}).messages


# Input -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "messages"),
    [
        ({"input": "hello"}, [user()]),
        ({"input": ""}, [user("")]),
        (
            {"input": "hello", "instructions": "Be brief."},
            [{"role": "system", "content": "Be brief."}, user()],
        ),
        ({"input": [user()]}, [user()]),
        ({"input": [{"type": "message", **user(texts("hello"))}]}, [user()]),
        ({"input": [user(texts("a", "b"))]}, [user(texts("a", "b", kind="text"))]),
        (
            {"input": [{"role": "developer", "content": "Be brief."}]},
            [{"role": "system", "content": "Be brief."}],
        ),
        ({"input": [{"role": "system", "content": texts("Be.")}]}, [{"role": "system", "content": "Be."}]),
        (
            {"input": [user(), {"role": "assistant", "content": texts("Hi.", kind="output_text")}]},
            [user(), {"role": "assistant", "content": "Hi."}],
        ),
    ],
)
def test_text_or_items_become_messages(fields, messages):
    assert decoded(fields).messages == messages


def test_items_of_one_turn_become_one_message():
    message = {"type": "message", "role": "assistant", "content": "Let me see.", "status": "completed"}
    second = {**CALL, "call_id": "call_2"}
    function = {"name": "weather", "arguments": '{"city": "Oslo"}'}
    assert messages_of(user(), THOUGHT, message, CALL, second, RESULT, user()) == [
        user(),
        {
            "role": "assistant",
            "reasoning_content": "It is easy.",
            "reasoning": "It is easy.",
            "content": "Let me see.",
            "tool_calls": [
                {"id": name, "type": "function", "function": function} for name in ("call_1", "call_2")
            ],
        },
        {"role": "tool", "content": "4 degrees", "tool_call_id": "call_1"},
        user(),
    ]


def test_what_cannot_continue_a_turn_begins_another():
    said = {"role": "assistant", "content": "Hi."}
    calls = [{"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}]
    call = {**CALL, "arguments": "{}"}
    thought = {"reasoning_content": "It is easy.", "reasoning": "It is easy."}
    assert messages_of(said, said) == [said, said]
    assert messages_of(call, said) == [{"role": "assistant", "tool_calls": calls}, said]
    assert messages_of(said, THOUGHT, said) == [said, {"role": "assistant", **thought, "content": "Hi."}]
    assert messages_of(call, THOUGHT, call) == [
        {"role": "assistant", "tool_calls": calls},
        {"role": "assistant", **thought, "tool_calls": calls},
    ]


@pytest.mark.parametrize(
    "item",
    [
        {"type": "reasoning", "summary": texts("It is easy.", kind="summary_text")},
        {"type": "reasoning", "summary": texts("no", kind="summary_text"), "content": THOUGHT["content"]},
        {"type": "reasoning", "summary": [], "content": None, "encrypted_content": "x"},
    ],
)
def test_reasoning_is_read_from_its_content_or_its_summary(item):
    (message, *_) = messages_of(item, {"role": "assistant", "content": "Hi."})
    expected = None if "encrypted_content" in item else "It is easy."
    assert message.get("reasoning_content") == expected


def test_result_of_a_call_may_be_parts():
    (message,) = messages_of({**RESULT, "output": texts("4 ", "degrees")})
    assert message["content"] == texts("4 ", "degrees", kind="text")


def test_history_precedes_the_input_and_follows_the_instructions():
    answer = {"type": "message", "role": "assistant", "content": texts("Hi.", kind="output_text"), "id": "m"}
    body = {"input": "again", "instructions": "Be brief.", "previous_response_id": "resp-1"}
    assert decoded(body, history=[user(), answer]).messages == [
        {"role": "system", "content": "Be brief."},
        user(),
        {"role": "assistant", "content": "Hi."},
        user("again"),
    ]
    assert decoded({"previous_response_id": "resp-1"}, history=[user(), answer]).messages[0] == user()


def test_history_that_cannot_be_read_is_refused():
    with pytest.raises(InvalidRequest) as refused:
        decoded({"input": "a", "previous_response_id": "resp_1"}, history=[{"role": 5}])
    assert refused.value.param == "previous_response_id"


@pytest.mark.parametrize(
    ("items", "param"),
    [
        ([user(), {"type": "item_reference", "id": "msg_1"}], "input[1].type"),
        ([{"type": "web_search_call", "id": "ws_1", "status": "completed"}], "input[0].type"),
        ([user([{"type": "input_image", "image_url": "data:"}])], "input[0].content[0].type"),
        ([user([*texts("a"), {"type": "input_file", "file_id": "f"}])], "input[0].content[1].type"),
        ([user([{"type": "input_text"}])], "input[0].content[0].text"),
        ([{"role": "user"}], "input[0].content"),
        ([{"content": "hello"}], "input[0].role"),
        ([{"role": "tool", "content": "hello"}], "input[0].role"),
        ([{**CALL, "arguments": None}], "input[0].arguments"),
        ([{**CALL, "arguments": {}}], "input[0].arguments"),
        ([{**CALL, "name": None}], "input[0].name"),
        ([{**CALL, "call_id": None}], "input[0].call_id"),
        ([{**RESULT, "call_id": None}], "input[0].call_id"),
        ([{**RESULT, "output": None}], "input[0].output"),
        ([{**RESULT, "output": [{"type": "input_image"}]}], "input[0].output[0].type"),
        ([{**THOUGHT, "content": texts("a", kind="input_image")}], "input[0].content[0].type"),
        ([], "input"),
        ([5], "input[0]"),
    ],
)
async def test_faulty_item_is_refused_with_its_path(client, items, param):
    assert (await refusal(client, RESPONSES, {"input": items}))[0] == param


IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,AA==", "detail": "low"}


def test_images_of_the_user_are_those_of_a_chat():
    generation = decoded(
        {"input": [user(), user([*texts("What is this?"), IMAGE, {**IMAGE, "detail": None}])]}
    )
    url = {"url": "data:image/png;base64,AA=="}
    assert generation.messages[1]["content"] == [
        {"type": "text", "text": "What is this?"},
        {"type": "image_url", "image_url": {**url, "detail": "low"}},
        {"type": "image_url", "image_url": url},
    ]
    assert generation.image_field == "input[1].content[1].type"
    earlier = decoded({"input": "And now?"}, history=[user([IMAGE])])
    assert earlier.image_field == "previous_response_id.output[0].content[0].type"
    assert decoded({"input": [user()]}).image_field == ""


@pytest.mark.parametrize("path", ["", "/compact", "/input_tokens"])
async def test_image_is_refused_by_name_for_a_model_that_reads_texts(client, path):
    items = [user([*texts("What is this?"), IMAGE])]
    reply = await client.post(f"{RESPONSES}{path}", {"model": "small", "input": items})
    assert (reply.status, reply.error["param"]) == (400, "input[0].content[1].type")
    assert "images are not served by this model" in reply.error["message"]


@pytest.mark.parametrize("role", ["system", "assistant"])
async def test_image_that_is_not_the_users_is_refused(client, role):
    items = [user(), {"role": role, "content": [IMAGE]}]
    assert (await refusal(client, RESPONSES, {"input": items}))[0] == "input[1].content[0].type"


async def test_image_without_its_content_is_refused(client):
    items = [user([{"type": "input_image", "file_id": "file_1"}])]
    assert (await refusal(client, RESPONSES, {"input": items}))[0] == "input[0].content[0].image_url"


@pytest.mark.parametrize(
    "items",
    [
        [user()],
        [{"role": "system", "content": "Be brief."}, user()],
        [user(), THOUGHT, {"role": "assistant", "content": "Let me see."}, CALL, RESULT, user("And now?")],
    ],
)
async def test_prompt_is_that_of_the_same_chat(client, items):
    await client.post(RESPONSES, {"input": items, "tools": [FUNCTION]})
    function = {name: value for name, value in FUNCTION.items() if name != "type"}
    tools = [{"type": "function", "function": function}]
    await client.post(CHAT, {"messages": messages_of(*items), "tools": tools})
    first, second = client.gateway.jobs
    assert first.prompts == second.prompts
    assert first.sampling == second.sampling
    assert first.parts == second.parts


# Tools -----------------------------------------------------------------------------------------------


async def grammar_of(client, **fields):
    client.gateway.jobs.clear()
    reply = await client.post(RESPONSES, {"input": "hello", **fields})
    assert reply.status == 200, reply.body
    return client.gateway.job.sampling.grammar


CALLED = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
TIME = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
ALLOWED = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "time"}]}


@pytest.mark.parametrize(
    ("choice", "allowed", "refused"),
    [
        ("auto", [CALLED, TIME, "No."], []),
        ("required", [CALLED, TIME, CALLED + TIME], ["No."]),
        ({"type": "function", "name": "weather"}, [CALLED], [TIME, "No."]),
        (ALLOWED, [TIME], [CALLED, "No."]),
        ({**ALLOWED, "mode": "auto"}, [TIME, "No."], []),
    ],
)
async def test_choice_of_tools_constrains_the_answer(client, hermes, choice, allowed, refused):
    grammar = await grammar_of(client, tools=[FUNCTION, OTHER], tool_choice=choice)
    vocabulary = vocabulary_of(hermes)
    assert [text for text in allowed if not accepts(hermes, vocabulary, grammar, text)] == []
    assert [text for text in refused if accepts(hermes, vocabulary, grammar, text)] == []


async def test_calls_are_one_at_a_time_without_parallel_calls(client, hermes):
    fields = {"tools": [FUNCTION, OTHER], "tool_choice": "required", "parallel_tool_calls": False}
    grammar = await grammar_of(client, **fields)
    assert not accepts(hermes, vocabulary_of(hermes), grammar, CALLED + TIME)


async def test_function_of_a_namespace_is_called_by_both_names(client, hermes):
    tools = [FUNCTION, NAMESPACE]
    grammar = await grammar_of(client, tools=tools, tool_choice="required")
    text = CALLED.replace("weather", "home__weather")
    assert accepts(hermes, vocabulary_of(hermes), grammar, text)
    calling = client_writing(hermes, text)
    for stream in (False, True):
        reply = await calling.post(RESPONSES, {"input": "hello", "tools": tools, "stream": stream})
        response = final_response(events_of(reply)) if stream else reply.json
        Response.model_validate_json(json.dumps(response), strict=True)
        (call,) = response["output"]
        assert (call["namespace"], call["name"]) == ("home", "weather")


def test_call_of_a_namespace_is_sent_back_as_the_model_wrote_it():
    call = {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"}
    (turn,) = messages_of(call | {"namespace": "home"})
    assert turn["tool_calls"][0]["function"]["name"] == "home__weather"


async def test_search_of_the_web_is_left_out(client, hermes):
    search = {"type": "web_search", "external_web_access": False}
    grammar = await grammar_of(client, tools=[FUNCTION, search], tool_choice="required")
    prompt = client.gateway.job.prompts
    assert await grammar_of(client, tools=[FUNCTION], tool_choice="required") == grammar
    assert client.gateway.job.prompts == prompt


async def test_tools_that_must_not_be_called_are_not_in_the_prompt(client):
    grammar = await grammar_of(client, tools=[FUNCTION], tool_choice="none")
    prompt = client.gateway.job.prompts
    assert grammar is None
    assert await grammar_of(client) is None
    assert client.gateway.job.prompts == prompt


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "file_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "namespace", "tools": [FUNCTION]}]}, "tools[0].name"),
        ({"tools": [NAMESPACE | {"tools": [{"type": "custom", "name": "x"}]}]}, "tools[0].tools[0].type"),
        ({"tools": [NAMESPACE, NAMESPACE]}, "tools[1].tools[0].name"),
        ({"tools": [FUNCTION, {"type": "custom", "name": "x"}]}, "tools[1].type"),
        ({"tools": [{"type": "file_search", "vector_store_ids": []}]}, "tools[0].type"),
        ({"tools": [{"type": "code_interpreter", "container": {}}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{"type": "function", "name": ""}]}, "tools[0].name"),
        ({"tools": [FUNCTION, FUNCTION]}, "tools[1].name"),
        ({"tools": [{**FUNCTION, "parameters": {"type": 5}}]}, "tools[0].parameters.type"),
        ({"tools": [{**FUNCTION, "parameters": []}]}, "tools[0].parameters"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "some"}, "tool_choice"),
        ({"tools": [FUNCTION], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice.name"),
        ({"tools": [FUNCTION], "tool_choice": {"type": "function"}}, "tool_choice.name"),
        ({"tools": [FUNCTION], "tool_choice": {"type": "web_search_preview"}}, "tool_choice.type"),
        ({"tools": [FUNCTION], "tool_choice": ALLOWED}, "tool_choice.tools[0].name"),
        ({"tools": [OTHER], "tool_choice": {**ALLOWED, "mode": None}}, "tool_choice.mode"),
        ({"tools": [OTHER], "tool_choice": {**ALLOWED, "tools": None}}, "tool_choice.tools"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
        ({"text": {"format": {**FORM, "schema": {"type": 5}}}}, "text.format.schema.type"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
        ({"text": {"format": FORM}, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"include": ["everything"]}, "include[0]"),
        ({"include": ["message.output_text.logprobs"], "tools": [FUNCTION]}, "include[0]"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"metadata": {"a": 5}}, "metadata"),
        ({"metadata": {"a": "b" * 513}}, "metadata"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"thinking_token_budget": -2}, "thinking_token_budget"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
    ],
)
async def test_what_is_not_served_is_refused_with_its_path(client, fields, param):
    assert (await refusal(client, RESPONSES, {"input": "hello", **fields}))[0] == param


@pytest.mark.parametrize("fields", [{"background": True}, {"previous_response_id": "resp-1"}], ids=str)
def test_fields_of_the_store_are_refused_where_nothing_is_stored(fields):
    with pytest.raises(InvalidRequest) as refused:
        decoded({"input": "hello", **fields})
    assert [refused.value.param] == list(fields)


async def test_missing_input_is_refused(client):
    assert (await refusal(client, RESPONSES, {}))[0] == "input"
