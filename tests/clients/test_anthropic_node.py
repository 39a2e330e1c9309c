"""A server as strict as Anthropic's API as a node, and Anthropic's package as its client, unmodified."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest

from clients.packages import package
from e2e.real_server import RealServer, real_server

anthropic = package("anthropic")

KEY = "sk-ant-of-the-node"
ASKED = {"model": "claude-x", "max_tokens": 20, "messages": [{"role": "user", "content": "hello"}]}
USAGE = {"input_tokens": 7, "output_tokens": 2}


class StrictServer(ThreadingHTTPServer):
    """What Anthropic's API refuses, it refuses. `received` has the headers of requests, by path."""

    daemon_threads = True
    block_on_close = False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.received: dict[str, dict[str, str]] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: StrictServer

    def log_message(self, *_: Any) -> None:
        """Print nothing."""

    def do_GET(self) -> None:
        if self._is_accepted():
            found = self.path == "/v1/models"
            listing = {"data": [{"type": "model", "id": "claude-x", "display_name": "X"}], "has_more": False}
            self._send(*((200, listing) if found else (404, _error("not_found_error", "Not found"))))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.received[self.path] = {name.lower(): value for name, value in self.headers.items()}
        if not self._is_accepted():
            return
        if self.path == "/v1/messages/count_tokens":
            self._send(200, {"input_tokens": 7})
        elif self.path != "/v1/messages":
            self._send(404, _error("not_found_error", "Not found"))
        elif body.get("stream"):
            self._stream()
        else:
            self._send(200, _message([{"type": "text", "text": "Hi there"}], "end_turn"))

    def _is_accepted(self) -> bool:
        if self.headers.get("x-api-key") != KEY:
            self._send(401, _error("authentication_error", "x-api-key header is required"))
            return False
        if not self.headers.get("anthropic-version"):
            self._send(400, _error("invalid_request_error", "anthropic-version: header is required"))
            return False
        return True

    def _stream(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Connection", "close")
        self.end_headers()
        for event in (
            {"type": "message_start", "message": _message([], None)},
            {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
            {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Hi "}},
            {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "there"}},
            {"type": "content_block_stop", "index": 0},
            {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 2}},
            {"type": "message_stop"},
        ):
            self.wfile.write(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode())

    def _send(self, status: int, document: Any) -> None:
        body = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def _message(content: list[Any], stop_reason: str | None) -> dict[str, Any]:
    about = {"id": "msg_1", "type": "message", "role": "assistant", "model": "claude-x", "usage": USAGE}
    return about | {"content": content, "stop_reason": stop_reason, "stop_sequence": None}


def _error(kind: str, message: str) -> dict[str, Any]:
    return {"type": "error", "error": {"type": kind, "message": message}}


@contextmanager
def strict_server() -> Iterator[StrictServer]:
    server = StrictServer()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture(scope="module", params=[1, 2], ids=["one process", "two fronts"])
def served(request, tmp_path_factory) -> Iterator[tuple[RealServer, StrictServer]]:
    """A router whose peer is a strict server."""
    with strict_server() as strict:
        file = tmp_path_factory.mktemp("peer") / "config.yaml"
        peer = {"proxy": strict.url, "apiKey": KEY, "models": ["claude-x"]}
        file.write_text(json.dumps({"peers": {"anth": peer}, "fronts": request.param}))
        with real_server("--config", str(file)) as running:
            yield running, strict


@pytest.fixture
def client(served) -> Iterator["anthropic.Anthropic"]:
    with anthropic.Anthropic(base_url=served[0].url, api_key="sk-of-the-client", max_retries=0) as client:
        yield client


def test_message_is_answered_by_the_node_with_the_nodes_key(served, client):
    assert client.messages.create(**ASKED).content[0].text == "Hi there"
    sent = served[1].received["/v1/messages"]
    assert (sent["x-api-key"], sent["authorization"]) == (KEY, f"Bearer {KEY}")
    assert "sk-of-the-client" not in str(sent)


def test_stream_is_answered_by_the_node(client):
    with client.messages.stream(**ASKED) as stream:
        assert "".join(stream.text_stream) == "Hi there"
        assert stream.get_final_message().usage.output_tokens == 2


def test_tokens_are_counted_by_the_node(client):
    counted = client.messages.count_tokens(model="claude-x", messages=ASKED["messages"])
    assert counted.input_tokens == 7


def test_headers_of_the_client_for_anthropics_api_reach_the_node(served, client):
    answer = client.beta.messages.create(**ASKED, betas=["one-2025-01-01", "two-2025-01-01"])
    assert answer.content[0].text == "Hi there"
    (sent,) = [headers for headers in served[1].received.values() if "anthropic-beta" in headers]
    assert sent["anthropic-beta"] == "one-2025-01-01,two-2025-01-01"


def test_client_without_a_version_gets_the_default_one(served):
    answer = httpx.post(f"{served[0].url}/v1/messages", json=ASKED)
    assert (answer.status_code, answer.json()["content"][0]["text"]) == (200, "Hi there")
    assert served[1].received["/v1/messages"]["anthropic-version"] == "2023-06-01"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("anthropic-beta", "x" * 5000),
        ("anthropic-beta", "ü".encode("latin-1")),
        ("anthropic-" + "x" * 60, "1"),
    ],
)
def test_header_out_of_its_bounds_is_refused_by_name(served, name, value):
    answer = httpx.post(f"{served[0].url}/v1/messages", json=ASKED, headers={name: value})
    assert answer.status_code == 400
    assert name[:20] in answer.json()["error"]["message"]


def test_request_in_another_dialect_has_no_headers_of_anthropic(served):
    chat = {"model": "claude-x", "messages": ASKED["messages"]}
    headers = {"anthropic-beta": "x"}
    httpx.post(f"{served[0].url}/v1/chat/completions", json=chat, headers=headers)
    sent = served[1].received["/v1/chat/completions"]
    assert not [each for each in sent if each.startswith("anthropic-")]
    assert sent["authorization"] == f"Bearer {KEY}"


def test_key_of_the_node_is_shown_nowhere(served):
    running, _ = served
    shown = "".join(httpx.get(f"{running.url}{path}").text for path in ("/nodes", "/running", "/metrics"))
    assert "anth" in shown
    assert KEY not in shown + "".join(running.log)
