"""The server without sockets and models: real routes, gateway and dispatcher, nodes on a virtual clock."""

import json
from pathlib import Path

import trio

from api.conftest import Client, Reply
from fairlead.api.routes import create_app
from fairlead.api.services import Services
from fairlead.config import ApiKey, Config, ModelConfig, QueueConfig, demonstration_model
from fairlead.dispatch.dispatcher import Dispatcher
from fairlead.gateway import Gateway
from fairlead.nodes.node import NodeLimits
from fairlead.text.model import TextModel
from fake_fleet import FakeFleet
from fake_nodes import LIMITS, TimedNode

MODEL = TextModel.load(demonstration_model(), name="m")


class Desk:
    """A server with some nodes; `ask` speaks HTTP to it (ASGI) for a tenant."""

    def __init__(
        self,
        nursery: trio.Nursery,
        *nodes: TimedNode,
        seats: int = 1,
        request_timeout_s: float = 600.0,
        api_keys: tuple[ApiKey, ...] = (),
        **queue: object,
    ) -> None:
        config = Config(
            models=(ModelConfig(path=Path(), name="m"),), api_keys=api_keys, queue=QueueConfig(**queue)
        )
        self.dispatcher = Dispatcher(config.queue)
        self.gateway = Gateway(self.dispatcher, request_timeout_s=request_timeout_s)
        for number, node in enumerate(nodes):
            node.id = f"node {number}"
            self.dispatcher.node_up(node, NodeLimits(seats=seats, max_model_len=LIMITS.max_model_len))
        services = Services(
            config=config,
            gateway=self.gateway,
            fleet=FakeFleet(["m"]),
            models={"m": MODEL},
            aliases={},
            ready=lambda: True,
            estimate=lambda *who: {
                field: getattr(self.dispatcher.forecast(*who), field)
                for field in ("position", "estimated_wait_s", "estimated_wait_p90_s")
            },
            queue_statistics=lambda: {
                field: getattr(self.dispatcher.statistics(), field)
                for field in self.dispatcher.statistics().__struct_fields__
            },
        )
        self.client = Client(create_app(services), None)
        self.answered: list[str] = []
        self.nursery = nursery
        nursery.start_soon(self.dispatcher.run)

    async def ask(self, tenant: str = "A", *, left: trio.Event | None = None, **body: object) -> Reply:
        """Ask for a completion; note who was answered, in which order."""
        content = {"prompt": "hello", "max_tokens": 10, "user": tenant} | body
        headers = body.pop("headers", {})
        content.pop("headers", None)
        reply = await self.client.send(
            "POST", "/v1/completions", json.dumps(content).encode(), headers=headers, left=left
        )
        self.answered.append(tenant)
        return reply

    async def come(self, *tenants: str, **body: object) -> list[Reply]:
        """Let each tenant come after the one before is at its place; return where their replies will be."""
        replies: list[Reply] = []

        async def one(tenant: str) -> None:
            replies.append(await self.ask(tenant, **body))

        for tenant in tenants:
            self.nursery.start_soon(one, tenant)
            await trio.testing.wait_all_tasks_blocked()
        return replies

    async def queue(self) -> dict[str, float]:
        """`GET /queue`."""
        return (await self.client.get("/queue")).json
