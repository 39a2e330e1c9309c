"""Scenarios for hashes of keys, teams, budgets and prices. No scenario has a store: budgets begin at 0."""

from hashlib import sha256
from typing import Any

from settings.cases import setting
from settings.command_settings import command
from settings.served import Served

PROMPT = [5] * 64
MILLIONTH = 0.000001


def keyed(**settings: object) -> dict[str, Any]:
    return {"apiKeys": [{"key": "k1", "user": "ana", "team": "research"} | settings]}


def budgeted(owner: str, name: str, amount: float, **more: object) -> dict[str, Any]:
    """Return a configuration with one budget, of a key, a user or a team."""
    budget = {name: amount}
    if owner == "key":
        return keyed(budget=budget) | more
    return (
        keyed()
        | {"budgets": {"users": {"ana": budget}} if owner == "user" else {"teams": {"research": budget}}}
        | more
    )


def priced(**price: float) -> dict[str, Any]:
    return {"prices": {"m": price}}


async def statuses(server: Served, number: int, **options: Any) -> list[int]:
    """Send jobs with prompts of 64 tokens and answers of 20, one after the other; return their statuses."""
    jobs = [await server.complete(PROMPT, tokens=20, key="k1", **options).done() for _ in range(number)]
    assert all("budget is spent" in str(job.document) for job in jobs if job.status == 429), jobs
    return [job.status for job in jobs]


@setting(
    "apiKeys[].hash",
    {"apiKeys": [{"hash": f"sha256:{sha256(b'k1').hexdigest()}"}]},
    alternative=f"sha256:{'0' * 64}",
)
async def key_is_known_by_its_hash(server: Served) -> None:
    assert (await server.complete(key="k1").done()).status == 200
    assert (await server.complete(key="k2").done()).status == 401


@setting("apiKeys[].team", budgeted("team", "tokensPerDay", 80))
@setting("apiKeys[].budget.tokensPerDay", budgeted("key", "tokensPerDay", 80))
@setting("apiKeys[].budget.tokensPerMonth", budgeted("key", "tokensPerMonth", 80))
@setting("apiKeys[].budget.costPerDay", budgeted("key", "costPerDay", 70 * MILLIONTH, **priced(input=1)))
@setting("apiKeys[].budget.costPerMonth", budgeted("key", "costPerMonth", 70 * MILLIONTH, **priced(input=1)))
@setting("budgets.users.NAME.tokensPerDay", budgeted("user", "tokensPerDay", 80))
@setting("budgets.users.NAME.tokensPerMonth", budgeted("user", "tokensPerMonth", 80))
@setting("budgets.users.NAME.costPerDay", budgeted("user", "costPerDay", 70 * MILLIONTH, **priced(input=1)))
@setting(
    "budgets.users.NAME.costPerMonth", budgeted("user", "costPerMonth", 70 * MILLIONTH, **priced(input=1))
)
@setting("budgets.teams.NAME.tokensPerDay", budgeted("team", "tokensPerDay", 80))
@setting("budgets.teams.NAME.tokensPerMonth", budgeted("team", "tokensPerMonth", 80))
@setting("budgets.teams.NAME.costPerDay", budgeted("team", "costPerDay", 70 * MILLIONTH, **priced(input=1)))
@setting(
    "budgets.teams.NAME.costPerMonth", budgeted("team", "costPerMonth", 70 * MILLIONTH, **priced(input=1))
)
@setting("prices.NAME.input", budgeted("key", "costPerDay", 70 * MILLIONTH, **priced(input=1)))
@setting("prices.NAME.output", budgeted("key", "costPerDay", 15 * MILLIONTH, **priced(output=1)))
@setting(
    "models.ENGINE.price.input",
    budgeted("key", "costPerDay", 70 * MILLIONTH, models={"m": {"price": {"input": 1}}}),
)
@setting(
    "models.ENGINE.price.output",
    budgeted("key", "costPerDay", 15 * MILLIONTH, models={"m": {"price": {"output": 1}}}),
)
async def second_job_exceeds_the_budget(server: Served) -> None:
    assert await statuses(server, 2) == [200, 429]


@setting("prices.NAME.cached", budgeted("key", "costPerDay", 150 * MILLIONTH, **priced(input=1, cached=0)))
@setting(
    "models.ENGINE.price.cached",
    budgeted("key", "costPerDay", 150 * MILLIONTH, models={"m": {"price": {"input": 1, "cached": 0}}}),
)
async def cached_prompt_costs_less(server: Served) -> None:
    assert await statuses(server, 3) == [200, 200, 200]


@setting(
    "models.COMMAND.price.input",
    command(price={"input": 1}, extra=budgeted("key", "costPerDay", 70 * MILLIONTH)),
)
@setting(
    "models.COMMAND.price.output",
    command(price={"output": 1000}, extra=budgeted("key", "costPerDay", 70 * MILLIONTH)),
)
async def second_job_of_a_command_exceeds_the_budget(server: Served) -> None:
    assert (await statuses(server, 2, model="far"))[0] == 200
    assert (await statuses(server, 40, model="far"))[-1] == 429
