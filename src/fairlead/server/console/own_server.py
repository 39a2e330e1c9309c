"""Runs `fairlead serve` as a child process, for the duration of a chat.

The child is stopped when the context exits. If this process is killed, the child's standard input ends, and
it stops too.
"""

import os
import secrets
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from fairlead.server.console.announcer import (
    LoadingLine,
    PlainAnnouncer,
    ReadyLine,
    open_announcer,
    read_line,
)
from fairlead.server.console.client import ServerError

STOP_S = 10.0


@contextmanager
def own_server(model: Path | None) -> Iterator[tuple[str, str]]:
    """Serve `model` (None: the demonstration model) on a free loopback port; yield its URL and API key.

    Shows the progress. Raises `ServerError` with the child's last line if it ends before it is ready.
    """
    key = secrets.token_urlsafe(16)  # other users of this machine can reach the port
    command = [sys.executable, "-m", "fairlead", "serve", *([str(model)] if model else [])]
    child = subprocess.Popen(  # noqa: S603 - our own program
        [*command, "--host", "127.0.0.1", "--port", "0", "--lifeline"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env={**os.environ, "FAIRLEAD_API_KEY": key},
        start_new_session=True,  # Ctrl-C must stop the answer, not the server
    )
    # An unread pipe would block the child once it is full of log lines.
    drain = threading.Thread(target=deque, args=(child.stdout, 0), name="drain", daemon=True)
    with child:
        try:
            assert child.stdout is not None
            with open_announcer(key_needed=True) as announcer:
                url = _wait_until_ready(child.stdout, announcer)
            drain.start()
            yield url, key
        finally:
            _stop(child)
            if drain.ident is not None:
                drain.join(STOP_S)  # before the pipe that it reads is closed


def _wait_until_ready(lines: Iterable[str], announcer: PlainAnnouncer) -> str:
    last_line = "its server ended and printed no reason"
    for line in lines:
        match read_line(line):
            case ReadyLine(url=url):
                return url
            case LoadingLine(model=model, fraction=fraction, stage=stage):
                announcer.loading(model, fraction, stage)
            case None if line.strip():
                last_line = line.strip().removeprefix("fairlead: ")
    raise ServerError(last_line)


def _stop(child: "subprocess.Popen[str]") -> None:
    child.terminate()
    try:
        child.wait(STOP_S)
    except subprocess.TimeoutExpired:
        child.kill()
