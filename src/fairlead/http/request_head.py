"""What is sent to a server before a body: the HTTP/1.1 request line and headers. Uses no connection."""

import re
from collections.abc import Mapping

_PATH = re.compile(r"/[!-~]*")
_HEADER_VALUE = re.compile(r"[ -~]*")
_WITH_LENGTH = frozenset({"POST", "PUT", "PATCH"})


class RequestHeads:
    """The heads of requests to one server. `base` is prepended to every path.

    Raises `ValueError` for a host or a key with characters that are not allowed in a header.
    """

    def __init__(self, host: str, *, base: str = "", api_key: str | None = None) -> None:
        lines = [f"Host: {host}", "User-Agent: fairlead"]
        if api_key is not None:
            lines.append(f"Authorization: Bearer {api_key}")
        for line in lines:
            if _HEADER_VALUE.fullmatch(line) is None:
                raise ValueError("the URL or the API key has characters that are not allowed in a header")
        self._base = base
        self._same = "".join(f"{line}\r\n" for line in lines).encode("ascii")

    def request(self, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> bytes:
        """Return a request with its body. Headers with empty or invalid values are left out."""
        if _PATH.fullmatch(path) is None:
            raise ValueError(f"{path!r} is not a path")
        head = f"{method} {self._base}{path} HTTP/1.1\r\n"
        for name, value in headers.items():
            if value and _HEADER_VALUE.fullmatch(value) is not None:
                head += f"{name}: {value}\r\n"
        if body or method in _WITH_LENGTH:
            if "Content-Type" not in headers:
                head += "Content-Type: application/json\r\n"
            head += f"Content-Length: {len(body)}\r\n"
        return b"%s%s\r\n%s" % (head.encode("ascii"), self._same, body)
