"""Stop or slow down a process, so that a test can observe what otherwise takes milliseconds."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Stop the process with SIGSTOP. Must be shorter than its watchdog's bound, or the process is ended."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@contextmanager
def slowed(pid: int, *, run_s: float = 0.004, rest_s: float = 0.04) -> Iterator[threading.Event]:
    """Alternately run the process and stop it; while the event is set, it stays stopped."""
    done, process_stopped = threading.Event(), threading.Event()

    def alternate() -> None:
        while not done.is_set():
            with stopped(pid):
                time.sleep(rest_s)
                while process_stopped.is_set() and not done.is_set():
                    time.sleep(rest_s)
            time.sleep(run_s)

    thread = threading.Thread(target=alternate)
    thread.start()
    try:
        yield process_stopped
    finally:
        done.set()
        thread.join()
