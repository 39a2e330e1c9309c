"""When a client disconnects, at any step, the connection to the server is freed and nothing leaks."""

import pytest
import trio
from trio.abc import Instrument

from fairlead.base.errors import NodeFailed, RequestTimeout
from nodes.listening import CollectedDeltas, RecordingListener, generated, ready_node, relayed_job, stub
from nodes.stub_server import StubServer

# A response takes fewer steps. Each step is a separate run, and at least one run must complete.
STEPS = 60


async def _connections(server: StubServer, count: int) -> None:
    with trio.fail_after(60):
        while server.connections > count:  # noqa: ASYNC110  # the server closes them later
            await trio.sleep(0.001)


class _AtStep(Instrument):
    """Cancels a scope when the loop has run that many task steps since its creation."""

    def __init__(self, scope: trio.CancelScope, steps: int) -> None:
        self._scope = scope
        self._steps_left = steps

    def before_task_step(self, _task: trio.lowlevel.Task) -> None:
        self._steps_left -= 1
        if not self._steps_left:
            self._scope.cancel()


@pytest.mark.parametrize(("stream", "warm"), [(True, False), (True, True), (False, False), (False, True)])
async def test_disconnect_at_any_step_frees_the_connection(stream, warm):
    ended, cancelled = 0, 0
    for step in range(1, STEPS):
        async with stub() as server:
            node = ready_node(server)
            if warm:
                await generated(node, relayed_job())
            into = CollectedDeltas()
            with trio.CancelScope() as scope:
                instrument = _AtStep(scope, step)
                trio.lowlevel.add_instrument(instrument)
                try:
                    async with node.generate(relayed_job(stream=stream), into):
                        await into.over.wait()
                finally:
                    trio.lowlevel.remove_instrument(instrument)
            cancelled += scope.cancelled_caught
            ended += into.error is None and into.over.is_set()
            assert into.error is None
            counts = node.status().connections
            assert (node.status().busy, counts.busy, counts.waiting) == (0, 0, 0)
            # A kept connection is usable: the next job gets its complete response.
            following = await generated(node, relayed_job(stream=stream))
            assert following.error is None
            if stream:
                assert following.raw.endswith(b"[DONE]\n\n")
            await _connections(server, node.status().connections.idle)
    assert ended
    assert cancelled >= 3


async def test_many_short_requests_leave_no_connection_busy():
    async with stub() as server:
        node = ready_node(server, seats=2)

        async def client(number: int) -> None:
            for visit in range(20):
                with trio.move_on_after(0.0005 * ((number * 7 + visit * 3) % 10)):
                    await generated(node, relayed_job(stub={"delay_s": 0.0003}))

        async with trio.open_nursery() as nursery:
            for number in range(12):
                nursery.start_soon(client, number)
        counts = node.status().connections
        assert (counts.busy, counts.waiting) == (0, 0)
        with trio.fail_after(60):
            for _ in range(10):
                result = await generated(node, relayed_job())
                assert result.error is None


async def test_server_connection_closes_when_the_client_disconnects():
    async with stub() as server:
        into = CollectedDeltas()
        async with ready_node(server).generate(relayed_job(stub={"delay_s": 0.01, "words": 10_000}), into):
            await into.first.wait()
        await _connections(server, 0)


async def test_error_inside_the_block_is_raised_unchanged():
    async with stub() as server:
        node = ready_node(server)
        with pytest.raises(RequestTimeout):
            async with node.generate(relayed_job(stub={"how": "silent"}), CollectedDeltas()):
                raise RequestTimeout("too long")
        assert node.status().busy == 0


async def test_stream_that_is_not_closed_does_not_delay_the_response(autojump_clock):
    autojump_clock.autojump_threshold = 0.05
    async with stub() as server:
        node = ready_node(server)
        began = trio.current_time()
        result = await generated(node, relayed_job(stub={"how": "slow_end"}))
        assert trio.current_time() - began < 1
        assert result.error is None
        assert node.status().connections.idle == 0


async def test_node_reports_that_it_is_down_before_its_jobs_fail():
    order = []

    class RecordingDown(RecordingListener):
        def __call__(self, node, limits):
            if limits is None:
                order.append("down")

    class RecordingFailure(CollectedDeltas):
        def fail(self, error):
            order.append("failed")
            super().fail(error)

    async with stub() as server:
        node = ready_node(server, RecordingDown())
        into = RecordingFailure()
        async with node.generate(relayed_job(stub={"how": "stall", "after": 3}), into):
            await into.first.wait()
            node.went_down(NodeFailed("unreachable"))
            await into.over.wait()
        assert order == ["down", "failed"]
        assert isinstance(into.error, NodeFailed)
        assert node.status().connections.busy == 0


async def test_job_fails_when_its_node_goes_down_before_the_request_is_sent():
    async with stub() as server:
        node = ready_node(server)
        into = CollectedDeltas()
        async with node.generate(relayed_job(), into):
            node.went_down(NodeFailed("unreachable"))
            await into.over.wait()
        assert isinstance(into.error, NodeFailed)
        assert server.jobs == []
