"""A sequence's constraint: the tokens that its grammar and the limit of its reasoning allow."""

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher

from fairlead.base.job import ReasoningLimit
from fairlead.language.structured import compiler as compilers
from fairlead.language.structured.compiler import LIMITS, GrammarRefused
from fairlead.language.structured.constraint import Constraint, _matched
from fairlead.language.structured.grammar import JsonAnswer, answer_grammar
from fairlead.language.structured.vocabulary import token_vocabulary
from language.structured.words import (
    END,
    SPECIAL,
    TOKENS,
    VOCABULARY,
    WIDTH,
    allowed,
    allowed_ids,
    compiler,
    constrained,
    few_states,
    id_of,
    lark,
)

MARK = (id_of("<"), id_of("/t"), id_of(">"))
BEGIN = MARK[:1]


def limit(most, *, begin=BEGIN, end=MARK, is_open=True):
    return ReasoningLimit(most, begin, end, is_open)


def consumed(constraint, *texts):
    for text in texts:
        constraint.consume([id_of(text)])
    return constraint


def test_any_tokens_that_spell_the_only_possible_text_are_allowed():
    constraint = constrained('start: "abc" "1"')
    assert allowed(constraint) == {b"a", b"ab", b"abc"}
    assert allowed(consumed(constraint, "ab")) == {b"c"}
    assert allowed(consumed(constraint, "c", "1")) == {b"<end>"}
    assert constraint.error is None


def test_special_tokens_and_ids_without_text_never_match_text():
    plain = {index for index, token in enumerate(TOKENS) if token} - set(SPECIAL)
    later_bytes = {id_of("é".encode()[1:])}  # no character begins with this byte
    assert TOKENS[SPECIAL[1]] in {TOKENS[index] for index in plain}
    assert allowed_ids(constrained("start: /(.|\\n)*/")) == plain - later_bytes | {END}


def test_characters_are_completed():
    constraint = constrained("start: /é+/")
    assert allowed(constraint) == {"é".encode(), "é".encode()[:1]}
    assert allowed(consumed(constraint, "é".encode()[:1])) == {"é".encode()[1:]}


def test_token_outside_the_grammar_is_an_error_and_nothing_is_allowed_after_it():
    constraint = consumed(constrained('start: "a"'), "b")
    assert constraint.error is not None
    assert "non-verbose" not in constraint.error
    assert allowed(constraint) == set()
    first = constraint.error
    consumed(constraint, "a")
    assert constraint.error == first
    assert constraint.consumed == 2


@pytest.mark.parametrize("token_id", [-1, WIDTH, 2**31 - 1])
def test_id_outside_the_vocabulary_is_an_error(token_id):
    constraint = constrained("start: /[a-z]*/")
    constraint.consume([token_id])
    assert constraint.error is not None
    assert allowed(constraint) == set()


def test_token_after_the_end_is_an_error():
    constraint = consumed(constrained('start: "a"'), "a", "<end>")
    assert allowed(constraint) == set()
    assert constraint.error is not None


def test_grammar_without_a_possible_token_allows_none():
    constraint = consumed(constrained('start: "a" "z"'), "a")
    assert allowed(constraint) == set()


def test_constraint_without_grammar_or_limit_is_free():
    constraint = Constraint()
    assert constraint.is_free
    assert allowed_ids(constraint) == set(range(WIDTH))


# The limit of the reasoning --------------------------------------------------------------------------


def test_end_of_the_reasoning_is_forced_after_its_limit():
    constraint = Constraint(limit=limit(2))
    assert constraint.is_free
    consumed(constraint, "a")
    assert constraint.is_free
    consumed(constraint, "b")
    for text in ("<", "/t", ">"):
        assert not constraint.is_free
        assert allowed(constraint) == {text.encode()}
        consumed(constraint, text)
    assert constraint.is_free


def test_limit_0_forces_the_end_at_once():
    constraint = Constraint(limit=limit(0))
    assert allowed(constraint) == {b"<"}


def test_end_that_has_begun_at_the_limit_is_completed():
    constraint = consumed(Constraint(limit=limit(2)), "a", "<")
    assert allowed(constraint) == {b"/t"}


def test_reasoning_that_ends_by_itself_is_not_forced():
    constraint = consumed(Constraint(limit=limit(4)), "a", "<", "/t", ">", "b", "b", "b", "b", "b")
    assert constraint.is_free


def test_limit_counts_from_the_mark_that_begins_the_reasoning():
    constraint = Constraint(limit=limit(1, begin=(id_of('"'), id_of("ab")), is_open=False))
    consumed(constraint, "a", "a", '"', "a", '"')
    assert constraint.is_free
    consumed(constraint, "ab")
    assert constraint.is_free
    consumed(constraint, "a")
    assert allowed(constraint) == {b"<"}


def test_limit_0_forces_the_end_after_the_mark_that_begins():
    constraint = consumed(Constraint(limit=limit(0, is_open=False)), "<")
    assert allowed(constraint) == {b"<"}


def test_only_the_first_reasoning_is_limited():
    constraint = Constraint(limit=limit(1, end=(id_of(">"),), is_open=False))
    consumed(constraint, "<", "a", ">", "<", "a", "a", "a")
    assert constraint.is_free


def test_grammar_goes_on_after_the_forced_end():
    constraint = constrained('start: thought "1"\nthought[suffix="</t>"]: /(.|\\n)*/', limit=limit(1))
    consumed(constraint, "a")
    for text in ("<", "/t", ">"):
        assert allowed(constraint) == {text.encode()}
        consumed(constraint, text)
    assert allowed(constraint) == {b"1"}
    consumed(constraint, "1")
    assert constraint.error is None


