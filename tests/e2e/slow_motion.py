"""Stops or slows down a process, so that what it does in milliseconds can be watched as it happens."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Have the process stand still. Shorter than the watchdog's patience, or it is ended."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@contextmanager
def slowed(pid: int, *, run_s: float = 0.004, rest_s: float = 0.04) -> Iterator[threading.Event]:
    """Have the process run for a little and rest for long, again and again; while the event is set, rest."""
    done, held = threading.Event(), threading.Event()

    def alternate() -> None:
        while not done.is_set():
            with stopped(pid):
                time.sleep(rest_s)
                while held.is_set() and not done.is_set():
                    time.sleep(rest_s)
            time.sleep(run_s)

    thread = threading.Thread(target=alternate)
    thread.start()
    try:
        yield held
    finally:
        done.set()
        thread.join()
