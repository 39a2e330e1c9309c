"""NaN weights and hostile requests, through the whole engine: only the affected sequences fail."""

import itertools
import struct

import pytest
import transformers
from safetensors.torch import load_file, save_file

from engine.models.tiny import SIZES, VOCABULARY, generate, load, prompt_of, save
from fairlead.base.errors import LoadFailed
from fairlead.base.job import Sampling
from fairlead.engine.engine import Engine

NAN_TOKEN = 7
SAMPLINGS = [
    {"temperature": 0},
    {"seed": 3, "top_p": 0.9, "frequency_penalty": 0.4},
    {"seed": 4, "min_p": 0.02, "logprobs": 2},
]


def valid_prompt(length, seed):
    return [token if token != NAN_TOKEN else NAN_TOKEN + 1 for token in prompt_of(length, seed=seed)]


def requests():
    """Return 12 requests that ban the NaN token by a bias, and 12 with that token in their prompts."""
    valid = [
        (
            valid_prompt(1 + 13 * row % 60, row),
            Sampling(max_tokens=4 + 5 * row % 30, **SAMPLINGS[row % 3], logit_bias={NAN_TOKEN: -1000.0}),
        )
        for row in range(12)
    ]
    invalid = [
        (
            [*valid_prompt(9 * row % 40, row), NAN_TOKEN, *valid_prompt(row % 5, row)],
            Sampling(max_tokens=20, **SAMPLINGS[row % 3]),
        )
        for row in range(12)
    ]
    return valid, invalid


@pytest.fixture
def valid_model(tmp_path):
    save(transformers.LlamaConfig(**SIZES), tmp_path / "sound")
    return tmp_path / "sound"


