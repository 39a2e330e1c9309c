"""The sequences of a child process that have not ended, and the delivery of their outputs."""

from collections.abc import Callable
from time import perf_counter
from typing import Protocol

import trio

from fairlead.base import messages
from fairlead.base.errors import (
    EngineFailed,
    FairleadError,
    InvalidRequest,
    NodeFailed,
    RequestTimeout,
    StaleGrant,
)
from fairlead.base.supervision import PASSING, FailureBoundary, described, log_failure

# Delivering a step to 500 sequences takes several milliseconds. Other tasks can run at these intervals.
DELIVERY_SLICE_S = 0.0005


class Receiver(Protocol):
    """Receives the outputs of a sequence. No method is called after its end; one that raises fails it."""

    def receive_token(self, token_id: int) -> None:
        """Receive one more token, and nothing else."""

    def receive(self, output: messages.Output) -> None:
        """Receive the output of a step; the last one has a `finish_reason`."""

    def failed(self, error: FairleadError) -> None:
        """Receive the error that ended the sequence.

        It is `EngineFailed`, `RequestTimeout`, `StaleGrant`, `InvalidRequest` if its grammar or a field was
        refused, or `NodeFailed` if the child is gone.
        """


class OpenSequences:
    """Receivers by the sequence's key. `abort` is called with it after the receiver has raised."""

    def __init__(self, abort: Callable[[int], None]) -> None:
        self._abort = abort
        self._receivers: dict[int, Receiver] = {}

    def __len__(self) -> int:
        return len(self._receivers)

    def __contains__(self, key: int) -> bool:
        return key in self._receivers

    def add(self, key: int, receiver: Receiver) -> None:
        self._receivers[key] = receiver

    def remove(self, key: int) -> bool:
        """Return whether the sequence was open. Its receiver is not called any more."""
        return self._receivers.pop(key, None) is not None

    def fail_all(self, reason: str) -> None:
        """Fail the sequences in their order; each once, and none that another's callback aborts."""
        while self._receivers:
            _fail(self._receivers.pop(next(iter(self._receivers))), NodeFailed(reason))

    async def deliver(self, step: messages.StepOutputs) -> None:
        """Deliver a step's outputs to the receivers, with checkpoints so that other tasks can run."""
        slice_ends = perf_counter() + DELIVERY_SLICE_S
        for key, token_id in step.plain():
            receiver = self._receivers.get(key)
            if receiver is not None:  # else it was aborted, which the child had not read yet
                try:
                    receiver.receive_token(token_id)
                except BaseException as error:  # noqa: BLE001  `_drop` raises `PASSING` again
                    self._drop(key, receiver, error)
            if perf_counter() >= slice_ends:
                await trio.lowlevel.checkpoint()
                slice_ends = perf_counter() + DELIVERY_SLICE_S
        for output in step.outputs:
            self._deliver_output(output)
            if perf_counter() >= slice_ends:
                await trio.lowlevel.checkpoint()
                slice_ends = perf_counter() + DELIVERY_SLICE_S

    def _deliver_output(self, output: messages.Output) -> None:
        receiver = self._receivers.get(output.key)
        if receiver is None:
            return
        if output.error is not None or output.finish_reason is not None:
            del self._receivers[output.key]
        if output.error is None:
            try:
                receiver.receive(output)
            except BaseException as error:  # noqa: BLE001  as above
                self._drop(output.key, receiver, error)
        elif output.code == "request_timeout":
            _fail(receiver, RequestTimeout(output.error))
        elif output.code == "stale_grant":
            _fail(receiver, StaleGrant(output.error))
        elif output.code in {"grammar_failed", "invalid_request"}:  # a grammar may be made of schemas
            _fail(receiver, InvalidRequest(output.error, param=output.param))
        else:
            _fail(receiver, EngineFailed(output.error))

    def _drop(self, key: int, receiver: Receiver, error: BaseException) -> None:
        """Abort a sequence after its receiver has raised. The others continue."""
        if isinstance(error, PASSING):
            raise error
        log_failure("sequence dropped", error, key=key)
        self._abort(key)
        _fail(receiver, EngineFailed(f"the answer could not be delivered: {described(error)}"))


def _fail(receiver: Receiver, error: FairleadError) -> None:
    with FailureBoundary() as boundary:
        receiver.failed(error)
    if boundary.failure is not None:
        log_failure("failure not reported", boundary.failure, of=error.message)
