"""The engine node over a real child process with a fake model: answers, restarts, and nothing left behind."""

import itertools
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from fairlead.config import QueueConfig, demonstration_model
from fairlead.dispatch.dispatcher import Dispatcher
from fairlead.errors import FairleadError, LoadFailed, NodeFailed
from fairlead.gateway import Gateway
from fairlead.job import Job, Sampling
from fairlead.nodes.deltas import Deltas
from fairlead.nodes.engine_node import EngineNode
from fairlead.nodes.node import Node, NodeLimits
from fairlead.text.model import TextModel
from fairlead.worker.wire import WorkerSpec

FAKE_CHILD = (sys.executable, str(Path(__file__).parent.parent / "worker" / "fake_child.py"))
MODEL = "m"
_numbers = itertools.count()


class Reports:
    """What a node told its listener, in order."""

    def __init__(self) -> None:
        self.heard: list[str] = []
        self.news = trio.Event()

    def node_up(self, node: Node, limits: NodeLimits) -> None:
        self._hear("up")

    def node_down(self, node: Node) -> None:
        self._hear("down")

    def load_failed(self, node: Node, error: FairleadError) -> None:
        self._hear("load failed")

    def _hear(self, what: str) -> None:
        self.heard.append(what)
        self.news.set()
        self.news = trio.Event()

    async def until(self, *heard: str) -> None:
        with trio.fail_after(30):
            while tuple(self.heard) != heard:
                await self.news.wait()


@pytest.fixture(scope="module")
def model() -> TextModel:
    return TextModel.load(demonstration_model(), name=MODEL)


@asynccontextmanager
async def running(model: TextModel, reports: Reports, options: str = "") -> AsyncIterator[EngineNode]:
    node = EngineNode(model, WorkerSpec(path=f"fake:{options}"), reports, command=FAKE_CHILD)
    async with trio.open_nursery() as nursery:
        with trio.fail_after(30):
            await nursery.start(node.run)
        yield node
        nursery.cancel_scope.cancel()


def job(tokens: int, *, n: int = 1, prompts: int = 1, stop: tuple[str, ...] = ()) -> Job:
    prompt = tuple(list(range(10, 20 + number)) for number in range(prompts))
    sampling = Sampling(max_tokens=tokens, seed=1)
    return Job(
        id=f"job {next(_numbers)}", tenant="A", model=MODEL, prompts=prompt, sampling=sampling, n=n, stop=stop
    )


async def whole(deltas: Deltas) -> dict[int, list[int]]:
    tokens: dict[int, list[int]] = {}
    with trio.fail_after(30):
        while taken := await deltas.take():
            for delta in taken:
                tokens.setdefault(delta.index, []).extend(delta.token_ids)
    return tokens


async def test_each_choice_of_each_prompt_gets_its_own_answer(model: TextModel):
    async with running(model, Reports()) as node, node.generate(job(5, n=2, prompts=2)) as deltas:
        tokens = await whole(deltas)
    assert {0: 5, 1: 5, 2: 5, 3: 5} == {index: len(ids) for index, ids in tokens.items()}
    assert tokens[0] == tokens[1]  # the fake model knows no seeds
    assert tokens[0] != tokens[2]


async def test_a_stop_string_ends_the_answer_and_the_sequence(model: TextModel):
    async with running(model, Reports(), "delay_ms=2") as node:
        async with node.generate(job(30)) as deltas:
            text = "".join([delta.text for taken in [await _take_all(deltas)] for delta in taken])
        stop = text[len(text) // 2 :][:3]
        async with node.generate(job(100_000, stop=(stop,))) as deltas:
            cut = await _take_all(deltas)
        assert text[: text.index(stop)] == "".join(delta.text for delta in cut)
        assert ("stop", stop) == (cut[-1].finish_reason, cut[-1].stop_reason)
        await _until_idle(node)


async def test_leaving_the_block_frees_the_sequences(model: TextModel):
    async with running(model, Reports(), "delay_ms=2") as node:
        for tokens in (1, 3, 100_000):
            async with node.generate(job(tokens, n=3)) as deltas:
                await deltas.started()
        await _until_idle(node)
        assert (0, node.status().blocks_total) == (node.status().sequences, node.status().blocks_free)


async def test_a_dead_child_fails_its_jobs_and_comes_back(model: TextModel):
    reports = Reports()
    async with running(model, reports, "delay_ms=2") as node:
        first = node.pid
        async with node.generate(job(100_000)) as deltas:
            await deltas.started()
            os.kill(first, signal.SIGKILL)
            with pytest.raises(NodeFailed, match="SIGKILL"):
                await whole(deltas)
        await reports.until("up", "down", "up")
        assert first != node.pid
        async with node.generate(job(4)) as deltas:
            assert 4 == len((await whole(deltas))[0])
        assert 1 == node.status().restarts


async def test_the_seat_of_a_dead_child_is_given_to_nobody(model: TextModel):
    dispatcher = Dispatcher(QueueConfig(capacity=10))
    gateway = Gateway(dispatcher, request_timeout_s=60)
    failures: list[str] = []
    done: list[int] = []
    streaming = trio.Event()

    async def ask(tokens: int) -> None:
        async with trio.open_nursery() as exchange:
            answer = await exchange.start(gateway.serve, job(tokens))
            streaming.set()
            try:
                done.append(len((await whole(answer.deltas))[0]))
            except NodeFailed as error:
                failures.append(error.code)

    async with running(model, dispatcher, "delay_ms=2,slots=1") as node, trio.open_nursery() as clients:
        clients.start_soon(ask, 100_000)
        with trio.fail_after(30):
            await streaming.wait()
        for _ in range(3):
            clients.start_soon(ask, 2)
        await trio.testing.wait_all_tasks_blocked()
        os.kill(node.pid, signal.SIGKILL)
    assert (["node_failed"], [2, 2, 2]) == (failures, done)


async def test_a_first_load_that_fails_is_raised(model: TextModel):
    node = EngineNode(model, WorkerSpec(path="fake:fail_load"), Reports(), command=FAKE_CHILD)
    with pytest.raises(LoadFailed, match="no such fake model"):
        await node.run()


async def test_a_node_that_is_not_up_refuses_to_generate(model: TextModel):
    node = EngineNode(model, WorkerSpec(path="fake:"), Reports(), command=FAKE_CHILD)
    with pytest.raises(NodeFailed):
        async with node.generate(job(1)):
            raise AssertionError("generated without a child")


async def test_the_child_ends_with_the_node(model: TextModel):
    async with running(model, Reports()) as node:
        pid = node.pid
    assert not Path(f"/proc/{pid}").exists()


async def _take_all(deltas: Deltas) -> list:
    taken = []
    with trio.fail_after(30):
        while more := await deltas.take():
            taken += more
    return taken


async def _until_idle(node: EngineNode) -> None:
    with trio.fail_after(30):
        for _ in itertools.count():
            status = node.status()
            if not status.sequences and status.blocks_free == status.blocks_total:
                return
            await trio.sleep(0.002)
