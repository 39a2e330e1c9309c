"""CORS, of the Fetch standard: web pages of the configured origins may use the API.

A browser sends a page's requests with the page's `Origin`, and shows it a response only if that response
allows it. Before a request that no form could send, it sends a preflight request with `OPTIONS`. Operator
routes allow no page, and refuse those of other servers: see `origin`. Independent of frameworks.
"""

import re
from collections.abc import Iterable

from fairlead.base.formats.headers import Headers

EVERY_ORIGIN = "*"
EXPOSED = (
    "X-Request-Id, request-id, Retry-After, X-Estimated-Wait, X-Estimated-Wait-P90, X-Queue-Position, "
    "X-Fairlead-Translated, X-Fairlead-Warning, Warning, x-should-retry, "
    "x-ratelimit-limit-requests, x-ratelimit-remaining-requests, x-ratelimit-reset-requests, "
    "x-ratelimit-limit-tokens, x-ratelimit-remaining-tokens, x-ratelimit-reset-tokens"
)
# How long a browser may cache a preflight response.
MAX_AGE_S = 600
MAX_NAMES_LENGTH = 2048

_NAME = r"[\w!#$%&'*+.^`|~-]+"
_NAMES = re.compile(rf"{_NAME}(?:[ \t]*,[ \t]*{_NAME})*", re.ASCII)


class Cors:
    """The origins of pages that may use the API: `*` stands for all. There are none by default."""

    def __init__(self, origins: Iterable[str] = ()) -> None:
        self._origins = frozenset(origins)

    def allows(self, headers: Headers) -> bool:
        """Return whether the request comes from a page that may use the API."""
        origin = headers.get("Origin")
        return origin is not None and (origin in self._origins or EVERY_ORIGIN in self._origins)

    def is_preflight(self, method: str, headers: Headers) -> bool:
        """Return whether this is the preflight request of such a page."""
        is_preflight = method == "OPTIONS" and headers.get("Access-Control-Request-Method") is not None
        return is_preflight and self.allows(headers)

    def preflight_headers(self, headers: Headers, methods: Iterable[str]) -> dict[str, str]:
        """Return the headers of the preflight response; `methods` are those of the route.

        Any header is allowed: clients add their own, and none does harm.
        """
        names = headers.get("Access-Control-Request-Headers", "")
        allowed = {"Access-Control-Allow-Headers": names} if _are_names(names) else {}
        return {
            "Access-Control-Allow-Methods": ", ".join(sorted(methods)),
            **allowed,
            "Access-Control-Max-Age": str(MAX_AGE_S),
        }

    def headers(self, headers: Headers) -> dict[str, str]:
        """Return the headers of a response for browsers, and for caches, which must not mix up responses."""
        if EVERY_ORIGIN in self._origins:
            # Also without an origin: then a cached response is valid for any page.
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


def _are_names(names: str) -> bool:
    return len(names) <= MAX_NAMES_LENGTH and _NAMES.fullmatch(names) is not None
