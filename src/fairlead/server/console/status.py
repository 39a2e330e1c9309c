"""Shows a server's state on a terminal: `fairlead ps`, `logs` and `stop`, and the tables of `top`.

Fields that a server does not send take their defaults, so snapshots of other versions can be shown, too.
"""

import signal
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Self
from urllib.parse import quote

import msgspec

from fairlead.base.errors import printable
from fairlead.generation.metrics.totals import QueueTotals, TokenTotals
from fairlead.server.console.board import board_tables, read_board
from fairlead.server.console.client import Client, ServerError

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

MIB = 1024 * 1024
STATE_STYLES = {
    "ready": "green",
    "up": "green",
    "loading": "yellow",
    "draining": "yellow",
    "stopping": "yellow",
    "failed": "red",
    "down": "red",
}


class LoadView(msgspec.Struct, frozen=True):
    """The load of a model; `progress` None: not known."""

    progress: float | None = 0.0
    stage: str = ""


class EngineView(msgspec.Struct, frozen=True):
    """The cache usage of an engine, 0…1."""

    cache_usage: float | None = None


class RemoteView(msgspec.Struct, frozen=True):
    """The address of a remote node, and the load that it reports."""

    url: str = ""
    load: float | None = None


class ModelRow(msgspec.Struct, frozen=True):
    """A model that has a process here, or is served by a remote node.

    model: Its name.
    state: Its state, as the server names it.
    kind: What runs it.
    seats: Jobs that it can run at the same time.
    busy: Jobs that it runs now.
    memory_bytes: The memory that it takes; 0: unknown.
    problem: Why it cannot be used; None: it can.
    load: The progress of its load.
    engine: The state of our own engine; None: another server runs it.
    """

    model: str
    state: str = ""
    kind: str = ""
    seats: int = 0
    busy: int = 0
    memory_bytes: int = 0
    problem: str | None = None
    load: LoadView = LoadView()
    engine: EngineView | None = None


class NodeRow(msgspec.Struct, frozen=True):
    """A node, local or remote.

    id: Its name.
    kind: What it is.
    state: Its state, as the server names it.
    seats: Jobs that it can run at the same time.
    busy: Jobs that it runs now.
    problem: Why it cannot be used; None: it can.
    remote: What is known of a remote server; None: it is local.
    """

    id: str
    kind: str = ""
    state: str = ""
    seats: int = 0
    busy: int = 0
    problem: str | None = None
    remote: RemoteView | None = None


class ServerView(msgspec.Struct, frozen=True):
    """The displayed part of a server's snapshot.

    at_s: Its time, in seconds since 1970.
    queue: The totals of the queue.
    tokens: The totals of tokens.
    rejected: The number of refused jobs, by the code of their errors.
    cache_usage: The used part of all KV caches, 0…1; None: there is none.
    models: All models.
    nodes: All nodes.
    """

    at_s: float = 0.0
    queue: QueueTotals = QueueTotals()
    tokens: TokenTotals = TokenTotals()
    rejected: dict[str, int] = {}
    cache_usage: float | None = None
    models: list[ModelRow] = []
    nodes: list[NodeRow] = []


def read_snapshot(data: str) -> ServerView:
    """Parse a snapshot. Raises `ServerError`."""
    try:
        return msgspec.json.decode(data, type=ServerView)
    except msgspec.MsgspecError:
        raise ServerError("the server sent something that is not a snapshot") from None


def ps(client: Client, *, as_json: bool) -> int:
    """Print the first of the snapshots that `top` shows, and tenants and requests. Return the exit code."""
    with client.events("/events") as events:
        data = next((data for name, data in events if name == "snapshot"), None)
    if data is None:
        raise ServerError(f"{client.url}/events did not answer as a Fairlead server does")
    view, board = read_snapshot(data), read_board(client)
    if as_json:
        document = msgspec.json.decode(data) | msgspec.to_builtins(board)
        print(msgspec.json.format(msgspec.json.encode(document), indent=2).decode())
        return 0
    from rich.console import Console

    console = Console(highlight=False)
    queue = view.queue
    console.print(
        f"{queue.running} running on {queue.seats} seats, {queue.waiting} waiting of {queue.capacity}, "
        f"{view.tokens.generated_per_s:.0f} tokens/s"
    )
    console.print(totals(view))
    for part in (*tables(view), *board_tables(board)):
        console.print(part)
    return 0


def totals(view: ServerView) -> str:
    """Return the line of waits and totals."""
    cache = "-" if view.cache_usage is None else f"{view.cache_usage:.0%}"
    queue = view.queue
    return (
        f"oldest wait {queue.oldest_wait_s:.1f} s   mean service {queue.mean_service_s:.1f} s   "
        f"rejected {sum(view.rejected.values())}   cache {cache}"
    )


