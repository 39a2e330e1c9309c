"""The child's loop: read messages, plan, launch, commit the step before, send. Owns the clock.

If a launch returns before the device is done, one step runs while the next is prepared and the tokens of the
one before are sent. Else a step is planned, run, committed and sent before the next. Every message is
answered by a frame. Uses no CPU while there is nothing to do. Independent of sockets and torch.
"""

import time
import traceback
from collections.abc import Callable
from typing import NamedTuple, NoReturn, Protocol

import msgspec

from fairlead._cext.inputbatch import Step
from fairlead.base import messages
from fairlead.engine.engine import Engine
from fairlead.engine.step import Outcome, PendingStep, Runner

FAILED_STEPS_BOUND = 3


class MessageInbox(Protocol):
    """The child's end of its connections.

    `read` returns the received messages, after waiting for some: at most `wait_s`; None: without limit.
    """

    def read(self, *, wait_s: float | None) -> list[messages.ToEngine]: ...
    def write(self, message: messages.StepOutputs, /) -> None: ...


class _LaunchedStep(NamedTuple):
    step: Step
    pending: PendingStep
    launched_at_s: float


class Loop:
    """Steps one engine with one runner. `clock` in seconds; `report_failure` is called with a step's error.

    A step fails its own sequences if its launch or wait raises. The third error in a row is raised, because
    such a runner does not recover.
    """

    def __init__(
        self,
        engine: Engine,
        runner: Runner,
        channel: MessageInbox,
        *,
        clock: Callable[[], float] = time.monotonic,
        report_failure: Callable[[Exception], object] = traceback.print_exception,
    ) -> None:
        self._engine = engine
        self._runner = runner
        self._overlaps = runner.overlaps
        self._channel = channel
        self._clock = clock
        self._report_failure = report_failure
        self._launched: _LaunchedStep | None = None
        self._frame_is_due = False
        self._failed_in_a_row = 0
        self._step_s = 0.0
        self._done_at_s = 0.0

    def run(self) -> NoReturn:
        """Serve until the channel raises because the parent is gone."""
        while True:
            self.turn()

    def turn(self) -> None:
        """Read once, waiting if there is nothing to do, and run a step."""
        wait_s = self._engine.wait_s(self._clock())
        is_due = [self.execute(message) for message in self._channel.read(wait_s=wait_s)]
        if any(is_due) and not self._engine.idle:
            self._send(self._engine.take_outcome())
        self._trim()
        step = self._engine.plan(self._clock())
        launched = None if step is None else self._launch(step)
        before, self._launched = self._launched, None
        if before is not None:  # the older step is committed first, even if the next one failed
            self._finish(before)
        if isinstance(launched, _LaunchedStep):
            if self._overlaps:
                self._launched = launched
            else:
                self._finish(launched)
        elif step is not None and launched is not None:
            self._fail(step, launched)
        else:
            self._send_outcome_if_due()

    def execute(self, message: messages.ToEngine) -> bool:
        """Execute a message, which a frame answers; return whether it is due before the next step.

        An abort frees resources. By a ping the parent measures how long a step takes.
        """
        self._frame_is_due = True
        match message:
            case messages.Submit(key, prompt, sampling, priority, timeout_s, salt, embed):
                self._engine.submit(
                    key,
                    prompt,
                    sampling,
                    priority=priority,
                    timeout_s=timeout_s,
                    salt=salt,
                    embed=embed,
                    tenant=message.tenant,
                )
            case messages.Prepare(key, grammar, salt, grammar_bytes):
                self._engine.prepare(key, grammar, salt=salt, grammar_bytes=grammar_bytes)
            case messages.Abort(key):
                self._engine.abort(key)
            case messages.Suspend(key):
                self._engine.suspend(key)
            case messages.Resume(key):
                self._engine.resume(key)
        return isinstance(message, messages.Abort | messages.Ping)

    def _launch(self, step: Step) -> _LaunchedStep | Exception:
        launched_at_s = self._clock()
        try:
            pending = self._runner.launch(step, self._engine.batch)
        except Exception as error:  # noqa: BLE001  whatever a device may raise
            return error
        return _LaunchedStep(step, pending, launched_at_s)

    def _finish(self, launched: _LaunchedStep) -> None:
        try:
            sampled = launched.pending.wait()
        except Exception as error:  # noqa: BLE001  as above
            self._fail(launched.step, error)
            return
        done_at_s = self._clock()
        # Overlapping steps wait for one another on the device: each is timed from the end of the last.
        self._step_s += done_at_s - max(launched.launched_at_s, self._done_at_s)
        self._done_at_s = done_at_s
        self._failed_in_a_row = 0
        self._send(self._engine.commit(launched.step, sampled))

    def _fail(self, step: Step, error: Exception) -> None:
        self._failed_in_a_row += 1
        if self._failed_in_a_row == FAILED_STEPS_BOUND:
            raise error
        self._report_failure(error)
        self._send(self._engine.fail(step, f"the engine's step failed: {type(error).__name__}: {error}"))

    def _trim(self) -> None:
        """Trim the prefix cache while idle, and release the memory of free blocks."""
        trimmed = self._engine.trim_if_due(self._clock())
        if trimmed is not None:
            self._runner.release(trimmed.free)
            self._frame_is_due |= trimmed.evicted > 0  # the parent displays the cache's usage

    def _send_outcome_if_due(self) -> None:
        """Send what needed no step: refusals, timeouts, new counts after an abort or a trim."""
        outcome = self._engine.take_outcome()
        if self._frame_is_due or outcome.outputs:
            self._send(outcome)

    def _send(self, outcome: Outcome) -> None:
        self._frame_is_due = False
        statistics = msgspec.structs.replace(self._engine.statistics(), step_s=self._step_s)
        self._channel.write(
            messages.StepOutputs(outcome.keys, outcome.tokens, outcome.outputs, statistics, outcome.counts)
        )
