"""What the listener refuses itself, before an app sees the request, and how it says so.

Pure functions of the request's head and the limits.
"""

import json
import re
from http import HTTPStatus
from itertools import chain
from time import time
from wsgiref.handlers import format_date_time

import h11

from fairlead.config import Limits

_ABSOLUTE = re.compile(rb"https?://[^/?#]*", re.IGNORECASE)
_CODES = {
    405: "method_not_allowed",
    408: "header_timeout",
    431: "headers_too_large",
    500: "internal_error",
    501: "unsupported_transfer_encoding",
    503: "too_many_connections",
    505: "http_version_not_supported",
}


def refusal(status: int, message: str) -> bytes:
    """Return a whole answer, in OpenAI's form of an error, after which the connection is closed."""
    kind = "server_error" if status in {500, 503} else "invalid_request_error"
    error = {"message": message, "type": kind, "param": None, "code": _CODES.get(status, "invalid_request")}
    body = json.dumps({"error": error}).encode()
    head = (
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\nconnection: close\r\ndate: {format_date_time(time())}\r\n\r\n"
    )
    return head.encode() + body


def objection(request: h11.Request, limits: Limits) -> tuple[int, str] | None:
    """Return the status and message to refuse a request with, before the app sees it."""
    if request.http_version not in {b"1.0", b"1.1"}:
        return 505, "this server speaks HTTP/1.1"
    if request.method == b"CONNECT":
        return 405, "this server is no proxy"
    if len(request.headers) > limits.headers:
        return 431, f"more than {limits.headers} headers"
    # h11 bounds what it buffers of a head, but a head may come to more than that in its last read.
    if len(request.target) + sum(map(len, chain(*request.headers))) > limits.header_bytes:
        return 431, f"more than {limits.header_bytes} bytes of headers"
    names = {name for name, _ in request.headers}
    if {b"content-length", b"transfer-encoding"} <= names:
        return 400, "Content-Length and Transfer-Encoding exclude each other"  # a way to smuggle requests
    if b"upgrade" in names:
        upgrades = b",".join(value for name, value in request.headers if name == b"upgrade").lower()
        # h2c is declined by answering in HTTP/1.1 (RFC 9110, 7.8): Java's client offers it on every request.
        if b"websocket" in upgrades:
            return 400, "there are no WebSockets here; streams are server-sent events"
    if not path_of(request):
        return 400, "the target is not a path"
    return None


def path_of(request: h11.Request) -> bytes:
    """Return the target's path and query, or nothing if it has none we could route."""
    target = bytes(request.target)
    if target.startswith(b"/") or (target == b"*" and request.method == b"OPTIONS"):
        return target
    authority = _ABSOLUTE.match(target)
    if authority is None:
        return b""
    path = target[authority.end() :]
    return path if path.startswith(b"/") else b"/" + path
