"""A node fails or is unexpectedly full: the job is retried; its client gets one answer or one error."""

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from random import Random

import pytest
import trio

from fairlead.base.config import QueueConfig
from fairlead.base.errors import (
    Cancelled,
    EngineFailed,
    FairleadError,
    LoadFailed,
    NodeFailed,
    NodeFull,
    NodeLimited,
    NodesFull,
    QueueTimeout,
    RequestTimeout,
    StaleGrant,
)
from fairlead.base.grant import Grant
from fairlead.base.job import Delta, Job, Passthrough, Relay, Sampling
from fairlead.base.requester import Requester
from fairlead.generation.gateway import Answer, Gateway
from fairlead.nodes.limits import NodeLimits
from fairlead.nodes.streams.sink import Sink
from fairlead.router.dispatch.dispatcher import Dispatcher
from fairlead.router.fleet.node_registry import NodeRegistry
from fake_nodes import job

FAILED = NodeFailed("failed")
FULL = NodeFull("full")
STALE = StaleGrant("the grant is of epoch 1")
# A node's actions for one job: pauses in seconds, pieces of the answer, and an error at which it fails.
Script = Iterable[float | str | Delta | FairleadError]
COMPLETE: Script = (1.0, "one ", 1.0, "two ", 1.0, "three.")
TEXT = "one two three."


class ScriptedNode:
    """Runs the next script for each job; the last one also for all further jobs."""

    def __init__(self, name: str, *scripts: Script) -> None:
        self.id = name
        self.models = frozenset({"m"})
        self.scripts = list(scripts)
        self.served: list[str] = []
        self.running = 0

    @asynccontextmanager
    async def generate(
        self, sent: Job, into: Sink, *, grant: Grant | None = None, seats: object = None
    ) -> AsyncIterator[None]:
        script = tuple(self.scripts.pop(0) if len(self.scripts) > 1 else self.scripts[0])
        self.served.append(sent.tenant)
        if isinstance(script[0], FairleadError):
            raise script[0]
        self.running += 1
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._run, script, into)
                yield
                nursery.cancel_scope.cancel()
        finally:
            self.running -= 1

    async def _run(self, script: Script, into: Sink) -> None:
        for step in script:
            if isinstance(step, float):
                await trio.sleep(step)
            elif isinstance(step, FairleadError):
                into.fail(step)
            elif isinstance(step, Delta):
                into.put(step)
            else:
                ends = step.endswith(".")
                into.put(Delta(0, step, [len(step)], finish_reason="stop" if ends else None))


class GatewayHarness:
    """A gateway in front of some nodes, which are all up."""

    def __init__(self, nursery: trio.Nursery, *nodes: ScriptedNode, seats: int = 1, **queue: object) -> None:
        self.dispatcher = Dispatcher(QueueConfig(**queue), random=Random(0))
        nursery.start_soon(self.dispatcher.run)
        self.registry = NodeRegistry(self.dispatcher.scheduler)
        self.gateway = Gateway(self.dispatcher, self.registry, request_timeout_s=100)
        self.nodes = nodes
        for node in nodes:
            self.up(node, seats)

    def up(self, node: ScriptedNode, seats: int = 1) -> None:
        self.registry.report(node, NodeLimits(seats=seats, max_model_len=1000))

    async def run_job(self, sent: Job) -> str:
        """Return the answer's text, read as a route reads it. Raise the job's error."""
        error: BaseException | None = None
        try:
            async with trio.open_nursery() as exchange:
                answer = await exchange.start(self.gateway.serve, sent)
                text = await read(answer, stream=sent.stream)
        except* FairleadError as group:
            error = group
        if error is None:
            return text
        while isinstance(error, BaseExceptionGroup):
            (error,) = error.exceptions
        raise error  # outside the block, in which Python 3.11.2 would wrap it

    def check_at_rest(self) -> None:
        counts = self.dispatcher.statistics()
        assert (counts.waiting, counts.running) == (0, 0)
        assert [0] * len(self.nodes) == [node.running for node in self.nodes]


async def read(answer: Answer, *, stream: bool) -> str:
    if not stream:
        await answer.deltas.ended()
    text = ""
    while taken := await answer.deltas.take():
        text += "".join(delta.text for delta in sorted(taken, key=lambda delta: delta.index))
    return text


