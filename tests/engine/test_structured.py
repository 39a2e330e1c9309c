"""Constrained sequences in an engine with the demonstration model: each answer matches its grammar."""

import json
import threading
import time

import jsonschema
import numpy as np
import pytest

from engine.constrained_model import Constrained, grammar_of, prompt_of, tokenizer, validated
from engine.fake_model import EOS, VOCABULARY, FakeRunner
from engine.fake_model import Loop as FakeLoop
from engine.test_engine_machine import BlindPredictor
from fairlead.base.job import ReasoningLimit, Sampling
from fairlead.base.messages import Output, Speculation
from fairlead.engine.engine import Engine
from fairlead.engine.sequence import SequenceStatus
from fairlead.language.structured import compiler as compilers
from fairlead.language.structured.grammar import ChoiceAnswer, LarkAnswer, RegexAnswer, answer_grammar
from language.structured.schemas import schema_of
from language.structured.words import few_states

LONG_PROMPT = "Tell me about queues, seats, slots and blocks, in all detail. " * 8
YES_OR_NO = answer_grammar(ChoiceAnswer(["yes", "no"]))
DIGITS = answer_grammar(RegexAnswer("[0-9]{30}"))
SHORT = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 12}}, "required": ["a"]}
SHORT["additionalProperties"] = False
# Fewer blocks than the sequences need; prompts in chunks; steps that overlap.
SCARCE = {"blocks_total": [24], "predictor": BlindPredictor()}
SETTINGS = {
    "plain": {},
    "preemption": SCARCE,
    "chunks": {"max_batched_tokens": 24},
    "overlap": {"overlaps": True},
    "all": {**SCARCE, "max_batched_tokens": 24, "overlaps": True},
    "slow masks": {"slow": True},
    "drafts": {"speculation": Speculation(ngram=1, drafts=5)},
    "drafts and preemption": {"speculation": Speculation(ngram=1, drafts=5), **SCARCE},
    "drafts and slow masks": {"speculation": Speculation(ngram=1, drafts=5), "slow": True},
    "slow masks and all": {**SCARCE, "max_batched_tokens": 24, "overlaps": True, "slow": True},
}


def mixed(tested):
    """Submit sequences with and without constraints; return the schemas of those that have one."""
    schemas = {}
    for key in range(20):
        text = f"{key % 5} {LONG_PROMPT}" if key % 3 else "What is a ticket?"
        if key % 4 == 0:
            tested.submit(key, text, max_tokens=60)
        elif key % 4 == 1:
            tested.submit(key, text, grammar=YES_OR_NO, temperature=1.5)
        elif key % 4 == 2:
            tested.submit(key, text, grammar=DIGITS, top_p=0.9, presence_penalty=0.5)
        else:
            schemas[key] = schema_of(key)
            tested.submit(key, text, grammar=grammar_of(schemas[key]), temperature=key % 2)
    return schemas


@pytest.fixture(scope="module")
def expected():
    """The texts of `mixed`, each sequence alone."""
    texts = {}
    for key in range(20):
        alone = Constrained(max_batch=1)
        schemas = mixed(alone)
        for other in set(range(20)) - {key}:
            alone.engine.abort(other)
        texts[key] = alone.run().text(key)
        if key in schemas:
            jsonschema.Draft202012Validator(schemas[key]).validate(json.loads(texts[key]))
    assert {texts[key] for key in range(1, 20, 4)} <= {"yes", "no"}
    assert all(texts[key].isdigit() and len(texts[key]) == 30 for key in range(2, 20, 4))
    return texts


@pytest.mark.parametrize("setting", SETTINGS)
def test_answers_of_mixed_constraints_equal_those_alone(expected, setting):
    tested = Constrained(**SETTINGS[setting])
    mixed(tested)
    tested.run()
    assert {key: tested.text(key) for key in range(20)} == expected
    assert (tested.engine.statistics().preemptions > 0) == ("blocks_total" in SETTINGS[setting])
    assert tested.everything_is_free()


def test_answer_after_a_reused_prefix_is_the_same():
    tested = Constrained()
    for key in range(3):
        tested.submit(key, LONG_PROMPT, grammar=DIGITS, seed=7)
        while key not in tested.ends:
            tested.turn()
    assert tested.engine.statistics().prefix_hits > 0
    assert len({tested.text(key) for key in range(3)}) == 1


