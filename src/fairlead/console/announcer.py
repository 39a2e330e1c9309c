"""Reports the progress of starting and stopping. Owns every line that `serve` prints itself.

On a terminal: a progress bar for each model that loads, gone when the server is ready. Elsewhere: plain
lines, few enough for a log. The ready line goes to standard output, everything else to standard error.
The plain lines are also an interface: `read_line` understands them again (see `own_server`). Where the log is
JSON, all of them are events of the log.
"""

import json
import os
import re
import shlex
import signal
import sys
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

import msgspec

from fairlead.console.notify import notify
from fairlead.telemetry import streams

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID
    from structlog.typing import FilteringBoundLogger


class Loading(msgspec.Struct, frozen=True):
    """A model is on its way; `fraction` is 0...1."""

    model: str
    fraction: float
    stage: str


class Ready(msgspec.Struct, frozen=True):
    """The server answers at `url`."""

    url: str


class Announcer:
    """Plain lines, for a log or a pipe."""

    def __init__(self, *, key_needed: bool) -> None:
        self._key_needed = key_needed
        self._told: dict[str, tuple[str, int]] = {}

    def loading(self, model: str, fraction: float, stage: str) -> None:
        """Say how far a model is: a line for every stage and every tenth of the way."""
        tenths = int(fraction * 10)
        if self._told.get(model) != (stage, tenths):
            self._told[model] = (stage, tenths)
            self._show_loading(model, tenths, stage)

    def ready(self, url: str, models: Sequence[str]) -> None:
        """Say where the server is, and on a terminal how to ask it something."""
        self._clear()
        print(f"Fairlead is ready: {url}  serving {', '.join(models)}", flush=True)
        _notify_ready(url, models)
        if models and sys.stdout.isatty():
            print(_curl_hint(url, models[0], key_needed=self._key_needed), flush=True)

    def failed(self, model: str, reason: str) -> None:
        """Say why the server cannot start."""
        self._clear()
        complain(f"cannot serve{' ' if model else ''}{model}: {reason}")

    def stopping(self) -> None:
        """Say that no more work is taken."""
        self._clear()
        print("Fairlead is stopping.", file=sys.stderr, flush=True)
        notify("STOPPING=1")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._clear()

    def _show_loading(self, model: str, tenths: int, stage: str) -> None:
        print(f"Loading {model}: {tenths * 10} % {stage}", file=sys.stderr, flush=True)

    def _clear(self) -> None:
        """Make room for a line; here there is nothing in the way."""


class LogAnnouncer(Announcer):
    """Events of the log, for a log in JSON. Nothing goes to standard output."""

    def ready(self, url: str, models: Sequence[str]) -> None:
        """Log where the server is."""
        _logger().info("ready", url=url, models=list(models))
        _notify_ready(url, models)

    def failed(self, model: str, reason: str) -> None:
        """Log why the server cannot start."""
        _logger().error("cannot serve", models=model, reason=reason)

    def stopping(self) -> None:
        """Notify the service manager; the server itself logs the signal."""
        notify("STOPPING=1")

    def _show_loading(self, model: str, tenths: int, stage: str) -> None:
        _logger().info("loading", model=model, percent=tenths * 10, stage=stage)


class TerminalAnnouncer(Announcer):
    """A progress bar for each loading model. rich leaves the colours out when NO_COLOR is set."""

    def __init__(self, *, key_needed: bool) -> None:
        super().__init__(key_needed=key_needed)
        self._progress: Progress | None = None
        self._bars: dict[str, TaskID] = {}

    def loading(self, model: str, fraction: float, stage: str) -> None:
        """Move the model's bar."""
        if self._progress is None:
            self._progress = _progress()
            self._progress.start()
        if model not in self._bars:
            self._bars[model] = self._progress.add_task(model, total=1.0, stage=stage)
        self._progress.update(self._bars[model], completed=fraction, stage=stage)

    def _clear(self) -> None:
        if self._progress is not None:
            self._progress.stop()
        self._progress = None
        self._bars.clear()


def open_announcer(*, key_needed: bool) -> Announcer:
    """Return the announcer that suits the log and standard error. Its context restores the terminal."""
    if streams.is_json():
        return LogAnnouncer(key_needed=key_needed)
    return (TerminalAnnouncer if sys.stderr.isatty() else Announcer)(key_needed=key_needed)


def read_line(line: str) -> Loading | Ready | None:
    """Understand a line that `Announcer` printed; None for any other."""
    if found := re.match(r"Loading (.+): (\d+) % ([^%\n]*)$", line):
        return Loading(model=found[1], fraction=int(found[2]) / 100, stage=found[3])
    if found := re.match(r"Fairlead is ready: (\S+)  serving ", line):
        return Ready(url=found[1])
    return None


def complain(message: str) -> None:
    """Report an error on standard error."""
    if streams.is_json():
        _logger().error(message)
    else:
        print(f"fairlead: {message}", file=sys.stderr, flush=True)


def warn(message: str) -> None:
    """Report on standard error what the user should know."""
    if streams.is_json():
        _logger().warning(message)
    else:
        complain(f"warning: {message}")


def end_with_standard_input() -> None:
    """Ask this process to stop (SIGTERM) once standard input ends. Returns at once."""

    def wait() -> None:
        while os.read(sys.stdin.fileno(), 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="lifeline", daemon=True).start()


def _logger() -> "FilteringBoundLogger":
    import structlog  # most commands need none

    logger: FilteringBoundLogger = structlog.get_logger("fairlead.console")
    return logger


def _notify_ready(url: str, models: Sequence[str]) -> None:
    notify("READY=1", f"STATUS=serving {', '.join(models)} at {url}")


def _progress() -> "Progress":
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    return Progress(
        TextColumn("Loading {task.description}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[stage]}", markup=False),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )


def _curl_hint(url: str, model: str, *, key_needed: bool) -> str:
    question = {"model": model, "messages": [{"role": "user", "content": "Hello!"}]}
    key = '-H "Authorization: Bearer $FAIRLEAD_API_KEY" ' if key_needed else ""
    return f"Try it: curl {url}/v1/chat/completions {key}--json {shlex.quote(json.dumps(question))}"
