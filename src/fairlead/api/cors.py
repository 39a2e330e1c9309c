"""Lets web pages of other servers use the API (CORS, in the Fetch standard): those of the configured origins.

A browser sends a page's requests with the page's `Origin`, and shows it an answer only if that answer says
so. Before a request that no form could send it asks, with `OPTIONS`, whether it may. An operator's routes say
so to no page, and refuse foreign ones: see `origin`. Knows no framework.
"""

import re
from collections.abc import Iterable

from fairlead.api.call import Headers

EVERY_ORIGIN = "*"
EXPOSED = (
    "X-Request-Id, Retry-After, X-Estimated-Wait, X-Estimated-Wait-P90, X-Queue-Position, x-should-retry, "
    "x-ratelimit-limit-requests, x-ratelimit-remaining-requests, x-ratelimit-reset-requests, "
    "x-ratelimit-limit-tokens, x-ratelimit-remaining-tokens, x-ratelimit-reset-tokens"
)
# How long a browser may go by the answer to its question.
MAX_AGE_S = 600
MAX_NAMES_LENGTH = 2048

_NAME = r"[\w!#$%&'*+.^`|~-]+"
_NAMES = re.compile(rf"{_NAME}(?:[ \t]*,[ \t]*{_NAME})*", re.ASCII)


class Cors:
    """The origins whose pages may use the API; `*` stands for all, and none by default."""

    def __init__(self, origins: Iterable[str] = ()) -> None:
        self._origins = frozenset(origins)

    def allows(self, headers: Headers) -> bool:
        """Whether the request is of a page that may use the API."""
        origin = headers.get("Origin")
        return origin is not None and (origin in self._origins or EVERY_ORIGIN in self._origins)

    def asks(self, method: str, headers: Headers) -> bool:
        """Whether this is the browser's question for such a page: whether it may send a request."""
        is_question = method == "OPTIONS" and headers.get("Access-Control-Request-Method") is not None
        return is_question and self.allows(headers)

    def permission(self, headers: Headers, methods: Iterable[str]) -> dict[str, str]:
        """Return the headers of the answer to it; `methods` are those of the route.

        Any header may be sent: clients add their own, and none does harm.
        """
        wanted = headers.get("Access-Control-Request-Headers", "")
        names = {"Access-Control-Allow-Headers": wanted} if _may_be_sent(wanted) else {}
        return {
            "Access-Control-Allow-Methods": ", ".join(sorted(methods)),
            **names,
            "Access-Control-Max-Age": str(MAX_AGE_S),
        }

    def headers(self, headers: Headers) -> dict[str, str]:
        """Return what an answer says to a browser, and to caches, which must not mix up answers."""
        if EVERY_ORIGIN in self._origins:
            # Also without an origin: what a cache keeps is good for any page.
            return {"Access-Control-Allow-Origin": EVERY_ORIGIN, "Access-Control-Expose-Headers": EXPOSED}
        if not self._origins:
            return {}
        if not self.allows(headers):
            return {"Vary": "Origin"}
        return {
            "Access-Control-Allow-Origin": headers.get("Origin", ""),
            "Access-Control-Expose-Headers": EXPOSED,
            "Vary": "Origin",
        }


def _may_be_sent(names: str) -> bool:
    return len(names) <= MAX_NAMES_LENGTH and _NAMES.fullmatch(names) is not None
