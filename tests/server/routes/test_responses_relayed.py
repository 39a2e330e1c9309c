"""Responses of a model that another server also has: a stream has one beginning, one end and the same ids."""

import json

import pytest

from fairlead.base.config import Limits
from fairlead.base.errors import NodeFailed
from fairlead.base.job import CallPiece, Delta, Job, Sampling
from fairlead.dialects.dialect import AnswerContext
from fairlead.dialects.responses.responses import ResponsesDialect
from fake_fleet import FakeFleet
from server.routes.conftest import Reply, client_of
from server.routes.typed_responses import RESPONSES, events_of, final_response


def body_of(**fields):
    return {"model": "small", "input": "hello", "stream": True, **fields}


@pytest.fixture
def both(model):
    """A client of an application with a model that another server also has."""
    return client_of(model, fleet=FakeFleet(["small"], ["small"]))


def ours(*texts):
    return [*([Delta(0, text, [1])] for text in texts), [Delta(0, "", [0], finish_reason="stop")]]


async def raw_events(model, *texts):
    """Return the events of another server, as bytes."""
    reply = await client_of(model, gateway_script=lambda _job: ours(*texts)).post(RESPONSES, body_of())
    return [block.encode() + b"\n\n" for block in reply.body.decode().split("\n\n")[:-1]]


def relayed(events):
    """Return deltas with another server's events."""
    deltas = []
    for raw in events:
        data = json.loads(raw.partition(b"data: ")[2])
        text = data["delta"] if data["type"] == "response.output_text.delta" else ""
        deltas.append([Delta(0, text, raw=[raw], relayed_tokens=bool(text))])
    return deltas


async def test_stream_of_another_server_keeps_its_bytes(both, model):
    events = await raw_events(model, "Hel", "lo")
    deltas = relayed(events)
    deltas[-1][0].finish_reason = "stop"
    both.gateway.script = lambda _job: deltas
    assert (await both.post(RESPONSES, body_of())).body == b"".join(events)


@pytest.mark.parametrize("sent", range(5, 10), ids=lambda sent: f"after {sent} events")
async def test_stream_that_our_engine_continues_is_one_response(both, model, sent):
    events = await raw_events(model, "Hel", "lo")
    begun = relayed(events[:sent])
    written = "".join(delta.text for (delta,) in begun)
    rest = "Hello".removeprefix(written)
    both.gateway.script = lambda _job: [*begun, *(ours(rest) if rest else ours())]
    reply = await both.post(RESPONSES, body_of())
    assert reply.body.startswith(b"".join(events[:sent]))
    response = final_response(events_of(reply))
    assert response["output"][0]["content"][0]["text"] == "Hello"
    assert len(response["output"]) == 1
    assert response["id"] == json.loads(events[0].partition(b"data: ")[2])["response"]["id"]
    others = sum(delta.relayed_tokens for (delta,) in begun)
    assert response["usage"]["output_tokens"] == others + (2 if rest else 1)


async def test_stream_that_fails_after_our_engine_continued_it_has_its_ids(both, model):
    events = await raw_events(model, "Hel", "lo")
    both.gateway.script = lambda _job: [*relayed(events[:5]), [Delta(0, "l", [1])], NodeFailed("it failed")]
    response = final_response(events_of(await both.post(RESPONSES, body_of())))
    assert response["status"] == "failed"
    assert response["output"][0]["content"][0]["text"] == "Hell"


@pytest.mark.parametrize(
    "event",
    [
        {"type": "response.output_text.delta", "delta": "Hel"},
        {"type": "response.output_item.added", "item": {"type": "message"}},
        {"type": "response.output_item.added", "item": 5},
        {"type": "response.output_item.done"},
        {"type": 5},
        [],
    ],
    ids=str,
)
async def test_strange_events_before_ours_do_no_harm(both, event):
    raw = b"data: " + json.dumps(event).encode() + b"\n\n"
    both.gateway.script = lambda _job: [[Delta(0, "Hel", raw=[raw])], *ours("lo")]
    reply = await both.post(RESPONSES, body_of())
    assert events_of_ours(reply, raw)[-1]["type"] == "response.completed"


def events_of_ours(reply, raw):
    assert reply.body.startswith(raw)
    reply.pieces[:] = [reply.body.removeprefix(raw)]
    return events_of(reply)


def test_translated_answer_needs_no_model_of_ours():
    dialect = ResponsesDialect()
    options = dialect.decode(b'{"model": "far", "input": "hello", "top_p": 0.5}', Limits()).options
    job = Job("resp_1", "ana", "far", (), Sampling(max_tokens=9), prompt_estimate=7)
    deltas = [
        Delta(0, reasoning="Hm.", relayed_tokens=1, reasoning_tokens=1),
        Delta(0, "Hi.", relayed_tokens=1),
        Delta(0, calls=[CallPiece(0, "f", "{}")], relayed_tokens=1),
        Delta(0, finish_reason="tool_calls", relayed_tokens=-1),
    ]
    writer = dialect.stream_writer(AnswerContext(job, None, 1, options))
    response = final_response(events_of(Reply(pieces=[writer.write(deltas), writer.end()])))
    assert [item["type"] for item in response["output"]] == ["reasoning", "message", "function_call"]
    assert (response["top_p"], response["temperature"]) == (0.5, 1.0)
    assert response["usage"]["output_tokens"] == 2
    assert response["usage"]["output_tokens_details"] == {"reasoning_tokens": 1}
