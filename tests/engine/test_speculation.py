"""Speculation changes no answer: the same requests with it and without it, alone and in any batch."""

import random

import pytest
import transformers

from engine.constrained_model import Constrained, grammar_of, tokenizer
from engine.models.tiny import SIZES, save
from engine.test_engine_machine import BlindPredictor
from fairlead.base.job import ReasoningLimit, Sampling
from fairlead.base.messages import EngineStatistics, Speculation, StepOutputs, WorkerSpec
from fairlead.engine.engine import Engine
from fairlead.engine.loading import load_runner
from fairlead.language.structured.grammar import LarkAnswer, RegexAnswer, answer_grammar
from language.structured.schemas import schema_of

VOCABULARY, EOS = SIZES["vocab_size"], (3,)
# A small model of random weights soon repeats itself, and so its drafts are often right.
NETWORK = transformers.LlamaConfig(
    **{**SIZES, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
)
MANY = {"slots": 6, "max_batch": 6, "blocks_total": 200, "max_batched_tokens": 48}
WHOLE = {**MANY, "max_batched_tokens": 500, "prefix_cache": False}  # each prompt is one chunk
SCARCE = {
    "slots": 6,
    "max_batch": 3,
    "blocks_total": 14,
    "max_batched_tokens": 48,
}  # so that sequences are preempted
# The same for constrained answers, which are longer.
CONSTRAINED = {"slots": 6, "max_batch": 6, "max_batched_tokens": 96}
FEW_BLOCKS = {**CONSTRAINED, "blocks_total": [14], "predictor": BlindPredictor()}
GRAMMARS = [
    answer_grammar(LarkAnswer('start: line{3,9}\nline: "the queue " /[a-c]{1,4}/ " is fair\\n"')),
    answer_grammar(LarkAnswer('start: thought /[0-9]{5}/\nthought[suffix="</think>"]: /(.|\\n)*/')),
    answer_grammar(RegexAnswer("([0-9]{2}, ){20}")),
]


@pytest.fixture(scope="module")
def runners(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    save(NETWORK, directory)

    def runner(*, compiled):
        spec = WorkerSpec(
            path=str(directory),
            device="cpu",
            dtype="float32",
            slots=6,
            max_model_len=160,
            speculation=Speculation(),
        )
        return load_runner(spec, lambda *_: None, compiled=compiled).runner

    return {compiled: runner(compiled=compiled) for compiled in (True, False)}


def answers(runner, requests, speculation, limits):
    """Run requests to their ends; return what each got, and the engine's counts."""
    engine = Engine(
        runner,
        **limits,
        max_model_len=150,
        block_size=16,
        vocab_size=VOCABULARY,
        eos_token_ids=EOS,
        draw_seed=lambda: 1,
        hash_key=bytes(16),
        speculation=speculation,
    )
    got = {key: ([], [], []) for key in range(len(requests))}
    for key, (prompt, sampling) in enumerate(requests):
        engine.submit(key, prompt, sampling)
    while not engine.idle:
        step = engine.plan(0.0)
        if step is None:
            outcome = engine.take_outcome()
        else:
            outcome = engine.commit(step, runner.launch(step, engine.batch).wait())
        frame = StepOutputs(outcome.keys, outcome.tokens, outcome.outputs, EngineStatistics(), outcome.counts)
        for key, token_id in frame.plain():
            got[key][0].append(token_id)
        for output in outcome.outputs:
            tokens, logprobs, ends = got[output.key]
            tokens += output.token_ids
            logprobs += output.logprobs
            if output.finish_reason or output.error:
                ends.append((output.finish_reason, output.stop_token, output.error))
    assert engine.statistics().blocks_free == limits["blocks_total"]
    return got, engine.statistics()


def request_of(rng):
    """Return a prompt that repeats itself, and parameters."""
    piece = [rng.randrange(4, VOCABULARY) for _ in range(rng.randint(1, 8))]
    prompt = (piece * 12)[: rng.randint(1, 70)]
    options = {"max_tokens": rng.choice([1, 2, 7, 30, 60]), "seed": rng.randrange(100)}
    options["temperature"] = rng.choice([0, 0, 0.3, 1.0])
    if rng.random() < 0.3:
        options |= {"top_k": rng.choice([0, 3, 10]), "top_p": rng.choice([0.5, 1.0])}
    if rng.random() < 0.3:
        options |= {
            "repetition_penalty": 1.1,
            "frequency_penalty": rng.choice([0.0, 0.2]),
            "presence_penalty": 0.1,
            "repeat_last_n": rng.choice([-1, 1, 4, 20]),
        }
    if rng.random() < 0.3:
        options |= {"logprobs": rng.choice([0, 2])}
    if rng.random() < 0.3:
        options |= {
            "stop_token_ids": tuple(rng.randrange(VOCABULARY) for _ in range(20)),
            "min_tokens": rng.choice([0, 5]),
        }
    if rng.random() < 0.2:
        options |= {"logit_bias": {rng.randrange(VOCABULARY): rng.choice([-5.0, 5.0])}}
    return prompt, Sampling(**options)


def compare(runner, rounds, seed, without=MANY, with_drafts=(MANY, SCARCE)):
    """Compare answers with drafts with those without, of six sequences at once, within some limits."""
    rng = random.Random(seed)
    drafted = accepted = preemptions = 0
    for _ in range(rounds):
        requests = [request_of(rng) for _ in range(6)]
        speculation = Speculation(ngram=rng.choice([1, 2, 3]), drafts=rng.choice([1, 4, 7]))
        expected, _ = answers(runner, requests, None, without)
        actual, counts = answers(runner, requests, speculation, rng.choice(with_drafts))
        assert expected == actual
        drafted, accepted = drafted + counts.draft_tokens, accepted + counts.accepted_tokens
        preemptions += counts.preemptions
    return drafted, accepted, preemptions


def test_answers_are_those_without_drafts(runners):
    drafted, accepted, preemptions = compare(runners[True], 40, 1)
    assert 0 < accepted < drafted
    assert preemptions > 0


def test_answers_of_torch_are_those_without_drafts(runners):
    drafted, accepted, _ = compare(runners[False], 4, 2, WHOLE, [WHOLE])
    assert 0 < accepted < drafted


@pytest.mark.parametrize("compiled", [True, False], ids=["C kernel", "torch"])
@pytest.mark.parametrize("speculation", [None, Speculation(ngram=1, drafts=4)], ids=["", "drafts"])
@pytest.mark.parametrize("window", [-1, 0, 1, 3, 10, 1000])
def test_tokens_are_the_likeliest_after_penalties_of_the_last_tokens(runners, compiled, speculation, window):
    penalties = {"frequency_penalty": 0.03, "presence_penalty": 0.02, "repeat_last_n": window}
    sampling = Sampling(max_tokens=40, temperature=0, logprobs=VOCABULARY, ignore_eos=True, **penalties)
    requests = [([5, 6, 7, 8] * 3, sampling), ([9, 10, 11], sampling)]
    got, counts = answers(runners[compiled], requests, speculation, MANY if compiled else WHOLE)
    for tokens, logprobs, _ in got.values():
        for place, (token, listed) in enumerate(zip(tokens, logprobs, strict=True)):
            before = tokens[:place]
            counted = before if window == -1 else before[max(0, place - window) :]
            scores = {
                other: logprob - 0.03 * counted.count(other) - 0.02 * (other in counted)
                for other, logprob in listed.top
            }
            assert len(scores) == VOCABULARY
            assert scores[token] == pytest.approx(max(scores.values()), abs=1e-5)
    if speculation is not None and window != -1:
        assert counts.accepted_tokens > 0


@pytest.mark.parametrize("compiled", [True, False], ids=["C kernel", "torch"])
def test_only_allowed_tokens_are_generated(runners, compiled):
    plain = Sampling(max_tokens=20, temperature=0, logprobs=VOCABULARY, ignore_eos=True)
    limited = Sampling(
        max_tokens=20, temperature=0, logprobs=VOCABULARY, ignore_eos=True, allowed_token_ids=(4, 9, 30)
    )
    requests = [([5, 6, 7], limited), ([5, 6, 7], plain)]
    got, _ = answers(runners[compiled], requests, None, MANY if compiled else WHOLE)
    for token, listed in zip(*got[0][:2], strict=True):
        likeliest = max(((logprob, other) for other, logprob in listed.top if other in (4, 9, 30)))[1]
        assert token == likeliest
    assert not set(got[1][0]) <= {4, 9, 30}


class WithLogprobs(Constrained):
    """A loop that also collects the log-probabilities of each sequence."""

    def __init__(self, **options):
        super().__init__(**options)
        self.logprobs = {}

    def collect_output(self, output):
        super().collect_output(output)
        self.logprobs.setdefault(output.key, []).extend(output.logprobs)


def constrained_request(rng):
    """Return a text that may repeat what its answer has, and parameters with a constraint."""
    options = {"max_tokens": rng.choice([5, 15, 25, 40, 60, 100]), "seed": rng.randrange(100)}
    options["temperature"] = rng.choice([0, 0, 0.5, 1.0])
    if rng.random() < 0.8:
        grammars = [*GRAMMARS, *(grammar_of(schema_of(seed)) for seed in range(8))]
        options |= {"grammar": rng.choice(grammars), "close_at_limit": rng.random() < 0.6}
    if "grammar" not in options or rng.random() < 0.2:
        end = tuple(tokenizer().encode("</think>", add_special_tokens=False))
        options["reasoning_limit"] = ReasoningLimit(rng.choice([0, 3, 20]), (), end, is_open=True)
    if rng.random() < 0.3:
        options |= {"repetition_penalty": 1.1, "frequency_penalty": rng.choice([0.0, 0.2])}
    if rng.random() < 0.3:
        options |= {"logprobs": 2}
    if rng.random() < 0.2:
        options |= {"stop_token_ids": tuple(rng.randrange(1536) for _ in range(40)), "min_tokens": 4}
    text = rng.choice(["10, 11, 12, 13, ", "the queue a is fair\n", '{"name": "red", "x": 1, ', "What? "])
    return text * rng.randint(1, 6), options


def constrained_answers(requests, speculation, limits):
    """Run requests to their ends; return what each got, and the engine's counts."""
    tested = WithLogprobs(speculation=speculation, **limits)
    for key, (text, options) in enumerate(requests):
        tested.submit(key, text, **options)
    tested.run()
    assert tested.everything_is_free()
    ends = {key: (end.finish_reason, end.stop_token, end.error) for key, end in tested.ends.items()}
    return (tested.token_ids_of, tested.logprobs, ends), tested.engine.statistics()


def compare_constrained(rounds, seed):
    """Compare constrained answers with drafts with those without, of six sequences at once."""
    rng = random.Random(seed)
    drafted = accepted = preemptions = 0
    for number in range(rounds):
        requests = [constrained_request(rng) for _ in range(6)]
        speculation = Speculation(ngram=rng.choice([1, 2, 3]), drafts=rng.choice([1, 4, 7]))
        expected, _ = constrained_answers(requests, None, CONSTRAINED)
        limits = CONSTRAINED if number % 3 == 1 else FEW_BLOCKS
        actual, counts = constrained_answers(requests, speculation, limits)
        assert expected == actual
        drafted, accepted = drafted + counts.draft_tokens, accepted + counts.accepted_tokens
        preemptions += counts.preemptions
    return drafted, accepted, preemptions


def test_constrained_answers_are_those_without_drafts():
    drafted, accepted, preemptions = compare_constrained(5, 4)
    assert 0 < accepted < drafted
    assert preemptions > 0


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(10, 15))
def test_ten_thousand_constrained_answers_are_those_without_drafts(seed):
    drafted, accepted, preemptions = compare_constrained(334, seed)
    assert 0 < accepted < drafted
    assert preemptions > 0


@pytest.mark.nightly
def test_ten_thousand_answers_are_those_without_drafts(runners):
    drafted, accepted, preemptions = compare(runners[True], 1667, 3)
    assert 0 < accepted < drafted
    assert preemptions > 0
