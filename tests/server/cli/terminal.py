"""Runs a program in a pseudo-terminal, types to it and reads its output."""

import codecs
import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

TIMEOUT_S = 60.0

# Ctrl-C reaches only the session which the terminal controls, so the program must adopt the terminal first.
# Children of tests that were started in the background ignore SIGINT, so its handler is restored.
ADOPT_TERMINAL = """
import fcntl, signal, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
signal.signal(signal.SIGINT, signal.default_int_handler)
"""
RUN_FAIRLEAD = "import sys; from fairlead.server.cli import main; sys.exit(main(sys.argv[1:]))"


class Terminal:
    """Runs Python `code` (default: fairlead itself) with `arguments`."""

    def __init__(self, arguments: Sequence[str], *, code: str = RUN_FAIRLEAD, **environment: str) -> None:
        self._keyboard, screen = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", ADOPT_TERMINAL + code, *arguments],
            stdin=screen,
            stdout=screen,
            stderr=screen,
            start_new_session=True,
            env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", **environment},
        )
        os.close(screen)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.shown = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._keyboard)

    def type(self, keys: str) -> None:
        os.write(self._keyboard, keys.encode())

    def expect(self, text: str) -> str:
        """Wait until `text` is shown; return the output before it and continue after it."""
        deadline = time.monotonic() + TIMEOUT_S
        while text not in self.shown:
            assert self._read(deadline), f"{text!r} was not shown, but {self.shown!r}"
        before, _, self.shown = self.shown.partition(text)
        return before

    def interrupt(self) -> None:
        """Type Ctrl-C once the program sleeps: a signal just before would be handled only after the sleep."""
        while Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "S":
            os.sched_yield()
        self.type("\x03")

    def wait(self) -> int:
        """Wait for the end; return the exit code."""
        deadline = time.monotonic() + TIMEOUT_S
        while self._read(deadline):
            pass
        return self.process.wait(TIMEOUT_S)

    def _read(self, deadline: float) -> bool:
        """Read more output; return False at its end or at the deadline."""
        ready, _, _ = select.select([self._keyboard], [], [], max(0.0, deadline - time.monotonic()))
        try:
            piece = os.read(self._keyboard, 4096) if ready else b""
        except OSError:  # on Linux: the other side is closed
            piece = b""
        self.shown += self._decoder.decode(piece)  # a piece may end within a character
        return bool(piece)
