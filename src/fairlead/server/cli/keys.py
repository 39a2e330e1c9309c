"""The commands for keys and usage: `fairlead keys …`, `fairlead usage`. Each asks a server."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import App, Parameter, validators

from fairlead.base.config import ConfigError, Role, read_amount
from fairlead.base.config.spelling import read_time
from fairlead.server.cli.clients import ServerOptions
from fairlead.server.console.options import Flag

keys = App("keys", help="Make, list, rotate and revoke the API keys of a server. They need an admin's key.")

Positive = Annotated[int | None, Parameter(validator=validators.Number(gte=1))]
Amount = Annotated[float | None, Parameter(validator=validators.Number(gt=0))]
LEAST_S = 1.0
SERVER = ServerOptions()


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class KeyOptions:
    """The settings of a new key; those that are not given are as in a configuration file.

    Parameters
    ----------
    team
        Its team, for usage and budgets.
    user
        Its user, which is the tenant. Default: the key is a tenant of its own.
    role
        What it may control: user, operator or admin.
    priority
        The highest priority class that its requests may have.
    models
        A model that it may use. May be repeated. Default: all.
    trusted
        Its requests may name other users.
    tokens_per_day
        Budget of tokens in a day, such as 500k or 2M.
    tokens_per_month
        The same in a month.
    cost_per_day
        Budget of money in a day, for models with a price.
    cost_per_month
        The same in a month.
    requests_per_minute
        Maximum number of requests in any minute.
    tokens_per_minute
        Maximum number of tokens in any minute.
    concurrent
        Maximum number of jobs at a time.
    expires
        How long it is valid, such as 12h or 90d. Default: until it is revoked.
    """

    team: str | None = None
    user: str | None = None
    role: Role = "user"
    priority: str | None = None
    models: Annotated[tuple[str, ...], Parameter(negative="")] = ()
    trusted: Flag = False
    tokens_per_day: str | None = None
    tokens_per_month: str | None = None
    cost_per_day: Amount = None
    cost_per_month: Amount = None
    requests_per_minute: Positive = None
    tokens_per_minute: Positive = None
    concurrent: Positive = None
    expires: str | None = None

    def settings(self, name: str) -> dict[str, Any]:
        """Return the body of the request that makes the key. Raises `ConfigError`."""
        values = {
            "name": name,
            "project_id": self.team,
            "expires_in_seconds": None if self.expires is None else int(seconds("--expires", self.expires)),
            "tokens_per_day": amount("--tokens-per-day", self.tokens_per_day),
            "tokens_per_month": amount("--tokens-per-month", self.tokens_per_month),
        }
        same = (
            *("user", "role", "priority", "trusted", "cost_per_day", "cost_per_month"),
            *("requests_per_minute", "tokens_per_minute", "concurrent"),
        )
        values |= {name: getattr(self, name) for name in same} | {"models": self.models or None}
        return {name: value for name, value in values.items() if value is not None}


@keys.command
def add(
    name: str,
    /,
    *,
    key: KeyOptions = KeyOptions(),
    json: Flag = False,
    server: ServerOptions = SERVER,
) -> int:
    """Make a key, and print its value. The value is shown once: the server keeps a hash of it.

    Parameters
    ----------
    name
        A name for people, such as that of its owner.
    json
        Print JSON.
    """
    from fairlead.server.console.keys import add as make

    return server.run(partial(make, settings=key.settings(name), as_json=json))


@keys.command(name="list")
def list_keys(*, team: str | None = None, json: Flag = False, server: ServerOptions = SERVER) -> int:
    """List the keys in the server's store, without those of its configuration.

    Parameters
    ----------
    team
        Only keys of this team.
    json
        Print JSON.
    """
    from fairlead.server.console.keys import list_keys as show_all

    return server.run(partial(show_all, team=team, as_json=json))


@keys.command
def show(key_id: str, /, *, json: Flag = False, server: ServerOptions = SERVER) -> int:
    """Show the settings of a key.

    Parameters
    ----------
    key_id
        The key's id, from `list`.
    json
        Print JSON.
    """
    from fairlead.server.console.keys import show as show_one

    return server.run(partial(show_one, key_id=key_id, as_json=json))


@keys.command
def rotate(
    key_id: str,
    /,
    *,
    overlap: str = "1d",
    json: Flag = False,
    server: ServerOptions = SERVER,
) -> int:
    """Give a key another value, and print it. The value before it stays valid for a time.

    Parameters
    ----------
    key_id
        The key's id, from `list`.
    overlap
        How long both values are valid, such as 1h or 1d; 0: the old one ends at once.
    json
        Print JSON.
    """
    from fairlead.server.console.keys import rotate as change

    overlap_s = seconds("--overlap", overlap, least_s=0.0)
    return server.run(partial(change, key_id=key_id, overlap_s=overlap_s, as_json=json))


@keys.command
def revoke(key_id: str, /, *, server: ServerOptions = SERVER) -> int:
    """Revoke a key, at once. Its requests that run are not ended.

    There is no --json: the exit code is the result.

    Parameters
    ----------
    key_id
        The key's id, from `list`.
    """
    from fairlead.server.console.keys import revoke as end

    return server.run(partial(end, key_id=key_id))


@keys.command(name="import")
def import_keys(file: Path, /, *, server: ServerOptions = SERVER) -> int:
    """Add the keys of an export of LiteLLM's proxy. Clients go on with the keys that they have.

    There is no --json: the output is a line for each key.

    Parameters
    ----------
    file
        The answer of LiteLLM's /key/list?return_full_object=true, as JSON.
    """
    from fairlead.server.console.keys import import_keys as add_all

    return server.run(partial(add_all, file=file))


def usage(
    *,
    by: Literal["team", "user", "key", "model", "route", "outcome", "batch"] = "team",
    days: Annotated[int, Parameter(validator=validators.Number(gte=1, lte=36_500))] = 30,
    json: Flag = False,
    server: ServerOptions = SERVER,
) -> int:
    """Show what was used: requests, tokens and seconds of seats.

    With an operator's key it is all usage, with another key its own.

    Parameters
    ----------
    by
        What has its own line; batch: all batches, and everything else.
    days
        How many days, with today.
    json
        Print JSON.
    """
    from fairlead.server.console.usage import usage as show_usage

    return server.run(partial(show_usage, by=by, days=days, as_json=json))


def seconds(option: str, text: str, *, least_s: float = LEAST_S) -> float:
    """Return the seconds that an option names. Raises `ConfigError`."""
    try:
        found = read_time(text)
    except ValueError as error:
        raise ConfigError(f"{option}: {error}") from None
    if not isinstance(found, float) or found < least_s:
        raise ConfigError(f"{option}: must be at least {least_s:g} s")
    return found


def amount(option: str, text: str | None) -> object:
    """Return the number of tokens that an option names; None: it is not given. Raises `ConfigError`."""
    try:
        return read_amount(text)
    except ValueError as error:
        raise ConfigError(f"{option}: {error}") from None
