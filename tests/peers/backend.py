"""A server with a complete, small API of the shape of OpenAI's, Anthropic's or Ollama's.

`nodes/stub_server.py` misbehaves on demand. This one is correct, as real proxies and SDKs want it: it has
keys, tools and usage. It notices clients that leave, and can be full, slow, stopped and started again.
"""

import contextlib
import json
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

Api = Literal["openai", "messages", "ollama"]

MODEL = "tiny"
WORDS = tuple(f"w{number} " for number in range(8))
TEXT = "".join(WORDS)
TOOL = "weather"
ARGUMENTS = {"city": "Oslo"}
USAGE = {"prompt_tokens": 3, "completion_tokens": len(WORDS), "total_tokens": 3 + len(WORDS)}


class Backend:
    """Serves in threads, from `start` to `stop`, always on the same port.

    `api`: the shape of its API.
    `key`: the key that requests need; None: none.
    `first_s`: the pause before the first byte of an answer, in seconds.
    `pause_s`: the pause between two events of a stream, in seconds.
    `refusals`: how many of the next requests are refused, as a server that is full does.
    `refusal`: the status of these refusals.
    `generations`: how many answers it has begun.
    `running`: how many it is generating.
    `left`: how many of them ended because their client had gone.
    """

    def __init__(self, api: Api = "openai", *, key: str | None = None) -> None:
        self.api = api
        self.key = key
        self.generations = self.running = self.left = 0
        self.lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._server: ThreadingHTTPServer | None = None
        self.port = 0
        self.reset()
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def reset(self) -> None:
        """Be quick, and not full."""
        self.first_s = self.pause_s = 0.0
        self.refusals, self.refusal = 0, 503

    def start(self) -> None:
        """Listen, on the port that it had before."""
        self._server = _Server(("127.0.0.1", self.port), type("Handler", (_Handler,), {"backend": self}))
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        """Close the port and all connections, as a server does that is killed."""
        if self._server is None:
            return
        self._server.shutdown()
        self._server.server_close()
        self._server = None
        with self.lock:
            connections = [*self._connections]
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                connection.shutdown(socket.SHUT_RDWR)

    def opened(self, connection: socket.socket) -> None:
        with self.lock:
            self._connections.add(connection)

    def closed(self, connection: socket.socket) -> None:
        with self.lock:
            self._connections.discard(connection)

    def must_refuse(self) -> bool:
        """Count a request; return whether it is refused."""
        with self.lock:
            refused = self.refusals > 0
            self.refusals -= refused
            return refused

    @contextlib.contextmanager
    def generating(self) -> Iterator[None]:
        """Count an answer while it is generated."""
        with self.lock:
            self.generations += 1
            self.running += 1
        try:
            yield
        except (ConnectionError, TimeoutError):
            self.left += 1
            raise
        finally:
            with self.lock:
                self.running -= 1


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing: clients leave."""


class _Handler(BaseHTTPRequestHandler):
    backend: Backend
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def setup(self) -> None:
        super().setup()
        self.backend.opened(self.connection)

    def finish(self) -> None:
        self.backend.closed(self.connection)
        super().finish()

    def log_message(self, *arguments: Any) -> None:
        """Print nothing."""

    def do_GET(self) -> None:
        """Answer probes: the list of models, which needs the key, and nothing else."""
        names = {
            "/v1/models": {"object": "list", "data": [{"id": MODEL, "object": "model", "type": "model"}]},
            "/api/tags": {"models": [{"name": MODEL, "model": MODEL}]},
        }
        own = ("/v1/models", "/api/tags") if self.backend.api == "ollama" else ("/v1/models",)
        path = self.path.partition("?")[0]
        if path not in own:
            self._answer(404, {"error": {"message": "no such route", "type": "not_found"}})
        elif self._is_allowed():
            self._answer(200, names[path])

    def do_POST(self) -> None:
        """Answer with `TEXT`, or if the request has tools with a call of the first one."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self._is_allowed():
            return
        if self.backend.must_refuse():
            error = {"type": "overloaded_error", "message": "no seat is free"}
            self._answer(self.backend.refusal, {"type": "error", "error": error}, {"Retry-After": "1"})
            return
        makers = {"/v1/chat/completions": _openai, "/v1/messages": _messages, "/api/chat": _ollama}
        shape = {"openai": "/v1/chat/completions", "messages": "/v1/messages", "ollama": "/api/chat"}
        path = self.path.partition("?")[0]
        if path != shape[self.backend.api]:
            self._answer(404, {"error": {"message": f"no route {path}", "type": "not_found"}})
            return
        whole, events, kind = makers[path](body)
        with self.backend.generating():
            self._wait(self.backend.first_s)
            if body.get("stream", self.backend.api == "ollama"):
                self._stream(events, kind)
            else:
                self._wait(self.backend.pause_s * len(events))
                self._answer(200, whole)

    def _is_allowed(self) -> bool:
        key, headers = self.backend.key, self.headers
        given = headers.get("Authorization", "").removeprefix("Bearer ")
        if self.backend.api == "messages":
            given = headers.get("X-Api-Key", "")
        if key is None or given == key:
            return True
        self._answer(401, {"error": {"message": "invalid API key", "type": "authentication_error"}})
        return False

    def _answer(self, status: int, document: Any, headers: dict[str, str] | None = None) -> None:
        content = json.dumps(document).encode()
        self.send_response(status)
        fields = {"Content-Type": "application/json", "Content-Length": str(len(content))}
        for name, value in (fields | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def _stream(self, events: list[bytes], kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for event in events:
            self.wfile.write(b"%x\r\n%s\r\n" % (len(event), event))
            self._wait(self.backend.pause_s)
        self.wfile.write(b"0\r\n\r\n")

    def _wait(self, seconds: float) -> None:
        """Wait; raise if the client leaves meanwhile. A client sends nothing before it has its answer."""
        deadline = time.monotonic() + seconds
        while (left_s := deadline - time.monotonic()) > 0:
            if select.select([self.connection], [], [], min(left_s, 0.1))[0]:
                if not self.connection.recv(1, socket.MSG_PEEK):
                    raise ConnectionAbortedError
                time.sleep(min(left_s, 0.02))


# Answers: whole, as events, and the type of the events --------------------------------------------------


Answer = tuple[dict[str, Any], list[bytes], str]


def _openai(body: dict[str, Any]) -> Answer:
    base = {"id": "chatcmpl-1", "created": 1, "model": body["model"]}
    if body.get("tools"):
        function = {"name": TOOL, "arguments": json.dumps(ARGUMENTS)}
        call = {"id": "call_1", "type": "function", "function": function}
        message: dict[str, Any] = {"content": None, "tool_calls": [call]}
        deltas: list[dict[str, Any]] = [{"tool_calls": [{"index": 0, **call}]}]
        reason = "tool_calls"
    else:
        message, reason = {"content": TEXT}, "stop"
        deltas = [{"content": word} for word in WORDS]

    def chunk(delta: dict[str, Any], finish: str | None = None, **more: Any) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        return _event({**base, "object": "chat.completion.chunk", "choices": [choice], **more})

    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": reason}
    whole = {**base, "object": "chat.completion", "choices": [choice], "usage": USAGE}
    events = [chunk({"role": "assistant", "content": ""}), *map(chunk, deltas), chunk({}, reason)]
    if (body.get("stream_options") or {}).get("include_usage"):
        events.append(_event({**base, "object": "chat.completion.chunk", "choices": [], "usage": USAGE}))
    return whole, [*events, b"data: [DONE]\n\n"], "text/event-stream"


def _messages(body: dict[str, Any]) -> Answer:
    usage = {"input_tokens": 3, "output_tokens": len(WORDS)}
    if body.get("tools"):
        block: dict[str, Any] = {"type": "tool_use", "id": "toolu_1", "name": TOOL, "input": ARGUMENTS}
        empty = {**block, "input": {}}
        deltas = [{"type": "input_json_delta", "partial_json": json.dumps(ARGUMENTS)}]
        reason = "tool_use"
    else:
        block, empty, reason = {"type": "text", "text": TEXT}, {"type": "text", "text": ""}, "end_turn"
        deltas = [{"type": "text_delta", "text": word} for word in WORDS]
    message = {"id": "msg_1", "type": "message", "role": "assistant", "model": body["model"]}
    message |= {"content": [block], "stop_reason": reason, "stop_sequence": None, "usage": usage}
    begun = {**message, "content": [], "stop_reason": None}
    events = [
        {"type": "message_start", "message": begun},
        {"type": "content_block_start", "index": 0, "content_block": empty},
        *({"type": "content_block_delta", "index": 0, "delta": delta} for delta in deltas),
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": {"stop_reason": reason, "stop_sequence": None}, "usage": usage},
        {"type": "message_stop"},
    ]
    named = [b"event: " + event["type"].encode() + b"\n" + _event(event) for event in events]
    return message, named, "text/event-stream"


def _ollama(body: dict[str, Any]) -> Answer:
    base = {"model": body["model"], "created_at": "2026-01-01T00:00:00Z"}
    end = {"done": True, "done_reason": "stop", "prompt_eval_count": 3, "eval_count": len(WORDS)}
    if body.get("tools"):
        messages: list[dict[str, Any]] = [
            {"content": "", "tool_calls": [{"function": {"name": TOOL, "arguments": ARGUMENTS}}]}
        ]
    else:
        messages = [{"content": word} for word in WORDS]
    said = [{"role": "assistant", **message} for message in messages]
    whole = {**base, "message": said[0] if body.get("tools") else {**said[0], "content": TEXT}, **end}
    lines = [{**base, "message": message, "done": False} for message in said]
    lines.append({**base, "message": {"role": "assistant", "content": ""}, **end})
    return whole, [json.dumps(line).encode() + b"\n" for line in lines], "application/x-ndjson"


def _event(document: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(document).encode() + b"\n\n"
