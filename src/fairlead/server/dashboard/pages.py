"""The dashboard's files over HTTP: `GET /` is the page, `GET /dashboard/…` its files.

They contain no secrets and are served without a key; the page sends the user's key with its requests. The
headers ensure that the page exchanges no data with other servers and runs no other code. Independent of the
page's content.
"""

from functools import cache
from hashlib import sha256
from importlib import resources
from importlib.resources.abc import Traversable
from typing import NamedTuple

from fairlead.base.errors import NotFound, quoted
from fairlead.server.routes.request import Request, Response

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# No trusted types: a browser that supports them then refuses to turn text into HTML or a script.
_POLICY = (
    "default-src 'self'; base-uri 'none'; object-src 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",  # the browser revalidates each time, with a short response if unchanged
}


class Asset(NamedTuple):
    """A file of the page as it is sent; `tag` is its ETag."""

    content: bytes
    content_type: str
    tag: str


class Dashboard:
    """The page and its files, all in memory."""

    async def page(self, request: Request) -> Response:
        """Return the page itself; for Ollama's clients the words by which they recognize a server."""
        if request.headers.get("User-Agent", "").lower().startswith("ollama"):
            return Response(b"Ollama is running", 200, {"Content-Type": "text/plain; charset=utf-8"})
        return _response(request, assets()["index.html"])

    async def file(self, request: Request) -> Response:
        """Return a file of the page."""
        name = request.path_parameters["name"]
        asset = assets().get(name)
        if asset is None:
            raise NotFound(f"the dashboard has no file {quoted(name)}")
        return _response(request, asset)


@cache
def assets() -> dict[str, Asset]:
    """Return the page's files by path, read once. Only types that browsers request are included."""
    found: dict[str, Asset] = {}
    _collect(resources.files(__package__), "", found)
    return found


def _collect(folder: Traversable, prefix: str, found: dict[str, Asset]) -> None:
    for entry in folder.iterdir():
        name = prefix + entry.name
        if entry.is_dir():
            _collect(entry, f"{name}/", found)
        elif (content_type := _TYPES.get(name[name.rfind(".") :])) is not None:
            content = entry.read_bytes()
            found[name] = Asset(content, content_type, f'"{sha256(content).hexdigest()[:32]}"')


def _response(request: Request, asset: Asset) -> Response:
    headers = {**_HEADERS, "ETag": asset.tag}
    if request.headers.get("If-None-Match") == asset.tag:
        return Response(b"", 304, headers)
    return Response(asset.content, 200, {**headers, "Content-Type": asset.content_type})
