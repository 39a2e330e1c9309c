"""Kept responses: in memory only, or, with `responses.inStore`, in the store that all fronts share.

With a store, memory has the responses in progress here, and those that are not written yet. One task writes
them, several in a transaction. An answer waits for its own write, `SETTLE_S` at most, so that the client's
next request finds the response at any front. While the store is away nothing waits: responses stay in memory,
within its bound, and are written later.

A response in progress is written again from time to time, as a sign that its process runs. Without that sign
it is reported as failed.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import msgspec
import structlog
import trio
from msgspec.structs import replace

from fairlead.base.backoff import Backoff
from fairlead.base.errors import FairleadError, InvalidRequest, StoreUnavailable
from fairlead.dialects.body import invalid_field
from fairlead.dialects.dialect import WaitingComments
from fairlead.generation.event_stream import CutStream
from fairlead.server.responses.store import ResponseStore, StoredResponse
from fairlead.store.kept import LONGEST_S, KeptChange, KeptResponsesStore, KeptRow

SETTLE_S = 2.0
"""How long an answer waits until its response is in the store."""
FLUSH_S = 0.25
"""How long events of a response in progress are collected before they are written."""
ALIVE_INTERVAL_S, ALIVE_S = 10.0, 40
"""How often a response in progress is written, and after what time without it its process counts as gone."""
CHANGES_AT_ONCE, BYTES_AT_ONCE = 64, 8 * 1024 * 1024
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 10.0
FINISH_S = 3.0
"""How long a server that stops waits until its last responses are written."""
POLL_S = 0.25
"""How often a response that is in progress at another front is looked at."""

logger = structlog.get_logger("fairlead.server.responses")

WithTurn = Callable[[bytes, str, bytes, bytes], bytes]
"""Adds a response to a conversation: its document, and the response's id, input and object."""

_comments = WaitingComments()


class _Progress:
    """What of a response is in the store.

    is_stored: its row is.
    events: how many of its events are.
    written: set when its latest change was written, or could not be.
    """

    def __init__(self) -> None:
        self.is_stored = False
        self.events = 0
        self.written = trio.Event()


