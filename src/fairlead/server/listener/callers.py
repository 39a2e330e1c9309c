"""Who sends a request, as far as its turn depends on it: the client's address, and a line at this address.

Behind a reverse proxy, and behind an address that many people share, requests with different keys wait in
different lines. A connection that was just accepted has usually received its request already. So its head is
read ahead, without h11 and without removing it from the socket: this takes microseconds, and starting the
connection a hundred times as long. What is found decides only the order of turns.
"""

import socket
from collections.abc import Callable
from typing import NamedTuple

from fairlead.server.listener.forwarded import TrustedProxies

# Of a head that is read ahead.
PEEKED_BYTES = 4096
PEEKED_HEADERS = 100

# Returns the line of a request from its client's address and its headers: "" for everybody unknown there.
LineOf = Callable[[str | None, list[tuple[bytes, bytes]]], str]


class Sender(NamedTuple):
    """An address, and a line of those at this address."""

    address: str
    line: str = ""


class Callers:
    """Finds the callers of requests: `proxies` may name other addresses, and `line_of` tells lines apart."""

    def __init__(self, proxies: TrustedProxies | None = None, line_of: LineOf | None = None) -> None:
        self.proxies = proxies or TrustedProxies()
        self._line_of = line_of

    def line(self, address: str | None, headers: list[tuple[bytes, bytes]]) -> str:
        """Return the line of a request at its client's address."""
        return "" if self._line_of is None else self._line_of(address, headers)

    def peek(self, sock: socket.socket, peer: str) -> Sender:
        """Return the caller of the request that the socket has received; if it has none yet, the peer."""
        if self._line_of is None:
            return Sender(peer)
        try:
            data = sock.recv(PEEKED_BYTES, socket.MSG_PEEK)
        except OSError:
            return Sender(peer)
        headers = _headers_in(data)
        address = self.proxies.client(peer, headers).address
        return Sender(address or "", self.line(address, headers))


def _headers_in(data: bytes) -> list[tuple[bytes, bytes]]:
    """Return the whole headers in the beginning of a request."""
    head, end, _ = data.partition(b"\r\n\r\n")
    lines = head.split(b"\r\n", PEEKED_HEADERS + 1)[1 : PEEKED_HEADERS + 1]
    if not end and lines:
        lines.pop()  # it may be incomplete
    pairs = (line.partition(b":") for line in lines)
    return [(name.lower(), value.strip(b" \t")) for name, _, value in pairs]
