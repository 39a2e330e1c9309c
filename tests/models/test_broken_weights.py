"""NaN weights and hostile requests, through the whole engine: only the affected sequences fail."""

import itertools
import struct

import pytest
import transformers
from safetensors.torch import load_file, save_file

from fairlead.engine.engine import Engine
from fairlead.errors import LoadFailed
from fairlead.job import Sampling
from models.tiny import SIZES, VOCABULARY, generate, load, prompt_of, save

POISON = 7
KINDS = [
    {"temperature": 0},
    {"seed": 3, "top_p": 0.9, "frequency_penalty": 0.4},
    {"seed": 4, "min_p": 0.02, "logprobs": 2},
]


def innocent(length, seed):
    return [token if token != POISON else POISON + 1 for token in prompt_of(length, seed=seed)]


def requests():
    """Return 12 requests that ban the NaN token by a bias, and 12 with that token in their prompts."""
    good = [
        (
            innocent(1 + 13 * row % 60, row),
            Sampling(max_tokens=4 + 5 * row % 30, **KINDS[row % 3], logit_bias={POISON: -1000.0}),
        )
        for row in range(12)
    ]
    bad = [
        (
            [*innocent(9 * row % 40, row), POISON, *innocent(row % 5, row)],
            Sampling(max_tokens=20, **KINDS[row % 3]),
        )
        for row in range(12)
    ]
    return good, bad


@pytest.fixture
def sound(tmp_path):
    save(transformers.LlamaConfig(**SIZES), tmp_path / "sound")
    return tmp_path / "sound"


@pytest.fixture
def spoilt(tmp_path):
    """A model with an embedding of NaN for one token; tests load it with few blocks, so they are reused."""
    save(transformers.LlamaConfig(**SIZES), tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors["model.embed_tokens.weight"][POISON] = float("nan")
    save_file(tensors, path, metadata={"format": "pt"})
    return tmp_path


def serve(loaded, asked, *, logprobs=None):
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
    texts = {key: [] for key in range(len(asked))}
    errors = {}
    for key, (prompt, sampling) in enumerate(asked):
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


def test_sequence_that_uses_a_nan_weight_fails_alone(spoilt):
    good, bad = requests()
    loaded = load(spoilt, compiled=False, kv_cache_bytes=1 << 19)
    expected = [
        generate(loaded, [prompt], sampling, seeds=[sampling.seed or 0])[0] for prompt, sampling in good
    ]
    assert all(len(set(text)) > 1 for text in expected if len(text) > 8)
    mixed = [one for pair in zip(bad, good, strict=True) for one in pair]
    texts, errors = serve(loaded, mixed)
    assert expected == texts[1::2]
    assert {*range(0, 24, 2)} == set(errors)
    assert set(errors.values()) == {"the model's logits are not numbers (NaN)"}


def test_model_of_nan_fails_every_sequence_and_keeps_running(spoilt):
    path = spoilt / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"][:] = float("nan")
    save_file(tensors, path, metadata={"format": "pt"})
    loaded = load(spoilt, compiled=False, kv_cache_bytes=1 << 19)
    for _ in range(2):
        texts, errors = serve(loaded, requests()[0])
        assert texts == [[]] * 12
        assert set(range(12)) == set(errors)


def test_compiled_step_refuses_nan_weights_at_load(spoilt):
    with pytest.raises(LoadFailed) as caught:
        load(spoilt, kv_cache_bytes=1 << 19)
    assert str(spoilt / "model.safetensors") in caught.value.message
    assert "model.embed_tokens.weight" in caught.value.message


@pytest.mark.parametrize("unknown_token", [-1, VOCABULARY, VOCABULARY + 5, 2**31 - 1])
def test_logit_bias_outside_the_vocabulary_fails_alone(unknown_token, sound):
    loaded = load(sound, kv_cache_bytes=1 << 19)
    plain = Sampling(max_tokens=20, seed=1, logit_bias={POISON: -1000.0})
    biased = Sampling(max_tokens=20, seed=1, logit_bias={POISON: -1000.0, unknown_token: 50.0})
    [expected], _ = serve(loaded, [(innocent(20, 1), plain)])
    texts, errors = serve(loaded, [(innocent(20, 1), biased), (innocent(20, 1), plain)])
    assert expected == texts[1]
    assert set(errors) == {0}
    assert "logit_bias" in errors[0]


def test_logit_bias_applies_to_the_first_and_last_token_id(sound):
    loaded = load(sound, kv_cache_bytes=1 << 19)
    for edge in (0, VOCABULARY - 1):
        bias = {edge: 1e9}
        [texts], errors = serve(loaded, [(innocent(20, 1), Sampling(max_tokens=5, seed=1, logit_bias=bias))])
        assert (texts, errors) == ([edge] * 5, {})


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


def test_hostile_requests_do_not_change_other_outputs_by_a_bit(sound):
    loaded = load(sound, kv_cache_bytes=1 << 19)
    good = [
        (innocent(1 + 9 * row, row), Sampling(max_tokens=20, seed=row, top_p=0.9, logprobs=3))
        for row in range(8)
    ]
    alone = [serve(loaded, [one], logprobs=(noted := {})) and noted[0] for one in good]
    bad = [(prompt, Sampling(**{"max_tokens": 20, "seed": 1, **options})) for prompt, options in HOSTILE]
    mixed = [one for pair in itertools.zip_longest(bad, good) for one in pair if one is not None]
    texts, errors = serve(loaded, mixed, logprobs=(noted := {}))
    places = [place for place, one in enumerate(mixed) if one in good]
    assert alone == [noted[place] for place in places]
    assert not errors.keys() & set(places)
    for place in set(range(len(mixed))) - set(places):
        assert (place in errors) or (texts[place] and all(0 <= token < VOCABULARY for token in texts[place]))
    refused = [one for place, one in enumerate(mixed) if place in errors]
    assert all(one in refused for one in bad[:2] + bad[3:10])


def test_prompt_with_token_ids_beyond_the_logits_fails_alone(sound):
    # The tokenizer has more ids than the model, so that valid text can contain such ids.
    loaded = load(sound, kv_cache_bytes=1 << 19)
    asked = [([1, 2, VOCABULARY], Sampling(max_tokens=9, temperature=0)), requests()[0][0]]
    expected = generate(loaded, [asked[1][0]], asked[1][1])
    texts, errors = serve(loaded, asked)
    assert expected == texts[1:]
    assert set(errors) == {0}
