"""The generating and tokenizing routes, handled without Quart: the same contract at a third of the cost.

In a flood of requests, the cost of each delays all others. So a request is one task, which reads the body,
runs the job and responds. Only a stream needs a second task. A refusal is sent in the same event-loop turn in
which its request was read.

A request's lifetime is as in `exchange`. All work for it runs in its nursery, which is cancelled when the
client disconnects and when the response is complete. A truncated response ends the connection.
"""

from collections.abc import AsyncIterable
from typing import Any

import trio

from fairlead.base.config import Limits
from fairlead.base.supervision import unwrap
from fairlead.generation.event_stream import CutStream, EventStream
from fairlead.server.auth.request_auth import RequestAuth
from fairlead.server.routes.errors import ErrorFormats, error_response, public_error
from fairlead.server.routes.request import Request, Response, View
from fairlead.server.routes.request_body import BodyMemory, IncomingBody
from fairlead.server.routes.request_caller import tenant_so_far
from fairlead.server.routes.unread import UnreadAnswers


class GenerationRoutes:
    """Runs views without Quart.

    auth: The checks before each view.
    body_memory: Counts the bodies of requests.
    error_formats: The forms of errors.
    unread: Counts what of responses waits for clients.
    """

    def __init__(
        self,
        auth: RequestAuth,
        body_memory: BodyMemory | None = None,
        error_formats: ErrorFormats | None = None,
        unread: UnreadAnswers | None = None,
    ) -> None:
        self._auth = auth
        self._error_formats = error_formats or ErrorFormats(())
        self._body_memory = body_memory or BodyMemory(Limits().bodies_bytes)
        self._unread = unread or UnreadAnswers(Limits().answers_bytes)

    async def __call__(self, view: View, scope: Any, receive: Any, send: Any) -> None:
        """Respond with the view, or return without a response if the client disconnects first."""
        exchange = _Exchange(
            self._auth, self._error_formats, self._body_memory, self._unread, scope, receive, send
        )
        try:
            await exchange.run(view)
        finally:
            exchange.dispose()

    async def refuse(self, error: Exception, scope: Any, receive: Any, send: Any) -> None:
        """Respond with this error, after the checks that precede every view."""

        async def fail(_request: Request) -> Response:
            raise error

        await self(fail, scope, receive, send)


class _Exchange:
    """One request and its response."""

    def __init__(
        self,
        auth: RequestAuth,
        error_formats: ErrorFormats,
        body_memory: BodyMemory,
        unread: UnreadAnswers,
        scope: Any,
        receive: Any,
        send: Any,
    ) -> None:
        self._auth = auth
        self._error_formats = error_formats
        self._body_memory = body_memory
        self._receive = receive
        self._send = send
        self._limits = scope.get("state", {}).get("limits") or Limits()
        self._direct = scope.get("extensions", {}).get("fairlead")
        self._request = Request(scope, self._read)
        self._request.open_body = self._open_body
        self._unread = unread.of(self._request, self._direct)
        self._incoming: IncomingBody | None = None
        self._has_begun = False

    async def run(self, view: View) -> None:
        """Run the view and send its response."""
        unended: Response | None = None
        failure: BaseException | None = None
        try:
            async with trio.open_nursery() as self._request.nursery:
                response = await self._respond(view)
                if not isinstance(response.body, bytes):
                    await self._stream(response, response.body)
                # The end is sent after all tasks of the request: it makes some ASGI servers cancel them.
                if self._request.nursery.child_tasks:
                    unended = response
                    self._request.nursery.cancel_scope.cancel()
                else:
                    await self._end(response)
        except* Exception as group:  # noqa: BLE001  # a task of the request may raise anything
            failure = unwrap(group)
        finally:
            self._request.leave_body()
        if isinstance(failure, Exception) and not self._has_begun:
            unended = self._refusal(failure)
        elif failure is not None and not isinstance(failure, CutStream):
            raise failure
        if unended is not None:
            await self._end(unended)

    def dispose(self) -> None:
        """Break the reference cycle of request and exchange, which only the garbage collector would free."""
        self._unread.leave()
        del self._request

    async def _respond(self, view: View) -> Response:
        try:
            self._auth.enter(self._request)
            return await view(self._request)
        except Exception as error:  # noqa: BLE001  # a view may raise anything
            return self._refusal(error)

    def _refusal(self, raised: Exception) -> Response:
        error = public_error(raised)
        self._auth.log_refusal(self._request, error)
        response = error_response(raised, self._error_formats.of(self._request.path), error)
        # The traceback's frames refer to the body, and, if a thread raised the error, to the error itself.
        # The body of every refused request would stay in memory until the cycle collector runs.
        raised.__traceback__ = None
        return response

    async def _stream(self, response: Response, body: AsyncIterable[bytes]) -> None:
        """Send the response except for its end. It may take any time as long as the client reads."""
        await self._begin(response)
        if isinstance(body, EventStream):
            body.direct = self._direct
        async for piece in body:
            await self._send({"type": "http.response.body", "body": piece, "more_body": True})

    async def _end(self, response: Response) -> None:
        """Send the rest of the response: its end, or all of it."""
        rest = b""
        if isinstance(response.body, bytes):
            rest = response.body
            await self._begin(response, ("Content-Length", str(len(rest))))
        await self._send({"type": "http.response.body", "body": rest, "more_body": False})

    async def _begin(self, response: Response, *more: tuple[str, str]) -> None:
        self._has_begun = True
        if self._incoming is not None:
            self._incoming.keep()
        headers = (*response.headers.items(), *self._auth.headers(self._request).items(), *more)
        encoded = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers]
        await self._send({"type": "http.response.start", "status": response.status, "headers": encoded})

    async def _read(self) -> bytes:
        """Return the whole body; see `IncomingBody.read`."""
        return await self._open_body().read(self._body_memory, tenant_so_far(self._request))

    def _open_body(self) -> IncomingBody:
        request = self._request
        self._incoming = IncomingBody(
            self._receive, request.headers, self._limits, request.nursery, cancels=self._direct is not None
        )
        request.leave_body = self._incoming.leave
        return self._incoming
