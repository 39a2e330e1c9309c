"""Errors as HTTP responses: the only reader of the hints that a `FairleadError` carries.

Every exception becomes JSON in the dialect of the route that raised it, with its status and headers. The
error of another server that a request was relayed to is passed on unchanged. An exception that is neither a
`FairleadError` nor an HTTP error of Quart's is our own bug: it is logged, once, and the client gets only the
request id to ask about.
"""

from collections.abc import Callable
from typing import NamedTuple

import msgspec
import structlog
from werkzeug import exceptions as werkzeug

from fairlead.api.request import Reply, json_reply
from fairlead.errors import (
    BodyTimeout,
    BodyTooLarge,
    FairleadError,
    InvalidRequest,
    MethodNotAllowed,
    ModelUnloaded,
    NodeRefused,
    NotFound,
)
from fairlead.http.server_sent_events import encode_event

logger = structlog.get_logger("fairlead.api")

# 429, 503 and `unloaded` have a Retry-After header even where the error has no estimate.
DEFAULT_RETRY_AFTER_S = 2

NO_ROUTE = "there is no such route"

_encode = msgspec.json.Encoder().encode
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    429: "rate_limit_error",
    499: "cancelled_error",
    504: "timeout_error",
}

_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def openai_error(error: FairleadError) -> bytes:
    """Return the body of an error in OpenAI's dialect; also the data of an error event in a stream."""
    kind = _TYPES.get(error.status, "server_error" if error.status >= 500 else "invalid_request_error")
    told = {"message": _message(error), "type": kind, "param": error.param, "code": error.code}
    return _encode({"error": told})


def anthropic_error(error: FairleadError) -> bytes:
    """Return the body of an error in Anthropic's dialect; also the data of an error event in a stream."""
    kind = _ANTHROPIC_TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    told = {"type": kind, "message": _message(error), "param": error.param, "code": error.code}
    return _encode({"type": "error", "error": told})


def _message(error: FairleadError) -> str:
    """Return the message, beginning with the field at fault: many clients show nothing else."""
    if error.status == 400 and error.param and not error.message.startswith(error.param):
        return f"{error.param}: {error.message}"
    return error.message


class Dialect(NamedTuple):
    """How an error is written: `body`, and in a stream the `head` before it, which names the event."""

    body: Callable[[FairleadError], bytes]
    head: bytes = b""


_OPENAI = Dialect(openai_error)
# By path prefix; the first match counts.
_DIALECTS = (("/v1/messages", Dialect(anthropic_error, b"event: error\n")), ("/", _OPENAI))


def error_event(error: FairleadError, path: str = "/") -> bytes:
    """Return the event that ends a stream on `path`, for an error that a client may see."""
    dialect = _dialect(path)
    data = (_in_one_line(error.body) if isinstance(error, NodeRefused) else b"") or dialect.body(error)
    return dialect.head + encode_event(data)


def _in_one_line(body: bytes) -> bytes:
    """Return another server's error in one line, as events require; empty if its form is unknown."""
    try:
        document = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return b""
    return _encode(document) if isinstance(document, dict) and "error" in document else b""


def error_reply(raised: Exception, path: str, public: FairleadError | None = None) -> Reply:
    """Return the response for an exception raised while a request to `path` was handled.

    `public` is its `public_error`, if already known: computing it may log.
    """
    error = public or public_error(raised)
    headers = _headers(error)
    if isinstance(raised, werkzeug.MethodNotAllowed):
        headers["Allow"] = ", ".join(sorted(raised.valid_methods or ()))
    if isinstance(error, NodeRefused) and error.body:
        return json_reply(error.body, error.status, headers)
    return json_reply(_dialect(path).body(error), error.status, headers)


def public_error(raised: Exception) -> FairleadError:
    """Return the error that a client may see. Logs bugs of our own."""
    match raised:
        case FairleadError():
            return raised
        case werkzeug.NotFound():
            return NotFound(NO_ROUTE)
        case werkzeug.MethodNotAllowed():
            return MethodNotAllowed("this route has other methods")
        case werkzeug.RequestEntityTooLarge():
            return BodyTooLarge("the body is too large")
        case werkzeug.RequestTimeout():
            return BodyTimeout("the request took too long to arrive")
        case werkzeug.HTTPException(code=int(code)) if 400 <= code < 500:
            return InvalidRequest(raised.description or "the request cannot be understood")
    logger.error("unexpected error", exc_info=raised)
    return FairleadError("the server failed; its log says more, under this request id")


def _dialect(path: str) -> Dialect:
    return next((dialect for prefix, dialect in _DIALECTS if path.startswith(prefix)), _OPENAI)


def _headers(error: FairleadError) -> dict[str, str]:
    headers = {}
    retry_after_s = error.retry_after_s
    if retry_after_s is None and (error.status in {429, 503} or isinstance(error, ModelUnloaded)):
        retry_after_s = DEFAULT_RETRY_AFTER_S
    if retry_after_s is not None:
        headers["Retry-After"] = str(retry_after_s)
    if error.estimated_wait_s is not None:
        headers["X-Estimated-Wait"] = str(error.estimated_wait_s)
    if error.queue_position is not None:
        headers["X-Queue-Position"] = str(error.queue_position)
    if error.should_retry is not None:
        headers["x-should-retry"] = "true" if error.should_retry else "false"
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return headers
