"""Failover of a streamed response from our engine to another server, and the other way round."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random

import pytest
import trio

from fairlead.base.config import Config, ModelConfig, QueueConfig
from fairlead.base.errors import NodeFailed
from fairlead.base.job import Delta, Job
from fairlead.generation.gateway import Gateway
from fairlead.generation.services import Services
from fairlead.nodes.limits import NodeLimits
from fairlead.nodes.remote_node import RemoteNode
from fairlead.nodes.streams.sink import Sink
from fairlead.router.dispatch.dispatcher import Dispatcher
from fairlead.router.fleet.node_registry import NodeRegistry
from fairlead.server.routes.routes import Application
from fake_fleet import FakeFleet
from nodes.listening import stub, upstream_for
from nodes.stub_server import WORDS, StubServer, text, word
from server.routes.raw_http import Answer, post, serving

NAME = "small"


class Engine:
    """Generates the stub server's words, one token each; fails after `fails_after` of them."""

    def __init__(self, fails_after: int = WORDS + 1) -> None:
        self.id = "engine"
        self.models = frozenset({NAME})
        self.jobs = 0
        self.requested = trio.Event()
        self._fails_after = fails_after

    @asynccontextmanager
    async def generate(
        self, job: Job, into: Sink, *, grant: object = None, seats: object = None
    ) -> AsyncIterator[None]:
        self.jobs += 1
        self.requested.set()
        assert job.prompts
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._generate_words, into)
            yield
            nursery.cancel_scope.cancel()

    async def _generate_words(self, into: Sink) -> None:
        for number in range(min(WORDS, self._fails_after)):
            into.put(Delta(0, word(number), [number + 1]))
            await trio.sleep(0.01)  # so that each is read separately
        if self._fails_after <= WORDS:
            into.fail(NodeFailed("the engine is gone"))
        else:
            into.put(Delta(0, "", [0], finish_reason="stop"))


class EngineAndStub:
    """A server with an engine and a remote node for the same model. The node named `first` is up first."""

    def __init__(self, model, engine: Engine, remote_stub: StubServer) -> None:
        self.dispatcher = Dispatcher(QueueConfig(), random=Random(0))
        self.nodes = NodeRegistry(self.dispatcher.scheduler)
        self._engine = engine
        self._stub = remote_stub
        self._remote = RemoteNode(
            "elsewhere", upstream_for(remote_stub), self.nodes.report, names={NAME: NAME}, seats=4
        )
        self.app = Application(
            Services(
                config=Config(models=(ModelConfig(path=Path(), name=NAME),)),
                gateway=Gateway(self.dispatcher, self.nodes, request_timeout_s=60),
                fleet=FakeFleet([NAME], [NAME]),
                models={NAME: model},
                aliases={},
                ready=lambda: True,
                estimate=self.dispatcher.estimate,
                queue_statistics=dict,
            )
        )

    async def post_chat(self, first: str, body: dict) -> Answer:
        async with trio.open_nursery() as nursery, serving(self.app) as server:
            nursery.start_soon(self.dispatcher.run)
            if first == "engine":
                self._engine_up()
                nursery.start_soon(self._after_engine)
            else:
                self._remote.came_up()
                nursery.start_soon(self._after_stub)
            client = await server.connect()
            answer = await client.fetch(post(json.dumps(body).encode(), path="/v1/chat/completions"))
            nursery.cancel_scope.cancel()
        assert self.dispatcher.statistics().running == 0
        return answer

    def _engine_up(self) -> None:
        self.nodes.report(self._engine, NodeLimits(seats=4, max_model_len=4096))

    async def _after_engine(self) -> None:
        await self._engine.requested.wait()
        self._remote.came_up()

    async def _after_stub(self) -> None:
        while not self._stub.jobs:  # noqa: ASYNC110  # the stub sets no event
            await trio.sleep(0.001)
        self._engine_up()


def chat_body(**fields: object) -> dict:
    return {
        "model": NAME,
        "messages": [{"role": "user", "content": "hello"}],
        "stream": True,
        "temperature": 0,
        **fields,
    }


def text_of(answer: Answer) -> str:
    events = [event.removeprefix(b"data: ") for event in answer.body.split(b"\n\n") if event]
    assert events.pop() == b"[DONE]"
    deltas = [choice["delta"] for event in events for choice in json.loads(event)["choices"]]
    assert [delta["role"] for delta in deltas if "role" in delta] == ["assistant"]
    assert answer.body.replace(b": ", b":").count(b'"finish_reason":"stop"') == 1
    return "".join(delta.get("content") or "" for delta in deltas)


@pytest.mark.parametrize("fails_after", [1, 4, WORDS])
async def test_another_server_completes_a_stream_that_our_engine_started(model, fails_after):
    engine = Engine(fails_after)
    async with stub() as remote_stub:
        answer = await EngineAndStub(model, engine, remote_stub).post_chat("engine", chat_body())
        assert (engine.jobs, len(remote_stub.jobs)) == (1, 1)
    assert answer.is_complete
    assert text() == text_of(answer)


@pytest.mark.parametrize("after", [2, 4, WORDS])
async def test_our_engine_completes_a_stream_that_another_server_started(model, after):
    engine = Engine()
    async with stub() as remote_stub:
        remote_stub.behaviour = {"how": "reset", "after": after, "delay_s": 0.01}
        answer = await EngineAndStub(model, engine, remote_stub).post_chat("stub", chat_body())
        assert (engine.jobs, len(remote_stub.jobs)) == (1, 1)
    assert answer.is_complete
    assert text() == text_of(answer)


async def test_failed_stream_that_cannot_be_repeated_ends_with_an_error(model):
    engine = Engine(4)
    async with stub() as remote_stub:
        answer = await EngineAndStub(model, engine, remote_stub).post_chat("engine", chat_body(temperature=1))
        assert len(remote_stub.jobs) == 0
    assert not answer.is_complete
    assert json.loads(answer.body.split(b"data: ")[-1])["error"]["code"] == "node_failed"


async def test_stream_with_a_different_repetition_ends_with_an_error(model):
    engine = Engine(4)
    async with stub() as remote_stub:
        remote_stub.behaviour = {"words": 2}
        answer = await EngineAndStub(model, engine, remote_stub).post_chat(
            "engine", chat_body(seed=1, temperature=1)
        )
    assert not answer.is_complete
    assert "did not repeat" in json.loads(answer.body.split(b"data: ")[-1])["error"]["message"]
