"""The jobs that wait or run, as values: their tenants, their states and their times.

Pure. The dispatcher makes the list; it may be sent to another process.
"""

from typing import Literal

import msgspec

from fairlead.router.dispatch.estimates import WaitEstimate
from fairlead.router.dispatch.ticket import TicketState
from fairlead.router.dispatch.waiter import Waiter

OpenState = Literal["waiting", "running"]


class OpenJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job that waits or runs.

    request_id: the client's id for it.
    tenant: whose turn it takes.
    team: the team of its key; "": none.
    team_weight: the team's weight.
    owner: the id of its key, and the user that a trusted key names.
    model: its model.
    priority: an index into `queue.classes`.
    state: whether it has a seat.
    node: where it runs; None: nowhere.
    position: its place in the queue, from 1; None: it runs, or too many jobs are before it.
    estimated_wait_s: how long it will still wait, in whole seconds; None: unknown.
    age_s: how long ago it arrived.
    wait_s: how long it waited for its first seat, or has waited so far.
    first_token_s: the time from its arrival to its first token; None: there is none yet.
    prompt_tokens: the tokens of its prompt.
    tokens: how many were generated so far; with several processes, a second ago.
    seats: how many it holds.
    """

    request_id: str
    tenant: str
    team: str
    team_weight: float
    owner: str
    model: str
    priority: int
    state: OpenState
    node: str | None
    position: int | None
    estimated_wait_s: int | None
    age_s: float
    wait_s: float
    first_token_s: float | None
    prompt_tokens: int
    tokens: int
    seats: int


def open_job_of(waiter: Waiter, now: float, estimate: WaitEstimate | None) -> OpenJob:
    """Return the value of a job.

    waiter: the job.
    now: the present time.
    estimate: that of its wait; None: it does not wait.
    """
    ticket, job = waiter.ticket, waiter.ticket.job
    age_s = now - waiter.arrived_at
    return OpenJob(
        request_id=job.request_id,
        tenant=job.tenant,
        team=job.team,
        team_weight=job.team_weight,
        owner=job.owner,
        model=job.model,
        priority=job.priority,
        state="running" if ticket.state is TicketState.GRANTED else "waiting",
        node=None if ticket.node is None else ticket.node.id,
        position=None if estimate is None else estimate.position,
        estimated_wait_s=None if estimate is None else estimate.estimated_wait_s,
        age_s=age_s,
        wait_s=age_s if waiter.waited_s is None else waiter.waited_s,
        first_token_s=None if waiter.begun_at is None else waiter.begun_at - waiter.arrived_at,
        prompt_tokens=job.prompt_tokens,
        tokens=waiter.generated(),
        seats=ticket.seats,
    )
