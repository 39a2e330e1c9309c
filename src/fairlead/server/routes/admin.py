"""The views for operators and load balancers: liveness, readiness, running models, version."""

from msgspec.structs import replace

from fairlead.base.version import VERSION
from fairlead.dialects.shapes import ServerLoad, ServerState, Version
from fairlead.generation.services import Services
from fairlead.server.routes.request import Request, Response, json_response


class Admin:
    """The views of `/health`, `/ready`, `/load`, `/running` and `/version`."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def health(self, _request: Request) -> Response:
        """Report whether the process responds and no model is stuck in a step. Loading is healthy.

        It waits for no other process: what probes it would end this one for the silence of that.
        """
        instance = self._services.fleet.instance
        if problems := self._services.problems():
            return json_response(ServerState("stuck", dict(problems), instance), 503)
        return json_response(ServerState("ok", instance=instance))

    async def load(self, _request: Request) -> Response:
        """Return the number of requests that the server has, in the form of vLLM's servers."""
        await self._services.refresh()
        counts = self._services.queue_statistics()
        return json_response(ServerLoad(counts["waiting"] + counts["running"]))

    async def ready(self, _request: Request) -> Response:
        """Report whether preloading is over, no model waits for its restart, and the server is to go on."""
        if self._services.stopping():
            return json_response(ServerState("stopping"), 503)
        await self._services.refresh()
        if self._services.ready():
            return json_response(ServerState("ready"))
        return json_response(ServerState("loading"), 503, {"Retry-After": "2"})

    async def running(self, request: Request) -> Response:
        """Return the models that have a process here, as far as the caller may see them.

        What their processes have printed is for operators, as their logs are.
        """
        await self._services.refresh()
        seen = self._services.scope_of(request.api_key).of_models(self._services.fleet.models())
        running = [status for status in seen if status.is_resident]
        if request.api_key is not None and not request.api_key.has_role("operator"):
            running = [replace(status, output=()) for status in running]
        return json_response(running)

    async def version(self, _request: Request) -> Response:
        """Return the program's version."""
        return json_response(Version(VERSION))
