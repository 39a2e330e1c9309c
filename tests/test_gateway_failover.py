"""A node fails or is unexpectedly full: the job is retried; its client gets one answer or one error."""

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from random import Random

import pytest
import trio

from fairlead.answer.sink import Sink
from fairlead.config import QueueConfig
from fairlead.dispatch.dispatcher import Dispatcher
from fairlead.errors import (
    Cancelled,
    EngineFailed,
    FairleadError,
    LoadFailed,
    NodeFailed,
    NodeFull,
    QueueTimeout,
    RequestTimeout,
)
from fairlead.fleet.node_registry import NodeRegistry
from fairlead.gateway import Answer, Gateway
from fairlead.job import Delta, Job, Passthrough, Relay, Sampling
from fairlead.nodes.limits import NodeLimits
from fake_nodes import job

GONE = NodeFailed("gone")
FULL = NodeFull("full")
# What a node does with one job: pauses in seconds, pieces of the answer, and what it fails with.
Play = Iterable[float | str | Delta | FairleadError]
WHOLE: Play = (1.0, "one ", 1.0, "two ", 1.0, "three.")
TEXT = "one two three."


class PlayingNode:
    """Handles each job as the next play says; the last play is repeated for all further jobs."""

    def __init__(self, name: str, *plays: Play) -> None:
        self.id = name
        self.models = frozenset({"m"})
        self.plays = list(plays)
        self.served: list[str] = []
        self.running = 0

    @asynccontextmanager
    async def generate(self, sent: Job, into: Sink) -> AsyncIterator[None]:
        play = tuple(self.plays.pop(0) if len(self.plays) > 1 else self.plays[0])
        self.served.append(sent.tenant)
        if isinstance(play[0], FairleadError):
            raise play[0]
        self.running += 1
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._play, play, into)
                yield
                nursery.cancel_scope.cancel()
        finally:
            self.running -= 1

    async def _play(self, play: Play, into: Sink) -> None:
        for step in play:
            if isinstance(step, float):
                await trio.sleep(step)
            elif isinstance(step, FairleadError):
                into.fail(step)
            elif isinstance(step, Delta):
                into.put(step)
            else:
                ends = step.endswith(".")
                into.put(Delta(0, step, [len(step)], finish_reason="stop" if ends else None))


class World:
    """A gateway in front of some nodes, all up."""

    def __init__(self, nursery: trio.Nursery, *nodes: PlayingNode, seats: int = 1, **queue: object) -> None:
        self.dispatcher = Dispatcher(QueueConfig(**queue), random=Random(0))
        nursery.start_soon(self.dispatcher.run)
        self.registry = NodeRegistry(self.dispatcher.scheduler)
        self.gateway = Gateway(self.dispatcher, self.registry, request_timeout_s=100)
        self.nodes = nodes
        for node in nodes:
            self.up(node, seats)

    def up(self, node: PlayingNode, seats: int = 1) -> None:
        self.registry.report(node, NodeLimits(seats=seats, max_model_len=1000))

    async def run_job(self, sent: Job) -> str:
        """Return the answer's text, read as a route reads it. Raise the job's error."""
        try:
            async with trio.open_nursery() as exchange:
                answer = await exchange.start(self.gateway.serve, sent)
                text = await read(answer, stream=sent.stream)
        except* FairleadError as group:
            error: BaseException = group
            while isinstance(error, BaseExceptionGroup):
                (error,) = error.exceptions
            raise error from None
        return text

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
    wanted = job(tenant, stream=stream, n=n, request_id=request_id)
    return Job(
        **{name: getattr(wanted, name) for name in wanted.__struct_fields__ if name != "sampling"},
        sampling=Sampling(max_tokens=10, **sampling),
    )


@pytest.fixture(params=["plain", "greedy stream", "seeded stream", "random stream"])
def anything(request):
    return {
        "plain": new_job(stream=False),
        "greedy stream": new_job(temperature=0),
        "seeded stream": new_job(seed=3),
        "random stream": new_job(),
    }[request.param]


@pytest.mark.parametrize("failing", [(GONE,), (5.0, GONE)], ids=["at once", "after a while"])
async def test_a_node_that_fails_before_the_first_delta_is_never_seen(
    autojump_clock, nursery, anything, failing
):
    nodes = [PlayingNode(name, failing if name == "bad" else WHOLE) for name in ("bad", "good")]
    world = World(nursery, *nodes)
    for _ in range(5):  # whichever node gets the first attempt
        assert await world.run_job(anything) == TEXT
        world.check_at_rest()
    assert len(nodes[1].served) == 5


