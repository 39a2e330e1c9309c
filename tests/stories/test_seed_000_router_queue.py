"""Stories, edge cases and criteria of document 000, over HTTP on a virtual clock."""

import pytest
import trio

from fairlead.base.errors import ModelUnloaded, NodeFailed
from fairlead.nodes.limits import NodeLimits
from fairlead.router.swap.policy import KeepEverything
from fake_nodes import LIMITS, TimedNode
from server.routes.conftest import Reply
from stories.simulated_server import SimulatedServer

OTHER_NODE = NodeLimits(seats=1, max_model_len=LIMITS.max_model_len, evictable=False)


def make_m_local(server: SimulatedServer) -> None:
    """Let swaps load "m", but start and stop nothing: each story adds its nodes itself."""

    def start_swap(model: str, evict: frozenset[str]) -> None:
        raise AssertionError("nothing is to be loaded")

    def stop_model(model: str) -> None:
        """Do nothing: the model counts as stopped at once."""

    server.dispatcher.models.configure(
        KeepEverything(), {"m": 0.0}, start_swap=start_swap, stop_model=stop_model
    )


@pytest.fixture(autouse=True)
def virtual_time(autojump_clock):
    return autojump_clock


# Story 1: one node, requests one after the other ---------------------------------------------------


async def test_story_1_three_requests_to_one_node_are_all_answered_in_their_order(autojump_clock, nursery):
    node = TimedNode(service_s=2)
    server = SimulatedServer(nursery, node)
    replies = await server.send_in_order("A", "B", "C")
    await trio.sleep(7)
    assert [reply.status for reply in replies] == [200, 200, 200]
    assert server.answered == ["A", "B", "C"]
    assert node.most_running == 1


async def test_story_1_request_to_a_busy_node_is_served_after_the_one_before(autojump_clock, nursery):
    server = SimulatedServer(nursery, TimedNode(service_s=5))
    await server.send_in_order("A", "B")
    assert ((await server.queue())["running"], (await server.queue())["waiting"]) == (1, 1)
    await trio.sleep(11)
    assert server.answered == ["A", "B"]


async def test_story_1_answer_to_a_queued_request_has_a_header(autojump_clock, nursery):
    server = SimulatedServer(nursery, TimedNode(service_s=5))
    first, second = await finished(server, "A", "B")
    assert "x-estimated-wait" not in first.headers
    assert second.headers["x-queue-position"] == "1"
    assert int(second.headers["x-estimated-wait"]) >= 1


# Story 2: a full queue -----------------------------------------------------------------------------


async def test_story_2_hundred_and_first_waiter_gets_429_with_retry_after(autojump_clock, nursery):
    server = SimulatedServer(nursery, TimedNode(service_s=50))
    await server.send_in_order(*101 * "A")
    assert (await server.queue())["waiting"] == 100
    started = trio.current_time()
    refused = await server.request_completion("A")
    assert started == trio.current_time()
    assert (refused.status, refused.error["code"]) == (429, "queue_full")
    assert "queue is full" in refused.error["message"]
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    assert int(refused.headers["x-estimated-wait"]) >= 1
    assert refused.headers["x-queue-position"] == "101"


# Story 3: waiting too long -------------------------------------------------------------------------


async def test_story_3_thirty_seconds_in_the_queue_end_in_504(autojump_clock, nursery):
    server = SimulatedServer(nursery, TimedNode(service_s=50), timeout_s=30)
    await server.send_in_order("A")
    started = trio.current_time()
    late = await server.request_completion("B")
    assert pytest.approx(30.0, abs=0.1) == trio.current_time() - started
    assert (late.status, late.error["code"]) == (504, "queue_timeout")
    assert late.headers["x-should-retry"] == "false"
    assert int(late.headers["x-estimated-wait"]) >= 1
    assert late.headers["x-queue-position"] == "1"


async def test_story_3_client_that_disconnects_is_taken_out_of_the_queue(autojump_clock, nursery):
    server = SimulatedServer(nursery, TimedNode(service_s=50))
    await server.send_in_order("A")
    disconnected = trio.Event()
    nursery.start_soon(lambda: server.request_completion("B", disconnected=disconnected))
    await trio.testing.wait_all_tasks_blocked()
    assert (await server.queue())["waiting"] == 1
    disconnected.set()
    await trio.testing.wait_all_tasks_blocked()
    assert (await server.queue())["waiting"] == 0


# Story 4: one job a node ---------------------------------------------------------------------------


async def test_story_4_jobs_beyond_the_seats_of_a_node_are_reported_as_waiting(autojump_clock, nursery):
    node = TimedNode(service_s=5)
    server = SimulatedServer(nursery, node)
    await server.send_in_order("A", "B", "C")
    totals = await server.queue()
    assert (totals["running"], totals["waiting"]) == (1, 2)
    counts = {"waiting", "running", "capacity", "seats"}
    assert set(totals) == counts | {"mean_wait_s", "mean_service_s", "oldest_wait_s"}
    await trio.sleep(5.5)
    assert ((await server.queue())["running"], (await server.queue())["waiting"]) == (1, 1)
    assert node.most_running == 1


