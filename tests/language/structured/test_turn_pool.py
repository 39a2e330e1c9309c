"""Threads that owners use in turn: their order, and what becomes of results, errors and cancelled work."""

import os
import threading

import pytest

from fairlead.language.structured import turn_pool
from fairlead.language.structured.turn_pool import TurnPool

WAIT_S = 20


class Work:
    """A function that begins, waits and returns its name."""

    def __init__(self, name):
        self.name = name
        self.begun, self.gate = threading.Event(), threading.Event()

    def __call__(self):
        self.begun.set()
        assert self.gate.wait(WAIT_S)
        return self.name


@pytest.fixture
def pool():
    made = TurnPool(2, "tested")
    yield made
    made.close()


def submitted(pool, owner, count):
    works = [Work(f"{owner} {index}") for index in range(count)]
    return works, [pool.submit(owner, work) for work in works]


def end(work, future):
    """Let a function that has begun return."""
    assert work.begun.wait(WAIT_S)
    work.gate.set()
    assert future.result(WAIT_S) == work.name


def test_owner_has_one_thread_and_the_next_turn_is_another_owners(pool):
    many, their_futures = submitted(pool, "many", 3)
    few, other_futures = submitted(pool, None, 2)
    end(few[0], other_futures[0])
    end(few[1], other_futures[1])
    assert [one.begun.is_set() for one in many] == [True, False, False]
    for work, future in zip(many, their_futures, strict=True):
        end(work, future)


def test_owner_that_has_been_served_goes_behind_others(pool):
    (long,), (its_future,) = submitted(pool, "long", 1)
    assert long.begun.wait(WAIT_S)  # one thread is left
    first, of_first = submitted(pool, "first", 2)
    second, of_second = submitted(pool, "second", 1)
    end(first[0], of_first[0])
    assert second[0].begun.wait(WAIT_S)
    assert not first[1].begun.is_set()
    end(second[0], of_second[0])
    end(first[1], of_first[1])
    end(long, its_future)


def test_error_is_raised_where_the_result_is_read_and_the_thread_goes_on(pool):
    def broken():
        raise BaseException("a panic")  # noqa: TRY002  as pyo3's

    future = pool.submit("one", broken)
    with pytest.raises(BaseException, match="a panic"):
        future.result(WAIT_S)
    assert pool.submit("one", lambda: 5).result(WAIT_S) == 5


def test_cancelled_work_is_not_begun(pool):
    works, futures = submitted(pool, "one", 3)
    assert works[0].begun.wait(WAIT_S)
    assert not futures[0].cancel()
    assert futures[1].cancel()
    end(works[0], futures[0])
    end(works[2], futures[2])
    assert not works[1].begun.is_set()


def test_threads_end_when_the_pool_is_closed(pool):
    before = threading.active_count()
    works, futures = submitted(pool, "one", 2)
    assert works[0].begun.wait(WAIT_S)
    pool.close()
    end(works[0], futures[0])
    assert futures[1].cancelled()
    for thread in threading.enumerate():
        if thread.name == "tested":
            thread.join(WAIT_S)
    assert threading.active_count() <= before


def test_threads_step_back_for_those_of_steps(pool):
    niceness = pool.submit("one", lambda: os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
    assert niceness.result(WAIT_S) == turn_pool.NICENESS