def new_job(tenant: str = "A", *, stream: bool = True, n: int = 1, request_id: str = "", **sampling: object):
    template = job(tenant, stream=stream, n=n, request_id=request_id)
    return Job(
        **{name: getattr(template, name) for name in template.__struct_fields__ if name != "sampling"},
        sampling=Sampling(max_tokens=10, **sampling),
    )


@pytest.fixture(params=["plain", "greedy stream", "seeded stream", "random stream"])
def any_job(request):
    return {
        "plain": new_job(stream=False),
        "greedy stream": new_job(temperature=0),
        "seeded stream": new_job(seed=3),
        "random stream": new_job(),
    }[request.param]


@pytest.mark.parametrize("failing", [(FAILED,), (5.0, FAILED)], ids=["at once", "after a while"])
async def test_failure_before_the_first_delta_is_hidden_from_the_client(
    autojump_clock, nursery, any_job, failing
):
    nodes = [
        ScriptedNode(name, failing if name == "failing" else COMPLETE) for name in ("failing", "working")
    ]
    harness = GatewayHarness(nursery, *nodes)
    for _ in range(5):  # any node may get the first attempt
        assert await harness.run_job(any_job) == TEXT
        harness.check_at_rest()
    assert len(nodes[1].served) == 5


async def test_second_attempt_waits_for_another_node(autojump_clock, nursery, any_job):
    failing_node, working = (
        ScriptedNode("failing", (5.0, FAILED), COMPLETE),
        ScriptedNode("working", (50.0, "long."), COMPLETE),
    )
    harness = GatewayHarness(nursery, failing_node, working)
    harness.registry.report(working, None)

    async def occupy_the_working_node() -> None:
        await trio.sleep(1)
        harness.up(working)
        await harness.run_job(new_job("B"))

    nursery.start_soon(occupy_the_working_node)
    started = trio.current_time()
    assert await harness.run_job(any_job) == TEXT
    assert pytest.approx(51 + 3) == trio.current_time() - started
    assert (failing_node.served, working.served) == (["A"], ["B", "A"])


async def test_second_attempt_uses_the_same_node_if_it_is_the_only_one(autojump_clock, nursery, any_job):
    node = ScriptedNode("only", (2.0, FAILED), COMPLETE)
    harness = GatewayHarness(nursery, node)
    assert await harness.run_job(any_job) == TEXT
    assert len(node.served) == 2
    harness.check_at_rest()


async def test_second_attempt_waits_until_the_only_node_is_up_again(autojump_clock, nursery, any_job):
    node = ScriptedNode("only", (20.0, FAILED), COMPLETE)
    harness = GatewayHarness(nursery, node)

    async def restart_the_node() -> None:
        await trio.sleep(10)
        harness.registry.report(node, None)
        await trio.sleep(30)
        assert harness.dispatcher.statistics().waiting == 1
        harness.up(node)

    nursery.start_soon(restart_the_node)
    started = trio.current_time()
    assert await harness.run_job(any_job) == TEXT
    assert pytest.approx(40 + 3) == trio.current_time() - started


async def test_retried_job_runs_before_all_others_of_its_tenant(autojump_clock, nursery):
    node = ScriptedNode("only", (5.0, FAILED), COMPLETE)
    harness = GatewayHarness(nursery, node)
    finished: list[str] = []

    async def run_job(name: str) -> None:
        await harness.run_job(new_job(request_id=name))
        finished.append(name)

    async with trio.open_nursery() as clients:
        for name in ("first", "second", "third"):
            clients.start_soon(run_job, name)
            await trio.testing.wait_all_tasks_blocked()
    assert finished == ["first", "second", "third"]


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"seed": 3}], ids=["greedy", "seeded"])
@pytest.mark.parametrize("broken", [(1.0, "one ", 1.0), (1.0, "one ", 1.0, "two ", 1.0), (1.0, "o", 1.0)])
async def test_repeatable_stream_continues_where_it_failed(autojump_clock, nursery, sampling, broken):
    letters = tuple(Delta(0, letter, [ord(letter)]) for letter in TEXT[:-1])
    end = Delta(0, ".", [46], finish_reason="stop")
    read_text = "".join(piece for piece in broken if isinstance(piece, str))
    beginning = tuple(Delta(0, letter, [ord(letter)]) for letter in read_text)
    failing_node = ScriptedNode("failing", (1.0, *beginning, 1.0, FAILED), (*letters, end))
    harness = GatewayHarness(nursery, failing_node)
    assert await harness.run_job(new_job(**sampling)) == TEXT
    harness.check_at_rest()