def test_end_is_not_forced_within_a_character():
    constraint = constrained('start: thought\nthought[suffix="</t>"]: /(.|\\n)*/', limit=limit(1))
    consumed(constraint, "é".encode()[:1])
    assert allowed(constraint) == {"é".encode()[1:]}
    consumed(constraint, "é".encode()[1:])
    assert allowed(constraint) == {b"<"}
    assert constraint.error is None


@given(
    mark=st.lists(st.integers(0, 2), min_size=1, max_size=4).map(tuple),
    text=st.lists(st.integers(0, 2), max_size=20),
)
def test_marks_with_repeated_ids_are_found_where_they_first_occur(mark, text):
    matched, found = 0, None
    for index, token_id in enumerate(text):
        matched = _matched(mark, matched, token_id)
        if matched == len(mark):
            found = index + 1 - len(mark)
            break
    places = [place for place in range(len(text)) if tuple(text[place : place + len(mark)]) == mark]
    assert found == (places[0] if places else None)


# The vocabulary --------------------------------------------------------------------------------------


def test_vocabulary_is_as_wide_as_the_logits():
    assert VOCABULARY.vocab_size == WIDTH
    narrow = token_vocabulary(
        lambda token_id: TOKENS[token_id], vocab_size=6, special_ids=(*SPECIAL, 50), eos_token_ids=[END, 99]
    )
    assert narrow.vocab_size == 6
    assert narrow.eos_tokens == [END]


def test_any_end_token_ends_an_answer():
    several = token_vocabulary(
        lambda token_id: TOKENS[token_id], vocab_size=8, special_ids=SPECIAL, eos_token_ids=[0, 1]
    )
    assert several.eos_tokens == [0, 1]


@pytest.mark.parametrize("width", [25, 31, 32, 64])
def test_without_an_end_token_an_answer_is_complete_when_nothing_can_follow(width):
    vocabulary = token_vocabulary(
        lambda token_id: TOKENS[token_id] if token_id < len(TOKENS) else b"",
        vocab_size=width,
        special_ids=SPECIAL,
        eos_token_ids=[width, -1],
    )
    constraint = Constraint()
    grammar = LLMatcher(vocabulary, lark('start: "a" "b"*'), log_level=0, limits=LIMITS)
    bounded = LLMatcher(vocabulary, lark('start: "ab"'), log_level=0, limits=LIMITS)
    constraint.begin(grammar, None, None, missing_end=width)
    assert allowed_ids(constraint, width) == {id_of("a"), id_of("ab")}
    assert allowed_ids(consumed(constraint, "a"), width) == {id_of("b")}
    assert not constraint.is_complete
    constraint.begin(bounded, None, None, missing_end=width)
    assert allowed_ids(consumed(constraint, "ab"), width) == set()
    assert (constraint.is_complete, constraint.error) == (True, None)
    constraint.consume([-1])  # of a step that was launched before the end was known
    assert (allowed_ids(constraint, width), constraint.error) == (set(), None)


def long_text(length):
    return answer_grammar(JsonAnswer({"type": "string", "maxLength": length}))


def walk(constraint, tokens):
    """Write "ab" again and again within a string; return how many tokens were possible."""
    constraint.consume([id_of('"')])
    for count in range(tokens):
        if not allowed_ids(constraint) or constraint.error is not None:
            return count
        constraint.consume([id_of("ab")])
    return tokens


def begun(grammar, *, renew=True):
    made = compiler()
    tested = Constraint(grammar=grammar)
    renewals = []

    def renewed():
        renewals.append(len(renewals))
        if not renew:
            raise GrammarRefused("no")
        return made.renew(grammar)

    tested.begin(made.renew(grammar), "lexer", renewed)
    return tested, renewals


def test_answer_with_a_long_text_goes_on_beyond_the_states_of_one_lexer(monkeypatch):
    monkeypatch.setattr(compilers, "LIMITS", few_states(1000))
    tested, renewals = begun(long_text(800))
    assert walk(tested, 390) == 390
    assert tested.error is None
    assert renewals, "the states were enough: the test tests nothing"
    assert tested.lexer is None, "its lexer is its own now"
    tested.consume([id_of('"')])
    assert allowed(tested) == {b"<end>"}


def test_answer_ends_if_its_own_text_has_too_many_states(monkeypatch):
    monkeypatch.setattr(compilers, "LIMITS", few_states(300))
    tested, renewals = begun(long_text(800))
    assert 100 < walk(tested, 390) < 390
    assert "too many states" in tested.error
    assert len(renewals) < 20


def test_answer_ends_if_its_grammar_cannot_be_compiled_again(monkeypatch):
    monkeypatch.setattr(compilers, "LIMITS", few_states(1000))
    tested, renewals = begun(long_text(800), renew=False)
    assert walk(tested, 390) < 390
    assert tested.error is not None
    assert renewals == [0]


def test_answers_of_one_grammar_do_not_fail_because_they_share_a_lexer(monkeypatch):
    monkeypatch.setattr(compilers, "LIMITS", few_states(1500))
    made, grammar = compiler(), long_text(600)
    shared = made.renew(grammar)
    for text in ("ab", "a", "é", "abc"):
        tested = Constraint(grammar=grammar)
        tested.begin(shared.deep_copy(), "lexer", partial(made.renew, grammar))
        tested.consume([id_of('"')])
        for _ in range(190):
            assert allowed_ids(tested)
            tested.consume([id_of(text)])
        assert tested.error is None
