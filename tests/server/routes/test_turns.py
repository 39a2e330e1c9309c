"""The rules of `Turns` by example, a state machine with a simple model and mutants, then `Threads`."""

import threading
from functools import partial

import pytest
import trio
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from fairlead.base.config import Config, QueueConfig
from fairlead.base.errors import QueueFull, QueueTimeout
from fairlead.generation import event_stream
from fairlead.generation.offload import Offload
from fairlead.generation.turns import Threads, Turns
from fairlead.server.responses import background, conversations
from first_failure import until_first_failure
from server.routes.responses_client import running

MACHINE_SETTINGS = settings(
    max_examples=100,
    stateful_step_count=40,
    phases=[Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)


def states(*turns):
    return [turn.state for turn in turns]


def test_tenant_has_one_thread_at_a_time():
    turns = Turns(2)
    first, second = turns.enter("a"), turns.enter("a")
    other = turns.enter("b")
    assert states(first, second, other) == ["running", "waiting", "running"]


def test_tenants_second_turn_waits_behind_the_first_turn_of_another():
    turns = Turns(1)
    first, second, other = turns.enter("a"), turns.enter("a"), turns.enter("b")
    turns.leave(first)
    assert states(second, other) == ["waiting", "running"]
    turns.leave(other)
    assert states(second) == ["running"]


def test_waiting_turn_that_leaves_is_skipped():
    turns = Turns(1)
    first, second, third = turns.enter("a"), turns.enter("b"), turns.enter("c")
    turns.leave(second)
    turns.leave(first)
    assert (states(second, third), turns.waiting) == (["over", "running"], 0)


def test_tenant_with_the_most_waiting_turns_loses_its_newest():
    turns = Turns(1, most_waiting=2)
    turns.enter("a")
    kept, last, other = turns.enter("a"), turns.enter("a"), turns.enter("b")
    assert states(kept, last, other) == ["waiting", "refused", "waiting"]
    assert states(turns.enter("b")) == ["refused"]


class TurnsMachine(RuleBasedStateMachine):
    """`waiting`, by tenant, `order` of the tenants and `running` are the model."""

    new_turns = Turns
    entered = Bundle("entered")

    @initialize(threads=st.integers(1, 3), each=st.integers(1, 2))
    def begin(self, threads, each):
        self.threads, self.each = threads, each
        self.turns = self.new_turns(threads, each=each, most_waiting=6)
        self.order = []  # tenants with waiting turns, the next one first
        self.waiting = {}
        self.running = []
        self.decisions = {}

    @rule(target=entered, tenant=st.sampled_from("abcd"))
    def enter(self, tenant):
        decision = []
        turn = self.turns.enter(tenant, lambda: decision.append(True))
        self.decisions[turn] = decision
        if self.may_run(tenant):
            self.running.append(turn)
            return turn
        if tenant not in self.order:
            self.order.append(tenant)
        self.waiting.setdefault(tenant, []).append(turn)
        if sum(map(len, self.waiting.values())) > 6:
            most = max(map(len, self.waiting.values()))
            refused = [line[-1] for line in self.waiting.values() if len(line) == most]
            lost = [one for one in refused if one.state == "refused"]
            assert len(lost) == 1
            assert self.decisions[lost[0]]
            self.stop_waiting(lost[0])
        return turn

    @rule(turn=entered)
    def leave(self, turn):
        ran = turn in self.running
        if ran:
            self.running.remove(turn)
            if turn.tenant in self.order:
                self.order.remove(turn.tenant)
                self.order.append(turn.tenant)
        elif turn in self.waiting.get(turn.tenant, ()):
            self.stop_waiting(turn)
        self.turns.leave(turn)
        while nexts := [tenant for tenant in self.order if self.may_run(tenant)]:
            begun = self.waiting[nexts[0]][0]
            self.stop_waiting(begun)
            self.running.append(begun)
            assert self.decisions[begun]

    @invariant()
    def all_are_where_they_should_be(self):
        waiting = [turn for line in self.waiting.values() for turn in line]
        assert {turn.state for turn in self.running} <= {"running"}
        assert {turn.state for turn in waiting} <= {"waiting"}
        assert (self.turns.running, self.turns.waiting) == (len(self.running), len(waiting))
        assert len(self.running) <= self.threads

    def may_run(self, tenant):
        own = sum(turn.tenant == tenant for turn in self.running)
        return len(self.running) < self.threads and own < self.each

    def stop_waiting(self, turn):
        self.waiting[turn.tenant].remove(turn)
        if not self.waiting[turn.tenant]:
            del self.waiting[turn.tenant]
            self.order.remove(turn.tenant)


TestTurns = TurnsMachine.TestCase
TestTurns.settings = MACHINE_SETTINGS


class StaysInFront(Turns):
    """A tenant stays before the others after its turn."""

    def leave(self, turn):
        lines, self._lines = self._lines, dict(self._lines)
        order = list(lines)
        self._free += turn.state == "running"
        if turn.state == "running":
            self._running[turn.tenant] -= 1
            if not self._running[turn.tenant]:
                del self._running[turn.tenant]
            turn.state = "over"
            self._lines = {tenant: lines[tenant] for tenant in order}
            self._begin()
        else:
            super().leave(turn)


class LosesThread(Turns):
    """A thread is lost when a waiting turn is cancelled."""

    def leave(self, turn):
        self._free -= turn.state == "waiting" and self.waiting > 2
        super().leave(turn)


class WakesNobody(Turns):
    """A waiting turn is not notified."""

    def _run(self, turn):
        super()._run(turn)
        turn.decided = lambda: None


class RefusesNewcomer(Turns):
    """The newest turn is refused, even if its tenant has few waiting turns."""

    def enter(self, tenant, decided=lambda: None):
        turn = super().enter(tenant, decided)
        if self.waiting == 6 and turn.state == "waiting":
            self.leave(turn)
            turn.state = "refused"
            decided()
        return turn


@pytest.mark.parametrize("mutant", [StaysInFront, LosesThread, WakesNobody, RefusesNewcomer])
def test_machine_catches_a_mutant(mutant):
    class Machine(TurnsMachine):
        new_turns = mutant

    with pytest.raises((AssertionError, KeyError, StopIteration)):
        run_state_machine_as_test(Machine, settings=until_first_failure(MACHINE_SETTINGS, max_examples=1000))


# Threads -----------------------------------------------------------------------------------------------


async def test_function_runs_in_a_thread_and_its_result_is_returned():
    threads = Threads(2, timeout_s=60)
    assert await threads.run("a", lambda one, two: (one, two, threading.current_thread()), 1, 2) != (
        1,
        2,
        threading.current_thread(),
    )
    with pytest.raises(ZeroDivisionError):
        await threads.run("a", lambda: 1 / 0)
    assert (threads.turns.running, threads.turns.waiting) == (0, 0)


async def test_large_pieces_of_one_tenants_streams_are_written_after_anothers_first():
    written, gate = [], threading.Event()
    offload = Offload(Config(models={}), None)

    def write(name):
        gate.wait()
        written.append(name)
        return b""

    async with trio.open_nursery() as nursery:
        for name in ("a1", "a2", "a3", "a4", "b1"):
            nursery.start_soon(offload.write_piece, name[0], write, name)
            await trio.testing.wait_all_tasks_blocked()
        gate.set()
    assert written == ["a1", "b1", "a2", "a3", "a4"]


async def test_piece_of_a_stream_waits_for_its_turn_as_long_as_it_takes(autojump_clock):
    offload = Offload(Config(models={}, queue=QueueConfig(timeout_s=1)), None)
    first = offload._streaming.turns.enter("a")
    with trio.move_on_after(3600) as waiting:
        await offload.write_piece("b", bytes)
    assert waiting.cancelled_caught
    offload._streaming.turns.leave(first)
    assert await offload.write_piece("b", bytes) == b""


async def test_cancelled_call_waits_for_its_thread_if_it_does_not_abandon_it():
    threads = Threads(1, timeout_s=60)
    begun, end, ended = trio.Event(), threading.Event(), []

    def work():
        trio.from_thread.run_sync(begun.set)
        end.wait()
        ended.append(True)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(threads.run, "a", work, abandons=False))
        await begun.wait()
        nursery.cancel_scope.cancel()
        end.set()
    assert ended


