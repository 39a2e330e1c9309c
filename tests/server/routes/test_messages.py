"""Anthropic's Messages for models of our own engine: answers, whole and streamed, and their ends."""

import json
import re

import pytest

from fairlead.base.config import ApiKey
from fairlead.base.errors import ModelLoading, NodeFailed, NodeRefused, QueueFull, QueueTimeout
from fairlead.base.job import CallPiece, Delta, Job, Sampling
from fairlead.dialects.anthropic.messages import MessagesDialect
from fairlead.dialects.dialect import AnswerContext
from server.routes.conftest import client_of, small_model
from server.routes.message_events import PATH, events_of, read, without_ids
from server.routes.written_answers import CHAT, HERMES, call, client_writing, tool

THOUGHT = "<think>\nIt is easy.\n</think>\n\n"
OSLO = '{"city": "Oslo", "days": 3}'
WEATHER_CALL, TIME_CALL = call("weather", OSLO), call("time", "{}")
SCHEMAS = {"weather": tool("weather")["function"]["parameters"], "time": {"type": "object"}}
TOOLS = [{"name": name, "input_schema": schema} for name, schema in SCHEMAS.items()]
NAMED = {"type": "tool", "name": "weather"}
TEXT_KINDS = ["text", "text_delta"]


@pytest.fixture(scope="module")
def hermes(tmp_path_factory):
    return small_model(tmp_path_factory.mktemp("hermes"), HERMES)


def body_of(**fields):
    messages = [{"role": "user", "content": "hello"}]
    return {"model": "small", "max_tokens": 100, "messages": messages, **fields}


async def answers_of(model, body, *texts, is_cut=False):
    """Return the whole answer, and the types in the streamed one, which is the same."""
    client = client_writing(model, *texts, is_cut=is_cut)
    whole = await client.post(PATH, body)
    assert whole.status == 200, whole.body
    streamed = await client.post(PATH, body | {"stream": True})
    assert streamed.is_complete
    message, kinds = read(events_of(streamed.body))
    assert without_ids(message) == without_ids(whole.json)
    return whole.json, kinds


# Answers -------------------------------------------------------------------------------------------


async def test_answer_is_a_message_with_one_text(client, model):
    reply = await client.post(PATH, body_of())
    assert reply.status == 200
    assert reply.json.pop("id").startswith("msg-")
    prompt = len(client.gateway.job.prompts[0])
    assert {name: one for name, one in reply.json.items() if name != "id"} == {
        "type": "message",
        "role": "assistant",
        "model": "small",
        "content": [{"type": "text", "text": "Hello world"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": prompt,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 4,
        },
    }


async def test_events_of_a_text_are_those_of_anthropic(client):
    reply = await client.post(PATH, body_of(stream=True))
    assert reply.headers["content-type"] == "text/event-stream"
    start, *others = events_of(reply.body)
    prompt = len(client.gateway.job.prompts[0])
    assert start["message"]["usage"] == {
        "input_tokens": prompt,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": 0,
    }
    assert others == [
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Hello"}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": " world"}},
        {"type": "content_block_stop", "index": 0},
        {
            "type": "message_delta",
            "delta": {"stop_reason": "end_turn", "stop_sequence": None},
            "usage": {**start["message"]["usage"], "output_tokens": 4},
        },
        {"type": "message_stop"},
    ]
    read([start, *others])


async def test_thinking_text_and_calls_are_blocks_in_their_order(hermes):
    text = THOUGHT + "Let me see." + WEATHER_CALL + "\n" + TIME_CALL
    message, kinds = await answers_of(hermes, body_of(tools=TOOLS), text)
    thinking, said, weather, time = message["content"]
    assert (thinking["type"], thinking["thinking"]) == ("thinking", "It is easy.")
    assert thinking["signature"]
    assert said == {"type": "text", "text": "Let me see."}
    assert all(re.fullmatch("toolu_[0-9a-f]{24}", one.pop("id")) for one in (weather, time))
    assert weather == {"type": "tool_use", "name": "weather", "input": {"city": "Oslo", "days": 3}}
    assert time == {"type": "tool_use", "name": "time", "input": {}}
    assert message["stop_reason"] == "tool_use"
    of_call = ["tool_use", "input_json_delta"]
    assert kinds == ["thinking", "thinking_delta", "signature_delta", *TEXT_KINDS, *of_call, *of_call]
    assert message["usage"]["output_tokens_details"]["thinking_tokens"] > 0


