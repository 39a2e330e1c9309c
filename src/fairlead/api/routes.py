"""The application: every route, and the checks of each request before it.

With our own listener, `GenerationRoutes` handles the generating routes and Quart all others. Under another
ASGI server Quart handles all. `Paths` decides for both which paths exist.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, cast

from quart import Response, g, request
from quart.globals import request_ctx
from quart_trio import QuartTrio
from werkzeug.exceptions import HTTPException

from fairlead.api.admin import Admin
from fairlead.api.cors import Cors
from fairlead.api.dashboard.pages import OPEN_RULES, Dashboard
from fairlead.api.embeddings import Embeddings
from fairlead.api.errors import NO_ROUTE, error_reply, public_error
from fairlead.api.events import Events
from fairlead.api.exchange import Exchange, FairleadRequest, read_body, response_of
from fairlead.api.fleet import FleetRoutes
from fairlead.api.generation_routes import GenerationRoutes, Route
from fairlead.api.job_service import JobService
from fairlead.api.metrics import Metrics
from fairlead.api.openai import OpenAI
from fairlead.api.openapi import OpenApi
from fairlead.api.origin import Guard
from fairlead.api.paths import Paths, without_root, without_version
from fairlead.api.proxy import Proxy
from fairlead.api.queue import QueueRoutes
from fairlead.api.request import Call, Reply
from fairlead.api.request_auth import RequestAuth
from fairlead.api.scope import scope_of
from fairlead.api.services import Services
from fairlead.api.tokenize import Tokens
from fairlead.api.upstream import UpstreamRoute
from fairlead.config import ApiKey, Limits
from fairlead.errors import NotFound
from fairlead.http.headers import FirstHeaders
from fairlead.telemetry.snapshot import Overview
from fairlead.tenancy.access import Access

# Load balancers and orchestrators probe these without a key, and the dashboard loads before it asks for one.
_PROBE_RULES = {"/health", "/ready"}
_OPEN_RULES = OPEN_RULES | _PROBE_RULES


class Application(QuartTrio):  # type: ignore[misc]  # quart_trio has no types
    """Quart, with our own exchange and request, and with the hot routes handled outside it.

    Requests without a route are refused outside it, too, since a flood of them would cost more in Quart.
    """

    asgi_http_class = Exchange
    request_class = FairleadRequest
    hot: GenerationRoutes
    past_quart: bool
    limits: Limits
    paths: Paths
    change_keys: Callable[[Iterable[ApiKey]], None]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Handle an ASGI request. Below a prefix (`root_path`), paths are relative to it."""
        if scope["type"] == "http" and "fairlead" not in (
            scope.get("extensions") or ()
        ):  # not our own listener
            scope = without_root(scope) if scope.get("root_path") else scope
            scope = {**scope, "state": {**scope.get("state", {}), "limits": self.limits}}
        if self.hot.serves(scope) and self.has_path(scope):
            await self.hot(scope, receive, send)
        elif self.past_quart and scope["type"] == "http" and (error := self._routing_error(scope)):
            await self.hot.refuse(error, scope, receive, send)
        else:
            await super().__call__(scope, receive, send)

    def _routing_error(self, scope: Any) -> Exception | None:
        """Return why there is no route for this request, if there is none."""
        try:
            self.url_map.bind("localhost").match(scope["path"], scope["method"])
        except HTTPException as error:
            if not self.has_path(scope):
                return NotFound(NO_ROUTE)
            error.__context__ = error.__traceback__ = None  # their frames refer to it: a reference cycle
            return error
        return None

    def create_url_adapter(self, request: Any) -> Any:
        """Route by method and path. Quart's own also reads `Host`, and fails if DNS could not have it."""
        if request is None:
            return super().create_url_adapter(None)
        return self.url_map.bind("localhost", default_method=request.method, path_info=request.path)

    def has_path(self, scope: Any) -> bool:
        """Return whether a request's path is spelled as a route's may be."""
        return self.paths.has(scope.get("raw_path"), scope["path"])


