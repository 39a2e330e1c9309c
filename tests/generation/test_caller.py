"""Callers that are no HTTP requests: their jobs have the same pipeline, queue and nodes."""

import json
from pathlib import Path
from random import Random

import pytest
import trio

from fairlead.base.config import ApiKey, Config, Limits, ModelConfig, QueueConfig
from fairlead.base.errors import Forbidden, NoQueue
from fairlead.dialects.openai.chat import ChatDialect
from fairlead.generation.caller import Caller
from fairlead.generation.gateway import Gateway
from fairlead.generation.job_service import JobService
from fairlead.generation.pipeline import GenerationPipeline
from fairlead.generation.services import Services
from fairlead.router.dispatch.dispatcher import Dispatcher
from fairlead.router.fleet.node_registry import NodeRegistry
from fake_fleet import FakeFleet
from fake_nodes import LIMITS, TimedNode

SERVICE_S = 10
BODY = b'{"model": "small", "messages": [{"role": "user", "content": "hello"}], "user": "nobody"}'


class Server:
    """A queue, one node with one seat, and the pipeline, without HTTP."""

    def __init__(self, model) -> None:
        self.dispatcher = Dispatcher(QueueConfig(), random=Random(0))
        self.node = TimedNode("small", service_s=SERVICE_S)
        self._nodes = NodeRegistry(self.dispatcher.scheduler)
        services = Services(
            config=Config(models=(ModelConfig(path=Path(), name="small"),)),
            gateway=Gateway(self.dispatcher, self._nodes, request_timeout_s=60),
            fleet=FakeFleet(["small"]),
            models={"small": model},
            aliases={},
            ready=lambda: True,
            estimate=self.dispatcher.estimate,
            queue_statistics=dict,
        )
        self._pipeline = GenerationPipeline(JobService(services))

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        self._nodes.report(self.node, LIMITS)
        task_status.started()
        await self.dispatcher.run()

    async def answer(self, caller: Caller) -> list[bytes]:
        """Return the pieces of the answer."""
        dialect = ChatDialect()
        job, context = await self._pipeline.prepare(
            caller, dialect, BODY, dialect.read_envelope(BODY, Limits())
        )
        body = (await self._pipeline.answer(caller, dialect, job, context)).body
        return [body] if isinstance(body, bytes) else [piece async for piece in body]


@pytest.fixture
async def server(model, nursery, autojump_clock):
    server = Server(model)
    await nursery.start(server.run)
    return server


async def test_caller_without_a_request_waits_in_the_queue_and_gets_its_answer(server, nursery):
    admitted, answers = [], []

    async def ask(tenant: str) -> None:
        caller = Caller(nursery=nursery, request_id="same", tenant=tenant, admitted=admitted.append)
        answers.append((await server.answer(caller), trio.current_time()))

    began_at = trio.current_time()
    async with trio.open_nursery() as asking:
        asking.start_soon(ask, "batch")
        asking.start_soon(ask, "other")
    assert sorted(server.node.served) == ["batch", "other"]
    assert len({job.request_id for job in admitted}) == len(admitted)
    assert [json.loads(b"".join(pieces))["choices"][0]["message"]["content"] for pieces, _ in answers] == [
        "first last",
        "first last",
    ]
    assert [at - began_at for _, at in answers] == [
        pytest.approx(SERVICE_S, abs=1),
        pytest.approx(2 * SERVICE_S, abs=1),
    ]


async def test_caller_gets_the_bytes_as_they_come_if_it_wants_them(server, nursery):
    caller = Caller(nursery=nursery, request_id="1", tenant="batch", streams=True)
    pieces = await server.answer(caller)
    assert len(pieces) > 1
    assert pieces[0].startswith(b"data: ")
    assert b"".join(pieces).endswith(b"data: [DONE]\n\n")


async def test_cancelled_nursery_of_a_caller_gives_its_seat_to_the_next_one(server, nursery):
    with trio.move_on_after(1):
        async with trio.open_nursery() as own:
            await server.answer(Caller(nursery=own, request_id="1", tenant="batch", streams=True))
    assert server.node.running == 0
    began_at = trio.current_time()
    await server.answer(Caller(nursery=nursery, request_id="2", tenant="batch"))
    assert trio.current_time() - began_at == pytest.approx(SERVICE_S, abs=1)


async def test_limits_of_a_caller_hold_without_headers(server, nursery):
    limited = ApiKey(key="k" * 16, models=("another",))
    with pytest.raises(Forbidden):
        await server.answer(Caller(nursery=nursery, request_id="1", tenant="batch", api_key=limited))
    low = ApiKey(key="k" * 16, priority="low")
    with pytest.raises(Forbidden, match="priority"):
        await server.answer(
            Caller(nursery=nursery, request_id="2", tenant="batch", api_key=low, priority="high")
        )
    nursery.start_soon(server.answer, Caller(nursery=nursery, request_id="3", tenant="batch"))
    await trio.sleep(1)
    with pytest.raises(NoQueue):
        await server.answer(Caller(nursery=nursery, request_id="4", tenant="batch", no_queue=True))
