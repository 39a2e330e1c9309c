"""An HTTP client that records the content, the times and the end of each response.

It uses h11 and a socket directly, so that a client can disconnect at any time and read slowly.
"""

import json
import socket
import time
from dataclasses import dataclass, field
from typing import Any

import h11
import trio

RECEIVE_BYTES = 64 * 1024
# The content of the last event of a complete stream, in each dialect.
ENDS = (b"data: [DONE]", b'"message_stop"', b'"response.completed"')


@dataclass
class Answer:
    """A response. `ending`: "whole", "cut" (the connection ended early) or "left" (the client disconnected).

    `first_s` is the time to the first event of a stream; `gaps_s` are the times between its pieces.
    """

    status: int = 0
    body: bytes = b""
    ending: str = "cut"
    first_s: float | None = None
    gaps_s: list[float] = field(default_factory=list)

    @property
    def code(self) -> str:
        """The error code of the response or of its last event; "" without an error."""
        if self.status == 200 and b'"error"' not in self.body:
            return ""
        for line in reversed(self.body.removeprefix(b"event: error\n").splitlines()):
            try:
                error = json.loads(line.removeprefix(b"data: "))["error"]
            except (ValueError, KeyError, TypeError):
                continue
            if error is None:  # as in a response object
                return ""
            return str(error.get("code") or error.get("type") if isinstance(error, dict) else error)
        return ""

    @property
    def is_ended_stream(self) -> bool:
        """Whether the stream is complete."""
        return any(end in self.body[-600:] for end in ENDS)


class Client:
    """Sends requests one after another, over one connection while it stays open.

    Waits `pause_s` before each read.
    """

    def __init__(self, address: tuple[str, int], key: str, *, pause_s: float = 0.0) -> None:
        self._address = address
        self._key = key
        self.pause_s = pause_s
        self._stream: trio.SocketStream | None = None
        self._http = h11.Connection(h11.CLIENT)

    async def ask(
        self, method: str, path: str, body: dict[str, Any] | bytes | None = None, request_id: str = ""
    ) -> Answer:
        """Send a request, and read the response until it or the connection ends."""
        answer = Answer()
        try:
            await self._exchange(method, path, body, request_id, answer)
        except (OSError, trio.BrokenResourceError, trio.ClosedResourceError, h11.RemoteProtocolError):
            answer.ending = "cut"
        except trio.Cancelled:
            answer.ending = "left"
            raise
        finally:
            if self._http.our_state is h11.DONE and self._http.their_state is h11.DONE:
                self._http.start_next_cycle()
            else:
                self.close()
        return answer

    def close(self) -> None:
        """Close the connection at once."""
        if self._stream is not None:
            self._stream.socket.close()
        self._stream = None

    async def _exchange(
        self, method: str, path: str, body: dict[str, Any] | bytes | None, request_id: str, answer: Answer
    ) -> None:
        payload = body if isinstance(body, bytes) else json.dumps(body).encode() if body is not None else b""
        stream = self._stream or await self._connect()
        headers = [
            ("Host", "localhost"),
            ("Authorization", f"Bearer {self._key}"),
            ("Content-Type", "application/json"),
            ("Content-Length", str(len(payload))),
            *([("X-Request-Id", request_id)] if request_id else []),
        ]
        sent = self._http.send(h11.Request(method=method, target=path, headers=headers)) or b""
        sent += self._http.send(h11.Data(data=payload)) or b""
        sent += self._http.send(h11.EndOfMessage()) or b""
        began_s = last_s = time.monotonic()
        await stream.send_all(sent)
        is_new = False  # whether bytes arrived since the last piece; one read may contain several pieces
        while True:
            event = self._http.next_event()
            if event is h11.NEED_DATA:
                is_new = True
                if self.pause_s:
                    await trio.sleep(self.pause_s)
                self._http.receive_data(bytes(await stream.receive_some(RECEIVE_BYTES)))
            elif isinstance(event, h11.Response):
                answer.status = event.status_code
            elif isinstance(event, h11.Data):
                now_s = time.monotonic()
                answer.body += bytes(event.data)
                if answer.first_s is None:
                    answer.first_s = now_s - began_s
                elif is_new:
                    answer.gaps_s.append(now_s - last_s)
                last_s, is_new = now_s, False
            elif isinstance(event, h11.EndOfMessage):
                answer.ending = "whole"
                return
            elif isinstance(event, h11.ConnectionClosed):
                return

    async def _connect(self) -> trio.SocketStream:
        self._http = h11.Connection(h11.CLIENT)
        sock = trio.socket.socket()
        try:
            if self.pause_s:  # with a large receive buffer, the kernel would read ahead
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            await sock.connect(self._address)
        except BaseException:
            sock.close()
            raise
        self._stream = trio.SocketStream(sock)
        return self._stream
