"""A small server of OpenAI's API, and of others, which misbehaves on demand.

A response has `words` words of one token each: "w0 w1 …". The member `stub` in the body of a request selects
the response: {"words", "chunk_words", "delay_s", "how", "after"}. `how` is one of:

    well        a correct response                stall       nothing more after `after` events
    reset       a reset after `after` events      end         a clean end after `after` events, no finish
    half        half an event, then a clean end   broken      half a chunk of the body, then a clean close
    no_done     all, but no [DONE]                close       correct, but the connection's end is the body's
    unfinished  no finish_reason, but [DONE]      error       an error event after `after` events
    status      a response with status `after`    kind        a response with the type text/html
    garbage     not HTTP                          gzip        a header says that it is compressed
    silent      no byte of a response             gone        closes the connection without a response
    bad_chunk   an invalid chunk size             endless     never ends, as fast as possible
    slow_end    all at once, but the body's end comes 60 s later

With `after` 0, a streaming `how` applies directly after the head. With "waits", what follows `after` events,
or a whole response, waits for a `release` of `go`; with "held", as long as a file of that name exists.
Settings for all requests are attributes of the server.

    python stub_server.py --port N [--healthy-after S] [--fairlead] [--exit-after S] [--requires-key KEY]
"""

import argparse
import json
import os
import signal
import socket
import struct
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import trio

WORDS = 8


