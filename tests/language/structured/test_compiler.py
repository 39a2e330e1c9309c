"""The compiler of grammars: what it keeps, for which owner, and what becomes of sequences that wait."""

import os
import random
import threading
import time

import pytest

from fairlead.language.structured import compiler as compilers
from fairlead.language.structured import turn_pool
from fairlead.language.structured.compiler import compile_grammar
from fairlead.language.structured.constraint import Constraint
from fairlead.language.structured.grammar import (
    MAX_RULES,
    ChoiceAnswer,
    JsonAnswer,
    RegexAnswer,
    answer_grammar,
)
from fairlead.language.structured.schema import MAX_REFERENCES, SchemaFault, check_schema
from fairlead.language.structured.vocabulary import token_vocabulary
from language.structured.trying import grammar_fault
from language.structured.words import allowed, compiler, id_of, lark

A, B, BROKEN = (lark(f'start: "{text}"') for text in ("a", "b", "zz"))


@pytest.fixture
def tested(monkeypatch):
    """A compiler that compiles while `gate` is set."""
    gate, compiled = threading.Event(), compilers.compile_grammar
    names, begun = [], []

    def gated(vocabulary, grammar):
        begun.append(grammar)
        gate.wait(20)
        names.append(grammar)
        return compiled(vocabulary, grammar)

    monkeypatch.setattr(compilers, "compile_grammar", gated)
    made = compiler(threads=1)
    made.gate, made.compiled, made.begun = gate, names, begun
    gate.set()
    yield made
    gate.set()
    made.close()


def ready(tested, count=1):
    """Wait for `count` sequences; return their results by key."""
    tested.gate.set()
    found = {}
    for _ in range(4000):
        found.update(tested.take_ready())
        if len(found) >= count:
            return found
        time.sleep(0.005)
    raise AssertionError(f"only {found} are ready")


def first_tokens(matcher):
    return allowed(Constraint(matcher))


def test_grammar_is_compiled_once_and_copied_for_each_sequence(tested):
    tested.gate.clear()
    assert [tested.submit(key, A) for key in (1, 2, 3)] == [None] * 3
    assert tested.take_ready() == []
    assert tested.waiting == 3
    found = ready(tested, 3)
    assert sorted(found) == [1, 2, 3]
    assert tested.waiting == 0
    found[1].consume_tokens([id_of("a")])
    assert [first_tokens(found[key]) for key in (1, 2)] == [{b"<end>"}, {b"a"}]
    assert first_tokens(tested.submit(4, A)) == {b"a"}
    assert tested.compiled == [A]


def test_grammar_is_kept_by_content_and_owner(tested):
    tested.submit(1, A, b"one")
    ready(tested)
    assert tested.submit(2, A, b"one") is not None
    assert tested.submit(3, A, b"two") is None
    assert tested.submit(4, B, b"one") is None
    assert sorted(ready(tested, 2)) == [3, 4]
    assert tested.compiled == [A, A, B]


def test_refused_grammar_fails_only_the_sequences_that_wait_for_it(tested):
    tested.gate.clear()
    for key, grammar in enumerate((A, BROKEN, B, BROKEN)):
        tested.submit(key, grammar)
    found = ready(tested, 4)
    assert [isinstance(found[key], str) for key in range(4)] == [False, True, False, True]
    assert "non-verbose" not in found[1]
    assert tested.submit(9, BROKEN) is None, "a refused grammar was kept"
    assert isinstance(ready(tested)[9], str)


def test_exception_of_the_library_fails_only_its_sequence(tested, monkeypatch):
    def broken(vocabulary, grammar):
        raise BaseException("a panic")  # noqa: TRY002  as pyo3's

    usual = compilers.compile_grammar
    monkeypatch.setattr(compilers, "compile_grammar", broken)
    tested.submit(1, A)
    assert ready(tested) == {1: "a panic"}
    monkeypatch.setattr(compilers, "compile_grammar", usual)
    tested.submit(2, A)
    assert first_tokens(ready(tested)[2]) == {b"a"}


def test_cancelled_sequence_is_never_ready_and_others_are(tested):
    tested.gate.clear()
    for key, grammar in enumerate((A, A, B)):
        tested.submit(key, grammar)
    tested.cancel(0)
    tested.cancel(2)
    tested.cancel(77)
    assert list(ready(tested)) == [1]
    assert tested.waiting == 0
    assert tested.take_ready() == []


