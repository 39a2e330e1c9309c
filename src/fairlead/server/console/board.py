"""Tenants and requests on a terminal: the tables of `fairlead ps` and `top` that depend on the key.

The server decides what a key may see. A server that has no such routes, or does not answer them, shows none.
"""

from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlencode

import msgspec

from fairlead.base.errors import printable
from fairlead.server.console.client import Client, NoServerError, ServerError

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

PEOPLE_SHOWN = 15
REQUESTS_SHOWN = 15

Document = TypeVar("Document")


class ShareView(msgspec.Struct, frozen=True):
    """A share of the seats, and a fair one, 0…1."""

    part: float = 0.0
    fair: float = 0.0


class LimitView(msgspec.Struct, frozen=True):
    """A limit or budget, and what is used of it."""

    kind: str = ""
    limit: float = 0.0
    used: float = 0.0


class TenantView(msgspec.Struct, frozen=True):
    """A tenant.

    tenant: Its name.
    team: Its team; None: none.
    waiting: Its requests that wait.
    running: Its requests that run.
    oldest_wait_s: How long the oldest of these waits; None: none does.
    minute: Its share of the last minute.
    hour: Its share of the last hour.
    day: Its share of the last day.
    limits: Its limits and budgets.
    """

    tenant: str
    team: str | None = None
    waiting: int = 0
    running: int = 0
    oldest_wait_s: float | None = None
    minute: ShareView = ShareView()
    hour: ShareView = ShareView()
    day: ShareView = ShareView()
    limits: list[LimitView] = []


class RequestView(msgspec.Struct, frozen=True):
    """A request.

    id: Its id.
    state: Whether it waits, runs or has ended.
    tenant: The tenant.
    model: Its model.
    node: Where it runs or ran; None: nowhere.
    position: Its place in the queue; None: it has none.
    took_s: The time since its arrival, or to its end.
    first_token_s: The time to its first token; None: there is none.
    tokens: The tokens of its answer so far.
    tokens_per_s: Their rate; None: unknown.
    outcome: How it ended; None: it has not.
    problem: Why it failed; None: it has not.
    """

    id: str
    state: str
    tenant: str = ""
    model: str = ""
    node: str | None = None
    position: int | None = None
    took_s: float = 0.0
    first_token_s: float | None = None
    tokens: int = 0
    tokens_per_s: float | None = None
    outcome: str | None = None
    problem: str | None = None


class _Tenants(msgspec.Struct, frozen=True):
    data: list[TenantView] = []


class _Requests(msgspec.Struct, frozen=True):
    data: list[RequestView] = []


class BoardView(msgspec.Struct, frozen=True):
    """What a key may see of tenants and requests."""

    tenants: list[TenantView] = []
    requests: list[RequestView] = []


def read_board(client: Client) -> BoardView:
    """Return what the client's key may see. Raises `NoServerError`."""
    query = urlencode({"limit": REQUESTS_SHOWN})
    return BoardView(
        _read(client, "/tenants", _Tenants).data, _read(client, f"/v1/requests?{query}", _Requests).data
    )


def _read(client: Client, path: str, kind: type[Document]) -> Document:
    try:
        return msgspec.json.decode(client.get(path), type=kind)
    except NoServerError:
        raise
    except (ServerError, msgspec.MsgspecError):
        return kind()


def board_tables(board: BoardView) -> "list[RenderableType]":
    """Return a table of the tenants, and one of the requests: open ones, then the last that ended."""
    tables: list[RenderableType] = []
    if board.tenants:
        tables.append(_tenants_table(board.tenants[:PEOPLE_SHOWN]))
        if len(board.tenants) > PEOPLE_SHOWN:
            tables.append(f" and {len(board.tenants) - PEOPLE_SHOWN} more tenants")
    if board.requests:
        tables.append(_requests_table(board.requests[:REQUESTS_SHOWN]))
    return tables


def _tenants_table(tenants: list[TenantView]) -> "Table":
    table = _table(
        "TENANT", "TEAM", "#WAIT", "#RUN", "#OLDEST", "#MINUTE", "#HOUR", "#DAY", "#FAIR", "LIMITS"
    )
    for row in tenants:
        reached = [
            f"{use.kind} {use.used / use.limit:.0%}"
            for use in row.limits
            if use.limit and use.used / use.limit >= 0.5
        ]
        table.add_row(
            _plain(row.tenant),
            _plain(row.team or "-"),
            str(row.waiting),
            str(row.running),
            _seconds(row.oldest_wait_s),
            *(f"{share.part:.0%}" for share in (row.minute, row.hour, row.day)),
            f"{row.day.fair:.0%}",
            _plain(", ".join(reached) or "-"),
        )
    return table


def _requests_table(requests: list[RequestView]) -> "Table":
    table = _table("REQUEST", "TENANT", "MODEL", "STATE", "#TOOK", "#FIRST", "#TOKENS", "#TOKENS/S")
    for row in requests:
        state = row.outcome or row.state
        if row.position is not None:
            state = f"{row.state} {row.position}"
        elif row.problem:
            state = f"{state}: {row.problem}"
        table.add_row(
            _plain(row.id),
            _plain(row.tenant),
            _plain(row.model),
            _plain(state),
            _seconds(row.took_s),
            _seconds(row.first_token_s),
            str(row.tokens),
            "-" if row.tokens_per_s is None else f"{row.tokens_per_s:.0f}",
        )
    return table


def _table(*columns: str) -> "Table":
    """Return a table; the names of columns with numbers begin with #."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(
            column.removeprefix("#"),
            justify="right" if column.startswith("#") else "left",
            no_wrap=column.startswith("#"),
            overflow="ellipsis",
        )
    return table


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.1f} s"


def _plain(text: str) -> str:
    from rich.markup import escape

    return escape(printable(text, blank=True))
