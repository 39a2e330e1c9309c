"""WebSockets of `/v1/responses` frame by frame: what the listener accepts, refuses and survives."""

import json
from contextlib import asynccontextmanager

import pytest
import trio
from wsproto import ConnectionType
from wsproto.connection import Connection
from wsproto.events import BytesMessage, CloseConnection, Ping, Pong, TextMessage

from fairlead.server.listener import websocket
from server.routes.raw_http import TIMEOUT_S, serving
from server.routes.responses_client import PATH

KEY = "dGhlIHNhbXBsZSBub25jZQ=="
HANDSHAKE = (
    f"GET {PATH} HTTP/1.1\r\nHost: localhost\r\nConnection: keep-alive, Upgrade\r\nUpgrade: websocket\r\n"
    f"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {KEY}\r\n\r\n"
)
ASK = json.dumps({"type": "response.create", "model": "small", "input": "hello"})


class Socket:
    """A client after its handshake. `received` are the events of its frames."""

    def __init__(self, connection) -> None:
        self._connection = connection
        self.frames = Connection(ConnectionType.CLIENT)
        self._events = []
        self._text = ""

    async def send(self, event) -> None:
        await self.send_bytes(self.frames.send(event))

    async def send_bytes(self, data: bytes) -> None:
        await self._connection.send_ignoring_close(data)

    async def event(self):
        """Return the next event; None at the end of the connection."""
        with trio.fail_after(TIMEOUT_S):
            while not self._events:
                data = await self._connection.socket.recv(65536)
                if not data:
                    return None
                self.frames.receive_data(data)
                self._events += self.frames.events()
        return self._events.pop(0)

    async def message(self):
        """Return the next whole message."""
        text = ""
        while True:
            event = await self.event()
            assert isinstance(event, TextMessage), event
            text += event.data
            if event.message_finished:
                return json.loads(text)

    async def answer(self):
        """Return the types of the messages up to the end of a response, or of an error."""
        kinds = []
        while not kinds or kinds[-1] not in ("response.completed", "response.failed", "error"):
            kinds.append((await self.message())["type"])
        return kinds


@asynccontextmanager
async def opened(client, handshake: str = HANDSHAKE):
    async with serving(client.app) as server:
        connection = await server.connect()
        await connection.send(handshake.encode())
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            head += await connection.socket.recv(1)
        assert head.startswith(b"HTTP/1.1 101 "), head
        assert b"sec-websocket-accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=" in head
        yield Socket(connection)


async def test_message_in_pieces_is_one_request(client):
    async with opened(client) as socket:
        for piece in ASK[:-1]:
            await socket.send(TextMessage(data=piece, message_finished=False))
        await socket.send(Ping(b"between"))
        await socket.send(TextMessage(data=ASK[-1]))
        assert isinstance(await socket.event(), Pong)
        kinds = await socket.answer()
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"


async def test_bytes_are_taken_for_text(client):
    async with opened(client) as socket:
        await socket.send(BytesMessage(data=ASK.encode()))
        assert (await socket.answer())[-1] == "response.completed"


async def test_messages_are_answered_in_turn(client):
    async with opened(client) as socket:
        await socket.send_bytes(b"".join(socket.frames.send(TextMessage(data=ASK)) for _ in range(20)))
        for _ in range(20):
            assert (await socket.answer())[-1] == "response.completed"
    assert len(client.gateway.jobs) == 20


async def test_closing_is_answered_and_ends_the_connection(client):
    async with opened(client) as socket:
        await socket.send(CloseConnection(code=1000))
        closed = await socket.event()
        assert (type(closed), closed.code) == (CloseConnection, 1000)
        assert await socket.event() is None


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"\x81\x05hello", 1002),  # not masked
        (b"\xc1\x80\0\0\0\0", 1002),  # a reserved bit
        (b"\x83\x80\0\0\0\0", 1002),  # a reserved opcode
        (b"\x80\x80\0\0\0\0", 1002),  # a continuation of nothing
        (b"\x89\xfe\x01\x00\0\0\0\0", 1002),  # a ping that is too long
        (b"\x81\x82\0\0\0\0\xff\xff", 1007),  # no UTF-8
        (b"\x81\xff\xff\xff\xff\xff\xff\xff\xff\xff\0\0\0\0", 1002),  # a length that is out of range
    ],
)
async def test_invalid_frame_ends_the_connection_with_its_code(client, data, code):
    async with opened(client) as socket:
        await socket.send_bytes(data)
        closed = await socket.event()
        assert (type(closed), closed.code) == (CloseConnection, code)
        assert await socket.event() is None
    assert client.gateway.jobs == []


async def test_client_that_leaves_ends_its_job(client):
    client.gateway.script = lambda job: [None]
    async with opened(client) as socket:
        await socket.send(TextMessage(data=ASK))
        while not client.gateway.jobs:  # noqa: ASYNC110
            await trio.sleep(0.001)
    assert client.gateway.ended == 1


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("Version: 13", "Version: 8"),
        (KEY, "short"),
        (KEY, ""),
        ("keep-alive, Upgrade", "keep-alive"),
        ("GET", "POST"),
        (PATH, "/v1/chat/completions"),
        ("\r\n\r\n", "\r\n\r\n\x81"),
    ],
)
async def test_invalid_handshake_is_refused(client, old, new):
    async with serving(client.app) as server:
        answer = await server.fetch(HANDSHAKE.replace(old, new, 1).encode())
    assert (answer.status, answer.error["code"]) == (400, "invalid_request")


async def test_page_of_another_server_is_refused(client):
    origin = HANDSHAKE.replace("Host: localhost", "Host: localhost\r\nOrigin: http://evil.example")
    async with opened(client, origin) as socket:
        await socket.send(TextMessage(data=ASK))
        error = await socket.message()
    assert (error["type"], error["status"], error["param"]) == ("error", 403, "Origin")
    assert client.gateway.jobs == []


async def test_client_that_does_not_answer_pings_is_left(client, monkeypatch):
    monkeypatch.setattr(websocket, "PING_INTERVAL_S", 0.5)
    async with opened(client) as socket:
        assert isinstance(await socket.event(), Ping)
        await socket.send(Pong())
        assert isinstance(await socket.event(), Ping)
        assert await socket.event() is None