def test_grammar_for_which_no_sequence_waits_any_more_is_not_compiled(tested):
    tested.gate.clear()
    tested.submit(1, A)  # occupies the thread
    for key in range(2, 50):
        tested.submit(key, lark(f'start: "{"b" * key}"'))
    tested.submit(50, B)
    for key in range(2, 50):
        tested.cancel(key)
    assert sorted(ready(tested, 2)) == [1, 50]
    assert tested.compiled == [A, B]
    assert tested._compiling == {}


def test_cancelled_grammar_that_was_begun_is_kept(tested):
    tested.gate.clear()
    tested.submit(1, A)
    while not next(iter(tested._compiling.values()))[0].running():
        time.sleep(0.001)
    tested.cancel(1)
    tested.gate.set()
    while tested._compiling:
        assert tested.take_ready() == []
        time.sleep(0.001)
    assert tested.submit(2, A) is not None


def test_grammar_that_failed_in_use_is_compiled_again(tested):
    for owner in (b"one", b"two"):
        tested.submit(1, A, owner)
        ready(tested)
    tested.discard(A)
    tested.discard(B)
    assert tested.submit(2, A, b"one") is None
    ready(tested)
    assert tested.compiled == [A, A, A]


def test_number_and_bytes_of_kept_grammars_are_bounded(tested, monkeypatch):
    monkeypatch.setattr(compilers, "MOST_KEPT", 3)
    grammars = [lark(f'start: "{"a" * length}"') for length in range(1, 6)]
    for grammar in grammars:
        tested.submit(1, grammar)
        ready(tested)
        if grammar is not grammars[-1]:
            assert tested.submit(2, grammars[0]) is not None, "the most recently used one was evicted"
    assert [name[1] for name in tested._kept] == [grammars[3], grammars[0], grammars[4]]
    monkeypatch.setattr(compilers, "KEPT_BYTES", compilers.BYTES_OF_TEXT * len(grammars[-1]) + 10)
    tested.submit(1, B)
    assert first_tokens(ready(tested)[1]) == {b"b"}
    sizes = [kept.size_bytes for kept in tested._kept.values()]
    assert tested._kept_bytes == sum(sizes) <= compilers.KEPT_BYTES


def test_grammar_counts_for_the_memory_that_its_trial_has_measured(tested, monkeypatch):
    monkeypatch.setattr(compilers, "KEPT_BYTES", 40 << 20)
    for key, grammar in enumerate((A, B)):
        assert tested.submit(key, grammar, None, 30 << 20) is None
        ready(tested)
    assert [(name[1], kept.size_bytes) for name, kept in tested._kept.items()] == [(B, 30 << 20)]
    assert tested._kept_bytes == 30 << 20


def test_grammar_larger_than_the_bound_serves_its_sequences_and_is_not_kept(tested, monkeypatch):
    monkeypatch.setattr(compilers, "KEPT_BYTES", 10)
    tested.submit(1, A)
    assert first_tokens(ready(tested)[1]) == {b"a"}
    assert (tested._kept, tested._kept_bytes) == ({}, 0)


def test_grammar_counts_for_more_the_more_it_is_used(tested, monkeypatch):
    for grammar in (A, B):
        tested.submit(1, grammar)
        ready(tested)
    before = tested._kept_bytes
    tested.count_use(A, None, 1000)
    assert tested._kept_bytes == before + 1000 * compilers.BYTES_A_TOKEN
    for _ in range(20):
        tested.count_use(A, None, 1000)
    assert tested._kept_bytes == before + compilers.MOST_GROWTH, "a lexer grows to its bound"
    tested.count_use(A, b"another owner", 1000)
    monkeypatch.setattr(compilers, "KEPT_BYTES", before)
    tested.count_use(B, None, 1)
    assert [name[1] for name in tested._kept] == [B]
    tested.discard(B)
    assert (tested._kept, tested._kept_bytes) == ({}, 0)


def test_owners_take_turns_and_none_has_more_than_one_thread(tested):
    two = compiler(threads=2)
    tested.gate.clear()
    grammars = [lark(f'start: "{"a" * length}"') for length in range(2, 8)]
    for key, grammar in enumerate(grammars):
        two.submit(key, grammar, b"many")
    two.submit(10, A, b"few")
    two.submit(11, B, b"few")
    while len(tested.begun) < 2:
        time.sleep(0.001)
    assert tested.begun == [grammars[0], A]
    tested.gate.set()
    two.gate = tested.gate
    assert len(ready(two, 8)) == 8
    two.close()


