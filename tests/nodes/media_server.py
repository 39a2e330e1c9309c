"""A small server for sound and images, whose answers show what it was sent. Reads forms as others do.

    POST /v1/audio/transcriptions, /translations   JSON, a text or subtitles, or events, by the form's fields
    POST /v1/audio/speech                           "ID3", and then the bytes of `input`, as audio/mpeg
    POST /v1/images/…                               as many images as `n`: the prompt, in Base64
    POST /v1/moderations                            a result for each text of `input`
    GET /v1/audio/voices                            the names of voices
    POST /v1/chat/completions                       one word

A form is parsed by the standard library's parser of mails, unless it is large: then its bytes are counted as
they arrive, and dropped. `prompt` of a form or a body selects what else happens:

    full        503                       silent    no byte of a response
    refuse      400                       half      half an answer, and then a closed connection
    missing     404                       hold      waits for `go` before the answer, and amid it
    page        a page with status 200    error     an error with status 200

    python media_server.py --port N
"""

import argparse
import base64
import email
import email.policy
import json
from collections.abc import Callable
from typing import Any

import trio

LARGE = 1024 * 1024
TEXT = "hello from the stub"


class MediaRequest:
    """A request as it was received: `fields` are those of a form or of JSON, `files` are by name."""

    def __init__(self, method: str, target: str, headers: dict[str, str]) -> None:
        self.method = method
        self.path, _, self.query = target.partition("?")
        self.headers = headers
        self.fields: dict[str, Any] = {}
        self.files: dict[str, tuple[str | None, str, bytes]] = {}
        self.names: list[str] = []
        self.size = 0


class MediaServer:
    """Serves until cancelled. `requests` are those received, `running` the number of present ones."""

    def __init__(self) -> None:
        self.requests: list[MediaRequest] = []
        self.running = 0
        self.port = 0
        self.delay_s = 0.0
        self.go = trio.Semaphore(0)
        self.models = ["media"]
        self.on_request: Callable[[MediaRequest], None] = lambda _request: None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def jobs(self) -> list[MediaRequest]:
        """The requests that are no probes."""
        return [request for request in self.requests if request.path not in ("/v1/models", "/health")]

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
        buffer = bytearray()
        try:
            while await self._exchange(stream, buffer):
                pass
        except (trio.BrokenResourceError, trio.ClosedResourceError, EOFError):
            pass
        finally:
            stream.socket.close()

    async def _exchange(self, stream: trio.SocketStream, buffer: bytearray) -> bool:
        while b"\r\n\r\n" not in buffer:
            if not (data := await stream.receive_some()):
                return False
            buffer += data
        head, _, rest = bytes(buffer).partition(b"\r\n\r\n")
        buffer[:] = rest
        lines = head.decode("latin-1").split("\r\n")
        method, target, _ = lines[0].split(" ")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:])}
        request = MediaRequest(method, target, headers)
        body = await _read_body(stream, buffer, request)
        if request.path in ("/v1/models", "/health"):
            listed = {"object": "list", "data": [{"id": name} for name in self.models]}
            await _send(stream, 200, "application/json", json.dumps(listed).encode())
            return True
        _parse(request, body)
        self.requests.append(request)
        self.on_request(request)
        self.running += 1
        try:
            async with trio.open_nursery() as nursery:

                async def leave_with_the_client() -> None:
                    await trio.lowlevel.wait_readable(stream.socket)
                    nursery.cancel_scope.cancel()

                nursery.start_soon(leave_with_the_client)
                await trio.sleep(self.delay_s)
                is_kept = await self._respond(stream, request)
                nursery.cancel_scope.cancel()
                return is_kept
            return False
        finally:
            self.running -= 1

    async def _respond(self, stream: trio.SocketStream, request: MediaRequest) -> bool:
        how = request.fields.get("prompt")
        if how == "silent":
            await trio.sleep_forever()
        if how == "page":
            await _send(stream, 200, "text/html", b"<html>log in</html>")
            return True
        if how in ("full", "refuse", "missing"):
            status = {"full": 503, "refuse": 400, "missing": 404}[how]
            error = {"error": {"message": f"the stub says {how}", "code": "of the stub"}}
            await _send(stream, status, "application/json", json.dumps(error).encode(), retry_after="1")
            return True
        if how == "error":
            error = {"error": {"message": "the stub is out of order", "code": 400}}
            await _send(stream, 200, "application/json", json.dumps(error).encode())
            return True
        if how == "hold":
            await self.go.acquire()
        kind, pieces = _answer(request)
        head = f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nTransfer-Encoding: chunked\r\n\r\n"
        await stream.send_all(head.encode())
        for number, piece in enumerate(pieces):
            if number == 1 and how == "half":
                return False
            if number == 1 and how == "hold":
                await self.go.acquire()
            await stream.send_all(b"%x\r\n%s\r\n" % (len(piece), piece))
        await stream.send_all(b"0\r\n\r\n")
        return True


