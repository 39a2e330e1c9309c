"""`GET /metrics`, as Prometheus reads it."""

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
    """`/metrics`, in the text format or as OpenMetrics, whichever is asked for."""

    def __init__(
        self, services: Services, overview: Overview, refusals: Callable[[], Mapping[str, int]]
    ) -> None:
        tenants = TenantNames(services.config)
        self._services = services
        self._metrics = ServerMetrics(services, overview, refusals=refusals, tenants=tenants)
        self._threads = trio.CapacityLimiter(1)

    def add_to(self, app: Quart) -> None:
        """Register the route."""
        app.add_url_rule("/metrics", view_func=self.metrics, methods=["GET"])

    async def metrics(self) -> Response:
        """Everything that is counted and that the caller may see, as it is now.

        To write out a thousand tenants takes tens of milliseconds, for which no token is to wait: a thread
        does it, of what was pulled before.
        """
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        pulled = self._metrics.pull(scope_of(self._services, g.call.api_key))
        body = await trio.to_thread.run_sync(encode, pulled, abandon_on_cancel=True, limiter=self._threads)
        return Response(body, content_type=content_type)
