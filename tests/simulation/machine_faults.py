"""Faults of the machine: its disk, clock, descriptors, memory and threads; and of the configuration file."""

import errno
import signal
from contextlib import suppress
from functools import partial

from simulation.injected_faults import CUT, ENDS_OF_JOBS, LATE, InjectedFault, Stage, Undo
from simulation.machine import DEFAULT_LIMIT, os_error
from simulation.parent import encoded
from simulation.reloads import edits

FLOOD_HOST = "10.0.9.9"
# Longer than any fault that prevents the server from reading its configuration file.
ASKED_AGAIN_S = 61.0


def disk_full(stage: Stage, _fault: InjectedFault) -> Undo:
    """Fail every write to the log."""
    number = stage.random.choice((errno.ENOSPC, errno.EIO, errno.EFBIG, errno.EPIPE, errno.EAGAIN))
    return stage.strike(lambda call: os_error(number) if call == "write_log" else None)


def disk_unreadable(stage: Stage, fault: InjectedFault) -> Undo:
    """Fail every read of a file."""
    fault.allowed_errors = frozenset({"load_failed"})
    calls = ("open_file", "stat", "read_file")
    return stage.strike(lambda call: os_error(errno.EIO) if call in calls else None)


def clock_jump(stage: Stage, _fault: InjectedFault) -> Undo:
    """Move the wall clock by up to about three years, and back later."""
    before = stage.source.wall_offset_s
    stage.source.wall_offset_s += stage.random.choice((-1, 1)) * stage.random.choice((1, 3600, 86_400, 10**8))

    def undo() -> None:
        stage.source.wall_offset_s = before

    return undo


def suspension(stage: Stage, fault: InjectedFault) -> Undo:
    """Suspend the machine: many deadlines pass at once."""
    fault.allowed_errors = ENDS_OF_JOBS | {CUT, LATE, "body_timeout", "header_timeout"}
    stage.clock.jump(stage.random.choice((1.0, 20.0, 100.0)))
    return lambda: None


def connection_flood(stage: Stage, fault: InjectedFault) -> Undo:
    """Open many connections from one address that send nothing."""
    fault.allowed_errors = frozenset({CUT, "too_many_connections"})
    network = stage.parent.system.network
    ends = []
    with suppress(ConnectionRefusedError):
        ends += [network.open_connection(FLOOD_HOST) for _ in range(stage.random.choice((10, 80)))]

    def undo() -> None:
        for end in ends:
            end.release()

    return undo


def out_of_descriptors(stage: Stage, fault: InjectedFault) -> Undo:
    """Leave the server a few descriptors, or none."""
    # A connection that cannot be accepted waits in the listen backlog.
    fault.allowed_errors = ENDS_OF_JOBS | {CUT, LATE}
    stage.machine.limit = len(stage.machine.descriptors) + stage.random.randrange(5)

    def undo() -> None:
        stage.machine.limit = DEFAULT_LIMIT

    return undo


def no_descriptor_at_times(stage: Stage, fault: InjectedFault) -> Undo:
    """Fail some calls that need a descriptor."""
    fault.allowed_errors = ENDS_OF_JOBS | {CUT}
    calls = ("descriptor", "accept", "socketpair", "epoll", "pipe", "pidfd")
    return stage.strike_sometimes(calls, lambda: os_error(stage.random.choice((errno.EMFILE, errno.ENFILE))))


def out_of_memory(stage: Stage, fault: InjectedFault) -> Undo:
    """Fail some calls that need kernel memory."""
    fault.allowed_errors = ENDS_OF_JOBS | {CUT}
    calls = ("descriptor", "accept", "socketpair", "epoll", "pipe", "spawn", "recv", "send")
    return stage.strike_sometimes(calls, lambda: os_error(stage.random.choice((errno.ENOMEM, errno.ENOBUFS))))


def no_threads(stage: Stage, fault: InjectedFault) -> Undo:
    """Fail some calls that need a thread."""
    fault.allowed_errors = ENDS_OF_JOBS | {"internal_error"}
    fault.is_unexpected = True
    return stage.strike_sometimes(("thread",), lambda: RuntimeError("can't start new thread"))


def reload(stage: Stage, fault: InjectedFault) -> Undo:
    """Make a valid or an invalid edit of the configuration file, and undo it later."""
    edit = stage.random.choice(edits(stage.deployment, stage.random))
    fault.allowed_errors, fault.models, fault.keys = edit.allowed_errors, edit.models, edit.keys
    before = stage.parent.file.content
    _rewrite(stage, edit.content if isinstance(edit.content, bytes) else encoded(edit.content))

    def undo() -> None:
        _rewrite(stage, before)
        # The server retries an unreadable file only after a change or a SIGHUP.
        ask = partial(stage.parent.system.signals.send, signal.SIGHUP)
        stage.parent.system.machine.after(ASKED_AGAIN_S, ask)

    return undo


def _rewrite(stage: Stage, content: bytes) -> None:
    stage.parent.file.write(content)
    if not stage.deployment.is_watched or stage.random.random() < 0.5:
        for _ in range(stage.random.choice((1, 1, 3))):
            stage.parent.system.signals.send(signal.SIGHUP)
