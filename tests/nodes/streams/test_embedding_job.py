"""Embedding jobs from the node to their sink, with a real child process and a model that sums tokens."""

import os
import signal
import struct
from dataclasses import replace

import pytest
import trio

from fairlead.base.errors import EngineFailed, InvalidRequest, NodeFailed, RequestTimeout
from fairlead.base.grant import FIRST_GRANT
from fairlead.base.job import PORTION_TEXTS, portions_of
from fairlead.base.sequence_seats import SequenceSeats
from fairlead.language.text.embedding import EmbeddingSettings
from fairlead.language.text.model import TextModel
from fairlead.nodes.engines.sequence_client import SequenceClient
from fairlead.nodes.streams.deltas import Deltas
from nodes import test_engine_node as engine_node
from nodes.test_engine_node import Reports, generate_deltas, job, model, running

__all__ = ["model"]


@pytest.fixture(scope="module")
def embedder(model: TextModel) -> TextModel:
    """Return the same model as an embedding model with vectors of two numbers."""
    return with_embeddings(model)


def with_embeddings(model: TextModel) -> TextModel:
    return replace(model, embedding=EmbeddingSettings(2, normalized=False))


async def vectors(deltas: Deltas) -> dict[int, tuple[float, ...]]:
    found = {}
    with trio.fail_after(60):
        while taken := await deltas.take():
            for delta in taken:
                assert (delta.text, delta.token_ids, delta.finish_reason) == ("", [], "stop")
                assert delta.index not in found
                found[delta.index] = struct.unpack("<2f", delta.vector)
    return found


def expected(submitted) -> dict[int, tuple[float, float]]:
    return {index: (sum(prompt), len(prompt)) for index, prompt in enumerate(submitted.prompts)}


@pytest.mark.parametrize("prompts", [1, PORTION_TEXTS + 1, 150])
async def test_each_text_has_its_own_vector(embedder: TextModel, prompts: int):
    submitted = job(1, prompts=prompts, embed=True)
    async with running(embedder, Reports(), "embeds") as node:
        async with generate_deltas(node, submitted) as deltas:
            assert expected(submitted) == await vectors(deltas)
            assert deltas.tokens == 0
        await engine_node._until_idle(node)


async def test_portion_is_submitted_when_it_has_a_seat_and_gives_it_back_at_its_end(
    embedder: TextModel, monkeypatch
):
    submitted, most = [], []
    submit = SequenceClient.submit

    def spy(worker, prompt, *arguments, **options):
        submitted.append(prompt)
        most.append(len(worker) + 1)
        return submit(worker, prompt, *arguments, **options)

    def grant_next(portion: int) -> None:
        ended.append(portion)
        if portion + 1 < portions:
            seats.grant(portion + 1, FIRST_GRANT)

    monkeypatch.setattr(SequenceClient, "submit", spy)
    ended: list[int] = []
    seats = SequenceSeats(grant_next)
    large_job = job(1, prompts=100, embed=True)
    portions = len(portions_of(large_job.prompts))
    async with running(embedder, Reports(), "embeds") as node:
        deltas = Deltas(100)
        seats.grant(0, FIRST_GRANT)
        async with node.generate(large_job, deltas, grant=FIRST_GRANT, seats=seats):
            assert expected(large_job) == await vectors(deltas)
    assert list(large_job.prompts) == submitted
    assert ended == list(range(portions - 1))  # the job's end gives the last seat back
    assert max(most) == max(map(len, portions_of(large_job.prompts)))


@pytest.mark.parametrize("read", [0, 40])
async def test_end_of_the_block_aborts_all_texts_in_the_child(embedder: TextModel, read: int):
    async with running(embedder, Reports(), "embeds,delay_ms=2") as node:
        async with generate_deltas(node, job(1, prompts=200, embed=True)) as deltas:
            with trio.fail_after(60):
                while read > 0:
                    read -= len(await deltas.take())
        await engine_node._until_idle(node)
        next_job = job(1, prompts=2, embed=True)
        async with generate_deltas(node, next_job) as deltas:
            assert expected(next_job) == await vectors(deltas)


async def test_killed_child_fails_the_job(embedder: TextModel):
    has_failed = False
    try:
        async with (
            running(embedder, Reports(), "embeds,delay_ms=2") as node,
            generate_deltas(node, job(1, prompts=2000, embed=True)) as deltas,
        ):
            await deltas.take()
            os.kill(node.pid, signal.SIGKILL)
            with pytest.raises(NodeFailed, match="SIGKILL"):
                await vectors(deltas)
            has_failed = True
    except* NodeFailed:
        pass  # the node itself also ends with this error
    assert has_failed


async def test_failed_step_fails_the_job_and_aborts_its_other_texts(embedder: TextModel):
    async with running(embedder, Reports(), "embeds,raise_in_step=2") as node:
        with pytest.raises(EngineFailed, match="device failed"):
            async with generate_deltas(node, job(1, prompts=2000, embed=True)) as deltas:
                await vectors(deltas)
        assert not len(node._connection.sequences)
        await engine_node._until_idle(node)
        assert node.statistics().steps < 250  # half of what all texts would take, four at a time


async def test_timeout_also_ends_the_waiting_texts(embedder: TextModel):
    async with running(embedder, Reports(), "embeds,delay_ms=20,slots=1") as node:
        submitted = job(1, prompts=500, embed=True)
        with trio.move_on_after(0.2) as clock:
            async with generate_deltas(node, submitted) as deltas:
                clock.deadline += 60  # the node received the earlier deadline
                with pytest.raises(RequestTimeout):
                    await vectors(deltas)
        assert not clock.cancelled_caught
        await engine_node._until_idle(node)


@pytest.mark.parametrize("embed", [True, False])
async def test_job_of_another_kind_than_its_model_is_refused(
    model: TextModel, embedder: TextModel, embed: bool
):
    chosen = model if embed else embedder
    async with running(chosen, Reports(), "" if embed else "embeds") as node:
        with pytest.raises(InvalidRequest, match=r"does not make (text|embeddings)") as refused:
            async with generate_deltas(node, job(1, embed=embed)):
                raise AssertionError("it was not chosen for that")
        assert refused.value.param == "model"


async def test_child_without_embeddings_fails_the_job_and_continues_to_run(embedder: TextModel):
    async with running(embedder, Reports(), "") as node:
        with pytest.raises(EngineFailed, match="this model makes no vectors"):
            async with generate_deltas(node, job(1, embed=True)) as deltas:
                await vectors(deltas)
        assert node.is_ready
