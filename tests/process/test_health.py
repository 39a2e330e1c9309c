"""The breaker, compared with a simple model of its rules, and the times of probes."""

import pytest
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fairlead.config import HealthConfig
from fairlead.process import health
from fairlead.process.health import Breaker, watch
from first_failure import until_first_failure

LIMIT = 3

# (whether it was a probe, whether it succeeded)
result_lists = st.lists(st.tuples(st.booleans(), st.booleans()), max_size=40)


def expected_changes(results, limit):
    """Return the change after each result, computed from all earlier results instead of counters."""
    changes = []
    since_up = None  # the results since the breaker closed; None while it is open
    is_half_open = False  # requests opened it last, and none has succeeded since
    probes = []
    for is_probe, succeeded in results:
        change = None
        probes += [succeeded] if is_probe else []
        if since_up is None:
            if is_probe and succeeded:
                since_up, change = [], "up"
        else:
            since_up.append((is_probe, succeeded))
            requests = [succeeded for probe, succeeded in since_up if not probe]
            if not is_probe and succeeded:
                is_half_open = False
            if is_probe and probes[-limit:] == [False] * limit:
                change = "down"
            elif not is_probe and not succeeded and (is_half_open or requests[-limit:] == [False] * limit):
                change, is_half_open = "down", True
            if change == "down":
                since_up = None
        changes.append(change)
    return changes


def changes_of(breaker, results):
    """Return the changes that the breaker reports."""
    return [
        breaker.probed(succeeded=succeeded) if is_probe else breaker.requested(succeeded=succeeded)
        for is_probe, succeeded in results
    ]


@given(results=result_lists, limit=st.integers(1, 4))
@settings(max_examples=400)
def test_breaker_follows_its_rules(results, limit):
    breaker = Breaker(limit)
    changes = changes_of(breaker, results)
    assert expected_changes(results, limit) == changes
    assert breaker.is_up == (([change for change in changes if change] or ["down"])[-1] == "up")


class _StartsClosed(Breaker):
    def __init__(self, failures):
        super().__init__(failures)
        self._is_up = True


class _KeepsFailedRequests(Breaker):
    def requested(self, *, succeeded):
        return None if succeeded else super().requested(succeeded=False)


class _KeepsFailedProbes(Breaker):
    def probed(self, *, succeeded):
        missed = self._probes
        change = super().probed(succeeded=succeeded)
        self._probes += missed if succeeded else 0
        return change


class _ProbesResetRequests(Breaker):
    def probed(self, *, succeeded):
        if succeeded:
            self._requests = 0
        return super().probed(succeeded=succeeded)


class _NeverHalfOpen(Breaker):
    def requested(self, *, succeeded):
        self._is_half_open = False
        return super().requested(succeeded=succeeded)


class _ClosedByRequests(Breaker):
    def requested(self, *, succeeded):
        if succeeded and not self.is_up:
            return self.probed(succeeded=True)
        return super().requested(succeeded=succeeded)


class _AllowsOneMoreFailure(Breaker):
    def __init__(self, failures):
        super().__init__(failures + 1)


@pytest.mark.parametrize(
    "mutant",
    [
        _StartsClosed,
        _KeepsFailedRequests,
        _KeepsFailedProbes,
        _ProbesResetRequests,
        _NeverHalfOpen,
        _ClosedByRequests,
        _AllowsOneMoreFailure,
    ],
)
def test_breaker_that_violates_a_rule_is_detected(mutant):
    @given(results=result_lists)
    @until_first_failure(settings(suppress_health_check=list(HealthCheck)), max_examples=2000)
    def check(results):
        assert expected_changes(results, LIMIT) == changes_of(mutant(LIMIT), results)

    with pytest.raises(AssertionError):
        check()


async def _reports(autojump_clock, probe, seconds, **config):
    """Return the reported results, each with its time in seconds from the start."""
    began = trio.current_time()
    reports = []
    with trio.move_on_after(seconds):
        await watch(
            probe,
            lambda succeeded: reports.append((round(trio.current_time() - began, 3), succeeded)),
            health.HealthCheck(HealthConfig(**{"interval_s": 5.0, "timeout_s": 2.0, **config})),
        )
    return reports


async def test_probes_are_sent_at_once_and_then_every_interval(autojump_clock):
    async def probe():
        await trio.sleep(0.5)
        return True

    assert await _reports(autojump_clock, probe, 12) == [(0.5, True), (5.5, True), (10.5, True)]


async def test_probe_beyond_its_timeout_is_a_failure(autojump_clock):
    assert await _reports(autojump_clock, trio.sleep_forever, 9) == [(2.0, False), (7.0, False)]


async def test_probe_longer_than_the_interval_delays_the_next(autojump_clock):
    reports = await _reports(autojump_clock, trio.sleep_forever, 18, timeout_s=8.0)
    assert reports == [(8.0, False), (16.0, False)]


async def test_node_is_down_at_most_three_probes_after_its_last_answer(autojump_clock):
    breaker = Breaker(3)
    changes = []

    async def probe():
        if trio.current_time() - began > 11:
            await trio.sleep_forever()
        return True

    def report(succeeded):
        if change := breaker.probed(succeeded=succeeded):
            changes.append((change, round(trio.current_time() - began, 3)))

    began = trio.current_time()
    with trio.move_on_after(60):
        config = HealthConfig(interval_s=5.0, failures=3, timeout_s=2.0)
        await watch(probe, report, health.HealthCheck(config))
    assert changes == [("up", 0.0), ("down", 27.0)]
