"""A server may answer before it has read the request: the answer is read, once, and the rest is not sent."""

import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
import trio

from fairlead.nodes.http.client import Upstream, UpstreamFailed, UpstreamTimeouts
from fairlead.nodes.http.request_head import StreamedBody
from nodes.listening import tls_contexts

# Larger than the buffers of both sockets together, so that it cannot be sent to a server that does not read.
LARGE = b"x" * (16 * 2**20)
TOO_LARGE = b'{"error":{"message":"too large","type":"invalid_request_error","code":413}}'

Serve = Callable[[trio.abc.Stream], Awaitable[None]]


def whole(status: str, body: bytes = TOO_LARGE, *more: str) -> bytes:
    """Return a response."""
    lines = (f"HTTP/1.1 {status}", "Content-Type: application/json", f"Content-Length: {len(body)}", *more)
    return "".join(f"{line}\r\n" for line in lines).encode() + b"\r\n" + body


@pytest.fixture(scope="session")
def contexts(tmp_path_factory):
    return tls_contexts(tmp_path_factory.mktemp("tls"))


@asynccontextmanager
async def server(
    serve: Serve, contexts: tuple[ssl.SSLContext, ssl.SSLContext] | None = None, **timeouts: float
) -> AsyncIterator[Upstream]:
    """Run a server of raw bytes, with TLS if contexts are given, and yield a client of it."""

    async def handle(stream: trio.SocketStream) -> None:
        async with stream:
            if contexts is None:
                await serve(stream)
                return
            secure = trio.SSLStream(stream, contexts[0], server_side=True, https_compatible=True)
            await serve(secure)

    async with trio.open_nursery() as nursery:
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(trio.serve_listeners, handle, listeners)
        port = listeners[0].socket.getsockname()[1]
        url, tls = f"http://127.0.0.1:{port}", None
        if contexts is not None:
            url, tls = f"https://localhost:{port}", contexts[1]
        upstream = Upstream(url, name="n", tls=tls, timeouts=UpstreamTimeouts(**timeouts))
        yield upstream
        counts = upstream.statistics()
        assert (counts.busy, counts.waiting) == (0, 0)
        upstream.close()
        nursery.cancel_scope.cancel()


