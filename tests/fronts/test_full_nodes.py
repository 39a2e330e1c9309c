"""How long a node that is full gets no jobs: for its `Retry-After`, in one process and through a front."""

from types import SimpleNamespace

import pytest
import trio

from fairlead.dispatch.fullness import FIRST_PAUSE_S
from fairlead.gateway import Gateway
from fairlead.nodes.limits import NodeLimits
from fronts.system import System
from nodes.listening import relayed_job
from nodes.scripted import full_response, node, scripted

ANSWER = full_response(b'{"choices": [{"index": 0, "message": {"content": "hi"}}]}')
DRAINING = b'{"error": {"code": "draining", "message": "the server is shutting down"}}'


def draining(retry_after):
    lines = [] if retry_after is None else [f"Retry-After: {retry_after}"]
    return full_response(DRAINING, "application/json", *lines, status="503 Unavailable")


async def times_of_requests(answers, *, through_front):
    """Run a job whose attempts get these answers; return when each was made, in seconds from the first."""
    times = []

    def answer(_request):
        times.append(trio.current_time())
        return [answers[len(times) - 1]]

    with scripted(answer):
        async with trio.open_nursery() as nursery:
            system = System(nursery, {})
            system.start_dispatcher()
            source = system.start_front(0) if through_front else system.dispatcher
            await trio.sleep(1)
            far = node()
            limits = NodeLimits(1, max_model_len=1000, needs_relay=True)
            system.dispatcher.scheduler.node_up("far", frozenset({"m"}), limits)
            gateway = Gateway(source, _Nodes(far), request_timeout_s=600)
            await nursery.start(gateway.serve, relayed_job(stream=False))
            nursery.cancel_scope.cancel()
    return [pytest.approx(time - times[0], abs=0.01) for time in times]


class _Nodes(SimpleNamespace):
    """The only node, whatever its seat says."""

    def __init__(self, only):
        super().__init__(find=lambda _node_id: only)

    def __len__(self):
        return 1


@pytest.mark.parametrize("through_front", [False, True])
@pytest.mark.parametrize(
    ("retry_after", "pause_s"),
    [(7, 7.0), (2, 2.0), (0, 1.0)] + [(unusable, FIRST_PAUSE_S) for unusable in (None, "soon", "-3", "1.5")],
)
async def test_node_that_drains_gets_no_job_for_the_time_that_it_reports(
    retry_after, pause_s, through_front, autojump_clock
):
    answers = [draining(retry_after), draining(3), ANSWER]
    times = await times_of_requests(answers, through_front=through_front)
    assert times == [0.0, pause_s, pause_s + 3.0]
