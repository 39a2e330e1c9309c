"""A person at a terminal: a program behind a pseudo-terminal, typed to and read."""

import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Self

PATIENCE_S = 60.0
AGAIN_S = 2.0  # when a person would press the key once more

# A terminal's Ctrl-C reaches the session that the terminal controls, so the program must adopt it first; and
# tests that were started in the background have taught their children to ignore it.
ADOPT_TERMINAL = """
import fcntl, signal, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
signal.signal(signal.SIGINT, signal.default_int_handler)
"""
RUN_FAIRLEAD = "import sys; from fairlead.cli import main; sys.exit(main(sys.argv[1:]))"


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
        """Wait until `text` shows up; return what was shown up to there and go on behind it."""
        deadline = time.monotonic() + PATIENCE_S
        while text not in self.shown:
            assert self._read(deadline), f"{text!r} was not shown, but {self.shown!r}"
        before, _, self.shown = self.shown.partition(text)
        return before

    def press(self, keys: str, *, until: str) -> str:
        """Type `keys` until `until` shows up; return what was shown up to there and go on behind it.

        For Ctrl-C, which is a signal: one that comes after readline has shown its prompt and before it waits
        for a key is only seen with the next key.
        """
        deadline = time.monotonic() + PATIENCE_S
        while until not in self.shown:
            assert time.monotonic() < deadline, f"{until!r} was not shown, but {self.shown!r}"
            self.type(keys)
            again = time.monotonic() + AGAIN_S
            while until not in self.shown and self._read(again):
                pass
        return self.expect(until)

    def wait(self) -> int:
        """Wait for the end; return the exit code."""
        deadline = time.monotonic() + PATIENCE_S
        while self._read(deadline):
            pass
        return self.process.wait(PATIENCE_S)

    def _read(self, deadline: float) -> bool:
        """Read some more; False at the end, or when patience has."""
        ready, _, _ = select.select([self._keyboard], [], [], max(0.0, deadline - time.monotonic()))
        try:
            piece = os.read(self._keyboard, 4096) if ready else b""
        except OSError:  # Linux's way to say that the other side is closed
            piece = b""
        self.shown += piece.decode(errors="replace")
        return bool(piece)
