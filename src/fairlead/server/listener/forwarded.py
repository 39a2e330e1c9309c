"""The address of a client behind reverse proxies: `X-Forwarded-For`, and `Forwarded` of RFC 7239.

A proxy appends the address of its own client. So the list is read from its end, up to the first address that
is not a trusted proxy's: what is before it may be the client's invention. Both headers are read only from
trusted peers. If a list has no address where one is needed (`unknown`, `_hidden`, nonsense), or both headers
are there and differ, the client's address is unknown. It is then no address at all, rather than the proxy's,
which may have rights.

The work is bounded whatever a client sends: `MOST_HOPS` addresses, and `FORWARDED_BYTES` of `Forwarded`.
"""

import ipaddress
import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import NamedTuple

MOST_HOPS = 32
MOST_ADDRESS_CHARS = 64
FORWARDED_BYTES = 4096
ADDRESS_CACHE_SIZE = 1024
FORWARDED = "fairlead.forwarded"  # the key of an ASGI scope with `ClientAddress.is_forwarded`
UNIX = "unix"  # in place of an address: peers that connect through a unix socket

_WORD = r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_PAIR = re.compile(
    rf'[ \t]*+(?:(?P<name>{_WORD})=(?P<value>{_WORD}|"(?:[^"\\]|\\.)*"))?[ \t]*+(?P<end>[;,]|$)', re.DOTALL
)
_QUOTED_PAIR = re.compile(r"\\(.)", re.DOTALL)
_PORT = re.compile(r"(?::[0-9]{1,5})?")

HeaderPairs = Iterable[tuple[bytes, bytes]]
Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class ClientAddress(NamedTuple):
    """The client that sent a request. `address`: None if it is not known.

    `is_forwarded`: the request says that it comes through a proxy, trusted or not.
    """

    address: str | None
    is_forwarded: bool


class TrustedProxies:
    """The proxies whose headers are read: addresses, networks such as 10.0.0.0/8, and `unix`.

    Raises `ValueError` for anything else.
    """

    def __init__(self, entries: Iterable[str] = ()) -> None:
        listed = tuple(entries)
        self._networks = tuple(ipaddress.ip_network(entry) for entry in listed if entry != UNIX)
        self._has_unix = UNIX in listed
        self._is_trusted_peer = lru_cache(ADDRESS_CACHE_SIZE)(self._is_peer_in_networks)

    def client(self, peer: str | None, headers: HeaderPairs) -> ClientAddress:
        """Return the client of a request that this peer sent; header names are in lower case."""
        lists = [(name, value) for name, value in headers if name in (b"x-forwarded-for", b"forwarded")]
        if not lists:
            return ClientAddress(peer, is_forwarded=False)
        if not self._is_trusted_peer(peer):
            return ClientAddress(peer, is_forwarded=True)
        found = {
            self._first_untrusted(hops)
            for hops in (
                _of_x_forwarded_for([value for name, value in lists if name == b"x-forwarded-for"]),
                _of_forwarded([value for name, value in lists if name == b"forwarded"]),
            )
            if hops is not None
        }
        if not found:  # both are empty
            return ClientAddress(peer, is_forwarded=True)
        return ClientAddress(found.pop() if len(found) == 1 else None, is_forwarded=True)

    def _first_untrusted(self, hops: Iterable[Address | None]) -> str | None:
        """Return the first address that is no proxy's, or the last one; None if it is not known."""
        address: Address | None = None
        for number, hop in enumerate(hops):
            if hop is None or number == MOST_HOPS:
                return None
            address = hop
            if not self._is_in_networks(hop):
                break
        return None if address is None else str(address)

    def _is_peer_in_networks(self, peer: str | None) -> bool:
        if not peer:
            return self._has_unix
        address = _parse(peer)
        return address is not None and self._is_in_networks(address)

    def _is_in_networks(self, address: Address) -> bool:
        return any(address in network for network in self._networks)


def _of_x_forwarded_for(values: list[bytes]) -> Iterable[Address | None] | None:
    """Return the addresses from the last one on; None if there are none."""
    if not any(value.strip(b" \t,") for value in values):
        return None
    return _backwards(values)


def _backwards(values: list[bytes]) -> Iterator[Address | None]:
    for value in reversed(values):
        rest, comma = value.rstrip(b" \t,"), b","
        while comma and rest:
            rest, comma, hop = rest.rpartition(b",")
            yield _parse(hop.strip(b" \t").decode("latin-1"))


def _of_forwarded(values: list[bytes]) -> Iterable[Address | None] | None:
    """Return the addresses in `for`, from the last one on; None if there are none.

    A list that is malformed anywhere has no known address. A client could otherwise open a quoted string
    that hides what a proxy appends.
    """
    text = b",".join(values).decode("latin-1")
    if not text.strip(" \t,;"):
        return None
    if len(text) > FORWARDED_BYTES:
        return [None]
    hops: list[Address | None] = []
    fields: dict[str, str] = {}
    position = 0
    while True:
        match = _PAIR.match(text, position)
        if match is None:
            return [None]
        name = (match["name"] or "").lower()
        if name in fields:
            return [None]
        if name:
            fields[name] = match["value"]
        if match["end"] != ";":
            if fields:
                hops.append(_parse(_unquoted(fields.get("for", ""))))
            fields = {}
        if not match["end"]:
            return reversed(hops)
        position = match.end()


def _unquoted(value: str) -> str:
    return _QUOTED_PAIR.sub(r"\1", value[1:-1]) if value.startswith('"') else value


@lru_cache(ADDRESS_CACHE_SIZE)
def _parse(text: str) -> Address | None:
    """Return the address of a hop, which may have a port, and brackets if it is IPv6."""
    if len(text) > MOST_ADDRESS_CHARS or "%" in text:
        return None
    host, port = text, ""
    if text.startswith("["):
        host, bracket, port = text[1:].partition("]")
        if not bracket or ":" not in host:
            return None
    elif text.count(":") == 1:
        host, _, number = text.partition(":")
        port = f":{number}"
    if _PORT.fullmatch(port) is None:
        return None
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address
