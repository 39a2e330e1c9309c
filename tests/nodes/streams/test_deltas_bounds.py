"""Unread deltas pause the reading of their server; a response that is too long is not kept."""

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from fairlead.base.config import FiltersConfig
from fairlead.base.job import CallPiece, Delta, Translation
from fairlead.nodes.http.client_connection import Clock
from fairlead.nodes.streams import deltas as module
from fairlead.nodes.streams.attempt import Attempt, retry_sink
from fairlead.nodes.streams.deltas import Deltas
from nodes.listening import ready_node, stub, translated_job
from upstream_readers import CHAT_READER


@pytest.fixture(autouse=True)
def without_the_size_of_a_delta(monkeypatch):
    """Count only the bytes in a delta, without the size of the object."""
    monkeypatch.setattr(module, "DELTA_BYTES", 0)


def raw(size: int) -> Delta:
    return Delta(0, "x", raw=[b"x" * size], relayed_tokens=1)


def translated(size: int) -> Delta:
    """Return a delta that has this many characters in all its parts."""
    calls = [CallPiece(0, "f" * (size >= 1), "x" * (size >= 2))]
    return Delta(
        0,
        "x" * (size >= 3),
        relayed_tokens=1,
        reasoning="x" * max(0, size - 3),
        calls=calls,
        translation=Translation("openai"),
    )


@pytest.mark.parametrize("dialects", [None, ("openai",)], ids=["relayed", "translated"])
async def test_server_is_read_only_as_fast_as_the_client_reads(monkeypatch, dialects):
    monkeypatch.setattr(module, "UNREAD_BYTES", 100_000 if dialects is None else 5_000)
    deltas = Deltas(1)
    job = translated_job(stub={"how": "endless"})
    # Without the last event, which has the usage, the stub repeats the text before it.
    filters = FiltersConfig(strip_params=("stream_options",))
    async with stub() as server:
        node = ready_node(server, dialects=dialects, filters=filters)
        with trio.fail_after(60):
            async with node.generate(job, Attempt(deltas)):
                for _ in range(3):
                    while deltas.backpressure() is None:
                        await trio.lowlevel.checkpoint()
                    unread_bytes = deltas._unread_bytes
                    await wait_all_tasks_blocked(0.01)  # also the server, which writes while it is read
                    assert unread_bytes == deltas._unread_bytes
                    assert await deltas.take()
                    assert deltas.backpressure() is None


async def test_timeout_is_suspended_while_the_client_does_not_read(autojump_clock):
    clock, read = Clock(None), trio.Event()
    with trio.move_on_after(1000) as outer, clock.scope:
        clock.begin("sent nothing", 10)
        clock.suspend()
        await read.wait()
    assert outer.cancelled_caught
    assert not clock.scope.cancelled_caught
    clock.restart()
    assert trio.current_time() + 10 == clock.scope.deadline


@pytest.mark.parametrize("raw", [raw, translated])
async def test_backpressure_ends_when_all_is_read_or_the_stream_has_ended(monkeypatch, raw):
    monkeypatch.setattr(module, "UNREAD_BYTES", 10)
    deltas = Deltas(1)
    deltas.put(raw(10))
    assert deltas.backpressure() is None
    deltas.put(raw(1))
    backpressure = deltas.backpressure()
    assert backpressure is not None
    assert backpressure is deltas.backpressure()
    await deltas.take()
    assert backpressure.is_set()
    assert deltas.backpressure() is None
    deltas.put(raw(11))
    deltas.put(Delta(0, finish_reason="stop"))
    assert deltas.backpressure() is None


async def test_deltas_accepted_by_on_delta_cause_no_backpressure(monkeypatch):
    monkeypatch.setattr(module, "UNREAD_BYTES", 10)
    deltas = Deltas(1)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(deltas.take, lambda _deltas: True)
        await wait_all_tasks_blocked()
        deltas.put(raw(100))
        assert deltas.backpressure() is None
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("raw", [raw, translated])
@pytest.mark.parametrize(("size", "is_kept"), [(10, True), (11, False)])
async def test_response_over_the_limit_is_not_kept_for_a_retry(monkeypatch, size, is_kept, raw):
    monkeypatch.setattr(module, "KEPT_BYTES", 10)
    deltas = Deltas(1, keeps=True)
    deltas.put(raw(size))
    await deltas.take()
    assert is_kept == (deltas.kept is not None)
    assert is_kept == (retry_sink(deltas, CHAT_READER) is not None)


@pytest.mark.parametrize("raw", [raw, translated])
async def test_size_of_a_delta_object_counts_against_the_limits(monkeypatch, raw):
    monkeypatch.setattr(module, "DELTA_BYTES", 400)
    monkeypatch.setattr(module, "UNREAD_BYTES", 100 * 402)
    monkeypatch.setattr(module, "KEPT_BYTES", 200 * 402)
    deltas = Deltas(1, keeps=True)
    for _ in range(100):
        deltas.put(raw(2))
    assert deltas.backpressure() is None
    deltas.put(raw(2))
    assert deltas.backpressure() is not None
    for _ in range(99):
        deltas.put(raw(2))
    assert deltas.kept is not None
    deltas.put(raw(2))
    assert deltas.kept is None
