"""Embeddings through the whole engine: as sentence-transformers defines them, and bit for bit reproducible.

Definition: the network's last hidden states, averaged over the tokens or taken at the last token, and scaled
to length 1 if there is a Normalize module. The expected vectors come from transformers and plain arithmetic.

On some processors (AVX2), the rounding of a row in a matrix product depends on the rows beside it. So the
bit-exact tests multiply each row alone: any remaining difference is caused by our code.
"""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from engine.models.tiny import SIZES, VOCABULARY, load, prompt_of
from fairlead.base.job import Sampling
from fairlead.engine.embedder import EmbeddingRunner
from fairlead.engine.engine import Engine
from fairlead.engine.models.quantization.none import UnquantizedLinear
from language.checkpoint.test_pooling import NORMALIZE, POOLING, TRANSFORMER, save_modules

NAN_TOKEN = 7
LENGTHS = (1, 1, 2, 3, 15, 16, 17, 33, 58, 59, 64, 100, 117, 200)  # around block, window and chunk sizes
CONFIGS = {
    "qwen3, a whole model, last token": (
        transformers.Qwen3ForCausalLM,
        transformers.Qwen3Config(**SIZES, tie_word_embeddings=True),
        "lasttoken",
        [NORMALIZE],
    ),
    "qwen3, mean": (transformers.Qwen3Model, transformers.Qwen3Config(**SIZES), "mean", [NORMALIZE]),
    "mistral, a window, last token": (
        transformers.MistralModel,
        transformers.MistralConfig(**SIZES, sliding_window=19),
        "lasttoken",
        [],
    ),
    "llama, mean, of any length": (transformers.LlamaModel, transformers.LlamaConfig(**SIZES), "mean", []),
    "gemma3, sliding and full layers, mean": (
        transformers.Gemma3TextModel,
        transformers.Gemma3TextConfig(
            **SIZES,
            sliding_window=19,
            query_pre_attn_scalar=16,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        ),
        "mean",
        [NORMALIZE],
    ),
}


def save(directory, name):
    kind, config, pooling, more = CONFIGS[name]
    torch.manual_seed(0)
    reference = kind(config).eval()
    reference.save_pretrained(directory)
    save_modules(directory, [TRANSFORMER, POOLING, *more], pooling_mode=pooling)
    return reference


@pytest.fixture(scope="module", params=list(CONFIGS))
def pair(request, tmp_path_factory):
    """(transformers' model, its directory, a function from a text's states to its vector)."""
    directory = tmp_path_factory.mktemp("model")
    _, _, pooling, more = CONFIGS[request.param]

    def vector_of(states):
        vector = states.double().mean(0) if pooling == "mean" else states[-1].double()
        return vector / vector.norm() if more else vector

    return save(directory, request.param), directory, vector_of


@pytest.fixture
def rows_alone(monkeypatch):
    """Multiply every row alone."""
    whole = UnquantizedLinear.__call__
    monkeypatch.setattr(
        UnquantizedLinear, "__call__", lambda self, x: torch.cat([whole(self, row) for row in x.split(1)])
    )


def embedder(directory, **options):
    return load(directory, **{"slots": 6, "max_batched_tokens": 64, "kv_cache_bytes": 2 << 20, **options})


def embedded(loaded, prompts, *, after_a_step=lambda _engine: None):
    """Submit all prompts together; return the output of each."""
    engine = Engine(
        loaded.runner,
        slots=loaded.slots,
        max_batch=loaded.max_batch,
        max_batched_tokens=loaded.max_batched_tokens,
        max_model_len=loaded.max_model_len,
        blocks_total=loaded.blocks_total,
        windows=loaded.windows,
        block_size=loaded.block_size,
        vocab_size=2 * loaded.vocab_size,  # as if the tokenizer had more ids
        eos_token_ids=loaded.eos_token_ids,
        draw_seed=lambda: 0,
        embeds=loaded.embeds,
    )
    outputs = {}
    for key, prompt in enumerate(prompts):
        engine.submit(key, prompt, Sampling(max_tokens=1), embed=True)
    for now_s in range(1000):
        if engine.idle:
            return [outputs[key] for key in range(len(prompts))]
        step = engine.plan(float(now_s))
        outcome = engine.commit(step, loaded.runner.launch(step, engine.batch).wait())
        outputs |= {output.key: output for output in outcome.outputs}
        after_a_step(engine)
    raise AssertionError("no end")