def tables(view: ServerView) -> "list[RenderableType]":
    """Return the tables of the models and of the remote nodes, and a line for each problem."""
    remote = [node for node in view.nodes if node.remote is not None]
    return [
        models_table(view.models) if view.models else "There are no models.",
        *([nodes_table(remote)] if remote else []),
        *problems(view.models, remote),
    ]


def logs(client: Client, model: str, *, follow: bool) -> int:
    """Print the last output of a model's processes; `follow`: also new output. Return the exit code."""
    path = f"/models/{quote(model, safe='')}/logs"
    empty = True
    with _Interrupt(client) as interrupt:
        try:
            with client.lines(f"{path}?follow=true" if follow else path, endless=follow) as lines:
                for line in lines:
                    empty = False
                    print(printable(line, blank=True), flush=follow)
        except (KeyboardInterrupt, ServerError):
            if not interrupt.is_set:
                raise
    if interrupt.is_set:
        return 0
    if follow:
        raise ServerError(
            f"{client.url} has ended the log of {model}: it is stopping, or the model was removed"
        )
    if empty:
        print(f"fairlead: the processes of {model} have printed nothing.", file=sys.stderr)
    return 0


def stop(client: Client, model: str, *, force: bool) -> int:
    """Unload a model after its running jobs, or with `force` at once. Return the exit code."""
    client.post("/models/unload", {"model": model, "force": force})
    print(f"{model} is unloaded.")
    return 0


def models_table(models: Iterable[ModelRow]) -> "Table":
    """Return a table of models, one row each."""
    table = _table("MODEL", "STATE", "KIND", "BUSY", "MEMORY", "CACHE")
    for row in models:
        is_known = row.state == "loading" and row.load.progress is not None
        state = f"{row.state} {row.load.progress:.0%}" if is_known else row.state
        cache_usage = None if row.engine is None else row.engine.cache_usage
        table.add_row(
            row.model,
            _styled(state, row.state) + _aside(row.load.stage if row.state == "loading" else ""),
            row.kind,
            f"{row.busy}/{row.seats}",
            f"{row.memory_bytes / MIB:,.0f} MiB" if row.memory_bytes else "-",
            "-" if cache_usage is None else f"{cache_usage:.0%}",
        )
    return table


def nodes_table(nodes: Iterable[NodeRow]) -> "Table":
    """Return a table of remote nodes, one row each."""
    table = _table("NODE", "STATE", "KIND", "BUSY", "LOAD", "ADDRESS")
    for row in nodes:
        remote = row.remote or RemoteView()
        table.add_row(
            row.id,
            _styled(row.state, row.state),
            row.kind,
            f"{row.busy}/{row.seats}",
            "-" if remote.load is None else f"{remote.load:.2f}",
            remote.url,
        )
    return table


def problems(models: Iterable[ModelRow], nodes: Iterable[NodeRow]) -> "list[Text]":
    """Return a line for each model and node with a problem: its text is too long for a table."""
    from rich.text import Text

    named = [*((row.model, row.problem) for row in models), *((row.id, row.problem) for row in nodes)]
    return [
        Text.assemble((f" {printable(name, blank=True)}: ", "red"), printable(problem, blank=True))
        for name, problem in named
        if problem
    ]


class _Interrupt:
    """A block in which Ctrl-C sets `is_set` and ends what the client reads.

    It also raises KeyboardInterrupt, which is not enough: Python ignores that in a destructor or callback.
    """

    def __init__(self, client: Client) -> None:
        self.is_set = False
        self._client = client

    def __enter__(self) -> Self:
        self._before = signal.getsignal(signal.SIGINT)
        if self._before is signal.default_int_handler:  # otherwise the signal is ignored
            signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *_error: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _handle(self, *_signal: object) -> None:
        self.is_set = True
        self._client.interrupt()
        raise KeyboardInterrupt


def _table(*columns: str) -> "Table":
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, justify="right" if column in {"BUSY", "MEMORY", "CACHE", "LOAD"} else "left")
    return table


def _styled(text: str, state: str) -> str:
    style = STATE_STYLES.get(state)
    return f"[{style}]{_plain(text)}[/]" if style else _plain(text)


def _aside(text: str | None) -> str:
    return f" [dim]{_plain(text)}[/]" if text else ""


def _plain(text: str) -> str:
    """Return a server's text without markup and control characters: it must not control the terminal."""
    from rich.markup import escape

    return escape(printable(text, blank=True))
