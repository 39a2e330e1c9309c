"""The routes for operators and load balancers: liveness, readiness, running models, version."""

from quart import Quart, g
from quart import Response as QuartResponse

from fairlead.api.exchange import quart_json_response
from fairlead.api.scope import scope_of
from fairlead.api.services import Services
from fairlead.version import VERSION


class Admin:
    """The routes `/health`, `/ready`, `/running`, `/version`."""

    def __init__(self, services: Services) -> None:
        self._services = services

    def add_to(self, app: Quart) -> None:
        """Register the routes."""
        for name in ("health", "ready", "running", "version"):
            app.add_url_rule(f"/{name}", view_func=getattr(self, name), methods=["GET"])

    async def health(self) -> QuartResponse:
        """Report whether the process responds and no model is stuck in a step. Loading is healthy."""
        instance = self._services.fleet.instance
        if problems := self._services.problems():
            return quart_json_response(
                {"status": "stuck", "models": dict(problems), "instance": instance}, 503
            )
        return quart_json_response({"status": "ok", "instance": instance})

    async def ready(self) -> QuartResponse:
        """Report whether every model is loaded, so that a job would not wait for one."""
        if self._services.ready():
            return quart_json_response({"status": "ready"})
        return quart_json_response({"status": "loading"}, 503, {"Retry-After": "2"})

    async def running(self) -> QuartResponse:
        """Return the models that have a process here, as far as the caller may see them."""
        seen = scope_of(self._services, g.call.api_key).of_models(self._services.fleet.models())
        return quart_json_response([status for status in seen if status.is_resident])

    async def version(self) -> QuartResponse:
        """Return the program's version."""
        return quart_json_response({"version": VERSION})
