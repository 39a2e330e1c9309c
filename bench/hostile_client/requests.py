"""Requests to every route of a server's OpenAPI document and dashboard, each determined by a seed.

A request is valid, or its body, path, method or headers are mutated. Its framing is correct, unless a header
breaks it, so the server must answer.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import Any, NamedTuple
from urllib.parse import quote

from hostile_client.documents import Schemas, encoded, spoil, weird
from hostile_client.spoiling import spoiled

SPARE_MODEL = 0.02  # the probability that an operator's route names an existing model, which starts a process
MAX_CONTENT = 17_000_000  # above the server's limit
METHODS = (
    *(
        "GET",
        "HEAD",
        "POST",
        "PUT",
        "PATCH",
        "DELETE",
        "OPTIONS",
        "TRACE",
        "CONNECT",
        "BREW",
        "get",
        "head",
        "pOsT",
    ),
    *("M" * 300, "GET.", "!#$%&'*+-.^_`|~"),
)
NAMES = (
    *("x", "a/b", "a%2Fb", "..", "%2e%2e", "%00", "%ff", "a%20b", "模型", "x" * 5000, "a;b=c", "%", "cancel"),
    *("drain", "null", "0", "-1", "{name}", "<path:name>", "*"),
)
QUERIES = (
    *(
        "",
        "",
        "",
        "?",
        "?model",
        "?model=%ff",
        "?model=x&model=y",
        "?a=b",
        "?%",
        "?model=%00",
        "?&=&",
        "??",
        "?a=b#c",
    ),
    *("?model=" + "x" * 5000, "?n=" + "9" * 400),
)
HEADERS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "Content-Type",
        ("text/plain", "application/xml", "multipart/form-data", "", "application/json; charset=utf-16"),
    ),
    ("Content-Encoding", ("gzip", "identity", "br, gzip", "", "x" * 1000)),
    ("Authorization", ("Bearer x", "Basic eDp4", "Bearer", "Bearer \xe9", "Bearer " + "x" * 4000)),
    ("X-Request-Id", ("fuzz", "", "a" * 129, "é", '"\\', "a/b")),
    ("X-Priority", ("high", "low", "highest", "", "-1", "\xff")),
    ("X-No-Queue", ("1", "0", "yes")),
    ("X-OpenWebUI-User-Id", ("", "fuzz", "x" * 1000, "\xe9\xff", "canary/canary")),
    ("Host", ("evil.example", "localhost", "", "a b", "[::1]:80", "a:99999999", "x" * 300)),
    ("Origin", ("null", "http://evil.example", "", "http://[::1", "x" * 3000)),
    ("Expect", ("100-continue", "200-ok", "")),
    ("Accept", ("text/event-stream", "application/openmetrics-text", "*/*;q=x", "")),
    ("Connection", ("close", "keep-alive", "upgrade", "x, y, close", "Content-Length")),
    ("Upgrade", ("h2c", "websocket", "x")),
    ("Transfer-Encoding", ("gzip", "identity", "chunked, chunked")),
    ("Content-Length", ("1", "-1", "1, 1", "99999999999999999999999")),
    ("If-None-Match", ("x", '"', "*")),
    ("Range", ("bytes=0-1", "bytes=-1,0-")),
    ("Cookie", ("a=b", "\x01", "=;=;")),
    ("X-Forwarded-For", ("127.0.0.1", "::1, x", "unknown")),
    ("Sec-Fetch-Site", ("cross-site", "same-origin")),
    ("X" * 2000, ("x",)),
    ("Bad Name", ("x",)),
)


class Route(NamedTuple):
    """A method of a path. `path` has its parameters in braces; `schema` describes the body, if any."""

    method: str
    path: str
    schema: Mapping[str, Any] | None


@dataclass(frozen=True)
class HostileRequest:
    """The bytes to send. `method`: the request's method. `is_last`: following data may be misread."""

    seed: int
    method: str
    data: bytes
    is_last: bool


