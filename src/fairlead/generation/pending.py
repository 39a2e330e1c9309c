"""The future answer of a job, between the task that serves it and its reader.

The task runs in the caller's nursery. The reader is whoever waits for the whole answer, or a stream that
began early. It may stop waiting at any time, which does not affect the task.
"""

import trio

from fairlead.base.supervision import unwrap
from fairlead.dialects.dialect import AnswerTimes
from fairlead.generation.gateway import Answer


class PendingAnswer(trio.TaskStatus[Answer]):
    """An `Answer`, or the error in its place, once available.

    times: records when it began.
    warning: which budgets are nearly spent; "": none.
    """

    def __init__(self, times: AnswerTimes | None = None, warning: str = "") -> None:
        self.warning = warning
        self._times = times
        self._answer: Answer | None = None
        self._error: BaseException | None = None
        self._arrival = trio.Event()

    @property
    def is_available(self) -> bool:
        """Whether `get` has a result."""
        return self._arrival.is_set()

    @property
    def error(self) -> BaseException | None:
        """The error, if there is one."""
        return self._error

    @property
    def answer(self) -> Answer | None:
        """The answer, if available and not an error."""
        return self._answer

    def started(self, value: Answer | None = None) -> None:
        """Set the answer: `serve` calls this, as its task status."""
        assert value is not None
        assert not self.is_available
        if self._times is not None:
            self._times.begin(value.waited_s)
        self._answer = value
        self._arrival.set()

    def fail(self, error: BaseException) -> None:
        """Set an error instead."""
        assert not self.is_available
        self._error = unwrap(error)
        self._arrival.set()

    async def get(self) -> Answer:
        """Wait for the answer and return it, or raise the error."""
        if not self._arrival.is_set():
            await self._arrival.wait()
        if self._error is not None:
            raise self._error
        assert self._answer is not None
        return self._answer
