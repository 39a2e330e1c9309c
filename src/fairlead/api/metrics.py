"""`GET /metrics`, for Prometheus."""

from collections.abc import Callable, Mapping

import trio
from prometheus_client.exposition import choose_encoder
from quart import Quart, Response, g, request

from fairlead.api.scope import scope_of
from fairlead.api.services import Services
from fairlead.telemetry.metrics import ServerMetrics
from fairlead.telemetry.snapshot import Overview
from fairlead.telemetry.tenants import TenantNames


class Metrics:
    """The route `/metrics`, in the text format or as OpenMetrics, as the request's `Accept` says."""

    def __init__(
        self, services: Services, overview: Overview, refusals: Callable[[], Mapping[str, int]]
    ) -> None:
        tenants = TenantNames(services.config)
        self._services = services
        self._metrics = ServerMetrics(overview, refusals=refusals, tenants=tenants)
        self._threads = trio.CapacityLimiter(1)

    def add_to(self, app: Quart) -> None:
        """Register the route."""
        app.add_url_rule("/metrics", view_func=self.metrics, methods=["GET"])

    async def metrics(self) -> Response:
        """Return all current metrics that the caller may see.

        Encoding a thousand tenants takes tens of milliseconds and must not delay tokens. So the values are
        pulled here and encoded in a thread.
        """
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        pulled = self._metrics.pull(scope_of(self._services, g.call.api_key))
        body = await trio.to_thread.run_sync(encode, pulled, abandon_on_cancel=True, limiter=self._threads)
        return Response(body, content_type=content_type)
