"""The settings that `app.run` applies before it serves, on a real server that has a node and no model."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple

import pytest

from e2e.real_server import real_server


class NodeAndCollector(ThreadingHTTPServer):
    """A node and a trace collector: answers every request, and records the paths of POST requests."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.posted: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: NodeAndCollector

    def do_GET(self) -> None:
        self._answer({"data": [{"id": "far"}]})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.server.posted.append(self.path)
        self._answer({"choices": [{"index": 0, "text": "a", "finish_reason": "stop"}]})

    def _answer(self, document: object) -> None:
        body = json.dumps(document).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def collecting() -> Iterator[NodeAndCollector]:
    with NodeAndCollector() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


class Served(NamedTuple):
    """What a server logged until it had stopped, and the paths to which it sent telemetry."""

    log: list[str]
    posted: list[str]


Serve = Callable[..., Served]


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Serve:
    """Return a function that starts a server with given settings, lets it relay a job, and stops it.

    With the same settings, it returns what the first of these servers did.
    """

    @cache
    def served(*options: str, has_collector: bool = False, **settings: object) -> Served:
        file = tmp_path_factory.mktemp("server") / "fairlead.yaml"
        with collecting() as collector:
            document: dict[str, object] = {"nodes": [{"id": "n", "url": collector.url, "models": ["far"]}]}
            document |= settings | ({"otlpEndpoint": collector.url} if has_collector else {})
            file.write_text(json.dumps(document))
            with real_server("--config", str(file), *options) as server:
                answer = server.http.post("/v1/completions", json={"model": "far", "prompt": "a"})
                assert answer.status_code == 200, answer.text
                server.stop()
            return Served(server.log, collector.posted)

    return served


def is_json(line: str) -> bool:
    return line.startswith("{") and isinstance(json.loads(line), dict)


@pytest.mark.parametrize(
    ("options", "settings"),
    [((), {"logJson": True, "has_collector": True}), (("--log-json",), {}), ((), {})],
)
def test_log_json(serve: Serve, options: tuple[str, ...], settings: dict[str, bool]) -> None:
    log = serve(*options, **settings).log
    assert any("request" in line for line in log)
    lines = [line for line in log if "node added" in line]
    assert [is_json(line) for line in lines] == [bool(options or settings)]


@pytest.mark.parametrize("settings", [{"logLevel": "warn"}, {}])
def test_log_level(serve: Serve, settings: dict[str, str]) -> None:
    assert any("node added" in line for line in serve(**settings).log) == (not settings)


@pytest.mark.parametrize("settings", [{"logJson": True, "has_collector": True}, {}])
def test_otlp_endpoint(serve: Serve, settings: dict[str, bool]) -> None:
    posted = serve(**settings).posted
    assert ("/v1/traces" in posted, "/v1/metrics" in posted) == (bool(settings), bool(settings))
