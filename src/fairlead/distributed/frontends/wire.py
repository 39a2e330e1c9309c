"""The messages between a front and the dispatcher, and errors as values.

A front numbers its jobs. Of each job it sends `SubmitJob`, then perhaps `BeginJob`, `SequenceEnded` and
`RequeueJob`, and in any case `EndJob`, which releases what the job holds. The dispatcher answers with
`JobQueued`, `SeatGranted`, `SequenceGranted`, `SequencePaused`, `JobRefused` and `JobStopped`. After it has
connected again, a front declares all jobs that it has.
"""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from fairlead.base.errors import FairleadError
from fairlead.base.grant import Grant
from fairlead.router.dispatch.estimates import WaitEstimate
from fairlead.router.dispatch.held_sequences import Index
from fairlead.router.dispatch.job_spec import JobSpec
from fairlead.router.dispatch.tenant_counters import TenantCounters
from fairlead.router.dispatch.waiter import HeldSeat, SeatLoss, Seconds
from fairlead.store.records import KeySet

HEARTBEAT_S = 1.0
SILENCE_S = 3.0
"""After this time without a message, the peer counts as gone."""

TokenCount = Annotated[int, Meta(ge=0, le=2**40)]
Epoch = Annotated[int, Meta(ge=0, le=2**53)]


class ErrorValue(msgspec.Struct, frozen=True, array_like=True):
    """A `FairleadError`: its class by name, and its hints."""

    kind: str
    message: str
    param: str | None = None
    retry_after_s: int | None = None
    estimated_wait_s: int | None = None
    queue_position: int | None = None

    @classmethod
    def of(cls, error: FairleadError) -> "ErrorValue":
        """Return the value of an error."""
        return cls(
            type(error).__name__,
            error.message,
            error.param,
            error.retry_after_s,
            error.estimated_wait_s,
            error.queue_position,
        )

    def error(self) -> FairleadError:
        """Return the error, as a `FairleadError` if this version does not have its class."""
        kind = _kinds(FairleadError).get(self.kind, FairleadError)
        return kind(
            self.message,
            param=self.param,
            retry_after_s=self.retry_after_s,
            estimated_wait_s=self.estimated_wait_s,
            queue_position=self.queue_position,
        )


def _kinds(base: type[FairleadError]) -> dict[str, type[FairleadError]]:
    found = {base.__name__: base}
    for kind in base.__subclasses__():
        found.update(_kinds(kind))
    return found


# Front → dispatcher --------------------------------------------------------------------------------


class SubmitJob(msgspec.Struct, frozen=True, array_like=True, tag="submit"):
    """A new job."""

    number: int
    job: JobSpec


class DeclareJob(msgspec.Struct, frozen=True, array_like=True, tag="declare"):
    """A job that arrived before this connection, `age_s` seconds ago.

    `seat`: the one that it holds. `released`: the grant of its last seat, which failed. `tokens`: how many it
    has generated. `has_begun`: its first delta has arrived, perhaps from an earlier seat.
    """

    number: int
    job: JobSpec
    age_s: Seconds
    seat: HeldSeat | None = None
    released: Grant | None = None
    tokens: TokenCount = 0
    has_begun: bool = False


class Declared(msgspec.Struct, frozen=True, array_like=True, tag="declared"):
    """All jobs that arrived before this connection have been declared. Ends all others of this front.

    `counters`: those that the front got from an earlier dispatcher.
    """

    counters: TenantCounters = TenantCounters()


class BeginJob(msgspec.Struct, frozen=True, array_like=True, tag="begin"):
    """The job's first delta has arrived."""

    number: int


class SequenceEnded(msgspec.Struct, frozen=True, array_like=True, tag="sequence"):
    """A sequence of the job has ended, and gives its seat back."""

    number: int
    index: Index


class RequeueJob(msgspec.Struct, frozen=True, array_like=True, tag="requeue"):
    """The job's node has failed or is full; see `Seat.requeue`."""

    number: int
    loss: SeatLoss


