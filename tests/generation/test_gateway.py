"""A job's course on the virtual clock: seats, deadlines, and disconnects at every point."""

from random import Random

import msgspec
import pytest
import trio

from fairlead.base.config import QueueConfig
from fairlead.base.errors import InvalidRequest, NodeFailed, QueueFull, QueueTimeout, RequestTimeout
from fairlead.base.job import Job, Sampling
from fairlead.generation.gateway import Answer, Gateway
from fairlead.nodes.limits import NodeLimits
from fairlead.router.dispatch.dispatcher import Dispatcher
from fairlead.router.fleet.node_registry import NodeRegistry
from fake_nodes import LIMITS, TimedNode, job


def gateway_for(
    nursery: trio.Nursery,
    node: TimedNode,
    *,
    capacity: int = 100,
    seats: int = 1,
    queue_timeout_s: float = 60.0,
    request_timeout_s: float = 600.0,
    **queue: object,
) -> tuple[Gateway, Dispatcher]:
    config = QueueConfig(capacity=capacity, timeout_s=queue_timeout_s, **queue)
    dispatcher = Dispatcher(config, random=Random(0))
    nursery.start_soon(dispatcher.run)
    nodes = NodeRegistry(dispatcher.scheduler)
    nodes.report(node, NodeLimits(seats=seats, max_model_len=LIMITS.max_model_len))
    return Gateway(dispatcher, nodes, request_timeout_s=request_timeout_s), dispatcher


async def text_of(answer: Answer) -> str:
    text = ""
    while taken := await answer.deltas.take():
        text += "".join(delta.text for delta in taken)
    return text


async def run_job(gateway: Gateway, request: Job, finished: list[str]) -> None:
    async with trio.open_nursery() as exchange:
        answer = await exchange.start(gateway.serve, request)
        await text_of(answer)
        finished.append(request.tenant)


async def test_job_gets_its_answer_and_releases_its_seat(autojump_clock, nursery):
    gateway, dispatcher = gateway_for(nursery, TimedNode())
    async with trio.open_nursery() as exchange:
        answer = await exchange.start(gateway.serve, job())
        assert (dispatcher.statistics().running, dispatcher.statistics().waiting) == (1, 0)
        assert await text_of(answer) == "first last"
    assert dispatcher.statistics().running == 0
    assert (answer.estimated_wait_s, answer.queue_position) == (None, None)


async def test_tenants_with_five_and_two_jobs_alternate(autojump_clock, nursery):
    gateway, _ = gateway_for(nursery, TimedNode(service_s=1))
    finished: list[str] = []
    async with trio.open_nursery() as clients:
        for tenant in "AAAAABB":
            clients.start_soon(run_job, gateway, job(tenant), finished)
            await trio.testing.wait_all_tasks_blocked()
    assert "".join(finished) == "ABABAAA"


async def test_node_with_one_seat_runs_one_job_at_a_time(autojump_clock, nursery):
    node = TimedNode(service_s=1)
    gateway, _ = gateway_for(nursery, node)
    finished: list[str] = []
    async with trio.open_nursery() as clients:
        for _ in range(10):
            clients.start_soon(run_job, gateway, job(), finished)
    assert (len(finished), node.most_running, node.running) == (10, 1, 0)


async def test_estimate_behind_three_jobs_of_ten_seconds_is_thirty(autojump_clock, nursery):
    gateway, dispatcher = gateway_for(nursery, TimedNode(service_s=10), estimate="mean")
    finished: list[str] = []
    await run_job(gateway, job(), finished)
    async with trio.open_nursery() as clients:
        for _ in range(4):
            clients.start_soon(run_job, gateway, job(), finished)
            await trio.testing.wait_all_tasks_blocked()
        assert dispatcher.statistics().waiting == 3
        assert dispatcher.estimator.for_newcomer("m", "A", 1).estimated_wait_s == 30
        async with trio.open_nursery() as exchange:
            answer = await exchange.start(gateway.serve, job())
            assert (answer.estimated_wait_s, answer.queue_position) == (30, 4)
            assert pytest.approx(40.0) == answer.waited_s


async def test_full_queue_refuses_at_once_with_retry_after(autojump_clock, nursery):
    gateway, dispatcher = gateway_for(nursery, TimedNode(), capacity=2)
    finished: list[str] = []
    async with trio.open_nursery() as clients:
        for _ in range(3):
            clients.start_soon(run_job, gateway, job(), finished)
            await trio.testing.wait_all_tasks_blocked()
        started = trio.current_time()
        with pytest.raises(QueueFull) as refused:
            await gateway.serve(job())
        assert started == trio.current_time()
        assert refused.value.retry_after_s is not None
        assert 1 <= refused.value.retry_after_s <= 60
        assert refused.value.estimated_wait_s is not None
    assert dispatcher.statistics().running == 0


async def test_job_beyond_the_queue_timeout_is_refused_and_removed(autojump_clock, nursery):
    gateway, dispatcher = gateway_for(nursery, TimedNode(service_s=500), queue_timeout_s=30)
    finished: list[str] = []
    async with trio.open_nursery() as clients:
        clients.start_soon(run_job, gateway, job(), finished)
        await trio.testing.wait_all_tasks_blocked()
        started = trio.current_time()
        with pytest.raises(QueueTimeout) as timeout:
            await gateway.serve(job())
        assert pytest.approx(trio.current_time() - started) == 30.0
        assert timeout.value.estimated_wait_s is not None
        assert (dispatcher.statistics().waiting, dispatcher.statistics().running) == (0, 1)


