"""The log-probabilities of a prompt match those of transformers, however it is split into steps."""

import copy

import pytest
import torch
import transformers

from engine.models.test_through_the_engine import EngineDriver
from engine.models.tiny import SIZES, load, prompt_of, save
from fairlead.base.job import Sampling
from fairlead.engine import engine as engine_module

BLOCKS = {"qwen2": 26, "gemma3_text": 40}  # too few for six sequences at once
LENGTHS = (1, 2, 3, 17, 80, 200)
# Float32 differs from float64 by up to 3.5e-4 here without AVX-512, in torch as in our kernel.
TOLERANCE = {"rel": 1e-4, "abs": 4e-4}
CONFIGS = {
    "qwen2": transformers.Qwen2Config(**SIZES),
    "gemma3": transformers.Gemma3TextConfig(
        **SIZES,
        sliding_window=30,
        query_pre_attn_scalar=16,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
}


class ScoringDriver(EngineDriver):
    """Collects prompt log-probabilities; asserts that none is reported after the first output token."""

    def __init__(self, loaded, *, overlaps=False):
        super().__init__(loaded, overlaps=overlaps)
        self.blocks_total = loaded.blocks_total
        self.scores = {}
        self.cached = {}

    def collect(self, outcome):
        for output in outcome.outputs:
            if output.prompt_logprobs:
                assert not self.outputs[output.key]
                self.scores.setdefault(output.key, []).extend(output.prompt_logprobs)
            if output.cached_tokens:
                assert not self.outputs[output.key]
                self.cached[output.key] = output.cached_tokens
        super().collect(outcome)


@pytest.fixture(scope="module", params=CONFIGS)
def saved(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp(request.param)
    return directory, save(CONFIGS[request.param], directory)


@pytest.fixture(params=[True, False], ids=["compiled", "torch"])
def new_engine(saved, request):
    def make(*, overlaps=False, **options):
        options = {"kv_cache_bytes": 4 << 20, "max_batched_tokens": 48, **options}
        return ScoringDriver(load(saved[0], compiled=request.param, **options), overlaps=overlaps)

    return make


def scoring_requests(alternatives=3, **more):
    return [
        (prompt_of(length), Sampling(max_tokens=4, temperature=0, prompt_logprobs=alternatives, **more))
        for length in LENGTHS
    ]


def oracle(model, prompt):
    """Return, for each token but the first, its log-probability in transformers and those of all tokens.

    In float64: in float32, transformers' own rounding would use up the tolerance on some processors.
    """
    with torch.inference_mode():
        logprobs = copy.deepcopy(model).double()(torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)
    return logprobs.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0].tolist(), logprobs


def check(model, prompt, scores, alternatives):
    expected, all_logprobs = oracle(model, prompt)
    assert [score.token_id for score in scores] == prompt[1:]
    assert [score.logprob for score in scores] == pytest.approx(expected, **TOLERANCE)
    assert sum(score.logprob for score in scores) == pytest.approx(sum(expected), abs=1e-2)
    for score, logprobs in zip(scores, all_logprobs, strict=True):
        highest, ids = logprobs.topk(alternatives)
        assert [token_id for token_id, _ in score.top] == ids.tolist()
        assert [logprob for _, logprob in score.top] == pytest.approx(highest.tolist(), **TOLERANCE)
        chosen = logprobs[score.token_id]
        least, most = (int((logprobs >= chosen + margin).sum()) for margin in (1e-3, -1e-3))
        assert max(1, least) <= score.rank <= most
        if score.rank == 1 and alternatives:
            assert score.logprob == score.top[0][1]  # to the last bit: clients compare the two


@pytest.mark.parametrize("overlaps", [False, True])
def test_prompt_logprobs_match_transformers(saved, new_engine, overlaps):
    scoring = new_engine(overlaps=overlaps)
    requests = [*scoring_requests(), (prompt_of(60, seed=3), Sampling(max_tokens=30, temperature=0))]
    scoring.run_together(requests)
    for key, (prompt, sampling) in enumerate(requests[:-1]):
        check(saved[1], prompt, scoring.scores.get(key, []), sampling.prompt_logprobs)
    assert len(requests) - 1 not in scoring.scores


def test_outputs_and_their_logprobs_are_the_same_without_prompt_logprobs(new_engine):
    plain = [(prompt, Sampling(max_tokens=4, temperature=0, logprobs=1)) for prompt, _ in scoring_requests()]
    assert new_engine().run_together(scoring_requests(logprobs=1)) == new_engine().run_together(plain)


def test_no_alternatives_are_listed_for_zero_prompt_logprobs(saved, new_engine):
    scoring = new_engine()
    scoring.run_together(scoring_requests(alternatives=0))
    check(saved[1], prompt_of(200), scoring.scores[len(LENGTHS) - 1], 0)


def test_prompt_logits_per_step_are_bounded(saved, new_engine, monkeypatch):
    monkeypatch.setattr(engine_module, "SCORED_BYTES", 5 * 4 * SIZES["vocab_size"])
    scoring = new_engine()
    forward, seen = scoring.runner.forward, []

    def count_and_forward(inputs):
        seen.append(len(inputs.scored_tokens))
        return forward(inputs)

    scoring.runner.forward = _Forward(forward, count_and_forward)
    scoring.run_together(scoring_requests())
    assert max(seen) == 5
    assert sum(seen) == sum(LENGTHS) - len(LENGTHS)
    for key, (prompt, sampling) in enumerate(scoring_requests()):
        check(saved[1], prompt, scoring.scores.get(key, []), sampling.prompt_logprobs)


def test_preempted_prompt_is_scored_once(saved, new_engine):
    large_cache = new_engine()
    block_bytes = (4 << 20) // sum(large_cache.blocks_total)
    scoring = new_engine(kv_cache_bytes=BLOCKS[saved[1].config.model_type] * block_bytes, slots=6)
    longer = [
        (prompt_of(90, seed=row), Sampling(max_tokens=90, temperature=0, prompt_logprobs=2))
        for row in range(6)
    ]
    # From these the engine learns to predict short outputs, and then admits more than fit.
    scoring.run_together(
        [(prompt_of(5, seed=row), Sampling(max_tokens=1, temperature=0)) for row in range(60)]
    )
    first = len(scoring.outputs)
    assert scoring.run_together(longer) == large_cache.run_together(longer)
    assert scoring.engine.statistics().preemptions > 0
    for key, (prompt, sampling) in enumerate(longer, first):
        check(saved[1], prompt, scoring.scores[key], sampling.prompt_logprobs)


def test_cached_prompt_is_scored_completely_and_scored_prompts_are_not_cached(saved, new_engine):
    scoring = new_engine()
    prompt = prompt_of(200)
    plain = Sampling(max_tokens=2, temperature=0)
    scoring.run_together([(prompt, Sampling(max_tokens=2, temperature=0, prompt_logprobs=1))])
    assert scoring.engine.statistics().cached_tokens == 0
    scoring.run_together([(prompt, plain)])
    scoring.run_together([(prompt, Sampling(max_tokens=2, temperature=0, prompt_logprobs=1))])
    assert scoring.scores[0] == scoring.scores[2]
    check(saved[1], prompt, scoring.scores[2], 1)


def test_cached_tokens_are_reported_with_the_first_token(new_engine):
    scoring = new_engine()
    prompt, sampling = prompt_of(100), Sampling(max_tokens=5, temperature=0)
    [first] = scoring.run_together([(prompt, sampling)])
    assert scoring.cached == {}
    assert scoring.run_together([(prompt, sampling)]) == [first]
    assert scoring.cached == {1: 96}  # whole blocks, and at least one token is computed
    scoring.run_together([(prompt + prompt_of(9), sampling), (prompt_of(50, seed=8), sampling)])
    assert scoring.cached == {1: 96, 2: 96}


def test_only_the_prompt_with_nan_logits_fails(saved, new_engine):
    scoring = new_engine()
    forward, failed = scoring.runner.forward, {}

    def forward_with_nan(inputs):
        logits = forward(inputs)
        logits = logits.clone() if isinstance(logits, torch.Tensor) else logits.copy()
        if 17 in inputs.sequence_lengths:  # the prompt of 17 tokens, which is one step
            logits[len(inputs.sample_tokens) :][-16:] = float("nan")
        return logits

    class Failing(ScoringDriver):
        def collect(self, outcome):
            failed.update({output.key: output.error for output in outcome.outputs if output.error})
            outcome.outputs[:] = [output for output in outcome.outputs if not output.error]
            super().collect(outcome)

    scoring.runner.forward = _Forward(forward, forward_with_nan)
    scoring.__class__ = Failing
    prompts = [prompt_of(17), prompt_of(90)]
    first, second = scoring.run_together(
        [(prompt, Sampling(max_tokens=4, temperature=0, prompt_logprobs=1)) for prompt in prompts[:1]]
    ) + scoring.run_together([(prompts[1], Sampling(max_tokens=4, temperature=0, prompt_logprobs=1))])
    assert failed == {0: "the model's logits are not numbers (NaN)"}
    assert (len(first), len(second)) == (0, 4)
    check(saved[1], prompts[1], scoring.scores[1], 1)
    assert scoring.engine.idle
    assert scoring.engine.statistics().running == 0


class _Forward:
    """A forward that passes its calls to `call`."""

    def __init__(self, forward, call):
        self._forward, self._call = forward, call

    def __getattr__(self, name):
        return getattr(self._forward, name)

    def __call__(self, inputs):
        return self._call(inputs)
