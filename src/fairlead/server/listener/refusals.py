"""The refusals of the listener itself, before an app sees the request, and their responses.

Pure functions of the request's head and the limits, except `log_refusal`.
"""

import json
import re
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import h11
import structlog

from fairlead.base.config import Limits
from fairlead.base.formats.headers import http_date
from fairlead.server.listener.websocket import accept_of

logger = structlog.get_logger("fairlead.server.listener")

LOGGED_LENGTH = 200  # characters of a path
_ABSOLUTE = re.compile(rb"https?://([^/?#]*)", re.IGNORECASE)
# RFC 3986, 3.2.2: a name or address, and a port. No comma: a proxy would have joined two hosts.
_HOST = re.compile(rb"(?:[\w.~!$&'()*+;=%-]*|\[[0-9A-Fa-f:.]+(?:%[\w.~%-]+)?\])(?::[0-9]*)?")
WEBSOCKET_PATHS = frozenset({"/v1/responses", "/responses"})
_CHECKED = {b"content-length", b"expect", b"host", b"transfer-encoding", b"upgrade"}
_Values = Mapping[bytes, list[bytes]]  # of headers, by name
Header = tuple[bytes, bytes]
Objection = tuple[int, str]
_CODES = {
    405: "method_not_allowed",
    408: "header_timeout",
    417: "expectation_failed",
    431: "headers_too_large",
    500: "internal_error",
    503: "too_many_connections",
    505: "http_version_not_supported",
}


def refusal(status: int, message: str) -> bytes:
    """Return a whole response, an error in OpenAI's format, after which the connection is closed."""
    kind = "server_error" if status in {500, 503} else "invalid_request_error"
    error = {"message": message, "type": kind, "param": None, "code": code_of(status)}
    body = json.dumps({"error": error}).encode()
    head = (
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\nconnection: close\r\ndate: {http_date().decode()}\r\n\r\n"
    )
    return head.encode() + body


def code_of(status: int) -> str:
    """Return the error's code in such a response."""
    return _CODES.get(status, "invalid_request")


def objection(request: h11.Request, headers: list[Header], limits: Limits) -> Objection | None:
    """Return the status and message with which to refuse a request before the app sees it; None to accept it.

    `headers` are the request's: h11 builds them anew on each access.
    """
    if len(headers) > limits.headers:
        return 431, f"more than {limits.headers} headers"
    values: dict[bytes, list[bytes]] = {}
    size = len(request.target)
    for name, value in headers:
        size += len(name) + len(value)
        if name in _CHECKED:
            values.setdefault(name, []).append(value)
    # h11 bounds the part of a head that it buffers, but the last read may exceed that bound.
    if size > limits.header_bytes:
        return 431, f"more than {limits.header_bytes} bytes of headers"
    return _ambiguous(request, values) or _unsupported(request, values)


def malformed(error: h11.RemoteProtocolError) -> Objection:
    """Return the status and message with which to refuse a request that h11 cannot parse."""
    if error.error_status_hint == 501:
        return 400, "Transfer-Encoding: may only be chunked, and only once"
    return error.error_status_hint, str(error).partition(":")[0]  # the client's own bytes follow the colon


def log_refusal(
    status: int, message: str, client: str | None, request: h11.Request | None, scope: Any
) -> None:
    """Log the same line as `RequestAuth.refused` does for other requests.

    status: the response's.
    message: why it was refused.
    client: the address of the client.
    request: the request that was refused before an app handled it; None before a head.
    scope: that of the app which refused it; None: none did.
    """
    line: dict[str, Any] = {"outcome": code_of(status), "status": status, "reason": message}
    if request is not None:
        path = path_of(request).partition(b"?")[0].decode("latin-1")
        line |= {"method": request.method.decode(), "path": path[:LOGGED_LENGTH]}
    elif scope is not None:
        line |= {"method": scope["method"], "path": scope["path"][:LOGGED_LENGTH]}
    logger.info("request refused", **line, client=client)


def path_of(request: h11.Request) -> bytes:
    """Return the target's path and query; empty if it has none that could be routed."""
    target = bytes(request.target)
    if target.startswith(b"/") or (target == b"*" and request.method == b"OPTIONS"):
        return target
    absolute = _ABSOLUTE.match(target)
    if absolute is None:
        return b""
    path = target[absolute.end() :]
    return path if path.startswith(b"/") else b"/" + path


def with_host_of_target(request: h11.Request, headers: list[Header]) -> list[Header]:
    """Return the headers; a server named in the target replaces `Host` (RFC 9112, 3.2.2)."""
    absolute = _ABSOLUTE.match(request.target)
    if absolute is None:
        return headers
    return [(b"host", absolute[1]), *(header for header in headers if header[0] != b"host")]


def _ambiguous(request: h11.Request, values: _Values) -> Objection | None:
    """Refuse what another server on the request's path may read differently."""
    if b"transfer-encoding" in values:
        if b"content-length" in values:
            return 400, "Content-Length and Transfer-Encoding exclude each other"
        if request.http_version == b"1.0":
            return 400, "Transfer-Encoding: not in HTTP/1.0"  # RFC 9112, 6.1
    absolute = _ABSOLUTE.match(request.target)
    hosts = [*values.get(b"host", ()), *([absolute[1]] if absolute else ())]
    if any(_HOST.fullmatch(host) is None for host in hosts):
        return 400, "Host: must be a name or an address, and a port"
    return None


def _unsupported(request: h11.Request, values: _Values) -> Objection | None:
    if request.http_version not in {b"1.0", b"1.1"}:
        return 505, "only HTTP 1.0 and 1.1 are supported"
    if request.method == b"CONNECT":
        return 405, "this server is not a proxy"
    if request.method != request.method.upper():  # h11 and the app could read it differently
        return 405, "the method must be in capital letters"
    for expectation in _listed(values, b"expect"):
        if expectation not in {b"", b"100-continue"}:
            return 417, "Expect: only 100-continue is supported"
    # h2c is declined by answering in HTTP/1.1 (RFC 9110, 7.8): Java's client offers it on every request.
    if any(b"websocket" in protocol for protocol in _listed(values, b"upgrade")):
        if path_of(request).partition(b"?")[0].decode("latin-1") not in WEBSOCKET_PATHS:
            return 400, "WebSockets are only supported at /v1/responses; streams are server-sent events"
        if accept_of(request.method, list(request.headers)) is None:
            return 400, "this is no valid handshake of a WebSocket"
    if not path_of(request):
        return 400, "the target is not a path"
    return None


def _listed(values: _Values, name: bytes) -> list[bytes]:
    """Return the elements of a header that is a list, in lower case."""
    return [element.strip() for value in values.get(name, ()) for element in value.lower().split(b",")]
