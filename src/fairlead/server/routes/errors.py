"""Errors as HTTP responses: the only reader of the hints that a `FairleadError` carries.

Every exception becomes JSON in the dialect of the route that raised it, with its status and headers. The
error of another server that a request was relayed to is passed on unchanged. An exception that is neither a
`FairleadError` nor an HTTP error of Quart's is our own bug. It is logged once, and the client gets only the
request id, which the log has too.
"""

from collections.abc import Iterable

from werkzeug import exceptions as werkzeug

from fairlead.base.errors import (
    BodyTimeout,
    BodyTooLarge,
    FairleadError,
    InvalidRequest,
    MethodNotAllowed,
    ModelUnloaded,
    NodeRefused,
    UnknownCoding,
)
from fairlead.base.formats.content_coding import REQUEST_CODINGS
from fairlead.base.supervision import hide_bug
from fairlead.dialects.dialect import RelayDialect
from fairlead.dialects.ollama.writer import OllamaErrors
from fairlead.dialects.openai.common import OpenAIErrors
from fairlead.server.routes.request import Response, json_response

# 429, 503 and `unloaded` have a Retry-After header even where the error has no estimate.
DEFAULT_RETRY_AFTER_S = 2

OLLAMA = "/api/"

ErrorForm = RelayDialect | OpenAIErrors | OllamaErrors


class ErrorFormats:
    """The form of errors by path. Below a dialect's path it is that dialect's, elsewhere OpenAI's.

    Below `/api/`, it is Ollama's.
    """

    def __init__(self, dialects: Iterable[RelayDialect]) -> None:
        self._dialects = sorted(dialects, key=lambda dialect: len(dialect.path), reverse=True)
        self._default = OpenAIErrors()
        self._ollama = OllamaErrors()

    def of(self, path: str) -> ErrorForm:
        """Return the form for a path, which may have no route."""
        found = (dialect for dialect in self._dialects if path.startswith(dialect.path))
        return next(found, self._ollama if path.startswith(OLLAMA) else self._default)


def error_response(raised: Exception, form: ErrorForm, public: FairleadError | None = None) -> Response:
    """Return the response for an exception raised while a request was handled, in the form of its path.

    `public` is its `public_error`, if already known: computing it may log.
    """
    error = public or public_error(raised)
    headers = _headers(error)
    if isinstance(error, NodeRefused) and error.body:
        return json_response(error.body, error.status, headers)
    return json_response(form.error_body(error), error.status, headers)


def public_error(raised: Exception) -> FairleadError:
    """Return the error that a client may see, as `hide_bug` does, also for errors of HTTP."""
    match raised:
        case werkzeug.RequestEntityTooLarge():
            return BodyTooLarge("the body is too large")
        case werkzeug.RequestTimeout():
            return BodyTimeout("the request took too long to arrive")
        case werkzeug.HTTPException(code=int(code)) if 400 <= code < 500:
            return InvalidRequest(raised.description or "the request cannot be understood")
    return hide_bug(raised)


def _headers(error: FairleadError) -> dict[str, str]:
    retry_after_s = error.retry_after_s
    may_be_retried = error.status in {429, 503} or isinstance(error, ModelUnloaded)
    if retry_after_s is None and may_be_retried and error.should_retry is not False:
        retry_after_s = DEFAULT_RETRY_AFTER_S
    hints = {
        "Retry-After": retry_after_s,
        "X-Estimated-Wait": error.estimated_wait_s,
        "X-Queue-Position": error.queue_position,
    }
    headers = {name: str(value) for name, value in hints.items() if value is not None}
    if error.should_retry is not None:
        headers["x-should-retry"] = "true" if error.should_retry else "false"
    if isinstance(error, MethodNotAllowed):
        headers["Allow"] = ", ".join(error.allowed)
    if isinstance(error, UnknownCoding):
        headers["Accept-Encoding"] = ", ".join(error.known or REQUEST_CODINGS)  # RFC 9110, 12.5.3
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return headers
