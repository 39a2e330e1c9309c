"""Reports the progress of starting and stopping. Owns every line that `serve` prints itself.

On a terminal: a progress bar for each loading model, removed when the server is ready. Elsewhere: one line
for each load, or, for a parent program, a line for each tenth of it, which `read_line` parses (see
`own_server`). The ready line goes to standard output, everything else to standard error. If the log is
JSON, all of them are log events.
"""

import json
import os
import re
import shlex
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Self

import msgspec

from fairlead.base.config import UNIX_PREFIX
from fairlead.base.telemetry import streams

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID
    from structlog.typing import FilteringBoundLogger


DEFAULT_URL = "http://127.0.0.1:8000"
LOADING = "Loading "
WAITING = ": waiting for "


class LoadingLine(msgspec.Struct, frozen=True):
    """A model is loading; `fraction` is 0...1, None if it is unknown."""

    model: str
    fraction: float | None
    stage: str


class ReadyLine(msgspec.Struct, frozen=True):
    """The server is ready at `url`."""

    url: str


class PlainAnnouncer:
    """Prints plain lines, for a log or a pipe; `in_detail`: one for each stage and each tenth of a load."""

    def __init__(self, *, key_needed: bool, in_detail: bool = False) -> None:
        self._key_needed = key_needed
        self._in_detail = in_detail
        self._shown: dict[str, tuple[str, int | None]] = {}

    def loading(self, model: str, fraction: float | None, stage: str) -> None:
        """Print a line when a load begins; `in_detail` also for each stage and each tenth, if known."""
        tenths = None if fraction is None else int(fraction * 10)
        before = self._shown.get(model)
        self._shown[model] = (stage, tenths)
        begins = before is None or (before[1] is not None and (tenths is None or tenths < before[1]))
        if begins or (self._in_detail and before != (stage, tenths)):
            self._show_loading(model, tenths, stage)

    def ready(self, url: str, models: Sequence[str]) -> None:
        """Print the server's URL and how to use and stop it; on a terminal also an example request."""
        self._clear()
        print(f"Fairlead is ready: {url}  serving {', '.join(models)}  ({_uses(url)})", flush=True)
        _notify_ready(url, models)
        if models and sys.stdout.isatty():
            print(_curl_hint(url, models[0], key_needed=self._key_needed), flush=True)

    def failed(self, model: str, reason: str) -> None:
        """Print why the server cannot start."""
        self._clear()
        report_error(f"cannot serve{' ' if model else ''}{model}: {reason}")

    def stopping(self) -> None:
        """Print that the server is stopping, and notify the service manager."""
        self._clear()
        print("Fairlead is stopping.", file=sys.stderr, flush=True)
        _notify("STOPPING=1")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._clear()

    def _show_loading(self, model: str, tenths: int | None, stage: str) -> None:
        percent = "" if tenths is None else f"{tenths * 10} % "
        print(f"Loading {model}: {percent}{stage}", file=sys.stderr, flush=True)

    def _clear(self) -> None:
        """Remove the progress bars before a line is printed. Plain lines have none."""


class LogAnnouncer(PlainAnnouncer):
    """Writes log events, for a JSON log. Nothing goes to standard output."""

    def ready(self, url: str, models: Sequence[str]) -> None:
        """Log the server's URLs."""
        _logger().info("ready", url=url, models=list(models), dashboard=f"{url}/", api=f"{url}/v1")
        _notify_ready(url, models)

    def failed(self, model: str, reason: str) -> None:
        """Log why the server cannot start."""
        _logger().error("cannot serve", models=model, reason=reason)

    def stopping(self) -> None:
        """Notify the service manager; the server itself logs the signal."""
        _notify("STOPPING=1")

    def _show_loading(self, model: str, tenths: int | None, stage: str) -> None:
        percent = {} if tenths is None else {"percent": tenths * 10}
        _logger().info("loading", model=model, **percent, stage=stage)


