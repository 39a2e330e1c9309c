"""How long a child may send nothing, on the virtual clock."""

import pytest
import trio
from hypothesis import assume, given
from hypothesis import settings as budget
from hypothesis import strategies as st

from fairlead.nodes.engines.watchdog import TICKS, Watchdog

BOUND_S = 30.0
TICK_S = BOUND_S / TICKS


class RunningWatchdog:
    """A running watchdog; `fired_at_s` is when it reported its child stuck, in seconds since `began_s`."""

    def __init__(self) -> None:
        self.inner = Watchdog(BOUND_S)
        self.began_s = trio.current_time()
        self.fired_at_s: float | None = None
        self.silent_s: float | None = None

    async def run(self) -> None:
        self.silent_s = await self.inner.stuck()
        self.fired_at_s = trio.current_time() - self.began_s


@pytest.fixture
async def watchdog(nursery) -> RunningWatchdog:
    watchdog = RunningWatchdog()
    nursery.start_soon(watchdog.run)
    return watchdog


async def answer_once(watchdog: RunningWatchdog) -> None:
    """Send a message and receive the first answer, which may take twice the bound."""
    watchdog.inner.message_sent()
    await trio.sleep(1)
    watchdog.inner.frame_received(more=False)


async def test_idle_child_is_never_stuck(autojump_clock, watchdog):
    await trio.sleep(100 * BOUND_S)
    await answer_once(watchdog)
    await trio.sleep(100 * BOUND_S)
    assert watchdog.fired_at_s is None


async def test_step_longer_than_the_bound_is_stuck(autojump_clock, watchdog):
    await answer_once(watchdog)
    sent_at_s = trio.current_time() - watchdog.began_s
    watchdog.inner.message_sent()
    await trio.sleep(10 * BOUND_S)
    assert watchdog.silent_s == BOUND_S
    assert BOUND_S <= watchdog.fired_at_s - sent_at_s <= BOUND_S + TICK_S


async def test_first_step_may_take_at_most_twice_the_bound(autojump_clock, watchdog):
    watchdog.inner.message_sent()
    await trio.sleep(2 * BOUND_S - 0.1)
    assert watchdog.fired_at_s is None
    await trio.sleep(BOUND_S)
    assert watchdog.silent_s == 2 * BOUND_S
    assert 2 * BOUND_S <= watchdog.fired_at_s <= 2 * BOUND_S + TICK_S


async def test_steps_within_the_bound_are_progress(autojump_clock, watchdog):
    watchdog.inner.message_sent()
    for _ in range(20):
        await trio.sleep(BOUND_S - 0.1)
        watchdog.inner.frame_received(more=True)
    assert watchdog.fired_at_s is None


async def test_further_requests_do_not_extend_the_bound(autojump_clock, watchdog):
    await answer_once(watchdog)
    for _ in range(50):
        watchdog.inner.message_sent()
        await trio.sleep(1)
    assert watchdog.fired_at_s is not None


async def test_answer_before_the_first_step_leaves_the_longer_timeout(autojump_clock, watchdog):
    watchdog.inner.message_sent()
    watchdog.inner.frame_received(more=False, stepped=False)
    watchdog.inner.message_sent()
    await trio.sleep(1.5 * BOUND_S)
    assert watchdog.fired_at_s is None
    await trio.sleep(BOUND_S)
    assert watchdog.fired_at_s is not None


async def test_last_answer_stops_the_watchdog(autojump_clock, watchdog):
    await answer_once(watchdog)
    watchdog.inner.message_sent()
    await trio.sleep(BOUND_S - 1)
    watchdog.inner.frame_received(more=False)
    await trio.sleep(100 * BOUND_S)
    assert watchdog.fired_at_s is None


async def test_time_while_the_parent_was_suspended_does_not_count(autojump_clock, nursery):
    watchdog = RunningWatchdog()
    nursery.start_soon(watchdog.run)
    await answer_once(watchdog)
    watchdog.inner.message_sent()
    await trio.testing.wait_all_tasks_blocked()
    autojump_clock.jump(100 * BOUND_S)  # as if this process had been suspended
    await trio.sleep(BOUND_S - 2 * TICK_S)
    assert watchdog.fired_at_s is None
    watchdog.inner.frame_received(more=True)
    await trio.sleep(2 * BOUND_S)
    assert watchdog.fired_at_s is not None


@budget(max_examples=50)
@given(
    events=st.lists(
        st.tuples(st.sampled_from(["message", "frame", "last"]), st.floats(0, 3 * BOUND_S)), max_size=8
    )
)
def test_watchdog_fires_exactly_after_silence_beyond_the_bound(events):
    """Compare with simple arithmetic over the same events."""

    async def main() -> float | None:
        watchdog = RunningWatchdog()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watchdog.run)
            for kind, wait_s in events:
                await trio.sleep(wait_s)
                if kind == "message":
                    watchdog.inner.message_sent()
                else:
                    watchdog.inner.frame_received(more=kind == "frame")
            nursery.cancel_scope.cancel()
        return watchdog.fired_at_s

    now, since, bound, due = 0.0, None, 2 * BOUND_S, None
    for kind, wait_s in events:
        now += wait_s
        if since is not None and due is None:
            if now > since + bound + 2 * TICK_S:
                due = since + bound
            else:
                assume(now < since + bound - 2 * TICK_S)  # between the two, both are correct
        if kind == "message":
            since = now if since is None else since
        else:
            since, bound = now if kind == "frame" else None, BOUND_S
    fired_at_s = trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    assert (due is None) == (fired_at_s is None)
    if due is not None:
        assert due - 1e-6 <= fired_at_s <= due + TICK_S + 1e-6
