"""The last requests that ended, and which requests a caller may see. Pure, and bounded.

A request is recorded by the process that has served it, and kept by the dispatcher's, or the only one. What
is computed of requests (shares, times, errors) is in `activity`.
"""

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from fairlead.generation.timeline import RequestTimeline
from fairlead.generation.usage import route_of
from fairlead.router.dispatch.open_jobs import OpenJob
from fairlead.router.quotas.access import BATCH_PREFIX

KEPT = 1000
"""How many requests that ended are kept."""

State = Literal["waiting", "running", "ended"]

# Bounds for messages of other processes.
Count = Annotated[int, Meta(ge=0, le=2**53)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]


class EndedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request that has ended.

    number: grows with each request of the process that has served it.
    request_id: the client's id for it.
    tenant: whose turn it took.
    team: the team of its key; "": none.
    team_weight: the team's weight.
    owner: the id of its key, and the user that a trusted key names.
    model: its model.
    priority: an index into `queue.classes`.
    route: the path of its route.
    node: where it ran last; None: nowhere.
    outcome: success, client_left, or an error's code.
    problem: the message of the error, as the client got it; "": none.
    ended_at: in seconds since 1970.
    wait_s: how long it waited for its first seat.
    first_token_s: the time from its arrival to its first token; None: there was none.
    took_s: the time from its arrival to its end.
    token_gap_s: the mean time between two tokens of a choice; None: there was none.
    prompt_tokens: the tokens of its prompt.
    cached_tokens: how many of these were cached.
    tokens: the tokens of its answer.
    seats: how many seats it held at most.
    attempts: at how many nodes it ran.
    """

    number: Count = 0
    request_id: str
    tenant: str
    team: str = ""
    team_weight: float = 1.0
    owner: str = ""
    model: str
    priority: Annotated[int, Meta(ge=0, le=7)] = 1
    route: str = ""
    node: str | None = None
    outcome: str
    problem: str = ""
    ended_at: float
    wait_s: Seconds = 0.0
    first_token_s: Seconds | None = None
    took_s: Seconds = 0.0
    token_gap_s: Seconds | None = None
    prompt_tokens: Count = 0
    cached_tokens: Count = 0
    tokens: Count = 0
    seats: Count = 0
    attempts: Count = 0

    @property
    def tokens_per_s(self) -> float | None:
        """The rate of its answer after the first token; None without one."""
        if self.first_token_s is None or self.took_s <= self.first_token_s or self.tokens < 2:
            return None
        return (self.tokens - 1) / (self.took_s - self.first_token_s)


def ended_request_of(timeline: RequestTimeline, now: float, number: int = 0) -> EndedRequest:
    """Return the record of a finished job.

    timeline: the job's.
    now: the time of its end, in seconds since 1970.
    number: that of the record.
    """
    job, ended_s = timeline.job, timeline.ended_s or timeline.arrived_s
    first_s = timeline.first_delta_s
    return EndedRequest(
        number=number,
        request_id=job.request_id,
        tenant=job.tenant,
        team=job.team,
        team_weight=job.team_weight,
        owner=job.owner,
        model=job.model,
        priority=job.priority,
        route=route_of(job.path),
        node=timeline.node,
        outcome=timeline.outcome,
        problem=timeline.problem,
        ended_at=now,
        wait_s=timeline.waited_s,
        first_token_s=None if first_s is None else first_s - timeline.arrived_s,
        took_s=ended_s - timeline.arrived_s,
        token_gap_s=timeline.token_gap_s if timeline.token_gaps and first_s is not None else None,
        prompt_tokens=max(0, min(job.prompt_tokens, 2**40)),
        cached_tokens=max(0, min(timeline.cached_tokens, 2**40)),
        tokens=max(0, min(timeline.tokens, 2**40)),
        seats=0 if timeline.granted_s is None else 1 if job.embed else job.sequences,
        attempts=timeline.attempts,
    )


class RequestScope(msgspec.Struct, frozen=True):
    """Which requests a caller may see.

    models: those for these models; None: for all.
    tenant: only those of this tenant, and of its batches; None: of all.
    key: besides the tenant's, those of the key with this id: of a trusted key, which names its users.
    """

    models: frozenset[str] | None = None
    tenant: str | None = None
    key: str | None = None

    def includes(self, tenant: str) -> bool:
        """Return whether the caller may see all of a tenant."""
        return self.tenant is None or tenant in (self.tenant, f"{BATCH_PREFIX}{self.tenant}")

    def sees(self, request: EndedRequest | OpenJob) -> bool:
        """Return whether the caller may see a request."""
        if self.models is not None and request.model not in self.models:
            return False
        if self.includes(request.tenant):
            return True
        return self.key is not None and request.owner.partition("/")[0] == self.key


class RequestQuery(msgspec.Struct, frozen=True):
    """Which of the requests that a caller may see are wanted. A field that is None selects nothing.

    state: in this state.
    model: for this model.
    tenant: of this tenant.
    team: of this team.
    node: at this node.
    outcome: with this outcome; `failed`: with any but success.
    priority: in this class, an index into `queue.classes`.
    limit: at most so many that are open, and so many that ended.
    """

    state: State | None = None
    model: str | None = None
    tenant: str | None = None
    team: str | None = None
    node: str | None = None
    outcome: str | None = None
    priority: int | None = None
    limit: int = KEPT

    def selects(self, request: EndedRequest | OpenJob) -> bool:
        """Return whether a request is wanted, apart from its state."""
        wanted = (self.model, self.tenant, self.team, self.node, self.priority)
        found = (request.model, request.tenant, request.team, request.node, request.priority)
        if any(want not in (None, has) for want, has in zip(wanted, found, strict=True)):
            return False
        if self.outcome is None:
            return True
        if isinstance(request, OpenJob):
            return False
        return request.outcome == self.outcome or (self.outcome == "failed" and request.outcome != "success")


class Requests(msgspec.Struct, frozen=True):
    """Requests that were asked for.

    open: those that wait or run, in the order in which they arrived.
    ended: those that ended, the latest first.
    waiting: how many of the former wait, also beyond the limit.
    running: how many run.
    """

    open: tuple[OpenJob, ...] = ()
    ended: tuple[EndedRequest, ...] = ()
    waiting: int = 0
    running: int = 0


class RequestHistory:
    """The last `KEPT` requests that ended. `kept` is lower in tests."""

    def __init__(self, kept: int = KEPT) -> None:
        self._ended: deque[EndedRequest] = deque(maxlen=kept)

    def __iter__(self) -> Iterator[EndedRequest]:
        return reversed(self._ended)

    def add(self, request: EndedRequest) -> None:
        """Add a request that has ended."""
        self._ended.append(request)

    def find(self, scope: RequestScope, query: RequestQuery) -> tuple[EndedRequest, ...]:
        """Return the wanted ones that the caller may see, the latest first."""
        if query.state not in (None, "ended"):
            return ()
        found = (request for request in self if scope.sees(request) and query.selects(request))
        return tuple(request for request, _ in zip(found, range(query.limit), strict=False))


def select(
    open_jobs: Iterable[OpenJob], history: RequestHistory, scope: RequestScope, query: RequestQuery
) -> Requests:
    """Return the wanted requests that a caller may see.

    open_jobs: those that wait or run.
    history: those that ended.
    scope: what the caller may see.
    query: what is wanted.
    """
    found = [job for job in open_jobs if scope.sees(job) and query.selects(job)]
    states = Counter(job.state for job in found)
    wanted = [job for job in found if query.state in (None, job.state)]
    return Requests(
        open=tuple(wanted[: query.limit]),
        ended=history.find(scope, query),
        waiting=states["waiting"],
        running=states["running"],
    )
