"""Document 004: eviction policies only decide, and a swap is logged once."""

import pytest
import structlog

from fairlead.base.config import LruSwap
from fairlead.router.swap.group import Group, GroupPolicy
from fairlead.router.swap.lru import LruPolicy
from fairlead.router.swap.matrix import MatrixPolicy
from fairlead.router.swap.policy import EvictionPolicy, KeepEverything
from router.dispatch.recorded import FakeNode, job, limits, scheduler, submit
from router.fleet.running_fleet import running_fleet, sleeper

POLICIES = [
    GroupPolicy({"pair": Group(("a", "b"))}),
    MatrixPolicy({"s": "a | b & c"}),
    LruPolicy(max_loaded=1),
    KeepEverything(),
]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
def test_eviction_is_a_decision_that_logs_nothing_and_changes_nothing(policy: EvictionPolicy):
    running = ("a", "c")
    with structlog.testing.capture_logs() as logs:
        decisions = {policy.eviction_for("b", running) for _ in range(100)}
    assert len(decisions) == 1
    assert decisions.pop() <= set(running)
    assert logs == []


async def test_swap_is_logged_once_despite_repeated_policy_calls():
    models = [sleeper(name) for name in "xyz"]
    async with running_fleet(*models, swap=LruSwap(max_loaded=1)) as opened:
        with structlog.testing.capture_logs() as logs:
            for model in ("x", "y", "x", "x"):
                await opened.fleet.load(model)
    assert [line["model"] for line in logs if line["event"] == "loading model"] == ["x", "y", "x"]


class RecordingPolicy(EvictionPolicy):
    """A policy that records its calls and allows one model at a time."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, frozenset[str]]] = []

    def eviction_for(self, target, running):
        self.calls.append((target, frozenset(running)))
        return frozenset(running)


def test_policy_receives_loading_models_among_the_running_ones():
    policy = RecordingPolicy()
    subject, effects = scheduler(policy=policy, loadable=frozenset("xy"))
    submit(subject, job(model="x"))
    assert effects.swaps == [("x", frozenset())]
    submit(subject, job("B", model="y"))
    assert effects.swaps == [("x", frozenset())]  # a model that is being loaded is not evicted
    assert policy.calls[-1] == ("y", frozenset("x"))


def test_policy_is_called_for_each_queued_job_whenever_a_job_ends():
    policy = RecordingPolicy()
    subject, effects = scheduler(policy=policy, loadable=frozenset("xy"))
    subject.node_up(*FakeNode("node of x", "x"), limits(2))
    first, second, _ = submit(subject, job(model="x"), job(model="x"), job("B", model="y"))
    before = len(policy.calls)
    subject.leave(first)
    assert len(policy.calls) > before
    assert effects.swaps == []
    subject.leave(second)
    assert effects.swaps == [("y", frozenset("x"))]