class TerminalAnnouncer(PlainAnnouncer):
    """Shows a progress bar for each loading model. rich omits colors if NO_COLOR is set."""

    def __init__(self, *, key_needed: bool) -> None:
        super().__init__(key_needed=key_needed)
        self._progress: Progress | None = None
        self._bars: dict[str, TaskID] = {}

    def loading(self, model: str, fraction: float | None, stage: str) -> None:
        """Update the model's progress bar, which pulses while the progress is unknown."""
        if self._progress is None:
            self._progress = _progress()
            self._progress.start()
        if model not in self._bars:
            self._bars[model] = self._progress.add_task(model, total=None, stage=stage)
        total = None if fraction is None else 1.0  # to `update`, None means no change
        self._progress.update(self._bars[model], completed=fraction, total=total, stage=stage)

    def _clear(self) -> None:
        if self._progress is not None:
            self._progress.stop()
        self._progress = None
        self._bars.clear()


def open_announcer(*, key_needed: bool, in_detail: bool = False) -> PlainAnnouncer:
    """Return the announcer for this log format and standard error. Its context restores the terminal.

    `in_detail`: plain lines are for a parent program that shows the progress itself.
    """
    if streams.is_json():
        return LogAnnouncer(key_needed=key_needed)
    if sys.stderr.isatty():
        return TerminalAnnouncer(key_needed=key_needed)
    return PlainAnnouncer(key_needed=key_needed, in_detail=in_detail)


def read_line(line: str) -> LoadingLine | ReadyLine | None:
    """Parse a line that `PlainAnnouncer` printed; return None for any other."""
    if found := re.match(r"Loading (.+): (\d+) % ([^%\n]*)$", line):
        return LoadingLine(model=found[1], fraction=int(found[2]) / 100, stage=found[3])
    if line.startswith(LOADING) and WAITING in line:
        model, _, awaited = line.removeprefix(LOADING).partition(WAITING)
        return LoadingLine(model=model, fraction=None, stage=f"waiting for {awaited}")
    if found := re.match(r"Fairlead is ready: (\S+)  serving ", line):
        return ReadyLine(url=found[1])
    return None


def report_error(message: str) -> None:
    """Report an error on standard error."""
    if streams.is_json():
        _logger().error(message)
    else:
        print(f"fairlead: {message}", file=sys.stderr, flush=True)


def report_warning(message: str) -> None:
    """Report a warning on standard error."""
    if streams.is_json():
        _logger().warning(message)
    else:
        report_error(f"warning: {message}")


def end_with_standard_input() -> None:
    """Send SIGTERM to this process once standard input ends. Returns at once."""

    def wait() -> None:
        while os.read(sys.stdin.fileno(), 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="lifeline", daemon=True).start()


def _logger() -> "FilteringBoundLogger":
    import structlog  # here, because most commands do not log

    logger: FilteringBoundLogger = structlog.get_logger("fairlead.server.console")
    return logger


def _notify_ready(url: str, models: Sequence[str]) -> None:
    _notify("READY=1", f"STATUS=serving {', '.join(models)} at {url}")


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


def _uses(url: str) -> str:
    chat = "fairlead run" if url == DEFAULT_URL else f"fairlead run --url {url}"
    if url.startswith(UNIX_PREFIX):
        return f"chat: {chat}  stop: Ctrl-C"
    return f"dashboard: {url}/  API: {url}/v1  chat: {chat}  stop: Ctrl-C"


def _curl_hint(url: str, model: str, *, key_needed: bool) -> str:
    question = {"model": model, "messages": [{"role": "user", "content": "Hello!"}]}
    key = '-H "Authorization: Bearer $FAIRLEAD_API_KEY" ' if key_needed else ""
    if url.startswith(UNIX_PREFIX):
        url = f"--unix-socket {shlex.quote(url.removeprefix(UNIX_PREFIX))} http://localhost"
    return f"Try it: curl {url}/v1/chat/completions {key}--json {shlex.quote(json.dumps(question))}"


def _notify(*words: str) -> None:
    """Send states to systemd (`Type=notify`), such as `READY=1` or `STATUS=…`, as sd_notify(3) describes.

    Nothing is sent without NOTIFY_SOCKET in the environment. Errors are ignored: a service manager that does
    not listen must not stop the server.
    """
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address or not hasattr(socket, "AF_UNIX"):
        return
    if address.startswith("@"):  # Linux's abstract socket names
        address = "\0" + address[1:]
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as to:
        to.connect(address)
        to.send("\n".join(words).encode())
