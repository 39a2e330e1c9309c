"""Streams in OpenAI's Responses API: each is validated event by event, and equals the whole answer."""

import json
import re

import pytest
from openai.types.responses import Response

from fairlead.base.config import QueueConfig
from fairlead.base.errors import Cancelled, NodeFailed, QueueTimeout, RateLimited
from fairlead.base.job import Delta, TokenLogprob
from server.routes.conftest import client_of, small_model
from server.routes.typed_responses import RESPONSES, events_of, final_response, kinds_of, without_times
from server.routes.written_answers import HERMES, WEATHER, call, client_writing

TOOLS = [
    {"type": "function", "name": "weather", "parameters": WEATHER, "strict": True},
    {"type": "function", "name": "time", "parameters": {"type": "object"}, "strict": None},
]
OSLO = '{"city": "Oslo", "days": 3}'
WEATHER_CALL, TIME_CALL = call("weather", OSLO), call("time", "{}")
THOUGHT = "<think>\nIt is easy.\n</think>\n\n"
TEXT = ["output_item.added", "content_part.added", "output_text.delta", "output_text.done"]
TEXT += ["content_part.done", "output_item.done"]
REASONING = [kind.replace("output_text", "reasoning_text") for kind in TEXT]
CALL = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done"]
CALL += ["output_item.done"]
BEGIN = ["created", "in_progress"]
COMPLETED, INCOMPLETE = ["completed"], ["incomplete"]
LOGPROBS = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}


@pytest.fixture(scope="module")
def hermes(tmp_path_factory):
    return small_model(tmp_path_factory.mktemp("hermes"), HERMES)


def body_of(**fields):
    return {"model": "small", "input": "hello", **fields}


async def answers_of(model, body, text, *, is_cut=False):
    """Return the whole response to a request, and the events of the streamed one, which must equal it."""
    client = client_writing(model, text, is_cut=is_cut)
    whole = await client.post(RESPONSES, body)
    assert whole.status == 200, whole.body
    Response.model_validate_json(whole.body, strict=True)
    events = events_of(await client.post(RESPONSES, body | {"stream": True}))
    assert without_times(final_response(events)) == without_times(whole.json)
    return whole.json, events


@pytest.mark.parametrize(
    ("text", "is_cut", "kinds"),
    [
        ("Four.", False, [*BEGIN, *TEXT, *COMPLETED]),
        ("Four", True, [*BEGIN, *TEXT, *INCOMPLETE]),
        (THOUGHT + "Four.", False, [*BEGIN, *REASONING, *TEXT, *COMPLETED]),
        ("<think>\nIt is", True, [*BEGIN, *REASONING, *INCOMPLETE]),
        (WEATHER_CALL, False, [*BEGIN, *CALL, *COMPLETED]),
        ("So:" + WEATHER_CALL + "\n" + TIME_CALL, False, [*BEGIN, *TEXT, *CALL, *CALL, *COMPLETED]),
        (THOUGHT + WEATHER_CALL, False, [*BEGIN, *REASONING, *CALL, *COMPLETED]),
        (THOUGHT + "So:" + TIME_CALL, False, [*BEGIN, *REASONING, *TEXT, *CALL, *COMPLETED]),
        (WEATHER_CALL[:-30], True, [*BEGIN, *CALL, *INCOMPLETE]),
        ("", False, [*BEGIN, *(kind for kind in TEXT if kind != "output_text.delta"), *COMPLETED]),
        ("", True, [*BEGIN, *(kind for kind in TEXT if kind != "output_text.delta"), *INCOMPLETE]),
        (THOUGHT, False, [*BEGIN, *REASONING, *(k for k in TEXT if k != "output_text.delta"), *COMPLETED]),
    ],
)
async def test_events_come_in_the_documented_order(hermes, text, is_cut, kinds):
    _, events = await answers_of(hermes, body_of(tools=TOOLS), text, is_cut=is_cut)
    assert kinds_of(events) == kinds


