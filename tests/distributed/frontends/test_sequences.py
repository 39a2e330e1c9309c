"""Sequences of a front's jobs get their seats one by one, also across a lost connection or dispatcher."""

from contextlib import asynccontextmanager

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
