"""Sequences of a front's jobs get their seats one by one, also across a lost connection or dispatcher."""

from contextlib import asynccontextmanager

import trio

from distributed.frontends.scripted import scripted_dispatcher, scripted_front
from distributed.frontends.system import System, settle, spec
from fairlead.base.config import QueueConfig
from fairlead.base.grant import Grant
from fairlead.distributed.frontends import wire
from fairlead.distributed.frontends.client import DispatchClient
from fairlead.router.dispatch.held_sequences import HeldSequences
from fairlead.router.dispatch.waiter import HeldSeat
from router.dispatch.recorded import engine_limits


async def started(system, **options):
    system.start_dispatcher(**options)
    await settle()


def engine(system, seats):
    system.dispatcher.scheduler.node_up("x", frozenset({"m"}), engine_limits(seats))


async def test_front_gets_a_grant_for_each_sequence_and_reports_its_end(autojump_clock, nursery):
    system = System(nursery, {})
    await started(system)
    engine(system, 2)
    front = await scripted_front(system, "a")
    await front.send(wire.SubmitJob(1, spec(sequences=3)))
    assert front.of(wire.SeatGranted) == [wire.SeatGranted(1, "x", Grant(1, 1), 0.0, is_whole=False)]
    assert front.of(wire.SequenceGranted) == [wire.SequenceGranted(1, 1, Grant(1, 2))]
    await front.send(wire.SequenceEnded(1, 0))
    assert front.of(wire.SequenceGranted)[1:] == [wire.SequenceGranted(1, 2, Grant(1, 3))]
    await front.send(wire.SequenceEnded(1, 0), wire.SequenceEnded(1, 9), wire.SequenceEnded(1, 1))
    scheduler = system.dispatcher.scheduler
    assert scheduler.node_counts("x").busy == 1
    await front.send(wire.EndJob(1, 5))
    assert scheduler.node_counts("x").busy == 0


async def test_reconnected_front_and_dispatcher_agree_on_the_sequences(autojump_clock, nursery):
    system = System(nursery, {})
    await started(system)
    engine(system, 2)
    front, wide = await scripted_front(system, "a"), spec(sequences=4)
    await front.send(wire.SubmitJob(1, wide))
    again = await scripted_front(system, "a")
    # It has not received the second grant, and the end of the first sequence was lost.
    seat = HeldSeat("x", Grant(1, 1), 0.0, True, HeldSequences(running=(), begun=1))
    await again.send(wire.DeclareJob(1, wide, 1.0, seat), wire.Declared())
    await settle()
    granted = again.of(wire.SequenceGranted)
    assert [(each.index, each.grant) for each in granted] == [(1, Grant(1, 2)), (2, Grant(1, 3))]
    assert system.dispatcher.scheduler.node_counts("x").busy == 2


async def test_next_dispatcher_goes_on_with_the_sequences_that_are_left(autojump_clock, nursery):
    system = System(nursery, {})
    await started(system)
    engine(system, 2)
    front, wide = await scripted_front(system, "a"), spec(sequences=5)
    await front.send(wire.SubmitJob(1, wide))
    system.kill_dispatcher()
    await started(system, expected=("a",))
    again = await scripted_front(system, "a")
    seat = HeldSeat("x", Grant(1, 1), 0.0, True, HeldSequences(running=(1, 2), begun=3))
    await again.send(wire.DeclareJob(1, wide, 1.0, seat), wire.Declared())
    await settle()
    engine(system, 3)
    await settle()
    (granted,) = again.of(wire.SequenceGranted)
    assert (granted.number, granted.index) == (1, 3)
    await again.send(wire.EndJob(1, 5))
    assert system.dispatcher.scheduler.node_counts("x").busy == 0


async def test_job_that_waits_for_a_quantum_has_the_tokens_of_others_counted_at_once(autojump_clock, nursery):
    system = System(nursery, {})
    await started(system, queue=QueueConfig(quantum_s=10.0, quantum_tokens=32))
    engine(system, 2)
    front, other = await scripted_front(system, "a"), await scripted_front(system, "b")
    await front.send(wire.SubmitJob(1, spec("ana", sequences=2)))
    await trio.sleep(0.1)
    await other.send(wire.SubmitJob(1, spec("ben")))
    assert front.of(wire.CountTokens) == [wire.CountTokens()], "it is asked once until it has answered"
    for tokens, granted in ((60, 0), (64, 1)):
        await front.send(wire.Progress({1: tokens}))
        await trio.sleep(0.1)
        assert len(other.of(wire.SeatGranted)) == granted
    assert front.of(wire.SequencePaused) == [wire.SequencePaused(1, 1, is_paused=True)]


async def test_front_counts_the_tokens_of_its_jobs_when_it_is_asked(autojump_clock, nursery):
    client, dispatcher = await scripted_dispatcher(
        nursery, lambda connects: DispatchClient(connects, QueueConfig())
    )
    async with client_seat(client, dispatcher, nursery) as seat:
        seat.begin(lambda: 7)
        await settle()
        before = len(dispatcher.of(wire.Progress))
        await dispatcher.send(wire.CountTokens())
        assert dispatcher.of(wire.Progress)[before:] == [wire.Progress({1: 7})]


async def test_front_declares_which_sequences_run(autojump_clock, nursery):
    client, dispatcher = await scripted_dispatcher(
        nursery, lambda connects: DispatchClient(connects, QueueConfig())
    )
    async with client_seat(client, dispatcher, nursery) as seat:
        await dispatcher.send(
            wire.SequenceGranted(1, 1, Grant(1, 2)), wire.SequenceGranted(1, 1, Grant(1, 2))
        )
        assert seat.sequences.grants == {0: Grant(1, 1), 1: Grant(1, 2)}
        seat.sequences.end(0)
        await settle()
        assert dispatcher.of(wire.SequenceEnded) == [wire.SequenceEnded(1, 0)]
        (job,) = client._jobs.values()
        assert job.declared.sequences == HeldSequences(running=(1,), begun=2)


@asynccontextmanager
async def client_seat(client, dispatcher, nursery):
    """Hold a seat of a client, which the scripted dispatcher grants."""
    granted = wire.SeatGranted(1, "x", Grant(1, 1), 0.0, is_whole=False)
    nursery.start_soon(dispatcher.send, granted)
    async with client.seat(spec(sequences=3)) as seat:
        yield seat
