"""The memory of answers that wait for their clients: one budget, of which each tenant has a share.

The bytes of an answer count that the kernel does not take, and the deltas that its stream cannot send yet.
Bytes that several clients are sent count for each of them. When the budget is used up, the tenant with the
most loses answers, those first whose clients have not read for the longest time: their connections are
closed. A tenant within its share loses nothing, and a client that reads loses its answer last.

A single answer may be larger than the budget. It counts as all of it, so it is dropped only when another
tenant needs memory. Buffers of the kernel do not count.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial

import structlog

from fairlead.generation.metrics.job_metrics import LABELS_AT_MOST, OTHER
from fairlead.generation.shares import Holding, Shares
from fairlead.server.listener.asgi import Direct
from fairlead.server.listener.refusals import LOGGED_LENGTH
from fairlead.server.routes.request import Request
from fairlead.server.routes.request_caller import tenant_so_far

logger = structlog.get_logger("fairlead.server.routes")


class UnreadAnswers:
    """All answers that wait. `total` is the budget in bytes; `shown` returns a tenant's name for the log."""

    def __init__(self, total: int, shown: Callable[[str], str] = str) -> None:
        self.shares = Shares(total)
        self._shown = shown
        self._dropped: Counter[str] = Counter()

    @property
    def bytes_waiting(self) -> int:
        """The bytes that count now."""
        return self.shares.taken

    def dropped(self) -> Mapping[str, int]:
        """Return the number of dropped answers, by tenant."""
        return dict(self._dropped)

    def of(self, request: Request, direct: Direct | None) -> "UnreadAnswer":
        """Return the count of a request's response, which `request` and `direct` use from here on.

        Without our own listener, what waits in the server's buffers is not known, and a dropped response is
        left incomplete.
        """
        drop = partial(_cancel, request) if direct is None else direct.abort
        answer = request.unread = UnreadAnswer(self, request, drop)
        if direct is not None:
            direct.unread = answer
        return answer

    def grow(self, holding: Holding, amount: int) -> None:
        """Count this amount more, and drop answers above the budget."""
        for revoked in self.shares.grow(holding, amount):
            tenant = revoked.name
            label = tenant if tenant in self._dropped or len(self._dropped) < LABELS_AT_MOST else OTHER
            self._dropped[label] += 1
            answer: UnreadAnswer = revoked.owner
            answer.drop(self._shown(tenant))


class UnreadAnswer:
    """The bytes of one answer that wait for its client. Ends with `leave`, or when it is dropped.

    Its tenant is computed when it first has to wait, since most answers never do. `abort` closes its
    connection.
    """

    __slots__ = ("_abort", "_answers", "_holding", "_request", "waiting")

    def __init__(self, answers: UnreadAnswers, request: Request, abort: Callable[[], None]) -> None:
        self._answers = answers
        self._request: Request | None = request
        self._abort: Callable[[], None] | None = abort
        self._holding: Holding | None = None
        self.waiting = 0

    def add(self, size: int) -> None:
        """Count bytes that wait from now on. This may drop answers, also this one."""
        if self._request is None or not size:
            return
        if self._holding is None:
            self._holding = self._answers.shares.enter(tenant_so_far(self._request), owner=self)
            self._answers.shares.spare(self._holding)  # its client may read: those that do not go first
        self.waiting += size
        self._answers.grow(self._holding, self._counted() - self._holding.amount)

    def progress(self) -> None:
        """Record that the client has read some."""
        if self._holding is not None:
            self._answers.shares.spare(self._holding)

    def remove(self, size: int) -> None:
        """Stop counting bytes that the client has read."""
        if self._holding is not None and size:
            self.waiting -= size
            self._answers.shares.shrink(self._holding, self._holding.amount - self._counted())
            self._answers.shares.spare(self._holding)

    def leave(self) -> None:
        """Stop counting: the answer has ended."""
        if self._holding is not None:
            self._answers.shares.leave(self._holding)
            self._holding.owner = None
        self._holding = self._request = self._abort = None  # the request refers to this: a reference cycle

    def drop(self, tenant: str) -> None:
        """End the answer, whose memory was revoked, and log that. `tenant` is its shown name."""
        request, abort = self._request, self._abort
        assert request is not None
        assert abort is not None
        logger.warning(
            "unread answer dropped",
            request_id=request.request_id,  # not that of the request that needs the memory
            tenant=tenant,
            client=request.address,
            path=request.path[:LOGGED_LENGTH],
            bytes=self.waiting,
            reason="the tenant's clients leave more unread than its share of limits.answersBytes",
        )
        self.leave()
        abort()

    def _counted(self) -> int:
        return min(self.waiting, self._answers.shares.total)


def _cancel(request: Request) -> None:
    request.nursery.cancel_scope.cancel()
