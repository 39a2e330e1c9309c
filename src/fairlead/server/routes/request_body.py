"""Reading of request bodies. Bounds each of them, and the memory that all of them take.

A body counts from its first byte until the request no longer needs it. The memory for bodies is shared
between tenants (`shares`), as far as they are known before the body: by key, header or address. When it is
used up, the largest tenant's newest request is refused. It may be receiving or encoding its body, or waiting
to be relayed, but its response has not begun. A body that is announced but not sent does not count.

A compressed body is decoded when it has arrived, in pieces, and counts in both forms meanwhile.

A form with files is not kept in memory: it is passed on as it arrives (`uploads`), and counts against the
space for forms in the same way.

Uses ASGI's `receive`; independent of frameworks.
"""

from collections.abc import Awaitable, Callable
from io import BytesIO
from typing import Any

import trio

from fairlead.base.config import Limits
from fairlead.base.errors import (
    BodiesFull,
    BodyTimeout,
    BodyTooLarge,
    FairleadError,
    UnknownCoding,
    UploadsFull,
)
from fairlead.base.formats.content_coding import REQUEST_CODINGS, ContentDecoder, InvalidContent, decoder_of
from fairlead.base.formats.headers import Headers
from fairlead.dialects.body import invalid_field
from fairlead.generation.shares import Holding, Shares
from fairlead.generation.turns import Turns, in_turn

FULL_RETRY_S = 2
# How much of a compressed body is decoded before other tasks run.
DECODED_A_TURN = 64 * 1024

Receive = Callable[[], Awaitable[Any]]


class BodyMemory(Shares):
    """The memory for all bodies. `decoding`: one body at a time is decoded, by tenants' turns.

    A decoder needs memory that does not count, up to 8 MiB.
    """

    def __init__(self, total: int) -> None:
        super().__init__(total)
        self.decoding = Turns(1)


