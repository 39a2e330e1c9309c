"""Scenarios for which models are evicted when another is loaded."""

from collections.abc import Callable
from typing import Any

import trio

from settings.cases import setting
from settings.served import Scenario, Served

Build = Callable[..., dict[str, Any]]


def models(*names: str, **settings: Any) -> dict[str, Any]:
    return {"models": {"m": None} | {name: {"path": "DEMO"} for name in names}} | settings


def routed(use: str, **settings: Any) -> dict[str, Any]:
    return models("a", "b", "c", routing={"router": {"use": use, "settings": settings}})


def groups(**of: dict[str, Any]) -> dict[str, Any]:
    return models("a", "b", "c", groups=of)


def routed_groups(**of: dict[str, Any]) -> dict[str, Any]:
    return routed("group", groups=of)


def matrix(**settings: Any) -> dict[str, Any]:
    return models("a", "b", "c", matrix=settings)


def lru(**settings: Any) -> dict[str, Any]:
    return models("a", "b", "c", lru=settings)


GROUPS: dict[str, Build] = {"groups.NAME": groups, "routing.router.settings.groups.NAME": routed_groups}
MATRIX: dict[str, Build] = {
    "matrix": matrix,
    "routing.router.settings.matrix": lambda **settings: routed("matrix", matrix=settings),
}
LRU: dict[str, Build] = {
    "lru": lru,
    "routing.router.settings.lru": lambda **settings: routed("lru", lru=settings),
}


def section_setting(
    key: str, sections: dict[str, Build], *, alternative: object = None, **settings: Any
) -> Callable[[Scenario], Scenario]:
    """Register one scenario for a key that several sections have."""

    def register(scenario: Scenario) -> Scenario:
        for section, build in sections.items():
            setting(f"{section}.{key}", build(**settings), alternative=alternative)(scenario)
        return scenario

    return register


async def loaded_after(server: Served, *names: str) -> set[str]:
    """Use these models one after the other; return those that are loaded afterwards."""
    for name in names:
        assert (await server.complete(model=name).done()).status == 200
        await trio.sleep(1)
    return {model for model, state in (await server.states()).items() if state == "up"}


@section_setting("members", GROUPS, pair={"members": ["a", "b"], "swap": False})
async def members_are_models_of_the_group(server: Served) -> None:
    assert await loaded_after(server, "a", "b") == {"a", "b"}


@section_setting("swap", GROUPS, pair={"swap": False, "members": ["a", "b"]})
async def members_without_swap_stay_loaded_together(server: Served) -> None:
    assert await loaded_after(server, "a", "b") == {"a", "b"}


@section_setting("exclusive", GROUPS, one={"members": ["a"], "exclusive": False}, two={"members": ["b"]})
async def group_that_is_not_exclusive_evicts_no_other_group(server: Served) -> None:
    assert await loaded_after(server, "b", "a") == {"a", "b"}


@section_setting("persistent", GROUPS, one={"members": ["a"], "persistent": True}, two={"members": ["b"]})
async def persistent_group_is_not_evicted(server: Served) -> None:
    assert await loaded_after(server, "a", "b") == {"a", "b"}


@section_setting("sets", MATRIX, sets={"s": "a & b"}, alternative={"s": "a | b"})
async def models_of_a_set_stay_loaded_together(server: Served) -> None:
    assert await loaded_after(server, "a", "b") == {"a", "b"}


@section_setting("vars", MATRIX, sets={"s": "x & b"}, vars={"x": "a"}, alternative={"x": "c"})
async def variable_in_a_set_stands_for_a_model(server: Served) -> None:
    assert await loaded_after(server, "a", "b") == {"a", "b"}


@section_setting(
    "evict_costs",
    MATRIX,
    sets={"s1": "a & b", "s2": "a & c", "s3": "b & c"},
    evict_costs={"b": 10},
    alternative={"a": 10},
)
async def model_with_the_lower_eviction_cost_is_evicted(server: Served) -> None:
    assert await loaded_after(server, "a", "b", "c") == {"b", "c"}


@section_setting("maxLoaded", LRU, maxLoaded=2)
async def number_of_loaded_models_is_limited(server: Served) -> None:
    assert await loaded_after(server, "a", "b", "c") == {"b", "c"}


@section_setting("memoryMb", LRU, memoryMb=120)
async def memory_of_loaded_models_is_limited(server: Served) -> None:
    # By measurement, they take 50 MiB each.
    assert await loaded_after(server, "a", "b", "c", "b", "c") == {"b", "c"}


@setting("routing.router.use", routed("group"))
async def eviction_policy_is_selected_by_name(server: Served) -> None:
    assert await loaded_after(server, "a", "b") == {"b"}


@setting(
    "routing.router.settings.policy", routed("only", policy={"stay": ["a"]}), alternative={"stay": ["c"]}
)
async def policy_of_another_package_receives_its_settings(server: Served) -> None:
    assert await loaded_after(server, "a", "b") == {"a", "b"}


@setting("scheduler", {"scheduler": "closed"})
async def scheduler_of_another_package_is_used(server: Served) -> None:
    answer = await server.complete().done()
    assert answer.status == 429, answer
    assert answer.document["error"]["message"].startswith("closed for the day"), answer


@setting(
    "routing.scheduler.settings.fifo.priority",
    models("a", "b", "c", lru={"maxLoaded": 1})
    | {"routing": {"scheduler": {"settings": {"fifo": {"priority": {"c": 5}}}}}},
)
async def model_with_a_higher_priority_is_loaded_first(server: Served) -> None:
    jobs = {"a": server.complete(model="a", tokens=30)}
    await trio.sleep(1)
    for name in ("b", "c"):
        jobs[name] = server.complete(model=name)
        await trio.sleep(0.1)
    assert [(await job.done()).status for job in jobs.values()] == [200] * 3
    assert jobs["c"].ended_s < jobs["b"].ended_s
