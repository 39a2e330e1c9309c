"""Refuses requests that a web page of another server made its visitor's browser send.

A page can send requests to every address that its visitor's machine can reach. If the name of its own
server is made to resolve to our address (DNS rebinding), it can also read the answers. A browser says which
page asks (`Origin`) and which name it was sent to (`Host`), and a page cannot change either. A program may
leave both out.

What is checked:

| | without API keys | with API keys |
|---|---|---|
| an operator's routes (`/models/load`, `/nodes`, …) | strictly | strictly |
| `/health`, `/ready` | no | no |
| every other route | yes | no: a page does not have the key |

`Host` may be, wherever the server listens:

- a name of the loopback interface, the configured `host`, or one of `allowedHosts`. The public name of a
  reverse proxy that passes `Host` on must be among the latter: a rebinding attack uses such a name too;
- if the server listens on all addresses, the machine's name and every address;
- unless checked strictly, every address, and every name that public DNS does not have. A page cannot make
  an address resolve to another, and a page on the internet cannot have such a name. Kubernetes and load
  balancers probe and scrape by address, also through a sidecar that forwards to the loopback interface.
  Containers and services have names without a dot, as has an `upstream` of nginx, or names such as
  `host.docker.internal`.

Probes may send any `Host`, so `/health` and `/ready`, which reveal little, are open to all.

`Origin` may be the server that was asked, or one of `allowedHosts` on its scheme's own port. Unless checked
strictly, it may be any if the browser says that the page comes from the address that it asked
(`Sec-Fetch-Site: same-origin`): the proxy in between may have sent us another `Host`. `Origin: null`, which a
sandboxed frame and a local file send, is refused. Routes that are not an operator's are open to the pages of
the origins in `cors`, too. Below `/upstream`, a request that a browser sends for a page of another server
without `Origin`, as for an image, is refused (see `upstream`).
"""

import ipaddress
import re
import socket
from collections.abc import Iterable
from functools import lru_cache
from urllib.parse import urlsplit

from fairlead.api.body import told
from fairlead.api.call import Headers
from fairlead.config import is_loopback
from fairlead.errors import Forbidden

_DEFAULT_PORTS = {"http": 80, "https": 443}
_NAME = re.compile(r"[a-z0-9_.-]+")


# Names below these are never in public DNS (RFC 6761, 6762, 8375; ICANN on .internal), or not today.
PRIVATE_SUFFIXES = (".localhost", ".local", ".internal", ".home.arpa", ".lan", ".svc")
HOSTS_REMEMBERED = 256
MAX_HOST_LENGTH = 262  # a name of DNS, a colon and a port


class Guard:
    """Checks `Host` and `Origin`. `host` is the address to listen on, `allowed` are further names for it."""

    def __init__(self, host: str, allowed: Iterable[str] = ()) -> None:
        self._allowed = frozenset(name.lower() for name in allowed)
        self._names = {host.lower(), *self._allowed}
        self._everywhere = _is_everywhere(host)
        if self._everywhere:
            self._names.add(socket.gethostname().lower())
        # Taking a host apart costs as much as the rest of a request's checks, and few different ones come.
        self._is_right = lru_cache(HOSTS_REMEMBERED)(self._judge)

    def check(self, headers: Headers, *, strict: bool, any_origin: bool = False) -> None:
        """Raise `Forbidden` unless `Host` is one of ours and `Origin`, if there is one, is the same.

        With `any_origin` that is not looked at: the page may use the API (see `cors`).
        """
        host = headers.get("Host")
        if host is not None and (len(host) > MAX_HOST_LENGTH or not self._is_right(host, strict)):
            message = f"Host: {told(host)} is not a name of this server (allowedHosts in its configuration)"
            raise Forbidden(message, param="Host")
        origin = headers.get("Origin")
        if origin is None or any_origin or self._may_ask(origin, host):
            return
        if not strict and headers.get("Sec-Fetch-Site") == "same-origin":
            return
        raise Forbidden(f"Origin: a page of {told(origin)} may not send this request", param="Origin")

    def _may_ask(self, origin: str, host: str | None) -> bool:
        if host is not None and _is_same(origin, host):
            return True
        # On its scheme's own port only: others of that machine may belong to somebody else.
        return any(_is_same(origin, name) for name in self._allowed)

    def _judge(self, host: str, strict: bool) -> bool:
        name = _hostname(host)
        if is_loopback(name) or name.endswith(".localhost") or name in self._names:
            return True
        if _address(name) is not None:
            return self._everywhere or not strict
        if strict or _NAME.fullmatch(name) is None:
            return False
        return "." not in name or name.endswith(PRIVATE_SUFFIXES)


def _is_same(origin: str, host: str) -> bool:
    """Whether the page's server is the one that was asked. A proxy may have taken the `s` off https."""
    try:
        parts = urlsplit(origin)
        port = parts.port or _DEFAULT_PORTS.get(parts.scheme)
    except ValueError:
        return False
    if parts.scheme not in _DEFAULT_PORTS or not parts.hostname:
        return False
    asked = urlsplit(f"//{host}")
    return (parts.hostname, port) == (_hostname(host), asked.port or _DEFAULT_PORTS[parts.scheme])


def _hostname(host: str) -> str:
    """Return the name in a `Host`, in lower case; nothing if it is none."""
    try:
        parts = urlsplit(f"//{host}")
        _ = parts.port  # raises if it is none
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
