"""A TCP proxy whose network can be broken and healed while connections are open."""

from contextlib import suppress
from functools import partial
from typing import Literal

import trio

Mode = Literal["open", "cut", "half-open", "replies lost", "late"]
STREAM_ERRORS = (trio.BrokenResourceError, trio.ClosedResourceError)


class Partition:
    """One machine's network path to a server.

    cut: connections end, and new ones are closed at once. half-open: they are accepted, and nothing is
    forwarded. replies lost: requests arrive, replies do not. late: requests arrive after `delay_s`, also when
    their sender has closed the connection and opened another.
    """

    def __init__(self, port, *, delay_s):
        self.port = 0
        self._server_port = port
        self._delay_s = delay_s
        self._mode: Mode = "open"
        self._connections = set()

    def change(self, mode):
        """Break the network in this way, or heal it. Open connections change, too."""
        self._mode = mode
        if mode == "cut":
            for scope in list(self._connections):
                scope.cancel()

    async def run(self, *, task_status=trio.TASK_STATUS_IGNORED):
        """Serve until cancelled."""
        async with trio.open_nursery() as nursery:
            (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
            self.port = listener.socket.getsockname()[1]
            task_status.started()
            await trio.serve_listeners(partial(self._serve, nursery), [listener])

    async def _serve(self, late, client):
        async with client:
            if self._mode == "cut":
                return
            server = await trio.open_tcp_stream("127.0.0.1", self._server_port)
            with trio.CancelScope() as scope:
                self._connections.add(scope)
                try:
                    async with trio.open_nursery() as pumps:
                        pumps.start_soon(self._forward_replies, server, client)
                        await self._forward_requests(late, client, server)
                        pumps.cancel_scope.cancel()
                finally:
                    self._connections.discard(scope)
                    late.start_soon(self._close_later, server)

    async def _forward_requests(self, late, client, server):
        with suppress(*STREAM_ERRORS):
            async for data in client:
                if self._mode == "late":
                    late.start_soon(self._send_later, server, data)
                elif self._mode != "half-open":
                    await server.send_all(data)

    async def _forward_replies(self, server, client):
        with suppress(*STREAM_ERRORS):
            async for data in server:
                if self._mode in ("open", "late"):
                    await client.send_all(data)

    async def _send_later(self, server, data):
        await trio.sleep(self._delay_s)
        with suppress(*STREAM_ERRORS, trio.BusyResourceError):
            await server.send_all(data)

    async def _close_later(self, server):
        async with server:
            await trio.sleep(2 * self._delay_s)