def create_app(services: Services, *, past_quart: bool = True) -> Application:
    """Return the ASGI application. It holds nothing that must be closed.

    `past_quart`: whether the generating routes, and requests without a route, are handled without Quart.
    Quart has the routes in any case.
    """
    app = Application("fairlead", static_folder=None)
    app.config["RESPONSE_TIMEOUT"] = None  # only the gateway limits the time
    app.config["BODY_TIMEOUT"] = None  # `read_body` has its own, and a bound on the size
    app.config["MAX_CONTENT_LENGTH"] = None
    app.url_map.merge_slashes = False  # a path that is not exactly a route's is a 404, not a redirect
    app.limits = services.config.limits
    edge = JobService(services)
    access = Access(services.config.api_keys)
    cors = Cors(services.config.cors.origins)
    guard = Guard(services.config.host, services.config.allowed_hosts)
    door = RequestAuth(access, edge.quotas, guard, cors)

    def change_keys(api_keys: Iterable[ApiKey]) -> None:
        edge.quotas.change(api_keys)
        access.change(api_keys)

    async def enter() -> Response | None:
        current = cast(FairleadRequest, request_ctx.request)
        client = current.scope.get("client")
        # Quart adds a `Host` if the client sent none.
        headers = FirstHeaders(current.scope["headers"])
        g.call = Call(
            headers,
            client[0] if client else None,
            partial(read_body, current),
            method=current.method,
            path=current.scope["path"],
        )
        g.call.nursery = current.nursery
        g.call.leave_body = current.incoming.leave
        # Before routing errors are raised, so that only callers with a key learn which routes exist.
        rule = current.url_rule.rule if current.url_rule is not None else None
        is_operator_route = rule in FleetRoutes.RULES
        # A browser's preflight request does not have the key of the request that it asks for.
        is_question = rule and not is_operator_route and cors.asks(current.method, headers)
        door.enter(
            g.call,
            without_key=rule in _OPEN_RULES or bool(is_question),
            is_operator_route=is_operator_route,
            is_probe=rule in _PROBE_RULES,
        )
        if not app.has_path(current.scope):  # Quart would route some of these
            raise NotFound(NO_ROUTE)
        current.body_memory, current.tenant = edge.body_memory, edge.tenant(g.call)
        if is_question:
            methods = app.create_url_adapter(current).allowed_methods()
            return response_of(Reply(b"", 204, cors.permission(headers, methods)))
        return None

    async def fail(error: Exception) -> Response:
        public = public_error(error)
        door.refused(g.call, public)
        reply = error_reply(error, request.path, public)
        error.__traceback__ = None  # as in `GenerationRoutes`
        return response_of(reply)

    async def leave(response: Response) -> Response:
        response.headers.update(door.headers(g.call))
        return response

    app.before_request(enter)
    app.register_error_handler(Exception, fail)
    app.after_request(leave)
    relaying = Proxy(edge)
    openai = OpenAI(edge, relaying)
    embeddings = Embeddings(edge, relaying)
    generating = {**openai.generating(), **embeddings.generating(), **relaying.generating()}
    hot = {**generating, **without_version(generating), **Tokens(edge).routes()}
    app.change_keys = change_keys
    app.past_quart = past_quart
    app.hot = GenerationRoutes(door, hot if past_quart else {}, edge.body_memory)
    for path, route in hot.items():
        app.add_url_rule(path, endpoint=path, methods=["POST"], view_func=partial(_answer, route))
    overview = Overview(  # shared: rates are computed between snapshots
        services.fleet,
        services.gateway,
        ready=services.ready,
        queue_statistics=services.queue_statistics,
        refusals=door.refusals,
    )
    for part in (
        openai,
        QueueRoutes(edge),
        Admin(services),
        FleetRoutes(edge),
        UpstreamRoute(edge, cors),
        Metrics(services, overview, door.refusals),
        OpenApi(),
        Dashboard(),
        Events(overview.snapshot, services.draining, partial(scope_of, services)),
    ):
        part.add_to(app)
    rules = [rule.rule for rule in app.url_map.iter_rules()]
    app.paths = Paths(rules)
    door.rules = rules
    return app


async def _answer(route: Route) -> Response:
    """Handle a generating route in Quart, as `GenerationRoutes` does without it."""
    return response_of(await route(g.call))