async def test_response_has_reasoning_message_and_calls_as_items(hermes):
    text = THOUGHT + "Let me see." + WEATHER_CALL + TIME_CALL
    response, _ = await answers_of(hermes, body_of(tools=TOOLS), text)
    reasoning, message, weather, time = response["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "It is easy."}]
    assert (reasoning["type"], reasoning["summary"]) == ("reasoning", [])
    assert message["role"] == "assistant"
    assert message["content"] == [
        {"type": "output_text", "text": "Let me see.", "annotations": [], "logprobs": []}
    ]
    assert (weather["name"], weather["arguments"]) == ("weather", OSLO)
    assert (time["name"], time["arguments"]) == ("time", "{}")
    prefixes = [item["id"].partition("_")[0] for item in response["output"]]
    assert prefixes == ["rs", "msg", "fc", "fc"]
    assert len({item["id"] for item in response["output"]}) == 4
    assert all(item["status"] == "completed" for item in response["output"])
    assert all(re.fullmatch("call_[0-9a-f]{24}", item["call_id"]) for item in (weather, time))
    assert (response["status"], response["error"], response["incomplete_details"]) == (
        "completed",
        None,
        None,
    )


async def test_only_the_last_item_of_a_cut_response_is_incomplete(hermes):
    text = "Let me see." + WEATHER_CALL[:-30]
    response, _ = await answers_of(hermes, body_of(tools=TOOLS), text, is_cut=True)
    assert [item["status"] for item in response["output"]] == ["completed", "incomplete"]
    assert OSLO.startswith(response["output"][1]["arguments"])
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["completed_at"] is None


async def test_text_after_a_call_is_a_message_of_its_own(hermes):
    client = client_writing(hermes, "So:" + TIME_CALL + "Done.")
    events = events_of(await client.post(RESPONSES, body_of(tools=TOOLS, stream=True)))
    output = final_response(events)["output"]
    assert [item["type"] for item in output] == ["message", "function_call", "message"]
    assert [output[i]["content"][0]["text"] for i in (0, 2)] == ["So:", "Done."]


# Log-probabilities -----------------------------------------------------------------------------------


def scored(text):
    """Return a script that generates a text with the log-probabilities of its tokens."""

    def script(job):
        assert job.sampling.logprobs == 2
        tokens = [TokenLogprob(10 + i, -0.5 * i, ((10 + i, -0.5 * i), (1, -4.0))) for i in range(len(text))]
        deltas = [[Delta(0, one, [token.token_id], [token])] for one, token in zip(text, tokens, strict=True)]
        end = Delta(0, "", [0], [TokenLogprob(0, 0.0, ())], finish_reason="stop")
        return [*deltas, [end]]

    return script


async def test_log_probabilities_are_those_of_the_messages_tokens(model):
    client = client_of(model, gateway_script=scored("abc"))
    whole = (await client.post(RESPONSES, body_of(**LOGPROBS))).json
    Response.model_validate_json(json.dumps(whole), strict=True)
    events = events_of(await client.post(RESPONSES, body_of(**LOGPROBS, stream=True)))
    assert without_times(final_response(events)) == without_times(whole)
    (part,) = whole["output"][0]["content"]
    assert len(part["logprobs"]) == 4
    assert part["logprobs"][1]["logprob"] == -0.5
    assert len(part["logprobs"][1]["top_logprobs"]) == 2
    deltas = [event["logprobs"] for event in events if event["type"].endswith("text.delta")]
    assert [one for listed in deltas for one in listed] == part["logprobs"]


# Failures --------------------------------------------------------------------------------------------


def failing(error, *steps):
    return lambda _job: [*steps, error]


async def test_failure_after_the_first_byte_is_an_event_and_cuts_the_stream(model):
    error = NodeFailed("the node failed")
    client = client_of(model, gateway_script=failing(error, [Delta(0, "Hel", [1])]))
    reply = await client.post(RESPONSES, body_of(stream=True))
    assert (reply.status, reply.is_complete) == (200, False)
    events = events_of(reply)
    assert kinds_of(events) == [*BEGIN, *TEXT[:3], "failed"]
    response = final_response(events)
    assert response["error"] == {
        "code": "server_error",
        "message": "the node failed",
        "param": None,
        "type": "node_failed",
    }
    assert response["output"][0]["content"][0]["text"] == "Hel"
    assert response["output"][0]["status"] == "incomplete"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (QueueTimeout("too late"), "server_error"),
        (Cancelled("cancelled"), "server_error"),
        (RateLimited("too many"), "rate_limit_exceeded"),
    ],
)
async def test_failure_while_waiting_is_a_whole_failed_stream(model, error, code, autojump_clock):
    client = client_of(model, queue=QueueConfig(keep_alive_s=1))
    client.gateway.wait_s, client.gateway.refusal = 12, error
    reply = await client.post(RESPONSES, body_of(stream=True))
    assert reply.body.startswith(b": queued position=")
    events = events_of(reply)
    assert kinds_of(events) == [*BEGIN, "failed"]
    response = final_response(events)
    assert (response["error"]["code"], response["output"]) == (code, [])
    assert not reply.is_complete
