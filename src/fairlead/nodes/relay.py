"""One job on its way through another server: the request as that server wants it, its answer into a sink.

Bytes pass as they came. A stream is read event by event, as far as we must know what it says, and all that
came in one read is handed on at once.
"""

from contextlib import suppress
from http import HTTPStatus
from typing import Any

import msgspec
import trio

from fairlead.config import FiltersConfig
from fairlead.errors import (
    Draining,
    FairleadError,
    InvalidRequest,
    ModelLoading,
    NodeFailed,
    NodeFull,
    NodeRefused,
    NoNode,
)
from fairlead.job import Delta, FinishReason, Job, Relay
from fairlead.nodes.answer_parser import BadAnswer
from fairlead.nodes.event_splitter import EventSplitter, split_events
from fairlead.nodes.events import Event, read_event, read_plain, read_usage
from fairlead.nodes.sink import Sink
from fairlead.nodes.upstream import Answer, Upstream, UpstreamFailed

ANSWER_BYTES = 256 * 1024 * 1024
EVENT_BYTES = 16 * 1024 * 1024
ERROR_BYTES = 1024 * 1024
TOLD_LENGTH = 200
AFTER_END_S = 1.0
MOST_DIGITS = 9

# What a gateway in front of a dead server says; other 5xx may be one request's own doing.
GONE = frozenset({HTTPStatus.BAD_GATEWAY, HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.GATEWAY_TIMEOUT})

# What a Fairlead says that has no room for this job now, though nothing is wrong with it.
FULL = frozenset({ModelLoading.code, Draining.code, NoNode.code})

_encode = msgspec.json.Encoder().encode
_decode_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class _Reason(msgspec.Struct):
    code: str | int | None = None


class _Refusal(msgspec.Struct):
    error: _Reason


_decode_refusal = msgspec.json.Decoder(_Refusal).decode


class RelayFailed(NodeFailed):
    """The server answered, but not well; says nothing of its health."""


def rewritten(body: bytes, model: str, filters: FiltersConfig | None = None) -> bytes:
    """Return the body with the server's own name of the model, and as the filters want it.

    The bytes of every other value stay as they are. Raises `InvalidRequest` when it is no JSON object.
    """
    try:
        members: dict[str, Any] = dict(_decode_members(body))
    except msgspec.MsgspecError as error:
        raise InvalidRequest("the body is no JSON object") from error
    asked = members.get("model")
    if filters is not None:
        for name in filters.strip_params:
            members.pop(name, None)
        members |= filters.set_params
        if filters.set_params_by_id and asked is not None:
            members |= filters.set_params_by_id.get(str(msgspec.json.decode(asked)), {})
    members["model"] = model
    return _encode(members)


async def relay(
    upstream: Upstream,
    job: Job,
    asked: Relay,
    into: Sink,
    *,
    model: str,
    filters: FiltersConfig | None = None,
) -> None:
    """Send the request and put its whole answer into the sink.

    Raises `NodeFull` when the server has no room, `NodeRefused` when the request is at fault, `RelayFailed`
    or `UpstreamFailed` when the server is; the last two also in the middle of the answer.
    """
    body = rewritten(asked.body, model, filters)
    accept = "text/event-stream" if asked.stream else "application/json"
    # Under its client's name and in its client's trace there, too.
    headers = {"X-Request-Id": job.request_id, "traceparent": job.traceparent}
    async with upstream.exchange("POST", asked.path, body, accept=accept, headers=headers) as answer:
        if answer.head.status != HTTPStatus.OK:
            raise await _refusal(upstream.name, answer)
        if "content-encoding" in answer.head.headers:
            raise RelayFailed(f"{upstream.name} answered in an encoding that nobody asked for")
        streams = answer.head.content_type == "text/event-stream"
        if streams != asked.stream:
            kind = answer.head.content_type or "nothing known"
            raise RelayFailed(f"{upstream.name} answered with {kind}")
        if streams:
            await _Stream(upstream.name, job.sequences, into).run(answer)
        else:
            await _whole(upstream.name, job, answer, into)


async def _refusal(name: str, answer: Answer) -> FairleadError:
    status = answer.head.status
    body = await answer.read_all(ERROR_BYTES)
    if status == HTTPStatus.TOO_MANY_REQUESTS:
        return NodeFull(f"{name} has no room")
    if status == HTTPStatus.SERVICE_UNAVAILABLE and (code := _code(body)) in FULL:
        # A server that is to stop is full for all its models, and for as long as it says.
        wait_s = _retry_after_s(answer) if code == Draining.code else None
        return NodeFull(f"{name} has no room: {code}", retry_after_s=wait_s)
    told = body[:TOLD_LENGTH].decode(errors="replace")
    message = f"{name} answered {status}: {told}" if told else f"{name} answered {status}"
    if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.PROXY_AUTHENTICATION_REQUIRED):
        return RelayFailed(f"{name} does not know our key")  # nothing the client could do about it
    if HTTPStatus.BAD_REQUEST <= status < HTTPStatus.INTERNAL_SERVER_ERROR:
        kind = answer.head.headers.get("content-type", "application/json")
        return NodeRefused(message, status=status, body=body, content_type=kind)
    return UpstreamFailed(message) if status in GONE else RelayFailed(message)


def _code(body: bytes) -> str | int | None:
    """Return the code of an error in OpenAI's dialect, if there is one."""
    try:
        return _decode_refusal(body).error.code
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


