"""Masks that take too long end their own sequence, and delay no other for long."""

import threading
import time

import numpy as np
import pytest

from fairlead.language.structured import constraint as constraints
from fairlead.language.structured import filling as fillings
from fairlead.language.structured.constraint import Constraint
from fairlead.language.structured.filling import MaskFilling

LIMIT_S = 0.005


class Busy(Constraint):
    """A constraint with a mask that takes CPU time until `stop` is set."""

    def __init__(self, *, grammar=None, busy_s=60.0, asleep_s=0.0):
        super().__init__(grammar=grammar)
        self.stop, self.busy_s, self.asleep_s = threading.Event(), busy_s, asleep_s
        self.tokens, self.filled = [], 0

    def consume(self, token_ids):
        self.tokens += token_ids

    def fill(self, mask):
        if self.error is not None:
            mask[:] = 0
            return
        time.sleep(self.asleep_s)
        began_s = time.thread_time()
        while not self.stop.is_set() and time.thread_time() - began_s < self.busy_s:
            np.sum(np.ones(1000))
        self.filled += 1
        mask[:] = 7


@pytest.fixture
def filling():
    tested = MaskFilling(LIMIT_S)
    yield tested
    tested.close()


def quick():
    return Busy(busy_s=0)


def filled(filling, constraints, width=3):
    bits = np.full((len(constraints), width), 99, np.uint32)
    return filling.fill(constraints, [[index] for index in range(len(constraints))], bits)


def test_masks_are_filled_after_the_tokens(filling):
    constraints = [quick() for _ in range(5)]
    assert filled(filling, constraints).tolist() == [[7] * 3] * 5
    assert [one.tokens for one in constraints] == [[0], [1], [2], [3], [4]]


def test_mask_that_takes_too_long_fails_alone(filling):
    slow, others = Busy(), [quick(), quick()]
    before = np.full((3, 3), 99, np.uint32)
    after = filling.fill([others[0], slow, others[1]], [[]] * 3, before)
    assert after.tolist() == [[7] * 3, [0] * 3, [7] * 3]
    assert "5 ms" in slow.error
    assert [one.error for one in others] == [None, None]
    assert [one.filled for one in others] == [1, 1]
    slow.stop.set()
    while slow.filled == 0:
        time.sleep(0.001)
    assert after.tolist() == [[7] * 3, [0] * 3, [7] * 3], "the abandoned thread wrote to masks in use"


def test_thread_that_waits_for_the_processor_is_given_time(filling):
    patient = Busy(busy_s=LIMIT_S / 10, asleep_s=20 * LIMIT_S)
    assert filled(filling, [patient]).tolist() == [[7] * 3]
    assert patient.error is None


def test_several_masks_that_take_long_fail_one_by_one(filling):
    constraints = [Busy(), quick(), Busy(), quick()]
    assert filled(filling, constraints).tolist() == [[0] * 3, [7] * 3, [0] * 3, [7] * 3]
    for one in constraints:
        one.stop.set()


def test_slow_masks_of_a_step_share_its_limit():
    generous = MaskFilling(0.5)
    bits = filled(generous, [Busy(busy_s=0.3)])
    assert bits.tolist() == [[7] * 3], "alone it is within the limit"
    second, quick_one = Busy(busy_s=0.3), quick()
    assert filled(generous, [Busy(busy_s=0.45), second, quick_one]).tolist() == [[7] * 3, [0] * 3, [7] * 3]
    assert (second.error is not None, quick_one.error) == (True, None)
    generous.close()


def test_answer_ends_when_its_slow_masks_have_used_up_its_time(filling, monkeypatch):
    for module in (fillings, constraints):
        monkeypatch.setattr(module, "SLOW_MASK_S", LIMIT_S / 5)
    monkeypatch.setattr(constraints, "SLOW_ANSWER_S", LIMIT_S)
    slow, others = Busy(busy_s=LIMIT_S / 2), quick()
    errors = [(filled(filling, [slow, others]), slow.error)[1] for _ in range(4)]
    assert errors[0] is None
    assert errors[-1] is not None
    assert (others.error, others.slow_s) == (None, 0)


def test_others_of_a_grammar_fail_while_its_lexer_is_locked(filling):
    first, same, later, other = Busy(grammar="g"), Busy(grammar="g"), Busy(grammar="g"), quick()
    assert filled(filling, [first, same, other]).tolist() == [[0] * 3, [0] * 3, [7] * 3]
    assert filled(filling, [later, other]).tolist() == [[0] * 3, [7] * 3]
    assert same.error == later.error == first.error
    assert same.filled == later.filled == 0
    first.stop.set()
    while filling._abandoned["g"].is_alive():
        time.sleep(0.001)
    assert filled(filling, [Busy(grammar="g", busy_s=0)]).tolist() == [[7] * 3]


def test_others_with_a_lexer_of_their_own_do_not_fail_with_it(filling):
    first, renewed = Busy(grammar="g"), quick()
    renewed.grammar, renewed.lexer = "g", None
    assert filled(filling, [first, renewed]).tolist() == [[0] * 3, [7] * 3]
    assert renewed.error is None
    first.stop.set()


def test_failed_constraint_is_not_filled_again(filling):
    slow = Busy()
    filled(filling, [slow])
    assert filled(filling, [slow, quick()]).tolist() == [[0] * 3, [7] * 3]
    slow.stop.set()


def test_exception_is_raised_to_the_caller_and_the_next_fill_works(filling):
    class Faulty(Busy):
        def fill(self, mask):
            raise ValueError("wrong width")

    for _ in range(2):
        with pytest.raises(ValueError, match="wrong width"):
            filled(filling, [quick(), Faulty(), quick()])
    assert filled(filling, [quick()]).tolist() == [[7] * 3]


def test_abandoned_threads_end():
    before = set(threading.enumerate())
    filling = MaskFilling(LIMIT_S)
    slow = [Busy() for _ in range(4)]
    filled(filling, slow)
    ours = set(threading.enumerate()) - before
    assert len(ours) >= 4
    for one in slow:
        one.stop.set()
    filling.close()
    for thread in ours:
        thread.join(20)
    assert not any(thread.is_alive() for thread in ours)
