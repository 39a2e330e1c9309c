"""The channel for a job's answer: written synchronously, once a step; read at the client's pace.

Unread deltas are merged, choice by choice, so a client slower than the model gets fewer, larger deltas, and
the channel never holds more than one job's answer. What waits there for a client is counted in `unread`.
Writing cannot block, so one slow client never delays a step.

A waiting reader may register `on_delta`, a function that is called with each delta when it is put. If it
accepts the delta, the reader is not woken. This makes a token cheap: waking a task costs more than sending a
token.

The channel outlives the attempt that writes to it. It can be restarted as long as nothing was read. For an
answer that can be repeated it keeps what was put, to recognize a repetition.
"""

from collections.abc import Callable, Sequence

import trio

from fairlead.base.errors import FairleadError
from fairlead.base.job import Delta, FinishReason
from fairlead.base.unread import UnreadBytes
from fairlead.nodes.streams.sink import Backpressure

# Bounds for relayed events: those not read yet, and those kept in order to recognize a repetition.
UNREAD_BYTES = 8 * 1024 * 1024
KEPT_BYTES = 16 * 1024 * 1024
# Memory that a delta takes besides its bytes; an event may be only two bytes long.
DELTA_BYTES = 400
# Memory of parts of deltas besides their characters, when deltas are merged.
TOKEN_BYTES = 40
EVENT_BYTES = 60
CALL_BYTES = 200
LOGPROB_BYTES = 200
ALTERNATIVE_BYTES = 120  # a tuple of a token and its log-probability
# Less is not counted as unread: most deltas are taken at once.
COUNTED_AT_ONCE = 16 * 1024

OnDelta = Callable[[list[Delta]], bool]


