"""The first process of a container: it ends processes that have lost their parents.

The system gives orphans, such as what a command has left behind, to process 1, which must wait for their
ends. Otherwise they stay as zombies. If the server itself waited for any child, it would take the exit
statuses of its own children from Trio and `subprocess`. So process 1 only waits and passes signals on, and
the server is its child. With `docker run --init` there is such a process already.
"""

import os
import signal
from contextlib import suppress
from types import FrameType

# Sent by service managers and people. Those about the terminal reach the server's process group directly.
_PASSED_ON = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")


def leave_first_place() -> None:
    """Return in a child process if this is process 1. Process 1 itself ends with the child, and as it ended.

    To be called while there is only one thread.
    """
    if os.getpid() != 1:
        return
    passed_on = {getattr(signal, name) for name in _PASSED_ON}
    # Blocked until the child's number is known, so that none is lost.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, passed_on)
    child = os.fork()
    if not child:
        _take_terminal()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return

    def pass_on(number: int, _frame: FrameType | None) -> None:
        with suppress(ProcessLookupError):
            os.kill(child, number)

    for number in passed_on:
        signal.signal(number, pass_on)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    os._exit(_wait_for(child))


def _wait_for(child: int) -> int:
    """Wait for all processes until this one has ended; return its exit status, as a shell reports it."""
    while True:
        ended, status = os.waitpid(-1, 0)
        if ended == child:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def _take_terminal() -> None:
    """Make this process a group of its own, in the foreground of its terminal, if it has one.

    Otherwise Ctrl-C would reach it twice: from the terminal and from process 1.
    """
    os.setpgid(0, 0)
    with suppress(OSError):
        ignored = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
        try:
            os.tcsetpgrp(0, os.getpid())
        finally:
            signal.signal(signal.SIGTTOU, ignored)