def test_seed_reproduces_an_answer_and_another_seed_changes_it():
    tested = Constrained()
    for key, seed in enumerate((5, 5, 6)):
        tested.submit(key, grammar=grammar_of(SHORT), seed=seed)
    tested.run()
    assert tested.text(0) == tested.text(1) != tested.text(2)


def test_log_probabilities_are_those_of_the_unconstrained_model():
    tested = Constrained()
    tested.submit(1, "What is Fairlead?", max_tokens=1, temperature=0, logprobs=3)
    tested.submit(2, "What is Fairlead?", max_tokens=1, temperature=0, logprobs=3, grammar=DIGITS)
    tested.run()
    free, constrained = (tested.ends[key].logprobs[0] for key in (1, 2))
    assert constrained.top == free.top
    assert tested.text(2).isdigit()
    assert constrained.logprob < free.logprob


def test_constraint_holds_against_biases():
    """A bias cannot allow a forbidden token, and makes an allowed one likelier."""
    yes, no = (tokenizer().encode(word, add_special_tokens=False)[0] for word in ("yes", "no"))
    forbidden = tokenizer().encode("{", add_special_tokens=False)[0]
    tested = Constrained()
    for key in range(4):
        tested.submit(key, grammar=YES_OR_NO, logit_bias={forbidden: 100.0, yes if key % 2 else no: 90.0})
    tested.run()
    assert [tested.text(key) for key in range(4)] == ["no", "yes"] * 2


@pytest.mark.parametrize("overlaps", [False, True])
def test_sequence_without_a_possible_token_fails_alone(overlaps):
    grammar = answer_grammar(LarkAnswer('start: "[" NEVER\nNEVER: /x/ & /y/'))
    tested = Constrained(overlaps=overlaps)
    tested.submit(1, grammar=DIGITS)
    tested.submit(2, grammar=grammar)
    tested.submit(3, grammar=DIGITS, min_tokens=100, ignore_eos=False)
    tested.submit(4, max_tokens=20)
    tested.run()
    assert (tested.ends[1].error, tested.ends[4].error) == (None, None)
    assert tested.text(1).isdigit()
    assert "grammar" in tested.ends[2].error
    assert "no token is left" in tested.ends[3].error
    assert tested.everything_is_free()


def test_grammar_that_is_refused_fails_only_its_sequence():
    tested = Constrained()
    tested.submit(1, grammar=DIGITS)
    tested.submit(2, grammar="nonsense")
    tested.run()
    assert tested.ends[1].finish_reason == "stop"
    assert "the grammar is refused" in tested.ends[2].error
    assert tested.everything_is_free()


def test_slow_grammar_mask_fails_only_its_sequence(monkeypatch):
    tested = Constrained()
    tested.submit(1, grammar=DIGITS)
    tested.submit(2, grammar=YES_OR_NO)
    tested.submit(3, max_tokens=40)
    constraint = tested.engine._live.by_key[2].tokens.sampling.constraint
    release = threading.Event()

    def slow(mask):
        while not release.is_set():
            np.sum(np.ones(1000))

    monkeypatch.setattr(constraint, "fill", slow)
    tested.run()
    release.set()
    assert (tested.ends[1].finish_reason, tested.ends[3].error) == ("stop", None)
    assert "took longer" in tested.ends[2].error
    assert tested.everything_is_free()
    assert (b"", YES_OR_NO) not in tested.compiler._kept, "it is compiled again"


def test_reasoning_ends_at_its_limit():
    end = tuple(tokenizer().encode("</think>", add_special_tokens=False))
    assert len(end) > 1
    grammar = answer_grammar(LarkAnswer('start: thought /[0-9]{5}/\nthought[suffix="</think>"]: /(.|\\n)*/'))
    limits = {key: ReasoningLimit(key, (), end, is_open=True) for key in (0, 1, 9, 30)}
    tested = Constrained()
    for key, limit in limits.items():
        tested.submit(key, grammar=grammar, reasoning_limit=limit)
        tested.submit(100 + key, reasoning_limit=limit, ignore_eos=True, max_tokens=60)
    tested.run()
    for key in limits:
        thought, answer = tested.text(key).split("</think>")
        assert (len(answer), answer.isdigit()) == (5, True)
        token_ids = tested.token_ids_of[key]
        places = [
            place for place in range(len(token_ids)) if tuple(token_ids[place : place + len(end)]) == end
        ]
        assert places[0] <= key + 8, thought  # characters are completed
        free = tested.token_ids_of[100 + key]
        assert any(tuple(free[place : place + len(end)]) == end for place in range(key + 1))


