"""Compiles grammars in threads while the engine steps, and keeps them for later requests with the same.

A grammar of a request has been tried before, in a process of its own (`trials`), so it is known to end within
bounds. llguidance releases the GIL while it compiles. Limits end a single step of a mask that takes too long.
"""

import time
from collections import OrderedDict
from collections.abc import Hashable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from fairlead.language.structured.closing import Closing, byte_ids
from fairlead.language.structured.constraint import WORD_BITS, error_of
from fairlead.language.structured.filling import MASK_LIMIT_S
from fairlead.language.structured.turn_pool import TurnPool

THREADS = 2
MOST_KEPT = 64
KEPT_BYTES = 64 * 1024 * 1024
"""Bounds on the grammars that are kept: their number, and an estimate of their memory."""

BYTES_OF_TEXT = 130  # of memory for a byte of a grammar's text, at most
BYTES_A_TOKEN = 4 * 1100
MOST_GROWTH = 11 * 1024 * 1024
"""The lexer of a grammar that is used gets about four states for each new token, up to `max_lexer_states`."""

MOST_ALTERNATIVES = 5_000
"""States of the parser at a place of an answer. 1,500 optional properties stay below it, 2,000 do not.

With llguidance's own bound of 2,000, an object of 1,000 compiled and failed at its first character.
"""

# Measured with 150,000 tokens on one slow core. `max_grammar_size` bounds the time to compile, which grows
# with the square of an object's optional properties: 0.13 s for 1,000 of them, 0.44 s for 2,000 and 26 s for
# 10,000, which are refused. An `anyOf` of 2,000 objects takes 0.3 s. `step_lexer_fuel` bounds the lexer's
# part of a mask to 40 ms. With a quarter of it, answers to `^(\w+\s?){40}$` ended in the middle.
# `step_max_items` is llguidance's own: a lower one refuses common schemas in the middle of an answer, so
# `filling` bounds the time of masks.
LIMITS = LLParserLimits(
    max_items_in_row=MOST_ALTERNATIVES,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=10_000,
    max_grammar_size=30_000,
    precompute_large_lexemes=False,
    verbose_errors=False,
)


class GrammarRefused(ValueError):
    """A grammar that cannot be compiled within the limits."""


def compile_grammar(vocabulary: LLTokenizer, grammar: str) -> tuple[LLMatcher, float]:
    """Return a matcher, and the CPU time in seconds of its first mask. Raises `GrammarRefused`.

    That mask is computed twice: the first time also fills the lexer.
    """
    matcher, mask_s = LLMatcher(vocabulary, grammar, log_level=0, limits=LIMITS), 0.0
    if not matcher.is_error():
        first = matcher.deep_copy()
        first.compute_bitmask()
        began_s = time.thread_time()
        matcher.deep_copy().compute_bitmask()
        mask_s = time.thread_time() - began_s
        if mask_s > MASK_LIMIT_S:
            raise GrammarRefused(f"its first token takes longer than {MASK_LIMIT_S * 1000:g} ms to find")
        matcher = first if first.is_error() else matcher
    if matcher.is_error():
        raise GrammarRefused(error_of(matcher))
    return matcher, mask_s


@dataclass
class _Kept:
    """A compiled grammar. `size_bytes` is an estimate, which grows as its lexer does."""

    matcher: LLMatcher
    first_mask_s: float
    size_bytes: int
    grown_bytes: int = 0


Name = tuple[Hashable, str]
"""A grammar with its owner."""