def test_threads_step_back_for_those_of_steps(tested, monkeypatch):
    priorities, usual = [], compilers.compile_grammar

    def noting(vocabulary, grammar):
        priorities.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return usual(vocabulary, grammar)

    monkeypatch.setattr(compilers, "compile_grammar", noting)
    tested.submit(1, A)
    ready(tested)
    assert priorities == [turn_pool.NICENESS]


def deep(levels):
    schema = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def branches(count):
    return [{"type": "object", "properties": {f"k{index}": {"type": "integer"}}} for index in range(count)]


HOSTILE = {
    "repetition of a repetition": RegexAnswer("(a+)+b"),
    "exponential automaton": RegexAnswer("[ab]*a[ab]{200}"),
    "long repetition": RegexAnswer("((a{100}){100}){100}"),
    "branches": JsonAnswer({"anyOf": branches(2000)}),
    "patterns": JsonAnswer({"anyOf": [{"type": "string", "pattern": f"^x{i}.*$"} for i in range(500)]}),
    "deep": JsonAnswer(deep(64)),
    "optional properties": JsonAnswer(
        {"type": "object", "properties": {f"k{index}": {"type": "string"} for index in range(1500)}}
    ),
    "choices": ChoiceAnswer([f"choice {index}" for index in range(3000)]),
    "product of intersections": JsonAnswer({"allOf": [{"anyOf": branches(6)}] * 8}),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_grammar_is_refused_or_compiled_within_bounds(tested, name):
    grammar = answer_grammar(HOSTILE[name])
    fault = grammar_fault(grammar)
    began_s = time.process_time()
    tested.submit(1, grammar)
    result = ready(tested)[1]
    assert time.process_time() - began_s < 10
    assert fault is not None or not isinstance(result, str), "accepted, and refused when its sequence came"
    if isinstance(result, str):
        assert 0 < len(result.splitlines()[0]) < 500


def test_schema_that_is_deeper_than_any_that_is_checked_has_no_grammar():
    with pytest.raises(ValueError, match="too deeply"):
        answer_grammar(JsonAnswer(deep(3000)))


def test_fault_names_the_reason_without_a_vocabulary():
    assert grammar_fault(A) is None
    assert "unknown name" in grammar_fault(lark("start: missing"))
    assert "non-verbose" not in grammar_fault("nonsense")


def chain(length):
    definitions = {
        f"d{index}": {"type": "object", "properties": {"x": {"$ref": f"#/$defs/d{index + 1}"}}}
        for index in range(length - 1)
    }
    definitions[f"d{length - 1}"] = {"type": "integer"}
    return {"$defs": definitions, "$ref": "#/$defs/d0"}


def rules(length):
    chained = "".join(f'r{index}: r{index + 1} "x"\n' for index in range(length - 2))
    return f'start: r0\n{chained}r{length - 2}: "a"\n'


def test_longest_accepted_chains_do_not_overflow_the_stack(tested):
    check_schema(chain(MAX_REFERENCES))
    for grammar in (answer_grammar(JsonAnswer(chain(MAX_REFERENCES))), lark(rules(MAX_RULES))):
        assert grammar_fault(grammar) is None
        tested.submit(1, grammar)
        ready(tested)


def test_longer_chains_and_deeper_schemas_are_refused():
    with pytest.raises(SchemaFault, match="more than 500"):
        check_schema(chain(MAX_REFERENCES + 1))
    with pytest.raises(ValueError, match="more than 1000 rules"):
        lark(rules(MAX_RULES + 1))
    with pytest.raises(SchemaFault, match="nested deeper"):
        check_schema(deep(10_000))


def test_many_texts_of_tokens_leave_a_pattern_with_words_enough_states():
    draw = random.Random(1)
    texts = sorted({"".join(draw.choices("abé ", k=draw.randint(2, 14))).encode() for _ in range(3000)})
    tokens = [bytes([byte]) for byte in range(256)] + texts
    vocabulary = token_vocabulary(
        lambda token_id: tokens[token_id] if token_id < len(tokens) else b"",
        vocab_size=len(tokens) + 1,
        special_ids=(),
        eos_token_ids=[len(tokens)],
    )
    words = JsonAnswer({"type": "string", "pattern": r"^(\w+\s?){55}$", "maxLength": 1769})
    compiled, _ = compile_grammar(vocabulary, answer_grammar(words))
    for byte in b'"' + b"ab " * 20:
        compiled.consume_token(byte)
        compiled.compute_bitmask()
        assert not compiled.is_error(), compiled.get_error()
