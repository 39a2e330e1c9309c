"""Load requests and idle models over time, on the virtual clock."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest
import structlog
import trio

from dispatch.recorded import FakeNode, limits
from fairlead.config import LruSwap, MatrixSwap, QueueConfig
from fairlead.dispatch.dispatcher import Dispatcher
from fairlead.dispatch.swaps import PATIENCE
from fairlead.errors import Draining, LoadFailed
from fake_nodes import LIMITS, TimedNode, job

TTL_S = 100.0


class Told:
    """A model host that only records which orders it receives, and when."""

    def __init__(self) -> None:
        self.orders: list[tuple[float, str, str]] = []

    def start_swap(self, model: str, evict: frozenset[str]) -> None:
        self.orders.append((trio.current_time(), "load", model))

    def stop_model(self, model: str) -> None:
        self.orders.append((trio.current_time(), "stop", model))


@asynccontextmanager
async def desk(**ttl_s: float) -> AsyncIterator[tuple[Dispatcher, Told, float]]:
    dispatcher, told = Dispatcher(QueueConfig(timeout_s=600.0, starvation_bound_s=60.0)), Told()
    dispatcher.arrange(told, LruSwap(max_loaded=1), ttl_s, {})
    async with trio.open_nursery() as nursery:
        nursery.start_soon(dispatcher.run)
        yield dispatcher, told, trio.current_time()
        nursery.cancel_scope.cancel()


async def test_a_deadline_that_fails_stops_no_other(autojump_clock):
    async with desk(m=TTL_S) as (dispatcher, told, now):

        def fail() -> None:
            raise KeyError("a bug")

        with structlog.testing.capture_logs() as logs:
            dispatcher._timer.at(now + TTL_S, fail)
            dispatcher.node_up(TimedNode(), LIMITS)
            dispatcher._timer.at(now + TTL_S, fail)
            await trio.sleep(2 * TTL_S)
        assert told.orders == [(now + TTL_S, "stop", "m")]
        assert [line["task"] for line in logs] == ["deadlines", "deadlines"]


async def test_a_charge_that_fails_does_not_stop_the_later_charges(autojump_clock, monkeypatch):
    async with desk(m=TTL_S) as (dispatcher, _, now):
        dispatcher.node_up(TimedNode(), LIMITS)
        read_at = []

        def charge(_ticket, _cost) -> None:
            read_at.append(trio.current_time() - now)
            raise ValueError("a bug")

        async with dispatcher.seat(job()):
            with structlog.testing.capture_logs(), monkeypatch.context() as patch:
                patch.setattr(dispatcher._scheduler, "charge", charge)
                await trio.sleep(3.5)
        assert read_at == [1.0, 2.0, 3.0]


async def test_awaited_loads_are_refused_when_the_server_drains(autojump_clock):
    async with desk(m=TTL_S) as (dispatcher, told, now):
        errors = []

        async def load() -> None:
            with pytest.raises(Draining) as refused:
                await dispatcher.load("m")
            errors.append(refused.value)

        async with trio.open_nursery() as callers:
            callers.start_soon(load)
            callers.start_soon(load)
            await trio.sleep(1)
            assert told.orders == [(now, "load", "m")]
            dispatcher.drain()
        assert len(errors) == 2


async def test_a_swap_is_logged_once_with_what_it_evicts_the_chosen_set_and_its_cost(autojump_clock):
    dispatcher = Dispatcher(QueueConfig())
    swap = MatrixSwap({"pair": "m & x"}, evict_costs={"y": 3})
    dispatcher.arrange(Told(), swap, dict.fromkeys("mxy", 0.0), {})
    loaded = TimedNode()
    loaded.models = frozenset("y")
    with structlog.testing.capture_logs() as logs:
        async with trio.open_nursery() as nursery:
            dispatcher.node_up(loaded, LIMITS)
            async with dispatcher.seat(msgspec.structs.replace(job(), model="y")):
                for _ in range(3):  # they wait for the job of y, and the policy is called for each
                    nursery.start_soon(wait_for_seat, dispatcher)
                    await trio.testing.wait_all_tasks_blocked()
                assert logs == []
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
    assert logs == [
        {
            "event": "loading model",
            "log_level": "info",
            "model": "m",
            "evicted": ["y"],
            "chosen": ["m", "x"],
            "cost": 3,
            "rule": "set pair: m & x",
        }
    ]


async def wait_for_seat(dispatcher: Dispatcher) -> None:
    async with dispatcher.seat(job()):
        pass


async def serve(dispatcher: Dispatcher, node: TimedNode, service_s: float) -> None:
    async with dispatcher.seat(job()) as seat:
        assert node is seat.node
        await trio.sleep(service_s)


async def test_a_model_is_unloaded_after_it_was_idle_for_its_ttl_and_no_sooner(autojump_clock):
    async with desk(m=TTL_S) as (dispatcher, told, now):
        node = TimedNode()
        dispatcher.node_up(node, LIMITS)
        for pause_s in (90.0, 99.0, 1.0):
            await trio.sleep(pause_s)
            await serve(dispatcher, node, 50.0)
        ended = trio.current_time()
        await trio.sleep(1000.0)
        assert [(ended + TTL_S, "stop", "m")] == told.orders
        assert ended == now + 90 + 99 + 1 + 150


async def test_a_model_that_works_longer_than_its_ttl_stays_loaded(autojump_clock):
    async with desk(m=TTL_S) as (dispatcher, told, now):
        node = TimedNode()
        dispatcher.node_up(node, LIMITS)
        await trio.sleep(99.0)
        await serve(dispatcher, node, 500.0)
        assert told.orders == []
        await trio.sleep(101.0)
        assert [(now + 99 + 500 + TTL_S, "stop", "m")] == told.orders


async def test_a_model_that_is_never_used_is_unloaded_too_and_one_without_a_ttl_never(autojump_clock):
    async with desk(m=TTL_S, kept=0.0) as (dispatcher, told, now):
        dispatcher.node_up(TimedNode(), LIMITS)
        dispatcher.node_up(FakeNode("kept", "kept"), limits(1))
        await trio.sleep(10_000.0)
        assert [(now + TTL_S, "stop", "m")] == told.orders


async def test_however_often_a_model_is_idle_there_is_one_alarm_for_it(autojump_clock):
    async with desk(m=TTL_S) as (dispatcher, _told, _now):
        node = TimedNode()
        dispatcher.node_up(node, LIMITS)
        await serve(dispatcher, node, 0.1)
        before = len(dispatcher._timer)
        for _ in range(20):
            await serve(dispatcher, node, 0.1)
        # Each job leaves the two alarms of its own deadlines, which are dropped.
        assert len(dispatcher._timer) <= before + 2 * 20


async def test_a_shared_load_request_starves_after_a_part_of_the_bound(autojump_clock):
    async with desk(m=0.0, other=0.0) as (dispatcher, told, now):
        node = TimedNode()
        dispatcher.node_up(node, LIMITS)
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(serve, dispatcher, node, 30.0)
            await trio.testing.wait_all_tasks_blocked()
            for _ in range(2):
                nursery.start_soon(dispatcher.load, "other")
            await trio.sleep(60.5)
            # It starved during the second job of three, so it is next.
            assert 30.0 < PATIENCE * 60.0 < 60.0
            assert [(now + 60.0, "load", "other")] == told.orders
            dispatcher.node_up(FakeNode("other", "other"), limits(1))
            await trio.testing.wait_all_tasks_blocked()
            assert told.orders[-1][2] == "m"
            dispatcher.node_up(node, LIMITS)


async def test_a_load_that_fails_raises_in_all_callers(autojump_clock):
    async with desk(m=0.0) as (dispatcher, _told, _now):
        errors = []

        async def load() -> None:
            with pytest.raises(LoadFailed) as raised:
                await dispatcher.load("m")
            errors.append(raised.value.message)

        async with trio.open_nursery() as nursery:
            for _ in range(2):
                nursery.start_soon(load)
            await trio.testing.wait_all_tasks_blocked()
            dispatcher.load_failed(TimedNode(), LoadFailed("no such file"))
        assert errors == ["no such file"] * 2