async def _read_body(stream: trio.SocketStream, buffer: bytearray, request: MediaRequest) -> bytes:
    """Return a body, or the first megabyte of a large one."""
    kept = b""
    left = int(request.headers.get("content-length", 0))
    while left:
        if not buffer:
            data = await stream.receive_some(65536)
            if not data:
                raise EOFError
            buffer += data
        piece = bytes(buffer[:left])
        del buffer[: len(piece)]
        left -= len(piece)
        request.size += len(piece)
        kept += piece[: max(0, LARGE - len(kept))]
    return kept


def _parse(request: MediaRequest, body: bytes) -> None:
    kind = request.headers.get("content-type", "")
    if not kind.startswith("multipart/form-data"):
        request.fields = json.loads(body or b"{}")
        return
    if request.size > LARGE:  # only the fields before the first file
        body = body[: body.rindex(b"\r\n--", 0, body.index(b"filename="))] + b"\r\n--"
        body += kind.partition("boundary=")[2].encode() + b"--\r\n"
    message = email.message_from_bytes(
        b"Content-Type: " + kind.encode() + b"\r\n\r\n" + body, policy=email.policy.HTTP
    )
    for part in message.iter_parts():
        name = part.get_param("name", header="content-disposition")
        content = part.get_payload(decode=True)
        request.names.append(name)
        filename = part.get_param("filename", header="content-disposition")
        if filename is None:
            request.fields[name] = content.decode()
        else:
            request.files[name] = (filename, part.get_content_type(), content)


def _answer(request: MediaRequest) -> tuple[str, list[bytes]]:
    """Return the type and the pieces of an answer."""
    fields, path = request.fields, request.path
    if path == "/v1/audio/speech":
        return "audio/mpeg", [b"ID3", str(fields["input"]).encode()]
    if path == "/v1/audio/voices":
        return "application/json", [b'{"voices": ["anna", "ben"]}']
    if path == "/v1/moderations":
        texts = fields["input"] if isinstance(fields["input"], list) else [fields["input"]]
        results = [{"flagged": "bad" in text, "categories": {}, "category_scores": {}} for text in texts]
        return _json({"id": "modr-1", "model": fields["model"], "results": results})
    if path.startswith("/v1/images/"):
        content = str(fields.get("prompt") or len(request.files["image"][2]))
        image = {"b64_json": base64.b64encode(content.encode()).decode()}
        if fields.get("stream") in (True, "true"):
            event = {"type": "image_generation.completed", **image, "created_at": 1}
            return _events([event])
        return _json({"created": 1, "data": [image] * int(fields.get("n") or 1)})
    if path == "/v1/chat/completions":
        choice = {"index": 0, "message": {"role": "assistant", "content": "yes"}, "finish_reason": "stop"}
        return _json(
            {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
        )
    if fields.get("stream") == "true":
        deltas = [{"type": "transcript.text.delta", "delta": word} for word in TEXT.split()]
        return _events([*deltas, {"type": "transcript.text.done", "text": TEXT}])
    match fields.get("response_format"):
        case "text":
            return "text/plain; charset=utf-8", [TEXT.encode(), b"\n"]
        case "srt":
            return "text/plain", [b"1\n00:00:00,000 --> 00:00:01,000\n", TEXT.encode()]
    return _json({"text": TEXT, "bytes": request.size})


def _json(document: Any) -> tuple[str, list[bytes]]:
    body = json.dumps(document).encode()
    return "application/json", [body[:10], body[10:]]


def _events(events: list[dict[str, Any]]) -> tuple[str, list[bytes]]:
    return "text/event-stream", [f"data: {json.dumps(event)}\n\n".encode() for event in events]


async def _send(
    stream: trio.SocketStream, status: int, kind: str, body: bytes, *, retry_after: str | None = None
) -> None:
    more = f"Retry-After: {retry_after}\r\n" if retry_after else ""
    head = f"HTTP/1.1 {status} Status\r\nContent-Type: {kind}\r\n{more}Content-Length: {len(body)}\r\n\r\n"
    await stream.send_all(head.encode() + body)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    trio.run(MediaServer().serve, parser.parse_args().port)
