"""One job relayed to another server: the request as that server expects it, its response into a sink.

The body of a response is relayed byte for byte; none of its headers is. If the server does not speak the
client's dialect, both request and response are translated instead. What is not an answer of the API
is the node's failure: a proxy's login page must not be sent from our origin as a success.
"""

from collections.abc import Container, Mapping
from contextlib import suppress
from http import HTTPStatus
from typing import Any

import msgspec
import trio

from fairlead.base.config import ANSWER_BYTES, FiltersConfig
from fairlead.base.errors import FairleadError, InvalidRequest, NodeRefused, NodeUnsuited
from fairlead.base.formats.headers import USER_HEADER
from fairlead.base.formats.server_sent_events import BYTE_ORDER_MARK
from fairlead.base.job import CHAT_DIALECT, ChatRelay, Delta, Job, Media, Relay
from fairlead.base.reported import BYTES_A_TOKEN, allowed_tokens, generated_tokens
from fairlead.base.upstream_events import EVENTS, UpstreamReader, readers
from fairlead.nodes.http.client import ContentFailed, Upstream, UpstreamFailed, UpstreamResponse
from fairlead.nodes.http.request_head import StreamedBody
from fairlead.nodes.http.response_parser import InvalidResponse
from fairlead.nodes.streams.answer_body import is_stream, read_object
from fairlead.nodes.streams.media_relay import relay_media, with_model, written_form
from fairlead.nodes.streams.passthrough import pass_through
from fairlead.nodes.streams.refusals import JSON, late_refusal, refusal
from fairlead.nodes.streams.relayed_stream import RelayedStream
from fairlead.nodes.streams.sink import Sink
from fairlead.nodes.streams.translation import TranslatedStream, translated_response
from fairlead.nodes.streams.upstream_stream import RelayFailed

ERROR_BYTES = 1024 * 1024
ERROR_BODY_S = 10.0
# The first two have no content, and the third has a part of it.
_NO_ANSWERS = {HTTPStatus.NO_CONTENT, HTTPStatus.RESET_CONTENT, HTTPStatus.PARTIAL_CONTENT}
_SUCCESSES = frozenset(range(200, 300)) - _NO_ANSWERS

_encode = msgspec.json.Encoder().encode
_decode_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def rewrite_model(body: bytes, model: str, filters: FiltersConfig | None = None) -> bytes:
    """Return the body with the server's own name of the model, and with the filters applied.

    The bytes of every other value stay as they are. Raises `InvalidRequest` if it is not a JSON object.
    """
    try:
        members: dict[str, Any] = dict(_decode_members(body))
    except msgspec.MsgspecError as error:
        raise InvalidRequest("the body is not a JSON object") from error
    requested = members.get("model")
    if filters is not None:
        for name in filters.strip_params:
            members.pop(name, None)
        members |= filters.set_params
        if filters.set_params_by_id and requested is not None:
            members |= filters.set_params_by_id.get(str(msgspec.json.decode(requested)), {})
    members["model"] = model
    return _encode(members)


async def relay(
    upstream: Upstream,
    job: Job,
    request: Relay,
    sink: Sink,
    *,
    model: str,
    dialects: Container[str] | None = None,
    filters: FiltersConfig | None = None,
    answer_bytes: int = ANSWER_BYTES,
    user: str | None = None,
) -> None:
    """Send the request and put its whole answer into the sink.

    upstream: the server.
    job: the job.
    request: its request.
    sink: gets the answer.
    model: the server's own name of the model.
    dialects: those that the server speaks; None: all.
    filters: what to change in the request; None: nothing.
    answer_bytes: bounds a response that is not streamed, and one event of a stream.
    user: names the job's tenant, for a server that trusts this one; None: it does not.

    Raises `NodeFull` if the server is full, `NodeUnsuited` if its set-up does not serve the request,
    `NodeRefused` if the request is at fault, `RelayFailed` if the server is, and `UpstreamFailed` if the
    connection is; the last two also in the middle of the answer.
    """
    if request.passthrough is not None:
        await pass_through(upstream, job, request, request.passthrough, sink)
        return
    if request.media is not None and dialects is not None and request.dialect not in dialects:
        raise NodeUnsuited.of(NodeRefused(f"{upstream.name} does not serve {request.path}", status=404))
    target: Relay | ChatRelay = request
    if request.only_chat or (dialects is not None and request.dialect not in dialects):
        target = _translation(upstream.name, request, dialects)
    # The server logs and traces it under the client's ids, too.
    headers = {"X-Request-Id": job.request_id, "traceparent": job.traceparent}
    if user is not None:
        headers[USER_HEADER] = user
    if request.media is not None:
        await _relay_media(upstream, request, request.media, sink, headers, model=model, filters=filters)
        return
    body = rewrite_model(target.body, model, filters)
    if target is request:
        headers.update(request.headers)
    stream_type = _stream_type(target)
    kind = stream_type if request.stream else JSON
    async with upstream.exchange("POST", target.path, body, accept=kind, headers=headers) as response:
        await _check_status(upstream.name, response, is_shown=target is request)
        response.decode()
        if request.stream and await is_stream(upstream.name, response, kind):
            await _stream(upstream.name, job, target, sink, answer_bytes).run(response)
            return
        content = await read_object(upstream.name, response, answer_bytes)
        deltas = _deltas(upstream.name, job, target, content)  # raises the error that an object reports
        if request.stream and target is request:
            raise RelayFailed(f"{upstream.name} sent a whole answer instead of a stream")
        for delta in deltas:
            sink.put(delta)