class Grammar:
    """Generates requests to all routes.

    `document` is the server's OpenAPI document, `pages` are additional paths. `models` generate; `spare` may
    be loaded and unloaded.
    """

    def __init__(
        self, document: Mapping[str, Any], pages: tuple[str, ...], *, models: tuple[str, ...], spare: str
    ) -> None:
        self.routes = [
            Route(method.upper(), path, _schema_of(operation))
            for path, methods in document["paths"].items()
            for method, operation in methods.items()
        ] + [Route("GET", page, None) for page in pages]
        self._models = models
        self._spare = spare
        self._schemas = Schemas(document["components"]["schemas"], self._hints())

    def request(self, seed: int) -> HostileRequest:
        """Return the request of a seed."""
        random = Random(seed)
        route = random.choice(self.routes)
        method = route.method if random.random() < 0.9 else random.choice(METHODS)
        path = self._path(route, random)
        content = self._content(route, random)
        chunked = random.random() < 0.1
        lines = {"Host": "localhost", "Content-Type": "application/json"}
        if content or method in {"POST", "PUT", "PATCH"}:
            lines |= {"Transfer-Encoding": "chunked"} if chunked else {"Content-Length": str(len(content))}
        spoiled_headers = random.choice((0, 0, 0, 1, 1, 2, 5))
        for _ in range(spoiled_headers):
            name, values = random.choice(HEADERS)
            lines[name] = random.choice(values)
        version = "1.1" if random.random() < 0.97 else random.choice(("1.0", "1.2", "2.0", "0.9", "9.9"))
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        start = f"{method} {path} HTTP/{version}\r\n{head}\r\n".encode("latin-1", "replace")
        if "Transfer-Encoding" in lines and lines["Transfer-Encoding"] == "chunked":
            content = _chunked(content, random)
        return HostileRequest(seed, method, start + content, is_last=spoiled_headers > 0 or version != "1.1")

    def conversation(self, seed: int) -> bytes:
        """Return the data of one connection: up to three requests with mutated bytes."""
        random = Random(f"connection {seed}")
        parts = [self.request(random.randrange(10**9)).data for _ in range(random.randint(1, 3))]
        return b"".join(spoiled(random, part[:100_000]) for part in parts)

    def _path(self, route: Route, random: Random) -> str:
        path = route.path
        while "{" in path:
            before, _, rest = path.partition("{")
            name = random.choice((*NAMES, *self._models)) if random.random() < 0.9 else random.choice(QUERIES)
            path = before + quote(name, safe="%/;=?&#*-._~{}<>:").replace("{", "%7B") + rest.partition("}")[2]
        if random.random() < 0.15:
            path = _respelled(path, random)
        return path + random.choice(QUERIES)

    def _content(self, route: Route, random: Random) -> bytes:
        if route.schema is None:
            return encoded(weird(random)) if random.random() < 0.1 else b""
        document = self._schemas.value(route.schema, random)
        if "model" in document and route.path.startswith("/models/"):
            document["model"] = self._spare if random.random() < SPARE_MODEL else "x"
        for _ in range(random.choice((0, 1, 1, 1, 2, 3))):
            document = spoil(document, random)
        content = encoded(document)
        match random.randrange(25):
            case 0:
                content = spoiled(random, content)
            case 1:
                content = content[: random.randrange(len(content) + 1)]
            case 2:
                content = random.choice(
                    (b"\xef\xbb\xbf" + content, content.decode("latin-1").encode("utf-16"), b"")
                )
            case 3:
                content = random.choice((b"\x1f\x8b\x08\x00" + content, b"model=x&prompt=y", content * 2))
        return content[:MAX_CONTENT]

    def _hints(self) -> dict[str, Any]:
        """Return generators of values that are valid and cheap, where the schema is not specific enough."""
        tokens = lambda random: random.choice((1, 2, 3, 8))  # noqa: E731
        return {
            "model": lambda random: random.choice(self._models),
            "max_tokens": tokens,
            "max_completion_tokens": tokens,
            "n": lambda random: random.choice((1, 1, 2)),
            "response_format": lambda _: {"type": "text"},
            "tool_choice": lambda _: "auto",
            "priority": lambda random: random.choice(("high", "normal", "low")),
            "user": lambda random: f"fuzz{random.randrange(3)}",
            "seed": lambda random: random.randrange(100),
            "temperature": lambda random: round(random.random(), 2),
            "tokens": lambda random: [random.randrange(300) for _ in range(random.randrange(5))],
            "prompt": lambda random: random.choice(("Hello", ["a", "b"], [1, 2, 3])),
            "input": lambda random: random.choice(("Hello", ["a", "b"])),
            "id": lambda random: f"node{random.randrange(3)}",
            "url": lambda _: "http://127.0.0.1:9",  # an address without a server
            "force": lambda random: random.random() < 0.5,
        }


def _schema_of(operation: Mapping[str, Any]) -> Mapping[str, Any] | None:
    content = operation.get("requestBody", {}).get("content", {})
    found: Mapping[str, Any] | None = content.get("application/json", {}).get("schema")
    return found


def _respelled(path: str, random: Random) -> str:
    at = random.choice([index for index, character in enumerate(path) if character == "/"])
    before, after = path[:at], path[at + 1 :]
    return random.choice(
        (
            *(
                f"/{path}",
                f"//{path}",
                f"{path}/",
                f"/.{path}",
                f"/x/..{path}",
                path.upper(),
                f"{path};a=b",
                f"{path}\\",
            ),
            *(f"{before}//{after}", f"{before}/./{after}", f"{before}%2f{after}", f"{before}\\{after}"),
            *(
                f"{path}%00",
                f"{path}%0d%0aX:1",
                f"{path}%ff",
                f"{path}%zz",
                f"{path}#x",
                f"{path}/../{after}",
                "*",
                "x",
            ),
            *(
                f"http://localhost{path}",
                f"HTTP://evil.example{path}",
                f"https://a@b{path}",
                f"ftp://x{path}",
                path[1:],
            ),
            *(
                f"{path}{'/x' * 3000}",
                f"{path}?{'a=b&' * 3000}",
                "".join(f"%{byte:02x}" for byte in path.encode()),
            ),
        )
    )


def _chunked(content: bytes, random: Random) -> bytes:
    step = random.choice((1, 7, 1000, 100_000)) if len(content) < 2000 else 65536
    chunks = [content[at : at + step] for at in range(0, len(content), step)]
    extension = random.choice((b"", b";a=b", b";" + b"x" * 1000))
    framed = b"".join(b"%x%b\r\n%b\r\n" % (len(chunk), extension, chunk) for chunk in chunks)
    return framed + b"0\r\n" + random.choice((b"", b"X-Trailer: 1\r\n", b"Content-Length: 3\r\n")) + b"\r\n"
