"""`GET /metrics`, for Prometheus."""

from collections.abc import Callable

import trio
from prometheus_client.exposition import choose_encoder

from fairlead.generation.metrics.metrics import KeptResponses, ServerMetrics
from fairlead.generation.metrics.snapshot import Overview
from fairlead.generation.metrics.tenants import TenantNames
from fairlead.generation.services import Services
from fairlead.server.routes.request import Request, Response
from fairlead.server.routes.unread import UnreadAnswers


class Metrics:
    """The view of `/metrics`, in the text format or as OpenMetrics, as the request's `Accept` requires.

    services: The state of the server.
    overview: Makes snapshots of it.
    responses: Returns what is kept of responses.
    unread: Counts answers that wait for their clients.
    """

    def __init__(
        self,
        services: Services,
        overview: Overview,
        responses: Callable[[], KeptResponses],
        unread: UnreadAnswers,
    ) -> None:
        tenants = TenantNames(services.config)
        self._services = services
        self._metrics = ServerMetrics(
            overview, tenants=tenants, responses=responses, unread_bytes=lambda: unread.bytes_waiting
        )
        self._threads = trio.CapacityLimiter(1)

    async def metrics(self, request: Request) -> Response:
        """Return all current metrics that the caller may see.

        Encoding a thousand tenants takes tens of milliseconds and must not delay tokens. So the values are
        pulled here and encoded in a thread.
        """
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        await self._services.refresh()
        pulled = self._metrics.pull(self._services.scope_of(request.api_key))
        body = await trio.to_thread.run_sync(encode, pulled, abandon_on_cancel=True, limiter=self._threads)
        return Response(body, 200, {"Content-Type": content_type})
