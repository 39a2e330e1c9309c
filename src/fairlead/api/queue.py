"""The routes of the queue: its totals, an estimate, and the cancellation of a client's own job."""

from quart import Quart, g, request
from quart import Response as QuartResponse

from fairlead.api.exchange import quart_json_response
from fairlead.api.job_service import JobService
from fairlead.errors import NotFound, quoted
from fairlead.tenancy.access import owner_of


class QueueRoutes:
    """The routes `/queue`, `/queue/estimate`, `/v1/requests/{id}/cancel`."""

    def __init__(self, edge: JobService) -> None:
        self._edge = edge
        self._services = edge.services

    def add_to(self, app: Quart) -> None:
        """Register the routes."""
        app.add_url_rule("/queue", view_func=self.queue, methods=["GET"])
        app.add_url_rule("/queue/estimate", view_func=self.estimate, methods=["GET"])
        app.add_url_rule("/v1/requests/<path:request_id>/cancel", view_func=self.cancel, methods=["POST"])

    async def queue(self) -> QuartResponse:
        """Return the queue's totals."""
        return quart_json_response(self._services.queue_statistics())

    async def estimate(self) -> QuartResponse:
        """Return the forecast for a new job of the caller; `?model=` and `X-Priority` are as in a job."""
        model = self._edge.models.find(g.call, request.args.get("model"))
        return quart_json_response(
            self._services.estimate(model, self._edge.tenant(g.call), self._edge.priority(g.call))
        )

    async def cancel(self, request_id: str) -> QuartResponse:
        """End a queued or running job of the same key. Other keys' jobs are reported as not found."""
        if not self._services.gateway.cancel(request_id, owner_of(g.call.api_key)):
            raise NotFound(f"no request {quoted(request_id)} of yours is waiting or running")
        return quart_json_response({"id": request_id, "object": "request", "status": "cancelled"})