# While a grammar is compiled -------------------------------------------------------------------------


@pytest.fixture
def gate(monkeypatch):
    """Grammars are compiled once this is set."""
    opened, compiled = threading.Event(), compilers.compile_grammar

    def gated(vocabulary, grammar):
        opened.wait(20)
        return compiled(vocabulary, grammar)

    monkeypatch.setattr(compilers, "compile_grammar", gated)
    yield opened
    opened.set()


def test_sequence_waits_for_its_grammar_without_a_slot_while_others_run(gate):
    tested = Constrained(slots=2, max_batch=2)
    tested.submit(1, grammar=DIGITS)
    tested.submit(2, max_tokens=10)
    tested.submit(3, max_tokens=10)
    sequence = tested.engine._live.by_key[1]
    while not {2, 3} <= tested.ends.keys():
        tested.turn()
    tested.turn()
    assert sequence.state is SequenceStatus.COMPILING
    counts = tested.engine.statistics()
    assert (counts.running, counts.pending, counts.slots_free) == (0, 1, 2)
    assert 0 < tested.engine.wait_s(tested.now_s) < 0.01
    assert not tested.engine.idle
    gate.set()
    assert tested.run().text(1).isdigit()
    assert tested.everything_is_free()


def test_cancelled_and_timed_out_sequences_that_wait_for_a_grammar_leave_nothing(gate):
    tested = Constrained()
    for key in range(4):
        tested.submit(key, grammar=DIGITS, timeout_s=0.05)
    for key in range(4, 8):
        tested.submit(key, grammar=YES_OR_NO)
        tested.engine.abort(key)
    for _ in range(20):
        tested.turn()
    assert {key: end.code for key, end in tested.ends.items()} == dict.fromkeys(range(4), "request_timeout")
    assert tested.engine.idle
    assert tested.everything_is_free()
    gate.set()
    time.sleep(0.01)
    tested.submit(9, grammar=DIGITS)
    assert tested.run().text(9).isdigit()
    assert sorted(tested.ends) == [0, 1, 2, 3, 9]


def test_sequences_that_wait_for_one_grammar_start_together(gate):
    tested = Constrained()
    for key in range(6):
        tested.submit(key, grammar=DIGITS, salt=b"tenant")
    assert tested.compiler.waiting == 6
    gate.set()
    tested.run()
    assert all(tested.text(key).isdigit() for key in range(6))
    assert list(tested.compiler._kept) == [(b"tenant", DIGITS)]


def test_engine_without_a_compiler_refuses_grammars():
    runner = FakeRunner(4)
    engine = Engine(
        runner,
        slots=1,
        max_batch=1,
        max_batched_tokens=8,
        max_model_len=20,
        blocks_total=9,
        block_size=4,
        vocab_size=VOCABULARY,
        eos_token_ids=[EOS],
        draw_seed=lambda: 1,
    )
    engine.submit(1, [1], Sampling(max_tokens=3, grammar=YES_OR_NO))
    tested = FakeLoop(engine, runner).run()
    assert tested.ends == {1: Output(1, [], error="this model cannot be constrained by a grammar")}


# Generated schemas -----------------------------------------------------------------------------------


@pytest.mark.parametrize("setting", ["plain", "all"])
def test_answers_are_valid_for_generated_schemas(setting):
    whole, _, _ = validated(range(20), **SETTINGS[setting])
    assert whole >= 18


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("setting", SETTINGS)
def test_answers_are_valid_for_1000_generated_schemas(setting):
    whole, tested, _ = validated(range(1000), sequences=32, **SETTINGS[setting])
    assert whole >= 900  # the others reached their length limit
    assert (tested.engine.statistics().preemptions > 0) == ("blocks_total" in SETTINGS[setting])


# Prepared grammars, and those that fail ----------------------------------------------------------------


def test_prepared_grammar_is_compiled_without_a_sequence_and_used_at_once(gate):
    tested = Constrained()
    tested.engine.prepare(1, DIGITS, salt=b"tenant")
    tested.turn()
    assert (tested.engine.compiling, tested.engine.idle, tested.ends) == (1, False, {})
    gate.set()
    tested.run()
    assert tested.ends == {1: Output(1, [], finish_reason="stop")}
    assert tested.everything_is_free()
    tested.submit(2, grammar=DIGITS, salt=b"tenant")
    assert tested.engine._live.by_key[2].state is SequenceStatus.PENDING
    tested.engine.prepare(3, DIGITS, salt=b"tenant")
    tested.run()
    assert tested.ends[3].finish_reason == "stop"


