"""A dispatcher and fronts as in several processes, all in the process of the test.

The roles, their connections and their HTTP listeners are the real ones. Instead of the supervisor, a link
reports each command as loaded at once: its server is `ModelServer`, which runs in the test.
"""

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import msgspec
import trio

from fairlead.base.config import ApiKey, CommandConfig, Config
from fairlead.base.config.models import MOST_DIALECTS, Dialects
from fairlead.distributed.supervisor import control
from fairlead.generation.metrics.tenants import TenantNames
from fairlead.generation.request_log import RequestLog
from fairlead.nodes.limits import NodeLimits
from fairlead.router.fleet.fleet import Fleet
from fairlead.server.processes.child import NoSupervisor
from fairlead.server.processes.dispatcher_role import DispatcherRole
from fairlead.server.processes.front_role import FrontRole, of_one_front

MODEL = "small"
SLOW = "slow"  # a prompt that is never answered
LINK_KEY = b"k" * 32
LIMITS = NodeLimits(seats=4, max_model_len=2**31, needs_relay=True)
ANSWER = json.dumps(
    {"choices": [{"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}]}
).encode()


class Link(NoSupervisor):
    """Loads and ends each command at once."""

    def send(self, message: msgspec.Struct) -> None:
        super().send(message)
        match message:
            case control.StartProcess(name, config=command):
                self._handle(control.ProcessLine(name, "loaded"))
                self._handle(control.ProcessUp(name, None, limits=LIMITS, command=command))
            case control.EndProcess(name):
                self._handle(control.ProcessEnded(name, "it was ended"))


class Composed(NamedTuple):
    """The base URLs of the fronts, the dispatcher's fleet, and the URL of the model's server."""

    urls: list[str]
    fleet: Fleet
    model_url: str

    def client(self, front: int = 0, key: str | None = None) -> httpx.AsyncClient:
        """Return a client of a front."""
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        return httpx.AsyncClient(base_url=self.urls[front], headers=headers, timeout=20)


@asynccontextmanager
async def composed(
    directory: Path,
    *keys: ApiKey,
    fronts: int = 1,
    dialects: Dialects = MOST_DIALECTS,
    model: dict[str, Any] | None = None,
    **settings: Any,
) -> AsyncIterator[Composed]:
    """Run a dispatcher and fronts until the block ends.

    directory: where they have their sockets.
    keys: the API keys.
    fronts: how many fronts.
    dialects: what the model's server speaks.
    model: further settings of the model.
    settings: those of the configuration.
    """
    async with trio.open_nursery() as nursery:
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(trio.serve_listeners, _answer, listeners)
        model_url = "http://{}:{}".format(*listeners[0].socket.getsockname())
        served = CommandConfig(
            name=MODEL, cmd=("serve",), proxy=model_url, preload=True, dialects=dialects, **(model or {})
        )
        config = Config(models=(served,), api_keys=keys, port=0, **settings)
        link = Link()
        start = control.RunDispatcher(control.pack(config), str(directory), LINK_KEY, 1, expected=())
        dispatcher = DispatcherRole(link, start)
        nursery.start_soon(dispatcher.run)
        with trio.fail_after(20):
            await link.ready.wait()
            urls = [await _start_front(nursery, directory, config, f"front {n}") for n in range(fronts)]
        yield Composed(urls, dispatcher._fleet, model_url)
        nursery.cancel_scope.cancel()


async def _start_front(nursery: trio.Nursery, directory: Path, config: Config, name: str) -> str:
    link = NoSupervisor()
    start = control.RunFront(b"", str(directory), LINK_KEY, name)
    front = FrontRole(link, start, of_one_front(config), RequestLog(TenantNames(config)))
    nursery.start_soon(front.run)
    await link.ready.wait()
    return "http://{}:{}".format(*front.address)


async def _answer(stream: trio.SocketStream) -> None:
    """Answer each request on a connection with the same JSON; one with the slow prompt never."""
    async with stream:
        received = b""
        while data := await stream.receive_some(1 << 16):
            received += data
            head, end, body = received.partition(b"\r\n\r\n")
            if not end or len(body) < _length(head.split(b"\r\n")):
                continue
            if SLOW.encode() in body:
                await trio.sleep_forever()
            received = b""
            about = b"Content-Type: application/json\r\nContent-Length: %d" % len(ANSWER)
            await stream.send_all(b"HTTP/1.1 200 OK\r\n%s\r\n\r\n%s" % (about, ANSWER))


def _length(lines: Sequence[bytes]) -> int:
    lengths = [int(line.split(b":")[1]) for line in lines if line.lower().startswith(b"content-length:")]
    return lengths[0] if lengths else 0