async def _relay_media(
    upstream: Upstream,
    request: Relay,
    media: Media,
    sink: Sink,
    headers: Mapping[str, str],
    *,
    model: str,
    filters: FiltersConfig | None,
) -> None:
    body: bytes | StreamedBody = b""
    path, kind = request.path, JSON
    if media.form is not None:
        kind, body = written_form(media.form, model, filters, requested=media.requested)
    elif media.method == "GET":
        path = with_model(path, model)
    else:
        body = rewrite_model(request.body, model, filters)
    headers = headers if media.method == "GET" else {**headers, "Content-Type": kind}
    async with upstream.exchange(
        media.method, path, body, accept=media.accept or "*/*", headers=headers
    ) as response:
        await _check_status(upstream.name, response, is_shown=True)
        response.decode()
        await relay_media(upstream.name, response, sink)


async def _check_status(name: str, response: UpstreamResponse, *, is_shown: bool) -> None:
    """Raise the error of a response that is no success. `is_shown` is as for `_refusal`."""
    if response.head.status >= HTTPStatus.BAD_REQUEST:
        raise await _refusal(name, response, is_shown=is_shown)
    if response.head.status not in _SUCCESSES:
        raise RelayFailed(f"{name} answered {response.head.status}")


def _translation(name: str, request: Relay, dialects: Container[str] | None) -> ChatRelay:
    """Return the request as a chat. Raises `NodeRefused` if it cannot be one, or the server has no chats."""
    if request.chat is None or (dialects is not None and CHAT_DIALECT not in dialects):
        raise NodeRefused(f"{name} does not serve {request.path}, and this request cannot be translated")
    return request.chat


def _stream_type(target: Relay | ChatRelay) -> str:
    if isinstance(target, ChatRelay):
        return EVENTS
    return readers[target.path].stream_type


def _stream(
    name: str, job: Job, target: Relay | ChatRelay, sink: Sink, event_bytes: int
) -> RelayedStream | TranslatedStream:
    if isinstance(target, ChatRelay):
        return TranslatedStream(name, job, target, sink, event_bytes=event_bytes)
    return RelayedStream(name, job, readers[target.path], sink, event_bytes=event_bytes)


def _deltas(name: str, job: Job, target: Relay | ChatRelay, body: bytes) -> list[Delta]:
    """Return the deltas of a whole response. Raises `RelayFailed`."""
    if isinstance(target, ChatRelay):
        return translated_response(name, job, target, body)
    others = [Delta(index, finish_reason="stop") for index in range(1, job.sequences)]
    return [_relayed_response(name, job, readers[target.path], body), *others]


async def _refusal(name: str, response: UpstreamResponse, *, is_shown: bool) -> FairleadError:
    """Return the error of a refusal. `is_shown`: the client gets the server's own error, in its dialect.

    The status alone is an answer, so a body that is too large, late or cut off is left out. Some servers echo
    a request that they refuse.
    """
    body = b""
    with trio.move_on_after(ERROR_BODY_S), suppress(OSError, InvalidResponse, UpstreamFailed, ContentFailed):
        response.decode()
        body = (await response.read_all(ERROR_BYTES)).removeprefix(BYTE_ORDER_MARK)
    return refusal(name, response.head, body, is_shown=is_shown)


def _relayed_response(name: str, job: Job, reader: UpstreamReader, body: bytes) -> Delta:
    try:
        answer = reader.read_response(body)
    except ValueError as error:
        raise RelayFailed(f"{name} sent {error}") from error
    if answer.error is not None:
        raise late_refusal(name, answer.error)
    estimate = min(answer.content_bytes // BYTES_A_TOKEN, allowed_tokens(job))
    generated = generated_tokens(job, answer.generated, counted=estimate, text_bytes=answer.content_bytes)
    return Delta(0, raw=[body], relayed_tokens=generated, finish_reason="stop")
