"""The engine node with a real child process and a fake model: responses, limits, and no leftovers."""

import itertools
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from fairlead.base.config import KvCacheConfig, ModelConfig, demonstration_model
from fairlead.base.errors import ContextLengthExceeded, LoadFailed, NodeFailed
from fairlead.base.grant import Grant
from fairlead.base.job import Job, Sampling
from fairlead.base.messages import WorkerSpec
from fairlead.base.sequence_seats import SequenceSeats
from fairlead.language.text.model import TextModel
from fairlead.nodes.engine_node import EngineNode, own_engine, worker_spec
from fairlead.nodes.engines.sequence_client import SequenceClient
from fairlead.nodes.limits import NodeLimits
from fairlead.nodes.node import Node
from fairlead.nodes.streams.deltas import Deltas

FAKE_CHILD = (sys.executable, str(Path(__file__).parent.parent / "engine" / "worker" / "fake_child.py"))
MODEL = "m"
_numbers = itertools.count()


class Reports:
    """A listener that records what a node reports, in order."""

    def __init__(self) -> None:
        self.received: list[str] = []
        self.news = trio.Event()

    def __call__(self, node: Node, limits: NodeLimits | None) -> None:
        self.received.append("down" if limits is None else "up")
        self.news.set()
        self.news = trio.Event()

    async def until(self, *received: str) -> None:
        with trio.fail_after(60):
            while tuple(self.received) != received:
                await self.news.wait()


@pytest.fixture(scope="module")
def model() -> TextModel:
    return TextModel.load(demonstration_model(), name=MODEL)


@asynccontextmanager
async def running(
    model: TextModel, reports: Reports, options: str = "", **limits: object
) -> AsyncIterator[EngineNode]:
    spec = WorkerSpec(path=f"fake:{options}", **limits)
    node = own_engine(model, spec, reports, command=FAKE_CHILD)
    async with trio.open_nursery() as nursery:
        with trio.fail_after(60):
            await nursery.start(node.run)
        yield node
        nursery.cancel_scope.cancel()


def job(tokens: int, *, n: int = 1, prompts: int = 1, tenant: str = "A", **options: object) -> Job:
    prompt = tuple(list(range(10, 20 + number)) for number in range(prompts))
    sampling = Sampling(max_tokens=tokens, seed=1)
    return Job(
        id=f"job {next(_numbers)}",
        tenant=tenant,
        model=MODEL,
        prompts=prompt,
        sampling=sampling,
        n=n,
        **options,
    )


@asynccontextmanager
async def generate_deltas(node: EngineNode, submitted: Job) -> AsyncIterator[Deltas]:
    deltas = Deltas(submitted.sequences)
    async with node.generate(submitted, deltas, grant=Grant(1, 1)):
        yield deltas


async def whole(deltas: Deltas) -> dict[int, list[int]]:
    tokens: dict[int, list[int]] = {}
    with trio.fail_after(60):
        while taken := await deltas.take():
            for delta in taken:
                tokens.setdefault(delta.index, []).extend(delta.token_ids)
    return tokens


async def test_each_choice_of_each_prompt_gets_its_own_response(model: TextModel):
    async with running(model, Reports()) as node, generate_deltas(node, job(5, n=2, prompts=2)) as deltas:
        tokens = await whole(deltas)
    assert {index: len(ids) for index, ids in tokens.items()} == {0: 5, 1: 5, 2: 5, 3: 5}
    assert tokens[0] == tokens[1]  # the fake model ignores seeds
    assert tokens[0] != tokens[2]


