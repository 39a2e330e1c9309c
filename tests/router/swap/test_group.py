"""Groups evict models as llama-swap documents it."""

import pytest

from fairlead.router.swap.group import Group, GroupPolicy
from fairlead.router.swap.policy import SwapReason


def test_members_of_a_swapping_group_evict_each_other() -> None:
    policy = GroupPolicy({"one": Group(("a", "b"))})

    assert frozenset({"a"}) == policy.eviction_for("b", ["a"])


def test_members_of_a_group_that_does_not_swap_run_together() -> None:
    policy = GroupPolicy({"one": Group(("a", "b"), swap=False)})

    assert policy.eviction_for("b", ["a"]) == frozenset()


def test_exclusive_group_evicts_all_other_groups() -> None:
    policy = GroupPolicy({"one": Group(("a",)), "two": Group(("b", "c"), swap=False)})

    assert frozenset({"b", "c"}) == policy.eviction_for("a", ["b", "c"])


def test_group_that_is_not_exclusive_evicts_no_other_group() -> None:
    policy = GroupPolicy({"one": Group(("a",), exclusive=False), "two": Group(("b", "c"), swap=False)})

    assert policy.eviction_for("a", ["b", "c"]) == frozenset()


def test_persistent_group_is_not_evicted_by_other_groups() -> None:
    policy = GroupPolicy({"one": Group(("a",)), "always": Group(("b",), persistent=True)})

    assert policy.eviction_for("a", ["b"]) == frozenset()


def test_members_of_a_persistent_group_evict_each_other() -> None:
    policy = GroupPolicy({"always": Group(("a", "b"), persistent=True)})

    assert frozenset({"a"}) == policy.eviction_for("b", ["a"])


def test_models_without_a_group_run_one_at_a_time_and_evict_groups() -> None:
    policy = GroupPolicy({"one": Group(("a",))})

    assert frozenset({"a", "x"}) == policy.eviction_for("y", ["a", "x"])


def test_model_in_two_groups_is_refused() -> None:
    with pytest.raises(ValueError, match="a is in another group"):
        GroupPolicy({"one": Group(("a",)), "two": Group(("a",))})


def test_swap_reason_has_the_group_and_the_models_loaded_afterwards():
    policy = GroupPolicy({"g": Group(("a", "b")), "kept": Group(("k",), persistent=True)})
    assert policy.reason_for("b", ["k", "a"]) == SwapReason(chosen=("b", "k"), cost=1, rule="group g")
    assert policy.reason_for("other", ["k", "a"]) == SwapReason(chosen=("k", "other"), cost=1)
