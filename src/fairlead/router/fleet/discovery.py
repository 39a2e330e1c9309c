"""Nodes by DNS: each address of a name is a node, as of a headless Service in Kubernetes.

Addresses are looked up regularly. A new one becomes a node at once; one that is missing from two answers in
a row gets no more jobs, and is removed when those that it has are finished. A lookup that fails changes
nothing: probes tell which nodes respond. Jobs that wait for a model go on waiting, because another node may
come.
"""

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from ipaddress import ip_address
from urllib.parse import urlsplit

import structlog
import trio
from msgspec.structs import replace

from fairlead.base.config import NodeConfig
from fairlead.base.config.fleet import DNS_SCHEME
from fairlead.base.errors import InvalidRequest, quoted
from fairlead.nodes.http.restricted_addresses import is_restricted

INTERVAL_S = 5.0
MISSES = 2  # answers without an address until it counts as gone
MAX_NODES = 1000  # of one name
LOOKUP_S = 5.0  # for the name of a new node

Lookup = Callable[[str, int], Awaitable[Sequence[str]]]

logger = structlog.get_logger("fairlead.router.fleet")


async def look_up(host: str, port: int) -> list[str]:
    """Return the addresses of a name. Raises `OSError`."""
    found = await trio.socket.getaddrinfo(host, port, type=trio.socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


async def refuse_restricted(node: NodeConfig, lookup: Lookup) -> None:
    """Raise `InvalidRequest` if a node has a link-local or metadata address; see `http.restricted_addresses`.

    A name that cannot be resolved now is accepted. Connections to it are checked when they are made.
    """
    host, port = address_of(node)
    found: Sequence[str] = ()
    with trio.move_on_after(LOOKUP_S), suppress(OSError, UnicodeError):
        found = await lookup(host, port)
    if any(map(is_restricted, (host, *found))):
        message = (
            f"url: {quoted(host)} is a link-local or metadata address, which only the configuration may name"
        )
        raise InvalidRequest(message, param="url")


def address_of(node: NodeConfig) -> tuple[str, int]:
    """Return the host and the port of a node."""
    parts = urlsplit(node.url.removeprefix(DNS_SCHEME))
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return (parts.hostname or "").lower().rstrip("."), port


class NodeDiscovery:
    """Keeps the nodes of one name.

    config: that of each node, with the name in its URL.
    add: adds a node.
    remove: removes one by its id, and returns when its jobs are finished.
    spawn: starts a task.
    lookup: returns the addresses of the name.
    """

    def __init__(
        self,
        config: NodeConfig,
        *,
        add: Callable[[NodeConfig], None],
        remove: Callable[[str], Awaitable[None]],
        spawn: Callable[..., None],
        lookup: Lookup = look_up,
    ) -> None:
        parts = urlsplit(config.url.removeprefix(DNS_SCHEME))
        assert parts.hostname, "the configuration is checked"
        self._config = config
        self._scheme = parts.scheme
        self._host = parts.hostname
        self._port = parts.port or 80
        self._target = parts.path + (f"?{parts.query}" if parts.query else "")
        self._add = add
        self._remove = remove
        self._spawn = spawn
        self._lookup = lookup
        self._misses: dict[str, int] = {}  # of each address that is a node
        self._leaving: set[str] = set()  # addresses whose nodes are being removed
        self._scope = trio.CancelScope()
        self._failure = ""
        self.has_answer = False  # whether a lookup is over, successful or not

    async def run(self) -> None:
        """Look addresses up until `close`."""
        with self._scope:
            while True:
                try:
                    found = await self._lookup(self._host, self._port)
                except OSError as error:
                    self._log_failure(str(error))
                else:
                    self._failure = ""
                    self._apply(found)
                self.has_answer = True
                await trio.sleep(INTERVAL_S)

    def change_probes(self, config: NodeConfig) -> list[NodeConfig] | None:
        """Use another configuration; return the nodes' new ones. None if more than the probes differs."""
        if config.relaying != self._config.relaying:
            return None
        self._config = config
        return [self._node(address) for address in self._misses]

    async def close(self) -> None:
        """End, and remove all nodes; return when their jobs are finished."""
        self._scope.cancel()
        async with trio.open_nursery() as nursery:
            for address in list(self._misses):
                nursery.start_soon(self._end, address)

    def _apply(self, found: Sequence[str]) -> None:
        if len(found) > MAX_NODES:
            logger.warning("too many addresses", node=self._config.id, found=len(found), most=MAX_NODES)
        present = set(found[:MAX_NODES])
        for address in list(self._misses):
            self._misses[address] = 0 if address in present else self._misses[address] + 1
            if self._misses[address] >= MISSES:
                self._spawn(self._end, address)
        for address in sorted(present - self._misses.keys() - self._leaving):
            self._misses[address] = 0
            self._add(self._node(address))

    async def _end(self, address: str) -> None:
        """Remove a node. Its address is used again only when it is gone."""
        if self._misses.pop(address, None) is None:
            return
        self._leaving.add(address)
        try:
            await self._remove(self._node(address).id)
        finally:
            self._leaving.discard(address)

    def _node(self, address: str) -> NodeConfig:
        host = f"[{address}]" if ip_address(address).version == 6 else address
        url = f"{self._scheme}://{host}:{self._port}{self._target}"
        return replace(self._config, id=f"{self._config.id}-{address}", url=url)

    def _log_failure(self, reason: str) -> None:
        """Log a failed lookup, but not again for the same reason."""
        if reason != self._failure:
            self._failure = reason
            logger.warning("name not resolved", node=self._config.id, name=self._host, reason=reason)
