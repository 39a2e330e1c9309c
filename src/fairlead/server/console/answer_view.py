"""Shows an answer as it arrives: its text and tool calls on standard output, its reasoning folded.

Reasoning and unfinished calls are shown only while they are written: their last lines, dimmed, in a status on
standard error, which is then removed. So standard output has the answer alone.
"""

import json
import sys
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.status import Status
from rich.text import Text

from fairlead.server.console.client import Piece, Queued, ReasoningPiece, ToolCallPiece

TAIL_ROWS = 4
# A model's output must not move the cursor, change the window's title or type for the user.
_CONTROLS = dict.fromkeys({*range(32), *range(0x7F, 0xA0)} - {ord("\n"), ord("\t")})


class AnswerView:
    """Shows one answer, as a context in which it arrives. `text` and `reasoning`: what has arrived of these.

    `hint`: how the user can see the folded reasoning.
    """

    def __init__(self, *, hint: str = "") -> None:
        self.text = ""
        self.reasoning = ""
        self._hint = hint
        self._calls: dict[int, ToolCallPiece] = {}  # those that are not shown yet, by their index
        self._console = Console(stderr=True)
        self._status: Status | None = None
        self._thinking_since_s: float | None = None
        self._controls = _CONTROLS if sys.stdout.isatty() else {}
        self._is_at_line_start = False  # so that an empty answer is an empty line
        self._is_begun = False

    def __enter__(self) -> Self:
        self._show("waiting for the answer")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Show the rest, unless the answer was stopped or failed."""
        if kind is None:
            self._complete()
            self._end_line()
        self._remove_status()

    def add(self, piece: Piece | Queued) -> None:
        """Show the next piece."""
        match piece:
            case Queued(position, wait_s):
                known = "no server has the model now" if wait_s is None else f"about {wait_s} s"
                self._show(f"waiting: {position} in the queue, {known}")
            case ReasoningPiece(text):
                self._think(text)
            case ToolCallPiece():
                self._call(piece)
            case str():
                self._complete()
                self.text += piece
                self._write(piece)

    def _think(self, text: str) -> None:
        if self._thinking_since_s is None:
            self._complete()
            self._thinking_since_s = time.monotonic()
        self.reasoning += text
        self._show_unfinished("thinking", self.reasoning)

    def _call(self, piece: ToolCallPiece) -> None:
        if not self._calls:
            self._complete()
        call = self._calls.setdefault(piece.index, ToolCallPiece(piece.index, "", ""))
        call.name += piece.name
        call.arguments += piece.arguments
        self._show_unfinished(f"calling {_on_one_line(call.name)}", call.arguments)

    def _show_unfinished(self, title: str, text: str) -> None:
        """Show the end of a text in the status."""
        if self._is_begun:
            self._end_line()
        width = self._console.width - 2  # beside the spinner
        rows = Text(text[-TAIL_ROWS * width :].translate(_CONTROLS).strip()).wrap(self._console, width)
        shown = [(f"\n{row}", "dim") for row in rows[-TAIL_ROWS:]]
        self._show(Text.assemble(title.translate(_CONTROLS), *shown))

    def _show(self, status: str | Text) -> None:
        if self._status is not None:
            self._status.update(status)
            return
        self._status = self._console.status(status)  # a new one: a stopped one would erase lines above it
        self._status.start()

    def _remove_status(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None

    def _complete(self) -> None:
        """Remove the status; fold the reasoning and show the calls that have ended with it."""
        self._remove_status()
        if self._thinking_since_s is not None:
            seconds = time.monotonic() - self._thinking_since_s
            self._thinking_since_s = None
            if self._console.is_terminal:
                self._console.print(Text(f"thought for {seconds:.0f} s{self._hint}", "dim"))
        for call in self._calls.values():
            if self._is_begun:
                self._end_line()
            self._write(describe_call(call.name, call.arguments))
        self._calls.clear()

    def _write(self, text: str) -> None:
        sys.stdout.write(text.translate(self._controls))
        sys.stdout.flush()
        self._is_begun, self._is_at_line_start = True, text.endswith("\n")

    def _end_line(self) -> None:
        if not self._is_at_line_start:
            self._write("\n")


def describe_call(name: str, arguments: str) -> str:
    """Return lines with the function's name and each argument; a text of several lines is a block of its own.

    Arguments that are not a JSON object are shown as they are.
    """
    lines = [f"call {_on_one_line(name)}"]
    try:
        values = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        values = arguments
    if isinstance(values, dict):
        for key, value in values.items():
            if isinstance(value, str) and "\n" in value:
                lines += [f"  {_on_one_line(key)}:", *("    " + line for line in value.splitlines())]
            else:
                lines.append(f"  {_on_one_line(key)}: {json.dumps(value, ensure_ascii=False)}")
    else:
        lines += ("  " + line for line in arguments.splitlines())
    return "\n".join(lines) + "\n"


def write_dimmed(text: str) -> None:
    """Write a text of a model to standard output, dimmed."""
    Console().print(Text(text.translate(_CONTROLS).strip(), "dim"))


def _on_one_line(text: str) -> str:
    return " ".join(text.split())