class GrammarCompiler:
    """Compiles grammars for one vocabulary, in turn by their owners, each of which has one thread at a time.

    A grammar is kept for its owner, so that no tenant learns from the time that another has used it.
    `missing_end`: the id that ends answers in the vocabulary, if the model has no token that does.
    """

    def __init__(
        self, vocabulary: LLTokenizer, *, threads: int = THREADS, missing_end: int | None = None
    ) -> None:
        self.missing_end = missing_end
        self._vocabulary = vocabulary
        self._pool = TurnPool(threads, "grammars")
        self._byte_ids = byte_ids(vocabulary)
        self._kept: OrderedDict[Name, _Kept] = OrderedDict()
        self._kept_bytes = 0
        self._compiling: dict[Name, tuple[Future[tuple[LLMatcher, float]], int]] = {}  # with their sizes
        self._waiting: dict[int, Name] = {}

    @property
    def waiting(self) -> int:
        """Sequences that wait for their grammar."""
        return len(self._waiting)

    def submit(self, key: int, grammar: str, owner: Hashable = None, size_bytes: int = 0) -> LLMatcher | None:
        """Return a matcher if the grammar is kept; else compile it, for `take_ready`.

        key: the sequence.
        grammar: its grammar.
        owner: owners take turns with the threads.
        size_bytes: the memory of the compiled grammar, as a trial has measured it; 0: estimated by its text.
        """
        name = (owner, grammar)
        if (kept := self._kept.get(name)) is not None:
            self._kept.move_to_end(name)
            return kept.matcher.deep_copy()
        if name not in self._compiling:
            future = self._pool.submit(owner, partial(compile_grammar, self._vocabulary, grammar))
            self._compiling[name] = future, max(size_bytes, BYTES_OF_TEXT * len(grammar))
        self._waiting[key] = name
        return None

    def closing(self, most_tokens: int) -> Closing:
        """Return what closes an answer that nears its limit."""
        return Closing(most_tokens, self._byte_ids)

    def cancel(self, key: int) -> None:
        """Forget a sequence. Its grammar is not compiled if that has not begun and no other waits for it."""
        name = self._waiting.pop(key, None)
        if name is None or name in self._waiting.values():
            return
        if self._compiling[name][0].cancel():
            del self._compiling[name]

    def first_mask_s(self, grammar: str, owner: Hashable) -> float:
        """Return the CPU time of a kept grammar's first mask; 0 if it is not kept."""
        kept = self._kept.get((owner, grammar))
        return 0.0 if kept is None else kept.first_mask_s

    @property
    def mask_words(self) -> int:
        """The length of a mask, in words of 32 bits. It has no bit for an end that the model lacks."""
        size = self._vocabulary.vocab_size if self.missing_end is None else self.missing_end
        return int(-(-size // WORD_BITS))

    def renew(self, grammar: str) -> LLMatcher:
        """Compile a grammar again, for a sequence that shares nothing with others. Raises `GrammarRefused`.

        The copies of a matcher share its lexer, and what one of them adds to it can be too much for another.
        """
        matcher = LLMatcher(self._vocabulary, grammar, log_level=0, limits=LIMITS)
        if matcher.is_error():
            raise GrammarRefused(error_of(matcher))
        return matcher

    def count_use(self, grammar: str, owner: Hashable, tokens: int) -> None:
        """Count that an answer of so many tokens has used a grammar, which makes its lexer larger."""
        kept = self._kept.get((owner, grammar))
        if kept is not None:
            growth = min(tokens * BYTES_A_TOKEN, MOST_GROWTH - kept.grown_bytes)
            kept.grown_bytes += growth
            kept.size_bytes += growth
            self._kept_bytes += growth
            self._evict()

    def discard(self, grammar: str) -> None:
        """Forget a grammar that failed in use, for all owners."""
        for name in [name for name in self._kept if name[1] == grammar]:
            self._kept_bytes -= self._kept.pop(name).size_bytes

    def take_ready(self) -> list[tuple[int, LLMatcher | str]]:
        """Return the sequences that need not wait any more, each with its matcher, or why it has none."""
        done = [name for name, (future, _) in self._compiling.items() if future.done()]
        if not done:
            return []
        faults: dict[Name, str] = {}
        for name in done:
            future, size_bytes = self._compiling.pop(name)
            if (error := future.exception()) is None:
                self._kept[name] = _Kept(*future.result(), size_bytes)
                self._kept_bytes += size_bytes
            else:
                faults[name] = str(error)
        ready: list[tuple[int, LLMatcher | str]] = []
        for key, name in [entry for entry in self._waiting.items() if entry[1] in done]:
            del self._waiting[key]
            ready.append((key, faults[name] if name in faults else self._kept[name].matcher.deep_copy()))
        self._evict()
        return ready

    def close(self) -> None:
        """End the threads."""
        self._pool.close()

    def _evict(self) -> None:
        while len(self._kept) > MOST_KEPT or (self._kept_bytes > KEPT_BYTES and self._kept):
            self._kept_bytes -= self._kept.popitem(last=False)[1].size_bytes
