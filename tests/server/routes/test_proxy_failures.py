"""Failures and disconnects of relayed requests, and the format in which errors are reported."""

import json

import pytest
import trio
import trio.testing

from fairlead.base.config import ApiKey
from fairlead.base.errors import NodeFailed, NodeRefused, QueueFull, RequestTimeout
from fairlead.base.job import Delta
from fake_fleet import FakeFleet
from server.routes.remote_responses import ALL, CHAT, EVENTS, MESSAGES, event_stream, relay_body

# Failures ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ALL)
@pytest.mark.parametrize("stream", [False, True])
async def test_refusal_by_another_server_is_relayed_unchanged(relay_client, path, stream):
    body = b'{"error": {"message":\n "no such tool"}, "detail": 1}'
    relay_client.gateway.refusal = NodeRefused("refused", status=422, body=body)
    reply = await relay_client.post(path, relay_body(stream=stream), headers={"X-Request-Id": "mine"})
    assert (reply.status, reply.body) == (422, body)
    assert (
        reply.headers["content-type"],
        reply.headers["x-content-type-options"],
    ) == ("application/json", "nosniff")
    assert reply.headers["x-request-id"] == "mine"
    assert reply.is_complete


async def test_refusal_without_a_body_is_reported_in_our_format(relay_client):
    relay_client.gateway.refusal = NodeRefused("remote answered 418", status=418)
    reply = await relay_client.post(CHAT, relay_body())
    assert (
        reply.status,
        reply.error["message"],
        reply.error["code"],
    ) == (418, "remote answered 418", "refused")


@pytest.mark.parametrize(
    ("response", "data"),
    [
        (b'{"error": {"message":\r\n "no such tool"}}', {"error": {"message": "no such tool"}}),
        (b'{"detail": "no such tool"}', None),
        (b"<html>\n\n</html>", None),
        (b'["error"]', None),
        (b"", None),
    ],
)
async def test_refusal_after_an_early_response_is_an_error_event(
    relay_client, response, data, autojump_clock
):
    relay_client.gateway.wait_s = 17.0
    relay_client.gateway.refusal = NodeRefused("remote answered 400: what?", status=400, body=response)
    reply = await relay_client.post(CHAT, relay_body(stream=True))
    assert reply.status == 200
    assert not reply.is_complete
    (event,) = reply.events
    error = json.loads(event)
    if data is None:
        assert (error["error"]["code"], error["error"]["message"]) == (
            "refused",
            "remote answered 400: what?",
        )
    else:
        assert data == error


async def test_node_that_fails_during_a_stream_causes_an_error_event_and_a_cut(relay_client):
    relay_client.gateway.script = lambda job: [
        *event_stream(job)[:2],
        NodeFailed("remote ended a stream before its end"),
    ]
    reply = await relay_client.post(CHAT, relay_body(stream=True))
    begun, error = b"".join(EVENTS[:2]), reply.body[len(b"".join(EVENTS[:2])) :]
    assert begun + error == reply.body
    assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == "node_failed"
    assert not reply.is_complete


async def test_without_streaming_a_failed_response_has_no_partial_text(relay_client):
    relay_client.gateway.script = lambda job: [[Delta(0, raw=[b"half"])], RequestTimeout("too long")]
    reply = await relay_client.post(CHAT, relay_body())
    assert (reply.status, reply.error["code"]) == (408, "request_timeout")
    assert b"half" not in reply.body


@pytest.mark.parametrize(
    "script",
    [lambda job: [None], lambda job: [[Delta(0)], None], lambda job: [*event_stream(job)[:2], None]],
)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, MESSAGES])
async def test_disconnect_ends_the_job_in_every_state(relay_client, path, stream, script):
    relay_client.gateway.script = script
    left = trio.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: relay_client.post(path, relay_body(stream=stream), disconnected=left))
        await trio.testing.wait_all_tasks_blocked()
        assert (len(relay_client.gateway.jobs), relay_client.gateway.ended) == (1, 0)
        left.set()
    assert relay_client.gateway.ended == 1


@pytest.mark.parametrize("wait_s", [3.0, 30.0])
async def test_disconnect_ends_a_queued_job(relay_client, autojump_clock, wait_s):
    relay_client.gateway.wait_s = 1000.0
    left = trio.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: relay_client.post(CHAT, relay_body(stream=True), disconnected=left))
        await trio.sleep(wait_s)  # before and after the early response
        left.set()
    assert relay_client.gateway.ended == 1
    assert wait_s == trio.current_time()


# Anthropic's dialect -------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [MESSAGES, "/v1/messages/count_tokens"])
async def test_errors_of_anthropics_routes_have_its_format(client_with, path):
    key = ApiKey("sk")
    client = client_with(key, fleet=FakeFleet([], ["remote"]))

    async def refused(method="POST", body=None, key="sk"):
        reply = await client.send(method, path, body or relay_body(), headers={"x-api-key": key})
        assert {"type": "error", "error": reply.json["error"]} == reply.json
        return reply.status, reply.json["error"]["type"], reply.json["error"]["code"]

    assert await refused(key="wrong") == (401, "authentication_error", "invalid_api_key")
    assert await refused(body=relay_body(model="huge")) == (404, "not_found_error", "model_not_found")
    assert await refused(body=b"{") == (400, "invalid_request_error", "invalid_request")
    assert await refused("GET") == (405, "invalid_request_error", "method_not_allowed")
    assert await refused(body=b" " * (16 * 2**20 + 1)) == (413, "request_too_large", "body_too_large")
    client.gateway.refusal = QueueFull("full", retry_after_s=7)
    reply = await client.post(path, relay_body(), headers={"x-api-key": "sk"})
    assert (
        reply.status,
        reply.json["error"]["type"],
        reply.headers["retry-after"],
    ) == (429, "rate_limit_error", "7")
    client.gateway.refusal = NodeFailed("gone")
    assert await refused() == (502, "api_error", "node_failed")
    client.gateway.refusal = ZeroDivisionError("secret")
    assert await refused() == (500, "api_error", "internal_error")


async def test_error_in_anthropics_stream_is_an_event_named_error(relay_client):
    relay_client.gateway.script = lambda job: [
        [Delta(0, "a", raw=[b"event: ping\ndata: {}\n\n"])],
        NodeFailed("gone"),
    ]
    reply = await relay_client.post(MESSAGES, relay_body(stream=True))
    head, _, error = reply.body.partition(b"event: error\n")
    assert head == b"event: ping\ndata: {}\n\n"
    body = json.loads(error.removeprefix(b"data: "))
    assert (body["type"], body["error"]["type"]) == ("error", "api_error")
    assert not reply.is_complete
