"""The whole parent with two tenants and two nodes, one of which sends what the test chooses.

Fleet, queue, gateway and application are real, the sockets are simulated, and the clock is virtual. `liar`
has the model `lies`, `honest` has `truth`. Both are probed, and report to be Fairleads with one seat.
"""

import json
import math
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import msgspec
import trio
from prometheus_client.exposition import generate_latest

from fairlead.base.config import ApiKey, Config, KeyLimits, Limits, NodeConfig, QueueConfig
from fairlead.generation.gateway import Gateway
from fairlead.generation.metrics.job_metrics import FrontCounts
from fairlead.generation.metrics.metrics import ServerMetrics
from fairlead.generation.metrics.scope import Scope
from fairlead.generation.metrics.snapshot import Overview
from fairlead.generation.metrics.tenants import TenantNames
from fairlead.generation.services import Services
from fairlead.router.dispatch.dispatcher import Dispatcher
from fairlead.router.fleet.fleet import Fleet
from fairlead.router.fleet.node_registry import NodeRegistry
from fairlead.server.routes.routes import Application
from nodes.scripted import ScriptedServer, full_response, scripted

CHAT = "/v1/chat/completions"
TOKENS_PER_MINUTE = 1_000_000
TRUE_TOKENS = 3
HONEST_RESPONSE = full_response(
    b'{"choices": [{"message": {"content": "so"}}], "usage": {"completion_tokens": 3}}'
)
LIMITS = KeyLimits(tokens_per_minute=TOKENS_PER_MINUTE, requests_per_minute=1000)


class Reply(msgspec.Struct):
    """A response as a client received it."""

    status: int
    headers: dict[str, str]
    body: bytes


class MisreportingFleet:
    """The server under test. `says` maps paths to what `liar` sends; on other paths it acts as `honest`."""

    def __init__(self, server: ScriptedServer) -> None:
        self.responses: dict[str, Iterable[bytes | float]] = {}
        self.server = server
        self.keys = {name: ApiKey(f"sk-{name}", user=name, limits=LIMITS) for name in ("ann", "bob")}
        config = Config(
            models=(),
            api_keys=tuple(self.keys.values()),
            queue=QueueConfig(fairness="tokens", estimate="quantile"),
            limits=Limits(),
            nodes=(
                NodeConfig(id="liar", url="http://liar:1"),
                NodeConfig(id="honest", url="http://honest:1", models=("truth",)),
            ),
        )
        self.dispatcher = Dispatcher(config.queue, random=Random(0))
        nodes = NodeRegistry(self.dispatcher.scheduler)
        self.fleet = Fleet(config, self.dispatcher, nodes, read=_no_model)
        self.gateway = Gateway(self.dispatcher, nodes, request_timeout_s=600)
        self.services = Services(
            config=config,
            gateway=self.gateway,
            fleet=self.fleet,
            models={},
            aliases={},
            ready=lambda: True,
            queue_statistics=lambda: msgspec.structs.asdict(self.dispatcher.statistics()),
            estimate=self.dispatcher.estimate,
        )
        self.app = Application(self.services)
        self._overview = Overview(
            self.services.fleet,
            lambda: FrontCounts(self.services.gateway.statistics()),
            ready=self.services.ready,
            queue_statistics=self.services.queue_statistics,
        )
        self._metrics = ServerMetrics(self._overview, tenants=TenantNames(config))
        server.answer = self._answer

    def _answer(self, request: bytes) -> Iterable[bytes | float]:
        line, _, rest = request.partition(b"\r\n")
        path = line.split(b" ")[1].decode()
        if b"Host: liar" in rest and path in self.responses:
            return self.responses[path]
        if path == "/v1/models":
            return [full_response(b'{"data": [{"id": "lies"}]}')]
        return [full_response(b'[{"model": "lies", "seats": 1}]') if path == "/running" else HONEST_RESPONSE]

    # Clients -----------------------------------------------------------------------------------------

    async def post_chat(self, tenant: str, model: str, **fields: Any) -> Reply:
        """Send a tenant's chat request and return the response."""
        body = {"model": model, "messages": [], "max_tokens": 10, **fields}
        return await self.post(CHAT, json.dumps(body).encode(), self.keys[tenant].key)

    async def post(self, path: str, body: bytes, key: str) -> Reply:
        """Send a request to the application."""
        reply = Reply(0, {}, b"")

        async def receive() -> dict[str, Any]:
            nonlocal body
            if body:
                message, body = {"type": "http.request", "body": body, "more_body": False}, b""
                return message
            await trio.sleep_forever()
            raise AssertionError

        async def send(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                reply.status = message["status"]
                reply.headers = {name.decode(): value.decode() for name, value in message["headers"]}
            else:
                reply.body += message["body"]

        scope = {
            "type": "http",
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(b"authorization", f"Bearer {key}".encode())],
            "client": ("192.0.2.7", 4711),
            "server": ("127.0.0.1", 8000),
            "state": {"limits": Limits()},
            "extensions": {},
        }
        await self.app(scope, receive, send)
        return reply

    # Counts ------------------------------------------------------------------------------------------

    def account(self, tenant: str) -> tuple[Any, ...]:
        """Return a tenant's counts except its waiting time: tokens, requests, and its count in the queue."""
        metrics = self.gateway.statistics().tenants.get(tenant)
        counts = None if metrics is None else (metrics.jobs, metrics.prompt_tokens, metrics.generated_tokens)
        return counts, self.spent(tenant), self.dispatcher.scheduler._queue._kernel.counter(tenant)

    def spent(self, tenant: str) -> int:
        """Return the tokens taken from a tenant's limit in the last minute; it must have no running job."""
        quota = self.app._jobs.quotas._quotas.of(self.keys[tenant])
        assert quota.running == 0
        return TOKENS_PER_MINUTE - quota.tokens.remaining(trio.current_time())

    def check(self) -> None:
        """Check that all statuses and metrics can be encoded, and that their numbers are possible."""
        status = next(status for status in self.fleet.nodes() if status.id == "liar")
        assert 0 <= status.seats <= 4096
        load = status.remote.load
        assert load is None or 0.0 <= load < math.inf
        assert len(status.models) <= 1000
        assert all(name.isprintable() and 0 < len(name) <= 256 for name in status.models)
        assert status.problem is None or len(status.problem) < 300
        counts = self.dispatcher.statistics()
        assert (counts.running, counts.waiting) == (0, 0)
        assert 0 <= counts.seats <= 4096 + 1
        assert json.loads(msgspec.json.encode(self._overview.snapshot()))
        for tenant in self.keys:
            estimate = self.dispatcher.estimator.for_newcomer("truth", tenant, 1)
            assert (estimate.position, estimate.estimated_wait_s) == (0, 0)
        for line in generate_latest(self._metrics.pull(Scope())).decode().splitlines():
            if not line.startswith("#"):
                assert 0.0 <= float(line.rpartition(" ")[2]) < 1e12, line


@asynccontextmanager
async def misreporting_fleet() -> AsyncIterator[MisreportingFleet]:
    """Run a fleet with all nodes up."""
    with scripted(lambda _request: []) as server:
        made = MisreportingFleet(server)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(made.dispatcher.run)
            await nursery.start(made.fleet.run)
            await trio.sleep(0.1)
            yield made
            nursery.cancel_scope.cancel()


async def _no_model(_config: Any) -> Any:
    raise AssertionError("there is none")
