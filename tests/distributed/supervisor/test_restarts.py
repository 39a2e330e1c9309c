"""When the supervisor starts its children again, and with what; small fakes are in place of the processes."""

import socket
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from itertools import pairwise
from typing import ClassVar

import pytest
import trio
import trio.testing

from distributed.supervisor.running_server import Announced
from fairlead.base.config import Config
from fairlead.distributed.supervisor import control
from fairlead.distributed.supervisor.restarts import (
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    MOST_UNREADY,
    SPACING_S,
    STEADY_S,
    CrashPauses,
)
from fairlead.server.processes import supervisor
from fairlead.server.processes.supervisor import Supervisor

FRONTS = 3
START_S = 0.5


class FakeChild:
    """A child that is ready after `START_S`, and ends when the test says so; `plan` may end it earlier.

    The `plan` maps a name to how long the child lives: for all children of a role without their numbers.
    """

    made: ClassVar[list["FakeChild"]] = []
    plan: ClassVar[dict[str, float]] = {}

    def __init__(self, name, descriptors=()):
        self.name = name
        self.role = name.partition(" ")[0]
        self.pid = None
        self.was_ready = False
        self.sent = []
        self.began_at = self.ended_at = self.first = None
        self.handle = None
        self._scope = trio.CancelScope()
        self.made.append(self)

    def send(self, message):
        self.sent.append(message)

    def end(self):
        self._scope.cancel()

    def kill(self):
        """Nothing was started."""

    async def prepare(self):
        """Nothing has to be started."""

    async def discard(self):
        """Nothing was started."""

    async def run(self, first):
        self.first, self.began_at = first, trio.current_time()
        lives_s = self.plan.get(self.role, float("inf"))
        try:
            with self._scope, trio.move_on_after(lives_s):
                await trio.sleep(START_S)
                self.was_ready = True
                self.handle(control.RoleReady())
                if self.role == "dispatcher":
                    self.handle(control.ModelsLoaded(()))
                await trio.sleep_forever()
        finally:
            self.ended_at = trio.current_time()

    def say(self, message):
        self.handle(message)

    def stood_in_for(self):
        """Return the fronts that it was to stand in for, in the latest message."""
        return [message.absent for message in self.sent if isinstance(message, control.StandIn)][-1]


@asynccontextmanager
async def supervised(monkeypatch, **plan):
    """Run a supervisor with fakes, which are ready; `plan` is of `FakeChild`."""
    monkeypatch.setattr(supervisor, "ChildProcess", FakeChild)
    monkeypatch.setattr(FakeChild, "made", [])
    monkeypatch.setattr(FakeChild, "plan", {})
    async with AsyncExitStack() as stack:
        sockets = [[stack.enter_context(socket.socket())] for _ in range(FRONTS)]
        nursery = await stack.enter_async_context(trio.open_nursery())
        config = Config(models=(), fronts=FRONTS, port=1)
        found = Supervisor(config, "/nowhere", sockets, Announced(), nursery)
        ready = trio.Event()
        nursery.start_soon(partial(found.run, ready.set))
        with trio.fail_after(10):
            await ready.wait()
        FakeChild.plan.update(plan)
        yield found
        nursery.cancel_scope.cancel()


def runs(role):
    """Return the children of a role that have been started, in the order of their starts."""
    return sorted((each for each in FakeChild.made if each.first and each.role == role), key=_began)


def _began(child):
    return child.began_at, child.name


def pauses(children):
    return [after.began_at - before.ended_at for before, after in pairwise(children)]


async def test_pause_grows_with_the_rate_of_crashes_and_not_beyond_a_second(mock_clock):
    found = CrashPauses()
    assert [found.after(0.1) for _ in range(7)] == [0, 0.1, 0.2, 0.4, 0.8, LONGEST_PAUSE_S, LONGEST_PAUSE_S]
    mock_clock.jump(30)
    assert found.after(0.1) == 0
    mock_clock.jump(4)
    assert found.after(0.1) == FIRST_PAUSE_S  # one crash in ten seconds, and not all that ever were


