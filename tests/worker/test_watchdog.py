"""How long a child may be silent, on the virtual clock."""

import pytest
import trio
from hypothesis import assume, given
from hypothesis import settings as budget
from hypothesis import strategies as st

from fairlead.worker.watchdog import TICKS, Watchdog

BOUND_S = 30.0
TICK_S = BOUND_S / TICKS


class Watched:
    """A running watchdog; `fired_at` is when it reported its child stuck, in seconds since it began."""

    def __init__(self) -> None:
        self.dog = Watchdog(BOUND_S)
        self.began = trio.current_time()
        self.fired_at: float | None = None
        self.silent_s: float | None = None

    async def run(self) -> None:
        self.silent_s = await self.dog.stuck()
        self.fired_at = trio.current_time() - self.began


@pytest.fixture
async def watched(nursery) -> Watched:
    watched = Watched()
    nursery.start_soon(watched.run)
    return watched


async def warm(watched: Watched) -> None:
    """Let the child give its first answer, for which it has twice the bound."""
    watched.dog.message_sent()
    await trio.sleep(1)
    watched.dog.frame_received(more=False)


async def test_idle_child_may_be_silent_forever(autojump_clock, watched):
    await trio.sleep(100 * BOUND_S)
    await warm(watched)
    await trio.sleep(100 * BOUND_S)
    assert watched.fired_at is None


async def test_a_step_that_takes_longer_than_the_bound_is_stuck(autojump_clock, watched):
    await warm(watched)
    asked_at = trio.current_time() - watched.began
    watched.dog.message_sent()
    await trio.sleep(10 * BOUND_S)
    assert watched.silent_s == BOUND_S
    assert BOUND_S <= watched.fired_at - asked_at <= BOUND_S + TICK_S


async def test_the_first_step_may_take_twice_the_bound_and_no_longer(autojump_clock, watched):
    watched.dog.message_sent()
    await trio.sleep(2 * BOUND_S - 0.1)
    assert watched.fired_at is None
    await trio.sleep(BOUND_S)
    assert watched.silent_s == 2 * BOUND_S
    assert 2 * BOUND_S <= watched.fired_at <= 2 * BOUND_S + TICK_S


async def test_steps_just_within_the_bound_are_progress(autojump_clock, watched):
    watched.dog.message_sent()
    for _ in range(20):
        await trio.sleep(BOUND_S - 0.1)
        watched.dog.frame_received(more=True)
    assert watched.fired_at is None


async def test_further_requests_do_not_extend_the_bound(autojump_clock, watched):
    await warm(watched)
    for _ in range(50):
        watched.dog.message_sent()
        await trio.sleep(1)
    assert watched.fired_at is not None


async def test_last_answer_stops_the_watch(autojump_clock, watched):
    await warm(watched)
    watched.dog.message_sent()
    await trio.sleep(BOUND_S - 1)
    watched.dog.frame_received(more=False)
    await trio.sleep(100 * BOUND_S)
    assert watched.fired_at is None


async def test_time_in_which_the_parent_was_stopped_does_not_count(autojump_clock, nursery):
    watched = Watched()
    nursery.start_soon(watched.run)
    await warm(watched)
    watched.dog.message_sent()
    await trio.testing.wait_all_tasks_blocked()
    autojump_clock.jump(100 * BOUND_S)  # as if this process had been stopped
    await trio.sleep(BOUND_S - 2 * TICK_S)
    assert watched.fired_at is None
    watched.dog.frame_received(more=True)
    await trio.sleep(2 * BOUND_S)
    assert watched.fired_at is not None


@budget(max_examples=50)
@given(
    events=st.lists(
        st.tuples(st.sampled_from(["asked", "answered", "last"]), st.floats(0, 3 * BOUND_S)), max_size=8
    )
)
def test_watchdog_fires_exactly_after_silence_beyond_the_bound(events):
    """Compare with plain arithmetic over the same events: how long an answer was due without one."""

    async def main() -> float | None:
        watched = Watched()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watched.run)
            for kind, wait_s in events:
                await trio.sleep(wait_s)
                if kind == "asked":
                    watched.dog.message_sent()
                else:
                    watched.dog.frame_received(more=kind == "answered")
            nursery.cancel_scope.cancel()
        return watched.fired_at

    now, since, bound, due = 0.0, None, 2 * BOUND_S, None
    for kind, wait_s in events:
        now += wait_s
        if since is not None and due is None:
            if now > since + bound + 2 * TICK_S:
                due = since + bound
            else:
                assume(now < since + bound - 2 * TICK_S)  # between the two, either is right
        if kind == "asked":
            since = now if since is None else since
        else:
            since, bound = now if kind == "answered" else None, BOUND_S
    fired_at = trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    assert (due is None) == (fired_at is None)
    if due is not None:
        assert due - 1e-6 <= fired_at <= due + TICK_S + 1e-6
