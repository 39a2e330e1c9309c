"""From bytes to a typed value, or to an error that names the field at fault.

msgspec reads strictly and fast, and is the only parser of bodies that are good. Only when it refuses one
is the body read again, by the slower standard parser, to find out where it is wrong.
"""

import json
import re
from typing import TypeVar

import msgspec

from fairlead.errors import InvalidRequest

Body = TypeVar("Body")

# The second reading holds up every other request, so it has a bound; beyond it the message is less precise.
MAX_DIAGNOSED_BYTES = 64 * 1024
# What a client wrote is not told back to it at any length.
MAX_TOLD_CHARS = 200
MAX_TOLD_NAME_CHARS = 100

_PLACE = re.compile(r"(?P<reason>.*?)(?: - at (?:`key` in )?`\$\.?(?P<path>.*)`)?", re.DOTALL)
_MEMBER = re.compile(
    r"object (?P<fault>missing required|contains unknown) field `(?P<name>[^`]*)`", re.DOTALL
)
_NOT_A_NUMBER = "NaN and Infinity are not JSON numbers"
_SURROGATE = "a lone surrogate is not a character"
_NOT_UTF8 = "not valid UTF-8"


def parse(body: bytes, decoder: msgspec.json.Decoder[Body]) -> Body:
    """Decode a body. Raises `InvalidRequest` for whatever is wrong with it, with the `param` if known."""
    try:
        str(body, "utf-8")  # msgspec does not look into the strings of fields it ignores
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _misfit(str(error)) from None
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _malformed(body, error) from None


def told(name: str) -> str:
    """Return a name that a client sent as it can stand in a message to it."""
    return repr(name if len(name) <= MAX_TOLD_NAME_CHARS else f"{name[:MAX_TOLD_NAME_CHARS]}…")


def _misfit(message: str) -> InvalidRequest:
    """Valid JSON that is not what the schema asks for. msgspec says where: "… - at `$.messages[0].role`"."""
    place = _PLACE.fullmatch(message)
    assert place is not None
    reason = place["reason"][:1].lower() + place["reason"][1:MAX_TOLD_CHARS]
    # Keys the client chose are written "[...]"; what comes after them is not worth naming.
    param = (place["path"] or "").partition("[...]")[0]
    member = _MEMBER.fullmatch(reason)
    if member is not None and "[...]" not in (place["path"] or ""):
        param = f"{param}.{member['name']}" if param else member["name"]
        what = "is missing" if member["fault"] == "missing required" else "is no field of this request"
        return InvalidRequest(f"{param}: {what}", param=param)
    if not param:
        return InvalidRequest(f"the body does not fit: {reason}")
    return InvalidRequest(f"{param}: {reason}", param=param)


def _malformed(body: bytes, error: Exception) -> InvalidRequest:
    """Find out why a body is not JSON, and in which field."""
    if not body.strip():
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
    """Stands where the body has a NaN or an Infinity."""


def _diagnose(body: bytes) -> InvalidRequest | None:
    """Return what a lenient parser takes and we do not, with its path; None if that one does not take it."""
    try:
        # Bytes that are not UTF-8 become surrogates U+DC80…U+DCFF, and are found like those.
        text = body.decode("utf-8", "surrogateescape")
        document = json.loads(text, parse_constant=lambda _: _NotANumber(), parse_int=float)
    except RecursionError:
        return InvalidRequest("the body is nested too deeply")
    except ValueError:
        return None
    encoding_fault = _SURROGATE if text.isascii() or _is_encodable(text) else _NOT_UTF8
    unvisited: list[tuple[str, object]] = [("", document)]
    while unvisited:
        path, value = unvisited.pop()
        if isinstance(value, _NotANumber):
            return _fault(path, _NOT_A_NUMBER)
        if isinstance(value, str) and not _is_encodable(value):
            return _fault(path, encoding_fault)
        if isinstance(value, list):
            unvisited += ((f"{path}[{index}]", item) for index, item in enumerate(value))
        elif isinstance(value, dict):
            if not all(map(_is_encodable, value)):
                return _fault(path, f"{encoding_fault} (in a key)")
            unvisited += ((f"{path}.{key}" if path else key, item) for key, item in value.items())
    return None


def _fault(path: str, reason: str) -> InvalidRequest:
    path = path[:MAX_TOLD_CHARS]
    return InvalidRequest(f"{path or 'the body'}: {reason}", param=path or None)


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
