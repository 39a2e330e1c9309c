"""What the gateway records of each job, once: its times and its outcome."""

from contextlib import asynccontextmanager
from random import Random

import pytest
import trio

from fairlead.config import QueueConfig
from fairlead.dispatch.dispatcher import Dispatcher
from fairlead.errors import EngineFailed, FairleadError
from fairlead.fleet.node_registry import NodeRegistry
from fairlead.gateway import Gateway
from fairlead.nodes.limits import NodeLimits
from fairlead.request_timeline import LEFT, SUCCESS, RequestTimeline
from fake_nodes import LIMITS, TimedNode, job


class World:
    """A gateway over one node with one seat, and the timelines it has reported."""

    def __init__(self, nursery: trio.Nursery, node: TimedNode, *, capacity: int = 100) -> None:
        self.timelines: list[RequestTimeline] = []
        dispatcher = Dispatcher(QueueConfig(capacity=capacity, timeout_s=60), random=Random(0))
        nursery.start_soon(dispatcher.run)
        nodes = NodeRegistry(dispatcher.scheduler)
        nodes.report(node, NodeLimits(seats=1, max_model_len=LIMITS.max_model_len))
        self.gateway = Gateway(dispatcher, nodes, request_timeout_s=100, on_finished=self.timelines.append)

    async def run_job(
        self, *, tenant: str = "A", left_after_s: float = float("inf"), **options: object
    ) -> None:
        with trio.move_on_after(left_after_s):
            try:
                async with trio.open_nursery() as exchange:
                    answer = await exchange.start(self.gateway.serve, job(tenant, **options))
                    while await answer.deltas.take():
                        pass
            except* FairleadError:
                pass

    def outcomes(self) -> list[str]:
        return [timeline.outcome for timeline in self.timelines]


async def test_a_job_that_waited_is_stamped_at_each_moment(autojump_clock, nursery):
    world = World(nursery, TimedNode(service_s=10, first_s=4))
    async with trio.open_nursery() as clients:
        clients.start_soon(world.run_job)
        await trio.testing.wait_all_tasks_blocked()
        clients.start_soon(world.run_job)
    second = world.timelines[1]
    moments = (second.granted_s, second.first_delta_s, second.ended_s)
    assert pytest.approx((10, 14, 20)) == tuple(moment - second.arrived_s for moment in moments)
    assert (second.outcome, second.node, second.attempts, second.tokens) == (SUCCESS, "timed", 1, 2)
    assert second.finish_reasons == ("stop",)
    assert pytest.approx(10) == second.waited_s


async def test_statistics_show_a_job_while_it_waits_and_while_it_runs(autojump_clock, nursery):
    world = World(nursery, TimedNode(service_s=10))
    async with trio.open_nursery() as clients:
        for _ in range(3):
            clients.start_soon(world.run_job)
        await trio.testing.wait_all_tasks_blocked()
        model = world.gateway.statistics().models["m"]
        assert (model.waiting, model.running, model.outcomes) == (2, 1, {})
        assert (model.prompt_tokens, model.generated_tokens) == (3, 1)  # of the one that has begun
    model = world.gateway.statistics().models["m"]
    assert (model.waiting, model.running, model.outcomes) == (0, 0, {SUCCESS: 3})
    assert (model.prompt_tokens, model.generated_tokens) == (9, 6)


@pytest.mark.parametrize(
    ("left_after_s", "had_seat", "tokens"),
    [(2.0, False, 0), (11.0, True, 0), (15.0, True, 1)],
    ids=["in the queue", "before the first token", "in the answer"],
)
async def test_client_that_disconnects_is_recorded_as_having_left(
    autojump_clock, nursery, left_after_s, had_seat, tokens
):
    world = World(nursery, TimedNode(service_s=10, first_s=3))
    async with trio.open_nursery() as clients:
        clients.start_soon(world.run_job)
        await trio.testing.wait_all_tasks_blocked()
        clients.start_soon(lambda: world.run_job(tenant="B", left_after_s=left_after_s))
    (left,) = [timeline for timeline in world.timelines if timeline.job.tenant == "B"]
    assert (LEFT, had_seat, tokens) == (left.outcome, left.granted_s is not None, left.tokens)
    assert world.gateway.statistics().models["m"].outcomes == {SUCCESS: 1, LEFT: 1}


async def test_client_with_the_whole_answer_may_disconnect_before_its_node_is_done(autojump_clock, nursery):
    class Lingering(TimedNode):
        @asynccontextmanager
        async def generate(self, job, into):
            async with super().generate(job, into):
                yield
            await trio.sleep(1)  # as for the last bytes of another server's answer

    world = World(nursery, Lingering())
    async with trio.open_nursery() as exchange:
        answer = await exchange.start(world.gateway.serve, job(n=2))
        while await answer.deltas.take():
            pass
        exchange.cancel_scope.cancel()
    assert world.outcomes() == [SUCCESS]


async def test_refusal_and_failure_are_reported_once_each_with_their_codes(autojump_clock, nursery):
    world = World(nursery, TimedNode(service_s=5, fails=EngineFailed("broken")), capacity=0)
    async with trio.open_nursery() as clients:
        clients.start_soon(world.run_job)
        await trio.testing.wait_all_tasks_blocked()
        clients.start_soon(world.run_job)
    assert world.outcomes() == ["queue_full", "engine_failed"]


async def test_unexpected_exception_is_an_internal_error_and_is_still_counted(autojump_clock, nursery):
    class Broken(TimedNode):
        def generate(self, job, into):
            raise RuntimeError("a bug")

    world = World(nursery, Broken())
    with pytest.raises(ExceptionGroup):
        async with trio.open_nursery() as exchange:
            await exchange.start(world.gateway.serve, job())
    assert world.outcomes() == ["internal_error"]
    assert world.gateway.statistics().models["m"].running == 0