async def test_cancelled_waiter_frees_its_place():
    threads = Threads(1, timeout_s=60)
    end = threading.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(threads.run, "a", end.wait)
        await trio.testing.wait_all_tasks_blocked()
        with trio.CancelScope() as scope:
            nursery.start_soon(_cancel_when_waiting, threads, scope)
            await threads.run("b", end.wait)
        assert (threads.turns.running, threads.turns.waiting) == (1, 0)
        end.set()


async def _cancel_when_waiting(threads, scope):
    while not threads.turns.waiting:
        await trio.lowlevel.checkpoint()
    scope.cancel()


async def test_abandoned_thread_keeps_its_turn_until_it_ends():
    threads = Threads(1, timeout_s=60)
    begun, end = trio.Event(), threading.Event()

    def work():
        trio.from_thread.run_sync(begun.set)
        end.wait()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(threads.run, "a", work)
        await begun.wait()
        nursery.cancel_scope.cancel()
    assert threads.turns.running == 1
    end.set()
    assert await threads.run("b", lambda: "next") == "next"
    assert threads.turns.running == 0


async def test_nothing_waits_longer_than_the_timeout():
    threads = Threads(1, timeout_s=0.05)
    end = threading.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(threads.run, "a", end.wait)
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(QueueTimeout):
            await threads.run("b", end.wait)
        assert threads.turns.waiting == 0
        end.set()


async def test_refused_turn_raises_queue_full():
    threads = Threads(1, timeout_s=60)
    threads.turns = Turns(1, most_waiting=1)
    end = threading.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(threads.run, "a", end.wait)
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(threads.run, "b", end.wait)
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(QueueFull):
            await threads.run("b", end.wait)
        end.set()


# Routes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["stream", "background", "conversation", "tokenizer"])
async def test_what_is_written_in_a_thread_takes_turns_by_tenant(client, chat, kind, monkeypatch):
    taken = []
    run = Threads.run

    async def recorded(threads, tenant, call, *arguments, **options):
        taken.append(tenant)
        return await run(threads, tenant, call, *arguments, **options)

    monkeypatch.setattr(Threads, "run", recorded)
    monkeypatch.setattr(event_stream, "is_large", lambda _: True)
    monkeypatch.setattr(background, "is_large", lambda _: True)
    monkeypatch.setattr(conversations, "LARGE_BODY_BYTES", 0)
    headers = {"X-OpenWebUI-User-Id": "ana"}
    if kind == "stream":
        await client.post("/v1/chat/completions", chat(stream=True), headers=headers)
    elif kind == "background":
        async with running(client):
            body = {"model": "small", "input": "a", "background": True}
            created = (await client.post("/v1/responses", body, headers=headers)).json
            path = f"/v1/responses/{created['id']}"
            while (await client.get(path, headers=headers)).json["status"] != "completed":  # noqa: ASYNC110
                await trio.sleep(0.01)
    elif kind == "conversation":
        created = (await client.post("/v1/conversations", {}, headers=headers)).json
        await client.get(f"/v1/conversations/{created['id']}/items", headers=headers)
    else:
        await client.get("/tokenizer_info?model=small", headers=headers)
    assert set(taken) == {"user/ana"}
