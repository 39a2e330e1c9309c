"""The settings that `app.run` applies before it serves, on a real server that has a node and no model."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from e2e.real_server import RealServer, real_server, until


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


@pytest.fixture
def collector() -> Iterator[NodeAndCollector]:
    with NodeAndCollector() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


Start = Callable[..., AbstractContextManager[RealServer]]


@pytest.fixture
def start(tmp_path: Path, collector: NodeAndCollector) -> Start:
    """Return a function that starts a server with given settings, and lets it relay a job."""

    @contextmanager
    def started(*options: str, **settings: object) -> Iterator[RealServer]:
        file = tmp_path / "fairlead.yaml"
        file.write_text(
            json.dumps({"nodes": [{"id": "n", "url": collector.url, "models": ["far"]}]} | settings)
        )
        with real_server("--config", str(file), *options) as server:
            answer = server.http.post("/v1/completions", json={"model": "far", "prompt": "a"})
            assert answer.status_code == 200, answer.text
            yield server

    return started


def is_json(line: str) -> bool:
    return line.startswith("{") and isinstance(json.loads(line), dict)


@pytest.mark.parametrize(("options", "settings"), [((), {"logJson": True}), (("--log-json",), {}), ((), {})])
def test_log_json(start, options, settings):
    with start(*options, **settings) as server:
        until(lambda: any("request" in line for line in server.log))
        lines = [line for line in server.log if "node added" in line]
    assert [is_json(line) for line in lines] == [bool(options or settings)]


@pytest.mark.parametrize("settings", [{"logLevel": "warn"}, {}])
def test_log_level(start, settings):
    with start(**settings) as server:
        server.stop()
    assert any("node added" in line for line in server.log) == (not settings)


@pytest.mark.parametrize("is_set", [True, False])
def test_otlp_endpoint(start, collector, is_set):
    with start(**({"otlpEndpoint": collector.url} if is_set else {})) as server:
        server.stop()
    assert ("/v1/traces" in collector.posted, "/v1/metrics" in collector.posted) == (is_set, is_set)