async def test_a_second_attempt_waits_for_another_node_even_if_the_failed_one_has_a_seat(
    autojump_clock, nursery, anything
):
    bad, good = PlayingNode("bad", (5.0, GONE), WHOLE), PlayingNode("good", (50.0, "long."), WHOLE)
    world = World(nursery, bad, good)
    world.registry.report(good, None)

    async def keep_the_good_one_busy() -> None:
        await trio.sleep(1)
        world.up(good)
        await world.run_job(new_job("B"))

    nursery.start_soon(keep_the_good_one_busy)
    started = trio.current_time()
    assert await world.run_job(anything) == TEXT
    assert pytest.approx(51 + 3) == trio.current_time() - started
    assert (bad.served, good.served) == (["A"], ["B", "A"])


async def test_second_attempt_goes_to_the_same_node_if_it_is_the_only_one(autojump_clock, nursery, anything):
    node = PlayingNode("only", (2.0, GONE), WHOLE)
    world = World(nursery, node)
    assert await world.run_job(anything) == TEXT
    assert len(node.served) == 2
    world.check_at_rest()


async def test_a_second_attempt_waits_for_a_node_that_went_down_to_come_back(
    autojump_clock, nursery, anything
):
    node = PlayingNode("only", (20.0, GONE), WHOLE)
    world = World(nursery, node)

    async def change_the_node() -> None:
        await trio.sleep(10)
        world.registry.report(node, None)
        await trio.sleep(30)
        assert world.dispatcher.statistics().waiting == 1
        world.up(node)

    nursery.start_soon(change_the_node)
    started = trio.current_time()
    assert await world.run_job(anything) == TEXT
    assert pytest.approx(40 + 3) == trio.current_time() - started


async def test_retried_job_goes_before_all_others_of_its_tenant(autojump_clock, nursery):
    node = PlayingNode("only", (5.0, GONE), WHOLE)
    world = World(nursery, node)
    done: list[str] = []

    async def run_job(name: str) -> None:
        await world.run_job(new_job(request_id=name))
        done.append(name)

    async with trio.open_nursery() as clients:
        for name in ("first", "second", "third"):
            clients.start_soon(run_job, name)
            await trio.testing.wait_all_tasks_blocked()
    assert done == ["first", "second", "third"]


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"seed": 3}], ids=["greedy", "seeded"])
@pytest.mark.parametrize("broken", [(1.0, "one ", 1.0), (1.0, "one ", 1.0, "two ", 1.0), (1.0, "o", 1.0)])
async def test_a_stream_that_can_be_repeated_goes_on_where_it_broke_off(
    autojump_clock, nursery, sampling, broken
):
    whole = tuple(Delta(0, letter, [ord(letter)]) for letter in TEXT[:-1])
    end = Delta(0, ".", [46], finish_reason="stop")
    read_text = "".join(piece for piece in broken if isinstance(piece, str))
    beginning = tuple(Delta(0, letter, [ord(letter)]) for letter in read_text)
    bad = PlayingNode("bad", (1.0, *beginning, 1.0, GONE), (*whole, end))
    world = World(nursery, bad)
    assert await world.run_job(new_job(**sampling)) == TEXT
    world.check_at_rest()


async def test_a_stream_that_cannot_be_repeated_fails_once_its_client_has_some_of_it(autojump_clock, nursery):
    world = World(nursery, PlayingNode("bad", (1.0, "one ", 1.0, GONE), WHOLE))
    with pytest.raises(NodeFailed, match="gone"):
        await world.run_job(new_job())
    world.check_at_rest()


async def test_a_stream_of_which_nothing_was_read_is_begun_anew(autojump_clock, nursery):
    world = World(nursery, PlayingNode("bad", ("uno ", 1.0, GONE), WHOLE))
    async with trio.open_nursery() as exchange:
        answer = await exchange.start(world.gateway.serve, new_job())
        await trio.sleep(20)
        assert await read(answer, stream=True) == TEXT
    assert answer.deltas.tokens == 3


async def test_a_plain_answer_that_breaks_off_is_made_again(autojump_clock, nursery):
    world = World(nursery, PlayingNode("bad", ("uno ", "due ", 5.0, GONE), WHOLE))
    assert await world.run_job(new_job(stream=False)) == TEXT


