"""Embeddings: the pooling that a model's files describe, and vectors compared with transformers."""

import json

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from engine.models.tiny import SIZES, prompt_of
from fairlead.base.errors import LoadFailed
from fairlead.engine.models.loader import load_model
from fairlead.engine.models.pooler import Pooler
from fairlead.language.checkpoint.checkpoint import open_checkpoint
from fairlead.language.checkpoint.pooling import Pooling, read_pooling

CPU = torch.device("cpu")
TRANSFORMER = {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}
POOLING = {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}
NORMALIZE = {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"}
SWITCHES = {
    "word_embedding_dimension": 48,
    "pooling_mode_cls_token": False,
    "pooling_mode_mean_tokens": False,
    "pooling_mode_max_tokens": False,
    "pooling_mode_lasttoken": False,
}


def save_modules(directory, modules, **config):
    (directory / "1_Pooling").mkdir(exist_ok=True)
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(config))
    (directory / "modules.json").write_text(json.dumps(modules))
    return directory


@pytest.mark.parametrize(
    ("modules", "config", "expected"),
    [
        ([TRANSFORMER, POOLING], {**SWITCHES, "pooling_mode_mean_tokens": True}, Pooling("mean", False)),
        ([TRANSFORMER, POOLING], {**SWITCHES, "pooling_mode_lasttoken": True}, Pooling("last", False)),
        ([TRANSFORMER, POOLING, NORMALIZE], {"pooling_mode": "lasttoken"}, Pooling("last", True)),
        (
            [TRANSFORMER, POOLING, NORMALIZE],
            {"pooling_mode": "mean", "include_prompt": True},
            Pooling("mean", True),
        ),
    ],
)
def test_pooling_is_read_from_the_model_files(modules, config, expected, tmp_path):
    assert expected == read_pooling(open_checkpoint(save_modules(tmp_path, modules, **config)))


def test_model_without_pooling_files_has_no_pooling(tmp_path):
    assert read_pooling(open_checkpoint(tmp_path)) is None


MEAN = {"pooling_mode_mean_tokens": True}
DENSE = {"idx": 2, "name": "2", "path": "2_Dense", "type": "sentence_transformers.models.Dense"}


@pytest.mark.parametrize(
    ("modules", "config", "problem"),
    [
        ([TRANSFORMER, POOLING, DENSE], MEAN, "Dense"),
        ([TRANSFORMER], MEAN, "Transformer"),
        ([], MEAN, "modules.json"),
        ({}, MEAN, "modules.json"),
        ([1], MEAN, "modules.json"),
        ([TRANSFORMER, POOLING | {"path": "../1_Pooling"}], MEAN, "not a directory beside it"),
        ([TRANSFORMER, POOLING | {"path": ""}], MEAN, "not a directory beside it"),
        ([TRANSFORMER, POOLING | {"path": "2_Pooling"}], MEAN, "2_Pooling/config.json"),
        ([TRANSFORMER, POOLING], SWITCHES, "exactly one"),
        ([TRANSFORMER, POOLING], MEAN | {"pooling_mode_lasttoken": True}, "exactly one"),
        ([TRANSFORMER, POOLING], {"pooling_mode_max_tokens": True}, "pooling_mode_max_tokens"),
        ([TRANSFORMER, POOLING], {"pooling_mode": "max"}, "pooling_mode"),
        ([TRANSFORMER, POOLING], {"pooling_mode_mean_tokens": "yes"}, "pooling_mode_mean_tokens"),
        ([TRANSFORMER, POOLING], MEAN | {"include_prompt": False}, "include_prompt"),
    ],
)
def test_unsupported_pooling_is_refused_with_the_file(modules, config, problem, tmp_path):
    with pytest.raises(LoadFailed) as caught:
        read_pooling(open_checkpoint(save_modules(tmp_path, modules, **config)))
    assert str(tmp_path) in caught.value.message
    assert problem in caught.value.message


lengths = st.lists(st.integers(1, 9), min_size=1, max_size=6)


