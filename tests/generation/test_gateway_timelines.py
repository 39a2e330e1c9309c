"""The gateway records the times and the outcome of each job once."""

from contextlib import asynccontextmanager
from random import Random

import pytest
import trio

from fairlead.base.config import QueueConfig
from fairlead.base.errors import EngineFailed, FairleadError
from fairlead.generation.gateway import Gateway
from fairlead.generation.timeline import LEFT, SUCCESS, RequestTimeline
from fairlead.nodes.limits import NodeLimits
from fairlead.router.dispatch.dispatcher import Dispatcher
from fairlead.router.fleet.node_registry import NodeRegistry
from fake_nodes import LIMITS, TimedNode, job


class RecordingGateway:
    """A gateway over one node with one seat; `timelines` has those that it reported."""

    def __init__(self, nursery: trio.Nursery, node: TimedNode, *, capacity: int = 100) -> None:
        self.timelines: list[RequestTimeline] = []
        dispatcher = Dispatcher(QueueConfig(capacity=capacity, timeout_s=60), random=Random(0))
        nursery.start_soon(dispatcher.run)
        nodes = NodeRegistry(dispatcher.scheduler)
        nodes.report(node, NodeLimits(seats=1, max_model_len=LIMITS.max_model_len))
        self.gateway = Gateway(dispatcher, nodes, request_timeout_s=100, on_finished=self.timelines.append)

    async def run_job(
        self, *, tenant: str = "A", disconnect_after_s: float = float("inf"), **options: object
    ) -> None:
        with trio.move_on_after(disconnect_after_s):
            try:
                async with trio.open_nursery() as exchange:
                    answer = await exchange.start(self.gateway.serve, job(tenant, **options))
                    while await answer.deltas.take():
                        pass
            except* FairleadError:
                pass

    def outcomes(self) -> list[str]:
        return [timeline.outcome for timeline in self.timelines]


async def test_timeline_has_the_time_of_each_event(autojump_clock, nursery):
    harness = RecordingGateway(nursery, TimedNode(service_s=10, first_s=4))
    async with trio.open_nursery() as clients:
        clients.start_soon(harness.run_job)
        await trio.testing.wait_all_tasks_blocked()
        clients.start_soon(harness.run_job)
    second = harness.timelines[1]
    times_s = (second.granted_s, second.first_delta_s, second.ended_s)
    assert pytest.approx((10, 14, 20)) == tuple(time_s - second.arrived_s for time_s in times_s)
    assert (second.outcome, second.node, second.attempts, second.tokens) == (SUCCESS, "timed", 1, 2)
    assert second.finish_reasons == ("stop",)
    assert pytest.approx(10) == second.waited_s


async def test_statistics_show_a_job_while_it_waits_and_while_it_runs(autojump_clock, nursery):
    harness = RecordingGateway(nursery, TimedNode(service_s=10))
    async with trio.open_nursery() as clients:
        for _ in range(3):
            clients.start_soon(harness.run_job)
        await trio.testing.wait_all_tasks_blocked()
        model = harness.gateway.statistics().models["m"]
        assert (model.waiting, model.running, model.outcomes) == (2, 1, {})
        assert (model.prompt_tokens, model.generated_tokens) == (3, 1)  # of the running job
    model = harness.gateway.statistics().models["m"]
    assert (model.waiting, model.running, model.outcomes) == (0, 0, {SUCCESS: 3})
    assert (model.prompt_tokens, model.generated_tokens) == (9, 6)


@pytest.mark.parametrize(
    ("disconnect_after_s", "had_seat", "tokens"),
    [(2.0, False, 0), (11.0, True, 0), (15.0, True, 1)],
    ids=["in the queue", "before the first token", "in the answer"],
)
async def test_disconnect_is_recorded_as_the_outcome(
    autojump_clock, nursery, disconnect_after_s, had_seat, tokens
):
    harness = RecordingGateway(nursery, TimedNode(service_s=10, first_s=3))
    async with trio.open_nursery() as clients:
        clients.start_soon(harness.run_job)
        await trio.testing.wait_all_tasks_blocked()
        clients.start_soon(lambda: harness.run_job(tenant="B", disconnect_after_s=disconnect_after_s))
    (timeline,) = [each for each in harness.timelines if each.job.tenant == "B"]
    assert (LEFT, had_seat, tokens) == (timeline.outcome, timeline.granted_s is not None, timeline.tokens)
    assert harness.gateway.statistics().models["m"].outcomes == {SUCCESS: 1, LEFT: 1}


async def test_disconnect_after_the_complete_answer_is_a_success(autojump_clock, nursery):
    class SlowToFinish(TimedNode):
        @asynccontextmanager
        async def generate(self, job, into, *, grant=None, seats=None):
            async with super().generate(job, into):
                yield
            await trio.sleep(1)  # as for the end of a relayed response

    harness = RecordingGateway(nursery, SlowToFinish())
    async with trio.open_nursery() as exchange:
        answer = await exchange.start(harness.gateway.serve, job(n=2))
        while await answer.deltas.take():
            pass
        exchange.cancel_scope.cancel()
    assert harness.outcomes() == [SUCCESS]


async def test_refusal_and_failure_are_reported_once_each_with_their_codes(autojump_clock, nursery):
    harness = RecordingGateway(nursery, TimedNode(service_s=5, fails=EngineFailed("broken")), capacity=0)
    async with trio.open_nursery() as clients:
        clients.start_soon(harness.run_job)
        await trio.testing.wait_all_tasks_blocked()
        clients.start_soon(harness.run_job)
    assert harness.outcomes() == ["queue_full", "engine_failed"]


async def test_unexpected_exception_is_an_internal_error_and_is_still_counted(autojump_clock, nursery):
    class Broken(TimedNode):
        def generate(self, job, into, *, grant=None, seats=None):
            raise RuntimeError("a bug")

    harness = RecordingGateway(nursery, Broken())
    with pytest.raises(ExceptionGroup):
        async with trio.open_nursery() as exchange:
            await exchange.start(harness.gateway.serve, job())
    assert harness.outcomes() == ["internal_error"]
    assert harness.gateway.statistics().models["m"].running == 0
