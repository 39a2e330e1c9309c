"""Fronts' nodes for an engine that another node has started: the same answers, and failures of their own."""

import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
import trio

from engine.worker import fake_child
from fairlead.base.config import ModelConfig, demonstration_model
from fairlead.base.errors import ContextLengthExceeded, InvalidRequest, NodeFailed, StaleGrant
from fairlead.base.grant import Grant
from fairlead.base.job import Job, Sampling
from fairlead.base.messages import WorkerSpec
from fairlead.language.text.model import TextModel
from fairlead.nodes.engine_node import EngineNode, attached_engine, worker_spec
from fairlead.nodes.engines.client import COMMAND, Worker
from fairlead.nodes.streams.deltas import Deltas
from nodes.test_engine_node import FAKE_CHILD, MODEL, Reports, job, whole

GREEDY = Sampling(max_tokens=40, temperature=0.0)


@pytest.fixture(scope="module")
def model() -> TextModel:
    return TextModel.load(demonstration_model(), name=MODEL)


@asynccontextmanager
async def started(spec: WorkerSpec, command: Sequence[str] = FAKE_CHILD) -> AsyncIterator[Worker]:
    worker = Worker(spec, command=command)
    async with trio.open_nursery() as nursery:
        with trio.fail_after(120):
            await nursery.start(worker.run)
        yield worker
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def attached(
    model: TextModel, spec: WorkerSpec, reports: Reports, *, name: str = "front"
) -> AsyncIterator[EngineNode]:
    node = attached_engine(model, spec, reports, name=name)
    async with trio.open_nursery() as nursery:
        with trio.fail_after(60):
            await nursery.start(node.run)
        yield node
        nursery.cancel_scope.cancel()


async def texts(node: EngineNode, submitted: Job, grant: Grant) -> list[str]:
    deltas = Deltas(submitted.sequences)
    answers = [""] * submitted.sequences
    async with node.generate(submitted, deltas, grant=grant):
        with trio.fail_after(60):
            while taken := await deltas.take():
                for delta in taken:
                    answers[delta.index] += delta.text
    return answers


async def test_two_fronts_get_the_same_text_as_a_single_process_and_fail_with_the_engine(model, tmp_path):
    config = ModelConfig(path=demonstration_model(), name=MODEL)
    spec = msgspec.structs.replace(worker_spec(config), listen=str(tmp_path / "engine.sock"))
    prompts = [tuple(model.tokenizer.encode(text)) for text in ("Once upon a time", "The queue is")]
    jobs = [job(1, prompts=1) for _ in prompts]
    jobs = [
        msgspec.structs.replace(each, prompts=(list(prompt),), sampling=GREEDY)
        for each, prompt in zip(jobs, prompts, strict=True)
    ]
    answers: dict[tuple[str, int], list[str]] = {}
    failed: list[str] = []
    reports = {"a": Reports(), "b": Reports()}
    ready = {"a": trio.Event(), "b": trio.Event()}

    async def use(front: str, numbers: int) -> None:
        try:
            async with attached(model, spec, reports[front], name=front) as node:
                async with trio.open_nursery() as nursery:

                    async def generate(number: int) -> None:
                        grant = Grant(1, numbers + number)
                        answers[front, number] = await texts(node, jobs[number], grant)

                    for number in range(len(jobs)):
                        nursery.start_soon(generate, number)
                assert node.status().seats == seats
                deltas = Deltas(1)
                endless = msgspec.structs.replace(
                    jobs[0], sampling=Sampling(max_tokens=100_000, ignore_eos=True)
                )
                async with node.generate(endless, deltas, grant=Grant(1, numbers + 50)):
                    await deltas.started()
                    ready[front].set()
                    with pytest.raises(NodeFailed):
                        await whole(deltas)
                failed.append(front)
        except* NodeFailed:
            pass  # the node itself also ends with this error

    try:
        async with started(spec, COMMAND) as engine:
            async with attached(model, spec, Reports(), name="alone") as node:
                alone = [await texts(node, each, Grant(1, number)) for number, each in enumerate(jobs)]
                seats = node.status().seats
            async with trio.open_nursery() as nursery:
                nursery.start_soon(use, "a", 100)
                nursery.start_soon(use, "b", 200)
                for event in ready.values():
                    await event.wait()
                os.kill(engine.pid, signal.SIGKILL)
    except* NodeFailed:
        pass  # as above
    assert all(len(text) > 20 for (text,) in alone)
    for front in ("a", "b"):
        assert [answers[front, number] for number in range(len(jobs))] == alone
        assert reports[front].received == ["up", "down"]
    assert sorted(failed) == ["a", "b"]


