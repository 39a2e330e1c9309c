"""How long a model stays loaded, as a request says, on the virtual clock."""

from math import inf

import pytest
import trio

from fake_nodes import TimedNode
from router.dispatch.test_model_lifecycle import TTL_S, running_dispatcher, serve, up


@pytest.mark.parametrize(("ttl_s", "kept_s"), [(TTL_S, 10.0), (TTL_S, 1000.0), (0.0, 10.0)])
async def test_idle_model_is_unloaded_after_the_time_for_which_it_is_kept(autojump_clock, ttl_s, kept_s):
    async with running_dispatcher(m=ttl_s) as (dispatcher, fleet, now):
        up(dispatcher, TimedNode())
        await trio.sleep(50.0)
        dispatcher.models.keep("m", kept_s)
        await trio.sleep(10_000.0)
        assert fleet.received == [(now + 50.0 + kept_s, "stop", "m")]


async def test_model_that_is_kept_without_limit_is_never_unloaded(autojump_clock):
    async with running_dispatcher(m=TTL_S) as (dispatcher, fleet, _now):
        node = TimedNode()
        up(dispatcher, node)
        dispatcher.models.keep("m", inf)
        await serve(dispatcher, node, 1.0)
        await trio.sleep(10_000.0)
        assert fleet.received == []
        assert dispatcher.models.expires_in_s("m", is_busy=False) == inf


async def test_model_that_is_kept_for_no_time_is_unloaded_after_its_jobs(autojump_clock):
    async with running_dispatcher(m=TTL_S) as (dispatcher, fleet, now):
        node = TimedNode()
        up(dispatcher, node)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve, dispatcher, node, 30.0)
            await trio.sleep(10.0)
            dispatcher.models.keep("m", 0.0)
            nursery.start_soon(serve, dispatcher, node, 30.0)
            await trio.sleep(49.0)
            assert fleet.received == []
        await trio.sleep(1.0)
        assert fleet.received == [(now + 60.0, "stop", "m")]


async def test_each_job_of_a_kept_model_begins_its_time_anew(autojump_clock):
    async with running_dispatcher(m=TTL_S) as (dispatcher, fleet, now):
        node = TimedNode()
        up(dispatcher, node)
        dispatcher.models.keep("m", 20.0)
        for _ in range(5):
            await trio.sleep(19.0)
            await serve(dispatcher, node, 1.0)
        assert dispatcher.models.expires_in_s("m", is_busy=False) == 20.0
        await trio.sleep(1000.0)
        assert fleet.received == [(now + 120.0, "stop", "m")]


async def test_load_restores_the_configured_time(autojump_clock):
    async with running_dispatcher(m=TTL_S) as (dispatcher, fleet, now):
        node = TimedNode()
        up(dispatcher, node)
        dispatcher.models.keep("m", 0.0)
        await trio.sleep(1.0)
        dispatcher.scheduler.stopped(frozenset({"m"}))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(dispatcher.models.load, "m")
            await trio.testing.wait_all_tasks_blocked()
            up(dispatcher, node)
        assert dispatcher.models.expires_in_s("m", is_busy=False) == TTL_S
        await trio.sleep(1000.0)
        assert [what for _, what, _ in fleet.received] == ["stop", "load", "stop"]
        assert fleet.received[-1] == (now + 1.0 + TTL_S, "stop", "m")


async def test_time_that_is_left_is_all_of_it_while_the_model_is_busy(autojump_clock):
    async with running_dispatcher(m=TTL_S) as (dispatcher, _fleet, _now):
        up(dispatcher, TimedNode())
        await trio.sleep(30.0)
        assert dispatcher.models.expires_in_s("m", is_busy=False) == TTL_S - 30.0
        assert dispatcher.models.expires_in_s("m", is_busy=True) == TTL_S
        assert dispatcher.models.expires_in_s("other", is_busy=False) == inf


async def test_however_often_a_model_is_kept_there_is_one_alarm_for_it(autojump_clock):
    async with running_dispatcher(m=TTL_S) as (dispatcher, _fleet, _now):
        up(dispatcher, TimedNode())
        before = len(dispatcher._timer)
        for seconds in (500.0, 50.0, 500.0, 60.0, inf):
            dispatcher.models.keep("m", seconds)
        assert len(dispatcher._timer) <= before + 1  # one was dropped
