"""Errors that other servers send with the status 200: in place of an answer, or in a stream."""

import msgspec

from fairlead.base.formats.server_sent_events import event_name
from fairlead.base.reported import EXCERPT_LENGTH, decoded, excerpt, is_given
from fairlead.base.upstream_events import UpstreamError

_ABSENT = msgspec.Raw()
_LONGEST_WORD = 64
_NO_ERROR = tuple(msgspec.Raw(empty) for empty in (b'""', b"{}", b"[]", b"false"))
_ERROR = msgspec.Raw(b'"error"')

_STATUS_OF_WORD = {
    "invalid_request_error": 400,
    "invalid_request": 400,
    "invalid_prompt": 400,
    "bad_request": 400,
    "badrequesterror": 400,
    "validation": 400,
    "validation_error": 400,
    "context_length_exceeded": 400,
    "exceed_context_size_error": 400,
    "content_policy_violation": 400,
    "authentication_error": 401,
    "authenticationerror": 401,
    "invalid_api_key": 401,
    "billing_error": 402,
    "billing_hard_limit_reached": 402,
    "budget_exceeded": 402,
    "permission_error": 403,
    "permissiondeniederror": 403,
    "not_found_error": 404,
    "notfounderror": 404,
    "model_not_found": 404,
    "request_too_large": 413,
    "insufficient_quota": 402,  # as others call it; with the status 429 the job would wait
    "rate_limit_error": 429,
    "rate_limit_exceeded": 429,
    "ratelimiterror": 429,
    "overloaded": 503,
    "service_unavailable": 503,
    "unavailable_error": 503,
    "overloaded_error": 529,
}
"""What servers call their errors instead of, or beside, a number: OpenAI, Anthropic, vLLM, llama.cpp, TGI."""


class _Error(msgspec.Struct):
    """An error as an object: OpenAI's, Anthropic's, or one of the many that resemble them."""

    object: msgspec.Raw = _ABSENT
    message: msgspec.Raw = _ABSENT
    detail: msgspec.Raw = _ABSENT
    code: msgspec.Raw = _ABSENT
    status: msgspec.Raw = _ABSENT
    status_code: msgspec.Raw = _ABSENT
    type: msgspec.Raw = _ABSENT
    error_type: msgspec.Raw = _ABSENT


_decode_error = msgspec.json.Decoder(_Error).decode
_decode_text = msgspec.json.Decoder(str).decode


def is_error(member: msgspec.Raw) -> bool:
    """Return whether a member named `error` reports one: some servers always have it, empty."""
    return is_given(member) and member not in _NO_ERROR


def error_of(error: msgspec.Raw | bytes, beside: bytes = b"") -> UpstreamError:
    """Return an error as a message and the status that it names, if any.

    error: A text, or an object with a `message`, and with a number or a word as `code`, `status` or `type`.
    beside: The object that has it as a member, which may name the status instead.
    """
    fields = decoded(_decode_error, error)
    texts = (error,) if fields is None else (fields.message, fields.detail)
    text = next((text for each in texts if (text := decoded(_decode_text, each)) is not None), None)
    message = excerpt(bytes(memoryview(error)[:EXCERPT_LENGTH]) if text is None else text)
    status = _status_of(fields)
    return UpstreamError(message, status or _status_of(decoded(_decode_error, beside)))


def unnamed_error(event: bytes, payload: bytes) -> UpstreamError | None:
    """Return the error in an event without a member `error`; None if it has none.

    Either its name says so, or its data is an error itself: vLLM's `object`, or a message beside a status.
    """
    if event_name(event) == "error":
        return error_of(payload)
    fields = decoded(_decode_error, payload)
    if fields is None or not (is_given(fields.message) or is_given(fields.detail)):
        return None
    error = error_of(payload)
    return error if error.status is not None or fields.object == _ERROR else None


def _status_of(fields: _Error | None) -> int | None:
    if fields is None:
        return None
    for member in (fields.code, fields.status, fields.status_code, fields.type, fields.error_type):
        word = bytes(memoryview(member)[:_LONGEST_WORD]).strip(b'"').decode(errors="replace")
        status = int(word) if word.isascii() and word.isdigit() else _STATUS_OF_WORD.get(word.lower())
        if status is not None and 400 <= status < 600:
            return status
    return None