async def test_each_choice_resumes_where_it_stopped(autojump_clock, nursery):
    def choices(*pieces: tuple[int, str]) -> list[Delta]:
        return [
            Delta(index, text, [ord(text)], finish_reason="stop" if text == "." else None)
            for index, text in pieces
        ]

    first = choices((0, "a"), (1, "x"), (1, "."), (2, "p"))
    again = choices((2, "p"), (0, "a"), (2, "q"), (0, "b"), (1, "x"), (0, "."), (1, "."), (2, "."))
    world = World(nursery, PlayingNode("bad", (1.0, *first, 1.0, GONE), (1.0, *again)))
    async with trio.open_nursery() as exchange:
        answer = await exchange.start(world.gateway.serve, new_job(temperature=0, n=3))
        texts = ["", "", ""]
        while taken := await answer.deltas.take():
            for delta in taken:
                texts[delta.index] += delta.text
    assert texts == ["ab.", "x.", "pq."]
    assert answer.deltas.tokens == 8


async def test_an_answer_that_comes_out_otherwise_is_an_error_not_a_mixture(autojump_clock, nursery):
    world = World(nursery, PlayingNode("bad", (1.0, "one ", 1.0, GONE), (1.0, "uno ", 1.0, "due.")))
    async with trio.open_nursery() as exchange:
        answer = await exchange.start(world.gateway.serve, new_job(temperature=0))
        assert (await answer.deltas.take())[0].text == "one "
        with pytest.raises(NodeFailed, match="did not repeat"):
            await answer.deltas.take()
    world.check_at_rest()


async def test_second_failure_is_reported(autojump_clock, nursery, anything):
    last = NodeFailed("gone again")
    node = PlayingNode("bad", (1.0, GONE), (1.0, last), WHOLE)
    world = World(nursery, node)
    with pytest.raises(NodeFailed, match="gone again"):
        await world.run_job(anything)
    assert len(node.served) == 2
    world.check_at_rest()


@pytest.mark.parametrize(("method", "attempts"), [("GET", 2), ("POST", 1)])
async def test_request_to_a_commands_server_is_repeated_only_if_it_is_idempotent(
    autojump_clock, nursery, method, attempts
):
    node = PlayingNode("bad", (1.0, GONE), WHOLE)
    world = World(nursery, node)
    sent = job(relay=Relay("/x", b"", passthrough=Passthrough(method, ())))
    if attempts == 1:
        with pytest.raises(NodeFailed, match="gone"):
            await world.run_job(sent)
    else:
        await world.run_job(sent)
    assert len(node.served) == attempts


async def test_failure_of_a_sequence_is_not_retried(autojump_clock, nursery, anything):
    node = PlayingNode("bad", (1.0, EngineFailed("NaN")), WHOLE)
    world = World(nursery, node)
    with pytest.raises(EngineFailed):
        await world.run_job(anything)
    assert len(node.served) == 1
    world.check_at_rest()


async def test_full_node_costs_no_attempt_and_is_not_tried_for_a_second(autojump_clock, nursery, anything):
    node = PlayingNode("full", (FULL,), (0.5, FULL), (FULL,), (GONE,), (FULL,), WHOLE)
    world = World(nursery, node)
    started = trio.current_time()
    assert await world.run_job(anything) == TEXT
    assert len(node.served) == 6
    assert pytest.approx(4 * 1 + 0.5 + 3) == trio.current_time() - started
    world.check_at_rest()


async def test_full_node_gets_the_job_when_another_of_its_jobs_ends(autojump_clock, nursery):
    node = PlayingNode("full", (0.25, "short."), (FULL,), WHOLE)
    world = World(nursery, node, seats=4)
    started = trio.current_time()
    async with trio.open_nursery() as clients:
        clients.start_soon(world.run_job, new_job())
        await trio.testing.wait_all_tasks_blocked()
        assert await world.run_job(new_job()) == TEXT
        assert pytest.approx(0.25 + 3) == trio.current_time() - started


async def test_job_refused_by_a_full_node_goes_to_another_at_once(autojump_clock, nursery):
    world = World(nursery, PlayingNode("full", (FULL,)), PlayingNode("good", WHOLE))
    started = trio.current_time()
    for _ in range(5):
        assert await world.run_job(new_job()) == TEXT
    assert pytest.approx(5 * 3) == trio.current_time() - started


async def test_job_refused_until_its_deadline_gets_a_queue_timeout(autojump_clock, nursery, anything):
    world = World(nursery, PlayingNode("full", (FULL,)), timeout_s=30)
    started = trio.current_time()
    with pytest.raises(QueueTimeout):
        await world.run_job(anything)
    assert pytest.approx(30) == trio.current_time() - started
    world.check_at_rest()