class IncomingBody:
    """One request's body. It counts until `leave`; after `keep` its request cannot be refused for others.

    receive: ASGI's.
    headers: The request's.
    limits: Of its size and of the time in which it arrives.
    nursery: The request's: a refusal is raised in it, and it is cancelled when the client disconnects.
    cancels: The ASGI server cancels the nursery itself, so that no task need watch for a disconnect once the
        body has been read.
    """

    def __init__(
        self, receive: Receive, headers: Headers, limits: Limits, nursery: trio.Nursery, *, cancels: bool
    ) -> None:
        self._receive = receive
        self._headers = headers
        self._limits = limits
        self._nursery = nursery
        self._cancels = cancels
        self._shares: Shares | None = None
        self._holding: Holding | None = None
        self._most_bytes = limits.body_bytes
        self._is_form = False
        self._close: Callable[[], None] | None = None

    async def read(self, body_memory: BodyMemory, tenant: str) -> bytes:
        """Return the whole body, decoded, once. Count it for the tenant.

        Raises `BodyTooLarge` as soon as more than `limits.body_bytes` is announced, received or decoded,
        `BodyTimeout` after `limits.body_timeout_s`, `BodiesFull`, `UnknownCoding`, `InvalidRequest` for
        a body that cannot be decoded, and as `in_turn` does. If a body was not read to its end, the listener
        closes the connection after the response.
        """
        decoder = _decoder_of(self._headers.get("Content-Encoding", ""))
        self._check_announced()
        self._shares = body_memory
        with trio.move_on_after(self._limits.body_timeout_s):
            body = await self._collect(tenant)
            if not self._cancels:
                self._nursery.start_soon(self.watch)
            return body if decoder is None else await self._decode(body, decoder, body_memory, tenant)
        raise BodyTimeout(f"the body took longer than {self._limits.body_timeout_s:g} s to arrive")

    async def receive(
        self,
        space: Shares,
        tenant: str,
        take: Callable[[bytes], Awaitable[None]],
        *,
        close: Callable[[], None],
        least_bytes: int,
    ) -> None:
        """Pass a form to `take` as it arrives, once. Count it for the tenant, as `least_bytes` at least.

        `close` is called when the request has ended and none of its tasks runs any more.

        Raises as `read` does, with the limits of forms: `limits.upload_bytes` and `limits.upload_timeout_s`.
        The client may not stop for `limits.stall_s`. Raises `UploadsFull` instead of `BodiesFull`, and what
        `take` raises.
        """
        if self._headers.get("Content-Encoding", "identity").strip().lower() != "identity":
            message = "Content-Encoding: a form must not be compressed"
            error = UnknownCoding(message, param="Content-Encoding")
            error.known = ("identity",)
            raise error
        self._is_form, self._most_bytes, self._close = True, self._limits.upload_bytes, close
        self._check_announced()
        self._shares = space
        self._holding = space.enter(tenant, owner=self)
        self._count(least_bytes, 0)
        with trio.move_on_after(self._limits.upload_timeout_s):
            size, more = 0, True
            while more:
                with trio.move_on_after(self._limits.stall_s) as stall:
                    piece, more = await self._next()
                if stall.cancelled_caught:
                    raise BodyTimeout(f"the client sent nothing for {self._limits.stall_s:g} s")
                counted = max(size, least_bytes)
                size += len(piece)
                self._count(max(size, least_bytes) - counted, size)
                await take(piece)
            if not self._cancels:
                self._nursery.start_soon(self.watch)
            return
        raise BodyTimeout(f"the form took longer than {self._limits.upload_timeout_s:g} s to arrive")

    def keep(self) -> None:
        """Record that the response has begun: the request can no longer be refused."""
        if self._shares is not None and self._holding is not None:
            self._shares.keep(self._holding)

    def leave(self) -> None:
        """Stop counting the body: the request no longer needs it."""
        if self._close is not None:
            self._close()
        if self._shares is not None and self._holding is not None:
            self._shares.leave(self._holding)
            self._holding.owner = None  # the two would be a reference cycle

    async def watch(self) -> None:
        """Cancel the request when its client disconnects."""
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._nursery.cancel_scope.cancel()

    async def _collect(self, tenant: str) -> bytes:
        assert self._shares is not None
        first, more = await self._next()
        self._holding = self._shares.enter(tenant, owner=self)
        self._count(len(first), len(first))
        if not more:
            return first
        # `BytesIO.getvalue` returns its buffer without a copy; joining pieces would need twice the memory.
        buffer = BytesIO()
        size = buffer.write(first)
        del first
        while more:
            piece, more = await self._next()
            size += buffer.write(piece)
            self._count(len(piece), size)
        return buffer.getvalue()

    async def _decode(
        self, encoded: bytes, decoder: ContentDecoder, body_memory: BodyMemory, tenant: str
    ) -> bytes:
        assert self._holding is not None
        buffer = BytesIO()
        size = 0
        try:
            async with in_turn(body_memory.decoding, tenant, timeout_s=self._limits.body_timeout_s):
                for start in range(0, len(encoded), DECODED_A_TURN):
                    for piece in decoder.decode(encoded[start : start + DECODED_A_TURN]):
                        size += buffer.write(piece)
                        self._count(len(piece), size)
                        await trio.lowlevel.checkpoint()
                    await trio.lowlevel.checkpoint()
            decoder.end()
        except InvalidContent as error:
            raise invalid_field("Content-Encoding", f"the body is {error}") from None
        body_memory.shrink(self._holding, len(encoded))
        return buffer.getvalue()

    async def _next(self) -> tuple[bytes, bool]:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self._nursery.cancel_scope.cancel()
            await trio.lowlevel.checkpoint()
        return message.get("body", b""), message.get("more_body", False)

    def _check_announced(self) -> None:
        announced = self._headers.get("Content-Length", "")
        if announced.isdigit() and int(announced) > self._most_bytes:
            raise self._too_large()

    def _count(self, more: int, size: int) -> None:
        """Count so many bytes more; `size` is the number of received ones."""
        assert self._shares is not None
        assert self._holding is not None
        if size > self._most_bytes:
            raise self._too_large()
        for refused in self._shares.grow(self._holding, more):
            if refused is not self._holding:
                refused.owner.refuse()
        if self._holding.gone:
            raise self._no_room(size)

    def refuse(self) -> None:
        """Refuse the request to make room for another tenant's."""
        assert self._holding is not None
        self._nursery.start_soon(_raise, self._no_room(self._holding.amount))

    def _no_room(self, size: int) -> FairleadError:
        assert self._shares is not None
        if size > self._shares.total:
            return BodyTooLarge(
                f"the body is larger than {self._shares.total} bytes, the most for all bodies"
            )
        if self._is_form:
            return UploadsFull(
                "the server has no space for more forms, and holds more of yours than of others'",
                retry_after_s=FULL_RETRY_S,
            )
        return BodiesFull(
            "the server has no memory for more request bodies, and holds more of yours than of others'",
            retry_after_s=FULL_RETRY_S,
        )

    def _too_large(self) -> BodyTooLarge:
        return BodyTooLarge(f"the body is larger than {self._most_bytes} bytes")


def _decoder_of(encoding: str) -> ContentDecoder | None:
    """Return the decoder for a `Content-Encoding`, if the body is encoded. Raises `UnknownCoding`."""
    try:
        return decoder_of(encoding, REQUEST_CODINGS)
    except ValueError as error:
        raise UnknownCoding(f"Content-Encoding: the body has {error}", param="Content-Encoding") from None


async def _raise(error: FairleadError) -> None:
    raise error
