"""An HTTP/1.1 connection to an OpenAI-compatible server, and the timing of its streamed answers.

Uses h11 and a plain socket. On a machine shared with the server under test, the generator's CPU time reduces
what it measures, and httpx costs 1.7 times as much for every piece of a stream.
"""

import ssl
from collections.abc import Callable
from http import HTTPStatus
from urllib.parse import urlsplit

import h11
import msgspec
import trio

RECEIVE_BYTES = 64 * 1024
LINE_BYTES = 16 * 1024 * 1024


class RequestFailedError(Exception):
    """A request failed. `kind` is how it is counted: a status, `connection` or `stream`."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind = kind


class LoadConnection:
    """Sends requests one after another, over one socket while the server keeps it open."""

    def __init__(self, url: str, *, api_key: str | None = None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise ValueError(f"not an http:// or https:// address: {url}")
        self._tls = parts.scheme == "https"
        self._host = parts.hostname
        self._port = parts.port or (443 if self._tls else 80)
        self._root = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = [("Host", parts.netloc.rpartition("@")[2])]
        if api_key:
            self._headers.append(("Authorization", f"Bearer {api_key}"))
        self._stream: trio.abc.Stream | None = None
        self._http = h11.Connection(h11.CLIENT)

    async def request(
        self, method: str, path: str, body: object = None, *, on_data: Callable[[bytes], None] | None = None
    ) -> bytes:
        """Send a request; pass the response to `on_data` as it arrives, or return it whole.

        Raises `RequestFailedError` for a status other than 200 and for a broken connection.
        """
        try:
            return await self._request(method, path, body, on_data)
        except (trio.BrokenResourceError, OSError, h11.ProtocolError, ssl.SSLError) as error:
            raise RequestFailedError("connection", repr(error)) from error
        finally:
            if self._http.our_state is h11.DONE and self._http.their_state is h11.DONE:
                self._http.start_next_cycle()
            else:
                self._close()

    async def _request(
        self, method: str, path: str, body: object, on_data: Callable[[bytes], None] | None
    ) -> bytes:
        payload = b"" if body is None else msgspec.json.encode(body)
        stream = self._stream or await self._connect()
        headers = [
            *self._headers,
            ("Content-Type", "application/json"),
            ("Content-Length", str(len(payload))),
        ]
        head = self._http.send(h11.Request(method=method, target=self._root + path, headers=headers))
        data = self._http.send(h11.Data(data=payload))
        end = self._http.send(h11.EndOfMessage())
        assert head is not None
        await stream.send_all(head + (data or b"") + (end or b""))

        status = 0
        whole = bytearray()
        while True:  # bounded by the caller's time limit
            event = self._http.next_event()
            if event is h11.NEED_DATA:
                self._http.receive_data(bytes(await stream.receive_some(RECEIVE_BYTES)))
            elif isinstance(event, h11.Response):
                status = event.status_code
            elif isinstance(event, h11.Data):
                if on_data is not None and status == HTTPStatus.OK:
                    on_data(bytes(event.data))
                elif len(whole) < LINE_BYTES:
                    whole += event.data
            elif isinstance(event, h11.EndOfMessage):
                break
            elif isinstance(event, h11.ConnectionClosed):
                raise RequestFailedError("connection", "closed before the answer ended")
        if status != HTTPStatus.OK:
            raise RequestFailedError(str(status), whole[:500].decode(errors="replace"))
        return bytes(whole)

    async def _connect(self) -> trio.abc.Stream:
        self._http = h11.Connection(h11.CLIENT)
        stream: trio.abc.Stream = await trio.open_tcp_stream(self._host, self._port)
        if self._tls:
            stream = trio.SSLStream(
                stream, ssl.create_default_context(), server_hostname=self._host, https_compatible=True
            )
        self._stream = stream
        return stream

    def _close(self) -> None:
        """Close the socket in any state, without waiting."""
        stream, self._stream = self._stream, None
        if isinstance(stream, trio.SSLStream):
            stream = stream.transport_stream
        if isinstance(stream, trio.SocketStream):
            stream.socket.close()


class ReportedUsage(msgspec.Struct):
    """The token counts that the server reports."""

    prompt_tokens: int = 0
    completion_tokens: int = 0


class TimedAnswer(msgspec.Struct):
    """One request's times on Trio's clock: when it was sent, when each piece of text arrived, when it ended.

    `usage` None: the server did not report it, and each piece counts as a token. `error` None: success.
    """

    started_s: float
    ended_s: float = 0.0
    pieces_s: list[float] = []
    usage: ReportedUsage | None = None
    error: str | None = None

    @property
    def output_tokens(self) -> int:
        """The number of tokens that the server reports, or else of pieces received."""
        return self.usage.completion_tokens if self.usage else len(self.pieces_s)


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: ReportedUsage | None = None
    error: object = None


_decode_chunk = msgspec.json.Decoder(_Chunk).decode


async def ask(connection: LoadConnection, path: str, body: object, *, timeout_s: float) -> TimedAnswer:
    """Send one streaming request and time its answer. Failures are recorded in it, not raised."""
    answer = TimedAnswer(started_s=trio.current_time())
    reader = _EventReader(answer)
    try:
        with trio.fail_after(timeout_s):
            await connection.request("POST", path, body, on_data=reader.feed)
        reader.finish()
    except trio.TooSlowError:
        answer.error = "timeout"
    except RequestFailedError as error:
        answer.error = error.kind
    answer.ended_s = trio.current_time()
    return answer


class _EventReader:
    """Parses a stream of server-sent events into an `TimedAnswer`'s pieces."""

    def __init__(self, answer: TimedAnswer) -> None:
        self._answer = answer
        self._rest = b""
        self._done = False

    def feed(self, data: bytes) -> None:
        """Parse received data; all of its pieces get the current time."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > LINE_BYTES:
            raise RequestFailedError("stream", "a line without an end")
        for line in lines:
            if line.startswith(b"data:"):
                self._take(line[5:].strip())

    def finish(self) -> None:
        """Raise `RequestFailedError` unless the stream is complete."""
        if not self._done:
            raise RequestFailedError("stream", "ended without a finish_reason or [DONE]")

    def _take(self, data: bytes) -> None:
        if data == b"[DONE]":
            self._done = True
            return
        try:
            chunk = _decode_chunk(data)
        except msgspec.MsgspecError as error:
            raise RequestFailedError("stream", str(error)) from error
        if chunk.error is not None:
            raise RequestFailedError("stream", repr(chunk.error))
        if chunk.usage is not None:
            self._answer.usage = chunk.usage
        self._done |= any(choice.finish_reason for choice in chunk.choices)  # not every server sends [DONE]
        if any(choice.text or (choice.delta and choice.delta.content) for choice in chunk.choices):
            self._answer.pieces_s.append(trio.current_time())
