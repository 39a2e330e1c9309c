"""The commands for budgets of users and teams: `fairlead budgets …`. Each asks a server."""

from dataclasses import dataclass
from functools import partial
from typing import Any

from cyclopts import App, Parameter

from fairlead.base.config import ConfigError
from fairlead.server.cli.clients import ServerOptions
from fairlead.server.cli.keys import Amount, amount
from fairlead.server.console.options import Flag

budgets = App(
    "budgets", help="List, set and remove the budgets of users and teams. They need an admin's key."
)

SERVER = ServerOptions()


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class OwnerOptions:
    """Whose budget it is: one of the two.

    Parameters
    ----------
    user
        A user: that of a key, or one that a trusted key names, as portal/ana.
    team
        A team.
    """

    user: str | None = None
    team: str | None = None

    def settings(self) -> dict[str, str]:
        """Return the members of a request that name the owner. Raises `ConfigError`."""
        given = {
            name: value for name, value in (("user", self.user), ("team", self.team)) if value is not None
        }
        if len(given) != 1:
            raise ConfigError("give either --user or --team")
        return given


@budgets.command(name="set")
def set_budget(
    *,
    owner: OwnerOptions = OwnerOptions(),
    tokens_per_day: str | None = None,
    tokens_per_month: str | None = None,
    cost_per_day: Amount = None,
    cost_per_month: Amount = None,
    json: Flag = False,
    server: ServerOptions = SERVER,
) -> int:
    """Set a budget, at once in all processes. It replaces that of the configuration, with all its limits.

    Parameters
    ----------
    tokens_per_day
        Tokens in a day, such as 500k or 2M.
    tokens_per_month
        The same in a month.
    cost_per_day
        Money in a day, for models with a price.
    cost_per_month
        The same in a month.
    json
        Print JSON.
    """
    from fairlead.server.console.budgets import set_budget as change

    limits: dict[str, Any] = {
        "tokens_per_day": amount("--tokens-per-day", tokens_per_day),
        "tokens_per_month": amount("--tokens-per-month", tokens_per_month),
        "cost_per_day": cost_per_day,
        "cost_per_month": cost_per_month,
    }
    given = {name: value for name, value in limits.items() if value is not None}
    if not given:
        raise ConfigError("give a limit, such as --tokens-per-day 2M")
    return server.run(partial(change, settings=owner.settings() | given, as_json=json))


@budgets.command(name="list")
def list_budgets(*, json: Flag = False, server: ServerOptions = SERVER) -> int:
    """List the budgets in force, those of the configuration too.

    Parameters
    ----------
    json
        Print JSON.
    """
    from fairlead.server.console.budgets import list_budgets as show_all

    return server.run(partial(show_all, as_json=json))


@budgets.command
def remove(*, owner: OwnerOptions = OwnerOptions(), server: ServerOptions = SERVER) -> int:
    """Remove a budget from the server's store. That of the configuration is in force then.

    There is no --json: the exit code is the result.
    """
    from fairlead.server.console.budgets import remove as end

    return server.run(partial(end, owner=owner.settings()))