async def test_unrepeatable_stream_fails_once_some_of_it_was_read(autojump_clock, nursery):
    harness = GatewayHarness(nursery, ScriptedNode("failing", (1.0, "one ", 1.0, FAILED), COMPLETE))
    with pytest.raises(NodeFailed, match="failed"):
        await harness.run_job(new_job())
    harness.check_at_rest()


async def test_unread_stream_is_restarted(autojump_clock, nursery):
    harness = GatewayHarness(nursery, ScriptedNode("failing", ("uno ", 1.0, FAILED), COMPLETE))
    async with trio.open_nursery() as exchange:
        answer = await exchange.start(harness.gateway.serve, new_job())
        await trio.sleep(20)
        assert await read(answer, stream=True) == TEXT
    assert answer.deltas.tokens == 3


async def test_plain_answer_is_generated_again_after_a_failure(autojump_clock, nursery):
    harness = GatewayHarness(nursery, ScriptedNode("failing", ("uno ", "due ", 5.0, FAILED), COMPLETE))
    assert await harness.run_job(new_job(stream=False)) == TEXT


async def test_each_choice_resumes_where_it_stopped(autojump_clock, nursery):
    def choices(*pieces: tuple[int, str]) -> list[Delta]:
        return [
            Delta(index, text, [ord(text)], finish_reason="stop" if text == "." else None)
            for index, text in pieces
        ]

    first = choices((0, "a"), (1, "x"), (1, "."), (2, "p"))
    second = choices((2, "p"), (0, "a"), (2, "q"), (0, "b"), (1, "x"), (0, "."), (1, "."), (2, "."))
    harness = GatewayHarness(nursery, ScriptedNode("failing", (1.0, *first, 1.0, FAILED), (1.0, *second)))
    async with trio.open_nursery() as exchange:
        answer = await exchange.start(harness.gateway.serve, new_job(temperature=0, n=3))
        texts = ["", "", ""]
        while taken := await answer.deltas.take():
            for delta in taken:
                texts[delta.index] += delta.text
    assert texts == ["ab.", "x.", "pq."]
    assert answer.deltas.tokens == 8


async def test_different_second_answer_is_an_error(autojump_clock, nursery):
    harness = GatewayHarness(
        nursery, ScriptedNode("failing", (1.0, "one ", 1.0, FAILED), (1.0, "uno ", 1.0, "due."))
    )
    async with trio.open_nursery() as exchange:
        answer = await exchange.start(harness.gateway.serve, new_job(temperature=0))
        assert (await answer.deltas.take())[0].text == "one "
        with pytest.raises(NodeFailed, match="did not repeat"):
            await answer.deltas.take()
    harness.check_at_rest()


async def test_second_failure_is_reported(autojump_clock, nursery, any_job):
    last = NodeFailed("failed second")
    node = ScriptedNode("failing", (1.0, FAILED), (1.0, last), COMPLETE)
    harness = GatewayHarness(nursery, node)
    with pytest.raises(NodeFailed, match="failed second"):
        await harness.run_job(any_job)
    assert len(node.served) == 2
    harness.check_at_rest()


@pytest.mark.parametrize(("method", "attempts"), [("GET", 2), ("POST", 1)])
async def test_request_to_a_commands_server_is_repeated_only_if_it_is_idempotent(
    autojump_clock, nursery, method, attempts
):
    node = ScriptedNode("failing", (1.0, FAILED), COMPLETE)
    harness = GatewayHarness(nursery, node)
    sent = job(relay=Relay("/x", b"", passthrough=Passthrough(method, ())))
    if attempts == 1:
        with pytest.raises(NodeFailed, match="failed"):
            await harness.run_job(sent)
    else:
        await harness.run_job(sent)
    assert len(node.served) == attempts


