"""Jobs of several fronts at one dispatcher: order, errors, and what outlives a connection or a dispatcher."""

from contextlib import asynccontextmanager
from functools import partial

import pytest
import trio

from distributed.frontends.system import System, limits, settle, spec
from fairlead.base.config import QueueConfig
from fairlead.base.errors import NoNode, QueueFull, QueueTimeout
from fairlead.base.frames import encode_frame
from fairlead.base.grant import Grant
from fairlead.distributed.frontends import wire
from fairlead.distributed.frontends.client import TIMEOUT_MARGIN_S, DispatchClient
from fairlead.router.dispatch.waiter import SeatLoss


@asynccontextmanager
async def running(fronts=1, *, nodes=None, queue=None):
    async with trio.open_nursery() as nursery:
        system = System(nursery, nodes, queue=queue)
        system.start_dispatcher()
        for number in range(fronts):
            system.start_front(number)
        await trio.sleep(1)
        yield system
        nursery.cancel_scope.cancel()


async def use(system, front, job, seconds=1.0, *, results=None):
    try:
        async with system.seat(front, job) as seat:
            await trio.sleep(seconds)
    except Exception as error:
        if results is None:
            raise
        results.append(error)
    else:
        if results is not None:
            results.append(seat.grant)


async def test_five_jobs_and_two_through_two_fronts_are_served_a_b_a_b_a_a_a(autojump_clock):
    async with running(fronts=2, nodes={}) as system, trio.open_nursery() as clients:
        for number, tenant in enumerate("AAAAABB"):
            clients.start_soon(use, system, system.fronts[number % 2], spec(tenant, f"r{number}"))
            await settle()
        system.dispatcher.scheduler.node_up("node", frozenset({"m"}), limits(1))
    assert "".join(tenant for tenant, _ in system.granted) == "ABABAAA"


async def test_grants_have_the_epoch_and_growing_numbers(autojump_clock):
    results = []
    async with running() as system:
        for number in range(3):
            await use(system, system.fronts[0], spec(request_id=f"r{number}"), results=results)
    assert results == [Grant(1, 1), Grant(1, 2), Grant(1, 3)]


async def test_job_that_leaves_the_queue_frees_its_place(autojump_clock):
    async with running() as system:
        async with system.seat(system.fronts[0], spec("A")):
            with trio.move_on_after(1):
                await use(system, system.fronts[0], spec("B"))
            await settle()
            assert system.dispatcher.statistics().waiting == 0
        await settle()
        assert system.dispatcher.statistics().running == 0
        assert len(system.fronts[0]) == 0


async def test_full_queue_is_an_error_with_its_hints(autojump_clock):
    no_queue = QueueConfig(capacity=0, timeout_s=60.0)
    async with running(queue=no_queue) as system, system.seat(system.fronts[0], spec("A")):
        with pytest.raises(QueueFull) as refused:
            await use(system, system.fronts[0], spec("B"))
    assert refused.value.retry_after_s is not None
    assert refused.value.queue_position == 1


async def test_job_that_waits_too_long_gets_a_timeout(autojump_clock):
    async with running() as system, system.seat(system.fronts[0], spec("A")):
        began = trio.current_time()
        with pytest.raises(QueueTimeout):
            await use(system, system.fronts[0], spec("B"))
        assert 60 <= trio.current_time() - began < 61


async def test_job_waits_no_longer_than_its_own_limit_also_without_a_dispatcher(autojump_clock):
    async with running(nodes={}) as system:
        began = trio.current_time()
        with pytest.raises(QueueTimeout, match=r"2\.5 s"):
            await use(system, system.fronts[0], spec(wait_limit_s=2.5))
        assert trio.current_time() - began == 2.5
        system.kill_dispatcher()
        began = trio.current_time()
        with pytest.raises(QueueTimeout):
            await use(system, system.fronts[0], spec(wait_limit_s=2.5))
        assert trio.current_time() - began == 2.5 + TIMEOUT_MARGIN_S


async def test_job_whose_limit_is_below_its_estimated_wait_is_refused_at_once(autojump_clock):
    queue = QueueConfig(capacity=9, estimate="mean")
    async with running(queue=queue) as system, trio.open_nursery() as clients:
        await use(system, system.fronts[0], spec(), 20)
        clients.start_soon(use, system, system.fronts[0], spec(), 20)
        await settle()
        began = trio.current_time()
        with pytest.raises(QueueFull, match="may wait no longer than 5 s") as refused:
            await use(system, system.fronts[0], spec(wait_limit_s=5.0))
        assert (trio.current_time() - began, refused.value.estimated_wait_s) == (0, 20)
        await use(system, system.fronts[0], spec(wait_limit_s=30.0))


