"""A second attempt at an answer that the client has received in part.

`RecordingSink` records what was put into a sink. `ReplaySink` takes another node's answer, checks that it
repeats the recorded one, and forwards what follows. The engine's output is compared by its tokens, that of
other servers by its text, because chunks may be cut differently. Only a greedy or seeded answer can be
repeated, which the caller has to check.
"""

from fairlead.base.errors import FairleadError, NodeFailed
from fairlead.base.job import CallPiece, Delta, add_piece
from fairlead.base.reported import excerpt
from fairlead.base.upstream_events import UpstreamReader
from fairlead.nodes.streams.sink import Backpressure, Sink

# Characters of each text that the message about a difference shows.
SHOWN_LENGTH = 40


class RecordingSink:
    """Forwards everything to `sink`, and records it."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._choices: dict[int, _RecordedChoice] = {}

    def put(self, delta: Delta) -> None:
        """Add a piece of the answer."""
        self.record(delta)
        self._sink.put(delta)

    def record(self, delta: Delta) -> None:
        """Record what `sink` has already."""
        self._choices.setdefault(delta.index, _RecordedChoice()).add(delta)

    def backpressure(self) -> Backpressure | None:
        """Return what to wait for while the sink is full; None if it is not."""
        return self._sink.backpressure()

    def fail(self, error: FairleadError) -> None:
        """End the answer with an error."""
        self._sink.fail(error)

    def to_repeat(self, reader: UpstreamReader | None) -> "dict[int, _ReplayedChoice]":
        """Return what was put so far, by choice, as it has to be repeated."""
        return {index: _ReplayedChoice(choice, reader) for index, choice in self._choices.items()}


class ReplaySink:
    """The sink of another attempt. What follows the repetition goes to `recorded`, for a third attempt.

    `reader` reads relayed events; None: there are none.
    """

    def __init__(
        self, recorded: RecordingSink, reader: UpstreamReader | None = None, *, node: str = "another node"
    ) -> None:
        self._recorded = recorded
        self._node = node
        self._choices = recorded.to_repeat(reader)
        self._failed = False

    def put(self, delta: Delta) -> None:
        """See `Sink`. At a difference the answer fails, and nothing more is forwarded."""
        if self._failed:
            return
        choice = self._choices.get(delta.index)
        if choice is None:
            self._recorded.put(delta)
            return
        try:
            following = choice.relayed(delta) if delta.raw else choice.generated(delta)
        except _Mismatch as mismatch:
            self.fail(NodeFailed(f"{self._node} did not repeat the answer that had begun: {mismatch}"))
            return
        if following is not None:
            self._recorded.put(following)

    def backpressure(self) -> Backpressure | None:
        """Return what to wait for while the sink is full; None if it is not."""
        return self._recorded.backpressure()

    def fail(self, error: FairleadError) -> None:
        """End the answer with an error."""
        if not self._failed:
            self._failed = True
            self._recorded.fail(error)


class _Mismatch(Exception):
    """The repetition differs from what was sent."""


class _RecordedChoice:
    """What was put of one choice. `recent`: the last bytes with text, and those since."""

    __slots__ = ("calls", "finished", "logprobs", "reasoning", "recent", "texts", "token_ids")

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.reasoning: list[str] = []
        self.calls: list[CallPiece] = []
        self.token_ids: list[int] = []
        self.logprobs = 0
        self.finished = False
        self.recent: list[bytes] | None = None

    def add(self, delta: Delta) -> None:
        if delta.text:
            self.texts.append(delta.text)
        if delta.reasoning:
            self.reasoning.append(delta.reasoning)
        for piece in delta.calls:
            add_piece(self.calls, piece)
        if delta.token_ids:
            self.token_ids += delta.token_ids
            self.logprobs += len(delta.logprobs)
        if delta.raw:
            if delta.text or self.recent is None:
                self.recent = []
            self.recent += delta.raw
        if delta.finish_reason is not None:
            self.finished = True


class _SentText:
    """A text that was sent, and how much of it was repeated."""

    def __init__(self, sent: str) -> None:
        self.sent = sent
        self._at = 0

    @property
    def is_repeated(self) -> bool:
        return self._at == len(self.sent)

    def following(self, text: str) -> tuple[str, bool]:
        """Return the part of the text that was not sent yet, and whether the rest was sent before."""
        left = self.sent[self._at :]
        if not left or not text:
            return text, False
        length = min(len(left), len(text))
        if left[:length] != text[:length]:
            received, sent = (excerpt(part[:length], SHOWN_LENGTH) for part in (text, left))
            raise _Mismatch(f"received {received!r} instead of {sent!r}")
        self._at += length
        return text[length:], True


class _ReplayedChoice:
    """The part of one choice that has to be repeated, and how much of it was repeated."""

    def __init__(self, recorded: _RecordedChoice, reader: UpstreamReader | None) -> None:
        self._reader = reader
        self._text = _SentText("".join(recorded.texts))
        self._reasoning = _SentText("".join(recorded.reasoning))
        self._calls = {call.number: (call.name, _SentText(call.arguments)) for call in recorded.calls}
        self._token_ids = list(recorded.token_ids)
        self._logprobs = recorded.logprobs
        self._finished = recorded.finished
        self._was_relayed = recorded.recent is not None
        self._is_relayed = False
        self._silent = _silent_at_end(recorded.recent or [], reader)
        self._tokens_at = 0

    def generated(self, delta: Delta) -> Delta | None:
        """Return the new part of a delta without events; None if nothing is new. Raises `_Mismatch`."""
        is_translated = delta.translation is not None
        self._is_relayed = self._is_relayed or is_translated
        # The text of relayed events is of all kinds.
        before = self._text if self._was_relayed else self._reasoning
        reasoning, _ = before.following(delta.reasoning)
        text, is_repeated = self._new_text(delta.text)
        if (text and not self._reasoning.is_repeated) or (delta.calls and not self._text.is_repeated):
            raise _Mismatch("it continues elsewhere")
        calls = [new for piece in delta.calls if (new := self._new_piece(piece)) is not None]
        token_ids = self._new_tokens(delta.token_ids)
        logprobs = delta.logprobs[min(self._logprobs, len(delta.logprobs)) :]
        self._logprobs -= len(delta.logprobs) - len(logprobs)
        if is_repeated and self._was_relayed:
            token_ids, logprobs = [], []  # they belong to text that was sent without them
        if delta.finish_reason is not None:
            # Relayed output has no tokens, and its end may be without an event, too.
            self._check_end(0 if self._is_relayed else len(self._token_ids))
            if self._finished:
                return None
        if not (text or reasoning or calls or token_ids or delta.finish_reason):
            return None
        return Delta(
            delta.index,
            text,
            token_ids,
            logprobs,
            delta.finish_reason,
            delta.stop_reason,
            relayed_tokens=delta.relayed_tokens,
            cached_tokens=delta.cached_tokens if is_translated else 0,  # others were put with the first delta
            reasoning=reasoning,
            reasoning_tokens=(
                delta.reasoning_tokens if is_translated else min(delta.reasoning_tokens, len(token_ids))
            ),
            calls=calls,
            translation=delta.translation,
        )

    def relayed(self, delta: Delta) -> Delta | None:
        """Return the new part of another server's events; None if nothing is new. Raises `_Mismatch`."""
        self._is_relayed = True
        kept: list[bytes] = []
        texts: list[str] = []
        for raw in delta.raw:
            assert self._reader is not None
            for event in self._reader.split(raw):
                following = self._following(event)
                if following is not None:
                    kept.append(following[0])
                    texts.append(following[1])
        if delta.finish_reason is not None:
            self._check_end()
            if self._finished:
                return None
        elif not kept and not (delta.relayed_tokens and not delta.text):
            return None
        tokens = sum(map(bool, texts)) if delta.text else delta.relayed_tokens
        return Delta(
            delta.index,
            "".join(texts),
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
            raw=kept or [b""],  # as in `RelayedStream`
            relayed_tokens=tokens,
        )

    def _following(self, raw: bytes) -> tuple[bytes, str] | None:
        """Return an event, or the new end of it, and its text; None if it was sent before."""
        assert self._reader is not None
        event = self._reader.read_event(raw)
        has_parts = self._reasoning.sent or self._calls
        if has_parts or (self._was_relayed and (not event.is_known or not self._text.sent)):
            raise _Mismatch("what was sent cannot be compared")
        if not event.text:
            if not self._text.is_repeated or self._finished:
                if event.finished:
                    self._check_end()
                return None
            if self._silent:
                self._silent -= 1
                return None
            return raw, ""
        text, is_repeated = self._new_text(event.text)
        if not is_repeated:
            self._silent = 0
            return raw, text
        if not text:
            return None
        self._silent = 0
        try:
            return self._reader.without_beginning(raw, text), text
        except ValueError as error:
            raise _Mismatch(str(error)) from error

    def _new_text(self, text: str) -> tuple[str, bool]:
        """Return the part of the text that was not sent yet, and whether the rest was sent before."""
        if text and self._finished and self._text.is_repeated:
            raise _Mismatch("it continues after its end")
        return self._text.following(text)

    def _new_piece(self, piece: CallPiece) -> CallPiece | None:
        """Return the part of a call's piece that was not sent yet, None if all of it was."""
        if piece.number not in self._calls:
            return piece
        name, sent = self._calls[piece.number]
        if piece.name not in (None, name):
            raise _Mismatch("it calls another function")
        arguments, _ = sent.following(piece.arguments)
        return CallPiece(piece.number, None, arguments) if arguments else None

    def _new_tokens(self, token_ids: list[int]) -> list[int]:
        left = self._token_ids[self._tokens_at : self._tokens_at + len(token_ids)]
        if left != token_ids[: len(left)]:
            raise _Mismatch("its tokens differ")
        self._tokens_at += len(left)
        return token_ids[len(left) :]

    def _check_end(self, tokens: int = 0) -> None:
        sent = (self._text, self._reasoning, *(arguments for _, arguments in self._calls.values()))
        if not all(each.is_repeated for each in sent) or self._tokens_at < tokens:
            raise _Mismatch("it ended earlier")


def _silent_at_end(recent: list[bytes], reader: UpstreamReader | None) -> int:
    """Return how many events without text follow the last one with text."""
    silent = 0
    for raw in recent:
        assert reader is not None
        for event in reader.split(raw):
            silent = 0 if reader.read_event(event).text else silent + 1
    return silent
