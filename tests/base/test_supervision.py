"""Failure boundaries: some exceptions pass, others are kept."""

import pytest
import structlog
import trio

from fairlead.base.errors import LoadFailed
from fairlead.base.supervision import (
    RESTART_S,
    FailureBoundary,
    contain,
    described,
    keep_running,
    log_failure,
)


class Panic(BaseException):
    """An exception like that of a library in Rust."""


async def fail(error: BaseException) -> None:
    await trio.lowlevel.checkpoint()
    raise error


async def test_block_without_an_error_has_no_failure():
    with FailureBoundary() as boundary:
        pass
    assert boundary.failure is None


@pytest.mark.parametrize(
    "error", [ValueError("x"), OSError(24, "x"), LoadFailed("x"), Panic("x"), MemoryError()]
)
async def test_failure_is_kept(error):
    with FailureBoundary() as boundary:
        await fail(error)
    assert boundary.failure is error


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit])
async def test_exceptions_that_end_the_program_pass(kind):
    boundary = FailureBoundary()
    with pytest.raises(kind), boundary:
        raise kind
    assert boundary.failure is None


async def test_cancellation_passes():
    with trio.CancelScope() as scope:
        scope.cancel()
        with FailureBoundary() as boundary:
            await trio.sleep_forever()
    assert scope.cancelled_caught
    assert boundary.failure is None


async def test_failure_of_a_group_is_fairleads_error_if_any_otherwise_the_first():
    with FailureBoundary() as boundary:
        raise ExceptionGroup("", [ValueError("x"), ExceptionGroup("", [own_error := LoadFailed("x")])])
    assert boundary.failure is own_error
    with FailureBoundary() as boundary:
        raise BaseExceptionGroup("", [panic := Panic(), ValueError("x")])
    assert boundary.failure is panic


async def test_group_is_split_into_exceptions_that_pass_and_the_failure_which_is_kept():
    boundary = FailureBoundary()
    with pytest.raises(BaseExceptionGroup) as raised, boundary:
        raise BaseExceptionGroup("", [failure := ValueError("x"), interrupt := KeyboardInterrupt()])
    assert raised.value.exceptions == (interrupt,)
    assert boundary.failure is failure


async def test_failure_of_a_cancelled_nursery_is_kept():
    with trio.CancelScope() as scope:
        with FailureBoundary() as boundary:
            async with trio.open_nursery() as nursery:

                async def fail_when_cancelled() -> None:
                    try:
                        await trio.sleep_forever()
                    finally:
                        raise ValueError("while ending")

                nursery.start_soon(fail_when_cancelled)
                nursery.start_soon(trio.sleep_forever)
                await trio.testing.wait_all_tasks_blocked()
                scope.cancel()
        raise AssertionError("the block continued")
    assert scope.cancelled_caught
    assert str(boundary.failure) == "while ending"


async def test_contained_task_does_not_end_other_tasks():
    finished = []

    async def other_task() -> None:
        await trio.testing.wait_all_tasks_blocked()
        finished.append("other_task")

    with structlog.testing.capture_logs() as logs:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(contain, "failing task", fail, ValueError("x"))
            nursery.start_soon(other_task)
    assert finished == ["other_task"]
    (line,) = logs
    assert (
        line["event"],
        line["task"],
        line["reason"],
    ) == ("task failed", "failing task", "ValueError: x")
    assert isinstance(line["exc_info"], ValueError)


async def test_task_that_is_kept_running_is_restarted_after_a_failure(autojump_clock):
    begun = []

    async def run() -> None:
        begun.append(trio.current_time())
        if len(begun) < 3:
            raise OSError("x")
        await trio.sleep_forever()

    start_s = trio.current_time()
    with structlog.testing.capture_logs(), trio.move_on_after(100):
        await keep_running("x", run)
    assert begun == [start_s, start_s + RESTART_S, start_s + 2 * RESTART_S]


@pytest.mark.parametrize(
    ("failure", "reason", "has_traceback"),
    [
        (LoadFailed("no such file"), "no such file", False),
        (OSError(24, "Too many open files"), "[Errno 24] Too many open files", False),
        (KeyError("secret"), "KeyError: 'secret'", True),
    ],
)
def test_failure_of_an_unexpected_type_is_logged_with_its_traceback(failure, reason, has_traceback):
    with structlog.testing.capture_logs() as logs:
        log_failure("it failed", failure, model="m")
    (line,) = logs
    assert (line["event"], line["model"], line["reason"]) == ("it failed", "m", reason)
    assert has_traceback == (line["exc_info"] is failure)


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        (LoadFailed("no such file"), "no such file"),
        (FileNotFoundError(2, "No such file or directory", "/home/me/secret"), "No such file or directory"),
        (ValueError("client text"), "internal error (ValueError)"),
    ],
)
def test_reasons_for_clients_contain_no_paths_and_no_values(failure, reason):
    assert reason == described(failure)
