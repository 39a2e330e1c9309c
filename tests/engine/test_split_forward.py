"""Rows that a backend does not compute run on the torch reference, and the rest of the step does not."""

from array import array

import numpy as np
import pytest
import torch
import transformers

from engine.models.tiny import SIZES, save
from engine.test_engine_machine import BlindPredictor
from fairlead._cext.inputbatch import InputBatch, SequenceState
from fairlead.base.job import Sampling
from fairlead.engine.backend import staging
from fairlead.engine.cache import KVCache
from fairlead.engine.engine import Engine
from fairlead.engine.forward import TorchForward
from fairlead.engine.models.loader import load_model
from fairlead.engine.runner import ModelRunner
from fairlead.engine.split_forward import SplitForward

CPU = torch.device("cpu")
BLOCK_SIZE, BLOCKS = 16, 40
SMALL = {**SIZES, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
FAMILIES = {
    "llama": transformers.LlamaConfig(**SMALL),
    "gemma3": transformers.Gemma3TextConfig(  # scales its embeddings
        **SMALL, sliding_window=9, layer_types=["sliding_attention", "full_attention"]
    ),
}


@pytest.fixture(scope="module", params=FAMILIES)
def model(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    save(FAMILIES[request.param], path)
    return load_model(path, device=CPU, dtype="float32").model


class Counting(TorchForward):
    """The reference. `ran` has the slots of each of its steps."""

    def __init__(self, model, cache):
        super().__init__(model, cache, exact=True)
        self.ran = []

    def __call__(self, inputs):
        self.ran.append(inputs.slots.tolist())
        return super().__call__(inputs)


class Several(Counting):
    """The reference, with rows that sample several times."""

    samples_several = True


class OneSample(Counting):
    """A backend that computes one sample a row, and no column."""

    def __init__(self, model, cache):
        super().__init__(model, cache)
        self.columns = {}

    def __call__(self, inputs):
        row_of_token = np.repeat(np.arange(len(inputs.slots)), np.diff(inputs.query_starts))
        assert np.bincount(row_of_token[inputs.sample_tokens]).max(initial=0) <= 1
        assert not len(inputs.embedded_tokens)
        assert inputs.decodes <= len(inputs.slots)
        return super().__call__(inputs)


def cache_of(model):
    groups = (BLOCKS,) * len(model.shape.groups)
    return KVCache(model.shape, blocks=groups, block_size=BLOCK_SIZE, dtype=torch.float32, device=CPU)


def split(model):
    cache = cache_of(model)
    return SplitForward(OneSample(model, cache), Several(model, cache))


def batch_of(model, prompts):
    batch = InputBatch(
        slots=len(prompts),
        max_batched_tokens=64,
        max_model_len=200,
        block_size=BLOCK_SIZE,
        vocab_size=model.shape.vocab_size,
        windows=model.shape.groups,
        most_drafts=4,
    )
    for slot, prompt in enumerate(prompts):
        blocks = list(range(6 * slot, 6 * slot + 6))
        state = SequenceState(slot, prompt, max_tokens=60)
        batch.add_request(slot, state, (blocks,) * len(model.shape.groups))
    return batch


@torch.inference_mode()
def run(forward, batch, scheduled, drafts):
    """Run a step of so many tokens by slot, with drafts by slot; return its logits."""
    batch.survey(len(scheduled))
    for slot, count in enumerate(scheduled):
        batch.num_scheduled[slot] = count
        batch.num_drafts[slot] = len(drafts.get(slot, ()))
        for place, draft in enumerate(drafts.get(slot, ())):
            batch.drafts[slot, place] = draft
    step = batch.prepare_inputs()
    logits = forward(staging(forward)(step, batch, None)).clone()
    batch.commit_tokens(step, array("i", [5] * step.samples))
    return logits


STEPS = [
    ([14, 3, 20], {}),  # chunks; all but the last sequence sample
    ([1, 4, 10], {0: [5, 9]}),  # a decode with drafts, of which one is right; the others go on
    ([1, 1, 1], {0: [5, 5, 5], 2: [7]}),
    ([1, 1, 1], {}),
]


def test_rows_of_several_samples_run_on_the_reference_and_others_do_not(model):
    chance = np.random.default_rng(3)
    prompts = [chance.integers(0, model.shape.vocab_size, length).tolist() for length in (14, 7, 30)]
    tested, whole = split(model), Several(model, cache_of(model))
    batches = [batch_of(model, prompts) for _ in range(2)]
    for scheduled, drafts in STEPS:
        actual = run(tested, batches[0], scheduled, drafts)
        expected = run(whole, batches[1], scheduled, drafts)
        assert torch.equal(actual, expected)
    assert tested._reference.ran == [[0], [0, 2]]
    assert [sorted(slots) for slots in tested._backend.ran] == [[0, 1, 2], [1, 2], [1], [0, 1, 2]]


def in_torch(model):
    return TorchForward(model, cache_of(model), exact=True)


def engine_over(model, forward, **limits):
    runner = ModelRunner(forward, ())
    options = {"blocks_total": [BLOCKS] * len(model.shape.groups), "max_batched_tokens": 24, **limits}
    engine = Engine(
        runner,
        slots=4,
        max_batch=4,
        max_model_len=160,
        block_size=BLOCK_SIZE,
        windows=model.shape.groups,
        vocab_size=model.shape.vocab_size,
        eos_token_ids=(),
        draw_seed=lambda: 1,
        **options,
    )
    return engine, runner


def answers(engine, runner):
    """Run to the end; return the tokens, log-probabilities and error of each sequence."""
    got = {}
    while not engine.idle:
        step = engine.plan(0.0)
        outcome = (
            engine.take_outcome()
            if step is None
            else engine.commit(step, runner.launch(step, engine.batch).wait())
        )
        assert not outcome.keys
        for output in outcome.outputs:
            tokens, logprobs, errors = got.setdefault(output.key, ([], [], []))
            tokens += output.token_ids
            logprobs += output.logprobs
            errors += [output.error] if output.error else []
    return got


LIMITS = {
    "plain": {},
    "preemption": {"predictor": BlindPredictor()},
}


@pytest.mark.parametrize("make", [in_torch, split], ids=["torch", "split"])
@pytest.mark.parametrize("limits", LIMITS)
def test_prompt_of_embeddings_is_answered_as_its_tokens(model, make, limits):
    few = {"blocks_total": [11] * len(model.shape.groups)} if limits == "preemption" else {}
    chance = np.random.default_rng(4)
    prompts = [chance.integers(0, model.shape.vocab_size, length).tolist() for length in (40, 9, 33)]

    def answer_all(forward, embedded):
        """Return all answers; the prompts with the keys `embedded` are given as embeddings."""
        engine, runner = engine_over(model, forward, prefix_cache=False, **LIMITS[limits], **few)
        for key, prompt in enumerate(prompts):
            sampling = Sampling(max_tokens=40, temperature=key / 2, seed=7, logprobs=2)
            vectors = model.embed(torch.tensor(prompt)).detach().numpy() if key in embedded else None
            ids = [0] * len(prompt) if key in embedded else prompt
            engine.submit(key, ids, sampling, embeddings=vectors)
        got = answers(engine, runner)
        assert (engine.statistics().preemptions > 0) == (limits == "preemption")
        assert engine.statistics().blocks_free == engine.statistics().blocks_total
        return got

    # The same schedule, because torch rounds otherwise where prompts are cut elsewhere.
    expected = answer_all(in_torch(model), ())
    assert [len(expected[key][0]) for key in range(3)] == [40] * 3
    forward = make(model)
    assert answer_all(forward, (0, 2)) == expected
    if make is split:
        reference = {slot for slots in forward._reference.ran for slot in slots}
        assert reference == {0, 2} or limits == "preemption"


def test_prompt_of_embeddings_shares_no_blocks(model):
    engine, runner = engine_over(model, in_torch(model))
    width = model.shape.hidden_size
    chance = np.random.default_rng(5)
    tokens = []
    for key in range(2):
        vectors = chance.normal(size=(40, width)).astype(np.float32)
        engine.submit(key, [0] * 40, Sampling(max_tokens=20, temperature=0, logprobs=0), embeddings=vectors)
        tokens.append(answers(engine, runner)[key])
    assert tokens[0] != tokens[1]
    assert engine.statistics().prefix_hits == 0


@pytest.mark.parametrize(
    ("shape", "reason"),
    [((3, 8), "expected"), ((3,), "expected"), ((2, None), "for a prompt of 3 tokens")],
)
def test_embeddings_of_another_size_are_refused_alone(model, shape, reason):
    engine, runner = engine_over(model, in_torch(model))
    shape = tuple(model.shape.hidden_size if size is None else size for size in shape)
    engine.submit(1, [1, 2, 3], Sampling(max_tokens=2, logprobs=0), embeddings=np.zeros(shape, np.float32))
    engine.submit(2, [1, 2, 3], Sampling(max_tokens=2, logprobs=0))
    got = answers(engine, runner)
    assert reason in got[1][2][0]
    assert (len(got[2][0]), got[2][2]) == (2, [])


def test_backend_without_the_column_refuses_the_sequence(model):
    engine, runner = engine_over(model, OneSample(model, cache_of(model)))
    vectors = np.zeros((3, model.shape.hidden_size), np.float32)
    engine.submit(1, [1, 2, 3], Sampling(max_tokens=2), embeddings=vectors)
    assert answers(engine, runner)[1][2] == ["this model takes no embeddings in place of tokens"]
