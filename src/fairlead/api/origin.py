"""Whether a request was meant for this server, or a web page elsewhere made its visitor's browser send it.

A page can send requests to any address that its visitor's machine can reach, and by giving a name of its own
our address even read the answers. Browsers say which page asks (`Origin`) and which name they were sent to
(`Host`), and no page can change that. Programs that are no browsers are not held up: they may leave both out.
"""

import ipaddress
import socket
from collections.abc import Iterable
from urllib.parse import urlsplit

from fairlead.api.body import told
from fairlead.api.call import Headers
from fairlead.config import is_loopback
from fairlead.errors import Forbidden

_DEFAULT_PORTS = {"http": 80, "https": 443}


class Guard:
    """Refuses what was meant for others. `host` is what the server was told to listen on, and `allowed` are
    names besides, as those of a proxy: a proxy may tell us another name than the page it serves has.

    Right names are those of the loopback interface and that host. A server that listens on every address has
    as many names as its machine: its own one and any address are right, for an address is no page's to give.
    """

    def __init__(self, host: str, allowed: Iterable[str] = ()) -> None:
        self._allowed = frozenset(name.lower() for name in allowed)
        self._names = {host.lower(), *self._allowed}
        self._everywhere = _is_everywhere(host)
        if self._everywhere:
            self._names.add(socket.gethostname().lower())

    def check(self, headers: Headers) -> None:
        """Raise `Forbidden` unless `Host` is one of ours and `Origin`, if there is one, is the same."""
        host = headers.get("Host")
        if host is not None and not self._is_ours(_hostname(host)):
            raise Forbidden(f"Host: {told(host)} is none of this server's names", param="Host")
        origin = headers.get("Origin")
        if origin is not None and not self._may_ask(origin, host):
            raise Forbidden(f"Origin: pages of {told(origin)} may not do this", param="Origin")

    def _may_ask(self, origin: str, host: str | None) -> bool:
        if host is not None and _is_same(origin, host):
            return True
        # On its scheme's own port only: others of that machine may belong to somebody else.
        return any(_is_same(origin, name) for name in self._allowed)

    def _is_ours(self, name: str) -> bool:
        if is_loopback(name) or name.endswith(".localhost") or name in self._names:
            return True
        return self._everywhere and _address(name) is not None


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
