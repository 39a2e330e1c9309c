"""A head that differs from the embedding is used although `tie_word_embeddings` is true; a copy is not."""

import json
import shutil

import pytest
import transformers
from safetensors.torch import load_file, save_file

from engine.models.rank_threads import on_ranks
from engine.models.test_agreement import CONFIGS, record_logits, reference_logits
from engine.models.test_fallback import CONFIGS as OTHERS
from engine.models.tiny import SIZES, generate, load, prompt_of, save
from fairlead.base.errors import LoadFailed
from fairlead.base.job import Sampling

FAMILIES = {
    **{name: CONFIGS[name] for name in ("llama", "qwen3", "qwen3-moe", "mixtral")},
    "mistral": CONFIGS["mistral, window"],
    "qwen2": CONFIGS["qwen2, upper layers slide"],
    "gemma3": CONFIGS["gemma3, untied, biases, linear rope, capped logits"],
    "olmo2, by transformers": OTHERS["olmo2"],
}
PROMPTS = [prompt_of(length) for length in (1, 17, 33)]
GREEDY = Sampling(max_tokens=12, temperature=0)
CACHE = {"kv_cache_bytes": 4 << 20}
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def texts(directory, **options):
    return generate(load(directory, **CACHE, **options), PROMPTS, GREEDY)


def change(directory, *, tied=True, tensors=lambda tensors: tensors):
    """Return a copy of a model with another configuration and other tensors."""
    copy = directory.parent / "changed"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(directory, copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": tied}))
    path = copy / "model.safetensors"
    save_file(tensors(load_file(path)), path, metadata={"format": "pt"})
    return copy


def with_copy(tensors):
    return tensors | {HEAD: tensors[EMBEDDING].clone()}


@pytest.fixture(scope="module")
def untied(tmp_path_factory):
    directory = tmp_path_factory.mktemp("untied") / "model"
    save(CONFIGS["llama"], directory)
    return directory


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tied") / "model"
    save(transformers.LlamaConfig(**SIZES, tie_word_embeddings=True), directory)
    return directory


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "torch"])
@pytest.mark.parametrize("family", FAMILIES)
def test_differing_head_is_used_in_every_family(tmp_path, family, compiled):
    save(FAMILIES[family], tmp_path / "model")
    changed = change(tmp_path / "model")
    assert texts(changed, compiled=compiled) == texts(tmp_path / "model", compiled=compiled)


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "torch"])
@pytest.mark.parametrize("options", [{"dtype": "bfloat16"}, {"quantization": "int8"}], ids=str)
def test_differing_head_is_used_in_every_dtype(untied, options, compiled):
    options = {"dtype": "bfloat16", **options, "compiled": compiled}
    assert texts(change(untied), **options) == texts(untied, **options)


def test_differing_head_is_used_on_two_ranks(untied):
    with on_ranks(change(untied), 2, **CACHE) as ranks:
        assert generate(ranks.loaded[0], PROMPTS, GREEDY) == texts(untied)


def test_transformers_uses_the_differing_head_too(untied, monkeypatch):
    changed = change(untied)
    reference = transformers.AutoModelForCausalLM.from_pretrained(changed, attn_implementation="eager").eval()
    loaded = load(changed, **CACHE)
    logits = record_logits(loaded, monkeypatch)
    generate(loaded, [PROMPTS[-1]], Sampling(max_tokens=1, temperature=0), max_batched_tokens=64)
    expected = reference_logits(reference, PROMPTS[-1])[-1]
    assert float((logits[-1][0] - expected).abs().max() / expected.abs().max()) <= 1e-4


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "torch"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_equal_head_is_tied_and_takes_no_memory(tied, dtype, compiled):
    copied = change(tied, tensors=with_copy)
    sizes = [load(one, dtype=dtype, compiled=compiled, **CACHE).weight_bytes for one in (tied, copied)]
    assert sizes[0] == sizes[1]
    assert texts(tied, dtype=dtype, compiled=compiled) == texts(copied, dtype=dtype, compiled=compiled)


def test_heads_are_compared_in_the_dtype_that_is_computed_in(tied):
    """A difference that rounding removes is none: no second table is kept."""

    def rounded(tensors):
        narrow = tensors[EMBEDDING].bfloat16()
        return tensors | {EMBEDDING: narrow.float() * (1 + 2**-12), HEAD: narrow}

    changed = change(tied, tensors=rounded)
    plain = load(tied, dtype="bfloat16", **CACHE).weight_bytes
    assert load(changed, dtype="bfloat16", **CACHE).weight_bytes == plain
    assert load(changed, **CACHE).weight_bytes > 2 * plain


@pytest.mark.parametrize("last", [False, True])
def test_heads_that_differ_in_one_value_are_not_tied(tied, last):
    def spoil(tensors):
        tensors = with_copy(tensors)
        tensors[HEAD].view(-1)[-1 if last else 0] += 1
        return tensors

    assert load(change(tied, tensors=spoil), **CACHE).weight_bytes > load(tied, **CACHE).weight_bytes


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "torch"])
def test_head_without_an_embedding_is_both(tied, compiled):
    renamed = change(
        tied, tensors=lambda tensors: {HEAD if n == EMBEDDING else n: t for n, t in tensors.items()}
    )
    assert texts(renamed, compiled=compiled) == texts(tied, compiled=compiled)


def test_differing_head_of_another_shape_names_the_tensor(tied):
    short = change(tied, tensors=lambda tensors: tensors | {HEAD: tensors[EMBEDDING][:-1].clone()})
    with pytest.raises(
        LoadFailed, match=r"tensor 'lm_head.weight' has shape \[319, 48\], expected \[320, 48\]"
    ):
        load(short, **CACHE)
