"""A server with canned answers in the OpenAI and Anthropic dialects, used as a remote node and as a command.

    python remote_server.py PORT

The answer to any prompt is the numbers from 0 to the limit on tokens, one word a token.
"""

import json
import sys
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

WORD_S = 0.02
WORDS_AT_MOST = 40


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """Answer health checks and the list of models."""
        self._send({"object": "list", "data": [{"id": "far"}]} if self.path == "/v1/models" else {})

    def do_POST(self) -> None:
        """Generate an answer in the dialect of the path."""
        request_body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        limit = request_body.get("max_tokens") or request_body.get("max_output_tokens") or WORDS_AT_MOST
        words = [f"{number} " for number in range(min(limit, WORDS_AT_MOST))]
        if not request_body.get("stream"):
            time.sleep(WORD_S * len(words))
            self._send(_whole(self.path, "".join(words), len(words)))
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for event in _events(self.path, words):
            time.sleep(WORD_S)
            self.wfile.write(b"%x\r\n%s\r\n" % (len(event), event))
        self.wfile.write(b"0\r\n\r\n")

    def log_message(self, *_: object) -> None:
        """Suppress the log of requests."""

    def _send(self, answer: dict[str, Any]) -> None:
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class Server(ThreadingHTTPServer):
    """A server with one thread for each connection."""

    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, *_: object) -> None:
        """Ignore errors: clients may disconnect."""


def _whole(path: str, text: str, tokens: int) -> dict[str, Any]:
    usage = {"prompt_tokens": 3, "completion_tokens": tokens, "total_tokens": 3 + tokens}
    match path:
        case "/v1/embeddings":
            return {"data": [{"index": 0, "embedding": [0.5, -0.5]}], "usage": {"prompt_tokens": 3}}
        case "/v1/messages/count_tokens":
            return {"input_tokens": 3}
        case "/v1/messages":
            content = [{"type": "text", "text": text}]
            return {"id": "m", "content": content, "usage": {"input_tokens": 3, "output_tokens": tokens}}
        case "/v1/responses":
            return {"id": "r", "output": [], "usage": {"input_tokens": 3, "output_tokens": tokens}}
        case "/v1/completions":
            choice: dict[str, Any] = {"index": 0, "text": text, "finish_reason": "stop"}
        case _:
            message = {"role": "assistant", "content": text}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
    return {"id": "c", "choices": [choice], "usage": usage}


def _events(path: str, words: list[str]) -> Iterator[bytes]:
    if path == "/v1/messages":
        yield _typed("message_start", message={"id": "m", "content": [], "usage": {"output_tokens": 1}})
        for word in words:
            yield _typed("content_block_delta", index=0, delta={"type": "text_delta", "text": word})
        yield _typed("message_delta", delta={"stop_reason": "end_turn"}, usage={"output_tokens": len(words)})
        yield _typed("message_stop")
        return
    if path == "/v1/responses":
        yield _typed("response.created", response={"id": "r", "usage": None})
        for word in words:
            yield _typed("response.output_text.delta", item_id="i", delta=word)
        yield _typed("response.completed", response={"id": "r", "usage": {"output_tokens": len(words)}})
        return
    is_chat = path == "/v1/chat/completions"
    for word in words:
        part: dict[str, Any] = {"delta": {"content": word}} if is_chat else {"text": word}
        yield _data({"id": "c", "choices": [{"index": 0, **part, "finish_reason": None}]})
    last: dict[str, Any] = {"delta": {}} if is_chat else {"text": ""}
    yield _data({"id": "c", "choices": [{"index": 0, **last, "finish_reason": "stop"}]})
    yield b"data: [DONE]\n\n"


def _typed(kind: str, **more: Any) -> bytes:
    return f"event: {kind}\n".encode() + _data({"type": kind, **more})


def _data(document: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(document).encode() + b"\n\n"


if __name__ == "__main__":
    Server(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