# Story 5: several nodes ----------------------------------------------------------------------------


async def test_story_5_request_goes_to_the_idle_node(autojump_clock, nursery):
    first, second = TimedNode(service_s=5), TimedNode(service_s=5)
    server = SimulatedServer(nursery, first, second)
    await server.send_in_order("A", "B")
    assert (first.running, second.running) == (1, 1)


async def test_story_5_all_nodes_busy_and_the_queue_full_is_429(autojump_clock, nursery):
    server = SimulatedServer(nursery, TimedNode(service_s=50), TimedNode(service_s=50), capacity=1)
    await server.send_in_order("A", "A", "A")
    refused = await server.request_completion("A")
    assert (refused.status, refused.error["code"]) == (429, "queue_full")
    retry = refused.headers["retry-after"]
    assert refused.error["message"] == (
        f"all nodes are busy and the queue is full (1 waiting); try again in {retry} s"
    )
    assert refused.headers["x-queue-position"] == "2"


# Story 6: the estimated wait -----------------------------------------------------------------------


async def test_story_6_estimate_for_three_waiting_jobs_of_ten_seconds_is_thirty(autojump_clock, nursery):
    server = SimulatedServer(nursery, TimedNode(service_s=10), estimate="mean")
    await finished(server, "A")
    await server.send_in_order("A", "A", "A", "A")
    own_replies = {"X-OpenWebUI-User-Id": "A"}
    estimate = (await server.client.get("/queue/estimate?model=m", headers=own_replies)).json
    assert estimate == {"position": 4, "estimated_wait_s": 30, "estimated_wait_p90_s": None}
    reply = await server.request_completion("A")
    assert (reply.headers["x-estimated-wait"], reply.headers["x-queue-position"]) == ("30", "4")


async def test_story_6_answer_without_a_wait_has_no_estimate_header(autojump_clock, nursery):
    server = SimulatedServer(nursery, TimedNode(service_s=10))
    (reply,) = await finished(server, "A")
    assert "x-estimated-wait" not in reply.headers


async def test_story_6_job_with_too_long_an_estimate_is_refused_at_once_and_displaces_no_job(
    autojump_clock, nursery
):
    server = SimulatedServer(
        nursery, TimedNode(service_s=10), capacity=3, max_estimated_wait_s=20, estimate="mean"
    )
    await finished(server, "A")
    await server.send_in_order("A", "A", "A", "A")
    too_long = await server.request_completion("A")
    assert (too_long.status, too_long.error["code"]) == (429, "queue_full")
    assert "the wait would be about 30 s" in too_long.error["message"]
    assert too_long.headers["x-estimated-wait"] == "30"
    assert 15 <= int(too_long.headers["retry-after"]) <= 30
    assert (await server.queue())["waiting"] == 3
    await server.send_in_order("B")  # B's turn is next, so the full queue displaces a job of A
    await trio.sleep(20.5)
    assert server.answered == ["A", "A", "A", "A", "B"], "served, refused, displaced, served, served"


# Story 7: fairness between users -------------------------------------------------------------------


@pytest.mark.parametrize("fairness", ["roundRobin", "tokens"])
async def test_story_7_five_requests_of_a_and_two_of_b_are_answered_a_b_a_b_a_a_a(
    autojump_clock, nursery, fairness
):
    server = SimulatedServer(nursery, TimedNode(service_s=1), fairness=fairness)
    await finished(server, *"AAAAABB", max_tokens=2)  # as many tokens as the node sends: equal costs
    assert "".join(server.answered) == "ABABAAA"


# Edge cases ----------------------------------------------------------------------------------------


async def test_edge_node_that_becomes_free_before_the_timeout_serves_the_waiting_job(autojump_clock, nursery):
    server = SimulatedServer(nursery, TimedNode(service_s=29), timeout_s=30)
    replies = await finished(server, "A", "B")
    assert [reply.status for reply in replies] == [200, 200]


async def test_edge_running_and_waiting_jobs_of_a_lost_node_run_elsewhere(autojump_clock, nursery):
    stopping, other = TimedNode(service_s=20, fails=NodeFailed("the node went away")), TimedNode(service_s=50)
    server = SimulatedServer(nursery, stopping)
    replies = await server.send_in_order("A", "B")
    await trio.sleep(10)
    server.nodes.report(stopping, None)
    server.nodes.report(other, LIMITS)
    await trio.sleep(101)
    assert [reply.status for reply in replies] == [200, 200]
    assert [tenant[-1] for tenant in other.served] == ["B", "A"]


async def test_edge_drained_node_finishes_its_jobs_and_its_waiting_jobs_run_elsewhere(
    autojump_clock, nursery
):
    draining, other = TimedNode(service_s=20), TimedNode(service_s=30)
    other.id = "other"
    server = SimulatedServer(nursery)
    for node in (draining, other):
        server.nodes.report(node, OTHER_NODE)
    replies = await server.send_in_order("A", "B", "C")
    assert (draining.running, other.running) == (1, 1)
    drained = server.dispatcher.close_node(draining.id)
    await trio.sleep(25)
    assert drained.is_set()
    assert (len(replies), (await server.queue())["waiting"]) == (
        1,
        1,
    )  # C may not take the drained node's seat
    await trio.sleep(40)
    assert [reply.status for reply in replies] == [200, 200, 200]
    assert (len(draining.served), len(other.served)) == (1, 2)