async def test_pause_is_reset_after_a_run_of_five_seconds(mock_clock):
    found = CrashPauses()
    for _ in range(9):
        found.after(STEADY_S - 0.1)
    assert found.after(STEADY_S - 0.1) == LONGEST_PAUSE_S
    assert found.after(STEADY_S) == 0
    assert [found.after(0.1), found.after(0.1)] == [0, FIRST_PAUSE_S]


async def test_dispatcher_that_crashes_again_and_again_is_started_within_a_second(
    autojump_clock, monkeypatch
):
    async with supervised(monkeypatch):
        FakeChild.plan["dispatcher"] = 0.6
        runs("dispatcher")[-1].end()
        await trio.sleep(20)
        found = runs("dispatcher")
        assert len(found) > 10
        assert max(pauses(found)) <= LONGEST_PAUSE_S
        # One that has lived for long enough is started again at once, and so is its successor's successor.
        FakeChild.plan["dispatcher"] = STEADY_S
        await trio.sleep(30)
        assert pauses(runs("dispatcher"))[-3:] == pytest.approx([0, 0, 0])


async def test_fronts_that_crash_are_never_all_in_a_pause(autojump_clock, monkeypatch):
    async with supervised(monkeypatch):
        FakeChild.plan["front"] = 0.6
        for front in runs("front"):
            front.end()
        began = trio.current_time()
        await trio.sleep(30)
        found = runs("front")
        assert any(pause > 0.5 for pause in pauses([each for each in found if each.first.number == 0]))
        for step in range(300):
            moment = began + 0.1 * step
            assert any(
                each.began_at <= moment and (each.ended_at is None or moment <= each.ended_at)
                for each in found
            )


async def test_fronts_that_end_at_once_are_started_a_few_times_a_second(autojump_clock, monkeypatch):
    async with supervised(monkeypatch):
        FakeChild.plan["front"] = 0.0
        before = len(runs("front"))
        for front in runs("front"):
            front.end()
        await trio.sleep(10)
        assert before < len(runs("front")) <= before + FRONTS * 10 / SPACING_S + FRONTS


async def test_fronts_that_are_there_stand_in_for_the_others(autojump_clock, monkeypatch):
    async with supervised(monkeypatch):
        zero, one, two = sorted(runs("front"), key=lambda front: front.first.number)
        assert (zero.stood_in_for(), one.stood_in_for()) == ((), ())
        one.end()
        await trio.sleep(START_S / 2)
        assert (zero.stood_in_for(), two.stood_in_for()) == ((1,), (1,))
        two.end()
        await trio.sleep(START_S / 4)
        assert zero.stood_in_for() == (1, 2)
        await trio.sleep(START_S)
        assert {each.stood_in_for() for each in runs("front") if each.ended_at is None} == {()}


async def test_process_that_cannot_start_later_is_ended_and_started_again(autojump_clock, monkeypatch):
    async with supervised(monkeypatch):
        for role in ("front", "dispatcher"):
            found = runs(role)
            found[-1].say(control.CannotStart("no such file", is_bad_config=False))
            await trio.sleep(2)
            assert found[-1].ended_at is not None
            assert len(runs(role)) == len(found) + 1


@pytest.mark.parametrize("role", ["front", "dispatcher"])
async def test_configuration_that_ends_processes_is_replaced_by_the_last_good_one(
    autojump_clock, monkeypatch, role
):
    async with supervised(monkeypatch) as found:
        good = runs(role)[-1].first.config
        await found.reload(1, Config(models=(), fronts=FRONTS, allowed_hosts=("bad",)))
        bad = control.pack(Config(models=(), fronts=FRONTS, allowed_hosts=("bad",), port=1))
        FakeChild.plan[role] = START_S / 2
        before = len(runs(role))
        runs(role)[-1].end()
        with trio.fail_after(60):
            while runs(role)[-1].first.config != good or len(runs(role)) == before:  # noqa: ASYNC110
                await trio.sleep(0.1)
        started = [each.first.config for each in runs(role)[before:]]
        assert started == [bad] * MOST_UNREADY + [good]
        del FakeChild.plan[role]
        better = Config(models=(), fronts=FRONTS, allowed_hosts=("better",), port=1)
        await found.reload(1, better)
        await trio.sleep(5)
        runs(role)[-1].end()
        await trio.sleep(5)
        assert runs(role)[-1].first.config == control.pack(better)
