"""Load requests and idle models over time, on the virtual clock."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest
import structlog
import trio

from fairlead.base.config import QueueConfig
from fairlead.base.errors import Draining, LoadFailed
from fairlead.generation.gateway import spec_of
from fairlead.router.dispatch.dispatcher import Dispatcher
from fairlead.router.dispatch.swaps import STARVATION_SHARE
from fairlead.router.swap.lru import LruPolicy
from fairlead.router.swap.matrix import MatrixPolicy
from fake_nodes import LIMITS, TimedNode, job
from router.dispatch.recorded import FakeNode, limits

TTL_S = 100.0


class RecordedOrders:
    """Stands for the fleet: only records which orders it receives, and when."""

    def __init__(self) -> None:
        self.received: list[tuple[float, str, str]] = []

    def start_swap(self, model: str, evict: frozenset[str]) -> None:
        self.received.append((trio.current_time(), "load", model))

    def stop_model(self, model: str) -> None:
        self.received.append((trio.current_time(), "stop", model))


@asynccontextmanager
async def running_dispatcher(**ttl_s: float) -> AsyncIterator[tuple[Dispatcher, RecordedOrders, float]]:
    dispatcher, fleet = Dispatcher(QueueConfig(timeout_s=600.0, starvation_bound_s=60.0)), RecordedOrders()
    policy = LruPolicy(max_loaded=1)
    dispatcher.models.configure(policy, ttl_s, start_swap=fleet.start_swap, stop_model=fleet.stop_model)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(dispatcher.run)
        yield dispatcher, fleet, trio.current_time()
        nursery.cancel_scope.cancel()


async def test_deadline_that_fails_stops_no_other(autojump_clock):
    async with running_dispatcher(m=TTL_S) as (dispatcher, fleet, now):

        def fail() -> None:
            raise KeyError("a bug")

        with structlog.testing.capture_logs() as logs:
            dispatcher._timer.at(now + TTL_S, fail)
            up(dispatcher, TimedNode())
            dispatcher._timer.at(now + TTL_S, fail)
            await trio.sleep(2 * TTL_S)
        assert fleet.received == [(now + TTL_S, "stop", "m")]
        events = [line.get("task", line["event"]) for line in logs]
        assert events == ["deadlines", "unloading model", "deadlines"]


async def test_charge_that_fails_does_not_stop_the_later_charges(autojump_clock, monkeypatch):
    async with running_dispatcher(m=TTL_S) as (dispatcher, _, now):
        up(dispatcher, TimedNode())
        read_at = []

        def charge(_ticket, _cost) -> None:
            read_at.append(trio.current_time() - now)
            raise ValueError("a bug")

        async with dispatcher.seat(spec_of(job())):
            with structlog.testing.capture_logs(), monkeypatch.context() as patch:
                patch.setattr(dispatcher.scheduler, "charge", charge)
                await trio.sleep(3.5)
        assert read_at == [1.0, 2.0, 3.0]


async def test_awaited_loads_are_refused_when_the_server_drains(autojump_clock):
    async with running_dispatcher(m=TTL_S) as (dispatcher, fleet, now):
        errors = []

        async def load() -> None:
            with pytest.raises(Draining) as refused:
                await dispatcher.models.load("m")
            errors.append(refused.value)

        async with trio.open_nursery() as callers:
            callers.start_soon(load)
            callers.start_soon(load)
            await trio.sleep(1)
            assert fleet.received == [(now, "load", "m")]
            dispatcher.scheduler.drain()
        assert len(errors) == 2


async def test_swap_is_logged_once_with_what_it_evicts_the_chosen_set_and_its_cost(autojump_clock):
    dispatcher = Dispatcher(QueueConfig())
    policy, fleet = MatrixPolicy({"pair": "m & x"}, evict_costs={"y": 3}), RecordedOrders()
    dispatcher.models.configure(
        policy, dict.fromkeys("mxy", 0.0), start_swap=fleet.start_swap, stop_model=fleet.stop_model
    )
    loaded = TimedNode()
    loaded.models = frozenset("y")
    with structlog.testing.capture_logs() as logs:
        async with trio.open_nursery() as nursery:
            up(dispatcher, loaded)
            async with dispatcher.seat(msgspec.structs.replace(spec_of(job()), model="y")):
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


def up(dispatcher: Dispatcher, node: TimedNode) -> None:
    dispatcher.scheduler.node_up(node.id, node.models, LIMITS)


async def wait_for_seat(dispatcher: Dispatcher) -> None:
    async with dispatcher.seat(spec_of(job())):
        pass


async def serve(dispatcher: Dispatcher, node: TimedNode, service_s: float) -> None:
    async with dispatcher.seat(spec_of(job())) as seat:
        assert seat.node_id == node.id
        await trio.sleep(service_s)


async def test_model_is_unloaded_after_it_was_idle_for_its_ttl_and_no_sooner(autojump_clock):
    async with running_dispatcher(m=TTL_S) as (dispatcher, fleet, now):
        node = TimedNode()
        up(dispatcher, node)
        for pause_s in (90.0, 99.0, 1.0):
            await trio.sleep(pause_s)
            await serve(dispatcher, node, 50.0)
        ended = trio.current_time()
        await trio.sleep(1000.0)
        assert [(ended + TTL_S, "stop", "m")] == fleet.received
        assert ended == now + 90 + 99 + 1 + 150


async def test_model_that_works_longer_than_its_ttl_stays_loaded(autojump_clock):
    async with running_dispatcher(m=TTL_S) as (dispatcher, fleet, now):
        node = TimedNode()
        up(dispatcher, node)
        await trio.sleep(99.0)
        await serve(dispatcher, node, 500.0)
        assert fleet.received == []
        await trio.sleep(101.0)
        assert [(now + 99 + 500 + TTL_S, "stop", "m")] == fleet.received


async def test_model_that_is_never_used_is_unloaded_too_and_one_without_a_ttl_never(autojump_clock):
    async with running_dispatcher(m=TTL_S, kept=0.0) as (dispatcher, fleet, now):
        up(dispatcher, TimedNode())
        dispatcher.scheduler.node_up(*FakeNode("kept", "kept"), limits(1))
        await trio.sleep(10_000.0)
        assert [(now + TTL_S, "stop", "m")] == fleet.received


async def test_however_often_a_model_is_idle_there_is_one_alarm_for_it(autojump_clock):
    async with running_dispatcher(m=TTL_S) as (dispatcher, _reason, _now):
        node = TimedNode()
        up(dispatcher, node)
        await serve(dispatcher, node, 0.1)
        before = len(dispatcher._timer)
        for _ in range(20):
            await serve(dispatcher, node, 0.1)
        # Each job leaves the two alarms of its own deadlines, which are dropped.
        assert len(dispatcher._timer) <= before + 2 * 20


async def test_shared_load_request_starves_after_a_part_of_the_bound(autojump_clock):
    async with running_dispatcher(m=0.0, other=0.0) as (dispatcher, fleet, now):
        node = TimedNode()
        up(dispatcher, node)
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(serve, dispatcher, node, 30.0)
            await trio.testing.wait_all_tasks_blocked()
            for _ in range(2):
                nursery.start_soon(dispatcher.models.load, "other")
            await trio.sleep(60.5)
            # It starved during the second job of three, so it is next.
            assert 30.0 < STARVATION_SHARE * 60.0 < 60.0
            assert [(now + 60.0, "load", "other")] == fleet.received
            dispatcher.scheduler.node_up(*FakeNode("other", "other"), limits(1))
            await trio.testing.wait_all_tasks_blocked()
            assert fleet.received[-1][2] == "m"
            up(dispatcher, node)


async def test_load_that_fails_raises_in_all_callers(autojump_clock):
    async with running_dispatcher(m=0.0) as (dispatcher, _reason, _now):
        errors = []

        async def load() -> None:
            with pytest.raises(LoadFailed) as raised:
                await dispatcher.models.load("m")
            errors.append(raised.value.message)

        async with trio.open_nursery() as nursery:
            for _ in range(2):
                nursery.start_soon(load)
            await trio.testing.wait_all_tasks_blocked()
            dispatcher.scheduler.load_failed(frozenset("m"), LoadFailed("no such file"))
        assert errors == ["no such file"] * 2
