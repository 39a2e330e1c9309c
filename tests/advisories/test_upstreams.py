"""Remote nodes that answer with a redirect, a request for credentials or a decompression bomb."""

import gzip
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio

from advisories.tries import tries
from fairlead.base.errors import NodeFailed
from fairlead.nodes.http.client import Upstream
from fairlead.nodes.remote_node import RemoteNode
from nodes.listening import CollectedDeltas, RecordingListener, generated, relayed_job

KEY = "sk-node-0123456789abcdef"
BOMB = gzip.compress(b"data: " + bytes(20_000_000))


class HostileServer:
    """A server that gives every request the same answer and records the requests."""

    def __init__(self) -> None:
        self.answer = b""
        self.requests: list[bytes] = []
        self.url = ""

    async def serve(self, *, task_status: trio.TaskStatus[None]) -> None:
        """Listen on the loopback."""
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        self.url = f"http://127.0.0.1:{listener.socket.getsockname()[1]}"
        task_status.started()
        async with listener:
            while True:
                async with await listener.accept() as stream:
                    with trio.move_on_after(30):
                        await self._serve_connection(stream)

    async def _serve_connection(self, stream: trio.SocketStream) -> None:
        request = b""
        while b"\r\n\r\n" not in request and (data := await stream.receive_some()):
            request += data
        self.requests.append(request)
        await stream.send_all(self.answer)


@asynccontextmanager
async def two_servers() -> AsyncIterator[tuple[HostileServer, HostileServer]]:
    """Run two servers: a node, and another that its answers refer to."""
    first, other = HostileServer(), HostileServer()
    async with trio.open_nursery() as nursery:
        await nursery.start(first.serve)
        await nursery.start(other.serve)
        yield first, other
        nursery.cancel_scope.cancel()


async def result_of(server: HostileServer, *, stream: bool) -> CollectedDeltas:
    """Send the node one job and return its outcome."""
    upstream = Upstream(server.url, name="node", api_key=KEY)
    node = RemoteNode("node", upstream, RecordingListener(), names={"m": "m"}, seats=1)
    node.came_up()
    try:
        return await generated(node, relayed_job(stream=stream))
    finally:
        upstream.close()


def answer(status: str, *headers: str, body: bytes = b"{}") -> bytes:
    lines = [f"HTTP/1.1 {status}", *headers, "Connection: close", f"Content-Length: {len(body)}"]
    return "\r\n".join([*lines, "", ""]).encode() + body


@tries("CVE-2026-63764", "CVE-2026-5530", "CVE-2025-51471")
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize(
    "status", ["301 Moved", "302 Found", "303 See Other", "307 Temporary", "308 Permanent"]
)
async def test_no_redirect_of_a_node_is_followed(status, stream):
    async with two_servers() as (first, other):
        first.answer = answer(status, f"Location: {other.url}/v1/chat/completions")
        got = await result_of(first, stream=stream)
        assert len(first.requests) == 1
        assert other.requests == []
    assert isinstance(got.error, NodeFailed)
    assert KEY not in got.error.message
    assert got.raw == b""


@tries("CVE-2025-51471")
@pytest.mark.parametrize("scheme", ["Bearer", "Basic"])
async def test_no_key_is_sent_to_an_address_that_a_node_names_in_a_challenge(scheme):
    async with two_servers() as (first, other):
        realm = f'WWW-Authenticate: {scheme} realm="{other.url}/token",service="x",scope="*"'
        first.answer = answer("401 Unauthorized", realm, f"Location: {other.url}/")
        got = await result_of(first, stream=True)
        assert len(first.requests) == 1
        assert KEY.encode() in first.requests[0]
        assert other.requests == []
    assert isinstance(got.error, NodeFailed)
    assert KEY not in got.error.message


@tries("CVE-2024-12886")
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize(
    "header", ["Content-Encoding: gzip", "Transfer-Encoding: gzip", "Content-Encoding: x, gzip"]
)
async def test_compressed_answer_of_a_node_is_refused(header, stream):
    kind = "Content-Type: text/event-stream" if stream else "Content-Type: application/json"
    async with two_servers() as (first, _):
        first.answer = answer("200 OK", kind, header, body=BOMB)
        got = await result_of(first, stream=stream)
    assert isinstance(got.error, NodeFailed)
    assert got.raw == b""
