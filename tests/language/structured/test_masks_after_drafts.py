"""The masks after drafts are those of a constraint that consumes the same tokens one by one."""

import random

import numpy as np
import pytest
from llguidance import LLMatcher

from fairlead.base.job import ReasoningLimit
from fairlead.language.structured.closing import Closing, byte_ids
from fairlead.language.structured.constraint import Constraint
from fairlead.language.structured.grammar import JsonAnswer, LarkAnswer, answer_grammar
from language.structured.rendering import vocabulary
from language.structured.schemas import schema_of

MADE = vocabulary("hermes")
BYTES = byte_ids(MADE.matching)
WORDS = (MADE.library.get_vocab_size() + 3 + 31) // 32
QUOTE = BYTES[ord('"')]
LINES = answer_grammar(LarkAnswer('start: (/[a-c]{1,6}/ ", "){20,30}'))


def constraint_of(seed):
    """Return a new constraint of a seed, and how many tokens its answer has at most."""
    chance = random.Random(seed)
    grammar = LINES if seed % 4 == 0 else answer_grammar(JsonAnswer(schema_of(seed)))
    limit = ReasoningLimit(chance.randint(0, 6), (), (QUOTE,), is_open=True) if seed % 3 == 0 else None
    made = Constraint(None if seed % 9 == 0 else LLMatcher(MADE.matching, grammar), limit)
    most = chance.randint(5, 60)
    if seed % 2:
        made.closing = Closing(most, BYTES)
    return made, most


def walk(seed):
    """Return a random answer, and the mask before each of its tokens, found one by one."""
    constraint, most = constraint_of(seed)
    chance, tokens, masks = random.Random(seed), [], []
    while len(tokens) < most:
        masks.append(np.zeros(WORDS, np.uint32))
        constraint.consume(tokens[-1:])
        constraint.fill(masks[-1])
        allowed = np.flatnonzero(np.unpackbits(masks[-1].view(np.uint8), bitorder="little")).tolist()
        tokens.append(chance.choice(allowed))
        if tokens[-1] == MADE.end:
            break
    return tokens, masks


def drafts_for(chance, tokens):
    """Return drafts, right ones and then perhaps others."""
    drafts = list(tokens[: chance.randint(0, 6)])
    for place in range(len(drafts)):
        if chance.random() < 0.2:
            drafts[place] = chance.randrange(MADE.library.get_vocab_size())
    return drafts


def compare(seed):
    """Check the masks of one answer; return how many drafts were right, and how many were not."""
    tokens, expected = walk(seed)
    constraint, _ = constraint_of(seed)
    chance, at, new, right, wrong = random.Random(seed), 0, [], 0, 0
    while at < len(tokens):
        drafts = drafts_for(chance, tokens[at:])
        masks = np.full((1 + len(drafts), WORDS), 0xDEAD_BEEF, np.uint32)
        constraint.consume(new)
        constraint.fill(masks[0])
        constraint.fill_after(drafts, masks[1:])
        got = 1
        while got <= len(drafts) and drafts[got - 1] == tokens[at + got - 1]:
            got += 1
        for place in range(got):
            if at + place < len(tokens):
                assert (masks[place] == expected[at + place]).all(), (seed, at, place)
        new = tokens[at : at + got]
        right, wrong = right + got - 1, wrong + len(drafts) - got + 1
        at += got
        assert constraint.error is None
    return right, wrong


def compare_all(seeds):
    return [compare(seed) for seed in seeds]


def test_masks_after_drafts_are_those_without_them():
    counts = compare_all(range(40))
    assert all(sum(column) > 50 for column in zip(*counts, strict=True))


@pytest.mark.parametrize("drafts", [[QUOTE, QUOTE], [BYTES[ord("a")], BYTES[ord("b")]]])
def test_no_token_may_follow_a_draft_that_may_not_come(drafts):
    constraint = Constraint(LLMatcher(MADE.matching, answer_grammar(LarkAnswer('start: "b"+'))))
    constraint.consume([BYTES[ord("b")]])
    masks = np.full((3, WORDS), 7, np.uint32)
    constraint.fill(masks[0])
    constraint.fill_after(drafts, masks[1:])
    assert masks[0].any()
    assert not masks[1:].any()
    constraint.consume([BYTES[ord("b")]])
    assert constraint.error is None


def test_masks_after_drafts_are_given_up_when_they_take_long(monkeypatch):
    monkeypatch.setattr("fairlead.language.structured.constraint.SLOW_MASK_S", 0.0)
    constraint = Constraint(LLMatcher(MADE.matching, LINES))
    masks = np.full((2, WORDS), 7, np.uint32)
    constraint.fill(masks[0])
    constraint.fill_after([BYTES[ord("a")]], masks[1:])
    assert not masks[1].any()
    constraint.consume([BYTES[ord("a")], BYTES[ord("b")]])
    constraint.fill(masks[0])
    assert masks[0].any()


# Constraints with one defect each -------------------------------------------------------------------


def goes_on_after_all_drafts(self, token_ids):
    if self._after_drafts:
        self.matcher, self.consumed = self._after_drafts[-1].matcher, self._after_drafts[-1].consumed
    self._drafts, self._after_drafts = [], []
    return token_ids[-1:]


def forgets_right_drafts(self, token_ids):
    self._drafts, self._after_drafts = [], []
    self.consumed += len(token_ids) - 1
    return token_ids[-1:]


def forgets_what_the_closing_found(self, token_ids):
    closing, self.closing = self.closing, None
    rest = take_drafts(self, token_ids)
    self.closing = closing
    return rest


def allows_all_after_drafts(self, drafts, masks):
    for mask in masks:
        mask[:] = 0xFFFF_FFFF


def shares_the_reasoning(self, draft):
    other = copy_after(self, draft)
    if other is not None and self._reasoning is not None:
        other._reasoning = self._reasoning
        other._reasoning.consume(draft)
    return other


def shares_the_closing(self, draft):
    other = copy_after(self, draft)
    if other is not None:
        other.closing = self.closing
    return other


take_drafts, copy_after = Constraint._take_drafts, Constraint.copy_after
MUTANTS = [
    ("_take_drafts", goes_on_after_all_drafts),
    ("_take_drafts", forgets_right_drafts),
    ("_take_drafts", forgets_what_the_closing_found),
    ("fill_after", allows_all_after_drafts),
    ("copy_after", shares_the_reasoning),
    ("copy_after", shares_the_closing),
]


@pytest.mark.parametrize(("name", "mutant"), MUTANTS, ids=[mutant.__name__ for _, mutant in MUTANTS])
def test_comparison_detects_a_constraint_that(monkeypatch, name, mutant):
    monkeypatch.setattr(Constraint, name, mutant)
    with pytest.raises(AssertionError):
        compare_all([*range(1, 200, 2), *range(0, 200, 2)])  # the odd ones close their answers