async def test_failure_of_a_sequence_is_not_retried(autojump_clock, nursery, any_job):
    node = ScriptedNode("failing", (1.0, EngineFailed("NaN")), COMPLETE)
    harness = GatewayHarness(nursery, node)
    with pytest.raises(EngineFailed):
        await harness.run_job(any_job)
    assert len(node.served) == 1
    harness.check_at_rest()


async def test_full_node_counts_as_no_attempt_and_is_tried_after_pauses_that_double(
    autojump_clock, nursery, any_job
):
    node = ScriptedNode("full", (FULL,), (0.5, FULL), (FULL,), (FAILED,), (FULL,), COMPLETE)
    harness = GatewayHarness(nursery, node)
    started = trio.current_time()
    assert await harness.run_job(any_job) == TEXT
    assert len(node.served) == 6
    assert pytest.approx(1 + 0.5 + 2 + 4 + 8 + 3) == trio.current_time() - started
    harness.check_at_rest()


async def test_stale_grant_counts_as_no_attempt_and_the_node_is_not_full(autojump_clock, nursery, any_job):
    node = ScriptedNode("only", (STALE,), (0.5, STALE), (STALE,), (FAILED,), (STALE,), COMPLETE)
    harness = GatewayHarness(nursery, node)
    started = trio.current_time()
    assert await harness.run_job(any_job) == TEXT
    assert len(node.served) == 6
    assert pytest.approx(0.5 + 3) == trio.current_time() - started
    harness.check_at_rest()


async def test_each_seat_passes_a_grant_of_its_own_to_the_node(autojump_clock, nursery):
    grants = []

    class Granted(ScriptedNode):
        def generate(self, sent, into, *, grant=None, seats=None):
            grants.append(grant)
            return super().generate(sent, into, grant=grant)

    harness = GatewayHarness(nursery, Granted("n", COMPLETE))
    for _ in range(2):
        await harness.run_job(new_job())
    assert grants == [Grant(0, 1), Grant(0, 2)]


async def test_full_node_gets_the_job_when_another_of_its_jobs_ends(autojump_clock, nursery):
    node = ScriptedNode("full", (0.25, "short."), (FULL,), COMPLETE)
    harness = GatewayHarness(nursery, node, seats=4)
    started = trio.current_time()
    async with trio.open_nursery() as clients:
        clients.start_soon(harness.run_job, new_job())
        await trio.testing.wait_all_tasks_blocked()
        assert await harness.run_job(new_job()) == TEXT
        assert pytest.approx(0.25 + 3) == trio.current_time() - started


async def test_job_refused_by_a_full_node_runs_on_another_at_once(autojump_clock, nursery):
    harness = GatewayHarness(nursery, ScriptedNode("full", (FULL,)), ScriptedNode("working", COMPLETE))
    started = trio.current_time()
    for _ in range(5):
        assert await harness.run_job(new_job()) == TEXT
    assert pytest.approx(5 * 3) == trio.current_time() - started


@pytest.mark.parametrize(
    ("rejection", "status"), [(NodeFull("it is busy"), 503), (NodeLimited("it is busy"), 429)]
)
async def test_job_of_a_full_node_gets_its_message_and_the_time_left_at_its_deadline(
    autojump_clock, nursery, any_job, rejection, status
):
    harness = GatewayHarness(nursery, ScriptedNode("full", (rejection,)), timeout_s=30)
    started = trio.current_time()
    with pytest.raises(NodesFull, match="it is busy") as refusal:
        await harness.run_job(any_job)
    # It has tried after 1, 3, 7, 15 and 25 s.
    assert (refusal.value.status, refusal.value.retry_after_s) == (status, 5)
    assert pytest.approx(30) == trio.current_time() - started
    harness.check_at_rest()


async def test_second_wait_keeps_the_first_deadline(autojump_clock, nursery, any_job):
    node = ScriptedNode("only", (20.0, FAILED), COMPLETE)
    harness = GatewayHarness(nursery, node, timeout_s=30)
    started = trio.current_time()

    async def remove_the_node() -> None:
        await trio.sleep(10)
        harness.registry.report(node, None)

    nursery.start_soon(remove_the_node)
    with pytest.raises(QueueTimeout):
        await harness.run_job(any_job)
    assert pytest.approx(30) == trio.current_time() - started
    harness.check_at_rest()


