"""Slow masks: which sequences a step leaves out, and what becomes of them."""

import threading
from types import SimpleNamespace

import pytest

from engine.constrained_model import Constrained, grammar_of
from fairlead.engine.slow_masks import SlowMasks
from fairlead.language.structured.constraint import Constraint
from language.structured.schemas import schema_of

WAIT_S = 20


class Held(Constraint):
    """A constraint whose masks take `expected_s`, and are found while `gate` is set."""

    def __init__(self, owner, expected_s):
        super().__init__(matcher=object(), grammar="g")
        self.owner, self.lexer, self.expected_s = owner, (owner, id(self)), expected_s
        self.gate, self.found = threading.Event(), []

    def find(self, token_ids):
        self.gate.wait(WAIT_S)
        self.found.append(list(token_ids))
        return "mask"


class Tokens:
    """The tokens of a sequence with a prompt of two. `unknown`: tokens of steps under way."""

    prompt_length = 2

    def __init__(self, output=(), unknown=0):
        self.ids, self.unknown = [0, 0, *output], unknown

    @property
    def num_tokens(self):
        return len(self.ids) + self.unknown

    @property
    def output_length(self):
        return len(self.ids) - 2

    def tokens_view(self):
        return memoryview(bytes(self.ids))


@pytest.fixture
def masks():
    made = SlowMasks(share=0.25, least_budget_s=0.002)
    made.begin_step(0.0)
    yield made
    made.close()


def sequence(key, expected_s, owner="one", **tokens):
    return SimpleNamespace(key=key, tokens=Tokens(**tokens), constraint=Held(owner, expected_s))


def found(one):
    one.constraint.gate.set()
    return one.constraint.ahead.result(WAIT_S)


def test_masks_of_a_step_share_its_budget(masks):
    admitted = [masks.admits(sequence(key, 0.0009)) for key in range(3)]
    assert admitted == [True, True, False]
    masks.begin_step(0.0)
    assert masks.admits(sequence(3, 0.0009))


def test_budget_is_a_share_of_the_step_before(masks):
    masks.begin_step(0.1)
    assert masks.admits(sequence(1, 0.025))
    assert not masks.admits(sequence(2, 0.001))
    masks.begin_pause()
    masks.begin_step(99.0)
    assert not masks.admits(sequence(3, 0.0021)), "a pause counted as a step"
    masks.begin_step(199.0)
    assert not masks.admits(sequence(4, 0.13)), "a step without bound"


def test_sequence_that_is_left_out_takes_part_with_its_mask(masks):
    slow = sequence(1, 0.1, output=[7, 8])
    slow.constraint.consumed = 1
    assert not masks.admits(slow)
    masks.begin_step(0.001)
    assert not masks.admits(slow)
    assert found(slow) == "mask"
    assert slow.constraint.found == [[8]]
    assert masks.admits(slow)


def test_mask_after_an_unknown_token_is_not_begun(masks):
    slow = sequence(1, 0.1, unknown=1)
    assert not masks.admits(slow)
    assert slow.constraint.ahead is None
    assert masks.admits(sequence(2, 0.001, unknown=1))


def test_owner_of_many_slow_masks_does_not_delay_another(masks):
    many = [sequence(key, 0.1) for key in range(5)]
    other = sequence(9, 0.1, owner="other")
    assert not any(masks.admits(one) for one in [*many, other])
    assert found(other) == "mask"
    assert not any(one.constraint.ahead.done() for one in many)
    for one in many:
        found(one)


def test_owners_divide_the_budget_of_a_step(masks):
    """Also an owner whose sequences are the last in the batch has its masks in the step."""

    def admitted(owner, count, each_s=0.00011):
        return sum(masks.admits(sequence(key, each_s, owner=owner)) for key in range(count))

    assert admitted("many", 40) == 18  # alone: 2 ms
    masks.begin_step(0.001)
    assert admitted("many", 40) == 18
    assert admitted("other", 1) == 1
    masks.begin_step(0.002)
    assert admitted("many", 40) == 17  # all but what the other has needed
    assert admitted("other", 40) == 9  # half
    masks.begin_step(0.003)
    assert (admitted("many", 40), admitted("other", 40)) == (9, 9)


