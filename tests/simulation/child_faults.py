"""Faults of child processes: killed, stopped, slow, sending malformed frames, not loading, not starting."""

import errno
import signal
from dataclasses import replace

from simulation.engine_child import Fate, Loading
from simulation.injected_faults import ENDS_OF_JOBS, InjectedFault, Stage, Undo
from simulation.machine import os_error
from simulation.parent import GUARD_PROGRAM
from simulation.processes import Process

ALLOWED_ERRORS = ENDS_OF_JOBS | {"engine_failed"}
FATES: tuple[Fate, ...] = ("die", "exit", "stop", "garbage", "half", "huge", "close", "unknown", "error")
WAYS_TO_LOAD: tuple[Loading, ...] = ("fails", "dies", "closes", "hangs")


def child_killed(stage: Stage, fault: InjectedFault) -> Undo:
    """Kill some children, as a kernel that is out of memory does."""
    fault.allowed_errors = ALLOWED_ERRORS
    for process in _children(stage):
        if stage.random.random() < 0.6:
            process.kill()
    return lambda: None


def child_stopped(stage: Stage, fault: InjectedFault) -> Undo:
    """Stop all children, for a while or forever."""
    fault.allowed_errors = ALLOWED_ERRORS
    stopped = _children(stage)
    for process in stopped:
        process.send_signal(signal.SIGSTOP)
    if stage.random.random() < 0.5:
        stage.child_faults.left_stopped = True
        stage.faults.append(replace(fault, name="child left stopped"))
        return lambda: None
    return lambda: _continue(stopped)


def child_slow(stage: Stage, fault: InjectedFault) -> Undo:
    """Slow all children down."""
    fault.allowed_errors = ALLOWED_ERRORS
    slow = _children(stage)
    for process in slow:
        # A pause that has begun may outlast the fault, but not the recovery time after it.
        process.slowness = stage.random.choice((3.0, 20.0))

    def undo() -> None:
        for process in slow:
            process.slowness = 1.0

    return undo


def child_fated(stage: Stage, fault: InjectedFault) -> Undo:
    """Make each new child fail at some of its frames."""
    fault.allowed_errors = ALLOWED_ERRORS
    for model in stage.deployment.models:
        stage.child_faults.fates[model] = (stage.random.choice(FATES), stage.random.choice(FATES))
    _kill(stage)

    def undo() -> None:
        stage.child_faults.clear_faults()
        _continue(_children(stage))

    return undo


def child_not_loading(stage: Stage, fault: InjectedFault) -> Undo:
    """Make each new child fail to load its model. A child that hangs is killed at the end."""
    fault.allowed_errors = ALLOWED_ERRORS
    for model in stage.deployment.models:
        stage.child_faults.loading[model] = stage.random.choice(WAYS_TO_LOAD)
    _kill(stage)

    def undo() -> None:
        stage.child_faults.clear_faults()
        _kill(stage)

    return undo


def spawn_failing(stage: Stage, fault: InjectedFault) -> Undo:
    """Make every start of a process fail."""
    fault.allowed_errors = ALLOWED_ERRORS
    number = stage.random.choice((errno.ENOMEM, errno.EAGAIN, errno.ENOENT, errno.EACCES))
    _kill(stage)
    return stage.strike(lambda call: os_error(number) if call == "spawn" else None)


def _children(stage: Stage) -> list[Process]:
    """Return the processes of models."""
    running = stage.parent.system.processes.running
    return [process for process in running if process.args[0] != GUARD_PROGRAM]


def _kill(stage: Stage) -> None:
    for process in _children(stage):
        process.kill()


def _continue(processes: list[Process]) -> None:
    for process in processes:
        process.send_signal(signal.SIGCONT)
