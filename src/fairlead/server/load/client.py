"""A connection to an OpenAI-compatible server, and the timing of its streamed answers.

Uses the client of remote nodes, without its time limits. The generator often shares a machine with the server
under test, so its CPU time reduces the measured throughput; httpx costs several times as much.
"""

from collections.abc import Callable
from http import HTTPStatus

import msgspec
import trio

from fairlead.base.config import UNIX_PREFIX
from fairlead.base.formats.server_sent_events import EventSplitter, event_data, split_events
from fairlead.base.reported import decoded, is_given
from fairlead.dialects.openai.events import ChunkShape
from fairlead.dialects.upstream_errors import error_of, is_error
from fairlead.nodes.http.client import Upstream, UpstreamFailed, UpstreamTimeouts

BODY_BYTES = 16 * 1024 * 1024  # of an event, and of a response that is not streamed
# The codes of 429 that say that a key's limits are used up, here and at OpenAI.
_LIMITS = frozenset({"rate_limited", "budget_exceeded", "rate_limit_exceeded", "insufficient_quota"})
_NO_LIMITS = UpstreamTimeouts(connect_s=float("inf"), between_bytes_s=float("inf"))


class RequestFailedError(Exception):
    """A request failed.

    kind: The name under which it is counted: a status, `connection` or `stream`.
    detail: Why it failed.
    code: The machine-readable reason of a server; empty: it gave none.
    """

    def __init__(self, kind: str, detail: str, *, code: str = "") -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind = kind
        self.code = code

    @property
    def is_about_keys(self) -> bool:
        """Whether another API key may help."""
        return self.kind in (str(HTTPStatus.UNAUTHORIZED), str(HTTPStatus.FORBIDDEN))

    @property
    def is_certain(self) -> bool:
        """Whether the next request would fail, too: a client error other than a full or slow server.

        A key whose limit is used up gets no answer before the test is over.
        """
        if self.kind == str(HTTPStatus.TOO_MANY_REQUESTS):
            return self.code in _LIMITS
        return self.kind.startswith("4") and self.kind != str(HTTPStatus.REQUEST_TIMEOUT)


class LoadConnection:
    """Sends requests one after another, over one socket while the server keeps it open."""

    def __init__(self, url: str, *, api_key: str | None = None) -> None:
        path = url.removeprefix(UNIX_PREFIX) if url.startswith(UNIX_PREFIX) else None
        self._upstream = Upstream(
            url if path is None else "http://localhost",
            name=url,
            api_key=api_key or None,
            capacity=1,
            timeouts=_NO_LIMITS,
            socket_path=path,
        )

    async def request(
        self, method: str, path: str, body: object = None, *, on_data: Callable[[bytes], None] | None = None
    ) -> bytes:
        """Send a request.

        method: the method.
        path: the route.
        body: what is sent as JSON; None: nothing.
        on_data: gets the response as it arrives; None: all of it is returned.

        Raises `RequestFailedError` for a status other than 200 and for a broken connection.
        """
        payload = b"" if body is None else msgspec.json.encode(body)
        try:
            async with self._upstream.exchange(method, path, payload) as response:
                if on_data is None or response.head.status != HTTPStatus.OK:
                    received = await response.read_all(BODY_BYTES)
                    if response.head.status == HTTPStatus.OK:
                        return received
                    raise RequestFailedError(
                        str(response.head.status), _reason(received), code=_code(received)
                    )
                while data := await response.read():
                    on_data(data)
        except UpstreamFailed as error:
            raise RequestFailedError("connection", error.message) from error
        return b""


class ReportedUsage(msgspec.Struct):
    """The token counts that the server reports."""

    prompt_tokens: int = 0
    completion_tokens: int = 0


