"""The application: it finds the route of each request, checks the request, and runs the route's view.

With our own listener, `GenerationRoutes` handles the direct routes and Quart all others. Under another ASGI
server Quart handles all. `RouteMatcher` finds the route for both: Quart has one rule, for all views.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, cast

from quart import Response as QuartResponse
from quart import g
from quart.globals import request_ctx
from quart_trio import QuartTrio
from werkzeug.routing import Rule

from fairlead.base.config import ApiKey, TeamConfig
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
from fairlead.server.routes.paths import Match, RouteMatcher, without_root
from fairlead.server.routes.request import Request, Response
from fairlead.server.routes.request_caller import tenant_so_far
from fairlead.server.routes.request_reader import RequestReader
from fairlead.server.routes.route import Permission, Route
from fairlead.server.routes.route_table import ROUTES, dialects_of
from fairlead.server.routes.views import Views
from fairlead.store.records import KeySet


class _Adapter:
    """What Quart asks for the route of a request, in place of Werkzeug's table: the one rule that it has.

    rule: The rule whose view runs that of the matched route.
    """

    def __init__(self, rule: Rule) -> None:
        self._rule = rule

    def match(self, *, return_rule: bool) -> tuple[Rule, dict[str, str]]:
        """Return the rule. The path's parameters are in the request."""
        assert return_rule
        return self._rule, {}


class Application(QuartTrio):  # type: ignore[misc]  # quart_trio has no types
    """Quart with our own routes, exchange and request. Holds nothing to be closed.

    With `bypasses_quart`, the direct routes, and requests without a route, are handled without Quart. A flood
    of them would cost more in Quart, which can handle all.
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
        self._limits = services.config.limits
        self._bypasses_quart = bypasses_quart
        self._jobs = JobService(services)
        self._reader = RequestReader(self._jobs)
        self._authenticator = Authenticator(services.config.api_keys, has_store=services.store is not None)
        self.team_of = self._authenticator.team_of
        self._configured_keys = services.config.api_keys
        self._stored_keys: tuple[ApiKey, ...] = ()
        self._cors = Cors(services.config.cors.origins)
        self.matcher = RouteMatcher(routes)
        self._error_formats = ErrorFormats(dialects_of(routes))
        self._auth = RequestAuth(
            self._authenticator,
            self._jobs.quotas,
            OriginPolicy(services.config.host, services.config.allowed_hosts),
            self._cors,
            paths=tuple(dict.fromkeys(route.path for route in routes)),
            id_headers=lambda path: self._error_formats.of(path).request_id_headers,
            requester=self._reader.requester,
            refused=services.board.refuse,
            flow_control=FlowControl(services.config.flow_control, services.config.queue.classes),
        )
        self.callers = Callers(TrustedProxies(services.config.trusted_proxies), self._auth.line_of)
        views = Views(services, routes, self._reader, self._auth, self._cors, self._authenticator)
        self.counts = views.counts
        assert all(route.permission is Permission.KEY for route in routes if route.is_direct)
        self._views = {(route.method, route.path): views.of(route) for route in routes}
        self.generation_routes = GenerationRoutes(
            self._auth, self._reader.body_memory, self._error_formats, self._reader.unread
        )
        self.add_url_rule("/", "view", self._respond, provide_automatic_options=False)
        (rule,) = self.url_map.iter_rules()
        self._adapter = _Adapter(rule)
        self._serve_tasks(views)
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
        match = self.matcher.match(scope["method"], scope.get("raw_path"), scope["path"])
        route = match.route
        if not self._bypasses_quart or (route is not None and not _is_direct(route, scope)):
            await super().__call__({**scope, "match": match}, receive, send)
        elif route is None:
            await self.generation_routes.refuse(match.error, scope, receive, send)
        else:
            await self.generation_routes(self._views[route.method, route.path], scope, receive, send)

    def create_url_adapter(self, request: Any) -> Any:
        """Return the adapter to the one rule."""
        return self._adapter if request is not None else super().create_url_adapter(None)

    def _client(self, scope: Any) -> dict[str, Any]:
        """Return the changes of another server's scope for the client behind trusted proxies."""
        peer = scope["client"][0] if scope.get("client") else None
        address, is_forwarded = self.callers.proxies.client(peer, scope["headers"])
        if address == peer:
            return {FORWARDED: is_forwarded}
        return {FORWARDED: is_forwarded, "client": None if address is None else (address, 0)}

    def change_keys(
        self, api_keys: tuple[ApiKey, ...], teams: Mapping[str, TeamConfig] = MappingProxyType({})
    ) -> None:
        """Replace the API keys of the configuration, and their teams."""
        self._configured_keys = api_keys
        self._jobs.teams = teams
        self._jobs.quotas.change(self.api_keys)
        self._authenticator.change(api_keys)

    @property
    def api_keys(self) -> tuple[ApiKey, ...]:
        """All keys in force: those of the configuration, and those of the store."""
        return self._configured_keys + self._stored_keys

    def change_stored_keys(self, keys: KeySet) -> None:
        """Replace the API keys of the store."""
        self._stored_keys = tuple(key.api_key() for key in keys.keys if key.revoked_at is None)
        self._jobs.quotas.change(self.api_keys)
        self._authenticator.change_stored(keys.keys)

    def _serve_tasks(self, views: Views) -> None:
        """Run the views' own tasks while the application is served."""

        @self.while_serving  # type: ignore[untyped-decorator]  # quart_trio has no types
        async def run_tasks() -> AsyncIterator[None]:
            self.nursery.start_soon(views.events.record_history)
            await self.nursery.start(views.responses.background.run)
            self.nursery.start_soon(views.batches.run)
            yield
            views.events.stop()
            views.batches.stop()
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
        if match.route is not None:
            permission = match.route.permission
            is_preflight = not permission.is_strict and self._cors.is_preflight(
                request.method, request.headers
            )
        self._auth.enter(request, permission, is_preflight=is_preflight)
        current.body_memory, current.tenant = self._reader.body_memory, tenant_so_far(request)
        if not is_preflight:
            return None
        headers = self._cors.preflight_headers(request.headers, match.methods)
        return quart_response(Response(b"", 204, headers))

    async def _respond(self) -> QuartResponse:
        """Run the view of the request's route. Raises the `FairleadError` of a request without a route."""
        match: Match = request_ctx.request.scope["match"]
        route = match.route
        if route is None:
            raise match.error
        if g.request.method == "OPTIONS":
            return quart_response(Response(b"", 200, {"Allow": ", ".join(match.methods)}))
        return quart_response(await self._views[route.method, route.path](g.request))

    async def _fail(self, error: Exception) -> QuartResponse:
        public = public_error(error)
        self._auth.log_refusal(g.request, public)
        response = error_response(error, self._error_formats.of(g.request.path), public)
        error.__traceback__ = None  # as in `GenerationRoutes`
        return quart_response(response)

    async def _add_headers(self, response: QuartResponse) -> QuartResponse:
        response.headers.update(self._auth.headers(g.request))
        return response


def _is_direct(route: Route, scope: Any) -> bool:
    """Return whether our own exchange runs the view of a request's route. Quart answers OPTIONS."""
    return route.is_direct and scope["method"] == route.method
