"""The views of the queue: its totals, an estimate, and the cancellation of a job."""

from fairlead.base.errors import NotFound, quoted
from fairlead.dialects.shapes import CancelledRequest
from fairlead.server.routes.request import Request, Response, json_response
from fairlead.server.routes.request_reader import RequestReader


class QueueRoutes:
    """The views of `/queue`, `/queue/estimate` and `/v1/requests/{request_id}/cancel`."""

    def __init__(self, reader: RequestReader) -> None:
        self._reader = reader
        self._jobs = reader.jobs
        self._services = self._jobs.services

    async def queue(self, _request: Request) -> Response:
        """Return the queue's totals."""
        await self._services.refresh()
        return json_response(self._services.queue_statistics())

    async def estimate(self, request: Request) -> Response:
        """Return the forecast for a new job of the caller; `?model=` and `X-Priority` are as in a job."""
        model = self._jobs.models.find(request.api_key, request.query("model"))
        caller = self._reader.identify(request)
        priority, team = self._jobs.priority(caller), self._jobs.team(caller)[0]
        return json_response(await self._services.estimate(model, caller.tenant, priority, team))

    async def cancel(self, request: Request) -> Response:
        """End a queued or running job of the same key and user; for an operator's key, of anybody.

        A job that the caller may not end is reported as not found. A key for some models ends only jobs for
        these, besides its own.
        """
        request_id = request.path_parameters["request_id"]
        by, key = self._reader.requester(request), request.api_key
        is_operator = key is not None and key.has_role("operator")
        models = self._services.scope_of(key).models if is_operator else frozenset[str]()
        if not await self._services.gateway.cancel(request_id, by, others=models):
            raise NotFound(f"no request {quoted(request_id)} of yours is waiting or running")
        return json_response(CancelledRequest(request_id, "request", "cancelled"))
