"""A node that serves OpenAI's chats, and fails the requests that say so: `fail 503`."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

import trio

WORD_S = 0.04
WORDS = 100


@asynccontextmanager
async def failing_node() -> AsyncIterator[int]:
    """Serve during the block; yield the port."""

    async def serve(stream: trio.SocketStream) -> None:
        received = b""
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            while True:
                while b"\r\n\r\n" not in received:
                    data = bytes(await stream.receive_some(65536))
                    if not data:
                        return
                    received += data
                head, _, received = received.partition(b"\r\n\r\n")
                length = next(
                    (
                        int(line[15:])
                        for line in head.lower().split(b"\r\n")
                        if line.startswith(b"content-length:")
                    ),
                    0,
                )
                while len(received) < length:
                    received += bytes(await stream.receive_some(65536))
                content, received = received[:length], received[length:]
                await _respond(stream, content)

    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(partial(trio.serve_tcp, serve, 0, host="127.0.0.1"))
        yield listeners[0].socket.getsockname()[1]
        nursery.cancel_scope.cancel()


async def _respond(stream: trio.SocketStream, content: bytes) -> None:
    for status in (502, 503, 504):
        if b"fail %d" % status in content:
            await stream.send_all(b"HTTP/1.1 %d Failed\r\nContent-Length: 0\r\n\r\n" % status)
            return
    if not content:
        document = b'{"object": "list", "data": [{"id": "far"}]}'
        head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        await stream.send_all(head % len(document) + document)
        return
    await stream.send_all(
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    events: list[dict[str, Any]] = [
        {"delta": {"content": f"{number} "}, "finish_reason": None} for number in range(WORDS)
    ]
    for choice in [*events, {"delta": {}, "finish_reason": "stop"}]:
        await trio.sleep(WORD_S)
        event = b"data: %b\n\n" % json.dumps({"id": "c", "choices": [{"index": 0, **choice}]}).encode()
        await stream.send_all(b"%x\r\n%b\r\n" % (len(event), event))
    await stream.send_all(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
