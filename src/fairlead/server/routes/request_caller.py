"""From an HTTP request to its caller: its tenant, its owner, and what its headers say about its job."""

from functools import partial

from fairlead.base.config import QueueConfig
from fairlead.base.job import Job
from fairlead.dialects.fields import CommonFields, Envelope
from fairlead.generation.caller import Caller
from fairlead.router.quotas.access import flag_of, gateway_priority_of, requester_of, tenant_of
from fairlead.server.listener.refusals import LOGGED_LENGTH
from fairlead.server.routes.request import Request


def identify(request: Request, queue: QueueConfig, envelope: CommonFields | None = None) -> Caller:
    """Return the caller of a request with these fields, if it has a body. Set `request.user`.

    The headers take precedence over the body. Raises `InvalidRequest`.
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
        headers=request.scope["headers"],
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


def _admitted(request: Request, job: Job) -> None:
    """Leave the request's account to the gateway. The response has the job's id."""
    request.request_id = job.request_id
    request.is_job = True
    if job.relay is None:
        request.leave_body()