async def test_queue_timeout_does_not_apply_after_the_first_delta(autojump_clock, nursery):
    node = ScriptedNode("only", (1.0, "one ", 1.0, FAILED), COMPLETE)
    harness = GatewayHarness(nursery, node, timeout_s=10)

    async def restart_the_node() -> None:
        await trio.sleep(1.5)
        harness.registry.report(node, None)
        await trio.sleep(50)
        harness.up(node)

    nursery.start_soon(restart_the_node)
    assert await harness.run_job(new_job(temperature=0)) == TEXT


async def test_request_timeout_begins_at_the_first_seat(autojump_clock, nursery, any_job):
    harness = GatewayHarness(nursery, ScriptedNode("slow", (60.0, FAILED), (60.0, "one.")), timeout_s=1000)
    started = trio.current_time()
    with pytest.raises(RequestTimeout):
        await harness.run_job(any_job)
    assert pytest.approx(100) == trio.current_time() - started
    harness.check_at_rest()


async def test_request_timeout_ends_also_the_second_wait(autojump_clock, nursery, any_job):
    node = ScriptedNode("only", (20.0, FAILED))
    harness = GatewayHarness(nursery, node, timeout_s=1000)

    async def remove_the_node() -> None:
        await trio.sleep(10)
        harness.registry.report(node, None)

    nursery.start_soon(remove_the_node)
    started = trio.current_time()
    with pytest.raises(RequestTimeout):
        await harness.run_job(any_job)
    assert pytest.approx(100) == trio.current_time() - started
    harness.check_at_rest()


@pytest.mark.parametrize("disconnect_after_s", [0.0, 1.0, 5.0, 5.5, 6.0, 7.0, 9.0])
async def test_disconnect_at_any_time_releases_seat_and_queue_entry(
    autojump_clock, nursery, any_job, disconnect_after_s
):
    node = ScriptedNode("only", (5.0, FAILED), (FULL,), (1.0, "one ", 1.0, "two ", 1.0, "three."))
    harness = GatewayHarness(nursery, node)
    with trio.move_on_after(disconnect_after_s):
        await harness.run_job(any_job)
    harness.check_at_rest()
    node.scripts = [COMPLETE]
    assert await harness.run_job(new_job()) == TEXT


async def test_cancellation_in_the_second_wait_is_raised_at_once(autojump_clock, nursery, any_job):
    node = ScriptedNode("full", (FULL,))
    harness = GatewayHarness(nursery, node)

    async def cancel() -> None:
        await trio.sleep(3.5)
        assert await harness.gateway.cancel("", Requester("somebody"))

    nursery.start_soon(cancel)
    started = trio.current_time()
    with pytest.raises(Cancelled):
        await harness.run_job(any_job)
    assert pytest.approx(3.5) == trio.current_time() - started
    harness.check_at_rest()


async def test_failed_load_is_raised_to_a_job_that_waits_for_its_second_attempt(
    autojump_clock, nursery, any_job
):
    node = ScriptedNode("only", (20.0, FAILED))
    harness = GatewayHarness(nursery, node)

    async def fail_the_load() -> None:
        await trio.sleep(10)
        harness.registry.report(node, None)
        await trio.sleep(20)
        harness.dispatcher.scheduler.load_failed(node.models, LoadFailed("no such file"))

    nursery.start_soon(fail_the_load)
    with pytest.raises(LoadFailed):
        await harness.run_job(any_job)
    harness.check_at_rest()


async def test_failed_job_is_retried_while_the_server_drains(autojump_clock, nursery, any_job):
    node = ScriptedNode("full", (FULL,), (2.0, FAILED), COMPLETE)
    harness = GatewayHarness(nursery, node)

    async def drain() -> None:
        await trio.sleep(0.5)
        assert harness.dispatcher.statistics().waiting == 1
        harness.dispatcher.scheduler.drain()

    nursery.start_soon(drain)
    assert await harness.run_job(any_job) == TEXT


async def test_late_output_of_a_failed_node_is_dropped(autojump_clock, nursery):
    node = ScriptedNode("failing", (1.0, FAILED, "late ", "words."), COMPLETE)
    harness = GatewayHarness(nursery, node)
    assert await harness.run_job(new_job()) == TEXT
