"""What another server's error means for the job: who is at fault, and whether another attempt may help.

- 503, 429 and 529: the server is full for this model. So is a Fairlead that loads or unloads the model.
- 401, 402, 403, 404, 405 and 407: its key or its set-up does not serve the request; another server may.
- 429 because the money of its key is used up (`NO_QUOTA`): waiting does not help; another server may.
- Other 4xx, and 501: the request is at fault, and the client gets the answer.
- All others: this attempt has failed.

An answer of any status shows that the server lives.
"""

import time
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from typing import Any

import msgspec

from fairlead.base.errors import (
    FairleadError,
    ModelUnloaded,
    NodeFull,
    NodeLimited,
    NodeRefused,
    NodeUnsuited,
    QuotaExhausted,
)
from fairlead.base.reported import decoded, excerpt, seconds
from fairlead.base.upstream_events import UpstreamError
from fairlead.nodes.http.response_parser import ResponseHead
from fairlead.nodes.streams.upstream_stream import RelayFailed

RETRY_AFTER_AT_MOST_S = 60

JSON = "application/json"

OVERLOADED = 529  # Anthropic's
FULL = frozenset({HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE, OVERLOADED})
UNSUITED = frozenset(
    {
        HTTPStatus.UNAUTHORIZED,
        HTTPStatus.PAYMENT_REQUIRED,
        HTTPStatus.FORBIDDEN,
        HTTPStatus.NOT_FOUND,
        HTTPStatus.METHOD_NOT_ALLOWED,
        HTTPStatus.PROXY_AUTHENTICATION_REQUIRED,
    }
)
# Codes and types of OpenAI, and of LiteLLM for its own keys.
NO_QUOTA = frozenset({"insufficient_quota", "billing_hard_limit_reached", "budget_exceeded"})
KEY_REJECTED = frozenset({HTTPStatus.UNAUTHORIZED, HTTPStatus.PROXY_AUTHENTICATION_REQUIRED})


class _Reason(msgspec.Struct):
    code: str | int | None = None
    message: Any = None
    type: str | None = None


class _Refusal(msgspec.Struct):
    """An error as OpenAI and Anthropic write it, or as a text under one of the names that others use."""

    error: Any = None
    message: Any = None
    detail: Any = None


class _Object(msgspec.Struct):
    """Any JSON object."""


_decode_object = msgspec.json.Decoder(_Object).decode
_decode_refusal = msgspec.json.Decoder(_Refusal).decode


def refusal(name: str, head: ResponseHead, body: bytes, *, is_shown: bool) -> FairleadError:
    """Return the error for a response with an error status.

    name: the server's, for messages.
    head: the response's head.
    body: its body, empty if it cannot be used.
    is_shown: whether the client speaks the server's dialect, so that it gets the body itself.
    """
    reason = _reason(body)
    told = reason.message if isinstance(reason.message, str) else None
    message = _message(name, head.status, body if is_shown or told is None else told)
    shown = body if is_shown and _is_error(head, body) else b""
    if head.status == HTTPStatus.TOO_MANY_REQUESTS and NO_QUOTA & {reason.code, reason.type}:
        return NodeUnsuited.of(QuotaExhausted(message, status=head.status, body=shown))
    if head.status in FULL or (head.status == HTTPStatus.CONFLICT and reason.code == ModelUnloaded.code):
        return _full(name, head.status, told or body, retry_after_s(head))
    return _refused(name, head.status, message, shown)


def late_refusal(name: str, error: UpstreamError, *, has_begun: bool = False) -> FairleadError:
    """Return the error for an error that a server has sent with the status 200.

    name: the server's, for messages.
    error: what it names in place of a status counts as the status would; without that the server has failed.
    has_begun: whether it stands in the middle of an answer, where a server that is full has failed as well.
    """
    if error.status is None or (has_begun and error.status in FULL):
        return RelayFailed(f"{name} failed: {error.message}")
    if error.status in FULL:
        return _full(name, error.status, error.message, None)
    return _refused(name, error.status, _message(name, error.status, error.message), b"")


def _full(name: str, status: int, told: str | bytes, after_s: int | None) -> NodeFull:
    kind = NodeLimited if status == HTTPStatus.TOO_MANY_REQUESTS else NodeFull
    return kind(_message(name, status, told), retry_after_s=after_s)


def _refused(name: str, status: int, message: str, shown: bytes) -> FairleadError:
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR and status != HTTPStatus.NOT_IMPLEMENTED:
        return RelayFailed(message)
    if status in KEY_REJECTED:
        return NodeUnsuited.of(RelayFailed(f"{name} rejected our API key"))  # the client cannot change that
    answer = NodeRefused(message, status=status, body=shown)
    return NodeUnsuited.of(answer) if status in UNSUITED else answer


def retry_after_s(head: ResponseHead) -> int | None:
    """Return how long the server asks to wait, within a bound: a number or a date; None if it does not."""
    value = head.headers.get("retry-after", "")
    given = seconds(value, RETRY_AFTER_AT_MOST_S)
    if given is not None or not value.strip().endswith("GMT"):
        return given
    until = _time_of(value)
    if until is None:
        return None
    # By the server's own clock, if it shows that.
    now = _time_of(head.headers.get("date", "")) or time.time()
    return round(max(1.0, min(until - now, RETRY_AFTER_AT_MOST_S)))


def _time_of(date: str) -> float | None:
    try:
        return parsedate_to_datetime(date).timestamp()
    except (ValueError, OverflowError, OSError):
        return None


def _message(name: str, status: int, quoted: str | bytes) -> str:
    text = excerpt(quoted)
    return f"{name} answered {status}: {text}" if text else f"{name} answered {status}"


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


def _reason(body: bytes) -> _Reason:
    """Return the code and the message of an error, as far as there are any."""
    refused = decoded(_decode_refusal, body)
    if refused is None:
        return _Reason()
    if isinstance(refused.error, dict):
        code, kind = refused.error.get("code"), refused.error.get("type")
        known = code if isinstance(code, str | int) else None
        return _Reason(known, refused.error.get("message"), kind if isinstance(kind, str) else None)
    texts = (refused.error, refused.message, refused.detail)
    return _Reason(message=next((text for text in texts if isinstance(text, str)), None))
