"""The steps before every route: a request gets an id, and its key, `Host` and `Origin` are checked.

Independent of frameworks and routes.
"""

from collections import Counter
from collections.abc import Collection, Mapping
from math import inf
from secrets import token_hex

import structlog
import trio

from fairlead.api.cors import Cors
from fairlead.api.origin import Guard
from fairlead.api.paths import nearest_route
from fairlead.api.request import Request
from fairlead.errors import FairleadError, NotFound
from fairlead.http.refusals import LOGGED_LENGTH
from fairlead.tenancy.access import Access
from fairlead.tenancy.quotas import Quotas

MAX_REQUEST_ID_LENGTH = 128
# Finding the nearest route takes longer than the rest of a refusal: not for each path of a flood.
NEAREST_ROUTE_EVERY_S = 0.05

logger = structlog.get_logger("fairlead.api")


class RequestAuth:
    """The checks of requests, the log of refused ones, and the headers common to all responses."""

    def __init__(self, access: Access, quotas: Quotas, guard: Guard, cors: Cors | None = None) -> None:
        self._access = access
        self._quotas = quotas
        self._guard = guard
        self._cors = cors or Cors()
        self._refusals: Counter[str] = Counter()
        self.rules: Collection[str] = ()  # the application's, in Quart's notation
        self._next_nearest_route = -inf

    def enter(
        self,
        call: Request,
        *,
        without_key: bool = False,
        is_operator_route: bool = False,
        is_probe: bool = False,
    ) -> None:
        """Set the request's id and key, and check that no page of another server has sent it.

        `origin` describes the checks of `Host` and `Origin`. Raises `InvalidApiKey` and `Forbidden`.
        """
        call.request_id = _request_id(call.headers.get("X-Request-Id", ""))
        call.is_open_to_pages = not is_operator_route  # before the checks: a page may read its refusal, too
        structlog.contextvars.bind_contextvars(request_id=call.request_id)
        if not without_key:
            call.api_key = self._access.authenticate(call.headers)
        if is_operator_route:
            self._guard.check(call.headers, strict=True)
        elif not (is_probe or self._access.has_keys):
            self._guard.check(call.headers, strict=False, any_origin=self._cors.allows(call.headers))

    def refused(self, call: Request, error: FairleadError) -> None:
        """Count and log a request that was refused before it became a job. The gateway accounts for jobs."""
        if call.is_job:
            return
        self._refusals[error.code] += 1
        if error.status == FairleadError.status:  # our own bugs are logged already
            return
        line = {
            "outcome": error.code,
            "status": error.status,
            "reason": error.message,
            "method": call.method,
            "path": call.path[:LOGGED_LENGTH],
            "client": call.address,
        }
        if error.code == NotFound.code and (route := self._nearest_route(call.path)):
            line["nearest_route"] = route
        logger.info("request refused", **line)

    def _nearest_route(self, path: str) -> str | None:
        """Return the route that a path resembles most, unless the last one was asked for just now."""
        now = trio.current_time()
        if now < self._next_nearest_route:
            return None
        self._next_nearest_route = now + NEAREST_ROUTE_EVERY_S
        return nearest_route(path, self.rules)

    def refusals(self) -> Mapping[str, int]:
        """Return the number of requests refused before they became jobs, by error code."""
        return dict(self._refusals)

    def headers(self, call: Request) -> dict[str, str]:
        """Return the headers of every response. A caller without a known key has no limits to report."""
        limits = self._quotas.of(call.api_key).headers(trio.current_time())
        cors = self._cors.headers(call.headers) if call.is_open_to_pages else {}
        return {"X-Request-Id": call.request_id, **limits, **cors}


def _request_id(given: str) -> str:
    """Return the client's id if it is safe in headers and log lines, else a new one."""
    if 1 <= len(given) <= MAX_REQUEST_ID_LENGTH and all("!" <= character <= "~" for character in given):
        return given
    return token_hex(16)
