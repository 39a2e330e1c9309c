"""Requests over real sockets free their objects by reference counting, without the garbage collector."""

import gc
import json
import socket
from types import AsyncGeneratorType, CoroutineType, FrameType, GeneratorType

import pytest
import trio

from server.routes.raw_http import get, post, serving

REQUESTS = 3
JSON = "Content-Type: application/json"


def from_package(found: object) -> bool:
    """Return whether an object is of a class of ours, or a frame or coroutine of our code."""
    match found:
        case CoroutineType():
            code = found.cr_code
        case GeneratorType():
            code = found.gi_code
        case AsyncGeneratorType():
            code = found.ag_code
        case FrameType():
            code = found.f_code
        case _:
            return type(found).__module__.startswith("fairlead")
    return "/fairlead/" in code.co_filename


def chat(**changes) -> bytes:
    body = {"model": "small", "messages": [{"role": "user", "content": "hello"}], **changes}
    return post(json.dumps(body).encode(), "/v1/chat/completions", JSON)


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (get("/health"), 200),
        (get("/no/such/path"), 404),
        (get("/v1/chat/completions"), 405),
        (get("/v1/models").replace(b"Host: localhost", b"Host: evil.example"), 403),
        (post(b"{}", "/models/load", JSON).replace(b"Host: localhost", b"Host: localhost"), 400),
        (post(b'{"model": "small", "prompt": "hello"}', "/tokenize", JSON), 200),
        (chat(), 200),
        (chat(stream=True), 200),
        (chat(max_tokens="x"), 400),
        (chat(model="other"), 404),
    ],
    ids=lambda value: value[:40].decode().split(" HTTP")[0] if isinstance(value, bytes) else str(value),
)
async def test_request_leaves_no_reference_cycle(client, request_, status):
    async with serving(client.app) as server:
        connection = await server.connect()

        async def request():
            assert (await connection.fetch(request_)).status == status

        assert await left_by(request) == []


@pytest.mark.parametrize("request_", [b"", get("/health"), b"GET / HTTP/9\r\n\r\n", get("/health")[:9]])
async def test_connection_leaves_no_reference_cycle(client, request_):
    async with serving(client.app) as server:

        async def connect():
            connection = await server.connect()
            await connection.send(request_)
            connection.socket.shutdown(socket.SHUT_WR)
            await connection.end()
            connection.socket.close()
            await trio.testing.wait_all_tasks_blocked()

        assert await left_by(connect) == []


async def left_by(action) -> list[str]:
    """Return the names of our classes with objects in reference cycles that an action leaves."""
    await action()  # which fills caches; the objects of the last one below may still be in use
    gc.collect()
    gc.freeze()  # the collection below visits only later objects
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        for _ in range(REQUESTS):
            await action()
        gc.collect()
        return sorted({type(found).__qualname__ for found in gc.garbage if from_package(found)})
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
