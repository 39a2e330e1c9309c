"""One job's life: take a seat, generate, give the seat back. Read this first.

`serve` runs in the nursery of the exchange that asked for it. It reports `started` when the first delta is
there, so until then a refusal is a plain exception with a real status. After that the route reads the
deltas at its client's pace, while this task holds the seat for exactly as long as the node works: a slow
client keeps no seat, and a client that leaves cancels the nursery, which unwinds everything below.
"""

from math import inf

import msgspec
import trio

from fairlead.dispatch.dispatcher import Dispatcher, Seat
from fairlead.errors import FairleadError, QueueTimeout, RequestTimeout
from fairlead.job import Job
from fairlead.nodes.deltas import Deltas


class Answer(msgspec.Struct, frozen=True):
    """What the route gets when the first delta is there. Who did not wait has no estimate and no position."""

    deltas: Deltas
    waited_s: float
    estimated_wait_s: int | None
    queue_position: int | None


class Gateway:
    """Serves jobs. `queue_timeout_s` runs from arrival, `request_timeout_s` from the grant of the seat."""

    def __init__(self, dispatcher: Dispatcher, *, queue_timeout_s: float, request_timeout_s: float) -> None:
        self._dispatcher = dispatcher
        self._queue_timeout_s = queue_timeout_s
        self._request_timeout_s = request_timeout_s

    async def serve(
        self, job: Job, *, task_status: trio.TaskStatus[Answer] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Run the job; report its `Answer` at the first delta.

        Raises a `FairleadError` before that, never after: later failures come through the deltas.
        """
        queue_deadline = trio.current_time() + self._queue_timeout_s
        request_deadline = inf
        answer: Answer | None = None
        # One scope for both clocks: its deadline moves on as the job does.
        with trio.CancelScope(deadline=queue_deadline) as clock:
            async with self._dispatcher.seat(job) as seat:
                request_deadline = trio.current_time() + self._request_timeout_s
                # Spec 2: the wait of a streaming request ends with its first delta, not with the seat.
                clock.deadline = min(queue_deadline, request_deadline) if job.stream else request_deadline
                async with seat.node.generate(job) as deltas:
                    await deltas.started()
                    clock.deadline = request_deadline
                    answer = _answer(deltas, seat)
                    task_status.started(answer)
                    await deltas.ended()
        if clock.cancelled_caught:
            error = self._timed_out(late=clock.deadline >= request_deadline)
            if answer is None:
                raise error
            answer.deltas.fail(error)

    def _timed_out(self, *, late: bool) -> FairleadError:
        if late:
            return RequestTimeout(f"the request ran longer than {self._request_timeout_s:g} s")
        return QueueTimeout(
            f"the request waited longer than {self._queue_timeout_s:g} s for its turn",
            estimated_wait_s=self._dispatcher.estimated_wait_s(),
        )


def _answer(deltas: Deltas, seat: Seat) -> Answer:
    return Answer(deltas, seat.waited_s, seat.estimated_wait_s, seat.queue_position)
