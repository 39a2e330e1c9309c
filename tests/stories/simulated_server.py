"""A real server except for sockets and models: the fleet is a fake, and nodes use a virtual clock."""

import json
from pathlib import Path
from typing import Any

import trio

from fairlead.base.config import ApiKey, Config, ModelConfig, QueueConfig, demonstration_model
from fairlead.language.text.model import TextModel
from fairlead.nodes.limits import NodeLimits
from fairlead.server.app import Composition
from fairlead.server.console.announcer import LogAnnouncer
from fake_fleet import FakeFleet
from fake_nodes import LIMITS, TimedNode
from server.routes.conftest import Client, Reply

MODEL = TextModel.load(demonstration_model(), name="m")


class SimulatedServer:
    """A server with some nodes; requests are sent over ASGI, as a tenant."""

    def __init__(
        self,
        nursery: trio.Nursery,
        *nodes: TimedNode,
        seats: int = 1,
        request_timeout_s: float = 600.0,
        api_keys: tuple[ApiKey, ...] = (),
        **queue: Any,
    ) -> None:
        config = Config(
            models=(ModelConfig(path=Path(), name="m"),),
            api_keys=api_keys,
            queue=QueueConfig(**queue),
            request_timeout_s=request_timeout_s,
        )
        self._composition = Composition(config, LogAnnouncer(key_needed=False), make_fleet=_fake_fleet)
        self.dispatcher, self.nodes = self._composition.dispatcher, self._composition.nodes
        for number, node in enumerate(nodes):
            node.id = f"node {number}"
            self.nodes.report(node, NodeLimits(seats=seats, max_model_len=LIMITS.max_model_len))
        self.answered: list[str] = []
        self.nursery = nursery
        self._has_started = trio.Event()
        nursery.start_soon(self._run)

    async def _run(self) -> None:
        async with self._composition.running(lambda _models: None) as app:
            self.client = Client(app, None)
            self._has_started.set()
            await trio.sleep_forever()

    async def request_completion(
        self, tenant: str = "A", *, disconnected: trio.Event | None = None, **body: Any
    ) -> Reply:
        """Request a completion; append the tenant to `answered` when the response is complete."""
        await self._has_started.wait()
        content = {"prompt": "hello", "max_tokens": 10, "user": tenant} | body
        headers = body.pop("headers", {})
        content.pop("headers", None)
        reply = await self.client.send(
            "POST",
            "/v1/completions",
            json.dumps(content).encode(),
            headers=headers,
            disconnected=disconnected,
        )
        self.answered.append(tenant)
        return reply

    async def send_in_order(self, *tenants: str, **body: Any) -> list[Reply]:
        """Send one request per tenant, each once the last one waits or runs; return the list for replies."""
        replies: list[Reply] = []

        async def one(tenant: str) -> None:
            replies.append(await self.request_completion(tenant, **body))

        for tenant in tenants:
            self.nursery.start_soon(one, tenant)
            await trio.testing.wait_all_tasks_blocked()
        return replies

    async def queue(self) -> dict[str, float]:
        """Return the body of `GET /queue`."""
        await self._has_started.wait()
        return dict((await self.client.get("/queue")).json)


def _fake_fleet(*_: object, **__: object) -> FakeFleet:
    return FakeFleet(["m"], texts={"m": MODEL})
