"""The application: the route table in Quart, and the checks of each request before its view.

With our own listener, `GenerationRoutes` handles the direct routes and Quart all others. Under another ASGI
server Quart handles all. `Paths` decides for both which spellings of a path exist.
"""

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, cast

from quart import Response as QuartResponse
from quart import g
from quart.globals import request_ctx
from quart_trio import QuartTrio
from werkzeug import exceptions as werkzeug
from werkzeug.routing import Map

from fairlead.base.config import ApiKey
from fairlead.generation.job_service import JobService
from fairlead.generation.services import Services
from fairlead.router.quotas.access import Authenticator
from fairlead.server.auth.cors import Cors
from fairlead.server.auth.flow_control import FlowControl
from fairlead.server.auth.origin import OriginPolicy
from fairlead.server.auth.request_auth import RequestAuth
from fairlead.server.listener.callers import Callers
from fairlead.server.listener.forwarded import FORWARDED, TrustedProxies
from fairlead.server.routes.errors import ErrorFormats, error_response, public_error
from fairlead.server.routes.exchange import Exchange, FairleadRequest, quart_response, read_body
from fairlead.server.routes.generation_routes import GenerationRoutes
from fairlead.server.routes.paths import Paths, without_root
from fairlead.server.routes.request import Request, Response, View
from fairlead.server.routes.request_caller import tenant_so_far
from fairlead.server.routes.request_reader import RequestReader
from fairlead.server.routes.route import Permission, Route
from fairlead.server.routes.route_table import ROUTES, dialects_of
from fairlead.server.routes.views import Views


class Match:
    """The route of a request, or the reason why it has none; used instead of Quart's adapter."""

    def __init__(self, url_map: Map, scope: Any, *, has_path: bool) -> None:
        # Quart's own adapter also reads `Host`, and fails for names that DNS does not allow.
        self._adapter = url_map.bind("localhost", default_method=scope["method"], path_info=scope["path"])
        self.error: werkzeug.HTTPException | None = None if has_path else werkzeug.NotFound()
        self.rule: Any = None
        self.parameters: Mapping[str, str] = {}
        if has_path:
            try:
                self.rule, self.parameters = self._adapter.match(return_rule=True)
            except werkzeug.HTTPException as error:
                error.__context__ = error.__traceback__ = None  # their frames refer to it: a reference cycle
                self.error = error

    def match(self, *, return_rule: bool) -> tuple[Any, Mapping[str, str]]:
        """Return the rule and the path's parameters, as Werkzeug's adapter does. Raises `HTTPException`."""
        assert return_rule
        if self.error is not None:
            raise self.error
        return self.rule, self.parameters

    def allowed_methods(self) -> Iterable[str]:
        """Return the methods that the path has."""
        return self._adapter.allowed_methods()


