"""Alarms on the virtual clock."""

import gc
import weakref
from random import Random

import pytest
import trio

from fairlead.router.dispatch.timer import KEPT_DROPPED, Timer


def running(nursery: trio.Nursery) -> Timer:
    timer = Timer()
    nursery.start_soon(timer.run)
    return timer


async def test_alarms_fire_at_their_time_and_simultaneous_ones_in_creation_order(autojump_clock, nursery):
    timer = running(nursery)
    begun, seen = trio.current_time(), []
    for after_s, name in ((3, "d"), (1, "a"), (2, "b"), (2, "c")):
        timer.at(begun + after_s, lambda name=name: seen.append((name, trio.current_time() - begun)))
    await trio.sleep(2.5)
    assert seen == [("a", 1.0), ("b", 2.0), ("c", 2.0)]
    await trio.sleep(1)
    assert seen[3:] == [("d", 3.0)]
    assert len(timer) == 0


async def test_alarm_before_all_others_wakes_the_timer(autojump_clock, nursery):
    timer = running(nursery)
    seen = []
    timer.at(trio.current_time() + 100, lambda: seen.append("late"))
    await trio.testing.wait_all_tasks_blocked()
    timer.at(trio.current_time() + 1, lambda: seen.append("soon"))
    await trio.sleep(2)
    assert seen == ["soon"]


async def test_alarm_may_drop_those_of_its_own_time_and_set_others(autojump_clock, nursery):
    timer = running(nursery)
    seen, now = [], trio.current_time()

    def first() -> None:
        second.drop()
        timer.at(now + 1, lambda: seen.append("at once"))
        timer.at(now + 2, lambda: seen.append("later"))

    timer.at(now + 1, first)
    second = timer.at(now + 1, lambda: seen.append("dropped"))
    await trio.sleep(1.5)
    assert seen == ["at once"]
    await trio.sleep(1)
    assert seen == ["at once", "later"]


async def test_dropped_alarm_releases_its_callback_at_once(autojump_clock, nursery):
    timer = running(nursery)

    class Waiter:
        def wake(self) -> None:
            raise AssertionError("dropped")

    waiter = Waiter()
    alarm, waiter_reference = timer.at(trio.current_time() + 1, waiter.wake), weakref.ref(waiter)
    alarm.drop()
    del waiter
    gc.collect()
    assert waiter_reference() is None
    assert alarm.dropped
    await trio.sleep(2)


async def test_dropped_alarms_do_not_accumulate(autojump_clock, nursery):
    timer = running(nursery)
    far = trio.current_time() + 60
    kept = [timer.at(far, lambda: None) for _ in range(50)]
    for _ in range(5_000):
        timer.at(far, lambda: None).drop()
        assert len(timer) <= len(kept) + KEPT_DROPPED + 1
    await trio.sleep(61)
    assert all(alarm.dropped for alarm in kept)
    assert len(timer) == 0


@pytest.mark.parametrize("seed", range(20))
async def test_alarms_that_are_not_dropped_fire_once_and_in_order(autojump_clock, nursery, seed):
    timer = running(nursery)
    random, begun = Random(seed), trio.current_time()
    expected, seen, alarms = {}, [], {}
    for number in range(1_000):
        time_s = begun + random.randint(1, 50)
        expected[number] = time_s
        alarms[number] = timer.at(time_s, lambda number=number: seen.append((trio.current_time(), number)))
        if random.random() < 0.6:
            victim = random.choice(list(alarms))
            alarms[victim].drop()
            expected.pop(victim, None)
    for _ in range(50):  # drop more alarms while others fire
        await trio.sleep(1)
        victim = random.choice(list(alarms))
        if not alarms[victim].dropped:
            del expected[victim]
        alarms[victim].drop()
    await trio.sleep(2)
    assert sorted((time_s, number) for number, time_s in expected.items()) == seen
    assert len(timer) == 0
