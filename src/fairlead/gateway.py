"""One job's life: take a seat, generate, give the seat back. Read this first.

`serve` runs in the nursery of the exchange that asked for it. It reports `started` when the first delta is
there, so until then a refusal is a plain exception with a real status. After that the route reads the
deltas at its client's pace, while this task holds the seat for exactly as long as the node works: a slow
client keeps no seat, and a client that leaves cancels the nursery, which unwinds everything below.
"""

import msgspec
import trio

from fairlead.dispatch.dispatcher import Dispatcher, Seat
from fairlead.dispatch.forecast import Forecast
from fairlead.errors import Cancelled, FairleadError, RequestTimeout
from fairlead.job import Job
from fairlead.nodes.deltas import Deltas


class Answer(msgspec.Struct, frozen=True):
    """What the route gets when the first delta is there. Who did not wait has no estimate and no position."""

    deltas: Deltas
    waited_s: float
    estimated_wait_s: int | None = None
    estimated_wait_p90_s: int | None = None
    queue_position: int | None = None


class Gateway:
    """Serves jobs. `request_timeout_s` runs from the grant of the seat; the wait before it is the queue's."""

    def __init__(self, dispatcher: Dispatcher, *, request_timeout_s: float) -> None:
        self._dispatcher = dispatcher
        self._request_timeout_s = request_timeout_s

    async def serve(
        self, job: Job, *, task_status: trio.TaskStatus[Answer] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Run the job; report its `Answer` at the first delta.

        Raises a `FairleadError` before that, never after: later failures come through the deltas.
        """
        answer: Answer | None = None
        try:
            async with self._dispatcher.seat(job) as seat:
                with trio.move_on_after(self._request_timeout_s) as clock:
                    async with seat.node.generate(job) as deltas:
                        await deltas.started()
                        seat.begin(lambda: deltas.tokens)
                        answer = _answer(deltas, seat)
                        task_status.started(answer)
                        await deltas.ended()
                if clock.cancelled_caught:
                    raise RequestTimeout(f"the request ran longer than {self._request_timeout_s:g} s")
        except FairleadError as error:
            if answer is None:
                raise
            answer.deltas.fail(error)

    def waiting(self, request_id: str) -> Forecast | None:
        """Return the place and estimate of a job that waits; None if it does not."""
        return self._dispatcher.waiting(request_id)

    def cancel(self, request_id: str, owner: str) -> bool:
        """End a waiting or running job of this owner; its own client is told. False if there is none."""
        return self._dispatcher.cancel(request_id, owner, Cancelled("the request was cancelled"))


def _answer(deltas: Deltas, seat: Seat) -> Answer:
    told = seat.forecast
    if told is None:
        return Answer(deltas, seat.waited_s)
    return Answer(deltas, seat.waited_s, told.estimated_wait_s, told.estimated_wait_p90_s, told.position)