class Deltas:
    """One job's deltas. Ends after every choice had its `finish_reason`, or by `fail`.

    `tokens` counts the tokens put so far for all choices, read or not, and `cached_tokens` has those of the
    prompt that were cached, by choice. `finish_reasons` are those of the
    choices that have ended. `translated_from` is the dialect that pieces of the answer were translated from.
    `keeps`: what was put stays available as `kept`. Once a reader sends the answer as it arrives, it sets
    `unread`, which counts what it has not taken; an answer that is read at its end is not counted.
    """

    def __init__(self, choices: int, *, keeps: bool = False) -> None:
        self.tokens = 0
        self.cached_tokens: dict[int, int] = {}
        self.finish_reasons: list[FinishReason] = []
        self.translated_from: str | None = None
        self.unread: UnreadBytes | None = None
        self._counted = self._uncounted = 0
        self._choices = choices
        self._open_choices = choices
        self._waiting: dict[int, Delta] = {}
        self._sealed: list[Delta] = []
        self._kept: list[Delta] | None = [] if keeps else None
        self._was_read = False
        self._kept_bytes = self._unread_bytes = 0
        self._read: trio.Event | None = None
        self._error: FairleadError | None = None
        self._on_delta: OnDelta | None = None
        self._changed = trio.Event()
        self._first = trio.Event()
        self._ended = trio.Event()

    # The node's side: synchronous -------------------------------------------------------------------

    def put(self, delta: Delta) -> None:
        """Add a piece of the answer. After the end it is dropped: the node may still send some."""
        if self._ended.is_set():
            return
        # Not below 0: a correction may refer to events that a repetition had split differently.
        self.tokens = max(0, self.tokens + len(delta.token_ids) + delta.relayed_tokens)
        if delta.cached_tokens:
            self.cached_tokens[delta.index] = delta.cached_tokens
        relayed_bytes = 0
        if delta.translation is not None:
            self.translated_from = delta.translation.dialect
            relayed_bytes = DELTA_BYTES + _text_length(delta)
        elif delta.raw:
            relayed_bytes = DELTA_BYTES + sum(map(len, delta.raw))
        self._bound_kept(relayed_bytes)
        if (
            self._on_delta is not None
            and not self._waiting
            and delta.finish_reason is None
            and self._on_delta([delta])
        ):
            self._was_read = True
            if self._kept is not None:
                self._kept.append(delta)
            return
        self._unread_bytes += relayed_bytes
        self._hold(delta)
        if delta.finish_reason is not None:
            self.finish_reasons.append(delta.finish_reason)
            self._open_choices -= 1
            if not self._open_choices:
                self._ended.set()
        self._wake()
        if self._uncounted >= COUNTED_AT_ONCE:
            self._count()  # last: it may end this answer

    def backpressure(self) -> Backpressure | None:
        """See `Sink`. The channel is full while more than `UNREAD_BYTES` of relayed events are unread."""
        if self._unread_bytes <= UNREAD_BYTES or self._ended.is_set():
            return None
        if self._read is None:
            self._read = trio.Event()
        return self._read

    def fail(self, error: FairleadError) -> None:
        """End the answer with an error, which the reader gets after everything already put."""
        if not self._ended.is_set():
            self._error = error
            self._ended.set()
            self._wake()

    def prompt_cached_tokens(self, choices: int) -> int:
        """Return the cached tokens of all prompts, each counted once: by the first of its `choices`."""
        return sum(tokens for index, tokens in self.cached_tokens.items() if index % choices == 0)

    # Between two attempts: synchronous --------------------------------------------------------------

    @property
    def error(self) -> FairleadError | None:
        """The error that has ended the answer; None: there is none so far."""
        return self._error

    @property
    def is_over(self) -> bool:
        """Whether nothing more will be put."""
        return self._ended.is_set()

    @property
    def kept(self) -> Sequence[Delta] | None:
        """Everything that was put, read or not; None if it is not kept."""
        return self._kept

    def restart(self) -> bool:
        """Discard what was put and start over. Return False, without any change, if some of it was read."""
        assert not self._ended.is_set()
        if self._was_read:
            return False
        self.tokens = 0
        self.cached_tokens.clear()
        self.finish_reasons.clear()
        self.translated_from = None
        self._open_choices = self._choices
        self._waiting.clear()
        self._uncount()
        self._unread_bytes = self._kept_bytes = 0
        if self._kept is not None:
            self._kept.clear()
        self._first = trio.Event()
        return True

    def seal(self) -> None:
        """Stop merging into what is unread now: what follows may be of another kind."""
        if self._waiting:
            self._on_delta = None  # its reader was woken, and must take this first
        self._sealed += self._waiting.values()
        self._waiting.clear()

    # The reader's side ------------------------------------------------------------------------------

    async def started(self) -> None:
        """Wait until there is something to read; raise the error if there is nothing else."""
        if not self._first.is_set():
            await self._first.wait()
        if self._error is not None and not (self._waiting or self._sealed):
            raise self._error

    async def take(self, on_delta: OnDelta | None = None) -> list[Delta]:
        """Wait for deltas; return all, at most one per choice and attempt. An empty list is the end.

        Raises the error of `fail` once everything before it was taken. During the wait, `put` calls
        `on_delta` with each delta but the last of a choice. It must not raise, and returns whether it accepts
        the delta. A delta that it does not accept ends the wait.
        """
        while not (self._waiting or self._sealed):
            if self._error is not None:
                raise self._error
            if self._ended.is_set():
                return []
            self._changed = trio.Event()
            self._on_delta = on_delta
            try:
                await self._changed.wait()
            finally:
                self._on_delta = None
        taken = [*self._sealed, *self._waiting.values()]
        self._sealed.clear()
        self._waiting.clear()
        self._was_read = True
        self._uncount()
        self._unread_bytes = 0
        if self._read is not None:
            self._read.set()
            self._read = None
        return taken

    async def ended(self) -> None:
        """Wait until the answer has ended. Does not raise: only the reader gets the error."""
        if not self._ended.is_set():
            await self._ended.wait()

    def _hold(self, delta: Delta) -> None:
        """Keep a delta for the reader, merged with an earlier one of its choice."""
        earlier = self._waiting.get(delta.index)
        if self.unread is not None:
            self._uncounted += size_of(delta) + (DELTA_BYTES if earlier is None else 0)
        if earlier is None:
            self._waiting[delta.index] = delta
            if self._kept is not None:
                self._kept.append(delta)
        else:
            earlier.merge(delta)  # `_kept` has the same object

    def _bound_kept(self, relayed_bytes: int) -> None:
        """Count these bytes. Above `KEPT_BYTES` nothing is kept, so no other node can repeat the answer."""
        self._kept_bytes += relayed_bytes
        if self._kept_bytes > KEPT_BYTES:
            self._kept = None

    def _count(self) -> None:
        counted, self._uncounted = self._uncounted, 0
        self._counted += counted
        if self.unread is not None:
            self.unread.add(counted)

    def _uncount(self) -> None:
        self._uncounted = 0
        if self.unread is not None and self._counted:
            counted, self._counted = self._counted, 0
            self.unread.remove(counted)

    def _wake(self) -> None:
        self._first.set()
        self._changed.set()


def size_of(delta: Delta) -> int:
    """Estimate the memory of what is in a delta."""
    size = _text_length(delta) + TOKEN_BYTES * len(delta.token_ids) + len(delta.vector)
    size += CALL_BYTES * len(delta.calls)
    if delta.raw:
        size += sum(map(len, delta.raw)) + EVENT_BYTES * len(delta.raw)
    for logprobs in (delta.logprobs, delta.prompt_logprobs):
        if logprobs:
            size += LOGPROB_BYTES * len(logprobs) + ALTERNATIVE_BYTES * sum(len(one.top) for one in logprobs)
    return size


def _text_length(delta: Delta) -> int:
    calls = sum(len(piece.name or "") + len(piece.arguments) for piece in delta.calls)
    return len(delta.text) + len(delta.reasoning) + calls
