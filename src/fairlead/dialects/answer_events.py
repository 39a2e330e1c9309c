"""An answer as semantic events: reasoning, text, calls, and the end with its reason and token counts.

Dialects with typed events write these, and never read each other's bytes. They come from deltas, whichever
server made those, and one answer is one choice.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from fairlead.base.job import CallPiece, Delta, FinishReason, Job
from fairlead.language.structured.pieces import CallArguments, CallBegin, Content, Reasoning


class CallEnd(NamedTuple):
    """The end of a call, after its last arguments."""

    number: int


class TokenUsage(NamedTuple):
    """The tokens of an answer.

    prompt_tokens: Tokens of the prompt.
    cached_tokens: How many of these were in the KV cache.
    completion_tokens: Tokens of the answer.
    reasoning_tokens: How many of these are reasoning.
    """

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    reasoning_tokens: int


class AnswerEnd(NamedTuple):
    """The end of a complete answer. `stop_reason`: the stop string or token that ended it, if one did."""

    finish_reason: FinishReason
    stop_reason: str | int | None
    usage: TokenUsage


AnswerEvent = Reasoning | Content | CallBegin | CallArguments | CallEnd | AnswerEnd


class AnswerEvents:
    """Converts the deltas of one answer to its events. One object per answer, which counts its tokens."""

    def __init__(self, job: Job) -> None:
        self._prompt_tokens = job.prompt_tokens
        self._cached_tokens = self._completion_tokens = self._reasoning_tokens = 0
        self._open_call: int | None = None

    @property
    def usage(self) -> TokenUsage:
        """The tokens so far."""
        return TokenUsage(
            self._prompt_tokens, self._cached_tokens, self._completion_tokens, self._reasoning_tokens
        )

    def of(self, deltas: Iterable[Delta]) -> list[AnswerEvent]:
        """Return the events of these deltas, in their order; none of a text or a call is empty."""
        return [event for delta in deltas for event in self._of(delta)]

    def count(self, delta: Delta) -> None:
        """Count the tokens of a delta, for a writer that needs no events of it."""
        self._completion_tokens += len(delta.token_ids) + delta.relayed_tokens
        self._reasoning_tokens += delta.reasoning_tokens
        self._cached_tokens += delta.cached_tokens
        if delta.translation is not None and delta.translation.prompt_tokens is not None:
            self._prompt_tokens = delta.translation.prompt_tokens

    def _of(self, delta: Delta) -> Iterator[AnswerEvent]:
        self.count(delta)
        if delta.reasoning:
            yield from self._end_of_call()
            yield Reasoning(delta.reasoning)
        # The rest of an open call precedes a text that the delta has, because that ends the call.
        rest = [piece for piece in delta.calls if piece.number == self._open_call]
        for piece in rest:
            yield from self._of_call(piece)
        if delta.text:
            yield from self._end_of_call()
            yield Content(delta.text)
        for piece in delta.calls[len(rest) :]:
            yield from self._of_call(piece)
        if delta.finish_reason is not None:
            yield from self._end_of_call()
            yield AnswerEnd(delta.finish_reason, delta.stop_reason, self.usage)

    def _of_call(self, piece: CallPiece) -> Iterator[AnswerEvent]:
        if piece.name is not None:
            yield from self._end_of_call()
            self._open_call = piece.number
            yield CallBegin(piece.number, piece.name)
        if piece.arguments:
            yield CallArguments(piece.number, piece.arguments)

    def _end_of_call(self) -> Iterator[AnswerEvent]:
        if self._open_call is not None:
            yield CallEnd(self._open_call)
            self._open_call = None
