"""The caller of a job: all that a job needs besides its content. Independent of HTTP.

An HTTP request has a caller, and a response in the background has its own. Whatever else has work for a model
makes one, and calls `prepare` and `answer` of the `GenerationPipeline`.
"""

from collections.abc import Callable, Sequence
from typing import Required, TypedDict

import msgspec
import trio

from fairlead.base.config import ApiKey
from fairlead.base.job import AnswerParts, Job, Relay, Sampling
from fairlead.base.unread import UnreadBytes

MAX_REQUEST_ID_LENGTH = 128


def _nothing(_job: Job) -> None:
    """Do nothing when the job is admitted."""


class Caller(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The sender of one request to a model, the limits of its job, and the nursery of all work for it.

    nursery: Where all work for the request runs. Its opener cancels it at the end of the answer, or when
        the request is cancelled.
    request_id: The job's id for clients and logs, of at most `MAX_REQUEST_ID_LENGTH` characters; it gets a
        suffix while another job has the same id.
    tenant: The tenant that the job counts for.
    api_key: Limits models, priorities and quotas; None: all models, and no limits.
    owner: Who may cancel the job (see `tenancy.access.requester_of`); "": everybody.
    user: The user's name in the request, for translations to other dialects; None: it has no name.
    priority: A class by its name, or a number as in vLLM; None: the default class.
    no_queue: The job is refused if it would have to wait.
    wait_limit_s: How long the job may wait, in seconds; None: as long as the queue's timeout.
    when_idle: The job gets only seats that no other job waits for, waits for them without a limit, and fails
        with `Displaced` when another job needs its seat.
    streams: The bytes of the answer are wanted as they come.
    body_bytes: The size of the request. Long ones are handled in threads, by tenants' turns.
    headers: Names in lower case and values of what a dialect has beside its bodies; for nodes that speak it.
    traceparent: The header of W3C Trace Context; "": no trace.
    path: The route, for the log.
    address: The client's address, for the log; None: unknown.
    unread: Counts the bytes of a stream that wait for the client; None: they are not counted.
    admitted: Called when the job, with its final id, is charged and in flight.
    """

    nursery: trio.Nursery
    request_id: str
    tenant: str
    api_key: ApiKey | None = None
    owner: str = ""
    user: str | None = None
    priority: str | int | None = None
    no_queue: bool = False
    wait_limit_s: float | None = None
    when_idle: bool = False
    streams: bool = False
    body_bytes: int = 0
    headers: Sequence[tuple[str, str]] = ()
    traceparent: str = ""
    path: str = ""
    address: str | None = None
    unread: UnreadBytes | None = None
    admitted: Callable[[Job], None] = _nothing


class JobContent(TypedDict, total=False):
    """The content of a job, which does not depend on its caller. The fields are those of `Job`."""

    prompts: Required[tuple[Sequence[int], ...]]
    sampling: Required[Sampling]
    n: int
    stop: tuple[str, ...]
    stream: bool
    relay: Relay | None
    prompt_estimate: int
    embed: bool
    parts: AnswerParts | None
    grammar_field: str


def call_at_end(nursery: trio.Nursery, call: Callable[..., None], *arguments: object) -> None:
    """Call a function when the nursery is cancelled, as all nurseries of requests are at their ends."""
    nursery.start_soon(_call_at_end, call, *arguments)


async def _call_at_end(call: Callable[..., None], *arguments: object) -> None:
    try:
        await trio.sleep_forever()
    finally:
        call(*arguments)
