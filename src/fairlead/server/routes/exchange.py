"""The adapter to Quart: one request and its response, and the lifetime that all work for it belongs to.

An `Exchange` gives its request a nursery. It is cancelled when the client disconnects and when the response
has been sent. So a route can start a task there and need not stop it. Once a status has been sent, an error
cannot change it. The exchange then returns or raises with its response unfinished, and the listener closes
the connection.

Depends on ASGI and Quart, not on sockets or routes. The limits are in the ASGI scope (`state["limits"]`);
without them, as under a test client, the defaults hold.
"""

from typing import Any

import trio
from quart import Response as QuartResponse
from quart.utils import encode_headers
from quart_trio.asgi import TrioASGIHTTPConnection
from quart_trio.wrappers import TrioRequest
from werkzeug.wrappers import Response as WerkzeugResponse

from fairlead.base.config import Limits
from fairlead.base.supervision import unwrap
from fairlead.generation.event_stream import CutStream
from fairlead.server.routes.request import Response
from fairlead.server.routes.request_body import BodyMemory, IncomingBody
from fairlead.server.routes.unread import UnreadAnswer

_WITH_BODY = frozenset({"POST", "PUT", "PATCH"})


class FairleadRequest(TrioRequest):  # type: ignore[misc]  # quart_trio has no types
    """A request, with its body and the nursery of all work for it.

    nursery: Where all work for it runs.
    incoming: Its body.
    body_memory: Counts the body; None: nothing does.
    tenant: Whose body it is.
    unread: Counts what of the response waits for the client; None: nothing does.
    """

    nursery: trio.Nursery
    incoming: IncomingBody
    body_memory: BodyMemory | None = None
    tenant: str = ""
    unread: UnreadAnswer | None = None


class Exchange(TrioASGIHTTPConnection):  # type: ignore[misc]  # quart_trio has no types
    """One request in a Quart app: its `asgi_http_class`, together with `FairleadRequest`."""

    async def __call__(self, receive: Any, send: Any) -> None:
        """Respond to the request, or return without a response if its client disconnects first."""
        request = self._create_request_from_scope(send)
        self._limits = self.scope.get("state", {}).get("limits") or Limits()
        self._answering = False
        cancels = self.scope.get("extensions", {}).get("fairlead") is not None  # as our listener does
        failure: BaseException | None = None
        # One app context for the route and its error handlers, so that both have the same `g`.
        async with self.app.app_context():
            try:
                async with trio.open_nursery() as request.nursery:
                    incoming = IncomingBody(
                        receive, request.headers, self._limits, request.nursery, cancels=cancels
                    )
                    request.incoming = self._incoming = incoming
                    if not cancels and self.scope["method"] not in _WITH_BODY:
                        request.nursery.start_soon(incoming.watch)
                    await self._send_response(send, await self.app.handle_request(request))
                    request.nursery.cancel_scope.cancel()
            except* Exception as group:  # noqa: BLE001  # a route may raise anything
                failure = unwrap(group)
            finally:
                incoming.leave()
                if request.unread is not None:
                    request.unread.leave()
            if failure is not None and not self._answering:
                await self._send_response(send, await self._error_page(request, failure))
            elif failure is not None and not isinstance(failure, CutStream):
                raise failure

    async def _send_response(self, send: Any, response: Any) -> None:
        """Send the response. It may take any time as long as the client reads."""
        self._answering = True
        self._incoming.keep()
        headers = encode_headers(response.headers)
        await send({"type": "http.response.start", "status": response.status_code, "headers": headers})
        if isinstance(response, WerkzeugResponse):  # an error's default page
            await send({"type": "http.response.body", "body": response.get_data(), "more_body": True})
        else:
            async with response.response as body:
                if self.scope["method"] != "HEAD":  # the body that HEAD omits may be an endless stream
                    async for chunk in body:
                        data = chunk.encode() if isinstance(chunk, str) else chunk
                        await send({"type": "http.response.body", "body": data, "more_body": True})
        # After the end, an ASGI server reports a disconnect, which cancels this nursery.
        with trio.move_on_after(self._limits.stall_s, shield=True):
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _error_page(self, request: FairleadRequest, error: BaseException) -> Any:
        """Return the response for an error raised outside the route, from the app's error handlers."""
        async with self.app.request_context(request) as context:
            try:
                page = await self.app.handle_user_exception(error)
                return await self.app.finalize_request(page, context, from_error_handler=True)
            except Exception as unhandled:  # noqa: BLE001  # as Quart does in a route
                return await self.app.handle_exception(unhandled)


async def read_body(request: FairleadRequest) -> bytes:
    """Return the whole body, once. Raises as `IncomingBody.read` does."""
    memory = request.body_memory or BodyMemory(Limits().bodies_bytes)
    return await request.incoming.read(memory, request.tenant)


def quart_response(response: Response) -> QuartResponse:
    """Return a view's response as Quart's."""
    converted = QuartResponse(response.body, response.status, response.headers)
    if "content-type" not in map(str.lower, response.headers):
        del converted.headers["Content-Type"]  # Quart's default
    return converted