async def test_leaving_the_block_frees_the_sequences_of_a_front(model, tmp_path):
    spec = WorkerSpec(path="fake:delay_ms=2", listen=str(tmp_path / "engine.sock"), watchdog_s=0.3)
    async with (
        started(spec) as engine,
        attached(model, spec, Reports()) as node,
    ):
        for number, tokens in enumerate((1, 3, 100_000)):
            deltas = Deltas(3)
            async with node.generate(job(tokens, n=3), deltas, grant=Grant(1, number)):
                await deltas.started()
        with trio.fail_after(60):
            while (counts := engine.statistics).running or counts.slots_free < node.status().seats:
                await trio.lowlevel.checkpoint()


async def test_stale_grant_fails_its_job_and_leaves_the_node_up(model, tmp_path):
    spec = WorkerSpec(path="fake:", listen=str(tmp_path / "engine.sock"))
    reports = Reports()
    async with started(spec), attached(model, spec, reports) as node:
        assert len(await texts(node, job(3), Grant(2, 1))) == 1
        with pytest.raises(StaleGrant):
            await texts(node, job(3, n=2), Grant(1, 2))
        assert reports.received == ["up"]
        assert len(await texts(node, job(3), Grant(2, 2))) == 1


async def test_limits_of_the_configuration_hold_for_fronts(model, tmp_path):
    spec = WorkerSpec(
        path="fake:", listen=str(tmp_path / "engine.sock"), max_input_tokens=10, max_output_tokens=3
    )
    async with started(spec), attached(model, spec, Reports()) as node:
        with pytest.raises(ContextLengthExceeded, match="limit of 10 tokens"):
            await texts(node, job(1, prompts=2), Grant(1, 1))
        deltas = Deltas(1)
        async with node.generate(job(100), deltas, grant=Grant(1, 2)):
            assert len((await whole(deltas))[0]) == 3


@pytest.mark.parametrize(
    ("prompt", "biases", "param"),
    [([1, fake_child.VOCABULARY], {}, "prompt"), ([1, 2], {fake_child.VOCABULARY: 1.0}, "logit_bias")],
)
async def test_token_that_only_the_loaded_network_is_known_to_lack_is_the_clients_fault(
    model, tmp_path, prompt, biases, param
):
    """The configuration may leave the size of the vocabulary to a default that only transformers knows."""
    spec = WorkerSpec(path="fake:", listen=str(tmp_path / "engine.sock"))
    sampling = Sampling(max_tokens=3, logit_bias=biases)
    refused = msgspec.structs.replace(job(3), prompts=(prompt,), sampling=sampling)
    async with started(spec), attached(model, spec, Reports()) as node:
        with pytest.raises(InvalidRequest, match="the model has no token 1000") as caught:
            await texts(node, refused, Grant(1, 1))
        assert caught.value.param == param
        assert len(await texts(node, job(3), Grant(1, 2))) == 1


async def test_node_that_is_not_attached_refuses_to_generate(model, tmp_path: Path):
    reports = Reports()
    node = attached_engine(model, WorkerSpec(path="", listen=str(tmp_path / "none")), reports, name="front")
    with pytest.raises(NodeFailed, match="not running"):
        await texts(node, job(1), Grant(1, 1))
    with pytest.raises(NodeFailed, match="cannot be reached"):
        await node.run()
    assert (reports.received, node.is_ready, node.gpu) == ([], False, None)
