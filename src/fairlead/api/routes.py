"""The application: every route, behind one door that names each request and asks for its key."""

from uuid import uuid4

import structlog
import trio
from quart import Response, g, request
from quart_trio import QuartTrio

from fairlead.api.access import Access
from fairlead.api.admin import Admin
from fairlead.api.edge import MAX_REQUEST_ID_LENGTH, Edge
from fairlead.api.errors import error_response
from fairlead.api.exchange import Exchange, FairleadRequest
from fairlead.api.openai import OpenAI
from fairlead.api.queue import Queue
from fairlead.api.services import Services
from fairlead.api.tokenize import Tokens

# A load balancer that asks whether we live has no key.
_OPEN_RULES = frozenset({"/health"})


class Application(QuartTrio):  # type: ignore[misc]  # quart_trio has no types
    """Quart, with an exchange and a request of our own."""

    asgi_http_class = Exchange
    request_class = FairleadRequest


def create_app(services: Services) -> QuartTrio:
    """Return the ASGI application. It holds nothing that must be closed."""
    app = Application("fairlead", static_folder=None)
    app.config["RESPONSE_TIMEOUT"] = None  # the gateway's clocks are the only ones
    app.config["BODY_TIMEOUT"] = None  # read_body has its own, and a bound on the size
    app.config["MAX_CONTENT_LENGTH"] = None
    app.url_map.merge_slashes = False  # a path that is not exactly a route's is a 404, not a redirect
    access = Access(services.config.api_keys)
    edge = Edge(services)

    async def enter() -> None:
        g.request_id = _request_id(request.headers.get("X-Request-Id", ""))
        structlog.contextvars.bind_contextvars(request_id=g.request_id)
        # Before routing errors are raised, so that only callers with a key learn which routes there are.
        rule = request.url_rule.rule if request.url_rule is not None else None
        g.api_key = None if rule in _OPEN_RULES else access.authenticate(request.headers)

    async def fail(error: Exception) -> Response:
        return error_response(error, request.path)

    async def leave(response: Response) -> Response:
        response.headers["X-Request-Id"] = g.request_id
        # A caller whose key is not known, or not asked for, has no limits to be told.
        quota = edge.quotas.of(g.get("api_key"))
        response.headers.update(quota.headers(trio.current_time()))
        return response

    app.before_request(enter)
    app.register_error_handler(Exception, fail)
    app.after_request(leave)
    for part in (OpenAI(edge), Tokens(edge), Queue(edge), Admin(services)):
        part.add_to(app)
    return app


def _request_id(given: str) -> str:
    """Take over the client's id if it can stand in a header and a log line as it is; else make one."""
    if 1 <= len(given) <= MAX_REQUEST_ID_LENGTH and all("!" <= character <= "~" for character in given):
        return given
    return uuid4().hex