async def test_thinking_that_shall_be_omitted_has_only_its_signature(hermes):
    thinking = {"type": "adaptive", "display": "omitted"}
    message, kinds = await answers_of(hermes, body_of(thinking=thinking), THOUGHT + "Four.")
    first, said = message["content"]
    assert (first["thinking"], said["text"]) == ("", "Four.")
    assert first["signature"]
    assert kinds == ["thinking", "signature_delta", *TEXT_KINDS]


@pytest.mark.parametrize("text", ["", "<think>\n</think>\n\n"])
async def test_empty_answer_is_an_empty_text(hermes, text):
    message, kinds = await answers_of(hermes, body_of(), text)
    assert message["content"] == [{"type": "text", "text": ""}]
    assert (message["stop_reason"], kinds) == ("end_turn", ["text"])


@pytest.mark.parametrize(
    ("fields", "text", "is_cut", "expected"),
    [
        ({}, "Four.", False, ("end_turn", None)),
        ({}, "Four", True, ("max_tokens", None)),
        ({"stop_sequences": ["ur"]}, "Four.", False, ("stop_sequence", "ur")),
        ({"stop_sequences": ["ur"]}, "Fo", True, ("max_tokens", None)),
        ({"tools": TOOLS}, WEATHER_CALL, False, ("tool_use", None)),
        ({"tools": TOOLS, "tool_choice": NAMED}, WEATHER_CALL, False, ("tool_use", None)),
        ({"tools": TOOLS, "stop_sequences": ["!"]}, WEATHER_CALL + "!", False, ("tool_use", None)),
        ({"tools": TOOLS}, WEATHER_CALL, True, ("max_tokens", None)),
        ({"tools": TOOLS}, WEATHER_CALL[:-30], True, ("max_tokens", None)),
        ({}, "<think>\nIt is", True, ("max_tokens", None)),
    ],
)  # fmt: skip
async def test_reason_of_the_end(hermes, fields, text, is_cut, expected):
    message, _ = await answers_of(hermes, body_of(**fields), text, is_cut=is_cut)
    assert (message["stop_reason"], message["stop_sequence"]) == expected


async def test_arguments_that_are_cut_are_an_empty_input(hermes):
    message, kinds = await answers_of(hermes, body_of(tools=TOOLS), WEATHER_CALL[:-30], is_cut=True)
    assert message["content"][0]["input"] == {}
    assert kinds == ["tool_use", "input_json_delta"]


async def test_text_after_a_call_does_not_cut_the_call_where_deltas_are_merged(hermes):
    client = client_of(hermes)
    begun, rest = Delta(0, calls=[CallPiece(0, "weather", '{"city": ')]), CallPiece(0, None, '"Oslo"}')
    end = Delta(0, "Done.", calls=[rest, CallPiece(1, "time", "{}")], finish_reason="tool_calls")
    client.gateway.script = lambda job: [[begun], [end]]
    reply = await client.post(PATH, body_of(tools=TOOLS, stream=True))
    message, _ = read(events_of(reply.body))
    assert [block["type"] for block in message["content"]] == ["tool_use", "text", "tool_use"]
    assert message["content"][0]["input"] == {"city": "Oslo"}


