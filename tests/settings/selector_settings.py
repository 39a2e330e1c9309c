"""Scenarios for selectors, which are names for several models."""

from typing import Any

import trio

from settings.cases import setting
from settings.command_settings import card
from settings.served import Served


def selector(**settings: object) -> dict[str, Any]:
    fields = {"strategy": "warm", "targets": ["k", "m"]} | settings
    return {"models": {"k": {"path": "DEMO"}}, "selectors": {"any": fields}}


async def complete_one(server: Served, **options: object) -> None:
    assert (await server.complete(model="any", **options).done()).status == 200


@setting("selectors.NAME.strategy", selector(), alternative="pin")
async def loaded_target_gets_the_job(server: Served) -> None:
    await complete_one(server)
    assert await server.states() == {"k": "down", "m": "up"}


@setting("selectors.NAME.targets", selector(), alternative=["k"])
async def one_of_the_targets_gets_the_job(server: Served) -> None:
    await complete_one(server)
    assert await server.states() == {"k": "down", "m": "up"}


@setting(
    "selectors.NAME.settings.spillover",
    selector(strategy="spillover", settings={"spillover": 4}, targets=["m", "k"]),
)
async def target_has_a_limit_of_jobs_before_the_next(server: Served) -> None:
    jobs = [server.complete(model="any", tokens=20) for _ in range(4)]
    await trio.sleep(1)
    assert (await server.states())["k"] == "down"
    jobs.append(server.complete(model="any"))
    assert [(await job.done()).status for job in jobs] == [200] * 5
    assert (await server.states())["k"] == "up"


@setting("selectors.NAME.name", selector(name="Any of them"))
async def card_has_the_name(server: Served) -> None:
    assert (await card(server, "any")).get("name") == "Any of them"


@setting("selectors.NAME.description", selector(description="whichever"))
async def card_has_the_description(server: Served) -> None:
    assert (await card(server, "any")).get("description") == "whichever"


@setting("selectors.NAME.unlisted", selector(unlisted=True))
async def unlisted_model_is_left_out_of_the_list(server: Served) -> None:
    assert await card(server, "any") == {}
    await complete_one(server)


@setting("selectors.NAME.metadata", selector(metadata={"size": 7}))
async def card_has_the_metadata(server: Served) -> None:
    assert (await card(server, "any"))["meta"]["llamaswap"].get("size") == 7
