"""The generating routes in Quart, as under another ASGI server, respond as those that bypass Quart do."""

import json
import re

import pytest
import trio

from fairlead.base.config import ApiKey
from fairlead.base.errors import EngineFailed, QueueFull
from fairlead.base.job import Delta
from server.routes.conftest import client_of

CHAT = "/v1/chat/completions"
ASK = {"model": "small", "messages": [{"role": "user", "content": "hello"}]}
KEY = {"Authorization": "Bearer sk-1"}
OWN = re.compile(rb"[0-9a-f]{32}|\"created\":\d+")  # ids and times


def without_own(data: bytes) -> bytes:
    return OWN.sub(b"", data)


async def answers_of(model, method, path, body, headers, **options):
    """Return the response that bypasses Quart and the one of Quart, without their ids and times."""
    found = []
    for bypasses_quart in (True, False):
        client = client_of(model, ApiKey(key="sk-1"), bypasses_quart=bypasses_quart, **options)
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        reply = await client.send(method, path, content, headers=headers)
        del reply.headers["x-request-id"]
        found.append((reply.status, reply.headers, without_own(reply.body), reply.is_complete))
    return found


@pytest.mark.parametrize(
    ("status", "method", "path", "body", "headers"),
    [
        (200, "POST", CHAT, ASK, KEY),
        (200, "POST", CHAT, {**ASK, "stream": True, "n": 2}, KEY),
        (200, "POST", "/v1/completions", {"model": "small", "prompt": "hello", "echo": True}, KEY),
        (200, "POST", "/v1/completions", {"model": "small", "prompt": "hello", "stream": True}, KEY),
        (200, "POST", "/tokenize", {"prompt": "hello"}, KEY),
        (200, "POST", "/detokenize", {"tokens": [10]}, KEY),
        (400, "POST", "/v1/embeddings", {"model": "small", "input": "hello"}, KEY),
        (400, "POST", CHAT, {**ASK, "temperature": 9}, KEY),
        (400, "POST", CHAT, b"{", KEY),
        (400, "POST", CHAT, ASK, {**KEY, "Content-Encoding": "gzip"}),
        (404, "POST", CHAT, {**ASK, "model": "other"}, KEY),
        (413, "POST", CHAT, ASK, {**KEY, "Content-Length": str(10**9)}),
        (401, "POST", CHAT, ASK, {}),
        (401, "POST", CHAT, ASK, {"Authorization": "Bearer wrong"}),
        (405, "GET", CHAT, b"", KEY),
        (200, "OPTIONS", CHAT, b"", KEY),
        (404, "POST", CHAT + "/", ASK, KEY),
        (404, "POST", "/v1%2Fchat/completions", ASK, KEY),
    ],
)
async def test_responses_in_quart_and_past_it_are_equal(model, status, method, path, body, headers):
    past, within = await answers_of(model, method, path, body, headers)
    assert past[0] == status
    assert within == past


@pytest.mark.parametrize("stream", [True, False])
async def test_response_that_fails_midway_is_the_same_in_both(model, stream):
    def broken(_job):
        return [[Delta(0, "Hel", [10])], EngineFailed("the engine failed")]

    past, within = await answers_of(
        model, "POST", CHAT, {**ASK, "stream": stream}, KEY, gateway_script=broken
    )
    assert within == past
    assert within[0] == (200 if stream else 500)
    assert within[3] is not stream
    assert b'"code":"engine_failed"' in within[2]


@pytest.mark.parametrize("stream", [True, False])
async def test_refused_job_has_the_refusals_status_and_headers(model, stream):
    client = client_of(model, bypasses_quart=False)
    client.gateway.refusal = QueueFull("the queue is full", retry_after_s=7, estimated_wait_s=9)
    reply = await client.post(CHAT, {**ASK, "stream": stream})
    assert (reply.status, reply.error["code"]) == (429, "queue_full")
    assert (reply.headers["retry-after"], reply.headers["x-estimated-wait"]) == ("7", "9")


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("script", [[None], [[Delta(0, "Hel", [10])], None]])
async def test_disconnect_ends_the_job(model, stream, script, autojump_clock):
    client = client_of(model, gateway_script=lambda _job: script, bypasses_quart=False)
    left = trio.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(
            lambda: client.send(
                "POST", CHAT, json.dumps({**ASK, "stream": stream}).encode(), disconnected=left
            )
        )
        await trio.sleep(1)
        assert (len(client.gateway.jobs), client.gateway.ended) == (1, 0)
        left.set()
        await trio.sleep(1)
        assert client.gateway.ended == 1
