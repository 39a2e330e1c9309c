"""The connections to one server that are open and not in use. Bounded in number and in time."""

from collections import deque

import trio

from fairlead.nodes.http.client_connection import ClientConnection

# Each takes a descriptor on both sides.
MAX_IDLE = 32


class IdleConnections:
    """A stack of connections, of which none is used again after `idle_s`."""

    def __init__(self, idle_s: float) -> None:
        self._idle_s = idle_s
        self._connections: deque[ClientConnection] = deque()

    def __len__(self) -> int:
        return len(self._connections)

    def put(self, connection: ClientConnection) -> None:
        """Keep a connection if its response was read to the end and there is space; else close it."""
        parser = connection.parser
        is_good = parser.head is not None and parser.head.keep_alive and not parser.surplus
        is_reusable = is_good and parser.is_complete and connection.is_sent and not connection.is_closed
        if is_reusable and len(self._connections) < MAX_IDLE:
            connection.idle_since = trio.current_time()
            self._connections.append(connection)
        else:
            connection.link.close()

    def take(self) -> ClientConnection | None:
        """Remove and return the connection used last: it is the likeliest to work, and the others expire."""
        oldest = trio.current_time() - self._idle_s
        while self._connections:
            connection = self._connections[-1]  # it stays there if `is_stale` raises
            is_usable = connection.idle_since >= oldest and not connection.link.is_stale()
            self._connections.pop()
            if is_usable:
                return connection
            connection.link.close()
        return None

    def close_stale(self) -> None:
        """Close the connections that were idle for too long, or that the server has closed."""
        oldest = trio.current_time() - self._idle_s
        for connection in list(self._connections):
            if connection.idle_since < oldest or connection.link.is_stale():
                self._connections.remove(connection)
                connection.link.close()

    def close(self) -> None:
        """Close all."""
        while self._connections:
            self._connections.pop().link.close()
