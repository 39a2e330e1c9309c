"""The channel a job's answer comes through: written synchronously, once a step; read at the client's pace.

What has not been read is merged, choice by choice, so a client slower than the model gets fewer, larger
deltas and the channel never holds more than one job's answer. Writing cannot block, so one slow client
never holds up a step.

A reader that waits may leave a tap: a function that is offered each piece as it comes. What it takes is gone
and the reader sleeps on, which is what makes a token cheap: waking a task costs more than sending one.

The channel outlives the attempt that writes to it: as long as nothing was read it can be started again, and
for an answer that can be repeated it keeps what was put, so that a repetition can be told from what follows.
"""

from collections.abc import Callable, Sequence

import trio

from fairlead.errors import FairleadError
from fairlead.job import Delta, FinishReason
from fairlead.nodes.sink import Room

# Events of other servers that nobody has read; and those that are kept, to be told from a repetition.
UNREAD_BYTES = 8 * 1024 * 1024
KEPT_BYTES = 16 * 1024 * 1024
# What a delta takes besides its bytes: an event may have no more than two of them.
DELTA_BYTES = 400

Tap = Callable[[list[Delta]], bool]


class Deltas:
    """One job's deltas. Ends after every choice had its `finish_reason`, or by `fail`.

    `tokens` counts the tokens of all choices that were put so far, whether they have been read or not.
    `finish_reasons` are those of the choices that have ended. `keeps`: what was put can be had again, as
    `kept`.
    """

    def __init__(self, choices: int, *, keeps: bool = False) -> None:
        self.tokens = 0
        self.finish_reasons: list[FinishReason] = []
        self._choices = choices
        self._open_choices = choices
        self._waiting: dict[int, Delta] = {}
        self._sealed: list[Delta] = []
        self._kept: list[Delta] | None = [] if keeps else None
        self._was_read = False
        self._kept_bytes = self._unread_bytes = 0
        self._read: trio.Event | None = None
        self._error: FairleadError | None = None
        self._tap: Tap | None = None
        self._news = trio.Event()
        self._first = trio.Event()
        self._ended = trio.Event()

    # The node's side: synchronous -------------------------------------------------------------------

    def put(self, delta: Delta) -> None:
        """Add a piece of the answer. After the end it is dropped: the node may not know of it yet."""
        if self._ended.is_set():
            return
        # A correction may be for events that a repetition had in other pieces.
        self.tokens = max(0, self.tokens + len(delta.token_ids) + delta.relayed_tokens)
        raw_bytes = DELTA_BYTES + sum(map(len, delta.raw)) if delta.raw else 0
        self._keep_less(raw_bytes)
        if self._tap is not None and not self._waiting and delta.finish_reason is None and self._tap([delta]):
            self._was_read = True
            if self._kept is not None:
                self._kept.append(delta)
            return
        self._unread_bytes += raw_bytes
        earlier = self._waiting.get(delta.index)
        if earlier is None:
            self._waiting[delta.index] = delta
            if self._kept is not None:
                self._kept.append(delta)
        else:
            earlier.merge(delta)  # also into what is kept: it is the same object
        if delta.finish_reason is not None:
            self.finish_reasons.append(delta.finish_reason)
            self._open_choices -= 1
            if not self._open_choices:
                self._ended.set()
        self._wake()

    def room(self) -> Room | None:
        """See `Sink`: what is not read yet is bounded, though only by so much."""
        if self._unread_bytes <= UNREAD_BYTES or self._ended.is_set():
            return None
        if self._read is None:
            self._read = trio.Event()
        return self._read

    def fail(self, error: FairleadError) -> None:
        """End the answer with an error, which the reader gets after what is already there."""
        if not self._ended.is_set():
            self._error = error
            self._ended.set()
            self._wake()

    # Between two attempts: synchronous --------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        """Whether nothing more will be put."""
        return self._ended.is_set()

    @property
    def kept(self) -> Sequence[Delta] | None:
        """All that was put, read or not; None if it is not kept."""
        return self._kept

    def restart(self) -> bool:
        """Forget what was put and begin anew; False, and no change, if the reader has some of it already."""
        assert not self._ended.is_set()
        if self._was_read:
            return False
        self.tokens = 0
        self.finish_reasons.clear()
        self._open_choices = self._choices
        self._waiting.clear()
        self._unread_bytes = self._kept_bytes = 0
        if self._kept is not None:
            self._kept.clear()
        self._first = trio.Event()
        return True

    def seal(self) -> None:
        """Let nothing be added to what has not been read: what follows may be of another kind."""
        if self._waiting:
            self._tap = None  # its reader was woken, and is to take this first
        self._sealed += self._waiting.values()
        self._waiting.clear()

    # The reader's side ------------------------------------------------------------------------------

    async def started(self) -> None:
        """Wait until there is something to read, or raise the error if that is all there is."""
        if not self._first.is_set():
            await self._first.wait()
        if self._error is not None and not (self._waiting or self._sealed):
            raise self._error

    async def take(self, tap: Tap | None = None) -> list[Delta]:
        """Wait for news; return all of it, at most one delta a choice and attempt. An empty list is the end.

        Raises the error of `fail` once everything before it was taken. Until then `tap` is offered every
        delta but the last of a choice, within `put`: it must not raise, and returns whether it took it. What
        it does not take is news.
        """
        while not (self._waiting or self._sealed):
            if self._error is not None:
                raise self._error
            if self._ended.is_set():
                return []
            self._news = trio.Event()
            self._tap = tap
            try:
                await self._news.wait()
            finally:
                self._tap = None
        taken = [*self._sealed, *self._waiting.values()]
        self._sealed.clear()
        self._waiting.clear()
        self._was_read = True
        self._unread_bytes = 0
        if self._read is not None:
            self._read.set()
            self._read = None
        return taken

    async def ended(self) -> None:
        """Wait until nothing more will be put. Does not raise: the error is the reader's."""
        if not self._ended.is_set():
            await self._ended.wait()

    def _keep_less(self, raw_bytes: int) -> None:
        """An answer as long as that is not kept: it cannot be repeated on another node any more."""
        self._kept_bytes += raw_bytes
        if self._kept_bytes > KEPT_BYTES:
            self._kept = None

    def _wake(self) -> None:
        self._first.set()
        self._news.set()