async def read_head(stream: trio.abc.Stream) -> bytes:
    """Read a request's head, and what came with it."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += await stream.receive_some(1000)
    return data


async def ask(upstream: Upstream, body: bytes | StreamedBody = LARGE) -> tuple[int, bytes]:
    async with upstream.exchange("POST", "/v1/chat/completions", body) as response:
        return response.head.status, await response.read_all(1_000_000)


class Source:
    """The pieces of a body; `taken` counts them. A number is a pause in seconds, and an error is raised."""

    def __init__(self, *pieces: bytes | float | Exception) -> None:
        self.taken = 0
        self._pieces = iter(pieces)

    def __aiter__(self) -> "Source":
        return self

    async def __anext__(self) -> bytes:
        for piece in self._pieces:
            if isinstance(piece, Exception):
                raise piece
            if isinstance(piece, bytes):
                self.taken += 1
                return piece
            await trio.sleep(piece)
        raise StopAsyncIteration


@pytest.mark.parametrize("with_tls", [False, True])
@pytest.mark.parametrize("status", ["413 Too Large", "401 U", "503 Full", "302 Found"])
@pytest.mark.parametrize(
    "first", [b"", b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early\r\nLink: <x>\r\n\r\n"]
)
async def test_answer_before_the_body_is_read_is_the_answer(with_tls, status, first, contexts):
    served = []

    async def serve(stream):
        served.append(await read_head(stream))
        await stream.send_all(first + whole(status, TOO_LARGE, "Connection: close"))
        # Closing with unread data resets the connection.

    async with server(serve, contexts if with_tls else None) as upstream:
        for asked in (1, 2):
            assert await ask(upstream) == (int(status[:3]), TOO_LARGE)
            assert len(served) == asked
        assert upstream.statistics().idle == 0


async def test_early_answer_of_a_server_that_reads_no_more_ends_the_sending():
    async def serve(stream):
        await read_head(stream)
        await stream.send_all(whole("413 Too Large"))  # it would keep the connection
        await trio.sleep_forever()

    async with server(serve) as upstream:
        assert await ask(upstream) == (413, TOO_LARGE)
        assert (upstream.statistics().idle, upstream.statistics().opened) == (0, 1)


@pytest.mark.parametrize("with_tls", [False, True])
async def test_body_is_sent_to_its_end_beside_an_early_success(with_tls, contexts):
    async def serve(stream):
        data = await read_head(stream)
        await stream.send_all(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n")
        size = len(data) - data.index(b"\r\n\r\n") - 4
        while size < len(LARGE):
            size += len(await stream.receive_some(2**16))
        await stream.send_all(b"1\r\nb\r\n0\r\n\r\n")
        await trio.sleep_forever()

    async with server(serve, contexts if with_tls else None) as upstream:
        assert await ask(upstream) == (200, b"ab")
        assert upstream.statistics().idle == 1


async def test_early_success_that_is_complete_is_the_answer():
    async def serve(stream):
        await read_head(stream)
        await stream.send_all(whole("200 OK", b"{}"))
        await trio.sleep_forever()

    async with server(serve) as upstream:
        assert await ask(upstream) == (200, b"{}")
        assert upstream.statistics().idle == 0


async def test_request_whose_answer_began_on_a_kept_connection_is_not_sent_again():
    heads = []

    async def serve(stream):
        heads.append(await read_head(stream))
        if len(heads) == 1:
            await stream.send_all(whole("200 OK", b"{}"))
            heads.append(await read_head(stream))
        await stream.send_all(b"HTTP/1.1 413 Too")  # and a reset

    async with server(serve) as upstream:
        assert await ask(upstream, b"{}") == (200, b"{}")
        with pytest.raises(UpstreamFailed, match=r"reset|middle of a response"):
            await ask(upstream)
        assert len(heads) == 2


async def test_large_request_is_sent_again_when_a_kept_connection_closes_without_an_answer():
    heads = []

    async def serve(stream):
        heads.append(await read_head(stream))
        await stream.send_all(whole("200 OK", b"{}"))
        if len(heads) == 1:
            await read_head(stream)
        else:
            while await stream.receive_some(2**16):
                pass

    async with server(serve) as upstream:
        assert await ask(upstream, b"{}") == (200, b"{}")
        assert await ask(upstream) == (200, b"{}")
        assert len(heads) == 2


@pytest.mark.parametrize("length", [10, None])
async def test_streamed_body_is_sent_as_it_arrives(length):
    got = []

    async def serve(stream):
        data = await read_head(stream)
        while not data.endswith(b"end" if length else b"0\r\n\r\n"):
            data += await stream.receive_some(1000)
        got.append(data)
        await stream.send_all(whole("200 OK", b"{}"))
        await stream.receive_some(1)

    async with server(serve) as upstream:
        source = Source(b"begin, ", b"", b"end")
        assert await ask(upstream, StreamedBody(source, length)) == (200, b"{}")
        assert upstream.statistics().idle == 1
    head, _, body = got[0].partition(b"\r\n\r\n")
    if length:
        assert (b"Content-Length: 10" in head, body) == (True, b"begin, end")
    else:
        assert b"Transfer-Encoding: chunked" in head
        assert body == b"7\r\nbegin, \r\n3\r\nend\r\n0\r\n\r\n"


async def test_streamed_body_is_read_no_faster_than_it_is_sent_and_not_after_a_refusal():
    source = Source(*[b"x" * 2**20] * 64)

    async def serve(stream):
        await read_head(stream)
        await trio.testing.wait_all_tasks_blocked(0.05)
        await stream.send_all(whole("413 Too Large"))
        await trio.sleep_forever()

    async with server(serve) as upstream:
        assert await ask(upstream, StreamedBody(source, 64 * 2**20)) == (413, TOO_LARGE)
    assert source.taken < 20


async def test_error_of_the_source_ends_the_exchange_and_is_raised_as_it_is():
    closed = trio.Event()

    async def serve(stream):
        while await stream.receive_some(1000):
            pass
        closed.set()

    async with server(serve) as upstream:
        with pytest.raises(LookupError, match="the client left"):
            await ask(upstream, StreamedBody(Source(b"x", LookupError("the client left")), 10))
        await closed.wait()


@pytest.mark.parametrize("pieces", [[b"too", b" long"], [b"shrt"]])
async def test_streamed_body_of_another_length_than_announced_fails(pieces):
    async def serve(stream):
        while await stream.receive_some(1000):
            pass

    async with server(serve) as upstream:
        with pytest.raises(ValueError, match="than its announced length"):
            await ask(upstream, StreamedBody(Source(*pieces), 6))


async def test_streamed_body_uses_no_kept_connection_because_it_cannot_be_sent_again():
    async def serve(stream):
        while True:
            await read_head(stream)
            await stream.send_all(whole("200 OK", b"{}"))

    async with server(serve) as upstream:
        await ask(upstream, b"{}")
        await ask(upstream, StreamedBody(Source(b"{}"), 2))
        assert (upstream.statistics().opened, upstream.statistics().reused) == (2, 0)


async def test_time_limit_of_a_server_does_not_run_while_the_source_is_awaited(autojump_clock):
    async def serve(stream):
        while not (await stream.receive_some(1000)).endswith(b"end"):
            pass
        await trio.sleep(9)
        await stream.send_all(whole("200 OK", b"{}"))
        await trio.sleep_forever()

    autojump_clock.autojump_threshold = 0.02
    async with server(serve, first_byte_s=10.0) as upstream:
        assert await ask(upstream, StreamedBody(Source(b"begin, ", 1000, b"end"), 10)) == (200, b"{}")


@pytest.mark.parametrize("is_error", [False, True])
async def test_leaving_early_stops_the_sending(is_error):
    async def serve(stream):
        await read_head(stream)
        await stream.send_all(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nx")
        await trio.sleep_forever()

    async def leave(upstream, scope):
        async with upstream.exchange("POST", "/v1/x", LARGE) as response:
            assert await response.read() == b"x"
            if is_error:
                raise KeyError
            scope.cancel()
            await response.read()

    async with server(serve) as upstream:
        with trio.CancelScope() as scope, pytest.raises(KeyError if is_error else trio.Cancelled):
            await leave(upstream, scope)
        assert (upstream.statistics().busy, upstream.statistics().idle) == (0, 0)
