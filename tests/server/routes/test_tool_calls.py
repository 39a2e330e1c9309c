"""Tool calls in the answers of chats, whole and streamed."""

import re

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from language.structured.families import FAMILIES
from language.structured.rendering import written_calls
from server.routes.conftest import small_model
from server.routes.written_answers import (
    CHAT,
    HERMES,
    MISTRAL,
    accepts,
    call,
    client_writing,
    merged,
    tool,
    vocabulary_of,
)

TOOLS = [tool("weather"), tool("time", {"type": "object"})]
NAMED = {"type": "function", "function": {"name": "weather"}}
OSLO = '{"city": "Oslo", "days": 3}'
WEATHER_CALL, TIME_CALL = call("weather", OSLO), call("time", "{}")


@pytest.fixture(scope="module")
def hermes(tmp_path_factory):
    return small_model(tmp_path_factory.mktemp("hermes"), HERMES)


async def answers_of(model, body, *texts, is_cut=False):
    """Return the whole answer to a request, and the streamed one with its usage."""
    client = client_writing(model, *texts, is_cut=is_cut)
    whole = await client.post(CHAT, body)
    assert whole.status == 200, whole.body
    ChatCompletion.model_validate_json(whole.body, strict=True)
    streamed = await client.post(CHAT, body | {"stream": True, "stream_options": {"include_usage": True}})
    for event in streamed.events[:-1]:
        ChatCompletionChunk.model_validate_json(event, strict=True)
    return whole.json, streamed


def without_ids(message):
    calls = [{name: one for name, one in each.items() if name != "id"} for each in message["tool_calls"]]
    return {**message, "tool_calls": calls}