def test_owner_that_has_left_takes_no_part_of_the_budget(masks):
    assert masks.admits(sequence(1, 0.001, owner="other"))
    for now_s in (0.001, 0.002):
        masks.begin_step(now_s)
        admitted = sum(masks.admits(sequence(key, 0.0005)) for key in range(5))
    assert admitted == 4


def test_drafts_use_the_part_of_their_owner(masks):
    own, other = sequence(1, 0.00045), sequence(2, 0.00045, owner="other")
    assert [masks.admits(own), masks.admits(other)] == [True, True]
    masks.begin_step(0.001)
    assert [masks.admit_drafts(each, 9) for each in (own, other)] == [3, 3]  # as little as the other used
    masks.begin_step(0.002)
    assert [masks.admit_drafts(each, 9) for each in (own, other)] == [2, 2]


def test_sequence_with_the_lexer_of_one_that_is_left_out_does_not_wait_within_a_step(masks):
    slow, same = sequence(1, 0.1), sequence(2, 0.0)
    same.constraint.lexer = slow.constraint.lexer
    assert not masks.admits(slow)
    assert not masks.admits(same)
    found(slow), found(same)
    assert masks.admits(slow)
    assert masks.admits(same)


def test_mask_of_an_ended_sequence_is_not_found(masks):
    first, second = sequence(1, 0.1), sequence(2, 0.1)
    assert not masks.admits(first)
    assert not masks.admits(second)
    masks.forget(second)
    found(first)
    assert second.constraint.ahead.cancelled()
    third = sequence(3, 0.0)
    third.constraint.lexer = second.constraint.lexer
    masks.begin_step(0.0)
    assert masks.admits(third), "the lexer of an ended sequence is still taken"


def test_sequence_without_a_grammar_is_never_left_out(masks):
    for constraint in (None, Constraint()):
        assert masks.admits(SimpleNamespace(key=1, tokens=Tokens(), constraint=constraint))


@pytest.mark.parametrize("overlaps", [False, True])
def test_plain_sequence_goes_on_while_a_mask_is_found(monkeypatch, overlaps):
    """Its tokens arrive while the constrained one has none, which then ends as it would alone."""
    gate, find = threading.Event(), Constraint.find

    def gated(self, token_ids):
        gate.wait(WAIT_S)
        return find(self, token_ids)

    monkeypatch.setattr(Constraint, "find", gated)
    schema = schema_of(3)
    texts = []
    for slow_masks in (None, SlowMasks(share=0.0, least_budget_s=-1.0)):
        gate.clear()
        tested = Constrained(overlaps=overlaps, slow_masks=slow_masks)
        tested.submit(1, grammar=grammar_of(schema), temperature=1.0, seed=5)
        tested.submit(2, max_tokens=40, temperature=0.0)
        while 2 not in tested.ends:
            tested.turn()
        if slow_masks is not None:
            assert 1 not in tested.token_ids_of
            assert tested.engine.compiling == 1
            tested.turn()
            tested.turn()
            assert tested.engine.wait_s(tested.now_s) > 0, "the loop is busy while it waits for a mask"
        gate.set()
        tested.run()
        texts.append((tested.text(1), tested.text(2)))
        assert tested.everything_is_free()
    assert texts[0] == texts[1]


def test_sequence_that_leaves_while_its_mask_is_found_frees_all(monkeypatch):
    gate, find = threading.Event(), Constraint.find

    def gated(self, token_ids):
        gate.wait(WAIT_S)
        return find(self, token_ids)

    monkeypatch.setattr(Constraint, "find", gated)
    tested = Constrained(slow_masks=SlowMasks(share=0.0, least_budget_s=-1.0))
    for key in (1, 2):
        tested.submit(key, grammar=grammar_of(schema_of(key)))
    while not tested.engine._scheduler.held:
        tested.turn()
    for key in (1, 2):
        tested.engine.abort(key)
    assert tested.everything_is_free()
    gate.set()
    tested.submit(3, grammar=grammar_of(schema_of(3)))
    tested.run()
    assert tested.ends[3].error is None
