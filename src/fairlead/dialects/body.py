"""Parsing of request bodies: from bytes to a typed value, or to an error that names the field at fault.

msgspec is strict and fast, and the only parser of valid bodies. Only a body that it refuses is read again, by
the slower standard parser, to locate the fault.

A parser holds the GIL while it creates objects, and 16 MB can become eight million of them. Meanwhile no
stream gets its next token. So the values of a body that may have too many are counted first, which creates no
objects.
"""

import json
import re
from typing import Generic, TypeVar

import msgspec

from fairlead._cext.jsoncount import count
from fairlead.base.config import Limits
from fairlead.base.errors import InvalidRequest

Body = TypeVar("Body")

# Members, in any dialect, that hold token ids: there are many, and each costs little.
TOKEN_LISTS = (b"prompt", b"input", b"tokens")
# A body has at most this many values per byte ("1.," counts as four), so most need not be counted.
_MAX_VALUES_PER_BYTE = 2

# The second parse blocks every other request, so it is bounded. Above the first bound the message is less
# precise; above the second a whole number may not be written as 5.0.
MAX_DIAGNOSED_BYTES = 64 * 1024
MAX_REWRITTEN_BYTES = 1024 * 1024
# Bounds of client text that error messages quote.
MAX_QUOTED_CHARS = 200
# A parser's message begins with the fault, which may quote text of any length, and ends with its place.
_MESSAGE_HEAD_CHARS = 300
_MESSAGE_TAIL_CHARS = 1000

_PATH = re.compile(r"(?:`key` in )?`\$\.?([^`]*)`")
_MEMBER = re.compile(
    r"object (?P<fault>missing required|contains unknown) field `(?P<name>[^`]*)`", re.DOTALL
)
# The position of a value: that of its container, and its key or index there.
_Location = tuple["_Location | None", str | int]

_NOT_A_NUMBER = "NaN and Infinity are not JSON numbers"
_SURROGATE = "a lone surrogate is not a character"
_NOT_UTF8 = "not valid UTF-8"


class BodyParser(Generic[Body]):
    """Parses bodies as values of one type. Does the same as `parse`."""

    def __init__(self, kind: type[Body]) -> None:
        self._decoder = msgspec.json.Decoder(kind)

    def __call__(self, body: bytes, limits: Limits) -> Body:
        return parse(body, self._decoder, limits)


def parse(body: bytes, decoder: msgspec.json.Decoder[Body], limits: Limits) -> Body:
    """Decode a body. Raises `InvalidRequest` for any fault, with the `param` if known."""
    try:
        if _MAX_VALUES_PER_BYTE * len(body) > limits.body_values:
            check_counts(body, limits)
        else:
            str(body, "utf-8")  # msgspec does not check the strings in fields it ignores
        return _decode(body, decoder)
    except msgspec.ValidationError as error:
        raise _invalid_value(str(error)) from None
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _malformed(body, error) from None


def _decode(body: bytes, decoder: msgspec.json.Decoder[Body]) -> Body:
    """Decode a body. Accepts 5.0 for a whole number, as JSON Schema does; msgspec refuses it."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        if "got `float`" not in str(error) or len(body) > MAX_REWRITTEN_BYTES:
            raise
    document = msgspec.json.decode(body)
    if isinstance(document, dict):
        document = {name: _with_whole_numbers(value) for name, value in document.items()}
    return decoder.decode(msgspec.json.encode(document))


def _with_whole_numbers(value: object) -> object:
    """Return a number, or numbers in lists, with 5.0 as 5. Objects are not changed: they are client data."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return list(map(_with_whole_numbers, value)) if isinstance(value, list) else value


def check_counts(body: bytes, limits: Limits) -> None:
    """Raise `InvalidRequest` for more values than allowed, `UnicodeDecodeError` for invalid UTF-8."""
    counts = count(body, TOKEN_LISTS)
    if counts.invalid_at >= 0:
        raise UnicodeDecodeError("utf-8", b"", counts.invalid_at, counts.invalid_at + 1, _NOT_UTF8)
    if counts.values > limits.body_values:
        name = counts.largest.decode(errors="replace")
        raise InvalidRequest(
            f"{name or 'the body'}: {counts.values} JSON values are too many; "
            f"a body may have {limits.body_values}",
            param=name or None,
        )
    tokens = sum(counts.apart)
    if tokens > limits.request_tokens:
        name = TOKEN_LISTS[counts.apart.index(max(counts.apart))].decode()
        raise too_many_tokens(tokens, name, limits)