def _retry_after_s(answer: Answer) -> int | None:
    """Return what the server asks for, if it is a number of seconds."""
    told = answer.head.headers.get("retry-after", "").strip()
    return int(told) if told.isascii() and told.isdigit() and len(told) < MOST_DIGITS else None


async def _whole(name: str, job: Job, answer: Answer, into: Sink) -> None:
    body = await answer.read_all(ANSWER_BYTES)
    generated = 0
    if answer.head.content_type == "application/json":
        try:
            generated = read_usage(body)
        except ValueError as error:
            raise RelayFailed(f"{name} sent {error}") from error
    kind = answer.head.headers.get("content-type", "application/json")
    into.put(Delta(0, raw=[body], relayed_tokens=generated, finish_reason="stop", content_type=kind))
    for index in range(1, job.sequences):
        into.put(Delta(index, finish_reason="stop"))


class _Stream:
    """Hands a stream's events on. Two kinds are held back.

    Those of the beginning, until something was generated: whoever has seen none of an answer can be given
    another node's without noticing. And the last choice's end with all after it, until the stream is over:
    what has been put once is never needed again, should another node repeat the answer.
    """

    def __init__(self, name: str, choices: int, into: Sink) -> None:
        self._name = name
        self._into = into
        self._choices = choices
        self._ends: dict[int, FinishReason] = {}
        self._last_index = 0
        self._has_begun = False
        self._is_whole = False
        self._tokens = 0
        self._generated = 0
        self._beginning: list[bytes] = []
        self._pending: Delta | None = None
        self._end: Delta | None = None
        self._tail: list[bytes] = []

    async def run(self, answer: Answer) -> None:
        splitter = EventSplitter(EVENT_BYTES)
        read_bytes = 0
        while not self._is_whole and (data := await answer.read()):
            read_bytes += len(data)
            if read_bytes > ANSWER_BYTES:
                raise RelayFailed(f"{self._name} sent more than {ANSWER_BYTES} bytes")
            try:
                events = splitter.feed(data)
                if not self._takes_plain(events):
                    for raw in split_events(events):
                        self._take(raw, read_event(raw))
            except OverflowError as error:
                raise RelayFailed(f"{self._name} sent {error}") from error
            finally:
                self._flush()
            if (room := self._into.room()) is not None:
                await answer.hold(room.wait)
        if not self._is_whole and (self._end is None or splitter.has_rest):
            raise UpstreamFailed(f"{self._name} ended a stream before its end")
        self._finish()
        # Nothing should come but the body's end, after which the connection can be used again.
        with trio.move_on_after(AFTER_END_S), suppress(OSError, BadAnswer):
            while await answer.read():
                pass

    def _takes_plain(self, events: bytes) -> bool:
        """Take what is nothing but text of one choice in one piece; False if it is not, or not the time."""
        if not self._has_begun or self._ends or (plain := read_plain(events)) is None:
            return False
        index, texts = plain
        self._last_index = min(index, self._choices - 1)
        self._tokens += len(texts)
        self._into.put(Delta(self._last_index, "".join(texts), raw=[events], relayed_tokens=len(texts)))
        return True

    def _take(self, raw: bytes, event: Event) -> None:
        if event.error is not None:
            raise RelayFailed(f"{self._name} failed: {event.error}")
        self._generated = event.generated or self._generated
        self._is_whole = self._is_whole or event.is_end
        if not self._has_begun and event.is_beginning:
            if b"data:" in raw:  # no comment: those are for whoever keeps a connection open
                self._beginning.append(raw)
            return
        self._has_begun = True
        index = self._last_index if event.index is None else min(event.index, self._choices - 1)
        if self._end is not None or index in self._ends:
            self._tail.append(raw)  # nothing comes after a choice's end but what belongs to all
            return
        self._last_index = index
        if event.text:
            self._tokens += 1
        if event.finished is not None:
            self._ends[index] = "length" if event.finished == "length" else "stop"
            if len(self._ends) == self._choices:
                self._end = Delta(index, event.text, raw=[raw], relayed_tokens=bool(event.text))
                return
        self._add(index, raw, event)

    def _add(self, index: int, raw: bytes, event: Event) -> None:
        delta = self._pending
        if delta is None or delta.index != index:
            self._flush()
            delta = self._pending = Delta(index, raw=self._beginning)
            self._beginning = []
        delta.raw.append(raw)
        if event.text:
            delta.text += event.text
            delta.relayed_tokens += 1
        if event.finished is not None:
            delta.finish_reason = self._ends[index]
            self._flush()

    def _flush(self) -> None:
        if self._pending is not None:
            delta, self._pending = self._pending, None
            self._into.put(delta)

    def _finish(self) -> None:
        """Put the end that was held back. Where the server counted tokens otherwise than we, it is right."""
        unended = [index for index in range(self._choices) if index not in self._ends]
        if self._end is not None:
            self._end.raw[:0] = self._beginning
            self._into.put(self._end)
            unended = [self._end.index]
        correction = self._generated - self._tokens if self._generated else 0
        if self._tail or correction:
            # Of the tail's own index, if there are several choices, so that it comes after all of them.
            tail = self._choices if self._choices > 1 else 0
            self._into.put(Delta(tail, raw=self._tail, relayed_tokens=correction))
        for index in unended:
            self._into.put(Delta(index, finish_reason=self._ends.get(index, "stop")))
