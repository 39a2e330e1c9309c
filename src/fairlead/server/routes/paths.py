"""Which route a request has. No other module decides that, with Quart or without it.

Each routed path has one accepted spelling. Any other is a 404: nothing is redirected or rewritten, so that a
proxy which hides some paths from its clients hides them in every spelling. The raw path (RFC 3986, 3.3)

- begins with one slash, ends in none unless it is `/`, and has no empty, `.` or `..` segment, escaped or not;
- has no unescaped character that a URL must escape, such as a backslash;
- is printable UTF-8 when its escapes are decoded. They are decoded once, as in ASGI;
- may end in a slash below `/upstream/`, where the paths are another server's;
- has an escaped slash only in a name: OpenAI's client requests `/v1/models/org%2Fmodel`, which is the same as
  `/v1/models/org/model`, but `/v1%2Fmodels` is not a route.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any, NamedTuple
from urllib.parse import quote, unquote_to_bytes

from fairlead.base.errors import FairleadError, MethodNotAllowed, NotFound
from fairlead.server.routes.route import PARAMETER, Route

_CHARACTERS = rb"\w.~!$&'()*+,;=:@-"
_PLAIN = re.compile(rb"/|(?:/(?!\.{1,2}(?:/|\Z))[%b]+)+" % _CHARACTERS)
_ESCAPED = re.compile(rb"(?:/(?:[%b]|%%[0-9A-Fa-f]{2})+)+" % _CHARACTERS)

UPSTREAM = "/upstream/"
"""Paths below it are those of a command's own server, after the model's name."""

_UPSTREAM = UPSTREAM.encode()
_NO_PARAMETERS: Mapping[str, str] = MappingProxyType({})
# Comparing takes time in the product of both lengths, and a flood of unknown paths must stay cheap.
COMPARED_LENGTH = 64


def nearest_route(path: str, routes: Collection[str]) -> str | None:
    """Return the route's path most similar to one that has no route; None if none is similar."""
    if len(path) > COMPARED_LENGTH:
        return None
    return next(iter(get_close_matches(path.rstrip("/") or "/", routes, n=1)), None)


class Match(NamedTuple):
    """The route of a request, or what its path has instead.

    route: None: the path has no route, or none for the method. For OPTIONS the first route of the path.
    parameters: The variable parts of the path, by name.
    methods: Those of the path, sorted, with HEAD and OPTIONS; empty: it has no route, or this was not needed.
    """

    route: Route | None = None
    parameters: Mapping[str, str] = _NO_PARAMETERS
    methods: tuple[str, ...] = ()

    @property
    def error(self) -> FairleadError:
        """The error of a request without a route."""
        if not self.methods:
            return NotFound("there is no such route")
        error = MethodNotAllowed("this route has other methods")
        error.allowed = self.methods
        return error


_NO_MATCH = Match()


class RouteMatcher:
    """Finds the routes of requests.

    Of several routes whose paths fit, that with the most fixed characters is found: `GET /models/a/logs` is
    `/models/{name}/logs`, not `/models/{name}` with the name `a/logs`. A route with another method is passed
    over: `GET /models/load` asks for a model of that name, because only `POST /models/load` is a route.
    """

    def __init__(self, routes: Iterable[Route]) -> None:
        self._routes: dict[str, list[Route]] = {}
        patterns: dict[str, list[Route]] = {}
        for route in routes:
            paths = patterns if route.parameters else self._routes
            paths.setdefault(route.path, []).append(route)
        # The usual case, in a flood of requests too, is one look-up.
        self._matches = {
            (route.method, path): Match(route) for path, found in self._routes.items() for route in found
        }
        ordered = sorted(patterns, key=lambda path: len(PARAMETER.sub("", path)), reverse=True)
        self._patterns = [(_pattern(path), patterns[path]) for path in ordered]
        self._before_names = tuple({path.partition("{")[0].encode() for path in patterns})

    def match(self, method: str, raw_path: bytes | None, path: str) -> Match:
        """Return the match of a request. ASGI servers may omit the raw path."""
        if not self.is_spelled(raw_path, path):
            return _NO_MATCH
        return self._matches.get((method, path)) or self._search(method, path)

    def _search(self, method: str, path: str) -> Match:
        wanted = "GET" if method == "HEAD" else method
        found: Match | None = None
        methods = set()
        for route, parameters in self._candidates(path):
            if found is None and wanted in (route.method, "OPTIONS"):
                found = Match(route, parameters)
            methods |= {route.method, "OPTIONS"} | ({"HEAD"} if route.method == "GET" else set())
        return (found or _NO_MATCH)._replace(methods=tuple(sorted(methods)))

    def _candidates(self, path: str) -> Iterator[tuple[Route, Mapping[str, str]]]:
        for route in self._routes.get(path, ()):
            yield route, _NO_PARAMETERS
        for pattern, routes in self._patterns:
            if found := pattern.fullmatch(path):
                for route in routes:
                    yield route, found.groupdict()

    def is_spelled(self, raw_path: bytes | None, path: str) -> bool:
        """Return whether a path has the accepted spelling, so that it may have a route."""
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


def _pattern(path: str) -> re.Pattern[str]:
    """Return the pattern of a path with parameters, which may contain slashes, but not begin with one."""
    pieces = PARAMETER.split(path)  # fixed texts and names in turn
    pieces[::2] = map(re.escape, pieces[::2])
    pieces[1::2] = (f"(?P<{name}>[^/].*?)" for name in pieces[1::2])
    return re.compile("".join(pieces))


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
