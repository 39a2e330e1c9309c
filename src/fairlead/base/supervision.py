"""Keeps the failure of one task from ending others.

An exception that leaves a Trio task cancels its nursery, and with it every sibling: one model's `OSError`
would end the server. Each long-lived task (of a model, of a node, the reading of configurations) therefore
runs inside a `FailureBoundary`, and its owner decides what follows from `failure`. Cancellation,
`KeyboardInterrupt` and `SystemExit` pass through: they are how the program ends.
"""

import signal
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Self

import structlog
import trio

from fairlead.base.errors import FairleadError

RESTART_S = 1.0

# Everything else is a failure, including a Rust library's panic, which is not an `Exception` in Python.
PASSING = (trio.Cancelled, KeyboardInterrupt, SystemExit, GeneratorExit)

logger = structlog.get_logger("fairlead.base.supervision")


class FailureBoundary:
    """A `with` block that catches every failure: `failure` is the exception that ended it, or None.

    Of an exception group, the first `FairleadError` counts, or else the first exception. If a group also
    contains what must pass, only that is raised again, and `failure` is set nevertheless.
    """

    def __init__(self) -> None:
        self.failure: BaseException | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _traceback: TracebackType | None
    ) -> bool:
        if error is None:
            return False
        failures = _failures(error)
        if not failures:
            return False
        ours = (failure for failure in failures if isinstance(failure, FairleadError))
        self.failure = next(ours, failures[0])
        if isinstance(error, BaseExceptionGroup) and (passing := error.subgroup(PASSING)) is not None:
            raise passing
        return True


async def contain(name: str, run: Callable[..., Awaitable[object]], *arguments: Any) -> None:
    """Run something to its end. A failure is logged under this name, and not raised."""
    boundary = FailureBoundary()
    try:
        with boundary:
            await run(*arguments)
    finally:
        if boundary.failure is not None:
            log_failure("task failed", boundary.failure, task=name)


async def keep_running(name: str, run: Callable[..., Awaitable[object]], *arguments: Any) -> None:
    """Run something that ends only when it is cancelled; start it again `RESTART_S` after a failure."""
    while True:
        await contain(name, run, *arguments)
        await trio.sleep(RESTART_S)


def unwrap(error: BaseException) -> BaseException:
    """Return the relevant error of a group: the `FairleadError` in it, else its only error, else the group.

    Tasks that end because of an error often raise in turn, for example when a channel is closed. The client
    gets the `FairleadError`.
    """
    errors = [leaf for leaf in _leaves(error) if not isinstance(leaf, trio.Cancelled)]
    ours = [leaf for leaf in errors if isinstance(leaf, FairleadError)]
    if ours:
        return ours[0]
    return errors[0] if len(errors) == 1 else error


def hide_bug(raised: Exception) -> FairleadError:
    """Return the error that a client may see. What is no `FairleadError` is our own bug, and is logged."""
    if isinstance(raised, FairleadError):
        return raised
    logger.error("unexpected error", exc_info=raised)
    return FairleadError("the server failed; its log has the cause under this request id")


def log_failure(event: str, failure: BaseException, **details: object) -> None:
    """Log a failure as an error, with its traceback unless its type is expected."""
    is_expected = isinstance(failure, FairleadError | OSError)
    reason = str(failure) if is_expected else f"{type(failure).__name__}: {failure}"
    logger.error(event, reason=reason, exc_info=None if is_expected else failure, **details)


def described(failure: BaseException) -> str:
    """Return the reason of a failure in words that a client may see: no paths, no values."""
    if isinstance(failure, FairleadError):
        return failure.message
    if isinstance(failure, OSError) and failure.strerror:
        return failure.strerror
    return f"internal error ({type(failure).__name__})"


def exit_description(status: int | None) -> str:
    """Return how a child process ended, by its exit status; a negative one is a signal's, None is unknown."""
    if status is None:
        return "closed its connection but did not end"
    if status >= 0:
        return f"ended with exit status {status}"
    names = {number.value: number.name for number in signal.Signals}
    return f"was killed by {names.get(-status, f'signal {-status}')}"


def _failures(error: BaseException) -> list[BaseException]:
    """Return the single exceptions of a group, or the one exception, without those that must pass."""
    return [leaf for leaf in _leaves(error) if not isinstance(leaf, PASSING)]


def _leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for part in error.exceptions for leaf in _leaves(part)]
    return [error]
