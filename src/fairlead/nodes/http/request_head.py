"""What is sent to a server before a body: the HTTP/1.1 request line and headers. Uses no connection."""

import re
from collections.abc import AsyncIterable, Mapping
from typing import NamedTuple
from urllib.parse import SplitResult

from fairlead.base.config.urls import is_deployment, roots_of

ANTHROPIC_VERSION = "2023-06-01"

_VERSION_HEADER = "anthropic-version"
_PATH = re.compile(r"/[!-~]*")
_QUERY = re.compile(r"[!-~]*")
_HEADER_VALUE = re.compile(r"[ -~]*")
_WITH_LENGTH = frozenset({"POST", "PUT", "PATCH"})
_MESSAGES = "/v1/messages"


class StreamedBody(NamedTuple):
    """A body that is sent as it arrives, once. `length`: its bytes; None if unknown: it is chunked then.

    The iterator is never closed, so it must not be a generator.
    """

    pieces: AsyncIterable[bytes]
    length: int | None = None


class RequestHeads:
    """The heads of requests to the server at `url`. Raises `ValueError` for what no head may have.

    api_path: the path of its API, as for `roots_of`.
    api_key: the key that each request has.
    speaks_messages: it may be Anthropic's API, which reads the key and a version in headers of its own.
    """

    def __init__(
        self,
        url: SplitResult,
        *,
        api_path: str | None = None,
        api_key: str | None = None,
        speaks_messages: bool = False,
    ) -> None:
        lines = [f"Host: {url.netloc}", "User-Agent: fairlead"]
        if api_key is not None:
            lines.append(f"Authorization: Bearer {api_key}")
            if speaks_messages:
                lines.append(f"x-api-key: {api_key}")
            if is_deployment(url.path):
                lines.append(f"api-key: {api_key}")
        for line in lines:
            if _HEADER_VALUE.fullmatch(line) is None:
                raise ValueError("the URL or the API key has characters that are not allowed in a header")
        self._roots = roots_of(url.path, api_path)
        self._query = url.query
        if _PATH.fullmatch(f"/{self._roots.api}") is None or _QUERY.fullmatch(self._query) is None:
            raise ValueError("the URL has characters that must be escaped")
        self._speaks_messages = speaks_messages
        self._has_key = api_key is not None
        self._same = "".join(f"{line}\r\n" for line in lines).encode("ascii")

    def request(
        self, method: str, path: str, body: bytes | StreamedBody, headers: Mapping[str, str]
    ) -> bytes:
        """Return a request, without a streamed body.

        method: the method.
        path: the path, below that of the URL.
        body: the body, or a source with its length.
        headers: further headers; those with empty or invalid values are left out.
        """
        if _PATH.fullmatch(path) is None:
            raise ValueError(f"{path!r} is not a path")
        head = f"{method} {self._target(path)} HTTP/1.1\r\n"
        has_version = False
        for name, value in headers.items():
            if value and _HEADER_VALUE.fullmatch(value) is not None:
                head += f"{name}: {value}\r\n"
                has_version = has_version or name == _VERSION_HEADER
        if not has_version and self._requires_version(method, path):
            head += f"{_VERSION_HEADER}: {ANTHROPIC_VERSION}\r\n"
        if body or method in _WITH_LENGTH:
            if "Content-Type" not in headers:
                head += "Content-Type: application/json\r\n"
            length = body.length if isinstance(body, StreamedBody) else len(body)
            head += "Transfer-Encoding: chunked\r\n" if length is None else f"Content-Length: {length}\r\n"
        sent_at_once = b"" if isinstance(body, StreamedBody) else body
        return b"%s%s\r\n%s" % (head.encode("ascii"), self._same, sent_at_once)

    def _requires_version(self, method: str, path: str) -> bool:
        """Return whether Anthropic's API, if this is it, would refuse the request without a version."""
        is_probe = method == "GET" and self._has_key
        return self._speaks_messages and (is_probe or path.startswith(_MESSAGES))

    def _target(self, path: str) -> str:
        """Return the path on the server, with the query of its URL behind that of the request."""
        route, _, query = path.partition("?")
        is_of_api = route == "/v1" or route.startswith("/v1/")
        target = self._roots.api + route.removeprefix("/v1") if is_of_api else self._roots.server + route
        queries = "&".join(part for part in (query, self._query) if part)
        return f"{target or '/'}?{queries}" if queries else target or "/"
