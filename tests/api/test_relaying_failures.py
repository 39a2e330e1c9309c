"""What goes wrong with requests for other servers' models, and who leaves: in whose words it is told."""

import json

import pytest
import trio
import trio.testing

from api.far_away import ALL, CHAT, EVENTS, MESSAGES, asking, streamed
from fairlead.config import ApiKey
from fairlead.errors import NodeFailed, NodeRefused, QueueFull, RequestTimeout
from fairlead.job import Delta
from fake_fleet import FakeFleet

# What goes wrong -----------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ALL)
@pytest.mark.parametrize("stream", [False, True])
async def test_what_their_server_says_of_a_bad_request_is_said_in_its_words(far, path, stream):
    body = b'{"error": {"message":\n "no such tool"}, "detail": 1}'
    far.gateway.refusal = NodeRefused("refused", status=422, body=body)
    reply = await far.post(path, asking(stream=stream), headers={"X-Request-Id": "mine"})
    assert (422, body) == (reply.status, reply.body)
    assert ("application/json", "nosniff") == (
        reply.headers["content-type"],
        reply.headers["x-content-type-options"],
    )
    assert "mine" == reply.headers["x-request-id"]
    assert reply.whole


async def test_what_their_server_refused_without_a_word_is_said_in_ours(far):
    far.gateway.refusal = NodeRefused("far answered 418", status=418)
    reply = await far.post(CHAT, asking())
    assert (418, "far answered 418", "refused") == (
        reply.status,
        reply.error["message"],
        reply.error["code"],
    )


@pytest.mark.parametrize(
    ("said", "data"),
    [
        (b'{"error": {"message":\r\n "no such tool"}}', {"error": {"message": "no such tool"}}),
        (b'{"detail": "no such tool"}', None),
        (b"<html>\n\n</html>", None),
        (b'["error"]', None),
        (b"", None),
    ],
)
async def test_a_refusal_after_an_early_answer_is_an_event_that_clients_understand(
    far, said, data, autojump_clock
):
    far.gateway.wait_s = 17.0
    far.gateway.refusal = NodeRefused("far answered 400: what?", status=400, body=said)
    reply = await far.post(CHAT, asking(stream=True))
    assert 200 == reply.status
    assert not reply.whole
    (event,) = reply.events
    told = json.loads(event)
    if data is None:
        assert ("refused", "far answered 400: what?") == (told["error"]["code"], told["error"]["message"])
    else:
        assert data == told


async def test_a_node_that_fails_amid_a_stream_is_an_error_event_and_a_cut(far):
    far.gateway.script = lambda job: [*streamed(job)[:2], NodeFailed("far ended a stream before its end")]
    reply = await far.post(CHAT, asking(stream=True))
    begun, error = b"".join(EVENTS[:2]), reply.body[len(b"".join(EVENTS[:2])) :]
    assert begun + error == reply.body
    assert "node_failed" == json.loads(error.removeprefix(b"data: "))["error"]["code"]
    assert not reply.whole


async def test_a_client_that_does_not_stream_never_sees_part_of_an_answer(far):
    far.gateway.script = lambda job: [[Delta(0, raw=[b"half"])], RequestTimeout("too long")]
    reply = await far.post(CHAT, asking())
    assert (408, "request_timeout") == (reply.status, reply.error["code"])
    assert b"half" not in reply.body


@pytest.mark.parametrize(
    "script",
    [lambda job: [None], lambda job: [[Delta(0)], None], lambda job: [*streamed(job)[:2], None]],
)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, MESSAGES])
async def test_a_client_that_leaves_ends_its_job_wherever_it_is(far, path, stream, script):
    far.gateway.script = script
    left = trio.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: far.post(path, asking(stream=stream), left=left))
        await trio.testing.wait_all_tasks_blocked()
        assert (1, 0) == (len(far.gateway.jobs), far.gateway.ended)
        left.set()
    assert 1 == far.gateway.ended


@pytest.mark.parametrize("wait_s", [3.0, 30.0])
async def test_a_client_that_leaves_the_queue_ends_its_job(far, autojump_clock, wait_s):
    far.gateway.wait_s = 1000.0
    left = trio.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: far.post(CHAT, asking(stream=True), left=left))
        await trio.sleep(wait_s)  # before and after the early answer
        left.set()
    assert 1 == far.gateway.ended
    assert wait_s == trio.current_time()


# Anthropic's dialect -------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [MESSAGES, "/v1/messages/count_tokens"])
async def test_errors_of_anthropics_routes_have_its_form(client_with, path):
    key = ApiKey("sk")
    client = client_with(key, fleet=FakeFleet([], ["far"]))

    async def told(method="POST", body=None, key="sk"):
        reply = await client.send(method, path, body or asking(), headers={"x-api-key": key})
        assert {"type": "error", "error": reply.json["error"]} == reply.json
        return reply.status, reply.json["error"]["type"], reply.json["error"]["code"]

    assert (401, "authentication_error", "invalid_api_key") == await told(key="wrong")
    assert (404, "not_found_error", "model_not_found") == await told(body=asking(model="huge"))
    assert (400, "invalid_request_error", "invalid_request") == await told(body=b"{")
    assert (405, "invalid_request_error", "method_not_allowed") == await told("GET")
    assert (413, "request_too_large", "body_too_large") == await told(body=b" " * (16 * 2**20 + 1))
    client.gateway.refusal = QueueFull("full", retry_after_s=7)
    reply = await client.post(path, asking(), headers={"x-api-key": "sk"})
    assert (429, "rate_limit_error", "7") == (
        reply.status,
        reply.json["error"]["type"],
        reply.headers["retry-after"],
    )
    client.gateway.refusal = NodeFailed("gone")
    assert (502, "api_error", "node_failed") == await told()
    client.gateway.refusal = ZeroDivisionError("secret")
    assert (500, "api_error", "internal_error") == await told()


async def test_an_error_in_anthropics_stream_is_an_event_of_that_name(far):
    far.gateway.script = lambda job: [[Delta(0, "a", raw=[b"event: ping\ndata: {}\n\n"])], NodeFailed("gone")]
    reply = await far.post(MESSAGES, asking(stream=True))
    head, _, error = reply.body.partition(b"event: error\n")
    assert b"event: ping\ndata: {}\n\n" == head
    told = json.loads(error.removeprefix(b"data: "))
    assert ("error", "api_error") == (told["type"], told["error"]["type"])
    assert not reply.whole
