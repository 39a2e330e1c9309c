"""Jobs for idle seats: they take none that another job waits for, and use all others."""

from functools import partial
from random import Random

import msgspec
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from fairlead.base.config import QueueConfig
from fairlead.base.errors import Displaced
from fairlead.nodes.limits import NodeLimits
from fairlead.router.dispatch.dispatcher import Dispatcher
from fairlead.router.swap.lru import LruPolicy
from router.dispatch.recorded import job

SEATS = 2


class Server:
    """A dispatcher with one node, and what happened to its jobs, in order."""

    def __init__(self, nursery: trio.Nursery, *, evictable: bool = False) -> None:
        self.events: list[str] = []
        self.dispatcher = Dispatcher(QueueConfig(timeout_s=1000), random=Random(0))
        self.nursery = nursery
        nursery.start_soon(self.dispatcher.run)
        self.limits = NodeLimits(SEATS, 1000, evictable=evictable)
        self.dispatcher.scheduler.node_up("node", frozenset({"m"}), self.limits)

    def start(self, name: str, takes_s: float, *, when_idle: bool = False, model: str = "m") -> None:
        self.nursery.start_soon(partial(self._run, name, takes_s, when_idle=when_idle, model=model))

    async def _run(self, name: str, takes_s: float, *, when_idle: bool, model: str) -> None:
        spec = msgspec.structs.replace(
            job().job, request_id=name, model=model, priority=2 if when_idle else 1, when_idle=when_idle
        )
        try:
            async with self.dispatcher.seat(spec):
                self.events.append(f"{name} begins")
                await trio.sleep(takes_s)
                self.events.append(f"{name} ends")
        except Displaced:
            self.events.append(f"{name} stops")


async def settle() -> None:
    await trio.testing.wait_all_tasks_blocked()


async def test_idle_seats_are_filled_one_by_one_and_the_queue_stays_empty(autojump_clock, nursery):
    server = Server(nursery)
    for index in range(5):
        server.start(f"line{index}", 10, when_idle=True)
        await settle()
    statistics = server.dispatcher.statistics()
    assert (statistics.running, statistics.waiting) == (SEATS, 0)
    await trio.sleep(15)
    assert sorted(server.events)[4:6] == ["line2 begins", "line3 begins"]
    await trio.sleep(100)
    ends = sorted(event for event in server.events if event.endswith("ends"))
    assert ends == [f"line{index} ends" for index in range(5)]


async def test_job_that_would_wait_gets_the_seat_of_the_newest_line_at_once(autojump_clock, nursery):
    server = Server(nursery)
    for name in ("old", "new", "next"):
        server.start(name, 1000, when_idle=True)
        await settle()
    before = trio.current_time()
    server.start("chat", 5)
    await settle()
    assert server.events == ["old begins", "new begins", "new stops", "chat begins"]
    assert trio.current_time() == before
    await trio.sleep(6)
    assert server.events[4:] == ["chat ends", "next begins"]


async def test_line_waits_while_a_job_waits_for_its_model_and_longer_than_the_queues_timeout(
    autojump_clock, nursery
):
    server = Server(nursery)
    for index in range(SEATS + 1):
        server.start(f"chat{index}", 900)
    await settle()
    server.start("line", 1, when_idle=True)
    await trio.sleep(899)
    assert "line begins" not in server.events
    await trio.sleep(1000)
    assert [event for event in server.events if event.startswith("line")] == ["line begins", "line ends"]


async def test_line_that_is_cancelled_while_it_waits_leaves_nothing(autojump_clock, nursery):
    server = Server(nursery)
    for index in range(SEATS):
        server.start(f"chat{index}", 10)
    await settle()
    with trio.move_on_after(1):
        spec = msgspec.structs.replace(job().job, request_id="line", when_idle=True)
        async with server.dispatcher.seat(spec):
            raise AssertionError
    assert len(server.dispatcher._idle) == 0
    assert sorted(server.dispatcher._by_id) == [f"chat{index}" for index in range(SEATS)]


async def test_lines_make_way_for_a_model_that_must_be_loaded(autojump_clock, nursery):
    server = Server(nursery, evictable=True)
    swaps = []
    server.dispatcher.models.configure(
        LruPolicy(max_loaded=1),
        {"m": 0.0, "other": 0.0},
        start_swap=lambda model, evict: swaps.append((model, evict)),
        stop_model=lambda model: None,
    )
    for name in ("line0", "line1"):
        server.start(name, 1000, when_idle=True)
    await settle()
    server.start("chat", 5, model="other")
    await settle()
    assert sorted(server.events[2:]) == ["line0 stops", "line1 stops"]
    assert swaps == [("other", frozenset({"m"}))]


async def test_line_waits_for_a_node_that_comes_up(autojump_clock, nursery):
    server = Server(nursery)
    server.start("line", 1, when_idle=True, model="late")
    await trio.sleep(100)
    assert server.events == []
    server.dispatcher.scheduler.node_up("other", frozenset({"late"}), server.limits)
    await trio.sleep(3)
    assert server.events == ["line begins", "line ends"]


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 9), st.booleans()), max_size=30))
def test_chats_begin_and_end_as_if_there_were_no_lines_and_each_line_ends_or_is_stopped(arrivals):
    """The oracle: the same chats alone. `arrivals`: when, for how long, and whether it is a line."""

    async def play(chosen: list[tuple[int, tuple[int, int, bool]]]) -> list[str]:
        async with trio.open_nursery() as nursery:
            server = Server(nursery)
            for number, (at_s, takes_s, is_line) in chosen:
                name = f"{'line' if is_line else 'chat'}{number}"
                nursery.start_soon(
                    _arrive, server, name, at_s + number / 100, takes_s + number / 10_000, is_line
                )
            await trio.sleep(1000)
            assert len(server.dispatcher._idle) == 0
            nursery.cancel_scope.cancel()
        return server.events

    async def main() -> None:
        numbered = list(enumerate(arrivals))
        events = await play(numbered)
        chats = [event for event in events if event.startswith("chat")]
        assert chats == await play([each for each in numbered if not each[1][2]])
        for number, (_, _, is_line) in numbered:
            if is_line:
                assert (f"line{number} ends" in events) + (f"line{number} stops" in events) == 1

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


async def _arrive(server: Server, name: str, at_s: float, takes_s: float, is_line: bool) -> None:
    await trio.sleep(at_s)
    server.start(name, takes_s, when_idle=is_line)
