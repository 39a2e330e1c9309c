"""Alarms on the virtual clock."""

import gc
import weakref
from random import Random

import pytest
import trio

from fairlead.dispatch.timer import FEW, Timer


def running(nursery: trio.Nursery) -> Timer:
    timer = Timer()
    nursery.start_soon(timer.run)
    return timer


async def test_alarms_go_off_at_their_time_and_in_their_order_for_one_time(autojump_clock, nursery):
    timer = running(nursery)
    begun, seen = trio.current_time(), []
    for after_s, name in ((3, "d"), (1, "a"), (2, "b"), (2, "c")):
        timer.at(begun + after_s, lambda name=name: seen.append((name, trio.current_time() - begun)))
    await trio.sleep(2.5)
    assert [("a", 1.0), ("b", 2.0), ("c", 2.0)] == seen
    await trio.sleep(1)
    assert [("d", 3.0)] == seen[3:]
    assert 0 == len(timer)


async def test_an_alarm_before_all_others_wakes_the_timer(autojump_clock, nursery):
    timer = running(nursery)
    seen = []
    timer.at(trio.current_time() + 100, lambda: seen.append("late"))
    await trio.testing.wait_all_tasks_blocked()
    timer.at(trio.current_time() + 1, lambda: seen.append("soon"))
    await trio.sleep(2)
    assert ["soon"] == seen


async def test_an_alarm_may_drop_those_of_its_own_time_and_set_others(autojump_clock, nursery):
    timer = running(nursery)
    seen, now = [], trio.current_time()

    def first() -> None:
        second.drop()
        timer.at(now + 1, lambda: seen.append("at once"))
        timer.at(now + 2, lambda: seen.append("later"))

    timer.at(now + 1, first)
    second = timer.at(now + 1, lambda: seen.append("dropped"))
    await trio.sleep(1.5)
    assert ["at once"] == seen
    await trio.sleep(1)
    assert ["at once", "later"] == seen


async def test_what_a_dropped_alarm_would_have_done_is_forgotten_at_once(autojump_clock, nursery):
    timer = running(nursery)

    class Waiter:
        def wake(self) -> None:
            raise AssertionError("dropped")

    waiter = Waiter()
    alarm, gone = timer.at(trio.current_time() + 1, waiter.wake), weakref.ref(waiter)
    alarm.drop()
    del waiter
    gc.collect()
    assert gone() is None
    assert alarm.dropped
    await trio.sleep(2)


async def test_dropped_alarms_do_not_pile_up(autojump_clock, nursery):
    timer = running(nursery)
    far = trio.current_time() + 60
    kept = [timer.at(far, lambda: None) for _ in range(50)]
    for _ in range(5_000):
        timer.at(far, lambda: None).drop()
        assert len(timer) <= len(kept) + FEW + 1
    await trio.sleep(61)
    assert all(alarm.dropped for alarm in kept)
    assert 0 == len(timer)


@pytest.mark.parametrize("seed", range(20))
async def test_whatever_is_set_and_dropped_the_rest_goes_off_once_and_in_order(autojump_clock, nursery, seed):
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
    for _ in range(50):  # some more, while they go off
        await trio.sleep(1)
        victim = random.choice(list(alarms))
        if not alarms[victim].dropped:
            del expected[victim]
        alarms[victim].drop()
    await trio.sleep(2)
    assert sorted((time_s, number) for number, time_s in expected.items()) == seen
    assert 0 == len(timer)
