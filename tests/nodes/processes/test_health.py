"""The breaker, compared with a simple model of its rules, and the times of probes."""

from itertools import takewhile

import pytest
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fairlead.base.config import HealthConfig
from fairlead.nodes.processes import health
from fairlead.nodes.processes.health import SERVED_S, Breaker, watch
from first_failure import until_first_failure

LIMIT = 3

# What a probe may find, and how a request may end
PROBES = {
    "healthy": {"succeeded": True},
    "error": {"succeeded": False, "answered": True},
    "silence": {"succeeded": False, "answered": False},
}
REQUESTS = {
    f"{tenant} {outcome}": (outcome, tenant) for outcome in ("succeeded", "failed") for tenant in "AB"
} | {"B progressed": ("progressed", "B")}
BETWEEN_S = SERVED_S / 5  # between two results

result_lists = st.lists(st.sampled_from([*PROBES, *PROBES, *REQUESTS]), max_size=40)


def expected_changes(results, limit):
    """Return the change after each result, computed from all earlier results instead of counters."""
    changes = []
    since_up = None  # the results since the breaker closed; None while it is open
    is_dead = False
    probes = []
    served = []  # times and tenants
    for index, result in enumerate(results):
        change = None
        probes += [result] if result in PROBES else []
        was_dead, is_dead = is_dead, probes[-limit:] == ["silence"] * limit
        if is_dead and not was_dead:
            change = "dead"
        elif since_up is None:
            if result == "healthy":
                since_up, change = [], "up"
        else:
            since_up.append(result)
            outcome, tenant = REQUESTS.get(result, (None, None))
            if outcome in ("succeeded", "progressed"):
                served.append((index * BETWEEN_S, tenant))
            ends = [REQUESTS[each] for each in since_up if each in REQUESTS]
            ends = [each for each in ends if each[0] != "progressed"]
            in_a_row = list(takewhile(lambda each: each[0] == "failed", reversed(ends)))
            failing = {each[1] for each in in_a_row}
            serves_others = any(
                index * BETWEEN_S - at <= SERVED_S and other not in failing for at, other in served
            )
            has_failed = len(probes) >= limit and "healthy" not in probes[-limit:]
            has_opened = outcome == "failed" and len(in_a_row) >= limit and not serves_others
            if (result in PROBES and has_failed) or has_opened:
                change = "down"
        if change in ("down", "dead"):
            since_up = None
        changes.append(change)
    return changes


def changes_of(breaker, results):
    """Return the changes that the breaker reports."""
    return [
        breaker.probed(**PROBES[result])
        if result in PROBES
        else breaker.requested(*REQUESTS[result], at=index * BETWEEN_S)
        for index, result in enumerate(results)
    ]


@given(results=result_lists, limit=st.integers(1, 4))
@settings(max_examples=400)
def test_breaker_follows_its_rules(results, limit):
    breaker = Breaker(limit)
    changes = changes_of(breaker, results)
    assert changes == expected_changes(results, limit)
    assert breaker.is_up == (([change for change in changes if change] or ["down"])[-1] == "up")
    probes = [result for result in results if result in PROBES]
    assert breaker.is_dead == (probes[-limit:] == ["silence"] * limit)


@given(results=st.lists(st.sampled_from(["healthy", "error", *REQUESTS])), limit=st.integers(1, 4))
def test_server_that_answers_its_probes_is_never_dead(results, limit):
    breaker = Breaker(limit)
    assert "dead" not in changes_of(breaker, results)
    assert not breaker.is_dead


class _StartsClosed(Breaker):
    def __init__(self, failures):
        super().__init__(failures)
        self._is_up = True


class _KeepsFailedRequests(Breaker):
    def requested(self, outcome, tenant, *, at):
        kept = "progressed" if outcome == "succeeded" else outcome
        return super().requested(kept, tenant, at=at)


class _KeepsFailedProbes(Breaker):
    def probed(self, *, succeeded, answered=False):
        missed = self._probes
        change = super().probed(succeeded=succeeded, answered=answered)
        self._probes += missed if succeeded else 0
        return change


class _ProbesResetRequests(Breaker):
    def probed(self, *, succeeded, answered=False):
        if succeeded:
            self._requests = 0
        return super().probed(succeeded=succeeded, answered=answered)


class _OpensAgainAfterOneFailure(Breaker):
    def _close(self):
        change = super()._close()
        self._requests = self.failures - 1 if change and self.failures > 1 else self._requests
        return change


class _OpensWhileItServesOthers(Breaker):
    def _serves_others(self, at):
        return False


class _TakesTheSameTenantForAnother(Breaker):
    def _serves_others(self, at):
        return any(at - served_at <= SERVED_S for served_at in self._served.values())


class _IsNeverOpenedAfterAnySuccess(Breaker):
    def _serves_others(self, at):
        return bool(self._served.keys() - self._failing)


class _EndsTheRowByProgress(Breaker):
    def requested(self, outcome, tenant, *, at):
        return super().requested("failed" if outcome == "failed" else "succeeded", tenant, at=at)


class _ClosedByRequests(Breaker):
    def requested(self, outcome, tenant, *, at):
        if outcome == "succeeded" and not self.is_up:
            return self.probed(succeeded=True)
        return super().requested(outcome, tenant, at=at)


class _AllowsOneMoreFailure(Breaker):
    def __init__(self, failures):
        super().__init__(failures + 1)


class _IsKilledByErrors(Breaker):
    def probed(self, *, succeeded, answered=False):
        return super().probed(succeeded=succeeded)


class _IsKilledByRequests(Breaker):
    def requested(self, outcome, tenant, *, at):
        return super().requested(outcome, tenant, at=at) and "dead"


class _NeverDies(Breaker):
    def probed(self, *, succeeded, answered=False):
        return super().probed(succeeded=succeeded, answered=True)


class _DiesOnlyWhileUp(Breaker):
    def probed(self, *, succeeded, answered=False):
        return super().probed(succeeded=succeeded, answered=answered or not self.is_up)


class _DiesOnce(Breaker):
    def probed(self, *, succeeded, answered=False):
        was_dead = self._is_dead
        change = super().probed(succeeded=succeeded, answered=answered)
        self._is_dead |= was_dead
        return change


@pytest.mark.parametrize(
    "mutant",
    [
        _StartsClosed,
        _KeepsFailedRequests,
        _KeepsFailedProbes,
        _ProbesResetRequests,
        _OpensAgainAfterOneFailure,
        _OpensWhileItServesOthers,
        _TakesTheSameTenantForAnother,
        _IsNeverOpenedAfterAnySuccess,
        _EndsTheRowByProgress,
        _ClosedByRequests,
        _AllowsOneMoreFailure,
        _IsKilledByErrors,
        _IsKilledByRequests,
        _NeverDies,
        _DiesOnlyWhileUp,
        _DiesOnce,
    ],
)
def test_breaker_that_violates_a_rule_is_detected(mutant):
    @given(results=result_lists)
    @until_first_failure(settings(suppress_health_check=list(HealthCheck)), max_examples=2000)
    def check(results):
        assert changes_of(mutant(LIMIT), results) == expected_changes(results, LIMIT)

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


async def test_server_is_dead_at_most_three_probes_after_its_last_answer(autojump_clock):
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
    assert changes == [("up", 0.0), ("dead", 27.0)]
