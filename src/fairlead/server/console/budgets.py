"""Budgets on a terminal: `fairlead budgets`. All changes are made by the server."""

import sys
from typing import Any

import msgspec

from fairlead.base.errors import printable
from fairlead.server.console.client import Client, ServerError

PATH = "/v1/organization/budgets"
_LIMITS = {
    "tokens_per_day": "TOKENS/DAY",
    "tokens_per_month": "TOKENS/MONTH",
    "cost_per_day": "COST/DAY",
    "cost_per_month": "COST/MONTH",
}
_OWNERS = {"user": "user", "team": "team", "api_key_id": "key"}


def set_budget(client: Client, *, settings: dict[str, Any], as_json: bool) -> int:
    """Set a budget."""
    reply = client.post(PATH, settings)
    if as_json:
        sys.stdout.write(reply.decode() + "\n")
    return 0


def list_budgets(client: Client, *, as_json: bool) -> int:
    """Print each budget in a line: its key, user or team, where it is set, its limits and what is used."""
    found = _budgets(client)
    if as_json:
        sys.stdout.write(msgspec.json.encode(found).decode() + "\n")
        return 0
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for title in ("KIND", "NAME", "SET IN"):
        table.add_column(title, overflow="fold")
    for title in _LIMITS.values():
        table.add_column(title, justify="right")
    for budget in found:
        kind, name = next((kind, budget[kind]) for kind in _OWNERS if budget[kind] is not None)
        uses = {use["kind"]: f"{use['used']:,.10g}/{use['limit']:,.10g}" for use in budget["uses"]}
        limits = (uses.get(limit, "") for limit in _LIMITS)
        table.add_row(_OWNERS[kind], printable(name), budget["source"], *limits)
    Console().print(table)
    return 0


def remove(client: Client, *, owner: dict[str, str]) -> int:
    """Remove a budget from the store."""
    ((kind, name),) = owner.items()
    for budget in _budgets(client):
        if budget[kind] == name and budget["source"] == "store":
            client.delete(f"{PATH}/{budget['id']}")
            return 0
    raise ServerError(f"the {kind} {printable(name)} has no budget in the server's store")


def _budgets(client: Client) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = msgspec.json.decode(client.get(PATH))["data"]
    return found
