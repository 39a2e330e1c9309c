"""`fairlead top`: shows a server's state continuously, until q or Ctrl-C.

On a terminal the view is updated in place; elsewhere each snapshot is one line. `GET /events` sends a
snapshot every second, and up to four times as often while something changes.
"""

import json
import math
import os
import select
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from fairlead.server.console.board import BoardView, board_tables, read_board
from fairlead.server.console.client import Client, ServerError
from fairlead.server.console.status import ServerView, read_snapshot, tables, totals

if TYPE_CHECKING:
    from rich.console import RenderableType

BARS = " ▁▂▃▄▅▆▇█"
BAR_S = 1.0
MAX_BARS = 600
LABEL = 23  # characters before the bars
BOARD_S = 1.0  # how often tenants and requests are read


def top(client: Client, *, as_json: bool) -> int:
    """Show snapshots until the user quits; return the exit code. Raises `ServerError` at the stream's end."""
    with client.events("/events") as events:
        snapshots = (data for name, data in events if name == "snapshot")
        try:
            if as_json:
                for data in snapshots:
                    print(json.dumps(json.loads(data)), flush=True)
            elif sys.stdout.isatty():
                if _live(client, map(read_snapshot, snapshots)):
                    return 0
            else:
                for view in map(read_snapshot, snapshots):
                    print(_line(view), flush=True)
        except KeyboardInterrupt:
            return 0
    raise ServerError(f"{client.url} has ended the stream: it is stopping")


def _live(client: Client, views: Iterator[ServerView]) -> bool:
    """Show the snapshots until they end, with tenants and requests; return whether the user quit."""
    from rich.console import Console
    from rich.live import Live

    past: deque[ServerView] = deque(maxlen=MAX_BARS)
    console = Console()
    board, read_at = BoardView(), -BOARD_S
    with _keys() as quit_pressed, Live(console=console, screen=True, auto_refresh=False) as live:
        for view in views:
            remember(past, view)
            if time.monotonic() - read_at >= BOARD_S:
                board, read_at = read_board(client), time.monotonic()
            live.update(_page(client.url, past, board, bars=console.width - LABEL), refresh=True)
            if quit_pressed():
                return True
    return False


def remember(past: "deque[ServerView]", view: ServerView) -> None:
    """Append a snapshot to `past`, in place of the last one if both are from the same second."""
    if past and view.at_s // BAR_S == past[-1].at_s // BAR_S:
        past.pop()
    past.append(view)


def _page(url: str, past: "deque[ServerView]", board: BoardView, *, bars: int) -> "RenderableType":
    from rich.console import Group
    from rich.text import Text

    now = past[-1]
    shown = list(past)[-max(1, bars) :]
    queue = now.queue
    return Group(
        Text.assemble(("Fairlead ", "bold"), url, ("   q quits", "dim")),
        Text(),
        _trend("waiting", f"{queue.waiting} of {queue.capacity}", [each.queue.waiting for each in shown]),
        _trend("running", f"{queue.running} of {queue.seats}", [each.queue.running for each in shown]),
        _trend(
            "tokens/s", f"{now.tokens.generated_per_s:.0f}", [each.tokens.generated_per_s for each in shown]
        ),
        Text(totals(now)),
        Text(),
        *tables(now),
        *board_tables(board),
    )


def _trend(name: str, value: str, past: list[float]) -> "RenderableType":
    from rich.text import Text

    return Text.assemble((f"{name:9}", "bold"), f"{value:>12}  ", (sparkline(past), "cyan"))


def sparkline(values: list[float]) -> str:
    """Return the values as bars of eight heights, scaled to the largest; 0 is a blank."""
    most = max(values, default=0.0)
    if most <= 0:
        return " " * len(values)
    return "".join(BARS[math.ceil(8 * max(0.0, value) / most)] for value in values)


def _line(view: ServerView) -> str:
    queue = view.queue
    return (
        f"waiting {queue.waiting}  running {queue.running}/{queue.seats}  "
        f"tokens/s {view.tokens.generated_per_s:.0f}  oldest wait {queue.oldest_wait_s:.1f} s  "
        f"rejected {sum(view.rejected.values())}"
    )


@contextmanager
def _keys() -> Iterator["_QuitKey"]:
    """Make the terminal deliver single keys during the block, and restore it afterwards."""
    if not sys.stdin.isatty():
        yield _QuitKey(reads=False)
        return
    import termios
    import tty

    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        yield _QuitKey(reads=True)
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


class _QuitKey:
    """A callable: whether q was typed, or standard input ended, since the last call."""

    def __init__(self, *, reads: bool) -> None:
        self._reads = reads

    def __call__(self) -> bool:
        while self._reads and select.select([sys.stdin], [], [], 0)[0]:
            typed = os.read(sys.stdin.fileno(), 1024)  # unbuffered: `select` does not see Python's buffer
            if not typed or b"q" in typed.lower():
                return True
        return False
