"""One request and its answer: the lifetime that everything done for a request belongs to.

An `Exchange` gives its request a nursery. It is cancelled when the client leaves and when the answer has
been sent, so a route starts a task there and need not stop it. Once a status is on its way an error cannot
have another: the exchange then returns or raises with its answer unfinished, and the listener cuts the
connection.

Knows ASGI and Quart, no socket and no route. The limits come with the ASGI scope (`state["limits"]`);
without them, as under a test client, the defaults hold.
"""

from collections.abc import Iterator
from typing import Any

import trio
from quart import Response
from quart.utils import encode_headers
from quart_trio.asgi import TrioASGIHTTPConnection
from quart_trio.wrappers import TrioRequest
from werkzeug.wrappers import Response as WerkzeugResponse

from fairlead.api.call import Reply, json_reply
from fairlead.api.incoming import IncomingBody
from fairlead.api.shares import Shares
from fairlead.config import Limits
from fairlead.errors import FairleadError

_WITH_BODY = frozenset({"POST", "PUT", "PATCH"})


class CutStream(Exception):  # not an error: how a body says that its answer is not whole
    """Raised by a response body after its last chunk: end the connection so that the client notices.

    A chunked answer then lacks its end. (An HTTP/1.0 answer has no mark of its end to leave out.)
    """


class FairleadRequest(TrioRequest):  # type: ignore[misc]  # quart_trio has no types
    """A request, with the nursery of all that is done for it, and its body.

    The body counts against `body_memory`, for the `tenant`.
    """

    nursery: trio.Nursery
    incoming: IncomingBody
    body_memory: Shares | None = None
    tenant: str = ""


class Exchange(TrioASGIHTTPConnection):  # type: ignore[misc]  # quart_trio has no types
    """Runs one request through a Quart app; to be its `asgi_http_class`, beside `FairleadRequest`."""

    async def __call__(self, receive: Any, send: Any) -> None:
        """Answer the request, or return without an answer if its client leaves first."""
        request = self._create_request_from_scope(send)
        self._limits = self.scope.get("state", {}).get("limits") or Limits()
        self._answering = False
        cancels = self.scope.get("extensions", {}).get("fairlead") is not None  # as our listener does
        failure: BaseException | None = None
        # One app context for the route and its error page: what the route put into `g` is there for both.
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
            if failure is not None and not self._answering:
                await self._send_response(send, await self._error_page(request, failure))
            elif failure is not None and not isinstance(failure, CutStream):
                raise failure
            # A route that was not found is an exception whose frames refer to the request: a reference cycle.
            request.routing_exception = None

    async def _send_response(self, send: Any, response: Any) -> None:
        """Send the answer. It may take as long as it wants to, if only the client reads."""
        self._answering = True
        self._incoming.keep()
        headers = encode_headers(response.headers)
        await send({"type": "http.response.start", "status": response.status_code, "headers": headers})
        if isinstance(response, WerkzeugResponse):  # an error's default page
            await send({"type": "http.response.body", "body": response.get_data(), "more_body": True})
        else:
            async with response.response as body:
                if self.scope["method"] != "HEAD":  # what a HEAD leaves out may be an endless stream
                    async for chunk in body:
                        data = chunk.encode() if isinstance(chunk, str) else chunk
                        await send({"type": "http.response.body", "body": data, "more_body": True})
        # The end of an answer makes a listener report a disconnect, which cancels this very nursery.
        with trio.move_on_after(self._limits.stall_s, shield=True):
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _error_page(self, request: FairleadRequest, error: BaseException) -> Any:
        """Answer for an error that was not raised in the route, by the app's own error handlers."""
        async with self.app.request_context(request) as context:
            try:
                page = await self.app.handle_user_exception(error)
                return await self.app.finalize_request(page, context, from_error_handler=True)
            except Exception as unhandled:  # noqa: BLE001  # what Quart does with it in a route
                return await self.app.handle_exception(unhandled)


async def read_body(request: FairleadRequest) -> bytes:
    """Return the whole body, once. Raises as `IncomingBody.read` does."""
    return await request.incoming.read(request.body_memory or Shares(Limits().bodies_bytes), request.tenant)


def response_of(reply: Reply) -> Response:
    """Return what Quart is to answer."""
    return Response(reply.body, reply.status, reply.headers)


def json_response(document: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return Quart's answer in JSON; bytes are taken as JSON already."""
    return response_of(json_reply(document, status, headers))


def unwrap(error: BaseException) -> BaseException:
    """Return what a group of errors is about: the `FairleadError` in it, else its only error, else itself.

    Tasks that end because of an error often raise in turn (a channel closed on them, say); what a client
    is to be told is the `FairleadError`.
    """
    errors = [leaf for leaf in _leaves(error) if not isinstance(leaf, trio.Cancelled)]
    told = [leaf for leaf in errors if isinstance(leaf, FairleadError)]
    if told:
        return told[0]
    return errors[0] if len(errors) == 1 else error


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for member in error.exceptions:
            yield from _leaves(member)
    else:
        yield error
