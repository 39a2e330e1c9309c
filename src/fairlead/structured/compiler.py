"""Compiles grammars in threads while the engine steps, and keeps them for later requests with the same.

llguidance releases the GIL while it compiles. Limits refuse a grammar that takes too much memory or time, and
end a single step of a mask that does.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from fairlead.structured.constraint import error_of, plain_error
from fairlead.structured.filling import MASK_LIMIT_S

Result = TypeVar("Result")

MOST_KEPT = 64
KEPT_BYTES = 4 * 1024 * 1024
"""Bounds on the grammars that are kept: their number, and the bytes of their texts.

A compiled grammar uses up to 130 times the memory of its text, and its lexer up to 11 MB (10,000 states).
"""

# Measured with 150,000 tokens on one slow core. `max_grammar_size` bounds the time to compile, which grows
# with the square of an object's optional properties: 0.13 s for 1,000 of them, 0.44 s for 2,000 and 26 s for
# 10,000, which are refused. An `anyOf` of 2,000 objects takes 0.3 s. `step_lexer_fuel` bounds the lexer's
# part of a mask to 10 ms. `step_max_items` and `max_items_in_row` are llguidance's own: lower ones refuse
# common schemas in the middle of an answer, so `filling` bounds the time of masks.
LIMITS = LLParserLimits(
    max_items_in_row=2000,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=50_000,
    step_max_items=50_000,
    max_lexer_states=10_000,
    max_grammar_size=30_000,
    precompute_large_lexemes=False,
    verbose_errors=False,
)


# llguidance recurses along chains of references and rules, and a stack that overflows ends the process: 3,000
# rules do with 8 MB, 1,000 references too. What is accepted has at most 1,000 and 500 (`schema`, `grammar`).
STACK_BYTES = 128 * 1024 * 1024
_stack_lock = threading.Lock()


class GrammarRefused(ValueError):
    """A grammar that cannot be compiled within the limits."""


def grammar_fault(grammar: str) -> str | None:
    """Return why a grammar cannot be compiled, None if it can. Needs no vocabulary."""
    with ThreadPoolExecutor(1) as pool:
        validating = _submit(pool, LLMatcher.validate_grammar_with_warnings, grammar, limits=LIMITS)
        is_error, messages = validating.result()
    return plain_error(messages[0]) if is_error else None


class GrammarCompiler:
    """Compiles grammars for one vocabulary.

    A grammar is kept for its `owner`, so that no tenant learns from the time that another has used it.
    """

    def __init__(self, vocabulary: LLTokenizer, *, threads: int = 1) -> None:
        self._vocabulary = vocabulary
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="grammar")
        self._kept: OrderedDict[tuple[Hashable, str], LLMatcher] = OrderedDict()
        self._kept_bytes = 0
        self._compiling: dict[tuple[Hashable, str], Future[LLMatcher]] = {}
        self._waiting: dict[int, tuple[Hashable, str]] = {}

    @property
    def waiting(self) -> int:
        """Sequences that wait for their grammar."""
        return len(self._waiting)

    def submit(self, key: int, grammar: str, owner: Hashable = None) -> LLMatcher | None:
        """Return a matcher for sequence `key` if its grammar is kept; else compile, for `take_ready`."""
        name = (owner, grammar)
        if (kept := self._kept.get(name)) is not None:
            self._kept.move_to_end(name)
            return kept.deep_copy()
        if name not in self._compiling:
            self._compiling[name] = _submit(self._pool, _compiled, self._vocabulary, grammar)
        self._waiting[key] = name
        return None

    def cancel(self, key: int) -> None:
        """Forget a sequence. Its grammar is not compiled if that has not begun and no other waits for it."""
        name = self._waiting.pop(key, None)
        if name is not None and name not in self._waiting.values() and self._compiling[name].cancel():
            del self._compiling[name]

    def discard(self, grammar: str) -> None:
        """Forget a grammar that failed in use, for all owners.

        The copies of a matcher share its lexer: once that has too many states, all of them fail.
        """
        for name in [name for name in self._kept if name[1] == grammar]:
            del self._kept[name]
            self._kept_bytes -= len(grammar)

    def take_ready(self) -> list[tuple[int, LLMatcher | str]]:
        """Return the sequences that need not wait any more, each with its matcher, or why it has none."""
        if not self._compiling:
            return []
        faults: dict[tuple[Hashable, str], str] = {}
        for name in [name for name, future in self._compiling.items() if future.done()]:
            future = self._compiling.pop(name)
            if (error := future.exception()) is None:
                self._keep(name, future.result())
            else:
                faults[name] = str(error)
        ready: list[tuple[int, LLMatcher | str]] = []
        for key, name in list(self._waiting.items()):
            if name in self._compiling:
                continue
            del self._waiting[key]
            ready.append((key, faults[name] if name in faults else self._kept[name].deep_copy()))
        self._evict()
        return ready

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _keep(self, name: tuple[Hashable, str], matcher: LLMatcher) -> None:
        self._kept[name] = matcher
        self._kept_bytes += len(name[1])

    def _evict(self) -> None:
        while len(self._kept) > MOST_KEPT or (self._kept_bytes > KEPT_BYTES and self._kept):
            (_, grammar), _ = self._kept.popitem(last=False)
            self._kept_bytes -= len(grammar)


def _submit(
    pool: ThreadPoolExecutor, function: Callable[..., Result], *arguments: object, **options: object
) -> Future[Result]:
    """Submit to a pool, the threads of which get a large stack; memory is used as far as the stack is."""
    with _stack_lock:
        before = threading.stack_size(STACK_BYTES)
        try:
            return pool.submit(function, *arguments, **options)
        finally:
            threading.stack_size(before)


def _compiled(vocabulary: LLTokenizer, grammar: str) -> LLMatcher:
    """Return a matcher after computing its first mask, which fills its lexer. Raises `GrammarRefused`."""
    matcher = LLMatcher(vocabulary, grammar, log_level=0, limits=LIMITS)
    if not matcher.is_error():
        first = matcher.deep_copy()
        first.compute_bitmask()
        began_s = time.thread_time()
        matcher.deep_copy().compute_bitmask()
        if time.thread_time() - began_s > MASK_LIMIT_S:
            raise GrammarRefused(f"its first token takes longer than {MASK_LIMIT_S * 1000:g} ms to find")
        matcher = first if first.is_error() else matcher
    if matcher.is_error():
        raise GrammarRefused(error_of(matcher))
    return matcher