class TimedAnswer(msgspec.Struct):
    """One request's times on Trio's clock.

    started_s: when it was sent.
    ended_s: when its answer ended.
    pieces_s: when each piece arrived.
    usage: what the server counted; None: nothing, and each piece counts as a token.
    error: why it failed; None: it succeeded.
    reason: the same with the server's own words; empty: it succeeded.
    """

    started_s: float
    ended_s: float = 0.0
    pieces_s: list[float] = []
    usage: ReportedUsage | None = None
    error: str | None = None
    reason: str = ""

    @property
    def output_tokens(self) -> int:
        """The number of tokens that the server reports, or else of pieces received."""
        return self.usage.completion_tokens if self.usage else len(self.pieces_s)


_decode_chunk = msgspec.json.Decoder(ChunkShape).decode
_decode_usage = msgspec.json.Decoder(ReportedUsage).decode


class _Refusal(msgspec.Struct):
    class Error(msgspec.Struct):
        message: str
        code: object = None

    error: Error | str


_decode_refusal = msgspec.json.Decoder(_Refusal).decode


def _reason(body: bytes) -> str:
    """Return the message of an error's body, on one line, or else the beginning of the body."""
    try:
        error = _decode_refusal(body).error
    except msgspec.MsgspecError:
        return body[:500].decode(errors="replace")
    return " ".join((error if isinstance(error, str) else error.message).split())


def _code(body: bytes) -> str:
    """Return the code of an error's body; empty if it has none."""
    refusal = decoded(_decode_refusal, body)
    code = refusal.error.code if refusal is not None and not isinstance(refusal.error, str) else None
    return code if isinstance(code, str) else ""


async def time_request(
    connection: LoadConnection, path: str, body: object, *, timeout_s: float
) -> TimedAnswer:
    """Send one streaming request and time its answer. Failures are recorded in it.

    connection: where it is sent.
    path: the route.
    body: the request.
    timeout_s: how long the answer may take.

    Raises `RequestFailedError` only for a failure that is certain: the next request would get it, too.
    """
    answer = TimedAnswer(started_s=trio.current_time())
    reader = _EventReader(answer)
    try:
        with trio.fail_after(timeout_s):
            await connection.request("POST", path, body, on_data=reader.feed)
        reader.finish()
    except trio.TooSlowError:
        answer.error, answer.reason = "timeout", f"timeout: no answer within {timeout_s:g} s"
    except RequestFailedError as error:
        if error.is_certain:
            raise
        answer.error, answer.reason = error.kind, str(error)
    answer.ended_s = trio.current_time()
    return answer


class _EventReader:
    """Reads a stream of server-sent events into a `TimedAnswer`'s pieces."""

    def __init__(self, answer: TimedAnswer) -> None:
        self._answer = answer
        self._splitter = EventSplitter(BODY_BYTES)
        self._done = False

    def feed(self, data: bytes) -> None:
        """Parse received data; all of its pieces get the current time."""
        try:
            events = self._splitter.feed(data)
        except OverflowError as error:
            raise RequestFailedError("stream", str(error)) from error
        for event in split_events(events):
            if (payload := event_data(event)) is not None:
                self._read_event(payload)

    def finish(self) -> None:
        """Raise `RequestFailedError` unless the stream is complete."""
        if not self._done:
            raise RequestFailedError("stream", "ended without a finish_reason or [DONE]")

    def _read_event(self, data: bytes) -> None:
        if data == b"[DONE]":
            self._done = True
            return
        try:
            chunk = _decode_chunk(data)
        except msgspec.MsgspecError as error:
            raise RequestFailedError("stream", str(error)) from error
        if is_error(chunk.error):
            raise RequestFailedError("stream", error_of(chunk.error, data).message)
        if is_given(chunk.usage):
            self._answer.usage = decoded(_decode_usage, chunk.usage)
        choices = chunk.choices or ()
        self._done |= any(choice.finish_reason for choice in choices)  # not every server sends [DONE]
        if any(choice.text or (choice.delta and choice.delta.has_output) for choice in choices):
            self._answer.pieces_s.append(trio.current_time())
