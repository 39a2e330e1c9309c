"""The steps before every view: a request gets an id, and its key, `Host` and `Origin` are checked.

Independent of frameworks.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from math import inf
from secrets import token_hex

import structlog
import trio

from fairlead.base.errors import FairleadError, Forbidden, InvalidRequest, NotFound
from fairlead.base.formats.headers import FirstHeaders
from fairlead.base.requester import Requester, who
from fairlead.dialects.dialect import REQUEST_ID_HEADERS
from fairlead.generation.caller import MAX_REQUEST_ID_LENGTH
from fairlead.router.quotas.access import Authenticator, check_role, tenant_of
from fairlead.router.quotas.key_quotas import KeyQuotas
from fairlead.server.auth.cors import Cors
from fairlead.server.auth.flow_control import NO_HINTS, FlowControl
from fairlead.server.auth.origin import OriginPolicy
from fairlead.server.listener.refusals import LOGGED_LENGTH
from fairlead.server.routes.paths import nearest_route
from fairlead.server.routes.request import Request
from fairlead.server.routes.route import KEYLESS, Permission

# Finding the nearest route takes longer than the rest of a refusal, so a flood of requests must not
# cause it each time.
NEAREST_ROUTE_INTERVAL_S = 0.05

logger = structlog.get_logger("fairlead.server.routes")


class RequestAuth:
    """The checks of requests, the log of refused ones, and the headers common to all responses.

    authenticator: Knows the keys.
    quotas: Has the limits that responses report.
    origins: Checks `Host` and `Origin`.
    cors: Allows pages of other servers; None: it allows none.
    paths: The paths of all routes, of which the log names the nearest one to an unknown path.
    id_headers: Returns, for a path, the names of the headers that have the request's id.
    flow_control: Reads a trusted gateway's headers; None: no gateway is trusted.
    requester: Returns who has sent a request, for its line in the log.
    refused: Called with the code of each error that refuses a request before it is a job.
    """

    def __init__(
        self,
        authenticator: Authenticator,
        quotas: KeyQuotas,
        origins: OriginPolicy,
        cors: Cors | None = None,
        *,
        paths: Collection[str] = (),
        id_headers: Callable[[str], Iterable[str]] = lambda _path: REQUEST_ID_HEADERS,
        flow_control: FlowControl | None = None,
        requester: Callable[[Request], Requester | None] = lambda _request: None,
        refused: Callable[[str], None] = lambda _code: None,
    ) -> None:
        self._refused = refused
        self._requester = requester
        self._flow_control = flow_control
        self._authenticator = authenticator
        self._quotas = quotas
        self._origins = origins
        self._cors = cors or Cors()
        self._paths = paths
        self._id_headers = id_headers
        self._refusals: Counter[str] = Counter()
        self._next_nearest_route = -inf

    def enter(
        self, request: Request, permission: Permission = Permission.KEY, *, is_preflight: bool = False
    ) -> None:
        """Set the request's id and key, and check that it may use a route with this permission.

        A preflight request does not have the key of the request that it announces. Raises `InvalidApiKey`,
        `Forbidden`, `InsufficientRole`, and `InvalidRequest` for a header of flow control.
        """
        request.request_id = _request_id(request.headers.get("X-Request-Id", ""))
        request.is_open_to_pages = (
            not permission.is_strict
        )  # before the checks: a page may read its refusal, too
        structlog.contextvars.bind_contextvars(request_id=request.request_id)
        if not is_preflight and permission not in KEYLESS:
            request.api_key = self._authenticator.authenticate(request.headers)
            if self._flow_control is not None:
                pairs = request.scope["headers"]
                request.flow = self._flow_control.hints(request.api_key, request.address, pairs)
        if permission.is_strict:
            self._check_strictly(request)
        elif not (permission is Permission.PROBE or self._authenticator.has_keys):
            any_origin = self._cors.allows(request.headers)
            self._origins.check(request.headers, strict=False, any_origin=any_origin)
        check_role(request.api_key, permission.role)
        is_limited = request.api_key is not None and request.api_key.models
        if permission is Permission.ALL_MODELS and is_limited:
            raise Forbidden("this API key is for some models only; nodes are for all")

    def line_of(self, address: str | None, headers: list[tuple[bytes, bytes]]) -> str:
        """Return the line of a request at its address: a tenant whose name no other client can use, or "".

        That is a known key's, a user of a trusted key, or a tenant that a trusted gateway names. The
        request is checked in its turn.
        """
        api_key = self._authenticator.find(first := FirstHeaders(headers))
        try:
            flow = NO_HINTS
            if self._flow_control is not None:
                flow = self._flow_control.hints(api_key, address, headers)
        except InvalidRequest:
            return ""
        if api_key is None and flow.fairness_id is None:
            return ""
        return tenant_of(
            api_key, first, address, user=None, safety_identifier=None, fairness_id=flow.fairness_id
        )

    def check_operator(self, request: Request) -> None:
        """Raise `Forbidden` or `InsufficientRole` for a request that may not use the routes of operators."""
        self._check_strictly(request)
        check_role(request.api_key, Permission.OPERATOR.role)

    def _check_strictly(self, request: Request) -> None:
        is_forwarded = request.is_forwarded and not self._authenticator.has_keys
        self._origins.check(request.headers, strict=True, is_forwarded=is_forwarded)

    def log_refusal(self, request: Request, error: FairleadError) -> None:
        """Count and log a request that was refused before it became a job. The gateway accounts for jobs."""
        if request.is_job:
            return
        self._refusals[error.code] += 1
        self._refused(error.code)
        if error.status == FairleadError.status:  # our own bugs are logged already
            return
        line = {
            "outcome": error.code,
            "status": error.status,
            "reason": error.message,
            "method": request.method,
            "path": request.path[:LOGGED_LENGTH],
            "client": request.address,
        }
        if request.api_key is not None:
            line |= who(self._requester(request))
        if error.code == NotFound.code and (route := self._nearest_route(request.path)):
            line["nearest_route"] = route
        logger.info("request refused", **line)

    def _nearest_route(self, path: str) -> str | None:
        """Return the path of the most similar route, at most once in `NEAREST_ROUTE_INTERVAL_S`."""
        now = trio.current_time()
        if now < self._next_nearest_route:
            return None
        self._next_nearest_route = now + NEAREST_ROUTE_INTERVAL_S
        return nearest_route(path, self._paths)

    def refusals(self) -> Mapping[str, int]:
        """Return the number of requests refused before they became jobs, by error code."""
        return dict(self._refusals)

    def headers(self, request: Request) -> dict[str, str]:
        """Return the headers of every response. A caller without a known key has no limits to report."""
        limits = self._quotas.headers(request.api_key)
        cors = self._cors.headers(request.headers) if request.is_open_to_pages else {}
        return dict.fromkeys(self._id_headers(request.path), request.request_id) | limits | cors


def _request_id(given: str) -> str:
    """Return the client's id if it is safe in headers and log lines, else a new one."""
    if 1 <= len(given) <= MAX_REQUEST_ID_LENGTH and all("!" <= character <= "~" for character in given):
        return given
    return token_hex(16)