async def test_edge_running_jobs_of_a_stopped_node_fail_and_its_waiting_jobs_run_elsewhere(
    autojump_clock, nursery
):
    stopped, other = TimedNode(service_s=20), TimedNode(service_s=30)
    server = SimulatedServer(nursery, stopped)
    make_m_local(server)
    replies = await server.send_in_order("A", "B")
    server.nodes.report(other, OTHER_NODE)
    await server.send_in_order("C")
    assert (stopped.running, other.running) == (1, 1)
    error = NodeFailed("m was unloaded")
    server.dispatcher.unload(
        "m", error, waiting=ModelUnloaded("m was unloaded while the request waited for it")
    )
    await trio.sleep(65)
    assert [(reply.status, reply.error["code"]) for reply in replies[:1]] == [(502, "node_failed")]
    assert sorted(server.answered) == ["A", "B", "C"]
    assert len(other.served) == 2


async def test_edge_jobs_waiting_for_a_stopped_model_without_another_node_fail_at_once(
    autojump_clock, nursery
):
    server = SimulatedServer(nursery, TimedNode(service_s=20))
    make_m_local(server)
    replies = await server.send_in_order("A", "B")
    server.dispatcher.unload("m", waiting=ModelUnloaded("m was unloaded while the request waited for it"))
    await trio.testing.wait_all_tasks_blocked()
    (refused,) = replies
    assert (refused.status, refused.error["code"]) == (409, "unloaded")
    assert refused.error["message"] == "m was unloaded while the request waited for it"
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    await trio.sleep(21)
    assert replies[1].status == 200, "its running job is finished"


async def test_edge_stopping_server_finishes_running_jobs_and_refuses_waiting_and_new_ones(
    autojump_clock, nursery
):
    server = SimulatedServer(nursery, TimedNode(service_s=20))
    replies = await server.send_in_order("A", "B")
    server.dispatcher.scheduler.drain()
    await trio.testing.wait_all_tasks_blocked()
    late = await server.request_completion("C")
    for refused in (replies[0], late):
        assert (refused.status, refused.error["code"]) == (503, "draining")
        assert 1 <= int(refused.headers["retry-after"]) <= 60
    await trio.sleep(21)
    assert replies[1].status == 200


async def test_edge_stream_waits_for_its_first_chunk_no_longer_than_the_queue_timeout(
    autojump_clock, nursery
):
    server = SimulatedServer(nursery, TimedNode(service_s=90, first_s=80), timeout_s=30, keep_alive_s=0)
    late = await server.request_completion("A", stream=True)
    assert (late.status, late.error["code"]) == (504, "queue_timeout")
    assert (await server.queue())["running"] == 0


# Success criteria ----------------------------------------------------------------------------------


async def test_criterion_1_ten_requests_in_a_row_are_all_served_by_one_node(autojump_clock, nursery):
    server = SimulatedServer(nursery, TimedNode(service_s=1))
    replies = await finished(server, *10 * "A")
    assert [reply.status for reply in replies] == 10 * [200]


async def test_criteria_2_and_3_refusals_are_at_once_and_timeouts_on_time(autojump_clock, nursery):
    server = SimulatedServer(nursery, TimedNode(service_s=500), capacity=1, timeout_s=60)
    await server.send_in_order("A")
    times: dict[int, float] = {}
    started = trio.current_time()

    async def one(tenant: str) -> None:
        reply = await server.request_completion(tenant)
        times[reply.status] = trio.current_time() - started

    nursery.start_soon(one, "A")
    await trio.testing.wait_all_tasks_blocked()
    nursery.start_soon(one, "A")
    await trio.sleep(61)
    assert {429: pytest.approx(0, abs=0.01), 504: pytest.approx(60, abs=0.1)} == times


async def test_criterion_4_idle_node_is_chosen_whenever_there_is_one(autojump_clock, nursery):
    nodes = [TimedNode(service_s=7) for _ in range(4)]
    server = SimulatedServer(nursery, *nodes, seats=2)
    for _ in range(50):
        idle = [node for node in nodes if not node.running]
        await server.send_in_order("A")
        if idle:
            assert any(node.running for node in idle)
        await trio.sleep(1.5)


async def test_criterion_5_totals_are_those_of_this_moment(autojump_clock, nursery):
    server = SimulatedServer(nursery, TimedNode(service_s=5))
    for expected in [(1, 0), (1, 1), (1, 2)]:
        await server.send_in_order("A")
        totals = await server.queue()
        assert expected == (totals["running"], totals["waiting"])


async def finished(server: SimulatedServer, *tenants: str, **body: object) -> list[Reply]:
    """Send one request per tenant in order, and wait for all replies."""
    replies = await server.send_in_order(*tenants, **body)
    with trio.fail_after(1000):
        while len(replies) < len(tenants):  # noqa: ASYNC110  # the clock is virtual
            await trio.sleep(0.5)
    return replies