class ResponseArchive:
    """The responses that requests may find.

    memory: those of this process.
    kept: the store; None: `memory` has all.
    ttl_s: how long a response is kept after its end.
    now: returns the seconds since 1970.
    """

    def __init__(
        self,
        memory: ResponseStore,
        kept: KeptResponsesStore | None,
        *,
        ttl_s: float,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._memory = memory
        self._kept = kept
        self._ttl_s = int(min(ttl_s, LONGEST_S))
        self._now = now
        self._pending: dict[StoredResponse, _Progress] = {}
        self._dirty: dict[StoredResponse, None] = {}
        self._alone = 0  # how many changes are written one at a time
        self._wake, self._urgent = trio.Event(), trio.Event()
        self._is_away = False
        self.with_turn: WithTurn = lambda document, _id, _input, _answer: document
        if kept is None:
            memory.on_turn = self._add_turn
        else:
            memory.on_change = self._note

    # Reading -----------------------------------------------------------------------------------------

    async def find(self, response_id: str, owner: str) -> StoredResponse | None:
        """Return a response of this owner; None if there is none. Raises `StoreUnavailable`."""
        found = self._memory.find(response_id, owner, trio.current_time())
        if found is not None and found.has_ended:
            await self.settle(found)  # so that other fronts do not lag behind what is seen here
            found = None if found.is_gone else found
        if found is not None or self._kept is None:
            return found
        row = await self._kept.find(response_id, owner)
        return None if row is None else self._response_of(row)

    async def chain(self, response_id: str, owner: str, max_bytes: int) -> list[StoredResponse]:
        """Return a response after those that it continues, the latest first, up to one that is missing.

        Renews all that have ended. Raises `StoreUnavailable`, and `InvalidRequest` for more than `max_bytes`.
        """
        turns: list[StoredResponse] = []
        size, previous = 0, response_id
        while previous:
            found = self._memory.find(previous, owner, trio.current_time())
            some = [] if found is None else [found]
            if found is None and self._kept is not None:
                rows = await self._kept.chain(previous, owner, max_bytes - size, self._ttl_s)
                some = [self._response_of(row) for row in rows]
            if not some:
                break
            turns += some
            size += sum(len(turn.input) + len(turn.document) for turn in some)
            if size > max_bytes:
                reason = f"the conversation is longer than {max_bytes} bytes (limits.bodyBytes)"
                raise invalid_field("previous_response_id", reason)
            previous = some[-1].previous or ""
        for turn in reversed(turns):
            if turn.has_ended:
                self._memory.renew(turn, trio.current_time())
        return turns

    async def load_events(self, response: StoredResponse) -> None:
        """Read the events of a response that `find` has read from the store."""
        if self._kept is not None and not self.is_here(response):
            response.events = await self._kept.events(response.id, 0)

    def is_here(self, response: StoredResponse) -> bool:
        """Return whether memory has the response."""
        return self._memory.has(response)

    def events(self, response: StoredResponse, first: int) -> "SharedEvents":
        """Return the events of a response that is in progress at another front."""
        assert self._kept is not None
        return SharedEvents(self._kept, response, first, now=self._now)

    async def wait_for_end(self, response: StoredResponse, timeout_s: float) -> None:
        """Wait until a response at another front has ended, or the time is over."""
        assert self._kept is not None
        with trio.move_on_after(timeout_s):
            row = await self._kept.find(response.id, response.owner)
            while row is not None and not row.has_ended:
                await trio.sleep(POLL_S)
                row = await self._kept.find(response.id, response.owner)

    def _response_of(self, row: KeptRow) -> StoredResponse:
        document = row.document
        if not row.has_ended and row.expires < self._now():
            document = _failed(document, "the server stopped before the response had ended")
            row = replace(row, has_ended=True)
        return StoredResponse(
            row.id,
            row.owner,
            row.tenant,
            request_id=row.request_id,
            input=row.input,
            previous=row.previous or None,
            is_background=row.is_background,
            keeps_events=row.keeps_events,
            document=document,
            has_ended=row.has_ended,
        )

    # Writing -----------------------------------------------------------------------------------------

    async def add(self, response: StoredResponse, document: bytes) -> bool:
        """Add a document that is complete, such as a conversation. Return False if there is no room.

        Raises `StoreUnavailable`.
        """
        if self._kept is None:
            self._memory.begin(response)
            self._memory.end(response, document, trio.current_time())
            return not response.is_gone
        row = KeptRow(
            response.id,
            response.owner,
            response.tenant,
            document=document,
            has_ended=True,
            expires=int(self._now()) + self._ttl_s,
        )
        await self._kept.write([KeptChange(row, is_new=True)])
        return await self._kept.find(response.id, response.owner) is not None

    async def change(self, response_id: str, owner: str, change: Callable[[bytes], bytes]) -> bytes | None:
        """Change a document by a pure function, and renew it; return it, or None if there is none.

        Raises `StoreUnavailable`, and what the function raises.
        """
        if self._kept is not None:
            return await self._kept.change(response_id, owner, change, self._ttl_s)
        found = self._memory.find(response_id, owner, trio.current_time())
        if found is None:
            return None
        document = change(found.document)
        self._memory.renew(found, trio.current_time())
        self._memory.set_document(found, document)
        return document

    async def remove(self, response_id: str, owner: str) -> None:
        """Remove a response, wherever it is. Raises `StoreUnavailable`."""
        if self._kept is not None:
            await self._kept.remove(response_id, owner)
        if (here := self._memory.find(response_id, owner, trio.current_time())) is not None:
            self._memory.remove(here)

    def _add_turn(self, response: StoredResponse) -> None:
        """Add an ended response to its conversation, in memory."""
        assert response.conversation is not None
        now_s = trio.current_time()
        found = self._memory.find(response.conversation, response.owner, now_s)
        if found is not None:  # it may have been deleted meanwhile
            document = self.with_turn(found.document, response.id, response.input, response.document)
            self._memory.renew(found, now_s)
            self._memory.set_document(found, document)

    async def settle(self, response: StoredResponse) -> None:
        """Wait until the response is in the store, unless that takes long."""
        progress = self._pending.get(response)
        if progress is not None and not self._is_away:
            with trio.move_on_after(SETTLE_S):
                await progress.written.wait()

    async def settle_or_raise(self, response: StoredResponse) -> None:
        """Do what `settle` does. Raises `InvalidRequest`, once, if the response or its turn is not kept."""
        await self.settle(response)
        error, response.keep_error = response.keep_error, None
        if error is not None:
            raise error

    async def run(self) -> None:
        """Write what has changed until cancelled. Failures are logged once, until a write succeeds again."""
        pauses = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        next_alive = trio.current_time() + ALIVE_INTERVAL_S
        while True:
            with trio.move_on_at(next_alive):
                await self._wake.wait()
                with trio.move_on_after(FLUSH_S):
                    await self._urgent.wait()
            self._wake, self._urgent = trio.Event(), trio.Event()
            if trio.current_time() >= next_alive:
                next_alive = trio.current_time() + ALIVE_INTERVAL_S
                self._dirty |= dict.fromkeys(each for each in self._pending if not each.has_ended)
            try:
                while self._dirty:
                    await self._write()
            except FairleadError as error:
                if not self._is_away:
                    reason = error.reason if isinstance(error, StoreUnavailable) else error.message
                    logger.warning("responses not written yet", reason=reason, responses=len(self._dirty))
                self._is_away = True
                await trio.sleep(pauses.take())
                self._wake.set()
                self._urgent.set()
                continue
            if self._is_away:
                logger.info("responses written again")
            self._is_away = False
            pauses.reset()

    async def finish(self) -> None:
        """Write what is left, for `FINISH_S` at most; log what is lost."""
        with trio.move_on_after(FINISH_S, shield=True):
            try:
                while self._dirty:
                    await self._write()
            except FairleadError as error:
                logger.warning("responses not written", reason=error.message)
        if self._dirty:
            logger.error("responses lost: the store was away", responses=len(self._dirty))

    def _note(self, response: StoredResponse) -> None:
        """Have a response written that has changed: at once if it is new or has ended."""
        progress = self._pending.get(response)
        if progress is None:
            progress = self._pending[response] = _Progress()
        if response not in self._dirty or progress.written.is_set():
            progress.written = trio.Event()  # a write that runs now does not have this change
        self._dirty[response] = None
        self._wake.set()
        if response.has_ended or not progress.is_stored:
            self._urgent.set()

    async def _write(self) -> None:
        """Write some of the responses that have changed. Raises `StoreUnavailable` and `InvalidRequest`."""
        assert self._kept is not None
        changes = self._take()
        if not changes:
            return
        written = [self._pending[response].written for response in changes]
        try:
            for response in changes:
                await self._write_turn(response)
            gone = await self._kept.write(list(changes.values()))
        except InvalidRequest as error:
            if len(changes) == 1:
                ((response, change),) = changes.items()
                await self._refuse(response, change, error)
                return
            # One of them is at fault: each is written alone, so that the others are kept.
            self._dirty = {**dict.fromkeys(changes), **self._dirty}
            self._alone = len(changes)
            written.clear()
            return
        except BaseException:
            self._dirty = {**dict.fromkeys(changes), **self._dirty}
            raise
        finally:
            for event in written:  # whether or not: nobody waits for a store that is away
                event.set()
        self._written(changes, gone)

    async def _refuse(self, response: StoredResponse, change: KeptChange, error: InvalidRequest) -> None:
        """Remove a response that no table can hold, now or later, and record why. Raises as `_write`."""
        assert self._kept is not None
        logger.error("response not kept", response=response.id, reason=error.message)
        reason = f"the store cannot keep the response {response.id}, so ask with store: false"
        response.keep_error = InvalidRequest(f"{reason}: {error.message}", param="store")
        if self._pending[response].is_stored:  # one in the background: its readers get another end
            document = _failed(change.row.document, f"the response cannot be kept: {error.message}")
            expires = int(self._now()) + self._ttl_s
            row = replace(change.row, document=document, has_ended=True, expires=expires)
            try:
                with suppress(InvalidRequest):  # after `ALIVE_S` it counts as ended, too
                    await self._kept.write([KeptChange(row, is_new=False)])
            except BaseException:
                self._dirty[response] = None
                raise
        self._forget(response)
        self._memory.remove(response)

    def _written(self, changes: dict[StoredResponse, KeptChange], gone: list[str]) -> None:
        """Record that these changes are in the store, except for those that are gone."""
        for response, change in changes.items():
            if change.row.id in gone:  # another front has removed it, or there was no room
                self._forget(response)
                self._memory.remove(response)
            elif change.row.has_ended:
                self._forget(response)
                self._memory.forget(response)
            else:
                progress = self._pending[response]
                progress.is_stored = True
                progress.events = change.first + len(change.events)

    def _take(self) -> dict[StoredResponse, KeptChange]:
        """Take some of the responses that have changed."""
        changes: dict[StoredResponse, KeptChange] = {}
        size = 0
        most = 1 if self._alone else CHANGES_AT_ONCE
        self._alone = max(0, self._alone - 1)
        for response in list(self._dirty)[:most]:
            del self._dirty[response]
            if response.is_gone:
                self._forget(response)
                continue
            changes[response] = self._change(response)
            size += response.size
            if size > BYTES_AT_ONCE:
                break
        return changes

    async def _write_turn(self, response: StoredResponse) -> None:
        """Add an ended response to its conversation, once; if that cannot hold it, record the error."""
        if response.conversation is None or not response.has_ended:
            return
        assert self._kept is not None
        turn = (response.id, response.input, response.document)
        add = partial(_with_turn, self.with_turn, turn)
        try:
            await self._kept.change(response.conversation, response.owner, add, self._ttl_s)
        except InvalidRequest as error:  # now or later; the response itself is kept
            about = {"response": response.id, "conversation": response.conversation}
            logger.error("turn not kept", reason=error.message, **about)  # noqa: TRY400
            reason = f"the response {response.id} is kept, but the conversation cannot hold its items"
            response.keep_error = InvalidRequest(f"{reason}: {error.message}", param="conversation")
        response.conversation = None

    def _forget(self, response: StoredResponse) -> None:
        self._dirty.pop(response, None)
        progress = self._pending.pop(response, None)
        if progress is not None:
            progress.written.set()

    def _change(self, response: StoredResponse) -> KeptChange:
        progress = self._pending[response]
        row = KeptRow(
            response.id,
            response.owner,
            response.tenant,
            request_id=response.request_id,
            previous=response.previous or "",
            input=response.input,
            document=response.document,
            is_background=response.is_background,
            keeps_events=response.keeps_events,
            has_ended=response.has_ended,
            expires=int(self._now()) + (self._ttl_s if response.has_ended else ALIVE_S),
        )
        events = tuple(response.events[progress.events :])
        return KeptChange(row, not progress.is_stored, progress.events, events)


class SharedEvents:
    """The body for one reader of a response that is in progress at another front.

    kept: the store, to which that front writes the events.
    response: the response.
    first: the index of the first event.
    now: returns the seconds since 1970.
    """

    def __init__(
        self, kept: KeptResponsesStore, response: StoredResponse, first: int, *, now: Callable[[], float]
    ) -> None:
        self._kept = kept
        self._response = response
        self._next = first
        self._now = now
        self._has_ended = False

    def __aiter__(self) -> "SharedEvents":
        return self

    async def __anext__(self) -> bytes:
        comment_at = trio.current_time() + _comments.interval_s
        while trio.current_time() < comment_at:
            try:
                if events := await self._kept.events(self._response.id, self._next):
                    self._next += len(events)
                    return b"".join(events)
                if self._has_ended:
                    raise StopAsyncIteration
                row = await self._kept.find(self._response.id, self._response.owner)
            except StoreUnavailable as error:
                raise CutStream from error
            if row is None or (not row.has_ended and row.expires < self._now()):
                raise CutStream
            self._has_ended = row.has_ended
            if not self._has_ended:
                await trio.sleep(POLL_S)
        return _comments.write(None, "")


def _with_turn(with_turn: WithTurn, turn: tuple[str, bytes, bytes], document: bytes) -> bytes:
    return with_turn(document, *turn)


def _failed(document: bytes, message: str) -> bytes:
    """Return the object of a response that has failed for a reason of the server's."""
    response = msgspec.json.decode(document)
    fault = {"code": "server_error", "message": message}
    return msgspec.json.encode({**response, "status": "failed", "error": fault, "output": []})
