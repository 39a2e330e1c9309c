"""A client that leaves, at whatever moment: its connection is closed, and nothing is held."""

import pytest
import trio
from trio.abc import Instrument

from fairlead.errors import NodeFailed, RequestTimeout
from nodes.listening import Collected, Listening, generated, ready_node, relayed_job, stub
from nodes.stub_server import StubServer

# More than an answer takes; each is a run of its own, and at least one must come to the end.
STEPS = 60


async def _connections(server: StubServer, count: int) -> None:
    with trio.fail_after(60):
        while server.connections > count:  # noqa: ASYNC110  # the other side notices when it does
            await trio.sleep(0.001)


class _AtStep(Instrument):
    """Cancels a scope when the loop has run a number of task steps since it was set."""

    def __init__(self, scope: trio.CancelScope, steps: int) -> None:
        self._scope = scope
        self._left = steps

    def before_task_step(self, _task: trio.lowlevel.Task) -> None:
        self._left -= 1
        if not self._left:
            self._scope.cancel()


@pytest.mark.parametrize(("stream", "warm"), [(True, False), (True, True), (False, False), (False, True)])
async def test_a_client_that_leaves_at_any_step_leaves_nothing_behind(stream, warm):
    ended, left = 0, 0
    for step in range(1, STEPS):
        async with stub() as server:
            node = ready_node(server)
            if warm:
                await generated(node, relayed_job())
            into = Collected()
            with trio.CancelScope() as scope:
                instrument = _AtStep(scope, step)
                trio.lowlevel.add_instrument(instrument)
                try:
                    async with node.generate(relayed_job(stream=stream), into):
                        await into.over.wait()
                finally:
                    trio.lowlevel.remove_instrument(instrument)
            left += scope.cancelled_caught
            ended += into.error is None and into.over.is_set()
            assert into.error is None
            counts = node.status().connections
            assert (0, 0, 0) == (node.status().busy, counts.busy, counts.waiting)
            # What was kept is good: the next job gets an answer of its own, and all of it.
            following = await generated(node, relayed_job(stream=stream))
            assert following.error is None
            if stream:
                assert following.raw.endswith(b"[DONE]\n\n")
            await _connections(server, node.status().connections.idle)
    assert ended
    assert left >= 3


async def test_churn_leaves_no_place_taken():
    async with stub() as server:
        node = ready_node(server, seats=2)

        async def visitor(number: int) -> None:
            for visit in range(20):
                with trio.move_on_after(0.0005 * ((number * 7 + visit * 3) % 10)):
                    await generated(node, relayed_job(stub={"delay_s": 0.0003}))

        async with trio.open_nursery() as nursery:
            for number in range(12):
                nursery.start_soon(visitor, number)
        counts = node.status().connections
        assert (0, 0) == (counts.busy, counts.waiting)
        with trio.fail_after(60):
            for _ in range(10):
                got = await generated(node, relayed_job())
                assert got.error is None


async def test_the_server_learns_that_the_client_has_left():
    async with stub() as server:
        into = Collected()
        async with ready_node(server).generate(relayed_job(stub={"delay_s": 0.01, "words": 10_000}), into):
            await into.first.wait()
        await _connections(server, 0)


async def test_an_error_inside_the_block_comes_out_as_itself():
    async with stub() as server:
        node = ready_node(server)
        with pytest.raises(RequestTimeout):
            async with node.generate(relayed_job(stub={"how": "silent"}), Collected()):
                raise RequestTimeout("too long")
        assert 0 == node.status().busy


async def test_a_stream_that_does_not_close_holds_nobody_up(autojump_clock):
    autojump_clock.autojump_threshold = 0.05
    async with stub() as server:
        node = ready_node(server)
        began = trio.current_time()
        got = await generated(node, relayed_job(stub={"how": "slow_end"}))
        assert trio.current_time() - began < 1
        assert got.error is None
        assert 0 == node.status().connections.idle


async def test_a_node_that_goes_down_fails_its_jobs_after_it_has_said_so():
    order = []

    class Noted(Listening):
        def node_down(self, node):
            order.append("down")

    class Failing(Collected):
        def fail(self, error):
            order.append("failed")
            super().fail(error)

    async with stub() as server:
        node = ready_node(server, Noted())
        into = Failing()
        async with node.generate(relayed_job(stub={"how": "stall", "after": 3}), into):
            await into.first.wait()
            node.went_down(NodeFailed("it was unplugged"))
            await into.over.wait()
        assert ["down", "failed"] == order
        assert isinstance(into.error, NodeFailed)
        assert 0 == node.status().connections.busy


async def test_a_node_that_goes_down_in_the_moment_a_job_comes_fails_it():
    async with stub() as server:
        node = ready_node(server)
        into = Collected()
        async with node.generate(relayed_job(), into):
            node.went_down(NodeFailed("it was unplugged"))
            await into.over.wait()
        assert isinstance(into.error, NodeFailed)
        assert [] == server.jobs
