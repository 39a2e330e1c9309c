"""The generating and tokenizing routes, handled without Quart: the same contract for a third of the time.

In a flood of requests, the cost of each delays all others. So a request is one task, which reads the body,
runs the job and responds. Only a stream needs a second task. A refusal is sent in the same event-loop turn in
which its request was read.

A request's lifetime is as in `exchange`: all work for it runs in its nursery, which is cancelled when the
client disconnects and when the response is complete. A truncated response ends the connection.
"""

from collections.abc import AsyncIterable, Awaitable, Callable, Mapping
from typing import Any

import trio

from fairlead.api.errors import ErrorFormats, error_response, public_error
from fairlead.api.exchange import CutStream, unwrap
from fairlead.api.request import Request, Response
from fairlead.api.request_auth import RequestAuth
from fairlead.api.request_body import IncomingBody
from fairlead.api.shares import Shares
from fairlead.api.sse import EventStream
from fairlead.config import Limits
from fairlead.http.headers import FirstHeaders
from fairlead.tenancy.access import tenant_of

Route = Callable[[Request], Awaitable[Response]]


class GenerationRoutes:
    """An ASGI app for POST to a few exact paths. Bodies count against `body_memory`."""

    def __init__(
        self,
        door: RequestAuth,
        routes: Mapping[str, Route],
        body_memory: Shares | None = None,
        error_formats: ErrorFormats | None = None,
    ) -> None:
        self._door = door
        self._routes = routes
        self._body_memory = body_memory or Shares(Limits().bodies_bytes)
        self._error_formats = error_formats or ErrorFormats(())

    def serves(self, scope: Any) -> bool:
        """Return whether a request is for one of the routes. Quart handles other methods of their paths."""
        return scope["type"] == "http" and scope["method"] == "POST" and scope["path"] in self._routes

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Respond to the request, or return without a response if its client disconnects first."""
        await self._answer(self._routes[scope["path"]], scope, receive, send)

    async def refuse(self, error: Exception, scope: Any, receive: Any, send: Any) -> None:
        """Respond with this error, after the checks that precede every route."""

        async def fail(_call: Request) -> Response:
            raise error

        await self._answer(fail, scope, receive, send)

    async def _answer(self, route: Route, scope: Any, receive: Any, send: Any) -> None:
        request = _Request(self._door, self._error_formats, self._body_memory, scope, receive, send)
        try:
            await request.answer(route)
        finally:
            request.dispose()


class _Request:
    """One request and its response."""

    def __init__(
        self,
        door: RequestAuth,
        error_formats: ErrorFormats,
        body_memory: Shares,
        scope: Any,
        receive: Any,
        send: Any,
    ) -> None:
        self._door = door
        self._error_formats = error_formats
        self._body_memory = body_memory
        self._path = scope["path"]
        self._receive = receive
        self._send = send
        self._limits = scope.get("state", {}).get("limits") or Limits()
        self._direct = scope.get("extensions", {}).get("fairlead")
        client = scope.get("client")
        self._call = Request(
            FirstHeaders(scope["headers"]),
            client[0] if client else None,
            self._read,
            method=scope["method"],
            path=self._path,
        )
        self._incoming: IncomingBody | None = None
        self._answering = False

    async def answer(self, route: Route) -> None:
        """Run the route and send its response."""
        unended: Response | None = None
        failure: BaseException | None = None
        try:
            async with trio.open_nursery() as self._call.nursery:
                reply = await self._reply(route)
                if not isinstance(reply.body, bytes):
                    await self._stream(reply, reply.body)
                # The end is sent after all tasks of the request: it makes some ASGI servers cancel them.
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

    async def _reply(self, route: Route) -> Response:
        try:
            self._door.enter(self._call)
            return await route(self._call)
        except Exception as error:  # noqa: BLE001  # a route may raise anything
            return self._refusal(error)

    def _refusal(self, raised: Exception) -> Response:
        error = public_error(raised)
        self._door.refused(self._call, error)
        reply = error_response(raised, self._error_formats.of(self._path), error)
        # The traceback's frames refer to the body, and, if a thread raised the error, to the error itself.
        # The body of every refused request would stay in memory until the cycle collector runs.
        raised.__traceback__ = None
        return reply

    async def _stream(self, reply: Response, body: AsyncIterable[bytes]) -> None:
        """Send the response except for its end. It may take any time as long as the client reads."""
        await self._begin(reply)
        if isinstance(body, EventStream):
            body.direct = self._direct
        async for piece in body:
            await self._send({"type": "http.response.body", "body": piece, "more_body": True})

    async def _end(self, reply: Response) -> None:
        """Send the rest of the response: its end, or all of it."""
        rest = b""
        if isinstance(reply.body, bytes):
            rest = reply.body
            await self._begin(reply, ("Content-Length", str(len(rest))))
        await self._send({"type": "http.response.body", "body": rest, "more_body": False})

    async def _begin(self, reply: Response, *more: tuple[str, str]) -> None:
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