class Application(QuartTrio):  # type: ignore[misc]  # quart_trio has no types
    """Quart with the rules of the route table, our own exchange and request. Holds nothing to be closed.

    With `bypasses_quart`, the direct routes, and requests without a route, are handled without Quart. A flood
    of them would cost more in Quart. Quart has the rules of all routes in any case.
    """

    asgi_http_class = Exchange
    request_class = FairleadRequest

    def __init__(
        self, services: Services, routes: Sequence[Route] = ROUTES, *, bypasses_quart: bool = True
    ) -> None:
        super().__init__("fairlead", static_folder=None)
        self.config["RESPONSE_TIMEOUT"] = None  # only the gateway limits the time
        self.config["BODY_TIMEOUT"] = None  # `read_body` has its own, and a bound on the size
        self.config["MAX_CONTENT_LENGTH"] = None
        self.url_map.merge_slashes = False  # a path that is not exactly a route's is a 404, not a redirect
        self._limits = services.config.limits
        self._bypasses_quart = bypasses_quart
        self._jobs = JobService(services)
        self._reader = RequestReader(self._jobs)
        self._authenticator = Authenticator(services.config.api_keys)
        self._cors = Cors(services.config.cors.origins)
        self._paths = Paths(route.path for route in routes)
        self._error_formats = ErrorFormats(dialects_of(routes))
        self._auth = RequestAuth(
            self._authenticator,
            self._jobs.quotas,
            OriginPolicy(services.config.host, services.config.allowed_hosts),
            self._cors,
            paths=tuple(dict.fromkeys(route.path for route in routes)),
            id_headers=lambda path: self._error_formats.of(path).request_id_headers,
            requester=self._reader.requester,
            flow_control=FlowControl(services.config.flow_control, services.config.queue.classes),
        )
        self.callers = Callers(TrustedProxies(services.config.trusted_proxies), self._auth.line_of)
        self._permissions: dict[str, Permission] = {}
        views = Views(services, routes, self._reader, self._auth, self._cors)
        self.counts = views.counts
        self._add_routes(views, routes)
        self.before_request(self._enter)
        self.register_error_handler(Exception, self._fail)
        self.after_request(self._add_headers)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Handle an ASGI request. Below a prefix (`root_path`), paths are relative to it."""
        if scope["type"] != "http":
            await super().__call__(scope, receive, send)
            return
        if "fairlead" not in (scope.get("extensions") or ()):  # not our own listener
            scope = without_root(scope) if scope.get("root_path") else scope
            scope = {**scope, "state": {**scope.get("state", {}), "limits": self._limits}}
            scope |= self._client(scope)
        has_path = self._paths.has(scope.get("raw_path"), scope["path"])
        if has_path and self.generation_routes.serves(scope):
            await self.generation_routes(scope, receive, send)
            return
        match = Match(self.url_map, scope, has_path=has_path)
        if match.error is not None and self._bypasses_quart:
            await self.generation_routes.refuse(match.error, scope, receive, send)
        else:
            await super().__call__({**scope, "match": match}, receive, send)

    def create_url_adapter(self, request: Any) -> Any:
        """Return the `Match` that `__call__` has found."""
        return request.scope["match"] if request is not None else super().create_url_adapter(None)

    def _client(self, scope: Any) -> dict[str, Any]:
        """Return the changes of another server's scope for the client behind trusted proxies."""
        peer = scope["client"][0] if scope.get("client") else None
        address, is_forwarded = self.callers.proxies.client(peer, scope["headers"])
        if address == peer:
            return {FORWARDED: is_forwarded}
        return {FORWARDED: is_forwarded, "client": None if address is None else (address, 0)}

    def change_keys(self, api_keys: tuple[ApiKey, ...]) -> None:
        """Replace the API keys."""
        self._jobs.quotas.change(api_keys)
        self._authenticator.change(api_keys)

    def _add_routes(self, views: Views, routes: Sequence[Route]) -> None:
        """Add a rule for each route. Run the views' own tasks while the application is served."""
        direct: dict[str, View] = {}
        for route in routes:
            endpoint, view = f"{route.method} {route.path}", views.of(route)
            self._permissions[endpoint] = route.permission
            self.add_url_rule(route.rule, endpoint, partial(_run, view), methods=[route.method])
            if route.is_direct:
                assert (route.method, route.permission) == ("POST", Permission.KEY)
                direct[route.path] = view
        self.generation_routes = GenerationRoutes(
            self._auth,
            direct if self._bypasses_quart else {},
            self._reader.body_memory,
            self._error_formats,
            self._reader.unread,
        )

        @self.while_serving  # type: ignore[untyped-decorator]  # quart_trio has no types
        async def run_tasks() -> AsyncIterator[None]:
            self.nursery.start_soon(views.events.record_history)
            await self.nursery.start(views.responses.background.run)
            yield
            views.events.stop()
            views.responses.background.stop()

    async def _enter(self) -> QuartResponse | None:
        """Check a request before routing errors are raised, because they show which routes exist."""
        current = cast(FairleadRequest, request_ctx.request)
        match: Match = current.scope["match"]
        request = g.request = Request(current.scope, partial(read_body, current))
        request.nursery = current.nursery
        request.leave_body = current.incoming.leave
        request.open_body = partial(getattr, current, "incoming")
        request.path_parameters = match.parameters
        current.unread = self._reader.unread.of(request, current.scope.get("extensions", {}).get("fairlead"))
        permission, is_preflight = Permission.KEY, False
        if match.rule is not None:
            permission = self._permissions.get(match.rule.endpoint, Permission.KEY)
            is_preflight = not permission.is_strict and self._cors.is_preflight(
                request.method, request.headers
            )
        self._auth.enter(request, permission, is_preflight=is_preflight)
        current.body_memory, current.tenant = self._reader.body_memory, tenant_so_far(request)
        if not is_preflight:
            return None
        headers = self._cors.preflight_headers(request.headers, match.allowed_methods())
        return quart_response(Response(b"", 204, headers))

    async def _fail(self, error: Exception) -> QuartResponse:
        public = public_error(error)
        self._auth.refused(g.request, public)
        response = error_response(error, self._error_formats.of(g.request.path), public)
        error.__traceback__ = None  # as in `GenerationRoutes`
        return quart_response(response)

    async def _add_headers(self, response: QuartResponse) -> QuartResponse:
        response.headers.update(self._auth.headers(g.request))
        return response


async def _run(view: View, **_parameters: str) -> QuartResponse:
    """Run a view in Quart. The path's parameters are in the request."""
    return quart_response(await view(g.request))