def too_many_tokens(tokens: int, param: str, limits: Limits) -> InvalidRequest:
    """Return the error for more tokens than one request may have."""
    return invalid_field(param, f"{tokens} tokens are too many; a request may have {limits.request_tokens}")


def invalid_field(param: str, reason: str) -> InvalidRequest:
    """Return the error that names a field and its fault."""
    return InvalidRequest(f"{param}: {reason}", param=param)


def _invalid_value(message: str) -> InvalidRequest:
    """Return the error for JSON that violates the schema. msgspec appends "… - at `$.messages[0].role`"."""
    if len(message) > _MESSAGE_HEAD_CHARS + _MESSAGE_TAIL_CHARS:
        message = f"{message[:_MESSAGE_HEAD_CHARS]}…{message[-_MESSAGE_TAIL_CHARS:]}"
    # The last separator is msgspec's own: quoted client text may contain the same words.
    reason, _, location = message.rpartition(" - at ")
    found = _PATH.fullmatch(location)
    if found is None:
        reason = message
    path = "" if found is None else found[1][:MAX_QUOTED_CHARS]
    reason = reason[:1].lower() + reason[1:MAX_QUOTED_CHARS]
    # msgspec writes "[...]" for keys the client chose; the path after them is dropped.
    param = path.partition("[...]")[0]
    member = _MEMBER.fullmatch(reason)
    if member is not None and "[...]" not in path:
        param = f"{param}.{member['name']}" if param else member["name"]
        what = "is missing" if member["fault"] == "missing required" else "is not a field of this request"
        return invalid_field(param, what)
    if not param:
        return InvalidRequest(f"the body does not fit: {reason}")
    return invalid_field(param, reason)


def _malformed(body: bytes, error: Exception) -> InvalidRequest:
    """Return the error for a body that is not JSON, with the field at fault if known."""
    if not body or body.isspace():
        return InvalidRequest("the body is empty; a JSON object is expected")
    if len(body) <= MAX_DIAGNOSED_BYTES:
        fault = _diagnose(body)
        if fault is not None:
            return fault
    if isinstance(error, UnicodeDecodeError):
        return InvalidRequest(f"the body is {_NOT_UTF8} (byte {error.start})")
    reason = str(error).removeprefix("JSON is malformed: ")
    reason = reason.replace("Input data was truncated", "it ends too early")
    return InvalidRequest(f"the body is not valid JSON: {reason}")


class _NotANumber:
    """A placeholder for a NaN or an Infinity in a body."""


def _diagnose(body: bytes) -> InvalidRequest | None:
    """Return a fault that a lenient parser accepts, with its path; None if it refuses the body too."""
    try:
        # Bytes that are not UTF-8 become surrogates U+DC80…U+DCFF, and are found as such.
        text = body.decode("utf-8", "surrogateescape")
        document = json.loads(text, parse_constant=lambda _: _NotANumber(), parse_int=float)
    except RecursionError:
        return InvalidRequest("the body is nested too deeply")
    except ValueError:
        return None
    encoding_fault = _SURROGATE if text.isascii() or _is_encodable(text) else _NOT_UTF8
    # A path is only built for the value at fault. Paths of all values would take half a gigabyte for 64 KB.
    unvisited: list[tuple[_Location | None, object]] = [(None, document)]
    while unvisited:
        location, value = unvisited.pop()
        if isinstance(value, _NotANumber):
            return _fault(location, _NOT_A_NUMBER)
        if isinstance(value, str) and not _is_encodable(value):
            return _fault(location, encoding_fault)
        if isinstance(value, list):
            unvisited += (((location, index), item) for index, item in enumerate(value))
        elif isinstance(value, dict):
            if not all(map(_is_encodable, value)):
                return _fault(location, f"{encoding_fault} (in a key)")
            unvisited += (((location, key), item) for key, item in value.items())
    return None


def _fault(location: _Location | None, reason: str) -> InvalidRequest:
    keys: list[str] = []
    while location is not None:
        location, key = location
        keys.append(f"[{key}]" if isinstance(key, int) else f".{key}")
    path = "".join(reversed(keys)).removeprefix(".")[:MAX_QUOTED_CHARS]
    return InvalidRequest(f"{path or 'the body'}: {reason}", param=path or None)


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