async def test_calls_of_an_answer_are_the_same_whole_and_streamed(hermes, chat):
    text = "Let me see." + WEATHER_CALL + "\n" + TIME_CALL
    whole, streamed = await answers_of(hermes, chat(tools=TOOLS), text)
    (choice,) = whole["choices"]
    message = choice["message"]
    assert message["content"] == "Let me see."
    assert [one["function"] for one in message["tool_calls"]] == [
        {"name": "weather", "arguments": OSLO},
        {"name": "time", "arguments": "{}"},
    ]
    assert choice["finish_reason"] == "tool_calls"
    ids = [one["id"] for one in message["tool_calls"]]
    assert all(re.fullmatch("call_[0-9a-f]{24}", one) for one in ids)
    assert len(set(ids)) == 2
    repeated = merged(streamed)
    assert repeated.pop("finish_reason") == "tool_calls"
    assert message["reasoning_content"] is None
    absent = {"refusal", "reasoning_content"}  # of a stream
    whole_message = {name: one for name, one in message.items() if name not in absent}
    assert without_ids(repeated) == without_ids(whole_message)
    assert streamed.chunks[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    assert whole["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


async def test_first_chunk_of_a_call_has_its_id_and_name_and_the_others_its_arguments(hermes, chat):
    _, streamed = await answers_of(hermes, chat(tools=TOOLS), WEATHER_CALL)
    deltas = [choice["delta"] for chunk in streamed.chunks for choice in chunk["choices"]]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert deltas[-1] == {}
    pieces = [delta.pop("tool_calls") for delta in deltas[1:-1]]
    assert deltas[1:-1] == [{}] * len(pieces)
    (first,), *others = pieces
    assert first.pop("id").startswith("call_")
    assert first == {"index": 0, "type": "function", "function": {"name": "weather", "arguments": ""}}
    assert len(others) > 3
    assert all(piece.keys() == {"index", "function"} for (piece,) in others)
    assert "".join(piece["function"]["arguments"] for (piece,) in others) == OSLO


async def test_answer_that_is_only_a_call_has_null_as_its_content(hermes, chat):
    whole, streamed = await answers_of(hermes, chat(tools=TOOLS), WEATHER_CALL)
    assert whole["choices"][0]["message"]["content"] is None
    assert merged(streamed)["content"] == ""


async def test_call_of_a_named_function_ends_normally(hermes, chat):
    whole, streamed = await answers_of(hermes, chat(tools=TOOLS, tool_choice=NAMED), WEATHER_CALL)
    assert whole["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"] == OSLO
    assert whole["choices"][0]["finish_reason"] == merged(streamed)["finish_reason"] == "stop"


async def test_call_that_is_cut_has_the_reason_length(hermes, chat):
    whole, streamed = await answers_of(hermes, chat(tools=TOOLS), WEATHER_CALL[:-30], is_cut=True)
    assert whole["choices"][0]["finish_reason"] == merged(streamed)["finish_reason"] == "length"
    arguments = whole["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"]
    assert OSLO.startswith(arguments)
    assert merged(streamed)["tool_calls"][0]["function"]["arguments"] == arguments


async def test_each_choice_has_its_own_calls(hermes, chat):
    texts = (WEATHER_CALL, "No call.", TIME_CALL + TIME_CALL)
    whole, streamed = await answers_of(hermes, chat(tools=TOOLS, n=3), *texts)
    counts = [len(choice["message"].get("tool_calls", ())) for choice in whole["choices"]]
    assert counts == [1, 0, 2]
    reasons = [choice["finish_reason"] for choice in whole["choices"]]
    assert reasons == ["tool_calls", "stop", "tool_calls"]
    assert [merged(streamed, index)["finish_reason"] for index in range(3)] == reasons
    ids = {one["id"] for choice in whole["choices"] for one in choice["message"].get("tool_calls", ())}
    assert len(ids) == 3


async def test_stop_strings_end_content_but_no_arguments(hermes, chat):
    text = "Let me see." + WEATHER_CALL
    whole, _ = await answers_of(hermes, chat(tools=TOOLS, stop=["Oslo", "tool_call", "name"]), text)
    assert whole["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"] == OSLO
    assert whole["choices"][0]["finish_reason"] == "tool_calls"
    whole, streamed = await answers_of(hermes, chat(tools=TOOLS, stop=["me"]), text)
    (choice,) = whole["choices"]
    assert (choice["message"]["content"], choice["finish_reason"], choice["stop_reason"]) == (
        "Let ",
        "stop",
        "me",
    )
    assert "tool_calls" not in choice["message"]
    assert merged(streamed)["content"] == "Let "


async def test_calls_are_text_if_the_request_has_no_tools(hermes, chat):
    whole, _ = await answers_of(hermes, chat(), WEATHER_CALL)
    assert whole["choices"][0]["message"]["content"] == WEATHER_CALL
    assert whole["choices"][0]["finish_reason"] == "stop"


async def test_what_begins_like_a_call_and_is_none_is_content(hermes, chat):
    text = "Write <tool_call>\nlike this"
    whole, streamed = await answers_of(hermes, chat(tools=TOOLS), text)
    assert whole["choices"][0]["message"]["content"] == merged(streamed)["content"] == text
    assert whole["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("family", ["DeepSeek R1", "DeepSeek V3.1"])
async def test_template_that_ignores_tools_gets_calls_in_the_format_that_is_explained(tmp_path, chat, family):
    """The template writes calls in its own format, which the model may remember, too."""
    model = small_model(tmp_path, "{%- set tools = none %}" + FAMILIES[family].template)
    own = written_calls(FAMILIES[family].format, [("weather", {"city": "Oslo", "days": 3})])
    for text in (f"I look it up.</think>\n{WEATHER_CALL}", f"I look it up.</think>\n{own}"):
        body = chat(tools=TOOLS, chat_template_kwargs={"thinking": True})
        client = client_writing(model, text)
        whole = await client.post(CHAT, body)
        job = client.gateway.job
        assert "<tool_call>" in model.tokenizer.decode(job.prompts[0])
        (choice,) = whole.json["choices"]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["reasoning_content"] == "I look it up."
        assert [one["function"] for one in choice["message"]["tool_calls"]] == [
            {"name": "weather", "arguments": OSLO}
        ]
    assert accepts(model, vocabulary_of(model), job.sampling.grammar, f"hm</think>\n{WEATHER_CALL}")


async def test_ids_of_calls_fit_templates_of_mistral(tmp_path, chat):
    mistral = small_model(tmp_path, MISTRAL)
    client = client_writing(mistral, f"[TOOL_CALLS]weather[ARGS]{OSLO}")
    whole = await client.post(CHAT, chat(tools=TOOLS))
    (one,) = whole.json["choices"][0]["message"]["tool_calls"]
    assert one["function"] == {"name": "weather", "arguments": OSLO}
    assert re.fullmatch("[0-9a-z]{9}", one["id"])
    answered = [{"role": "assistant", "tool_calls": [one]}]
    assert (await client.post(CHAT, chat(messages=chat()["messages"] + answered))).status == 200


async def test_log_probabilities_of_calls_are_complete(hermes, chat):
    body = chat(tools=TOOLS, logprobs=True)
    whole, streamed = await answers_of(hermes, body, "So:" + WEATHER_CALL)
    assert whole["choices"][0]["logprobs"] is not None
    assert merged(streamed)["tool_calls"][0]["function"]["arguments"] == OSLO
