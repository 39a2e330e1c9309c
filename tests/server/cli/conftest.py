"""A server with as much of OpenAI's API as the chat and the load generator need, and faults on demand."""

import json
import threading
from collections.abc import Iterable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest

FIRST_OF_ALL = ": queued position=3 estimated_wait=24\n\n"


class FakeServer(ThreadingHTTPServer):
    """Answers 'Hello there' unless the last word of the prompt names a fault (see `_answer`)."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Exchange)
        self.models = ["first", "second"]
        self.bodies: list[dict] = []  # of the requests, in order
        self.refusing: int | None = None  # a status for every request
        self.refusal_code: str | None = None  # the code of each refusal
        self.pauses = False  # whether every answer pauses after its first piece
        self.pauses_after = 0  # the number of the piece after which answers pause
        self.keys: set[str | None] = set()
        self.released = threading.Event()  # when set, paused answers continue
        self.json_answers: dict[str, object] = {}  # further JSON answers to GET, by path
        self.texts: dict[str, list[str]] = {}  # plain texts in pieces, by path
        self.posted: list[tuple[str, dict]] = []
        self.events: list[tuple[str, object]] = []
        self.event_rounds: Iterable[int] = range(
            2
        )  # of all events: the first at once, the others when released

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request, client_address) -> None:
        """Report nothing: clients that disconnect are part of these tests."""


class _Exchange(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else each answer, written in two parts, waits 40 ms
    server: FakeServer
    # By the last word of the prompt: refusals, and the parts of answers.
    refusals: ClassVar = {"refuse": 429, "break": 500}
    parts: ClassVar = {
        "think": [
            {"role": "assistant", "content": ""},
            {"reasoning_content": "It is\nhard \x1b[2J", "reasoning": "It is\nhard \x1b[2J"},
            {"reasoning": "to say."},
            {"content": "Hello", "reasoning": None},
            {"content": " there", "tool_calls": None},
        ],
        "call": [
            {"reasoning_content": "I will ask."},
            {"content": "Wait."},
            {"tool_calls": [{"index": 0, "id": "a", "function": {"name": "weather", "arguments": ""}}]},
            {"tool_calls": [{"index": 0, "function": {"arguments": '{"city": "Zür'}}]},
            {
                "tool_calls": [
                    {"index": 0, "function": {"arguments": 'ich", "days": [1, 2], "note": "a\\nb"}'}}
                ]
            },
            {"tool_calls": [{"index": 1, "id": "b", "function": {"name": "time", "arguments": ""}}]},
            {"tool_calls": [{"index": 2, "id": "c", "function": {"name": "x\x1b[2J", "arguments": "no {"}}]},
        ],
    }

    def do_GET(self) -> None:
        self.server.keys.add(self.headers["Authorization"])
        if self.path in self.server.texts:
            self._write(self.server.texts[self.path])
        elif self.path == "/v1/models":
            self._send(200, {"object": "list", "data": [{"id": name} for name in self.server.models]})
        elif self.path in self.server.json_answers:
            self._send(200, self.server.json_answers[self.path])
        elif self.path == "/events":
            self._send_events()
        else:
            self._refuse(404, f"there is no model\n{self.path.rpartition('/')[2]} here")

    def do_POST(self) -> None:
        self.server.keys.add(self.headers["Authorization"])
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt = body.get("prompt") or "".join(
            message["content"] for message in body.get("messages", [])[-1:]
        )
        if self.path == "/tokenize":
            self._send(200, {"tokens": [0] * (2 + len(prompt.split())), "count": "ignored"})
            return
        if self.path == "/models/unload":
            self.server.posted.append((self.path, body))
            known = body["model"] in self.server.models
            self._send(200, body) if known else self._refuse(404, "there is no such model")
            return
        self.server.bodies.append(body)
        if status := self.server.refusing or self.refusals.get(prompt.split()[-1]):
            self._refuse(status, f"no: {status}")
        else:
            self._answer(prompt.split()[-1], is_chat="messages" in body)

    def _answer(self, fault: str, *, is_chat: bool) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self._chunk(FIRST_OF_ALL)
        if fault == "queue":
            self.server.released.wait()
        pieces = ["Hello", " the\x1b[2Jre"] if fault == "controls" else ["Hello", " there"]
        deltas = self.parts.get(fault) or [{"content": piece} for piece in pieces]
        for number, delta in enumerate(deltas, 1):
            self._event({"choices": [{"delta": delta} if is_chat else {"text": delta["content"]}]})
            if fault == "hang" or self.server.pauses or number == self.server.pauses_after:
                self.server.released.wait()
        if fault == "fail":
            self._event({"error": {"message": "the node\nfailed"}})
        elif fault != "cut":
            self._event({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 2}})
            self._chunk("data: [DONE]\n\n")
        self._chunk("")

    def _send_events(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for number in self.server.event_rounds:
            if number:
                self.server.released.wait()
            for name, data in self.server.events:
                self._chunk(f"event: {name}\ndata: {json.dumps(data)}\n\n")
        self._chunk("")

    def _write(self, pieces: list[str]) -> None:
        """Write the first piece of a text at once, and the others when released."""
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for number, piece in enumerate(pieces):
            if number:
                self.server.released.wait()
            if piece:
                self._chunk(piece)
        self._chunk("")

    def _event(self, data: object) -> None:
        self._chunk(f"data: {json.dumps(data)}\n\n")

    def _chunk(self, text: str) -> None:
        self.wfile.write(f"{len(text.encode()):x}\r\n{text}\r\n".encode())

    def _refuse(self, status: int, message: str) -> None:
        self._send(
            status,
            {"error": {"message": message, "type": "x", "param": None, "code": self.server.refusal_code}},
        )

    def _send(self, status: int, answer: object) -> None:
        payload = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as fake:
        thread = threading.Thread(target=fake.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield fake
        fake.released.set()
        fake.shutdown()
        thread.join()


@pytest.fixture
def unreachable_url() -> Iterator[str]:
    """Yield a URL without a listener; its port is bound, so that no other program can listen there."""
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


@pytest.fixture(autouse=True)
def no_settings_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOST", "PORT", "API_KEY", "URL"):
        monkeypatch.delenv(f"FAIRLEAD_{name}", raising=False)
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
