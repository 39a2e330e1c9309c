"""Matrix expressions expand and choose evictions as llama-swap's documentation says."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlead.router.swap import matrix
from fairlead.router.swap.matrix import MatrixError, MatrixPolicy
from fairlead.router.swap.policy import SwapReason


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("model-a", [["model-a"]]),
        ("a & b", [["a", "b"]]),
        ("a | b", [["a"], ["b"]]),
        ("(a | b) & c", [["a", "c"], ["b", "c"]]),
        ("(a | b) & (c | d)", [["a", "c"], ["a", "d"], ["b", "c"], ["b", "d"]]),
        ("a | b & c", [["a"], ["b", "c"]]),
        (" ( ( a ) ) ", [["a"]]),
        ("a & a", [["a"]]),
        ("org/model:8b.q4 & b", [["b", "org/model:8b.q4"]]),
    ],
)
def test_expression_expands_into_combinations(expression: str, expected: list[list[str]]) -> None:
    assert expected == [sorted(each) for each in matrix.expand({"it": expression}, {})]


def test_reference_is_replaced_by_the_combinations_of_the_other_set() -> None:
    found = matrix.expand({"llms": "g | q", "both": "+llms & v"}, {})

    assert [set(each) for each in found] == [{"g"}, {"q"}, {"g", "v"}, {"q", "v"}]


def test_variables_name_models_and_take_precedence() -> None:
    found = matrix.expand({"one": "g & real"}, {"g": "gemma-model"})

    assert (frozenset({"gemma-model", "real"}),) == found


@pytest.mark.parametrize(
    "expression", ["", "a &", "& a", "(a", "a)", "a b", "a | | b", "+missing", "()", "a & + b", "+it"]
)
def test_invalid_expression_is_refused_by_the_name_of_its_set(expression: str) -> None:
    with pytest.raises(MatrixError, match=r"sets\.it"):
        matrix.expand({"it": expression}, {})


def test_circular_references_are_refused() -> None:
    with pytest.raises(MatrixError, match="refers to itself"):
        matrix.expand({"one": "+two", "two": "+one"}, {})


def test_expression_with_too_many_combinations_is_refused() -> None:
    clause = "(" + "|".join(f"m{number}" for number in range(50)) + ")"

    with pytest.raises(MatrixError, match="more than 10000"):
        matrix.expand({"it": " & ".join([clause] * 4)}, {})


def test_expression_nested_too_deep_is_refused() -> None:
    with pytest.raises(MatrixError, match="nested deeper"):
        matrix.expand({"it": "(" * 2000 + "a" + ")" * 2000}, {})


def test_models_of_one_combination_run_together() -> None:
    policy = MatrixPolicy({"one": "a & b & c"})

    assert policy.eviction_for("b", ["a", "c"]) == frozenset()


def test_combination_with_the_lowest_cost_is_chosen() -> None:
    policy = MatrixPolicy({"one": "x & cheap", "two": "x & dear"}, evict_costs={"dear": 50})

    assert frozenset({"cheap"}) == policy.eviction_for("x", ["cheap", "dear"])


def test_first_of_the_combinations_with_the_lowest_cost_is_chosen() -> None:
    policy = MatrixPolicy({"one": "x & a", "two": "x & b"})

    assert frozenset({"b"}) == policy.eviction_for("x", ["a", "b"])


def test_costs_may_be_given_by_variables() -> None:
    policy = MatrixPolicy({"one": "x & a", "two": "x & v"}, variables={"v": "voxtral"}, evict_costs={"v": 50})

    assert frozenset({"a"}) == policy.eviction_for("x", ["a", "voxtral"])


def test_model_in_no_combination_runs_alone() -> None:
    policy = MatrixPolicy({"one": "a & b"})

    assert frozenset({"a", "b"}) == policy.eviction_for("unlisted", ["a", "b"])


def test_model_in_no_combination_is_evicted_for_a_combination() -> None:
    policy = MatrixPolicy({"one": "a & b"})

    assert frozenset({"unlisted"}) == policy.eviction_for("a", ["unlisted"])


MODELS = ["a", "b", "c", "d", "e"]


@given(
    sets=st.lists(st.sets(st.sampled_from(MODELS), min_size=1), min_size=1, max_size=5),
    running=st.lists(st.sampled_from(MODELS[1:]), unique=True),
    costs=st.dictionaries(st.sampled_from(MODELS), st.integers(0, 9)),
)
def test_eviction_is_allowed_by_a_set_and_has_the_lowest_cost(
    sets: list[set[str]], running: list[str], costs: dict[str, int]
) -> None:
    policy = MatrixPolicy(
        {str(number): " & ".join(sorted(models)) for number, models in enumerate(sets)}, evict_costs=costs
    )

    evicted = policy.eviction_for("a", running)

    evictions = [set(running) - models for models in sets if "a" in models] or [set(running)]
    assert evicted in evictions
    assert min(sum(costs.get(model, 1) for model in eviction) for eviction in evictions) == sum(
        costs.get(model, 1) for model in evicted
    )


def test_swap_reason_has_the_combination_its_set_and_its_cost():
    policy = MatrixPolicy({"small": "a & b", "large": "x & (a | b)"}, evict_costs={"a": 5, "b": 2})
    assert policy.eviction_for("x", ["a", "b"]) == {"b"}
    expected = SwapReason(chosen=("a", "x"), cost=2, rule="set large: x & (a | b)")
    assert policy.reason_for("x", ["a", "b"]) == expected


def test_swap_reason_of_a_model_in_no_combination_has_only_that_model():
    policy = MatrixPolicy({"pair": "a & b"}, evict_costs={"a": 5})
    assert policy.reason_for("unlisted", ["a", "b"]) == SwapReason(chosen=("unlisted",), cost=6)
