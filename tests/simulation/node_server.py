"""A fake OpenAI-compatible server, remote or started by a command: it answers with `words`, or fails.

It supports the HTTP/1.1 that the product's client uses: one request at a time, bodies with a length.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec
import trio

from fairlead.language.text.tokenizer import Tokenizer
from simulation import words
from simulation.streams import End

# What happens to a request instead of a correct answer, before the answer or midway.
BEFORE = ("500", "502", "503", "429", "loading", "draining", "html", "reset", "silent", "garbage", "big head")
MIDWAY = ("cut", "stuck", "no end", "bad chunk", "error event", "long length", "short length", "not json")
FATES = (*BEFORE, *MIDWAY)

FALSE_USAGES: tuple[object, ...] = (
    *(10**30, -5, -(10**30), 10**18, 2**63, 2**31, 0, "many", "12", 1.5, 1e300, True, None, [], {}, [7]),
)
REAL_USAGE = object()

_encode = msgspec.json.Encoder().encode


def is_well(_path: str) -> str | None:
    """Return the fate of a request to a healthy server: None."""
    return None


def report_real_usage() -> object:
    """Return `HONEST`: the server reports its real usage."""
    return REAL_USAGE


@dataclass
class ServerPlan:
    """How a server behaves. `names` maps the server's model names to ours.

    `fate` returns for each request's path what happens to it; `reported_usage` the usage to report.
    `is_fairlead`: it answers `GET /running`, as Fairlead does. `on_answer` is called with the model, the
    ticket, the tokens of the answer and its bytes, which are the most tokens that it may be counted as.
    """

    tokenizer: Tokenizer
    names: dict[str, str]
    step_s: float = 0.05
    is_fairlead: bool = False
    seats: int = 2
    is_up: bool = True
    fate: Callable[[str], str | None] = is_well
    reported_usage: Callable[[], object] = report_real_usage
    on_answer: Callable[[str, str, int, int], None] = lambda *_: None
    on_request: Callable[[str, str], None] = lambda *_: None
    pause: Callable[[float], Any] = trio.sleep
    busy: int = 0
    instance: str = field(default="somebody else")


class Request(msgspec.Struct):
    """The fields of a body that are used."""

    model: str = ""
    stream: bool = False
    max_tokens: int = 256
    n: int = 1


class NodeServer:
    """Serves connections; `serve` is a handler of `Network`."""

    def __init__(self, plan: ServerPlan) -> None:
        self.plan = plan
        self.ends: set[End] = set()

    async def serve(self, end: End) -> None:
        """Answer the requests of one connection."""
        self.ends.add(end)
        try:
            with suppress(OSError):
                while await self._exchange(end):
                    pass
        finally:
            self.ends.discard(end)
            end.closing()
            end.drop()

    def cut_off(self) -> None:
        """Reset all connections."""
        for end in sorted(self.ends, key=lambda end: end.remote):
            end.closing()
            end.reset()

    async def _exchange(self, end: End) -> bool:
        """Answer one request; return whether another may follow."""
        request = b""
        while b"\r\n\r\n" not in request:
            if not (data := await end.receive()):
                return False
            request += data
        head, _, body = request.partition(b"\r\n\r\n")
        method, path, _ = head.decode().split("\r\n")[0].split(" ")
        length = 0
        for line in head.lower().split(b"\r\n"):
            if line.startswith(b"content-length:"):
                length = int(line.split(b":")[1])
        while len(body) < length:
            if not (data := await end.receive()):
                return False
            body += data
        await self.plan.pause(0)
        if not self.plan.is_up:
            end.reset()
            return False
        self.plan.busy += method == "POST"
        try:
            return await _Exchange(self.plan, end, path, body).answer(method)
        finally:
            self.plan.busy -= method == "POST"


class _Exchange:
    """One request and its answer."""

    def __init__(self, plan: ServerPlan, end: End, path: str, body: bytes) -> None:
        self._plan = plan
        self._end = end
        self._path = path
        self._body = body

    async def answer(self, method: str) -> bool:
        fate = self._plan.fate(self._path)
        if fate in BEFORE:
            return await self._refuse(fate)
        if method == "GET":
            return await self._respond(self._running())
        return await self._generate(fate or "")

    # Faults ------------------------------------------------------------------------------------------

    async def _refuse(self, fate: str) -> bool:
        if fate.isdigit():
            return await self._respond({"error": {"message": "no", "code": int(fate)}}, int(fate))
        match fate:
            case "loading" | "draining":
                code = {"loading": "model_loading", "draining": "draining"}[fate]
                return await self._respond(
                    {"error": {"message": "no", "code": code}}, 503, "Retry-After: 3\r\n"
                )
            case "html":
                return await self._whole(b"<html>welcome to the captive portal</html>", kind="text/html")
            case "reset":
                self._end.reset()
            case "silent":
                await self._send_nothing()
            case "garbage":
                await self._end.send(b"\x00\x01 this is no HTTP\r\n\r\n")
            case "big head":
                await self._end.send(b"HTTP/1.1 200 OK\r\n" + b"X-Filler: " + b"x" * 100_000)
        return False

    async def _send_nothing(self) -> None:
        """Send nothing until the other side disconnects."""
        while await self._end.receive():
            pass

    # Answers -----------------------------------------------------------------------------------------

    def _running(self) -> object:
        plan = self._plan
        if self._path == "/running" and plan.is_fairlead:
            entry = {"seats": plan.seats, "sequences": plan.busy, "waiting": 0}
            return [{"model": name, **entry} for name in plan.names]
        if self._path == "/v1/models":
            return {"object": "list", "data": [{"id": name} for name in plan.names]}
        return {"status": "ok", "instance": plan.instance}

    async def _generate(self, fate: str) -> bool:
        plan = self._plan
        try:
            requested = msgspec.json.decode(self._body, type=Request)
        except msgspec.MsgspecError:
            return await self._respond({"error": {"message": "no JSON"}}, 400)
        model = plan.names.get(requested.model, requested.model)
        ticket = words.ticket_in(self._body.decode(errors="replace"))
        plan.on_request(model, ticket)
        tokens = words.pieces_of(plan.tokenizer, model, ticket)
        finish = "length" if len(tokens) >= requested.max_tokens else "stop"
        pieces = [words.text_of(plan.tokenizer, [token]) for token in tokens[: requested.max_tokens]]
        if self._path == "/v1/embeddings":
            return await self._respond(
                {"object": "list", "model": requested.model, "data": [], "embedded": f"{model} {ticket}"}
            )
        if requested.stream:
            return await self._stream(fate, model, ticket, requested, pieces, finish)
        await plan.pause(plan.step_s * len(pieces))
        choices = [
            {"index": index, **self._piece("".join(pieces), whole=True), "finish_reason": finish}
            for index in range(requested.n)
        ]
        usage = self._usage(len(pieces) * requested.n)
        body = _answer({"id": "x", "model": requested.model, "choices": choices}, usage)
        plan.on_answer(model, ticket, len(pieces) * requested.n, len(body))
        return await self._whole(body, fate=fate)

    def _usage(self, tokens: int) -> object:
        reported_usage = self._plan.reported_usage()
        return tokens if reported_usage is REAL_USAGE else reported_usage

    def _piece(self, text: str, *, whole: bool = False) -> dict[str, Any]:
        if self._path != "/v1/chat/completions":
            return {"text": text}
        return {"message" if whole else "delta": {"role": "assistant", "content": text}}

    async def _stream(
        self, fate: str, model: str, ticket: str, requested: Request, pieces: list[str], finish: str
    ) -> bool:
        plan = self._plan
        await self._end.send(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        first_half = len(pieces) // 2
        common = {"id": "x", "object": "chat.completion.chunk", "model": requested.model}
        for number, piece in enumerate(pieces):
            await plan.pause(plan.step_s)
            if number == first_half and not await self._midway(fate):
                return False
            for index in range(requested.n):
                choice = {"index": index, **self._piece(piece), "finish_reason": None}
                event = _encode({**common, "choices": [choice]})
                plan.on_answer(model, ticket, 1, len(event))
                await self._event(event)
        for index in range(requested.n):
            choice = {"index": index, **self._piece(""), "finish_reason": finish}
            await self._event(_encode({**common, "choices": [choice]}))
        usage = self._usage(len(pieces) * requested.n)
        await self._event(_answer({**common, "choices": []}, usage))
        if fate == "no end":
            return False
        await self._event(b"[DONE]")
        await self._end.send(b"0\r\n\r\n")
        return True

    async def _midway(self, fate: str) -> bool:
        """Apply a fault in the middle of a stream; return whether the stream continues."""
        match fate:
            case "cut" | "long length":
                self._end.reset()
            case "stuck":
                await self._send_nothing()
            case "bad chunk" | "short length":
                await self._end.send(b"zz\r\nnonsense\r\n")
            case "error event":
                await self._event(b'{"error":{"message":"out of memory"}}')
            case "not json":
                await self._event(b'{"choices":[{"delta"')
                return True
            case _:
                return True
        return False

    async def _event(self, data: bytes) -> None:
        event = b"data: " + data + b"\n\n"
        await self._end.send(b"%x\r\n%b\r\n" % (len(event), event))

    async def _respond(self, document: object, status: int = 200, headers: str = "") -> bool:
        return await self._whole(_encode(document), status, headers=headers)

    async def _whole(
        self,
        body: bytes,
        status: int = 200,
        kind: str = "application/json",
        fate: str = "",
        headers: str = "",
    ) -> bool:
        first_half = len(body) // 2
        length = len(body)
        match fate:
            case "long length":
                length += 10
            case "short length":
                length = first_half
            case "not json":
                body = b"{" * len(body)
        head = f"HTTP/1.1 {status} So\r\nContent-Type: {kind}\r\n{headers}Content-Length: {length}\r\n\r\n"
        await self._end.send(head.encode() + body[:first_half])
        if fate in ("cut", "no end", "bad chunk", "error event"):
            self._end.reset()
            return False
        if fate == "stuck":
            await self._send_nothing()
        await self._end.send(body[first_half:])
        return fate != "long length"


def _answer(document: dict[str, Any], usage: object) -> bytes:
    """Return a document with this usage, which no encoder may accept, such as a number of 31 digits."""
    usage_text = (
        str(usage) if isinstance(usage, int) and not isinstance(usage, bool) else _encode(usage).decode()
    )
    return (
        _encode(document)[:-1] + f',"usage":{{"prompt_tokens":3,"completion_tokens":{usage_text}}}}}'.encode()
    )
