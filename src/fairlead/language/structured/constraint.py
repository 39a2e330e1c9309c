"""One sequence's constraint: which tokens may come next."""

import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import Future
from copy import copy

import numpy as np
from llguidance import LLMatcher

from fairlead.base.job import ReasoningLimit
from fairlead.language.structured.closing import Closing

WORD_BITS = 32
SLOW_MASK_S = 0.02
"""CPU time from which on a mask is slow. One that is faster is filled however slow others are. The masks
after the drafts of a sequence are given up when they have taken so much together."""

SLOW_ANSWER_S = 2.0
"""CPU time of all slow masks of one answer."""

_ALL = 0xFFFF_FFFF


def plain_error(message: str) -> str:
    """Return a message of llguidance without the mark that it leaves where details are off."""
    return message.removesuffix("<non-verbose/>").strip()


def error_of(matcher: LLMatcher) -> str:
    """Return why a matcher cannot go on; empty if it can."""
    return plain_error(matcher.get_error())


class Constraint:
    """A grammar's matcher, a limit of the reasoning, or both.

    It belongs to the sequence, not to its slot: a sequence that is preempted keeps it. The matcher may be set
    later than the rest, by `begin`, when its grammar is compiled.

    The masks after drafts are those of copies, one for each draft, which make the steps that the constraint
    makes without drafts. It goes on from the last copy whose drafts were right, and drops the others. With
    the drafts «b c d», of which the model chooses «b c e», the copies have consumed «b», «b c» and «b c d».
    The second one consumes «e» next.

    `consumed`: how many tokens of the answer they have consumed.
    `slow_s`: the CPU time of its slow masks.
    `expected_s`: the CPU time that its next mask is expected to take.
    `ahead`: its next mask, which a thread finds before the step that needs it; None: that step fills it.
    `error`: why it cannot go on; None if it can.
    `is_complete`: whether the answer has ended without a token for that, as the model has none.
    `owner`: the tenant of the sequence, or what stands for it.
    `close_after`: the tokens of an answer that is closed when it nears them; None: it is not.
    `closing`: what closes it.
    `lexer`: identifies the lexer that copies of the matcher share; None if it is not shared.
    """

    def __init__(
        self,
        matcher: LLMatcher | None = None,
        limit: ReasoningLimit | None = None,
        grammar: str | None = None,
    ) -> None:
        self.matcher = matcher
        self.grammar = grammar
        self._reasoning = None if limit is None else _Reasoning(limit)
        self._renew: Callable[[], LLMatcher] | None = None
        self._tokens: list[int] = []
        self._renewed_after = -1
        self.consumed = 0
        self.slow_s = 0.0
        self.expected_s = 0.0
        self.ahead: Future[np.ndarray] | None = None
        self._words = 0
        self.owner: Hashable = None
        self.error: str | None = None
        self.is_complete = False
        self.close_after: int | None = None
        self.closing: Closing | None = None
        self.lexer: Hashable = grammar
        self._missing_end: int | None = None
        self._drafts: list[int] = []
        self._after_drafts: list[Constraint] = []  # copies that have filled their masks, by draft

    @property
    def is_free(self) -> bool:
        """Whether any token may come next."""
        forced = None if self._reasoning is None else self._reasoning.forced
        return self.matcher is None and forced is None and self.error is None

    def begin(
        self,
        matcher: LLMatcher,
        lexer: Hashable,
        renew: Callable[[], LLMatcher],
        *,
        missing_end: int | None = None,
        expected_s: float = 0.0,
        words: int = 0,
    ) -> None:
        """Use a matcher from now on.

        lexer: identifies what its copies share.
        renew: compiles another one of the same grammar.
        missing_end: the id of the matcher's end if the model has no such token. The answer ends when the
            grammar allows its end and nothing else.
        expected_s: the CPU time of its first mask.
        words: the length of a mask, in words of `WORD_BITS` bits.
        """
        self.matcher, self.lexer, self._renew = matcher, lexer, renew
        self._missing_end = missing_end
        self.expected_s, self._words = expected_s, words

    def consume(self, token_ids: Sequence[int]) -> None:
        """Advance by tokens of the answer, an end-of-sequence token included. Other tokens are an error."""
        if self.is_complete:
            return
        if self._after_drafts:
            token_ids = self._take_drafts(token_ids)
        self.consumed += len(token_ids)
        if self._reasoning is not None:
            for token_id in token_ids:
                self._reasoning.consume(token_id)
        if self.matcher is None or self.error is not None:
            return
        self._tokens += token_ids
        if any(token_id < 0 for token_id in token_ids):  # which llguidance raises for
            self.error = "a token of the answer is missing"
        elif not self.matcher.consume_tokens(list(token_ids)) and not self._renewed():
            self.error = error_of(self.matcher) or "the answer violates its grammar"

    def fill(self, mask: np.ndarray) -> None:
        """Write the bits of the tokens that may come next to `mask`, a row of uint32; none after an error.

        The end of the reasoning is forced where the grammar allows it: not within a character.
        """
        if self.matcher is None:
            mask[:] = _ALL
        elif self.error is None:
            self._compute(self.matcher, mask)
            if self.matcher.is_error() and self._renewed():
                self._compute(self.matcher, mask)
            if self.matcher.is_error():
                self.error = error_of(self.matcher)
            elif self._missing_end is not None and not mask.any():
                self.is_complete = self.matcher.is_accepting()
        if self.error is not None:
            mask[:] = 0
            return
        forced = None if self._reasoning is None else self._reasoning.forced
        if forced is not None and forced >= WORD_BITS * len(mask):
            forced = None  # a mark that the network has no token for
        if forced is not None and int(mask[forced // WORD_BITS]) >> forced % WORD_BITS & 1:
            mask[:] = 0
            mask[forced // WORD_BITS] = 1 << forced % WORD_BITS
        elif self.closing is not None and self.matcher is not None and not self.is_complete:
            self.closing.narrow(self.matcher, self.consumed, mask)

    def fill_after(self, drafts: Sequence[int], masks: Iterable[np.ndarray]) -> None:
        """Write the bits of the tokens that may come after each draft to its mask, after `fill`.

        A mask is empty where the answer may not go on, so that the model's choice there is not accepted.
        """
        self._drafts, self._after_drafts = [], []
        last: Constraint | None = self
        began_s = time.thread_time()
        for draft, mask in zip(drafts, masks, strict=True):
            began_mask_s = time.thread_time()
            last = last and last.copy_after(draft) if began_mask_s - began_s < SLOW_MASK_S else None
            if last is None:
                mask[:] = 0
                continue
            last.fill(mask)
            last.charge(time.thread_time() - began_mask_s)
            self._drafts.append(draft)
            self._after_drafts.append(last)

    def find(self, token_ids: Sequence[int]) -> np.ndarray:
        """Consume tokens and return the mask [words], uint32, that follows; for a thread, ahead of a step."""
        mask: np.ndarray = np.zeros(self._words, np.uint32)
        began_s = time.thread_time()
        self.consume(token_ids)
        self.fill(mask)
        self.charge(time.thread_time() - began_s)
        return mask

    def charge(self, took_s: float) -> None:
        """Count the CPU time of a mask. An answer that has had too many slow ones ends at its next token."""
        self.expected_s = max(took_s, self.expected_s / 2)
        if took_s < SLOW_MASK_S:
            return
        self.slow_s += took_s
        if self.slow_s > SLOW_ANSWER_S and self.error is None:
            self.error = f"its tokens took longer than {SLOW_ANSWER_S:g} s to find"

    def copy_after(self, draft: int) -> "Constraint | None":
        """Return a copy that has consumed a draft; None if the answer may not go on with it.

        An error of the copy is that of its mask only. If the draft is right, the error comes again in the
        next step, where another matcher is tried.
        """
        if self.error is not None or self.is_complete:
            return None
        other = copy(self)
        return other if other.begin_copy(draft) else None

    def begin_copy(self, draft: int) -> bool:
        """Give a copy, which this is, a state of its own; return whether it could consume the draft."""
        self._renew = None
        self._tokens, self._drafts, self._after_drafts = [], [], []
        self._reasoning, self.closing = copy(self._reasoning), copy(self.closing)
        self.consumed += 1
        if self._reasoning is not None:
            self._reasoning.consume(draft)
        if self.matcher is None:
            return True
        self.matcher = self.matcher.deep_copy()
        return self.matcher.try_consume_tokens([draft]) == 1

    def _take_drafts(self, token_ids: Sequence[int]) -> Sequence[int]:
        """Become the copy that has consumed all but the last of these tokens; return the rest of them."""
        count = min(len(token_ids) - 1, len(self._drafts))
        if count > 0:
            assert self._drafts[:count] == list(token_ids[:count])
            last = self._after_drafts[count - 1]
            self.matcher, self._reasoning, self.closing = last.matcher, last._reasoning, last.closing  # noqa: SLF001  of its own class
            self.consumed, self.slow_s, self.expected_s = last.consumed, last.slow_s, last.expected_s
            self.error = last.error  # its masks have taken too long
            self._tokens += token_ids[:count]
        self._drafts, self._after_drafts = [], []
        return token_ids[max(0, count) :]

    def _compute(self, matcher: LLMatcher, mask: np.ndarray) -> None:
        """Write a matcher's bits to `mask`, except that of an end which the model lacks."""
        if (end := self._missing_end) is None:
            matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            return
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint32)  # the end may need one more word
        mask[:] = bits[: len(mask)]
        if end < WORD_BITS * len(mask):
            mask[end // WORD_BITS] &= _ALL ^ 1 << end % WORD_BITS

    def _renewed(self) -> bool:
        """Replace the matcher after an error by one with a lexer of its own; return whether it can go on.

        A lexer has a bounded number of states. The answers that share it fill it together, and each mask adds
        states for tokens that are not chosen. Those of this answer alone are fewer: about one for each byte.
        """
        if self._renew is None or self._renewed_after == len(self._tokens):
            return False
        self._renewed_after = len(self._tokens)
        try:
            self.matcher = self._renew()
        except ValueError:
            return False
        self.lexer = None
        return self.matcher.consume_tokens(self._tokens)


class _Reasoning:
    """How far the reasoning is. `forced`: the only token that may come next, if it has used up its limit."""

    def __init__(self, limit: ReasoningLimit) -> None:
        self._limit = limit
        self._is_open = limit.is_open
        self._is_over = False
        self._tokens = 0
        self._matched = 0  # ids of the next mark, at the end of what was consumed
        self.forced: int | None = None
        self._force()

    def consume(self, token_id: int) -> None:
        if self._is_over:
            return
        mark = self._limit.end if self._is_open else self._limit.begin
        self._matched = _matched(mark, self._matched, token_id)
        if self._is_open:
            self._tokens += 1
        if self._matched == len(mark):
            self._is_over, self._is_open, self._matched = self._is_open, not self._is_open, 0
        self._force()

    def _force(self) -> None:
        used_up = self._is_open and not self._is_over and self._tokens >= self._limit.max_tokens
        self.forced = self._limit.end[self._matched] if used_up else None


def _matched(mark: tuple[int, ...], matched: int, token_id: int) -> int:
    """Return how many ids of a mark are at the end of a text, after another token."""
    tail = (*mark[:matched], token_id)
    return next(count for count in range(len(tail), -1, -1) if tail[len(tail) - count :] == mark[:count])