def test_preparation_of_a_refused_grammar_has_its_error():
    tested = Constrained()
    tested.engine.prepare(1, answer_grammar(LarkAnswer("start: missing")))
    tested.run()
    assert tested.ends[1].code == "grammar_failed"
    assert "unknown name" in tested.ends[1].error
    assert tested.everything_is_free()


def test_preparation_that_is_aborted_leaves_nothing(gate):
    tested = Constrained()
    tested.engine.prepare(1, DIGITS)
    tested.engine.abort(1)
    assert tested.engine.idle
    gate.set()
    assert tested.everything_is_free()
    tested.submit(2, grammar=DIGITS)
    assert tested.run().text(2).isdigit()
    assert sorted(tested.ends) == [2]


def test_grammar_that_fails_in_an_answer_is_a_failure_of_the_engine():
    tested = Constrained()
    tested.submit(1, grammar=DIGITS)
    sequence = tested.engine._live.by_key[1]
    while sequence.tokens.output_length < 5:
        tested.turn()
    sequence.tokens.sampling.constraint.error = "too many states"
    tested.run()
    assert (tested.ends[1].code, "too many states" in tested.ends[1].error) == ("engine_failed", True)
    assert list(tested.compiler._kept) == [], "a grammar that failed is used again"
    assert tested.everything_is_free()


def test_eight_answers_of_one_long_text_end_whole(monkeypatch):
    monkeypatch.setattr(compilers, "LIMITS", few_states(2500))
    schema = {"type": "string", "minLength": 380, "maxLength": 400}
    tested = Constrained(slots=8, max_batch=8)
    for key in range(8):
        tested.submit(key, grammar=grammar_of(schema), temperature=1.3)
    tested.run()
    for key in range(8):
        assert tested.ends[key].error is None
        assert 380 <= len(json.loads(tested.text(key))) <= 400


# A model without a token that ends answers -----------------------------------------------------------


def without_end(**limits):
    """Return a loop whose model has no token that ends an answer."""
    return Constrained(has_end=False, **limits)


@pytest.mark.parametrize("setting", SETTINGS)
def test_answer_ends_with_its_grammar_if_no_token_ends_it(setting):
    tested = without_end(**SETTINGS[setting])
    schema = schema_of(3)
    for key, grammar in enumerate((YES_OR_NO, DIGITS, grammar_of(schema)) * 4):
        tested.submit(key, f"{key} {LONG_PROMPT}", grammar=grammar)
    tested.submit(20, LONG_PROMPT, max_tokens=30)
    tested.run()
    for key in range(12):
        assert tested.ends[key].finish_reason == "stop"
        assert tested.ends[key].stop_token is None
    assert {tested.text(key) for key in range(0, 12, 3)} <= {"yes", "no"}
    assert all(tested.text(key).isdigit() and len(tested.text(key)) == 30 for key in range(1, 12, 3))
    for key in range(2, 12, 3):
        jsonschema.Draft202012Validator(schema).validate(json.loads(tested.text(key)))
    assert (tested.ends[20].finish_reason, len(tested.token_ids_of[20])) == ("length", 30)
    assert tested.everything_is_free()


def test_answer_that_may_go_on_does_so_up_to_its_limit_if_no_token_ends_it():
    tested = without_end()
    tested.submit(1, grammar=answer_grammar(RegexAnswer("[a-z]+")), max_tokens=20)
    tested.submit(2, grammar=answer_grammar(LarkAnswer('start: "[" NEVER\nNEVER: /x/ & /y/')))
    tested.run()
    assert tested.ends[1].finish_reason == "length"
    assert tested.text(1).isalpha()
    assert "grammar" in tested.ends[2].error
    assert tested.everything_is_free()


@pytest.mark.parametrize("slow", [False, True])
@pytest.mark.parametrize("overlaps", [False, True])
def test_empty_answer_ends_without_a_token_and_reports_its_prompt(overlaps, slow):
    tested = without_end(overlaps=overlaps, slow=slow)
    for key in range(2):
        tested.submit(key, grammar=answer_grammar(RegexAnswer("")), prompt_logprobs=0 if key else None)
    tested.run()
    assert [tested.ends[key].token_ids for key in range(2)] == [[], []]
    assert [len(tested.ends[key].prompt_logprobs) for key in range(2)] == [
        0,
        len(prompt_of("What is Fairlead?")) - 1,
    ]
    assert tested.everything_is_free()
