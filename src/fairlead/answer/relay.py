"""One job relayed to another server: the request as that server expects it, its response into a sink.

The body of a response is relayed byte for byte; none of its headers is. A response of another media type
than the API's is the node's failure: a proxy's login page must not leave our origin as a success.
"""

from collections.abc import Collection
from http import HTTPStatus
from typing import Any

import msgspec

from fairlead.answer.passthrough import pass_through
from fairlead.answer.relayed_stream import RelayedStream, RelayFailed
from fairlead.answer.reported import (
    BYTES_A_TOKEN,
    allowed_tokens,
    decoded,
    excerpt,
    generated_tokens,
    seconds,
)
from fairlead.answer.sink import Sink
from fairlead.config import ANSWER_BYTES, FiltersConfig
from fairlead.errors import (
    Draining,
    FairleadError,
    InvalidRequest,
    ModelLoading,
    ModelUnloaded,
    NodeFull,
    NodeRefused,
    NoNode,
)
from fairlead.http.client import ResponseTooLarge, Upstream, UpstreamFailed, UpstreamResponse
from fairlead.http.response_parser import ResponseHead
from fairlead.job import Delta, Job, Relay
from fairlead.upstream_events import EVENTS, UpstreamReader

ERROR_BYTES = 1024 * 1024
RETRY_AFTER_AT_MOST_S = 60

JSON = "application/json"

# Sent by a gateway in front of a dead server; a single request may cause any other 5xx.
GATEWAY_ERRORS = frozenset(
    {HTTPStatus.BAD_GATEWAY, HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.GATEWAY_TIMEOUT}
)

# Error codes of a healthy Fairlead that cannot take this job now.
BUSY = frozenset({ModelLoading.code, Draining.code, NoNode.code, ModelUnloaded.code})

_encode = msgspec.json.Encoder().encode
_decode_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class _Reason(msgspec.Struct):
    code: str | int | None = None


class _Refusal(msgspec.Struct):
    error: _Reason


class _Object(msgspec.Struct):
    """Any JSON object."""


_decode_object = msgspec.json.Decoder(_Object).decode
_decode_refusal = msgspec.json.Decoder(_Refusal).decode


def rewritten(body: bytes, model: str, filters: FiltersConfig | None = None) -> bytes:
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
    filters: FiltersConfig | None = None,
    answer_bytes: int = ANSWER_BYTES,
) -> None:
    """Send the request and put its whole answer into the sink.

    `answer_bytes` bounds a response that is not streamed, and one event of a stream. Raises `NodeFull` if the
    server is full, `NodeRefused` if the request is at fault, and `RelayFailed` or `UpstreamFailed` if the
    server is; the last two also in the middle of the answer.
    """
    if request.passthrough is not None:
        await pass_through(upstream, job, request, request.passthrough, sink)
        return
    assert request.reader is not None
    body = rewritten(request.body, model, filters)
    # The server logs and traces it under the client's ids, too.
    headers = {"X-Request-Id": job.request_id, "traceparent": job.traceparent}
    stream_type = request.reader.stream_type
    kind = stream_type if request.stream else JSON
    async with upstream.exchange("POST", request.path, body, accept=kind, headers=headers) as response:
        if response.head.status >= HTTPStatus.BAD_REQUEST:
            raise await _refusal(upstream.name, response)
        _check(upstream.name, response.head, kind, {JSON, EVENTS, stream_type})
        if request.stream:
            stream = RelayedStream(upstream.name, job, request.reader, sink, event_bytes=answer_bytes)
            await stream.run(response)
        else:
            sink.put(await _read_response(upstream.name, job, request.reader, response, answer_bytes))
            for index in range(1, job.sequences):
                sink.put(Delta(index, finish_reason="stop"))


def _check(name: str, head: ResponseHead, kind: str, kinds: Collection[str]) -> None:
    """Raise `UpstreamFailed` unless the response is a success of the media type that was requested.

    Raise `RelayFailed`, which does not count against the node, for another type of the API: a request may
    cause that.
    """
    if head.status != HTTPStatus.OK:
        raise UpstreamFailed(f"{name} answered {head.status}")
    if _is_encoded(head):
        raise UpstreamFailed(f"{name} sent a content encoding that was not requested")
    if head.content_type == kind:
        return
    problem = f"{name} answered with {excerpt(head.content_type) or 'no content type'} instead of {kind}"
    raise RelayFailed(problem) if head.content_type in kinds else UpstreamFailed(problem)


def _is_encoded(head: ResponseHead) -> bool:
    return head.headers.get("content-encoding", "identity").lower() != "identity"


async def _refusal(name: str, response: UpstreamResponse) -> FairleadError:
    status = response.head.status
    try:
        body = await response.read_all(ERROR_BYTES)
    except ResponseTooLarge:
        body = b""  # some servers echo a request that they refuse
    if _is_encoded(response.head):
        body = b""
    if status == HTTPStatus.TOO_MANY_REQUESTS:
        return NodeFull(f"{name} is at capacity")
    if status in (HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.CONFLICT) and (code := _code(body)) in BUSY:
        # A server that shuts down is full for all its models, for the time that it reports.
        retry_after = response.head.headers.get("retry-after", "")
        wait_s = seconds(retry_after, RETRY_AFTER_AT_MOST_S) if code == Draining.code else None
        return NodeFull(f"{name} is at capacity: {code}", retry_after_s=wait_s)
    quoted = excerpt(body)
    message = f"{name} answered {status}: {quoted}" if quoted else f"{name} answered {status}"
    if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.PROXY_AUTHENTICATION_REQUIRED):
        return RelayFailed(f"{name} rejected our API key")  # the client cannot change that
    if status < HTTPStatus.INTERNAL_SERVER_ERROR:
        return NodeRefused(message, status=status, body=body if _is_error(response.head, body) else b"")
    return UpstreamFailed(message) if status in GATEWAY_ERRORS else RelayFailed(message)


def _is_error(head: ResponseHead, body: bytes) -> bool:
    """Return whether the body is a JSON object, which no browser renders as a page."""
    kind = head.content_type
    if kind != JSON and not (kind.startswith("application/") and kind.endswith("+json")):
        return False
    try:
        body.decode()
    except UnicodeDecodeError:
        return False
    return decoded(_decode_object, body) is not None


def _code(body: bytes) -> str | int | None:
    """Return the code of an error in OpenAI's format, if there is one."""
    refusal = decoded(_decode_refusal, body)
    return None if refusal is None else refusal.error.code


async def _read_response(
    name: str, job: Job, reader: UpstreamReader, response: UpstreamResponse, answer_bytes: int
) -> Delta:
    try:
        body = await response.read_all(answer_bytes)
    except ResponseTooLarge as error:
        raise RelayFailed(error.message) from error  # a request may cause that
    if not body:
        raise UpstreamFailed(f"{name} sent an empty answer")
    try:
        answer = reader.read_response(body)
    except ValueError as error:
        raise RelayFailed(f"{name} sent {error}") from error
    if answer.error is not None:
        raise RelayFailed(f"{name} failed: {answer.error}")
    estimate = min(answer.content_bytes // BYTES_A_TOKEN, allowed_tokens(job))
    generated = generated_tokens(job, answer.generated, counted=estimate, text_bytes=answer.content_bytes)
    return Delta(0, raw=[body], relayed_tokens=generated, finish_reason="stop")