async def test_failed_job_gets_a_seat_at_another_node(autojump_clock):
    async with running(nodes={"x": 1, "y": 1}) as system, system.fronts[0].seat(spec("A")) as seat:
        first = seat.node_id
        await seat.requeue(SeatLoss())
        assert {first, seat.node_id} == {"x", "y"}
        assert seat.grant == Grant(1, 2)


async def test_job_keeps_its_seat_while_its_front_is_cut_off(autojump_clock):
    async with running(fronts=2) as system, trio.open_nursery() as clients:
        async with system.seat(system.fronts[0], spec("A")):
            system.cut(system.fronts[0])
            clients.start_soon(use, system, system.fronts[1], spec("B"))
            await trio.sleep(5)
            assert system.granted == [("A", "node")]
        await trio.sleep(5)
    assert system.granted == [("A", "node"), ("B", "node")]


async def test_grant_that_was_cut_off_is_sent_again(autojump_clock):
    results = []
    async with running(fronts=2) as system, trio.open_nursery() as clients:
        async with system.seat(system.fronts[1], spec("B")):
            clients.start_soon(lambda: use(system, system.fronts[0], spec("A"), results=results))
            await settle()
            system.cut(system.fronts[0])
            await settle()
        await settle()
        assert system.granted[-1] == ("A", "node")
        assert results == []
    assert results == [Grant(1, 2)]


async def test_jobs_of_a_front_that_died_end_after_a_time(autojump_clock):
    async with running(fronts=2) as system:
        front = system.fronts[0]
        system.spawn(front, use, system, front, spec("A"), 100)
        await settle()
        system.kill_front(0)
        async with system.seat(system.fronts[1], spec("B")) as seat:
            assert 9 <= seat.waited_s <= 11
        await settle()
        assert [each.name for each in system.server.fronts] == ["front 1"]


async def test_front_known_to_have_ended_frees_its_seats_at_once(autojump_clock):
    async with running(fronts=2) as system:
        front = system.fronts[0]
        system.spawn(front, use, system, front, spec("A"), 100)
        await settle()
        system.kill_front(0)
        system.server.end_front("front 0")
        async with system.seat(system.fronts[1], spec("B")) as seat:
            assert seat.waited_s < 1


async def test_running_jobs_do_not_notice_that_the_dispatcher_is_replaced(autojump_clock):
    results = []
    async with running(fronts=2, nodes={"node": 2}) as system, trio.open_nursery() as clients:
        for number in range(2):
            clients.start_soon(
                lambda number=number: use(
                    system, system.fronts[number], spec(request_id=f"r{number}"), 30, results=results
                )
            )
        await settle()
        system.kill_dispatcher()
        await trio.sleep(5)
        system.start_dispatcher(expected=("front 0", "front 1"))
        await trio.sleep(2)
        assert system.dispatcher.statistics().running == 2
    assert {grant.number for grant in results} == {1, 2}


async def test_waiting_jobs_keep_their_order_when_the_dispatcher_is_replaced(autojump_clock):
    async with running(fronts=2) as system, trio.open_nursery() as clients:
        clients.start_soon(use, system, system.fronts[0], spec("X"), 20)
        await trio.sleep(0.1)
        for number, tenant in enumerate("CABDE"):
            clients.start_soon(use, system, system.fronts[number % 2], spec(tenant))
            await trio.sleep(0.1)
        system.kill_dispatcher()
        await trio.sleep(3)
        system.start_dispatcher(expected=("front 0", "front 1"))
    assert "".join(tenant for tenant, _ in system.granted) == "XCABDE"


async def test_waiting_jobs_keep_their_order_if_fronts_notice_late_that_the_dispatcher_hangs(autojump_clock):
    async with running(fronts=2) as system, trio.open_nursery() as clients:
        clients.start_soon(use, system, system.fronts[0], spec("X"), 20)
        await trio.sleep(0.1)
        for number, tenant in enumerate("CABDE"):
            clients.start_soon(use, system, system.fronts[number % 2], spec(tenant))
            await trio.sleep(0.1)
        system.kill_dispatcher()
        system.blocked |= {0, 1}
        system.start_dispatcher(expected=None)
        await trio.sleep(5)
        system.blocked.remove(1)
        await trio.sleep(0.5)
        system.blocked.remove(0)
    assert "".join(tenant for tenant, _ in system.granted) == "XCABDE"


async def test_new_dispatcher_grants_no_seat_that_is_not_declared_yet(autojump_clock):
    async with running(fronts=2) as system, trio.open_nursery() as clients:
        clients.start_soon(use, system, system.fronts[0], spec("A"), 20)
        await settle()
        system.kill_dispatcher()
        clients.start_soon(use, system, system.fronts[1], spec("B"))
        await trio.sleep(1)
        system.start_dispatcher(expected=None)
        await trio.sleep(5)
        assert system.held == {"node": 1}
    assert [tenant for tenant, _ in system.granted] == ["A", "B"]


