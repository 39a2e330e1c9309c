"""The answer that a job will have: how the task that serves it and the route that wants it meet.

The task belongs to the exchange, the answer to whoever waits for it: the route, or the body of a stream that
was answered early. Either may stop waiting at any time; the task does not notice.
"""

import trio

from fairlead.api.exchange import unwrap
from fairlead.api.services import Answer


class PendingAnswer(trio.TaskStatus[Answer]):
    """An `Answer` or the error that came instead, once it is there."""

    def __init__(self) -> None:
        self._answer: Answer | None = None
        self._error: BaseException | None = None
        self._arrival = trio.Event()

    @property
    def is_there(self) -> bool:
        """Whether there is something to `get`."""
        return self._arrival.is_set()

    @property
    def error(self) -> BaseException | None:
        """The error, if it is there."""
        return self._error

    @property
    def answer(self) -> Answer | None:
        """The answer, if it is there and is not an error."""
        return self._answer

    def started(self, value: Answer | None = None) -> None:
        """Hand over the answer: `serve` calls this, as its task status."""
        assert value is not None
        assert not self.is_there
        self._answer = value
        self._arrival.set()

    def fail(self, error: BaseException) -> None:
        """Hand over an error instead."""
        assert not self.is_there
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