@given(
    lengths=lengths,
    budget=st.integers(1, 12),
    kind=st.sampled_from(["mean", "last"]),
    normalize=st.booleans(),
)
def test_text_split_over_steps_has_the_vector_of_the_whole_text(lengths, budget, kind, normalize):
    # Several texts use each slot, one after another.
    texts = [torch.randn(length, 5, generator=torch.Generator().manual_seed(length)) for length in lengths]
    pooler = Pooler(Pooling(kind, normalize), slots=2, hidden_size=5, device=CPU)
    waiting, running, vectors = list(range(len(texts))), {}, {}
    while waiting or running:
        for slot in {0, 1} - set(running):
            if waiting:
                running[slot] = [waiting.pop(0), 0]
        left, parts, ends, rows, finished = budget, [], [], [], []
        for slot, entry in sorted(running.items()):
            text, done = entry
            count = min(left, len(texts[text]) - done)
            if count:
                parts.append(texts[text][done : done + count])
                entry[1] = done + count
                ends.append(done + count)
                if done + count == len(texts[text]):
                    finished.append(len(rows))
                rows.append(slot)
                left -= count
        starts = np.cumsum([0, *map(len, parts)]).astype(np.int32)
        found = pooler.add(
            torch.cat(parts),
            starts,
            np.array(ends, np.int32),
            np.array(rows, np.int32),
            np.array(finished, np.int64),
        )
        for row, vector in zip(finished, found, strict=True):
            vectors[running.pop(rows[row])[0]] = vector
    for text, states in enumerate(texts):
        expected = states.double().mean(0) if kind == "mean" else states[-1].double()
        expected = expected / expected.norm() if normalize else expected
        torch.testing.assert_close(expected.float(), vectors[text], rtol=1e-5, atol=1e-6)


class Causal:
    """Causal attention of a single text: a `layers.Attend` without a cache."""

    def __init__(self, shape):
        self.shape = shape

    def __call__(self, layer, query, key, value):
        query, key, value = (single.transpose(0, 1)[None] for single in (query, key, value))
        found = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=True, scale=self.shape.attention_scale
        )
        return found[0].transpose(0, 1).flatten(1)


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        (transformers.Qwen3Model, transformers.Qwen3Config(**SIZES)),
        (transformers.MistralModel, transformers.MistralConfig(**SIZES, sliding_window=None)),
        (transformers.LlamaModel, transformers.LlamaConfig(**SIZES, tie_word_embeddings=True)),
        (
            transformers.Gemma3TextModel,
            transformers.Gemma3TextConfig(
                **SIZES, layer_types=["full_attention"] * 3, query_pre_attn_scalar=16
            ),
        ),
    ],
)
def test_model_without_a_head_gives_the_vectors_of_transformers(kind, config, tmp_path):
    torch.manual_seed(0)
    reference = kind(config).eval()
    reference.save_pretrained(tmp_path)
    save_modules(tmp_path, [TRANSFORMER, POOLING, NORMALIZE], pooling_mode="mean")
    loaded = load_model(tmp_path, device=CPU, dtype="float32", needs_head=False)
    assert Pooling("mean", True) == loaded.pooling
    assert sum(4 * parameter.numel() for parameter in reference.parameters()) == loaded.weight_bytes
    prompt = torch.tensor(prompt_of(40))
    with torch.inference_mode():
        expected = reference(prompt[None]).last_hidden_state[0]
        hidden = loaded.model.hidden(prompt, torch.arange(40), Causal(loaded.model.shape))
        states = loaded.model.states(hidden)
    assert (states - expected).abs().max() / expected.abs().max() <= 1e-4
    pooler = Pooler(loaded.pooling, slots=1, hidden_size=48, device=CPU)
    row = np.zeros(1, np.int32)
    [vector] = pooler.add(states, np.array([0, 40], np.int32), row + 40, row, np.zeros(1, np.int64))
    mean = expected.mean(0)
    torch.testing.assert_close(mean / mean.norm(), vector, rtol=1e-4, atol=1e-5)


def test_whole_model_may_be_saved_with_unprefixed_names(tmp_path):
    config = transformers.Qwen3Config(**SIZES, tie_word_embeddings=True)
    transformers.Qwen3Model(config).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": ["Qwen3ForCausalLM"]}))
    assert load_model(tmp_path, device=CPU).model.head is not None


def test_model_without_a_head_is_refused_for_text_or_without_pooling(tmp_path):
    transformers.Qwen3Model(transformers.Qwen3Config(**SIZES)).save_pretrained(tmp_path)
    with pytest.raises(LoadFailed, match=r"neither a head nor modules\.json"):
        load_model(tmp_path, device=CPU, needs_head=False)
    save_modules(tmp_path, [TRANSFORMER, POOLING], pooling_mode="mean")
    with pytest.raises(LoadFailed, match="embeddings, no text"):
        load_model(tmp_path, device=CPU)
