"""Ends a process with the one that started it, however that ends."""

import contextlib
import fcntl
import os
import select
import signal
import stat

PIPE = 0  # stdin, into which nothing is written


def end_with_parent() -> bool:
    """Make the kernel send SIGKILL when the parent's end of our stdin closes, also to a stopped process.

    Return False if it has closed already. SIGIO, which the kernel sends by default, ends a process within a
    long step too, but stays pending in one that is stopped (SIGSTOP, a debugger) until it is continued.
    SIGKILL ends it at once.

    `PR_SET_PDEATHSIG` would do the same, but is tied to the parent's *thread*: Trio starts processes from
    worker threads, which end after some idle seconds. A watcher process would cost a process and two
    descriptors for each model. macOS has no `F_SETSIG`: there SIGIO ends this process, or the end of the
    socket, which is noticed between steps.
    """
    if not stat.S_ISFIFO(os.fstat(PIPE).st_mode):
        return True  # started by hand
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    if hasattr(fcntl, "F_SETSIG"):
        with contextlib.suppress(OSError):
            fcntl.fcntl(PIPE, fcntl.F_SETSIG, signal.SIGKILL)
    with contextlib.suppress(OSError):
        fcntl.fcntl(PIPE, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(PIPE, fcntl.F_SETFL, fcntl.fcntl(PIPE, fcntl.F_GETFL) | os.O_ASYNC)
    return not select.select([PIPE], [], [], 0)[0]