async def test_stop_string_ends_the_response_and_the_sequence(model: TextModel):
    async with running(model, Reports(), "delay_ms=2") as node:
        async with generate_deltas(node, job(30)) as deltas:
            text = "".join([delta.text for taken in [await _take_all(deltas)] for delta in taken])
        stop = text[len(text) // 2 :][:3]
        async with generate_deltas(node, job(100_000, stop=(stop,))) as deltas:
            cut = await _take_all(deltas)
        assert text[: text.index(stop)] == "".join(delta.text for delta in cut)
        assert (cut[-1].finish_reason, cut[-1].stop_reason) == ("stop", stop)
        await _until_idle(node)


async def test_sequences_start_when_they_have_seats_and_the_answer_is_the_same(model: TextModel):
    submitted = job(9, n=2, prompts=2)
    async with running(model, Reports()) as node:
        async with generate_deltas(node, submitted) as deltas:
            at_once = await whole(deltas)
        ended = []

        def end(index: int) -> None:
            ended.append(index)
            if seats.begun < 4:
                seats.grant(seats.begun, Grant(1, 1 + seats.begun))

        seats, deltas = SequenceSeats(end), Deltas(4)
        for index in range(2):
            seats.grant(index, Grant(1, 1 + index))
        async with node.generate(submitted, deltas, grant=Grant(1, 1), seats=seats):
            assert await whole(deltas) == at_once
        assert sorted(ended)[:2] == [0, 1]
        assert len(ended) == 3  # the job's end gives the last seat back
        await _until_idle(node)


async def test_sequence_that_cannot_be_submitted_later_fails_its_job(model: TextModel):
    async with running(model, Reports()) as node:
        seats, deltas = SequenceSeats(), Deltas(2)
        seats.grant(0, Grant(0, 1))
        async with node.generate(job(100_000, n=2), deltas, grant=Grant(0, 1), seats=seats):
            node._connection.sequences.end()
            seats.grant(1, Grant(0, 2))
            with pytest.raises(NodeFailed):
                await whole(deltas)


async def test_leaving_the_block_frees_the_sequences(model: TextModel):
    async with running(model, Reports(), "delay_ms=2") as node:
        for tokens in (1, 3, 100_000):
            async with generate_deltas(node, job(tokens, n=3)) as deltas:
                await deltas.started()
        await _until_idle(node)
        status = node.status()
        assert (status.sequences, status.engine.blocks_free) == (0, status.engine.blocks_total)


async def test_failed_first_load_is_raised(model: TextModel):
    node = own_engine(model, WorkerSpec(path="fake:fail_load"), Reports(), command=FAKE_CHILD)
    with pytest.raises(LoadFailed, match="no such fake model"):
        await node.run()


async def test_node_that_is_not_up_refuses_to_generate(model: TextModel):
    node = own_engine(model, WorkerSpec(path="fake:"), Reports(), command=FAKE_CHILD)
    with pytest.raises(NodeFailed):
        async with generate_deltas(node, job(1)):
            raise AssertionError("generated without a child")


async def test_child_ends_with_the_node(model: TextModel):
    async with running(model, Reports()) as node:
        pid = node.pid
    assert not Path(f"/proc/{pid}").exists()


async def test_priority_and_timeout_of_a_job_reach_each_of_its_sequences(model: TextModel, monkeypatch):
    limits_received, left_s = [], []
    submit = SequenceClient.submit

    def spy(worker, prompt, sampling, receiver, **options):
        limits_received.append(options)
        left_s.append(trio.current_effective_deadline() - trio.current_time())
        return submit(worker, prompt, sampling, receiver, **options)

    monkeypatch.setattr(SequenceClient, "submit", spy)
    async with running(model, Reports()) as node:
        with trio.fail_after(60):
            async with generate_deltas(node, job(1, n=2, priority=2)) as deltas:
                await whole(deltas)
        async with generate_deltas(node, job(1)) as deltas:
            await whole(deltas)
    first, second, unbatched = limits_received
    assert first | {"timeout_s": 0} == second | {"timeout_s": 0}
    assert second["timeout_s"] <= first["timeout_s"]
    assert (first["priority"], first["salt"]) == (2, b"")
    assert left_s[0] <= first["timeout_s"] <= 60
    assert (unbatched["priority"], unbatched["timeout_s"]) == (1, None)


async def test_each_owner_of_cached_prefixes_has_a_salt_of_its_own(model: TextModel, monkeypatch):
    salts = []
    submit = SequenceClient.submit

    def spy(worker, *arguments, salt, **options):
        salts.append(salt)
        return submit(worker, *arguments, salt=salt, **options)

    monkeypatch.setattr(SequenceClient, "submit", spy)
    async with running(model, Reports()) as node:
        for owner in ("A", "B", "A", "x" * 10_000, "\ud800", ""):
            async with generate_deltas(node, job(1, cache_owner=owner)) as deltas:
                await whole(deltas)
    assert salts[0] == salts[2]
    assert len(set(salts)) == 5
    assert list(map(len, salts)) == [16] * 5 + [0]


async def test_prompt_over_the_limit_is_refused_and_output_is_cut_at_its_limit(model: TextModel):
    async with running(model, Reports(), max_input_tokens=10, max_output_tokens=3) as node:
        with pytest.raises(ContextLengthExceeded, match="limit of 10 tokens; this one has 11") as refused:
            async with generate_deltas(node, job(1, prompts=2)):
                raise AssertionError("the second prompt has 11 tokens")
        assert refused.value.param == "prompt"
        async with generate_deltas(node, job(100)) as deltas:
            assert (await _take_all(deltas))[-1].finish_reason == "length"
            assert deltas.tokens == 3
        await _until_idle(node)


async def test_status_shows_what_the_engine_does(model: TextModel):
    async with running(model, Reports(), "delay_ms=2,slots=2") as node:
        async with generate_deltas(node, job(100_000, n=3)):
            with trio.fail_after(60):  # they arrive one by one, and are reported with a step
                while _sequences(node) != (3, 1, 0):  # noqa: ASYNC110
                    await trio.sleep(0.002)
            assert 0 < node.status().engine.cache_usage < 1
        await _until_idle(node)
        before = node.statistics()
        async with generate_deltas(node, job(50, n=3)) as deltas:
            await whole(deltas)
        await _until_idle(node)
        status, counts = node.status(), node.statistics()
    assert (status.sequences, status.waiting, status.engine.cache_usage, status.engine.preemptions) == (
        0,
        0,
        0.0,
        0,
    )
    assert counts.steps - before.steps >= 100
    assert counts.generated_tokens - before.generated_tokens == 150
    assert status.engine.mean_step_ms >= 2
    assert status.engine.kernel == "torch"
    assert 1 <= status.engine.mean_step_tokens <= 20
    assert status.seats == 2


def test_every_limit_of_the_configuration_reaches_the_models_process():
    """The numbers are those of `tests/stories/test_seed_002_concurrent_requests.py`."""
    model = ModelConfig(
        path=Path("/models/m"),
        name="m",
        slots=8,
        max_batch=4,
        max_batched_tokens=512,
        max_input_tokens=128,
        max_output_tokens=2048,
        kv_cache=KvCacheConfig(
            max_entries=4_194_304, max_memory_mb=1024, eviction_threshold=0.8, cleanup_interval_s=1.0
        ),
        watchdog_s=20.0,
    )
    expected = WorkerSpec(
        path="/models/m",
        slots=8,
        max_batch=4,
        max_batched_tokens=512,
        max_input_tokens=128,
        max_output_tokens=2048,
        kv_cache_bytes=1024 * 1024 * 1024,
        kv_cache_entries=4_194_304,
        eviction_threshold=0.8,
        cleanup_interval_s=1.0,
        watchdog_s=20.0,
    )
    assert expected == worker_spec(model)


def _sequences(node: EngineNode) -> tuple[int, int, int]:
    status = node.status()
    return status.sequences, status.waiting, status.engine.slots_free


async def _take_all(deltas: Deltas) -> list:
    taken = []
    with trio.fail_after(60):
        while more := await deltas.take():
            taken += more
    return taken


async def _until_idle(node: EngineNode) -> None:
    with trio.fail_after(60):
        for _ in itertools.count():
            status = node.status()
            if not status.sequences and status.engine.blocks_free == status.engine.blocks_total:
                return
            await trio.sleep(0.002)
