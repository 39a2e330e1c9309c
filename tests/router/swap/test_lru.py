"""The least recently used models are evicted."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlead.router.swap.gpus import Gpus
from fairlead.router.swap.lru import LruPolicy
from fairlead.router.swap.policy import SwapReason


def test_least_recently_used_model_is_evicted_above_the_number_of_models() -> None:
    policy = LruPolicy(max_loaded=2)

    assert policy.eviction_for("c", ["a"]) == frozenset()
    assert frozenset({"a"}) == policy.eviction_for("c", ["a", "b"])


def test_models_are_evicted_until_the_next_one_fits_the_memory() -> None:
    policy = LruPolicy(capacity_mb=10, memory_mb={"a": 3, "b": 3, "c": 6, "d": 5})

    assert frozenset({"a"}) == policy.eviction_for("c", ["a", "b"])
    assert frozenset({"a", "c"}) == policy.eviction_for("d", ["a", "c"])


def test_model_of_unknown_size_is_loaded_alone() -> None:
    policy = LruPolicy(capacity_mb=10, memory_mb={"a": 1})

    assert frozenset({"a"}) == policy.eviction_for("unknown", ["a"])


def test_next_eviction_uses_a_new_measurement() -> None:
    measured = {"a": 4.0}
    policy = LruPolicy(capacity_mb=10, memory_mb=measured)
    assert frozenset({"a"}) == policy.eviction_for("b", ["a"])

    measured["b"] = 5.0

    assert policy.eviction_for("b", ["a"]) == frozenset()


def policy_with_gpus(gpus_of: dict[str, str], **total_mb: float) -> Gpus:
    """Return GPUs: `gpus_of` has the names of each model's, with spaces between them."""
    gpus = Gpus()
    gpus.gpus_of.update({model: tuple(names.split()) for model, names in gpus_of.items()})
    gpus.total_mb.update({name.replace("_", ":"): total for name, total in total_mb.items()})
    return gpus


def test_models_on_one_gpu_are_evicted_until_the_next_one_fits_there() -> None:
    gpus = policy_with_gpus({"a": "cuda:0", "b": "cuda:0", "c": "cuda:0", "other": "cuda:1"}, cuda_0=10)
    policy = LruPolicy(memory_mb={"a": 4, "b": 4, "c": 6, "other": 9, "cpu": 9}, gpus=gpus)

    assert policy.eviction_for("c", ["other", "cpu", "a", "b"]) == {"a"}
    assert policy.eviction_for("b", ["other", "cpu", "a"]) == frozenset()


def test_model_of_unknown_size_shares_no_gpu() -> None:
    gpus = policy_with_gpus({"a": "cuda:0", "b": "cuda:1", "new": "cuda:0"}, cuda_0=10, cuda_1=10)
    policy = LruPolicy(memory_mb={"a": 1, "b": 1}, gpus=gpus)

    assert policy.eviction_for("new", ["b", "a"]) == {"a"}


def test_gpu_of_unknown_size_holds_one_model() -> None:
    policy = LruPolicy(memory_mb={"a": 1, "b": 1}, gpus=policy_with_gpus({"a": "cuda:0", "b": "cuda:0"}))

    assert policy.eviction_for("b", ["a"]) == {"a"}
    assert policy.eviction_for("b", []) == frozenset()


def test_model_on_two_gpus_needs_room_on_both() -> None:
    placed = {"a": "cuda:0", "b": "cuda:1", "c": "cuda:2", "wide": "cuda:0 cuda:1"}
    policy = LruPolicy(
        memory_mb={"a": 4, "b": 5, "c": 9, "wide": 6},
        gpus=policy_with_gpus(placed, cuda_0=10, cuda_1=10, cuda_2=10),
    )

    assert policy.eviction_for("wide", ["c", "a", "b"]) == {"b"}
    assert policy.eviction_for("wide", ["c", "a"]) == frozenset()
    assert policy.eviction_for("b", ["c", "a", "wide"]) == {"wide"}


def test_limits_of_all_models_apply_besides_those_of_a_gpu() -> None:
    gpus = policy_with_gpus({"a": "cuda:0", "b": "cuda:0"}, cuda_0=10)
    sizes = {"a": 4, "b": 4, "cpu": 4}

    assert LruPolicy(capacity_mb=8, memory_mb=sizes, gpus=gpus).eviction_for("b", ["cpu", "a"]) == {"cpu"}
    assert LruPolicy(max_loaded=2, memory_mb=sizes, gpus=gpus).eviction_for("b", ["cpu", "a"]) == {"cpu"}


def test_limit_of_zero_models_is_refused() -> None:
    with pytest.raises(ValueError, match="maxLoaded"):
        LruPolicy(max_loaded=0)


MODELS = [f"m{number}" for number in range(8)]


@given(
    running=st.lists(st.sampled_from(MODELS), unique=True),
    sizes=st.dictionaries(st.sampled_from([*MODELS, "target"]), st.integers(0, 12)),
    max_loaded=st.none() | st.integers(1, 4),
)
def test_fewest_least_recently_used_models_are_evicted(
    running: list[str], sizes: dict[str, int], max_loaded: int | None
) -> None:
    policy = LruPolicy(max_loaded=max_loaded, capacity_mb=10, memory_mb=sizes)

    def fits(kept: list[str]) -> bool:
        memory = sum(sizes.get(model, 10) for model in ["target", *kept])
        return memory <= 10 and (max_loaded is None or len(kept) < max_loaded)

    expected = next((count for count in range(len(running)) if fits(running[count:])), len(running))
    assert frozenset(running[:expected]) == policy.eviction_for("target", running)


def test_swap_reason_has_the_loaded_models_and_the_number_of_evictions():
    policy = LruPolicy(max_loaded=2)
    assert policy.reason_for("d", ["a", "b", "c"]) == SwapReason(chosen=("c", "d"), cost=2)