async def test_answer_of_another_server_is_written_without_our_model():
    job = Job("msg-1", "a", "remote", (), Sampling(9), prompt_estimate=5)
    context = AnswerContext(job, None, 0)
    piece, rest = CallPiece(0, "weather", '{"a": '), CallPiece(0, None, "1}")
    deltas = [
        Delta(0, "Hello", reasoning="I", relayed_tokens=2),
        Delta(0, calls=[piece], relayed_tokens=1),
        Delta(0, calls=[rest], relayed_tokens=1),
        Delta(0, finish_reason="tool_calls", relayed_tokens=-1),
    ]
    writer = MessagesDialect().stream_writer(context)
    message, _ = read(events_of(b"".join(writer.write([delta]) for delta in deltas) + writer.end()))
    assert writer.end() == b""
    assert [block["type"] for block in message["content"]] == ["thinking", "text", "tool_use"]
    assert (message["stop_reason"], message["usage"]["output_tokens"]) == ("tool_use", 3)
    for delta in deltas[1:]:
        deltas[0].merge(delta)
    whole = json.loads(MessagesDialect().write_response(context, deltas[:1]))
    assert without_ids(whole) == without_ids(message)


# Waiting and errors --------------------------------------------------------------------------------


async def test_waiting_stream_gets_pings_before_its_message(client, autojump_clock):
    client.gateway.wait_s = 28.0
    reply = await client.post(PATH, body_of(stream=True))
    events = events_of(reply.body)
    assert events[:3] == [{"type": "ping"}] * 3
    assert read(events[3:])[0]["content"] == [{"type": "text", "text": "Hello world"}]
    assert (reply.headers["x-estimated-wait"], reply.headers["x-queue-position"]) == ("104", "13")


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (QueueFull("full", retry_after_s=7), 429, "rate_limit_error"),
        (ModelLoading("loading"), 503, "overloaded_error"),
        (QueueTimeout("late"), 504, "timeout_error"),
        (NodeFailed("gone"), 502, "api_error"),
        (ZeroDivisionError("secret"), 500, "api_error"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_refusal_has_its_status_type_and_headers(client, error, status, kind, stream):
    client.gateway.refusal = error
    reply = await client.post(PATH, body_of(stream=stream))
    assert (reply.status, reply.json["type"], reply.error["type"]) == (status, "error", kind)
    assert "secret" not in reply.error["message"]
    if status in (429, 503):
        assert reply.headers["retry-after"] == str(getattr(error, "retry_after_s", None) or 2)


async def test_error_of_another_server_keeps_its_form_in_an_event(client):
    body = b'{"type": "error",\n "error": {"type": "overloaded_error", "message": "busy"}}'
    client.gateway.script = lambda job: [[Delta(0, "a", [1])], NodeRefused("busy", body=body)]
    reply = await client.post(PATH, body_of(stream=True))
    assert events_of(reply.body)[-1]["error"] == {"type": "overloaded_error", "message": "busy"}


async def test_prompt_that_is_too_long_is_named_so(client):
    messages = [{"role": "user", "content": "hello " * 5000}]
    reply = await client.post(PATH, body_of(messages=messages))
    assert (reply.status, reply.error["type"]) == (400, "invalid_request_error")
    assert (reply.error["code"], reply.error["param"]) == ("context_length_exceeded", "messages")
    assert reply.error["message"].startswith("prompt is too long: ")


@pytest.mark.parametrize("bypasses_quart", [True, False])
async def test_answers_and_errors_have_the_header_of_the_request_id(model, bypasses_quart):
    client = client_of(model, ApiKey("sk-1"), bypasses_quart=bypasses_quart)
    headers = {"x-api-key": "sk-1", "X-Request-Id": "mine", "anthropic-version": "2023-06-01"}
    for fields, status in (({}, 200), ({"stream": True}, 200), ({"top_p": 7}, 400)):
        reply = await client.post(f"{PATH}?beta=true", body_of(**fields), headers=headers)
        assert (reply.status, reply.headers["request-id"], reply.headers["x-request-id"]) == (
            status,
            "mine",
            "mine",
        )
    refused = await client.post(PATH, body_of())
    assert (refused.status, refused.error["type"]) == (401, "authentication_error")
    assert refused.headers["request-id"] == refused.headers["x-request-id"]
    other = await client.post(CHAT, body_of(), headers=headers)
    assert "request-id" not in other.headers
