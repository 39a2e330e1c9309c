"""The one accepted spelling of each routed path. Any other is a 404: nothing is redirected or rewritten.

All readers of a path must agree: the generating routes and Quart, and also a proxy that hides some paths from
its clients. So the raw path (RFC 3986, 3.3)

- begins with one slash, ends in none unless it is `/`, and has no empty, `.` or `..` segment, escaped or not;
- has no unescaped character that a URL must escape, such as a backslash;
- is printable UTF-8 when its escapes are decoded. They are decoded once, as in ASGI;
- may end in a slash below `/upstream/`, where the paths are another server's;
- has an escaped slash only in a name: OpenAI's client requests `/v1/models/org%2Fmodel`, which is the same as
  `/v1/models/org/model`, but `/v1%2Fmodels` is not a route.
"""

import re
from collections.abc import Collection, Iterable
from difflib import get_close_matches
from typing import Any
from urllib.parse import quote, unquote_to_bytes

_CHARACTERS = rb"\w.~!$&'()*+,;=:@-"
_PLAIN = re.compile(rb"/|(?:/(?!\.{1,2}(?:/|\Z))[%b]+)+" % _CHARACTERS)
_ESCAPED = re.compile(rb"(?:/(?:[%b]|%%[0-9A-Fa-f]{2})+)+" % _CHARACTERS)

_UPSTREAM = b"/upstream/"
# Comparing takes time in the product of both lengths, and a flood of unknown paths must stay cheap.
COMPARED_LENGTH = 64


def nearest_route(path: str, routes: Collection[str]) -> str | None:
    """Return the route's path most similar to one that has no route; None if none is similar."""
    if len(path) > COMPARED_LENGTH:
        return None
    return next(iter(get_close_matches(path.rstrip("/") or "/", routes, n=1)), None)


class Paths:
    """The check of a path's spelling. `routes` are the paths of the route table."""

    def __init__(self, routes: Iterable[str]) -> None:
        self._before_names = tuple({path.partition("{")[0].encode() for path in routes if "{" in path})

    def has(self, raw_path: bytes | None, path: str) -> bool:
        """Return whether a path may be routed. ASGI servers may omit the raw path."""
        raw = quote(path).encode() if raw_path is None else raw_path
        if raw.startswith(_UPSTREAM) and raw != _UPSTREAM:
            raw = raw.removesuffix(b"/")
        if _PLAIN.fullmatch(raw):
            return True
        if not _ESCAPED.fullmatch(raw):
            return False
        if b"%2f" in raw.lower() and not raw.startswith(self._before_names):
            return False
        try:
            segments = [unquote_to_bytes(segment).decode() for segment in raw[1:].split(b"/")]
        except UnicodeDecodeError:
            return False
        return all(segment.isprintable() and segment not in {".", ".."} for segment in segments)


def without_root(scope: dict[str, Any]) -> dict[str, Any]:
    """Return the ASGI scope of a request below `root_path` with that prefix removed and kept as `prefix`.

    A path that does not begin with the prefix is unchanged: a proxy or an outer application has removed it
    already.
    """
    root, path, raw_path = scope["root_path"].rstrip("/"), scope["path"], scope.get("raw_path")
    inner = {**scope, "root_path": "", "prefix": root}
    if not path.startswith(f"{root}/"):
        return inner
    if raw_path is not None:
        segments = raw_path.split(b"/", root.count("/") + 1)
        if unquote_to_bytes(b"/".join(segments[:-1])).decode(errors="replace") != root:
            return inner  # an escaped slash in the prefix: the unchanged path matches no route
        inner["raw_path"] = b"/" + segments[-1]
    inner["path"] = path.removeprefix(root)
    return inner