async def test_queue_timeout_covers_the_first_delta_of_a_stream(autojump_clock, nursery):
    gateway, dispatcher = gateway_for(nursery, TimedNode(service_s=200, first_s=100), queue_timeout_s=30)
    with pytest.raises(QueueTimeout):
        await gateway.serve(job(stream=True))
    assert dispatcher.statistics().running == 0


async def test_queue_timeout_does_not_cover_the_first_delta_of_a_plain_job(autojump_clock, nursery):
    gateway, _ = gateway_for(nursery, TimedNode(service_s=200, first_s=100), queue_timeout_s=30)
    finished: list[str] = []
    await run_job(gateway, job(), finished)
    assert finished == ["A"]


async def test_request_timeout_before_the_first_delta_fails_the_job(autojump_clock, nursery):
    gateway, dispatcher = gateway_for(nursery, TimedNode(service_s=200, first_s=100), request_timeout_s=50)
    with pytest.raises(RequestTimeout):
        await gateway.serve(job())
    assert dispatcher.statistics().running == 0


async def test_request_timeout_after_the_first_delta_fails_the_deltas(autojump_clock, nursery):
    gateway, dispatcher = gateway_for(nursery, TimedNode(service_s=200), request_timeout_s=50)
    async with trio.open_nursery() as exchange:
        answer = await exchange.start(gateway.serve, job(stream=True))
        assert [delta.text for delta in await answer.deltas.take()] == ["first "]
        with pytest.raises(RequestTimeout):
            await answer.deltas.take()
    assert dispatcher.statistics().running == 0


async def test_failure_after_the_first_delta_is_raised_by_the_deltas(autojump_clock, nursery):
    gateway, dispatcher = gateway_for(nursery, TimedNode(fails=NodeFailed("failed")))
    async with trio.open_nursery() as exchange:
        answer = await exchange.start(gateway.serve, job())
        with pytest.raises(NodeFailed):
            await text_of(answer)
    assert dispatcher.statistics().running == 0


async def test_slow_reader_holds_no_seat(autojump_clock, nursery):
    gateway, dispatcher = gateway_for(nursery, TimedNode(service_s=10))
    async with trio.open_nursery() as exchange:
        answer = await exchange.start(gateway.serve, job())
        await trio.sleep(11)
        assert dispatcher.statistics().running == 0
        assert await text_of(answer) == "first last"


@pytest.mark.parametrize("disconnect_after_s", [0.0, 5.0, 15.0, 25.0])
async def test_disconnect_at_any_time_releases_seat_and_queue_entry(
    autojump_clock, nursery, disconnect_after_s
):
    node = TimedNode(service_s=10, first_s=5)
    gateway, dispatcher = gateway_for(nursery, node)
    finished: list[str] = []
    async with trio.open_nursery() as clients:
        clients.start_soon(run_job, gateway, job("first"), finished)
        await trio.testing.wait_all_tasks_blocked()
        with trio.move_on_after(disconnect_after_s):
            await run_job(gateway, job("disconnects"), finished)
        clients.start_soon(run_job, gateway, job("after"), finished)
    assert [tenant for tenant in finished if tenant != "disconnects"] == ["first", "after"]
    assert (node.running, dispatcher.statistics().running, dispatcher.statistics().waiting) == (0, 0, 0)


class PreparingNode(TimedNode):
    """A node that compiles grammars, which takes `prepare_s`; `failure` is raised afterwards."""

    prepare_s = 5.0
    failure: Exception | None = None
    seats_meanwhile: int | None = None

    async def prepare(self, _job: Job) -> None:
        self.preparing = True
        try:
            await trio.sleep(self.prepare_s)
        finally:
            self.preparing = False
        if self.failure is not None:
            raise self.failure


def constrained_job() -> Job:
    return msgspec.structs.replace(job(), sampling=Sampling(max_tokens=9, grammar="a grammar"))


async def test_job_holds_no_seat_while_its_grammar_is_compiled(autojump_clock, nursery):
    node = PreparingNode()
    gateway, dispatcher = gateway_for(nursery, node)
    async with trio.open_nursery() as exchange:
        exchange.start_soon(gateway.serve, constrained_job())
        await trio.sleep(4)
        assert node.preparing
        assert (dispatcher.statistics().running, dispatcher.statistics().waiting) == (0, 0)
        await exchange.start(gateway.serve, job())
        exchange.cancel_scope.cancel()
    assert not node.preparing, "it goes on when the client has left"


async def test_refused_grammar_is_the_answer_and_takes_no_seat(autojump_clock, nursery):
    node = PreparingNode()
    node.failure = InvalidRequest("the grammar is refused", param="response_format")
    gateway, dispatcher = gateway_for(nursery, node)
    with pytest.raises(InvalidRequest, match="refused"):
        await gateway.serve(constrained_job())
    assert dispatcher.statistics().running == 0


@pytest.mark.parametrize(("failure", "prepare_s"), [(NodeFailed("gone"), 1), (None, 1e9)])
async def test_job_is_queued_if_its_grammar_cannot_be_compiled_before(
    autojump_clock, nursery, failure, prepare_s
):
    node = PreparingNode()
    node.failure, node.prepare_s = failure, prepare_s
    gateway, _ = gateway_for(nursery, node)
    async with trio.open_nursery() as exchange:
        assert await text_of(await exchange.start(gateway.serve, constrained_job())) == "first last"


async def test_job_without_a_grammar_is_not_prepared(autojump_clock, nursery):
    node = PreparingNode()
    node.prepare_s = 1e9
    gateway, _ = gateway_for(nursery, node)
    async with trio.open_nursery() as exchange:
        assert await text_of(await exchange.start(gateway.serve, job())) == "first last"
    assert trio.current_time() < 1000
