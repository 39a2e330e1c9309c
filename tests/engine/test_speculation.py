"""Speculation changes no answer: the same requests with it and without it, alone and in any batch."""

import random

import pytest
import transformers

from engine.models.tiny import SIZES, save
from fairlead.base.job import Sampling
from fairlead.base.messages import EngineStatistics, Speculation, StepOutputs, WorkerSpec
from fairlead.engine.engine import Engine
from fairlead.engine.loading import load_runner

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


@pytest.mark.nightly
def test_ten_thousand_answers_are_those_without_drafts(runners):
    drafted, accepted, preemptions = compare(runners[True], 1667, 3)
    assert 0 < accepted < drafted
    assert preemptions > 0