class EndJob(msgspec.Struct, frozen=True, array_like=True, tag="end"):
    """The job is over, in any state. It has generated this many tokens.

    `has_failed`: its node has failed, and it was not queued again.
    """

    number: int
    tokens: TokenCount
    has_failed: bool = False


class Progress(msgspec.Struct, frozen=True, array_like=True, tag="progress"):
    """The tokens that running jobs have generated so far, by number.

    Sent every second, also if empty, and as the answer to `CountTokens`.
    """

    tokens: dict[int, TokenCount]


class Ask(msgspec.Struct, frozen=True, array_like=True, tag="ask"):
    """A question or an order: the name of a function of the dispatcher, and its arguments."""

    number: int
    question: str
    arguments: tuple[Any, ...] = ()


class EpochSeen(msgspec.Struct, frozen=True, array_like=True, tag="seen"):
    """The answer to a `Welcome` that is not accepted: the front has seen this epoch of another dispatcher."""

    epoch: Epoch


ToDispatcher = (
    SubmitJob
    | DeclareJob
    | Declared
    | BeginJob
    | SequenceEnded
    | RequeueJob
    | EndJob
    | Progress
    | Ask
    | EpochSeen
)

# Dispatcher → front --------------------------------------------------------------------------------


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag="welcome"):
    """The first message. A front accepts no dispatcher with a lower `epoch` than one seen before.

    `run` is unique to this run of a dispatcher: another one with the same epoch is not accepted either. The
    message is sent again when the epoch is raised.
    """

    epoch: Epoch
    run: str = ""


class Standby(msgspec.Struct, frozen=True, array_like=True, tag="standby"):
    """The dispatcher does not lead, or may not raise its epoch."""


class JobQueued(msgspec.Struct, frozen=True, array_like=True, tag="queued"):
    """The job waits. `estimate` was made when it arrived."""

    number: int
    estimate: WaitEstimate | None


class SeatGranted(msgspec.Struct, frozen=True, array_like=True, tag="granted"):
    """The job has a seat for its first sequence; if it `is_whole`, all its seats."""

    number: int
    node_id: str
    grant: Grant
    waited_s: float
    is_whole: bool = True


class SequenceGranted(msgspec.Struct, frozen=True, array_like=True, tag="next"):
    """Another sequence of the job has a seat, at the same node."""

    number: int
    index: Index
    grant: Grant


class SequencePaused(msgspec.Struct, frozen=True, array_like=True, tag="paused"):
    """A sequence of the job is suspended, or goes on."""

    number: int
    index: Index
    is_paused: bool


class CountTokens(msgspec.Struct, frozen=True, array_like=True, tag="count"):
    """Jobs wait for what runs: its `Progress` is needed now."""


class JobRefused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """The job gets no seat (any more)."""

    number: int
    error: ErrorValue


class JobStopped(msgspec.Struct, frozen=True, array_like=True, tag="stopped"):
    """The job has to end now."""

    number: int
    error: ErrorValue


class Answered(msgspec.Struct, frozen=True, array_like=True, tag="answered"):
    """The answer to a question: a value, or the error that the function raised."""

    number: int
    value: Any = None
    error: ErrorValue | None = None


class Heartbeat(msgspec.Struct, frozen=True, array_like=True, tag="heartbeat"):
    """The dispatcher is there. Sent every second, with the counters of tenants that have changed.

    The first one of a connection has all counters; None before the dispatcher has its predecessor's.
    """

    counters: TenantCounters | None = None


class StoredKeys(msgspec.Struct, frozen=True, array_like=True, tag="keys"):
    """All keys and budgets of the store. Sent when a front has connected, and after each change.

    `number` grows with each change of this dispatcher's; the front answers it as `keys_seen`.
    """

    number: int
    keys: KeySet


ToFront = (
    Welcome
    | Standby
    | JobQueued
    | SeatGranted
    | SequenceGranted
    | SequencePaused
    | CountTokens
    | JobRefused
    | JobStopped
    | Answered
    | Heartbeat
    | StoredKeys
)

to_dispatcher_decoder = msgspec.msgpack.Decoder(ToDispatcher)
to_front_decoder = msgspec.msgpack.Decoder(ToFront)
