"""Protection against requests that a page of another server makes its visitor's browser send.

A page can send requests to every address that its visitor's machine can reach. If the name of its own server
is made to resolve to our address (DNS rebinding), it can also read the responses. A browser reports which
page sends a request (`Origin`) and which name it was sent to (`Host`), and a page cannot change either. Other
programs may omit both.

What is checked:

| | without API keys | with API keys |
|---|---|---|
| operator routes (`/models/load`, `/nodes`, …) | strictly | strictly |
| `/health`, `/ready` | no | no |
| every other route | yes | no: a page does not have the key |

`Host` may be, wherever the server listens:

- a name of the loopback interface, the configured `host`, or one of `allowedHosts`. The name of a reverse
  proxy that forwards `Host` must be in `allowedHosts`: a rebinding attack uses such a name too;
- if the server listens on all addresses, the machine's name and every address;
- unless checked strictly, every address: a page cannot make an address resolve to another. Kubernetes and
  load balancers probe and scrape by address, also through a sidecar that forwards to the loopback interface.

No other name proves anything, also not one that is absent from public DNS. Some top-level domains have
addresses themselves (`http://ai/`), everybody on a local network can claim a name below `.local`, a router
gives the names of its DHCP clients to `.lan` and `.home.arpa`, and a search domain turns a name without a dot
into any other. So names of containers, services and nginx's `upstream` must be in `allowedHosts`, too.

A proxy on this machine may replace `Host` by a name of the loopback interface. So without API keys, a
forwarded request (with `X-Forwarded-For` or `Forwarded`) that is checked strictly must have a name in
`allowedHosts`.

Probes may send any `Host`, so `/health` and `/ready`, which reveal little, are not checked.

`Origin` may be the requested server, or one of `allowedHosts` on the default port of its scheme. Unless
checked strictly, any `Origin` is accepted if the browser reports that page and request have the same origin
(`Sec-Fetch-Site: same-origin`). A proxy in between may have changed `Host`. `Origin: null`, which sandboxed
frames and local files send, is refused. All but operator routes also accept pages of the origins in `cors`.
Below `/upstream`, a request that a browser sends without `Origin` for a page of another server, as for an
image, is refused (see `upstream`).
"""

import ipaddress
import socket
from collections.abc import Iterable
from functools import lru_cache
from urllib.parse import urlsplit

from fairlead.base.config import is_loopback
from fairlead.base.errors import Forbidden, quoted
from fairlead.base.formats.headers import Headers

_DEFAULT_PORTS = {"http": 80, "https": 443}
HOSTS_REMEMBERED = 256
MAX_HOST_LENGTH = 262  # a DNS name, a colon and a port


class OriginPolicy:
    """The check of `Host` and `Origin`. `host` is the listening address, `allowed` are other names for it."""

    def __init__(self, host: str, allowed: Iterable[str] = ()) -> None:
        self._allowed = frozenset(name.lower() for name in allowed)
        self._names = {host.lower(), *self._allowed}
        self._everywhere = _is_everywhere(host)
        if self._everywhere:
            self._names.add(socket.gethostname().lower())
        # Parsing a host costs as much as all other checks of a request, and few different hosts occur.
        self._allows_host = lru_cache(HOSTS_REMEMBERED)(self._is_allowed_host)

    def check(
        self, headers: Headers, *, strict: bool, any_origin: bool = False, is_forwarded: bool = False
    ) -> None:
        """Raise `Forbidden` unless `Host` and `Origin`, where present, name this server.

        With `any_origin`, `Origin` is not checked: the page may use the API (see `cors`). `is_forwarded`: the
        request comes through a proxy, which may have written `Host`.
        """
        host = headers.get("Host")
        if host is None and strict and is_forwarded:
            host = ""
        if host is not None and (
            len(host) > MAX_HOST_LENGTH or not self._allows_host(host, strict, is_forwarded)
        ):
            message = f"Host: {quoted(host)} is not known as a name of this server (see allowedHosts)"
            raise Forbidden(message, param="Host")
        origin = headers.get("Origin")
        if origin is None or any_origin or self._is_own(origin, host):
            return
        if not strict and headers.get("Sec-Fetch-Site") == "same-origin":
            return
        raise Forbidden(f"Origin: a page of {quoted(origin)} may not send this request", param="Origin")

    def _is_own(self, origin: str, host: str | None) -> bool:
        if host is not None and _is_same(origin, host):
            return True
        # On the scheme's default port only: other ports of that machine may be other servers.
        return any(_is_same(origin, name) for name in self._allowed)

    def _is_allowed_host(self, host: str, strict: bool, is_forwarded: bool) -> bool:
        name = _hostname(host)
        if strict and is_forwarded:
            return name in self._allowed
        if is_loopback(name) or name.endswith(".localhost") or name in self._names:
            return True
        return _address(name) is not None and (self._everywhere or not strict)


def _is_same(origin: str, host: str) -> bool:
    """Return whether the origin's server is the requested one. A proxy may have replaced https by http."""
    try:
        parts = urlsplit(origin)
        port = parts.port or _DEFAULT_PORTS.get(parts.scheme)
    except ValueError:
        return False
    if parts.scheme not in _DEFAULT_PORTS or not parts.hostname:
        return False
    requested = urlsplit(f"//{host}")
    return (parts.hostname, port) == (_hostname(host), requested.port or _DEFAULT_PORTS[parts.scheme])


def _hostname(host: str) -> str:
    """Return the name in a `Host`, in lower case; empty if the value is invalid."""
    try:
        parts = urlsplit(f"//{host}")
        _ = parts.port  # raises ValueError if invalid
    except ValueError:
        return ""
    return parts.hostname or "" if parts.netloc == host and parts.username is None else ""


def _is_everywhere(host: str) -> bool:
    address = _address(host)
    return address is not None and address.is_unspecified


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None
