"""Nodes that are full, refuse or fail, as their job sees it: in one process and through a front."""

from types import SimpleNamespace

import msgspec
import pytest
import trio

from distributed.frontends.system import System
from fairlead.base.errors import FairleadError, NodesFull
from fairlead.generation.gateway import Gateway
from fairlead.nodes.limits import NodeLimits
from fairlead.router.dispatch.fullness import FIRST_PAUSE_S
from nodes.listening import relayed_job
from nodes.scripted import full_response, node, scripted

ANSWER = full_response(b'{"choices": [{"index": 0, "message": {"content": "hi"}}]}')
DRAINING = b'{"error": {"code": "draining", "message": "the server is shutting down"}}'


def draining(retry_after):
    lines = [] if retry_after is None else [f"Retry-After: {retry_after}"]
    return full_response(DRAINING, "application/json", *lines, status="503 Unavailable")


BUSY = full_response(
    b'{"error":"the server is busy: too many requests wait"}',
    "application/json",
    "Retry-After: 5",
    status="503 x",
)
LIMITED = full_response(
    b'{"error":{"message":"slow down","code":429}}', "application/json", "Retry-After: 30", status="429 x"
)
FORBIDDEN_BODY = b'{"error":{"message":"this key may not use the model","code":403}}'
FORBIDDEN = full_response(FORBIDDEN_BODY, status="403 Forbidden")
NO_EMBEDDINGS_BODY = msgspec.json.encode(
    {"error": {"code": 501, "message": "embeddings are not enabled", "type": "not_supported_error"}}
)
NO_EMBEDDINGS = full_response(NO_EMBEDDINGS_BODY, status="501 Not Implemented")
LATE = full_response(b"<html>504 Gateway Time-out</html>", "text/html", status="504 Gateway Time-out")
WRONG_KEY = full_response(b'{"error": {"message": "key sk-123 is unknown"}}', status="401 Unauthorized")


class Attempts:
    """The requests for one job: the node of each, and when it came, in seconds from the first."""

    def __init__(self, answers):
        self.nodes = []
        self.times = []
        self._answers = answers

    def answer(self, request):
        name = msgspec.json.decode(request.partition(b"\r\n\r\n")[2])["model"]
        before = self.nodes.count(name)
        self.nodes.append(name)
        self.times.append(trio.current_time())
        answers = self._answers[name]
        return [answers[min(before, len(answers) - 1)]]


async def run_job(answers, *, through_front, **options):
    """Run a job on nodes that give these answers, one after another; return its attempts and its error."""
    attempts, error = Attempts(answers), None
    with scripted(attempts.answer):
        async with trio.open_nursery() as nursery:
            system = System(nursery, {})
            system.start_dispatcher()
            source = system.start_front(0) if through_front else system.dispatcher
            await trio.sleep(1)
            nodes = {name: node(names={"m": name}) for name in answers}
            for name in nodes:
                limits = NodeLimits(1, max_model_len=1000, needs_relay=True)
                system.dispatcher.scheduler.node_up(name, frozenset({"m"}), limits)
            gateway = Gateway(source, _Nodes(nodes), request_timeout_s=600)
            job = msgspec.structs.replace(relayed_job(stream=False), **options)
            try:
                await nursery.start(gateway.serve, job)
            except FairleadError as raised:
                error = raised
            nursery.cancel_scope.cancel()
    return attempts, error


async def times_of_requests(answers, *, through_front):
    """Run a job whose attempts get these answers; return when each was made, in seconds from the first."""
    attempts, error = await run_job({"far": answers}, through_front=through_front)
    assert error is None
    return [pytest.approx(time - attempts.times[0], abs=0.01) for time in attempts.times]


class _Nodes(SimpleNamespace):
    """The nodes by id."""

    def __init__(self, nodes):
        super().__init__(find=nodes.__getitem__, serving=lambda _model: list(nodes.values()))
        self._count = len(nodes)

    def __len__(self):
        return self._count


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


@pytest.fixture(params=[False, True], ids=["one process", "front"])
def through_front(request):
    return request.param


@pytest.mark.parametrize(("answer", "pause_s"), [(BUSY, 5.0), (LIMITED, 30.0)])
async def test_job_of_a_full_node_waits_as_long_as_that_asks(answer, pause_s, through_front, autojump_clock):
    assert await times_of_requests([answer, ANSWER], through_front=through_front) == [0.0, pause_s]


@pytest.mark.parametrize(
    ("answer", "status", "message", "left_s"),
    [(BUSY, 503, "the server is busy: too many requests wait", 3), (LIMITED, 429, "slow down", 18)],
)
async def test_error_at_the_deadline_is_the_node_s_with_the_time_left(
    answer, status, message, left_s, through_front, autojump_clock
):
    _, error = await run_job({"far": [answer]}, through_front=through_front, wait_limit_s=12.0)
    assert isinstance(error, NodesFull)
    assert (error.status, error.message) == (status, f"remote answered {status}: {message}")
    assert abs(error.retry_after_s - left_s) <= 1


async def test_job_that_must_not_be_queued_gets_the_node_s_error_at_once(through_front, autojump_clock):
    attempts, error = await run_job({"far": [LIMITED]}, through_front=through_front, no_queue=True)
    assert (error.status, error.message, error.retry_after_s) == (429, "remote answered 429: slow down", 30)
    assert trio.current_time() - attempts.times[0] < 1


async def test_full_node_sends_the_job_to_another_with_a_free_seat(through_front, autojump_clock):
    attempts, error = await run_job({"one": [BUSY], "two": [BUSY, ANSWER]}, through_front=through_front)
    assert error is None
    assert sorted(attempts.nodes[:2]) == ["one", "two"]
    assert attempts.times[1] - attempts.times[0] < 1


@pytest.mark.parametrize("answer", [FORBIDDEN, WRONG_KEY])
async def test_refusal_by_a_node_s_set_up_is_shown_only_if_all_nodes_refuse(
    answer, through_front, autojump_clock
):
    attempts, error = await run_job({"bad": [answer], "good": [ANSWER]}, through_front=through_front)
    assert error is None
    assert attempts.nodes.count("bad") <= 1
    refusing = {name: [answer] for name in ("one", "two", "three")}
    attempts, error = await run_job(refusing, through_front=through_front)
    assert sorted(attempts.nodes) == sorted(refusing)
    if answer is FORBIDDEN:
        assert (error.status, error.body) == (403, FORBIDDEN_BODY)
    else:
        assert (error.status, error.message) == (502, "remote rejected our API key")


async def test_refusal_does_not_count_as_one_of_two_attempts(through_front, autojump_clock):
    nodes = {"bad": [FORBIDDEN], "late": [LATE, ANSWER]}
    attempts, error = await run_job(nodes, through_front=through_front)
    assert error is None
    assert attempts.nodes.count("late") == 2


async def test_gateway_timeout_fails_the_attempt_only(through_front, autojump_clock):
    attempts, error = await run_job({"one": [LATE], "two": [LATE]}, through_front=through_front)
    assert sorted(attempts.nodes) == ["one", "two"]
    assert (error.code, error.status) == ("node_failed", 502)


async def test_501_is_the_answer(through_front, autojump_clock):
    nodes = {"one": [NO_EMBEDDINGS], "two": [NO_EMBEDDINGS]}
    attempts, error = await run_job(nodes, through_front=through_front)
    assert len(attempts.nodes) == 1
    assert (error.status, error.body) == (501, NO_EMBEDDINGS_BODY)
