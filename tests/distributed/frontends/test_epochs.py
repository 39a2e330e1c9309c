"""Dispatchers whose epochs come from a clock that is set back, or are those of a dispatcher before.

Fronts tell a new dispatcher which epoch they have seen. One that leads takes a higher one; one that was
replaced is refused.
"""

from random import Random

import pytest
import structlog.testing
import trio

from distributed.frontends.scripted import scripted_dispatcher, scripted_front
from distributed.frontends.system import System, settle, spec
from fairlead.base.config import QueueConfig
from fairlead.distributed.frontends import wire
from fairlead.distributed.frontends.client import DispatchClient
from fairlead.distributed.lease.term import Term
from fairlead.router.dispatch.tenant_counters import TenantCounters

NOW = 1_800_000_000
HOUR_S = 3600


async def begin(nursery, fronts=2, nodes=None):
    """Return a system whose fronts have seen a dispatcher that began at `NOW`."""
    system = System(nursery, nodes or {"x": 2})
    system.start_dispatcher(epoch=NOW, term=Term(NOW))
    for number in range(fronts):
        system.start_front(number)
    await trio.sleep(1)
    return system


async def use(system, number, name, served):
    async with system.seat(system.fronts[number], spec(name, name)):
        await trio.sleep(0.1)
    served.append(name)


@pytest.mark.parametrize("started_s", [NOW - HOUR_S, NOW - 1, NOW, NOW + 1])
async def test_dispatcher_serves_within_a_second_whatever_its_clock_says(autojump_clock, nursery, started_s):
    system, served = await begin(nursery), []
    system.kill_dispatcher()
    for number in range(2):
        nursery.start_soon(use, system, number, f"job {number}", served)
    await settle()
    term = Term(started_s)
    system.start_dispatcher(epoch=started_s, term=term, expected=None)
    await trio.sleep(2)
    assert sorted(served) == ["job 0", "job 1"]
    assert all(front.is_connected for front in system.fronts.values())
    assert {front.epoch for front in system.fronts.values()} == {max(NOW + 1, started_s)}
    assert term.epoch == system.dispatcher.next_grant.epoch == max(NOW + 1, started_s)


async def test_dispatcher_that_does_not_lead_any_more_is_refused_with_both_epochs(autojump_clock, nursery):
    system = await begin(nursery)
    system.kill_dispatcher()
    await settle()
    term = Term(NOW - 5)
    term.end()
    with structlog.testing.capture_logs() as logs:
        system.start_dispatcher(epoch=NOW - 5, term=term)
        await trio.sleep(60)
    assert not any(front.is_connected for front in system.fronts.values())
    refusals = [each for each in logs if each["log_level"] == "warning" and "epoch" in each["event"]]
    assert {each["event"].partition(":")[0] for each in refusals} == {
        "dispatcher not accepted",
        "front refused",
    }
    assert {(each["epoch"], each["seen"]) for each in refusals} == {(NOW - 5, NOW)}
    assert len(refusals) <= 3 * 2 * (60 / 10 + 1)  # of the dispatcher and two fronts, each at a bounded rate


async def test_front_that_has_seen_a_higher_epoch_than_the_others_raises_it_for_all(autojump_clock, nursery):
    system, served = await begin(nursery, fronts=1), []
    system.blocked.add(0)
    system.kill_dispatcher()
    await settle()
    term = Term(NOW - HOUR_S)
    system.start_dispatcher(epoch=NOW - HOUR_S, term=term)
    system.start_front(1)
    await trio.sleep(1)
    assert system.fronts[1].epoch == NOW - HOUR_S
    nursery.start_soon(use, system, 1, "before", served)
    await settle()
    connections = system.server._fronts["front 1"].connections
    system.blocked.clear()
    await trio.sleep(1)
    assert {front.epoch for front in system.fronts.values()} == {NOW + 1}
    assert system.server._fronts["front 1"].connections == connections
    nursery.start_soon(use, system, 0, "after", served)
    await trio.sleep(1)
    assert served == ["before", "after"]
    assert system.dispatcher.statistics().running == 0


async def test_dispatcher_is_told_only_the_epoch_of_another_one(autojump_clock, nursery):
    system = System(nursery, {"x": 1})
    system.start_dispatcher(epoch=NOW, term=Term(NOW))
    await settle()
    front, other = await scripted_front(system, "a"), await scripted_front(system, "b")
    (welcome,) = front.of(wire.Welcome)
    await front.send(wire.EpochSeen(NOW - 1))  # its question crossed with the answer to another front
    assert front.of(wire.Welcome) == [welcome, welcome]
    assert other.of(wire.Welcome) == [welcome]
    await front.send(wire.EpochSeen(NOW))
    assert front.of(wire.Welcome)[-1] == other.of(wire.Welcome)[-1] == wire.Welcome(NOW + 1, welcome.run)


async def test_messages_of_a_dispatcher_that_is_not_accepted_have_no_effect(autojump_clock, nursery):
    def make(connects):
        client = DispatchClient(connects, QueueConfig())
        client.epoch = 5
        return client

    client, dispatcher = await scripted_dispatcher(nursery, make)
    assert dispatcher.of(wire.EpochSeen) == [wire.EpochSeen(5)]
    await dispatcher.send(wire.Heartbeat(TenantCounters(1.0, {"A": 9.0}, is_whole=True)))
    assert not client.is_connected
    await dispatcher.send(wire.Welcome(6, "run"))
    assert (client.is_connected, client.epoch, client.run_id) == (True, 6, "run")
    assert [each.counters.counters for each in dispatcher.of(wire.Declared)] == [{}]
    await dispatcher.send(wire.Welcome(9, "run"))
    assert (client.epoch, len(dispatcher.of(wire.Declared))) == (9, 1)


@pytest.mark.parametrize("seed", range(3))
async def test_clocks_are_set_back_by_an_hour_at_random(autojump_clock, nursery, seed):
    """Dispatchers and fronts die every 1 to 3 s, and each dispatcher starts with another clock."""
    random = Random(seed)
    system, served, names = await begin(nursery, fronts=3, nodes={"x": 2, "y": 2}), [], []
    waits = []

    async def job(name):
        began = trio.current_time()
        number = random.choice(list(system.fronts))
        await use(system, number, name, served)
        waits.append(trio.current_time() - began)

    number, next_front = 0, 3
    for _ in range(30):
        for _ in range(5):
            await trio.sleep(random.uniform(0.1, 0.6))
            names.append(f"job {number}")
            nursery.start_soon(job, names[-1])
            number += 1
        if random.random() < 0.3:
            system.start_front(next_front)  # one that has seen nothing, beside those that have
            next_front += 1
        system.kill_dispatcher()
        await trio.sleep(0.75)
        started_s = int(NOW + trio.current_time()) + random.choice([0, 0, -HOUR_S, HOUR_S])
        system.start_dispatcher(epoch=started_s, term=Term(started_s), expected=None)
    await trio.sleep(5)
    assert sorted(served) == sorted(names)
    assert sorted(waits)[int(0.99 * len(waits))] <= 3
    assert system.dispatcher.statistics().running == 0
    grants = {(front.epoch, front.run_id) for front in system.fronts.values()}
    assert len(grants) == 1
