"""The target that a selector chooses for a job: examples, and a simple model of the rules."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from fairlead.base.config import GroupConfig, GroupSwap, KeepSwap, LruSwap, MatrixSwap, SelectorConfig
from fairlead.base.config.selectors import SelectorSettings
from fairlead.router.swap.policies import policy_for
from fairlead.router.swap.selectors import Selection, Target, faults_of_spilling
from first_failure import until_first_failure

SETTINGS = settings(max_examples=100, stateful_step_count=40)
MUTANT_SETTINGS = until_first_failure(SETTINGS, max_examples=1000)


def chosen(strategy: str, *targets: Target, selection: Selection | None = None, limit: int = 1) -> str:
    """Return the name of the chosen target; count the job in `selection` if one is given."""
    config = SelectorConfig(strategy, ("?",), SelectorSettings(limit))
    target = (selection or Selection()).choose("s", config, targets)
    if selection is not None:
        selection.take("s", target.model)
    return target.name


def local(name: str, state: str = "stopped", *, is_healthy: bool = True) -> Target:
    return Target(name, name, state, is_healthy=is_healthy)


def remote(name: str, *, is_healthy: bool = True) -> Target:
    return Target(name, name, "ready" if is_healthy else "stopped", is_remote=True, is_healthy=is_healthy)


# By example ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["ready", "loading", "stopped", "draining", "stopping", "failed"])
def test_pin_chooses_the_first_target_in_any_state(state):
    assert chosen("pin", local("a", state), local("b", "ready")) == "a"


@pytest.mark.parametrize(
    ("expected", "states"),
    [
        ("a", "stopped stopped stopped"),
        ("c", "stopped loading ready"),
        ("b", "stopped ready ready"),
        ("b", "stopped loading loading"),
        ("b", "draining stopped stopping"),  # a draining model is being evicted
        ("b", "failed draining stopping"),
        ("c", "failed failed stopped"),
        ("a", "failed failed failed"),
    ],
)
def test_warm_prefers_ready_then_loading_then_stopped_targets(expected, states):
    targets = [local(name, state) for name, state in zip("abc", states.split(), strict=True)]
    assert expected == chosen("warm", *targets)


def test_warm_chooses_a_remote_target_while_it_is_healthy():
    assert chosen("warm", local("a"), remote("b")) == "b"
    assert chosen("warm", local("a"), remote("b", is_healthy=False)) == "a"


def test_warm_skips_a_ready_target_that_is_unhealthy():
    assert chosen("warm", local("a", "ready", is_healthy=False), local("b")) == "b"


def test_jobs_spill_over_when_a_target_reaches_its_limit():
    selection = Selection()
    targets = [local("a"), local("b"), remote("c")]
    choices = [chosen("spillover", *targets, selection=selection, limit=2) for _ in range(8)]
    assert choices[:6] == ["a", "a", "b", "b", "c", "c"]
    assert {"a", "b", "c"} >= set(choices[6:])  # all are full, so further jobs are distributed evenly
    assert len(set(choices[6:])) == 2


def test_each_of_several_fronts_has_its_part_of_the_limit_rounded_up():
    for fronts, limit, used in ((2, 4, "aab"), (2, 3, "aab"), (8, 4, "ab")):
        selection = Selection(fronts=fronts)
        targets = [local("a"), local("b")]
        choices = [chosen("spillover", *targets, selection=selection, limit=limit) for _ in used]
        assert "".join(choices) == used


def test_loaded_targets_are_filled_before_another_is_used():
    selection = Selection()
    targets = [local("a"), local("b", "ready"), local("c", "loading")]
    choices = [chosen("spillover", *targets, selection=selection, limit=2) for _ in range(5)]
    assert Counter("bbcca") == Counter(choices)
    assert choices[-1] == "a"


def test_targets_with_equally_many_jobs_take_turns():
    selection = Selection()
    targets = [local(name, "ready") for name in "abc"]
    choices = []
    for _ in range(9):
        choices.append(chosen("spillover", *targets, selection=selection))
        selection.give_back("s", choices[-1])
    assert Counter(choices) == Counter("abc" * 3)


def test_ended_job_frees_capacity_of_its_target():
    selection = Selection()
    targets = [local("a"), local("b")]
    assert [chosen("spillover", *targets, selection=selection) for _ in "ab"] == ["a", "b"]
    selection.give_back("s", "a")
    assert chosen("spillover", *targets, selection=selection) == "a"


@pytest.mark.parametrize("state", ["draining", "stopping", "failed"])
def test_jobs_spill_over_to_stopping_or_failed_targets_only_without_any_other(state):
    selection = Selection()
    out = [local("a", state), local("b"), local("c", state)]
    assert [chosen("spillover", *out, selection=selection) for _ in range(2)] == ["b", "b"]
    assert chosen("spillover", out[0], out[2]) == "a"


def test_each_selector_counts_its_own_jobs():
    selection = Selection()
    selection.take("another", "a")
    assert chosen("spillover", local("a"), local("b"), selection=selection) == "a"


def test_ended_jobs_leave_no_counts():
    selection = Selection()
    chosen("spillover", local("a"), selection=selection)
    selection.give_back("s", "a")
    assert not selection._taken
    with pytest.raises(AssertionError):
        selection.give_back("s", "a")


GROUPS = {
    "beside": GroupConfig(("a", "b"), swap=False, exclusive=False),
    "apart": GroupConfig(("c", "d"), swap=True, exclusive=False),
}


@pytest.mark.parametrize(
    ("swap", "targets", "expected"),
    [
        (KeepSwap(), "a b c", []),
        (GroupSwap(), "a b", ["a cannot be loaded together with b", "b cannot be loaded together with a"]),
        (GroupSwap(GROUPS), "a b far", []),
        (
            GroupSwap(GROUPS),
            "c d",
            ["c cannot be loaded together with d", "d cannot be loaded together with c"],
        ),
        (GroupSwap(GROUPS), "a c", []),
        (MatrixSwap({"s": "a & b"}), "a b", []),
        (
            MatrixSwap({"s": "a | b"}),
            "a b",
            ["a cannot be loaded together with b", "b cannot be loaded together with a"],
        ),
        (LruSwap(max_loaded=2), "a b", []),
        (LruSwap(max_loaded=1), "a far", []),
        (
            LruSwap(max_loaded=1),
            "a b",
            ["a cannot be loaded together with b", "b cannot be loaded together with a"],
        ),
        (KeepSwap(), "a a2", ["a occurs twice"] * 2),
        (KeepSwap(), "far b far", ["far occurs twice"] * 2),
    ],
)
def test_spillover_targets_that_evict_each_other_are_refused(swap, targets, expected):
    local = {name: name for name in "abcd"} | {"a2": "a"}
    selectors = {
        "s": SelectorConfig("spillover", tuple(targets.split())),
        "w": SelectorConfig("warm", tuple("abcd")),
    }
    found = list(faults_of_spilling(selectors, local, policy_for(swap, dict.fromkeys(local, 0.0))))
    assert expected == [fault.message for fault in found]
    assert {"s"} >= {fault.path[0] for fault in found}


# Against a simple model of the rules ---------------------------------------------------------------------

STATES = ["ready", "loading", "stopped", "draining", "stopping", "failed"]


class SelectionMachine(RuleBasedStateMachine):
    """Jobs of one spillover selector over three models in random states."""

    def __init__(self) -> None:
        super().__init__()
        self.selection = Selection()
        self.config = SelectorConfig("spillover", ("a", "b", "c"), SelectorSettings(2))
        self.targets = [local("a"), local("b"), remote("c")]
        self.jobs: list[str] = []

    @rule(index=st.integers(0, 2), state=st.sampled_from(STATES))
    def change(self, index, state) -> None:
        self.targets[index] = self.targets[index]._replace(state=state, is_healthy=state != "failed")

    @rule()
    def choose(self) -> None:
        target = self.selection.choose("s", self.config, self.targets)
        self.selection.take("s", target.model)
        count = Counter(self.jobs)
        usable = [each for each in self.targets if each.state in ("ready", "loading", "stopped")]
        used = [
            each
            for each in usable
            if count[each.name] or (each.name != "c" and each.state in ("ready", "loading"))
        ]
        unused = [each for each in usable if each not in used]
        not_full = [each for each in used if count[each.name] < 2]
        if not_full or (used and not unused):
            assert target in used, "another target was used although one had capacity"
            assert count[target.name] == min(count[each.name] for each in used), (
                "another target has fewer jobs"
            )
        elif unused:
            assert target is unused[0], "out of order"
        else:
            assert target is self.targets[0]
        self.jobs.append(target.name)

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def end(self, data) -> None:
        job = data.draw(st.sampled_from(self.jobs))
        self.jobs.remove(job)
        self.selection.give_back("s", job)

    @invariant()
    def counts_agree(self) -> None:
        assert Counter(self.jobs) == Counter(
            {name: count for (_, name), count in self.selection._taken.items()}
        )


TestSelection = SelectionMachine.TestCase
TestSelection.settings = SETTINGS


def count_no_job(self: Selection, selector: str, model: str) -> None:
    return None


def keep_counts_of_ended_jobs(self: Selection, selector: str, model: str) -> None:
    return None


def use_no_target(self: Selection, selector: str, target: Target) -> bool:
    return False


def use_targets_loaded_for_others(self: Selection, selector: str, target: Target) -> bool:
    return not target.is_avoided and (target.state != "stopped" or self.taken(selector, target.model) > 0)


def avoid_no_target(self: Target) -> bool:
    return False


def spill_one_job_late(self: Selection, selector: str, limit: int, targets: list[Target]) -> Target:
    return _spill_over(self, selector, limit + 1, targets)


def spill_one_job_early(self: Selection, selector: str, limit: int, targets: list[Target]) -> Target:
    return _spill_over(self, selector, limit - 1, targets)


def spill_in_reverse(self: Selection, selector: str, limit: int, targets: list[Target]) -> Target:
    return _spill_over(self, selector, limit, targets[::-1])


def take_no_turns(self: Selection, selector: str, limit: int, targets: list[Target]) -> Target:
    self._turn = 0
    return _spill_over(self, selector, limit, targets)


_spill_over = Selection._spill_over


@pytest.mark.parametrize(
    ("owner", "name", "mutant"),
    [
        (Selection, "take", count_no_job),
        (Selection, "give_back", keep_counts_of_ended_jobs),
        (Selection, "_is_active", use_no_target),
        (Selection, "_is_active", use_targets_loaded_for_others),
        (Target, "is_avoided", property(avoid_no_target)),
        (Selection, "_spill_over", spill_one_job_late),
        (Selection, "_spill_over", spill_one_job_early),
        (Selection, "_spill_over", spill_in_reverse),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_violated_rule_is_detected(monkeypatch: pytest.MonkeyPatch, owner, name, mutant):
    monkeypatch.setattr(owner, name, mutant)
    with pytest.raises((AssertionError, ExceptionGroup)):
        run_state_machine_as_test(SelectionMachine, settings=MUTANT_SETTINGS)


def test_separate_test_catches_a_turn_that_stands_still(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Selection, "_spill_over", take_no_turns)
    with pytest.raises(AssertionError):
        test_targets_with_equally_many_jobs_take_turns()