@pytest.fixture
def model_with_nan(tmp_path):
    """A model with an embedding of NaN for one token; tests load it with few blocks, which are reused."""
    save(transformers.LlamaConfig(**SIZES), tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors["model.embed_tokens.weight"][NAN_TOKEN] = float("nan")
    save_file(tensors, path, metadata={"format": "pt"})
    return tmp_path


def serve(loaded, submitted, *, logprobs=None):
    """Run all together; return the tokens of each, and the errors by key. Fills `logprobs` if given."""
    engine = Engine(
        loaded.runner,
        slots=6,
        max_batch=6,
        max_batched_tokens=40,
        max_model_len=loaded.max_model_len,
        blocks_total=loaded.blocks_total,
        windows=loaded.windows,
        block_size=loaded.block_size,
        vocab_size=loaded.vocab_size,
        eos_token_ids=loaded.eos_token_ids,
        draw_seed=lambda: 0,
    )
    texts = {key: [] for key in range(len(submitted))}
    errors = {}
    for key, (prompt, sampling) in enumerate(submitted):
        engine.submit(key, prompt, sampling)
    for now_s in range(1000):
        if engine.idle:
            return list(texts.values()), errors
        step = engine.plan(float(now_s))
        outcome = engine.commit(step, loaded.runner.launch(step, engine.batch).wait())
        for (key,), (token,) in zip(
            struct.iter_unpack("<q", outcome.keys), struct.iter_unpack("<i", outcome.tokens), strict=True
        ):
            texts[key].append(token)
        for output in outcome.outputs:
            texts[output.key] += output.token_ids
            if logprobs is not None:
                logprobs.setdefault(output.key, []).extend(output.logprobs)
            if output.error is not None:
                errors[output.key] = output.error
    raise AssertionError("no end")


def test_only_sequences_that_use_a_nan_weight_fail(model_with_nan):
    valid, invalid = requests()
    loaded = load(model_with_nan, compiled=False, kv_cache_bytes=1 << 19)
    expected = [
        generate(loaded, [prompt], sampling, seeds=[sampling.seed or 0])[0] for prompt, sampling in valid
    ]
    assert all(len(set(text)) > 1 for text in expected if len(text) > 8)
    mixed = [request for pair in zip(invalid, valid, strict=True) for request in pair]
    texts, errors = serve(loaded, mixed)
    assert expected == texts[1::2]
    assert {*range(0, 24, 2)} == set(errors)
    assert set(errors.values()) == {"the model's logits are not numbers (NaN)"}


def test_model_of_nan_fails_every_sequence_and_keeps_running(model_with_nan):
    path = model_with_nan / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"][:] = float("nan")
    save_file(tensors, path, metadata={"format": "pt"})
    loaded = load(model_with_nan, compiled=False, kv_cache_bytes=1 << 19)
    for _ in range(2):
        texts, errors = serve(loaded, requests()[0])
        assert texts == [[]] * 12
        assert set(range(12)) == set(errors)


def test_compiled_step_refuses_nan_weights_at_load(model_with_nan):
    with pytest.raises(LoadFailed) as caught:
        load(model_with_nan, kv_cache_bytes=1 << 19)
    assert str(model_with_nan / "model.safetensors") in caught.value.message
    assert "model.embed_tokens.weight" in caught.value.message


@pytest.mark.parametrize("unknown_token", [-1, VOCABULARY, VOCABULARY + 5, 2**31 - 1])
def test_only_the_request_with_a_logit_bias_outside_the_vocabulary_fails(unknown_token, valid_model):
    loaded = load(valid_model, kv_cache_bytes=1 << 19)
    plain = Sampling(max_tokens=20, seed=1, logit_bias={NAN_TOKEN: -1000.0})
    with_bias = Sampling(max_tokens=20, seed=1, logit_bias={NAN_TOKEN: -1000.0, unknown_token: 50.0})
    [expected], _ = serve(loaded, [(valid_prompt(20, 1), plain)])
    texts, errors = serve(loaded, [(valid_prompt(20, 1), with_bias), (valid_prompt(20, 1), plain)])
    assert expected == texts[1]
    assert set(errors) == {0}
    assert f"no token {unknown_token}" in errors[0]


def test_logit_bias_applies_to_the_first_and_last_token_id(valid_model):
    loaded = load(valid_model, kv_cache_bytes=1 << 19)
    for token_id in (0, VOCABULARY - 1):
        bias = {token_id: 1e9}
        [texts], errors = serve(
            loaded, [(valid_prompt(20, 1), Sampling(max_tokens=5, seed=1, logit_bias=bias))]
        )
        assert (texts, errors) == ([token_id] * 5, {})


HOSTILE = [
    ([5, 6], {"logit_bias": {-1: 5.0}}),
    ([5, 6], {"logit_bias": {VOCABULARY: 5.0}}),
    ([5, 6], {"logit_bias": {3: float("nan"), 4: float("inf")}}),
    ([5, VOCABULARY], {}),
    ([5, 2**31 - 1], {}),
    ([-1], {}),
    ([2**31], {}),
    ([], {}),
    ([5] * 512, {}),
    ([5, 6], {"max_tokens": 0}),
    ([5, 6], {"temperature": float("nan")}),
    ([5, 6], {"temperature": 1e300, "top_p": 0.0, "min_p": 7.0, "top_k": 2**31 - 1}),
    ([5, 6], {"repetition_penalty": 0.0, "frequency_penalty": float("inf")}),
    ([5, 6], {"stop_token_ids": (-1, VOCABULARY, 2**31 - 1), "min_tokens": 2**31 - 1}),
    ([5, 6], {"seed": -(2**63), "logprobs": 2**31 - 1}),
]


def test_hostile_requests_do_not_change_other_outputs_by_a_bit(valid_model):
    loaded = load(valid_model, kv_cache_bytes=1 << 19)
    valid = [
        (valid_prompt(1 + 9 * row, row), Sampling(max_tokens=20, seed=row, top_p=0.9, logprobs=3))
        for row in range(8)
    ]
    alone = [
        serve(loaded, [request], logprobs=(logprobs_by_key := {})) and logprobs_by_key[0] for request in valid
    ]
    invalid = [(prompt, Sampling(**{"max_tokens": 20, "seed": 1, **options})) for prompt, options in HOSTILE]
    mixed = [
        request for pair in itertools.zip_longest(invalid, valid) for request in pair if request is not None
    ]
    texts, errors = serve(loaded, mixed, logprobs=(logprobs_by_key := {}))
    valid_keys = [index for index, request in enumerate(mixed) if request in valid]
    assert alone == [logprobs_by_key[index] for index in valid_keys]
    assert not errors.keys() & set(valid_keys)
    for index in set(range(len(mixed))) - set(valid_keys):
        assert (index in errors) or (texts[index] and all(0 <= token < VOCABULARY for token in texts[index]))
    refused = [request for index, request in enumerate(mixed) if index in errors]
    assert all(request in refused for request in invalid[:2] + invalid[3:10])


def test_only_the_prompt_with_token_ids_beyond_the_logits_fails(valid_model):
    # The tokenizer has more ids than the model, so that valid text can contain such ids.
    loaded = load(valid_model, kv_cache_bytes=1 << 19)
    submitted = [([1, 2, VOCABULARY], Sampling(max_tokens=9, temperature=0)), requests()[0][0]]
    expected = generate(loaded, [submitted[1][0]], submitted[1][1])
    texts, errors = serve(loaded, submitted)
    assert expected == texts[1:]
    assert set(errors) == {0}
