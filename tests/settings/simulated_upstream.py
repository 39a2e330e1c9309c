"""A simulated server that jobs are relayed to. It records its requests, and answers as slowly as required."""

import json
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import trio

from simulation.streams import End


@dataclass
class Received:
    """One request. `document` is empty for a form."""

    method: str
    path: str
    headers: dict[str, str]
    document: dict[str, Any]


@dataclass
class SimulatedUpstream:
    """Answers `GET /health`, `/v1/models`, `/running` and every POST.

    An answer to a POST begins after `delay_s`, and its second half follows `gap_s` after the first. `text` is
    its content; if `fails`, it is an error. `reports` is the load as a Fairlead reports it. A probe takes
    `probe_s`. `is_healthy`: whether probes get status 200; `responds`: whether any request is answered.
    `ignores_term`: as a command's server, it ends only if it is killed. `connections` counts those that were
    made, `running` the present jobs, and `times` has the time of each probe.
    """

    models: tuple[str, ...] = ("far",)
    delay_s: float = 0.0
    gap_s: float = 0.0
    text: str = "hello"
    is_healthy: bool = True
    fails: bool = False
    reports: list[dict[str, object]] = field(default_factory=list)
    responds: bool = True
    probe_s: float = 0.0
    ignores_term: bool = False
    connections: int = 0
    running: int = 0
    most_running: int = 0
    received: list[Received] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    _ends: set[End] = field(default_factory=set)

    def close_connections(self) -> None:
        """Close all connections."""
        for end in sorted(self._ends, key=lambda end: end.remote):
            end.closing()
            end.reset()

    @property
    def posted(self) -> list[Received]:
        """The jobs received."""
        return [request for request in self.received if request.method == "POST"]

    async def serve(self, end: End) -> None:
        """Answer the requests of one connection; a handler of `Network`."""
        self.connections += 1
        self._ends.add(end)
        try:
            with suppress(OSError):
                while await self._serve_requests(end):
                    pass
        finally:
            self._ends.discard(end)
            end.closing()
            end.drop()

    async def _serve_requests(self, end: End) -> bool:
        data = b""
        while b"\r\n\r\n" not in data:
            if not (more := await end.receive()):
                return False
            data += more
        head, _, body = data.partition(b"\r\n\r\n")
        lines = head.decode().split("\r\n")
        method, path, _ = lines[0].split(" ")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:])}
        while len(body) < int(headers.get("content-length", 0)):
            if not (more := await end.receive()):
                return False
            body += more
        is_form = headers.get("content-type", "").startswith("multipart/")
        request = Received(method, path, headers, {} if is_form else json.loads(body or b"{}"))
        self.received.append(request)
        if not self.responds:
            await trio.sleep_forever()
        await self._respond(end, request)
        return True

    async def _respond(self, end: End, request: Received) -> None:
        if request.method == "GET":
            self.times.append(trio.current_time())
            await trio.sleep(self.probe_s)
            model_known: object = {}
            status = 200 if self.is_healthy else 500
            if request.path == "/v1/models":
                owner = {"owned_by": "fairlead"} if self.reports else {}
                model_known = {"data": [{"id": name, **owner} for name in self.models]}
            elif request.path == "/running":
                model_known, status = self.reports or model_known, 200 if self.reports else 404
            await _send(end, model_known, status, 0)
            return
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await trio.sleep(self.delay_s)
            if self.fails:
                await _send(end, {"error": {"message": "out of memory"}}, 500, 0)
                return
            choice = {"index": 0, "text": self.text, "message": {"role": "assistant", "content": self.text}}
            usage = {"prompt_tokens": 1, "completion_tokens": 1}
            await _send(
                end, {"choices": [choice | {"finish_reason": "stop"}], "usage": usage}, 200, self.gap_s
            )
        finally:
            self.running -= 1


async def _send(end: End, document: object, status: int, gap_s: float) -> None:
    body = json.dumps(document).encode()
    head = f"HTTP/1.1 {status} So\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    first_half = len(body) // 2
    await end.send(head.encode() + body[:first_half])
    await trio.sleep(gap_s)
    await end.send(body[first_half:])
