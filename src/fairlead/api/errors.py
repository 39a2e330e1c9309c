"""Errors as HTTP answers: the only reader of the hints that a `FairleadError` carries.

Whatever is raised becomes JSON in the dialect of the route it was raised on, with the status and headers
of spec 7. What is not a `FairleadError` is our own bug: it is logged, once, and the client is told nothing
about it but the request id to ask for.
"""

from collections.abc import Callable

import msgspec
import structlog
from werkzeug import exceptions as werkzeug

from fairlead.api.call import Reply, json_reply
from fairlead.errors import (
    BodyTimeout,
    BodyTooLarge,
    FairleadError,
    InvalidRequest,
    MethodNotAllowed,
    NotFound,
)

logger = structlog.get_logger("fairlead.api")

# 429 and 503 promise a Retry-After even when who raised them had no estimate.
DEFAULT_RETRY_AFTER_S = 2

_encode = msgspec.json.Encoder().encode
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    499: "cancelled_error",
    504: "timeout_error",
}

Dialect = Callable[[FairleadError], bytes]


def openai_error(error: FairleadError) -> bytes:
    """Return the body of an error in OpenAI's dialect; also the data of an error event in a stream."""
    message = error.message
    if error.status == 400 and error.param and not message.startswith(error.param):
        message = f"{error.param}: {message}"  # many clients show nothing but the message
    kind = _TYPES.get(error.status, "server_error" if error.status >= 500 else "invalid_request_error")
    return _encode({"error": {"message": message, "type": kind, "param": error.param, "code": error.code}})


# By the beginning of the path, the first that fits.
_DIALECTS: tuple[tuple[str, Dialect], ...] = (("/", openai_error),)


def error_reply(raised: Exception, path: str) -> Reply:
    """Return the answer for whatever was raised while a request to `path` was handled."""
    error = public_error(raised)
    headers = _headers(error)
    if isinstance(raised, werkzeug.MethodNotAllowed):
        headers["Allow"] = ", ".join(sorted(raised.valid_methods or ()))
    dialect = next((dialect for prefix, dialect in _DIALECTS if path.startswith(prefix)), openai_error)
    return json_reply(dialect(error), error.status, headers)


def public_error(raised: Exception) -> FairleadError:
    """Return what a client may know of an error. Logs those that are our own bugs."""
    match raised:
        case FairleadError():
            return raised
        case werkzeug.NotFound():
            return NotFound("there is no such route")
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


def _headers(error: FairleadError) -> dict[str, str]:
    headers = {}
    retry_after_s = error.retry_after_s
    if retry_after_s is None and error.status in {429, 503}:
        retry_after_s = DEFAULT_RETRY_AFTER_S
    if retry_after_s is not None:
        headers["Retry-After"] = str(retry_after_s)
    if error.estimated_wait_s is not None:
        headers["X-Estimated-Wait"] = str(error.estimated_wait_s)
    if error.should_retry is not None:
        headers["x-should-retry"] = "true" if error.should_retry else "false"
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return headers
