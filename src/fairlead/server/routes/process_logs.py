"""The output of a model's processes, as plain text: the kept lines, and on request those that follow.

Lines are made safe for a terminal and a file: colors and cursor movements are removed, and all other control
characters escaped. A reader that follows holds only the number of its next line.
"""

import re
from collections.abc import Callable, Sequence

import trio

from fairlead.base.errors import RateLimited, printable
from fairlead.nodes.processes.output import ProcessOutput
from fairlead.server.routes.request import NO_SNIFFING, Request, Response

MAX_FOLLOWERS = 64
POLL_INTERVAL_S = 0.25
RETRY_AFTER_S = 10
HEADERS = {"Content-Type": "text/plain; charset=utf-8", **NO_SNIFFING}

# ECMA-48: control sequences (colors, the cursor) and operating system commands (the window's title).
_ESCAPE_SEQUENCES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?)")


def plain_line(line: str) -> str:
    """Return a line that can be printed: escape sequences are removed, other control characters escaped."""
    return printable(_ESCAPE_SEQUENCES.sub("", line), kept="\t")


class ProcessLogs:
    """The lines of a `ProcessOutput` as responses; `draining`: whether the server is about to stop."""

    def __init__(self, draining: Callable[[], bool]) -> None:
        self._draining = draining
        self._followers = 0

    def kept(self, output: ProcessOutput) -> Response:
        """Return the lines that are kept now."""
        return Response(_text(output.since(0)), 200, HEADERS)

    def follow(self, request: Request, output: ProcessOutput, is_current: Callable[[], bool]) -> Response:
        """Return those lines and all later ones, as long as `is_current`. Raises `RateLimited`."""
        if self._followers >= MAX_FOLLOWERS:
            message = f"{MAX_FOLLOWERS} clients already follow logs, the maximum"
            raise RateLimited(message, retry_after_s=RETRY_AFTER_S)
        self._followers += 1
        request.at_end(self._leave)
        return Response(_Following(output, lambda: is_current() and not self._draining()), 200, HEADERS)

    def _leave(self) -> None:
        self._followers -= 1


class _Following:
    """The body of one follower. Its next piece is made when the last has been sent."""

    def __init__(self, output: ProcessOutput, continues: Callable[[], bool]) -> None:
        self._output = output
        self._continues = continues
        self._next = output.begin

    def __aiter__(self) -> "_Following":
        return self

    async def __anext__(self) -> bytes:
        while self._output.end == self._next:
            if not self._continues():
                raise StopAsyncIteration
            await trio.sleep(POLL_INTERVAL_S)
        missed = self._output.begin - self._next
        lines = self._output.since(self._next)
        self._next = self._output.end
        return (f"({missed} lines were dropped)\n".encode() if missed > 0 else b"") + _text(lines)


def _text(lines: Sequence[str]) -> bytes:
    return "".join(f"{plain_line(line)}\n" for line in lines).encode(errors="replace")
