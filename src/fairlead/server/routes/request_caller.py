"""From an HTTP request to its caller: its tenant, its owner, and what its headers say about its job."""

from functools import partial

from fairlead.base.config import QueueConfig
from fairlead.base.job import Job
from fairlead.dialects.fields import CommonFields, Envelope
from fairlead.generation.caller import Caller
from fairlead.router.quotas.access import flag_of, gateway_priority_of, requester_of, tenant_of
from fairlead.server.listener.refusals import LOGGED_LENGTH
from fairlead.server.routes.request import Request


def identify(
    request: Request, queue: QueueConfig, envelope: CommonFields | None = None, *, header_prefix: str = ""
) -> Caller:
    """Return the caller of a request. Set `request.user`. Raises `InvalidRequest`.

    request: Its headers take precedence over the body.
    queue: The settings of priority classes.
    envelope: What was read of the body; None: it has none.
    header_prefix: Nodes get headers whose names begin with it; "": none.
    """
    if envelope is not None:
        request.user = envelope.user or envelope.safety_identifier
    return Caller(
        nursery=request.nursery,
        request_id=request.request_id,
        tenant=tenant_so_far(request),
        api_key=request.api_key,
        owner=owner_so_far(request),
        user=request.user,
        priority=_requested_class(request, queue) or (envelope.priority if envelope is not None else None),
        no_queue=flag_of(request.headers, "X-No-Queue"),
        wait_limit_s=request.flow.wait_limit_s,
        streams=isinstance(envelope, Envelope) and envelope.wants_stream,
        body_bytes=request.body_bytes,
        headers=_headers_of(request, header_prefix) if header_prefix else (),
        traceparent=request.headers.get("traceparent", ""),
        path=request.path[:LOGGED_LENGTH],
        address=request.address,
        unread=request.unread,
        admitted=partial(_admitted, request),
    )


def tenant_so_far(request: Request) -> str:
    """Return the tenant that the request counts for, as far as it has been read."""
    return tenant_of(
        request.api_key,
        request.headers,
        request.address,
        user=request.user,
        safety_identifier=None,
        fairness_id=request.flow.fairness_id,
    )


def owner_so_far(request: Request) -> str:
    """Return who may read, continue and cancel what the request makes (see `requester_of`)."""
    return requester_of(
        request.api_key, request.headers, user=request.user, fairness_id=request.flow.fairness_id
    )


def _requested_class(request: Request, queue: QueueConfig) -> str | None:
    """Return the class that a trusted gateway names, as far as the key allows it, or the header's."""
    if request.flow.priority is not None:
        return queue.classes[gateway_priority_of(request.api_key, request.flow.priority, queue)]
    return request.headers.get("X-Priority")


def _headers_of(request: Request, prefix: str) -> tuple[tuple[str, str], ...]:
    """Return the headers whose names begin with the prefix, each name once."""
    found: dict[str, str] = {}
    for raw_name, raw_value in request.scope["headers"]:
        name, value = raw_name.decode("latin-1").lower(), raw_value.decode("latin-1").strip()
        if name.startswith(prefix) and value:
            found[name] = f"{found[name]},{value}" if name in found else value
    return tuple(found.items())


def _admitted(request: Request, job: Job) -> None:
    """Leave the request's account to the gateway. The response has the job's id."""
    request.request_id = job.request_id
    request.is_job = True
    if job.relay is None:
        request.leave_body()
