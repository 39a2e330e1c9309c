"""URLs of other servers: which are accepted, what of them is shown, and where their routes are. Pure.

Routes are named as in OpenAI's API: `/v1/chat/completions`, `/v1/models`. A server may have them elsewhere,
and its URL says so in one of the forms that its vendor writes:

    http://10.0.0.2:8000               → /v1/chat/completions
    http://10.0.0.2:8000/v1/           → /v1/chat/completions
    https://api.z.ai/api/paas/v4       → /api/paas/v4/chat/completions
    https://HOST/v1beta/openai         → /v1beta/openai/chat/completions
    https://HOST/openai/deployments/D  → /openai/deployments/D/chat/completions
    https://HOST/team-a                → /team-a/v1/chat/completions
"""

import re
from collections.abc import Iterator
from typing import NamedTuple
from urllib.parse import unquote_plus, urlsplit

HTTP_URL = "a URL that begins with http:// or https://, in ASCII, without a user's name or a fragment"

_URL = re.compile(r"[!-~]+")
_API_PATH = re.compile(r"/[!-~]*")
_HOST = re.compile(r"[0-9A-Za-z._:%-]+")
_VERSION = re.compile(r"v\d+(p\d+)?((alpha|beta|preview)\d*)?")
# The last segments of OpenAI's API beside another one: Google's, DeepInfra's, Vertex AI's, Cloudflare's.
_OPENAI_ROOTS = frozenset({"openai", "openapi", "compat"})
_ROUTES_OF_SERVERS = ("/health", "/api/chat", "/api/generate", "/api/embed", "/api/embeddings", "/api/tags")
_ROUTES_OF_APIS = (
    *("/chat/completions", "/completions", "/embeddings", "/messages/count_tokens"),
    *("/audio/transcriptions", "/audio/translations", "/audio/speech", "/audio/voices"),
    *("/images/generations", "/images/edits", "/images/variations"),
)
# Also names that a prefix of a proxy may have, so they are routes only behind a version.
_ROUTES_OF_VERSIONS = ("/messages", "/models", "/moderations", "/rerank", "/responses", "/score")
# Shorter values, such as true or none, are no secrets, and hiding them would make texts unreadable.
_SHORTEST_SECRET = 8


class Roots(NamedTuple):
    """The paths below which a server has its routes: `api` stands for `/v1`, and `server` has all others."""

    server: str
    api: str


def roots_of(path: str, api_path: str | None = None) -> Roots:
    """Return the roots that the path of a URL stands for.

    `api_path` follows the URL's path in the place of `/v1`. None: a path that ends in a version, in an OpenAI
    root behind one, or in a deployment of Azure is itself the API's root; else `/v1` follows.
    """
    path = path.rstrip("/")
    if api_path is not None:
        return Roots(path, path + api_path.rstrip("/"))
    segments = path.split("/")
    versions = [index for index, segment in enumerate(segments) if _VERSION.fullmatch(segment)]
    if versions and segments[-1] in _OPENAI_ROOTS:
        return Roots("/".join(segments[: versions[0]]), path)
    if versions and versions[-1] == len(segments) - 1:
        return Roots("/".join(segments[:-1]), path)
    return Roots(path, path if is_deployment(path) else f"{path}/v1")


def is_deployment(path: str) -> bool:
    """Return whether a path is that of a deployment in Azure, which takes its key in a header of its own."""
    return path.rstrip("/").split("/")[-3:-1] == ["openai", "deployments"]


def is_http_url(text: str) -> bool:
    """Return whether the text is an HTTP URL without user and password, which would be shown with it."""
    try:
        parts = urlsplit(text)
        if "@" in parts.netloc or "#" in text or _URL.fullmatch(text) is None:
            return False
        has_host = _HOST.fullmatch(parts.hostname or "") is not None
        return parts.scheme in ("http", "https") and has_host and (parts.port or 1) > 0
    except ValueError:  # a port that is not a number, an unclosed bracket
        return False


def is_api_path(text: str) -> bool:
    """Return whether the text can take the place of `/v1`."""
    return _API_PATH.fullmatch(text) is not None and not {"?", "#"}.intersection(text)


def whole_route_advice(url: str, *, has_api_path: bool = False) -> str | None:
    """Return what to write instead of the URL of a whole route; None if the URL names none.

    `has_api_path`: the setting is beside one for the path of the API. A query is not repeated.
    """
    parts = urlsplit(url)
    path = parts.path.rstrip("/")
    route = next((route for route in _routes() if path.endswith(route)), None)
    if route is None:
        return None
    root = path.removesuffix(route)
    is_below_api = route not in _ROUTES_OF_SERVERS
    if route in _ROUTES_OF_VERSIONS and _VERSION.fullmatch(root.rpartition("/")[2]) is None:
        return None
    instead = f"{parts.scheme}://{parts.netloc}{root}" + ("?…" if parts.query else "")
    if is_below_api and roots_of(root).api != root:
        instead += " with apiPath: /" if has_api_path else " in nodes, with apiPath: /"
    return f"is the URL of one route, {route}; write {instead}"


def _routes() -> Iterator[str]:
    yield from _ROUTES_OF_SERVERS
    yield from _ROUTES_OF_APIS
    yield from _ROUTES_OF_VERSIONS


def shown_url(url: str) -> str:
    """Return a URL as it is shown: without its query, which may have a key."""
    return url.partition("?")[0]


def secrets_in(query: str, key: str = "") -> tuple[str, ...]:
    """Return the texts of a URL's query, and a key, that are not to be shown, the longest first."""
    pairs = [pair for pair in query.split("&") if "=" in pair]
    values = [pair.partition("=")[2] for pair in pairs]
    alone = {text for text in (key, *values, *map(unquote_plus, values)) if len(text) >= _SHORTEST_SECRET}
    return tuple(sorted(alone.union(pairs), key=len, reverse=True))
