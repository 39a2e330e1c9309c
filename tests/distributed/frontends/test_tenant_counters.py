"""Token fairness across a new dispatcher: fronts return the counters of tenants to it."""

from math import inf, nan

import pytest
import trio

from distributed.frontends.system import System, settle, spec
from fairlead.base.config import QueueConfig
from fairlead.router.dispatch.tenant_counters import KnownCounters, TenantCounters, highest_excess

BY_TOKENS = QueueConfig(capacity=100, timeout_s=600.0, fairness="tokens", tenant_weights={"C": 2.0})


@pytest.fixture
async def system(nursery):
    system = System(nursery, queue=BY_TOKENS)
    system.start_dispatcher()
    system.start_front(1)
    system.start_front(2)
    await settle()
    return system


async def use(system, number, tenant, seconds=0.0, tokens=1):
    async with system.fronts[number].seat(spec(tenant, prompt_tokens=1)) as seat:
        seat.begin(lambda: tokens)
        await trio.sleep(seconds)


async def order_after_service(system, *, is_replaced):
    """Return the order in which A and B are served, after A has received much service, and C half of it."""
    await use(system, 1, "A", tokens=40)
    await use(system, 2, "C", tokens=40)
    await use(system, 2, "B", tokens=0)
    running = trio.CancelScope()

    async def hold():
        with running:
            await use(system, 1, "X", seconds=1000)

    system.nursery.start_soon(hold)
    await trio.sleep(2)  # a heartbeat
    if is_replaced:
        system.kill_dispatcher()
        await settle()
        system.start_dispatcher(expected=("front 1", "front 2"))
        await trio.sleep(2)
    done = len(system.granted)
    for number, tenant in enumerate("BBBBBBBCCCCCAAA"):
        system.nursery.start_soon(use, system, 1 + number % 2, tenant, 0.01, 10)
        await settle()
    running.cancel()
    await trio.sleep(10)
    return "".join(tenant for tenant, _ in system.granted[done:])


async def test_new_dispatcher_serves_tenants_in_the_order_of_the_one_before(autojump_clock, nursery):
    orders = []
    for is_replaced in (False, True):
        async with trio.open_nursery() as tasks:
            system = System(tasks, queue=BY_TOKENS)
            system.start_dispatcher()
            system.start_front(1)
            system.start_front(2)
            await settle()
            orders.append(await order_after_service(system, is_replaced=is_replaced))
            tasks.cancel_scope.cancel()
    kept, restored = orders
    assert len(kept) == 15
    assert kept.index("A") > 3  # others catch up first
    assert restored == kept


async def test_counters_survive_two_dispatchers_that_grant_nothing(autojump_clock, system):
    await use(system, 1, "A", tokens=1000)
    await use(system, 2, "B", tokens=1)
    await trio.sleep(2)
    before = excess_of(system, "A")
    assert before > 900
    for _ in range(2):
        system.kill_dispatcher()
        await settle()
        system.start_dispatcher(expected=("front 1", "front 2"))
        await trio.sleep(2)
        assert excess_of(system, "A") == pytest.approx(before)


async def test_running_job_is_charged_once_by_two_dispatchers(autojump_clock, system):
    tokens = [1000]

    async def run():
        async with system.fronts[1].seat(spec("A", prompt_tokens=1)) as seat:
            seat.begin(lambda: tokens[0])
            await trio.sleep(10)

    system.nursery.start_soon(run)
    await trio.sleep(3)
    before = excess_of(system, "A")
    system.kill_dispatcher()
    await settle()
    system.start_dispatcher(expected=("front 1", "front 2"))
    await trio.sleep(3)
    assert excess_of(system, "A") == pytest.approx(before)
    tokens[0] = 1500
    await trio.sleep(10)
    assert excess_of(system, "A") == pytest.approx(before * 1.5, rel=0.01)


def excess_of(system, tenant):
    found = system.dispatcher.scheduler.counters([tenant])
    return found.counters[tenant] - found.level


def test_counters_at_the_level_are_forgotten():
    known = KnownCounters()
    known.update(TenantCounters(0.0, {"A": 5.0, "B": 9.0}))
    known.update(TenantCounters(7.0, {"C": 8.0}))
    assert known.whole() == TenantCounters(7.0, {"B": 9.0, "C": 8.0}, is_whole=True)
    known.update(TenantCounters(1.0, {"D": 2.0}, is_whole=True))
    assert known.whole().counters == {"D": 2.0}


def test_counters_of_any_number_of_tenants_stay_in_bounded_memory():
    known = KnownCounters()
    known.update(TenantCounters(0.0, {f"t{number}": float(number) for number in range(30_000)}))
    kept = known.whole().counters
    assert len(kept) == 10_000
    assert min(kept.values()) == 20_000.0


def test_highest_report_counts_and_numbers_that_are_none_are_ignored():
    reports = [
        TenantCounters(1.0, {"A": 3.0, "B": nan, "C": inf}),
        TenantCounters(10.0, {"A": 11.0, "B": 5.0}),
    ]
    assert highest_excess(reports) == {"A": 2.0}
