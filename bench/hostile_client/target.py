"""The target of an attack: the routes of a running server, and a canary that measures it meanwhile."""

import json
import re
import time
from dataclasses import dataclass, field

import trio

from hostile_client.attack import Address
from hostile_client.requests import Grammar
from hostile_client.wire import Reply, Wire

CANARY_S = 120.0
PROMPT = {"prompt": "The quick brown fox", "max_tokens": 16, "temperature": 0, "user": "canary"}


async def fetch(address: Address, method: str, path: str, content: bytes = b"") -> Reply:
    """Return the response to one request on a new connection."""
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    return await send(address, method, head.encode() + content)


async def send(address: Address, method: str, request: bytes) -> Reply:
    """Return the response to the bytes of a request with this method, on a new connection."""
    with trio.socket.socket() as sock:
        await sock.connect(address)
        wire = Wire(sock)
        await wire.send(request)
        return await wire.reply(method)


async def grammar_of(address: Address, *, models: tuple[str, ...], spare: str) -> Grammar:
    """Return the grammar of the server's OpenAPI document and of the files of its dashboard."""
    document = json.loads((await fetch(address, "GET", "/openapi.json")).body)
    page = (await fetch(address, "GET", "/")).body.decode()
    files = re.findall(r'(?:src|href)="/?(dashboard/[^"]+)"', page)
    return Grammar(document, tuple(f"/{file}" for file in files), models=models, spare=spare)


@dataclass
class Canary:
    """Sends the same request repeatedly, as an ordinary client. `texts` are the different answers."""

    address: Address
    model: str
    texts: set[str] = field(default_factory=set)
    faults: list[str] = field(default_factory=list)
    took_s: list[float] = field(default_factory=list)

    async def check_canary(self, *, pause_s: float = 0.02) -> None:
        """Send requests until cancelled."""
        content = json.dumps(PROMPT | {"model": self.model}).encode()
        while True:
            began = time.perf_counter()
            with trio.fail_after(CANARY_S):
                reply = await fetch(self.address, "POST", "/v1/completions", content)
            self.took_s.append(time.perf_counter() - began)
            if reply.status == 200:
                self.texts.add(json.loads(reply.body)["choices"][0]["text"])
            else:
                self.faults.append(f"{reply.status} {reply.body[:500]!r}")
            await trio.sleep(pause_s)