def test_vectors_match_the_definition(pair):
    reference, directory, vector_of = pair
    loaded = embedder(directory)
    assert isinstance(loaded.runner, EmbeddingRunner)
    assert loaded.embeds
    prompts = [prompt_of(length, seed=row) for row, length in enumerate(LENGTHS)]
    network = getattr(reference, "model", reference)
    for prompt, output in zip(prompts, embedded(loaded, prompts), strict=True):
        with torch.inference_mode():
            expected = vector_of(network(torch.tensor([prompt])).last_hidden_state[0])
        ours = torch.frombuffer(bytearray(output.vector), dtype=torch.float32)
        assert (ours - expected).norm() / expected.norm() <= 1e-4


def test_float32_vector_is_bit_identical_alone_and_in_a_batch(pair, rows_alone):
    _, directory, _ = pair
    loaded = embedder(directory)
    prompts = [prompt_of(length, seed=row) for row, length in enumerate(LENGTHS)]
    alone = [embedded(loaded, [prompt])[0].vector for prompt in prompts]
    assert alone == [output.vector for output in embedded(loaded, prompts)]
    back = [output.vector for output in embedded(loaded, prompts[::-1])]
    assert alone == back[::-1]


def test_last_token_in_a_chunk_of_its_own_gives_the_same_vector(pair, rows_alone):
    _, directory, _ = pair
    loaded = embedder(directory, slots=40, max_batched_tokens=64)  # a chunk is 24 tokens
    prompts = [prompt_of(24 * chunks + 1, seed=chunks) for chunks in range(1, 10)]
    alone = [embedded(loaded, [prompt])[0].vector for prompt in prompts]
    assert alone == [output.vector for output in embedded(loaded, prompts)]


def test_preempted_text_has_the_same_vector(pair, rows_alone):
    _, directory, _ = pair
    loaded = embedder(directory)
    prompts = [prompt_of(length, seed=row) for row, length in enumerate(LENGTHS)]
    expected = [output.vector for output in embedded(loaded, prompts)]

    def preempt(engine):
        scheduler = engine._scheduler
        sequence = scheduler._running.newest_of_the_lowest_class()
        if sequence is not None and engine.statistics().steps % 3 == 0:
            scheduler._preempt(sequence)

    assert expected == [output.vector for output in embedded(loaded, prompts, after_a_step=preempt)]


@pytest.mark.parametrize("pooling", ["mean", "lasttoken"])
def test_text_with_nan_or_unknown_token_ids_fails_alone(pooling, tmp_path, rows_alone):
    save(tmp_path, "qwen3, mean")
    save_modules(tmp_path, [TRANSFORMER, POOLING], pooling_mode=pooling)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    [table] = [name for name in tensors if name.endswith("embed_tokens.weight")]
    tensors[table][NAN_TOKEN] = float("nan")
    save_file(tensors, path, metadata={"format": "pt"})
    loaded = embedder(tmp_path)
    valid = [
        [token if token != NAN_TOKEN else 0 for token in prompt_of(length, seed=length)] for length in LENGTHS
    ]
    expected = [output.vector for output in embedded(loaded, valid)]
    invalid = [[*prompt[:5], NAN_TOKEN, *prompt[5:]] for prompt in valid]
    unknown = [[*prompt[:3], VOCABULARY + 3] for prompt in valid]
    mixed = embedded(loaded, [one for three in zip(invalid, valid, unknown, strict=True) for one in three])
    assert expected == [output.vector for output in mixed[1::3]]
    assert {output.error for output in mixed[::3]} == {"the model's vector has a NaN or infinity"}
    assert {f"the prompt has token ids outside 0…{VOCABULARY - 1}"} == {
        output.error for output in mixed[2::3]
    }


def test_model_with_a_head_and_no_pooling_generates_text(tmp_path):
    transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES)).save_pretrained(tmp_path)
    assert not embedder(tmp_path).embeds


def test_encoder_is_refused_by_architecture_name(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["BertModel"], "model_type": "bert"}))
    save_modules(tmp_path, [TRANSFORMER, POOLING, NORMALIZE], pooling_mode="mean")
    with pytest.raises(Exception, match="BertModel") as refused:
        embedder(tmp_path)
    assert type(refused.value).__name__ == "LoadFailed"
