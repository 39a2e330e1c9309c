"""The routes that generate or tokenize, answered past Quart: the same contract for a third of the time.

In a flood of requests what each costs is what everybody else waits. So a request is one task, which reads
the body, has the job served and answers; only a stream needs a second one, and a refusal is answered within
the turn in which its request was read.

An answer's lifetime is as in `exchange`: all that is done for a request belongs to its nursery, which is
cancelled when the client leaves and when the answer is complete, and half an answer ends the connection.
"""

from collections.abc import AsyncIterable, Awaitable, Callable, Mapping
from typing import Any

import trio

from fairlead.api.access import tenant_of
from fairlead.api.call import Call, FirstHeaders, Reply
from fairlead.api.door import Door
from fairlead.api.errors import error_reply, public_error
from fairlead.api.exchange import CutStream, unwrap
from fairlead.api.incoming import IncomingBody
from fairlead.api.shares import Shares
from fairlead.api.sse import EventStream
from fairlead.config import Limits

Route = Callable[[Call], Awaitable[Reply]]


class HotRoutes:
    """ASGI for POST to a few exact paths. Bodies count against `body_memory`."""

    def __init__(self, door: Door, routes: Mapping[str, Route], body_memory: Shares | None = None) -> None:
        self._door = door
        self._routes = routes
        self._body_memory = body_memory or Shares(Limits().bodies_bytes)

    def serves(self, scope: Any) -> bool:
        """Whether this request is for one of them. All other questions about their paths are Quart's."""
        return scope["type"] == "http" and scope["method"] == "POST" and scope["path"] in self._routes

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer the request, or return without an answer if its client leaves first."""
        await self._answer(self._routes[scope["path"]], scope, receive, send)

    async def refuse(self, error: Exception, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request with this error, after the checks that precede every route."""

        async def fail(_call: Call) -> Reply:
            raise error

        await self._answer(fail, scope, receive, send)

    async def _answer(self, route: Route, scope: Any, receive: Any, send: Any) -> None:
        request = _Request(self._door, self._body_memory, scope, receive, send)
        try:
            await request.answer(route)
        finally:
            request.dispose()


class _Request:
    """One request and the sending of its answer."""

    def __init__(self, door: Door, body_memory: Shares, scope: Any, receive: Any, send: Any) -> None:
        self._door = door
        self._body_memory = body_memory
        self._path = scope["path"]
        self._receive = receive
        self._send = send
        self._limits = scope.get("state", {}).get("limits") or Limits()
        self._direct = scope.get("extensions", {}).get("fairlead")
        client = scope.get("client")
        self._call = Call(
            FirstHeaders(scope["headers"]),
            client[0] if client else None,
            self._read,
            method=scope["method"],
            path=self._path,
        )
        self._incoming: IncomingBody | None = None
        self._answering = False

    async def answer(self, route: Route) -> None:
        """Have the route answer, and send what it says."""
        unended: Reply | None = None
        failure: BaseException | None = None
        try:
            async with trio.open_nursery() as self._call.nursery:
                reply = await self._reply(route)
                if not isinstance(reply.body, bytes):
                    await self._stream(reply, reply.body)
                # The end goes out when nothing of the request is left: who hears of it may cancel what is.
                if self._call.nursery.child_tasks:
                    unended = reply
                    self._call.nursery.cancel_scope.cancel()
                else:
                    await self._end(reply)
        except* Exception as group:  # noqa: BLE001  # a task of the request may raise anything
            failure = unwrap(group)
        finally:
            self._call.leave_body()
        if isinstance(failure, Exception) and not self._answering:
            unended = self._refusal(failure)
        elif failure is not None and not isinstance(failure, CutStream):
            raise failure
        if unended is not None:
            await self._end(unended)

    def dispose(self) -> None:
        """Break the reference cycle of request and call, which only the garbage collector would free."""
        del self._call

    async def _reply(self, route: Route) -> Reply:
        try:
            self._door.enter(self._call)
            return await route(self._call)
        except Exception as error:  # noqa: BLE001  # a route may raise anything
            return self._refusal(error)

    def _refusal(self, raised: Exception) -> Reply:
        error = public_error(raised)
        self._door.refused(self._call, error)
        reply = error_reply(raised, self._path, error)
        # Its frames refer to the body, and, if a thread raised it, to the error itself: the body would stay
        # in memory until the cycle collector runs, that of every refused request.
        raised.__traceback__ = None
        return reply

    async def _stream(self, reply: Reply, body: AsyncIterable[bytes]) -> None:
        """Send the answer but for its end. It may take as long as it wants to, if only the client reads."""
        await self._begin(reply)
        if isinstance(body, EventStream):
            body.direct = self._direct
        async for piece in body:
            await self._send({"type": "http.response.body", "body": piece, "more_body": True})

    async def _end(self, reply: Reply) -> None:
        """Send what remains of the answer: its end, or all of it."""
        rest = b""
        if isinstance(reply.body, bytes):
            rest = reply.body
            await self._begin(reply, ("Content-Length", str(len(rest))))
        await self._send({"type": "http.response.body", "body": rest, "more_body": False})

    async def _begin(self, reply: Reply, *more: tuple[str, str]) -> None:
        self._answering = True
        if self._incoming is not None:
            self._incoming.keep()
        headers = (*reply.headers.items(), *self._door.headers(self._call).items(), *more)
        encoded = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers]
        await self._send({"type": "http.response.start", "status": reply.status, "headers": encoded})

    async def _read(self) -> bytes:
        """Return the whole body; see `IncomingBody.read`."""
        call = self._call
        self._incoming = IncomingBody(
            self._receive, call.headers, self._limits, call.nursery, cancels=self._direct is not None
        )
        call.leave_body = self._incoming.leave
        tenant = tenant_of(call.api_key, call.headers, call.address, user=None, safety_identifier=None)
        return await self._incoming.read(self._body_memory, tenant)