@dataclass
class StubRequest:
    """A request as it was received."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    stub: dict[str, Any] = field(default_factory=dict)

    @property
    def document(self) -> dict[str, Any]:
        """The body as JSON."""
        document: dict[str, Any] = json.loads(self.body or b"{}")
        return document


class _Leave(Exception):
    """Closes the connection; with `reset`, by a TCP reset."""

    def __init__(self, *, reset: bool = False) -> None:
        super().__init__()
        self.reset = reset


class StubServer:
    """Serves until cancelled. `requests` are those received; `connections` counts open ones, `accepted` all.

    `behaviour` holds defaults for `stub`. `/health` returns 404 if `health` is False, 503 if `healthy` is
    False, else 200 with `says` as its body. With `seats`, the server looks like Fairlead with that many seats
    and `load` of them taken, true or not. With `refuses`, every connection is closed as soon as it is
    accepted. With a `key`, requests without it get 401. `go`: see "waits".
    """

    def __init__(self) -> None:
        self.requests: list[StubRequest] = []
        self.connections = 0
        self.accepted = 0
        self.behaviour: dict[str, Any] = {}
        self.healthy = True
        self.health = True
        self.health_body: Any = {}
        self.stalls_probes = False
        self.refuses = False
        self.seats: int | None = None
        self.load = 0
        self.key: str | None = None
        self.models = ["m"]
        self.port = 0
        self.go = trio.Semaphore(0)

    @property
    def url(self) -> str:
        """The base URL."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def jobs(self) -> list[StubRequest]:
        """The requests that are not probes."""
        return [request for request in self.requests if request.method == "POST"]

    async def serve(
        self, port: int = 0, *, task_status: trio.TaskStatus[int] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Listen on loopback; report the port."""
        listeners = await trio.open_tcp_listeners(port, host="127.0.0.1")
        self.port = listeners[0].socket.getsockname()[1]
        try:
            async with trio.open_nursery() as nursery:
                await nursery.start(trio.serve_listeners, self._connection, listeners)
                task_status.started(self.port)
        finally:
            for listener in listeners:
                listener.socket.close()

    async def _connection(self, stream: trio.SocketStream) -> None:
        self.connections += 1
        self.accepted += 1
        try:
            buffer = bytearray()
            while not self.refuses:
                request = await _read_request(stream, buffer)
                if request is None:
                    return
                self.requests.append(request)
                await self._answer(stream, request)
        except _Leave as leave:
            if leave.reset:
                stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        finally:
            stream.socket.close()
            self.connections -= 1

    async def _answer(self, stream: trio.SocketStream, request: StubRequest) -> None:
        if self.key is not None and request.headers.get("authorization") != f"Bearer {self.key}":
            await stream.send_all(whole(401, b'{"error": {"message": "Invalid API Key"}}'))
            return
        if request.method == "GET":
            await self._status_response(stream, request.path.partition("?")[0])
            return
        document = request.document
        request.stub = {**self.behaviour, **document.get("stub", {})}
        await _ResponseScript(stream, request.stub, self.go).answer(request.path.partition("?")[0], document)

    async def _status_response(self, stream: trio.SocketStream, path: str) -> None:
        if self.stalls_probes:
            await trio.sleep_forever()
        status = 404
        answer: Any = {"error": "no such route"}
        if path == "/health" and self.health:
            status, answer = (200, self.health_body) if self.healthy else (503, {"error": "loading"})
        elif path == "/v1/models":
            is_fairlead = self.seats is not None or "instance" in (self.health_body or ())
            owner = {"owned_by": "fairlead"} if is_fairlead else {}
            listed = {"object": "list", "data": [{"id": name, **owner} for name in self.models]}
            status, answer = (200, listed) if self.healthy else (503, {"error": "loading"})
        elif path == "/running" and self.seats is not None:
            entry = {"model": self.models[0], "state": "ready", "seats": self.seats, "sequences": self.load}
            status, answer = 200, [{**entry, "waiting": 0}]
        await stream.send_all(whole(status, json.dumps(answer).encode()))


class _ResponseScript:
    """One response, as its request demands."""

    def __init__(self, stream: trio.SocketStream, stub: dict[str, Any], go: trio.Semaphore) -> None:
        self.stream = stream
        self.go = go
        self.waits = stub.get("waits", False)
        self.held = stub.get("held")
        self.how = stub.get("how", "well")
        self.after = stub.get("after", 0)
        self.retry_after = stub.get("retry_after")
        self.words = stub.get("words", WORDS)
        self.chunk_words = stub.get("chunk_words", 1)
        self.delay_s = stub.get("delay_s", 0)
        self.at_once = stub.get("at_once", False)

    async def answer(self, path: str, document: dict[str, Any]) -> None:
        if self.how == "silent":
            await trio.sleep_forever()
        if self.how == "gone":
            raise _Leave
        if self.how == "reset" and not self.after:
            raise _Leave(reset=True)
        if self.how == "early":
            await self.stream.send_all(whole(413, b'{"error": {"message": "too large"}}'))
            raise _Leave
        if self.how == "garbage":
            await self.stream.send_all(b"220 smtp.example.org ready\r\n\r\n")
            raise _Leave
        if self.how == "status":
            body = json.dumps({"error": {"message": f"status {self.after}", "code": "of the stub"}}).encode()
            answer = whole(self.after, body)
            if self.retry_after is not None:
                answer = answer.replace(b"\r\n", b"\r\nRetry-After: %d\r\n" % self.retry_after, 1)
            await self.stream.send_all(answer)
        elif document.get("stream"):
            await self._stream(path, document)
        else:
            await self._whole(path, document)

    async def _whole(self, path: str, document: dict[str, Any]) -> None:
        await self._turn()
        if self.delay_s:
            await trio.sleep(self.delay_s)
        body = json.dumps(whole_answer(path, document, self.words)).encode()
        kind = "text/html" if self.how == "kind" else "application/json"
        answer = whole(200, body, kind=kind, encoding="gzip" if self.how == "gzip" else None)
        if self.how in ("half", "broken", "end"):
            await self.stream.send_all(answer[: -len(body) // 2])
            raise _Leave
        if self.how == "close":
            await self.stream.send_all(
                b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n\r\n" + body
            )
            raise _Leave
        await self.stream.send_all(answer)

    async def _stream(self, path: str, document: dict[str, Any]) -> None:
        events_type = (
            "application/x-ndjson" if path.startswith("/api/") else "text/event-stream; charset=utf-8"
        )
        kind = "text/html" if self.how == "kind" else events_type
        framing = "Connection: close" if self.how == "close" else "Transfer-Encoding: chunked"
        head = f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\n{framing}\r\n\r\n".encode()
        await self.stream.send_all(head)
        events = list(stream_events(path, document, self.words, self.chunk_words))
        if self.how == "unfinished":
            events = [event for event in events if b'"stop"' not in event]
        if self.how == "no_done":
            events.pop()
        if self.how == "endless":
            del events[-2:]
        if self.at_once or self.how == "slow_end":
            await self.stream.send_all(b"".join(self._framed(event) for event in events))
        else:
            await self._one_by_one(events)
        if self.how == "slow_end":
            await trio.sleep(60)
        if self.how == "close":
            raise _Leave
        await self.stream.send_all(b"0\r\n\r\n")

    async def _one_by_one(self, events: list[bytes]) -> None:
        for number, event in enumerate(events):
            if number == self.after:
                await self._strike(event)
            if self.delay_s:
                await trio.sleep(self.delay_s)
            await self.stream.send_all(self._framed(event))
        while self.how == "endless":
            await self.stream.send_all(self._framed(events[1]) * 1000)

    async def _turn(self) -> None:
        if self.waits:
            await self.go.acquire()
        while self.held and Path(self.held).exists():  # noqa: ASYNC110  # a file sends no event
            await trio.sleep(0.01)

    async def _strike(self, event: bytes) -> None:
        await self._turn()
        if self.how == "stall":
            await trio.sleep_forever()
        if self.how == "reset":
            await trio.sleep(0.05)  # else the reset discards what was sent before
            raise _Leave(reset=True)
        if self.how == "end":
            await self.stream.send_all(b"0\r\n\r\n")
            raise _Leave
        if self.how == "half":
            await self.stream.send_all(self._framed(event[: len(event) // 2]) + b"0\r\n\r\n")
            raise _Leave
        if self.how == "broken":
            await self.stream.send_all(self._framed(event)[: len(event) // 2])
            raise _Leave
        if self.how == "bad_chunk":
            await self.stream.send_all(b"0x10\r\n" + event + b"\r\n")
            raise _Leave
        if self.how == "error":
            await self.stream.send_all(self._framed(b'data: {"error": {"message": "out of order"}}\n\n'))
            raise _Leave

    def _framed(self, event: bytes) -> bytes:
        return event if self.how == "close" else b"%x\r\n%s\r\n" % (len(event), event)


# Responses -------------------------------------------------------------------------------------------


def word(number: int) -> str:
    """Return the text of one token."""
    return f"w{number} "


def text(words: int = WORDS) -> str:
    """Return the text of a whole response."""
    return "".join(map(word, range(words)))


def pieces(words: int, chunk_words: int) -> list[str]:
    """Return the text in pieces of `chunk_words` words."""
    return [
        "".join(map(word, range(start, min(start + chunk_words, words))))
        for start in range(0, words, chunk_words)
    ]


def stream_events(path: str, document: dict[str, Any], words: int, chunk_words: int) -> list[bytes]:
    """Return all events of a streamed response, in the API of the path."""
    if path == "/v1/messages":
        return _message_events(pieces(words, chunk_words))
    if path == "/v1/responses":
        return _response_events(pieces(words, chunk_words), words)
    if path.startswith("/api/"):
        return _line_events(path, pieces(words, chunk_words), words)
    return _chunk_events(path, document, pieces(words, chunk_words), words)


def whole_answer(path: str, document: dict[str, Any], words: int) -> dict[str, Any]:
    """Return a whole response, in the API of the path, with unknown members."""
    answer: dict[str, Any] = {"id": "stub", "model": document.get("model"), "unheard_of": [1, {"of": None}]}
    if path == "/v1/embeddings":
        return {**answer, "data": [{"index": 0, "embedding": [0.25, -1.0]}], "usage": {"prompt_tokens": 3}}
    if path.startswith("/api/"):
        ending = {"done": True, "done_reason": "stop", "eval_count": words, "prompt_eval_count": 3}
        return {**answer, **_line_content(path, text(words)), **ending}
    choice: dict[str, Any] = {"index": 0, "finish_reason": "stop"}
    if path == "/v1/completions":
        choice["text"] = text(words)
    else:
        choice["message"] = {"role": "assistant", "content": text(words)}
    choices = [{**choice, "index": index} for index in range(document.get("n") or 1)]
    return {**answer, "choices": choices, "usage": {"completion_tokens": words, "prompt_tokens": 3}}


def _chunk_events(path: str, document: dict[str, Any], parts: list[str], words: int) -> list[bytes]:
    is_chat = path != "/v1/completions"
    indexes = range(document.get("n") or 1)

    def chunk(choices: list[dict[str, Any]], **more: Any) -> bytes:
        return _data({"id": "stub", "object": "chunk", "unheard_of": True, "choices": choices, **more})

    def chunk_choice(index: int, part: str | None, **more: Any) -> dict[str, Any]:
        saying = {"delta": {} if part is None else {"content": part}} if is_chat else {"text": part or ""}
        return {"index": index, **saying, "finish_reason": None, **more}

    events = []
    if is_chat:
        events += [
            chunk([{"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}])
            for index in indexes
        ]
    events += [chunk([chunk_choice(index, part)]) for part in parts for index in indexes]
    events += [chunk([chunk_choice(index, None, finish_reason="stop")]) for index in indexes]
    if (document.get("stream_options") or {}).get("include_usage"):
        usage = {"completion_tokens": words * len(indexes), "prompt_tokens": 3}
        events.append(chunk([], usage=usage))
    return [*events, b"data: [DONE]\n\n"]


def _message_events(parts: list[str]) -> list[bytes]:
    def event(kind: str, **more: Any) -> bytes:
        return f"event: {kind}\n".encode() + _data({"type": kind, **more})

    deltas = [
        event("content_block_delta", index=0, delta={"type": "text_delta", "text": part}) for part in parts
    ]
    return [
        event("message_start", message={"id": "stub", "content": [], "usage": {"output_tokens": 1}}),
        event("content_block_start", index=0, content_block={"type": "text", "text": ""}),
        *deltas,
        event("content_block_stop", index=0),
        event("message_delta", delta={"stop_reason": "end_turn"}, usage={"output_tokens": 8}),
        event("message_stop"),
    ]


def _response_events(parts: list[str], words: int) -> list[bytes]:
    def event(kind: str, **more: Any) -> bytes:
        return f"event: {kind}\n".encode() + _data({"type": kind, **more})

    return [
        event("response.created", response={"id": "stub", "usage": None}),
        *(event("response.output_text.delta", item_id="i", delta=part) for part in parts),
        event("response.output_text.done", text="".join(parts)),
        event("response.completed", response={"id": "stub", "usage": {"output_tokens": words}}),
    ]


def _line_events(path: str, parts: list[str], words: int) -> list[bytes]:
    def line(part: str, **more: Any) -> bytes:
        return (
            json.dumps({"model": "stub", **_line_content(path, part), "done": False, **more}).encode() + b"\n"
        )

    return [*map(line, parts), line("", done=True, done_reason="stop", eval_count=words)]


def _line_content(path: str, part: str) -> dict[str, Any]:
    return {"message": {"role": "assistant", "content": part}} if path == "/api/chat" else {"response": part}


def _data(document: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(document).encode() + b"\n\n"


def whole(status: int, body: bytes, *, kind: str = "application/json", encoding: str | None = None) -> bytes:
    """Return a whole HTTP response."""
    extra = f"Content-Encoding: {encoding}\r\n" if encoding else ""
    head = f"HTTP/1.1 {status} Stub\r\nContent-Type: {kind}\r\n{extra}Content-Length: {len(body)}"
    return head.encode() + b"\r\n\r\n" + body


async def _read_request(stream: trio.SocketStream, buffer: bytearray) -> StubRequest | None:
    while (end := buffer.find(b"\r\n\r\n")) < 0:
        data = await stream.receive_some()
        if not data:
            return None
        buffer += data
    first, *lines = buffer[:end].decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    method, path, _ = first.split(" ")
    length = end + 4 + int(headers.get("content-length", "0"))
    while len(buffer) < length:
        data = await stream.receive_some()
        if not data:
            return None
        buffer += data
    body = bytes(buffer[end + 4 : length])
    del buffer[:length]
    return StubRequest(method, path, headers, body)


# As a command ----------------------------------------------------------------------------------------


def print_line(line: str) -> None:
    """Print a line and flush it."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


async def _main(options: argparse.Namespace) -> None:
    server = StubServer()
    server.healthy = options.healthy_after <= 0
    server.seats = 4 if options.fairlead else None
    if options.ignore_sigterm:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    async with trio.open_nursery() as nursery:
        port = await nursery.start(server.serve, options.port)
        print_line(f"stub on port {port}, process {os.getpid()}")
        if options.requires_key is not None:
            server.key = options.requires_key
            print_line(f"requires {server.key}")
        if not server.healthy:
            await trio.sleep(options.healthy_after)
            server.healthy = True
        await trio.sleep(options.exit_after)
        print_line("stub ends, as requested")
        sys.exit(3)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--healthy-after", type=float, default=0)
    parser.add_argument("--exit-after", type=float, default=float("inf"))
    parser.add_argument("--fairlead", action="store_true")
    parser.add_argument("--ignore-sigterm", action="store_true")
    parser.add_argument("--requires-key")
    parser.add_argument("--api-key")  # which only Fairlead reads
    parser.add_argument("--api-key-file")
    trio.run(_main, parser.parse_args())