async def requeue_on_event(system, front, job, event, nodes):
    async with front.seat(job) as seat:
        nodes.append(seat.node_id)
        await event.wait()
        await seat.requeue(SeatLoss())
        nodes.append(seat.node_id)


async def test_job_that_fails_in_the_grace_time_gets_no_undeclared_seat(autojump_clock):
    async with running(fronts=2, nodes={"x": 1, "y": 1}) as system, trio.open_nursery() as clients:
        nodes, fail = [], trio.Event()
        clients.start_soon(requeue_on_event, system, system.fronts[0], spec("A"), fail, nodes)
        await settle()
        clients.start_soon(use, system, system.fronts[1], spec("B"), 20)
        await settle()
        system.kill_dispatcher()
        system.blocked.add(1)
        system.start_dispatcher(expected=("front 0", "front 1"))
        await trio.sleep(0.5)
        fail.set()
        await trio.sleep(0.2)
        assert len(nodes) == 1
        system.blocked.clear()
        await trio.sleep(1)
        assert len(nodes) == 1  # the other node has the other front's job
        await trio.sleep(20)
        assert sorted(nodes) == ["x", "y"]


async def test_job_of_before_a_new_dispatcher_keeps_its_deadline(autojump_clock):
    async with running(nodes={}) as system:
        results = []
        began = trio.current_time()
        async with trio.open_nursery() as clients:
            clients.start_soon(lambda: use(system, system.fronts[0], spec(), results=results))
            await trio.sleep(50)
            system.kill_dispatcher()
            await trio.sleep(1)
            system.start_dispatcher(expected=("front 0",))
        assert isinstance(results[0], QueueTimeout)
        assert 60 <= trio.current_time() - began <= 61


async def test_front_without_a_dispatcher_refuses_in_bounded_time_and_number(autojump_clock):
    async with running(queue=QueueConfig(capacity=2, timeout_s=60.0)) as system:
        system.kill_dispatcher()
        await settle()
        results = []
        began = trio.current_time()
        async with trio.open_nursery() as clients:
            for number in range(4):
                job = spec(request_id=f"r{number}")
                clients.start_soon(lambda job=job: use(system, system.fronts[0], job, results=results))
        assert [type(error) for error in results] == [QueueFull, QueueFull, QueueTimeout, QueueTimeout]
        assert trio.current_time() - began == 65
        assert len(system.fronts[0]) == 0


async def test_dispatcher_that_was_replaced_is_not_used_again(autojump_clock):
    async with running() as system:
        system.fronts[0].epoch = 2
        system.cut(system.fronts[0])
        await trio.sleep(1)
        assert not system.fronts[0].is_connected


async def test_dispatcher_that_hangs_does_not_delay_the_connection_to_another(autojump_clock):
    async with running() as system, trio.open_nursery() as nursery:
        number = len(system.fronts)
        front = DispatchClient([trio.sleep_forever, partial(system._connect, number)], system.queue)
        front.scopes, front.streams = [], []
        system.fronts[number] = front
        nursery.start_soon(front.run)
        await settle()
        assert front.is_connected
        nursery.cancel_scope.cancel()


async def test_dispatcher_that_does_not_lead_is_not_tried_first_again(autojump_clock):
    async with running() as system, trio.open_nursery() as nursery:
        number = len(system.fronts)
        tries = []

        async def replaced():
            ours, theirs = trio.testing.memory_stream_pair()
            tries.append(theirs)
            await theirs.send_all(encode_frame(wire.Welcome(0)) + encode_frame(wire.Standby()))
            return ours

        async def leading():
            await trio.sleep(0.01)  # after the other
            return await system._connect(number)

        front = DispatchClient([replaced, leading], system.queue)
        front.epoch, front.run_id = 1, system.fronts[0].run_id
        front.scopes, front.streams = [], []
        system.fronts[number] = front
        nursery.start_soon(front.run)
        await trio.sleep(0.5)
        assert (front.is_connected, len(tries)) == (True, 1)
        nursery.cancel_scope.cancel()


async def test_questions_are_answered_and_time_out(autojump_clock):
    async with running() as system:
        async with system.seat(system.fronts[0], spec()):
            assert await system.fronts[0].ask("statistics") == 1
        system.kill_dispatcher()
        with pytest.raises(NoNode):
            await system.fronts[0].ask("statistics")


async def test_request_for_a_seat_that_ends_with_the_connection_leaves_nothing(autojump_clock):
    async with running() as system:
        async with system.seat(system.fronts[0], spec("A")):
            system.cut(system.fronts[0])
        await trio.sleep(1)
        assert system.dispatcher.statistics().running == 0
        assert system.server.fronts[0].jobs == {}