async def test_second_wait_keeps_the_first_deadline(autojump_clock, nursery, anything):
    node = PlayingNode("only", (20.0, GONE), WHOLE)
    world = World(nursery, node, timeout_s=30)
    started = trio.current_time()

    async def take_the_node_away() -> None:
        await trio.sleep(10)
        world.registry.report(node, None)

    nursery.start_soon(take_the_node_away)
    with pytest.raises(QueueTimeout):
        await world.run_job(anything)
    assert pytest.approx(30) == trio.current_time() - started
    world.check_at_rest()


async def test_queue_timeout_does_not_apply_after_the_first_delta(autojump_clock, nursery):
    node = PlayingNode("only", (1.0, "one ", 1.0, GONE), WHOLE)
    world = World(nursery, node, timeout_s=10)

    async def change_the_node() -> None:
        await trio.sleep(1.5)
        world.registry.report(node, None)
        await trio.sleep(50)
        world.up(node)

    nursery.start_soon(change_the_node)
    assert await world.run_job(new_job(temperature=0)) == TEXT


async def test_the_request_timeout_runs_from_the_first_seat(autojump_clock, nursery, anything):
    world = World(nursery, PlayingNode("slow", (60.0, GONE), (60.0, "one.")), timeout_s=1000)
    started = trio.current_time()
    with pytest.raises(RequestTimeout):
        await world.run_job(anything)
    assert pytest.approx(100) == trio.current_time() - started
    world.check_at_rest()


async def test_the_request_timeout_ends_the_second_wait_too(autojump_clock, nursery, anything):
    node = PlayingNode("only", (20.0, GONE))
    world = World(nursery, node, timeout_s=1000)

    async def take_the_node_away() -> None:
        await trio.sleep(10)
        world.registry.report(node, None)

    nursery.start_soon(take_the_node_away)
    started = trio.current_time()
    with pytest.raises(RequestTimeout):
        await world.run_job(anything)
    assert pytest.approx(100) == trio.current_time() - started
    world.check_at_rest()


@pytest.mark.parametrize("leave_after_s", [0.0, 1.0, 5.0, 5.5, 6.0, 7.0, 9.0])
async def test_client_that_disconnects_at_any_time_holds_nothing(
    autojump_clock, nursery, anything, leave_after_s
):
    node = PlayingNode("only", (5.0, GONE), (FULL,), (1.0, "one ", 1.0, "two ", 1.0, "three."))
    world = World(nursery, node)
    with trio.move_on_after(leave_after_s):
        await world.run_job(anything)
    world.check_at_rest()
    node.plays = [WHOLE]
    assert await world.run_job(new_job()) == TEXT


async def test_cancellation_in_the_second_wait_is_raised_at_once(autojump_clock, nursery, anything):
    node = PlayingNode("full", (FULL,))
    world = World(nursery, node)

    async def cancel() -> None:
        await trio.sleep(3.5)
        assert world.gateway.cancel("", "")

    nursery.start_soon(cancel)
    started = trio.current_time()
    with pytest.raises(Cancelled):
        await world.run_job(anything)
    assert pytest.approx(3.5) == trio.current_time() - started
    world.check_at_rest()


async def test_failed_load_is_raised_to_a_job_that_waits_for_its_second_attempt(
    autojump_clock, nursery, anything
):
    node = PlayingNode("only", (20.0, GONE))
    world = World(nursery, node)

    async def break_the_node() -> None:
        await trio.sleep(10)
        world.registry.report(node, None)
        await trio.sleep(20)
        world.dispatcher.scheduler.load_failed(node.models, LoadFailed("no such file"))

    nursery.start_soon(break_the_node)
    with pytest.raises(LoadFailed):
        await world.run_job(anything)
    world.check_at_rest()


async def test_a_server_that_drains_lets_a_failed_job_run_again(autojump_clock, nursery, anything):
    node = PlayingNode("full", (FULL,), (2.0, GONE), WHOLE)
    world = World(nursery, node)

    async def drain() -> None:
        await trio.sleep(0.5)
        assert world.dispatcher.statistics().waiting == 1
        world.dispatcher.scheduler.drain()

    nursery.start_soon(drain)
    assert await world.run_job(anything) == TEXT


async def test_late_output_of_a_failed_node_is_dropped(autojump_clock, nursery):
    node = PlayingNode("bad", (1.0, GONE, "late ", "words."), WHOLE)
    world = World(nursery, node)
    assert await world.run_job(new_job()) == TEXT
