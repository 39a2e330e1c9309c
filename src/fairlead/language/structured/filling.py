"""Fills masks in a thread, so that a mask which takes too long ends its own sequence, not the step.

The limits of llguidance bound a mask to some hundred milliseconds for hostile grammars. A lower bound on its
items would also refuse common schemas: with 30 optional properties, a mask takes 1 ms and over 12,000 items.
"""

import contextlib
import threading
import time
from collections.abc import Hashable, Iterator, Sequence
from queue import SimpleQueue

import numpy as np

from fairlead.language.structured.constraint import SLOW_MASK_S, Constraint

MASK_LIMIT_S = 0.2
"""CPU time of the slow masks of one step. With 20 ms, a busy processor refused a schema of four fields."""


# llguidance recurses along chains of references and rules, and a stack that overflows ends the process: 3,000
# rules do with 8 MB, 1,000 references too. What is accepted has at most 1,000 and 500 (`schema`, `grammar`).
STACK_BYTES = 128 * 1024 * 1024
_stack_lock = threading.Lock()


@contextlib.contextmanager
def large_stack() -> Iterator[None]:
    """Give a large stack to the threads that start in the block; memory is used as far as the stack is."""
    with _stack_lock:
        before = threading.stack_size(STACK_BYTES)
        try:
            yield
        finally:
            threading.stack_size(before)


class _Fill:
    """Masks to fill.

    constraints, tokens, bits, drafts: those of `MaskFilling.fill`.
    begin: the index of the first constraint to fill.
    slow_s: the CPU time of the slow ones so far.

    `index` is that of the constraint which is filled now; `lock` guards it and `is_abandoned`.
    """

    def __init__(
        self,
        constraints: Sequence[Constraint],
        tokens: Sequence[list[int]],
        bits: np.ndarray,
        drafts: Sequence[Sequence[int]],
        begin: int,
        slow_s: float,
    ) -> None:
        self.constraints = constraints
        self.tokens = tokens
        self.bits = bits
        self.drafts = drafts
        self.index = begin
        self.slow_s = slow_s
        self.lock = threading.Lock()
        self.is_abandoned = False
        self.error: BaseException | None = None
        self.done = threading.Event()

    def run(self) -> bool:
        """Fill the masks; return whether that was not abandoned."""
        try:
            for index in range(self.index, len(self.constraints)):
                with self.lock:
                    if self.is_abandoned:
                        return False
                    self.index = index
                began_s = time.thread_time()
                self.constraints[index].consume(self.tokens[index])
                self.constraints[index].fill(self.bits[index])
                self._charge(self.constraints[index], time.thread_time() - began_s)
                if self.drafts and self.drafts[index]:
                    self._fill_after_drafts(index)
        except BaseException as error:  # noqa: BLE001  raised in the thread that waits
            self.error = error
        self.done.set()
        return not self.is_abandoned

    def _fill_after_drafts(self, index: int) -> None:
        first = len(self.constraints) + sum(map(len, self.drafts[:index]))
        drafts = self.drafts[index]
        self.constraints[index].fill_after(drafts, self.bits[first : first + len(drafts)])

    def _charge(self, constraint: Constraint, took_s: float) -> None:
        constraint.charge(took_s)
        if took_s >= SLOW_MASK_S:
            self.slow_s += took_s

    def abandon(self, index: int) -> bool:
        """Return whether the mask `index` is still being filled; if so, no later one will be."""
        with self.lock:
            self.is_abandoned = self.index == index and not self.done.is_set()
        return self.is_abandoned


class _Filler(threading.Thread):
    """Executes one fill after another, until one is abandoned or None is received."""

    def __init__(self) -> None:
        super().__init__(name="masks", daemon=True)
        self.fills: SimpleQueue[_Fill | None] = SimpleQueue()
        with large_stack():  # a constraint may compile its grammar again
            self.start()

    def run(self) -> None:
        while (fill := self.fills.get()) is not None and fill.run():
            del fill

    def cpu_s(self) -> float:
        """Return the thread's CPU time; where that is not known, the time of the clock."""
        if self.ident is None or not hasattr(time, "pthread_getcpuclockid"):
            return time.monotonic()
        return time.clock_gettime(time.pthread_getcpuclockid(self.ident))


class MaskFilling:
    """Fills the masks of steps. `limit_s`: the CPU time that the slow ones of a step may take together."""

    def __init__(self, limit_s: float = MASK_LIMIT_S) -> None:
        self._limit_s = limit_s
        self._reason = f"a token took longer than {limit_s * 1000:g} ms to find"
        self._filler: _Filler | None = None
        self._abandoned: dict[Hashable, _Filler] = {}  # by the lexer that it has locked

    def fill(
        self,
        constraints: Sequence[Constraint],
        tokens: Sequence[list[int]],
        bits: np.ndarray,
        drafts: Sequence[Sequence[int]] = (),
    ) -> np.ndarray:
        """Let each of M constraints consume its tokens and fill a row of `bits`, uint32.

        constraints: each once.
        tokens: those of each constraint.
        bits: [M + D, words], for D drafts in all. The rows after the first M are those after each draft.
        drafts: those that follow the tokens of each constraint; empty: there are none.

        Return `bits`, or a copy. A constraint that takes too long gets an error and an empty mask. Its thread
        is abandoned: it goes on, with the memory that it writes to, until the mask is found. Until then it
        locks the lexer that others of the same grammar share, so these get the error, too.
        """
        begin, slow_s = 0, 0.0
        self._abandoned = {name: one for name, one in self._abandoned.items() if one.is_alive()}
        self._fail_abandoned(constraints)
        while begin < len(constraints):
            if self._filler is None:
                self._filler = _Filler()
            fill = _Fill(constraints, tokens, bits, drafts, begin, slow_s)
            self._filler.fills.put(fill)
            late = self._wait(fill, self._filler)
            if late is None:
                if fill.error is not None:
                    raise fill.error
                break
            lexer = constraints[late].lexer
            if lexer is not None:
                self._abandoned[lexer] = self._filler
            self._filler = None
            bits = bits.copy()
            bits[late] = 0
            constraints[late].error = self._reason
            self._fail_abandoned(constraints[late + 1 :])
            begin, slow_s = late + 1, self._limit_s
        return bits

    def _fail_abandoned(self, constraints: Sequence[Constraint]) -> None:
        for constraint in constraints if self._abandoned else ():
            if constraint.lexer in self._abandoned:
                constraint.error = self._reason

    def _wait(self, fill: _Fill, filler: _Filler) -> int | None:
        """Return the index of a constraint that takes too long, which is abandoned; None if all are done."""
        index, began_s = fill.index, filler.cpu_s()
        while not fill.done.wait(min(SLOW_MASK_S, self._limit_s / 2)):
            now_s = filler.cpu_s()
            if fill.index != index:
                index, began_s = fill.index, now_s
                continue
            left_s = max(min(SLOW_MASK_S, self._limit_s), self._limit_s - fill.slow_s)
            if now_s - began_s >= left_s and fill.abandon(index):
                return index
        return None

    def close(self) -> None:
        """End the thread."""
        if self._filler is not None:
            self._filler.fills.put(None)
            self._filler = None
