"""A server that speaks only OpenAI's chat."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MODEL = "far"
USAGE = {
    "prompt_tokens": 21,
    "completion_tokens": 9,
    "prompt_tokens_details": {"cached_tokens": 8},
    "completion_tokens_details": {"reasoning_tokens": 2},
}
TEXT = {"content": "Hello world"}


class ChatServer(ThreadingHTTPServer):
    """Answers chats with `message_for` and nothing else. `sent` has the bodies of the requests.

    `status`: refuses. `after`: closes the connection after that many events. `waits`: the answer's end waits.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.sent: list[Any] = []
        self.open = 0
        self.reset()

    def reset(self) -> None:
        self.message: Any = TEXT
        self.finish_reason = "stop"
        self.status = 200
        self.after: int | None = None
        self.ends = threading.Event()
        self.ends.set()
        self.sent.clear()

    def message_for(self, body: Any) -> Any:
        """Return the answer to a request: `message`, whatever it is."""
        return self.message

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: ChatServer

    def log_message(self, *_: Any) -> None:
        """Print nothing."""

    def do_GET(self) -> None:
        models = {"object": "list", "data": [{"id": MODEL}]}
        self._send(*((200, models) if self.path == "/v1/models" else (404, {"detail": "Not Found"})))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path != "/v1/chat/completions":
            self._send(404, {"detail": "Not Found"})
            return
        self.server.sent.append(body)
        self.server.open += 1
        try:
            self._chat(body)
        except OSError:
            self.close_connection = True
        finally:
            self.server.open -= 1

    def _chat(self, body: Any) -> None:
        if self.server.status != 200:
            error = {"message": "maximum context length is 9 tokens", "type": "x", "code": 17, "param": "y"}
            self._send(self.server.status, {"error": error})
            return
        message, finish_reason = self.server.message_for(body), self.server.finish_reason
        if message.get("tool_calls") and finish_reason == "stop":
            finish_reason = "tool_calls"
        if body.get("stream"):
            self._stream(message, finish_reason)
        else:
            choice = {"index": 0, "message": message, "finish_reason": finish_reason}
            self._send(200, {"choices": [choice], "usage": USAGE})

    def _stream(self, message: Any, finish_reason: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for number, event in enumerate(_events(message, finish_reason)):
            if number == self.server.after:
                self.close_connection = True
                return
            data = b"data: " + event + b"\n\n"
            self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
            if not self.server.ends.is_set() and number >= 2:
                while not self.server.ends.wait(0.05):
                    self.wfile.write(b"8\r\n: ping\n\n\r\n")
        self.wfile.write(b"0\r\n\r\n")

    def _send(self, status: int, document: Any) -> None:
        body = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def _events(message: Any, finish_reason: str) -> Iterator[bytes]:
    yield _chunk({"role": "assistant", "content": ""})
    for name in ("reasoning_content", "content"):
        for word in (message.get(name) or "").split(" "):
            yield _chunk({name: word})
    for index, call in enumerate(message.get("tool_calls", ())):
        function = call["function"]
        begun = {**call, "index": index, "function": {**function, "arguments": ""}}
        yield _chunk({"tool_calls": [begun]})
        for letter in function["arguments"]:
            yield _chunk({"tool_calls": [{"index": index, "function": {"arguments": letter}}]})
    yield _chunk({}, finish_reason)
    yield json.dumps({"choices": [], "usage": USAGE}).encode()
    yield b"[DONE]"


def _chunk(delta: Any, finish_reason: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
    return json.dumps({"choices": [choice]}).encode()
