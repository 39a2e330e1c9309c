"""Loading of checkpoints: broken, inconsistent and unsupported ones, and progress reports."""

import itertools
import json
import os
import shutil
import struct

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from engine.models.tiny import SIZES, generate, load, prompt_of, save
from fairlead.base.errors import LoadFailed
from fairlead.base.job import Sampling
from fairlead.base.messages import WorkerSpec
from fairlead.engine.loading import load_runner
from fairlead.engine.models.loader import choose_dtype, load_model
from fairlead.language.checkpoint.config import CheckpointConfig

CPU = torch.device("cpu")
GREEDY = Sampling(max_tokens=8, temperature=0)


@pytest.fixture(scope="module")
def original_model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("original")
    save(transformers.LlamaConfig(**SIZES), directory)
    return directory


@pytest.fixture
def checkpoint(original_model, tmp_path):
    """A copy of a valid checkpoint, for a test to damage."""
    return shutil.copytree(original_model, tmp_path / "model")


def failure(directory):
    with pytest.raises(LoadFailed) as caught:
        load_model(directory, device=CPU)
    return caught.value.message


def spoil_tensors(directory, change):
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def spoil_config(directory, **values):
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_shards_load_like_a_single_file(original_model, tmp_path):
    save(transformers.LlamaConfig(**SIZES), tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    prompt = [prompt_of(20)]
    expected = generate(load(original_model, kv_cache_bytes=1 << 20), prompt, GREEDY)
    assert expected == generate(load(tmp_path, kv_cache_bytes=1 << 20), prompt, GREEDY)


def test_progress_rises_to_one_in_steps_of_five_percent_at_most(original_model):
    fractions = []
    load_model(original_model, device=CPU, report=fractions.append)
    steps = [later - earlier for earlier, later in zip([0.0, *fractions], fractions, strict=False)]
    assert fractions[-1] == 1
    assert all(0 <= step <= 0.05 for step in steps)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("compiled", "dtype"), [(True, "float32"), (True, "bfloat16"), (False, "bfloat16")])
def test_progress_steps_stay_small_when_one_tensor_dominates(tied, compiled, dtype, tmp_path):
    sizes = {**SIZES, "vocab_size": 40_000, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(**sizes, tie_word_embeddings=tied)
    save(config, tmp_path)
    fractions = [0.0]
    spec = WorkerSpec(path=str(tmp_path), device="cpu", dtype=dtype, kv_cache_bytes=1 << 20)
    load_runner(spec, lambda fraction, _stage: fractions.append(fraction), compiled=compiled)
    steps = [later - earlier for earlier, later in itertools.pairwise(fractions)]
    assert fractions[-1] == 1
    assert 0 <= min(steps) <= max(steps) <= 0.05


def test_weight_bytes_count_all_parameters(original_model):
    parameters = sum(tensor.numel() for tensor in load_file(original_model / "model.safetensors").values())
    assert 4 * parameters == load_model(original_model, device=CPU, dtype="float32").weight_bytes


def test_a_second_copy_of_a_tied_head_is_ignored(tmp_path):
    save(transformers.LlamaConfig(**SIZES, tie_word_embeddings=True), tmp_path)
    spoil_tensors(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert load_model(tmp_path, device=CPU).model.shape.tied


@pytest.mark.parametrize("stored_tensors", [0, 4, 200, 5000, -1])
def test_truncated_file_is_named(checkpoint, stored_tensors):
    path = checkpoint / "model.safetensors"
    path.write_bytes(path.read_bytes()[:stored_tensors])
    assert str(path) in failure(checkpoint)


@pytest.mark.parametrize("length", [2**63, 2**40, 10**6])
def test_file_with_a_wrong_header_length_is_named(checkpoint, length):
    path = checkpoint / "model.safetensors"
    path.write_bytes(struct.pack("<Q", length) + path.read_bytes()[8:])
    assert str(path) in failure(checkpoint)


def test_file_with_offsets_beyond_its_end_is_named(checkpoint):
    path = checkpoint / "model.safetensors"
    header = json.dumps({"a": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(64))
    assert str(path) in failure(checkpoint)


def test_missing_tensor_is_named(checkpoint):
    name = "model.layers.1.self_attn.k_proj.weight"
    spoil_tensors(checkpoint, lambda tensors: tensors.pop(name))
    message = failure(checkpoint)
    assert name in message
    assert "model.safetensors" in message


def test_unexpected_tensor_is_named(checkpoint):
    spoil_tensors(checkpoint, lambda tensors: tensors.update({"model.adapter": torch.ones(1)}))
    assert "model.adapter" in failure(checkpoint)


def test_tensor_of_wrong_shape_is_named_with_both_shapes(checkpoint):
    spoil_tensors(checkpoint, lambda tensors: tensors.update({"model.norm.weight": torch.ones(7)}))
    message = failure(checkpoint)
    assert "tensor 'model.norm.weight' has shape [7], expected [48]" in message


def test_integer_weights_are_refused(checkpoint):
    integers = torch.ones(48, dtype=torch.int8)
    spoil_tensors(checkpoint, lambda tensors: tensors.update({"model.norm.weight": integers}))
    assert "is of I8" in failure(checkpoint)


def test_pickled_weights_are_refused_without_reading_them(checkpoint):
    (checkpoint / "model.safetensors").rename(checkpoint / "pytorch_model.bin")
    assert "pickle" in failure(checkpoint)


def test_directory_without_weights_is_refused(checkpoint):
    (checkpoint / "model.safetensors").unlink()
    assert "model.safetensors" in failure(checkpoint)


def test_missing_directory_is_refused(tmp_path):
    assert "no such directory" in failure(tmp_path / "nowhere")


def test_missing_shard_is_named(original_model, tmp_path):
    save(transformers.LlamaConfig(**SIZES), tmp_path, max_shard_size="100KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.unlink()
    assert shard.name in failure(tmp_path)


def test_shard_outside_the_directory_is_refused(checkpoint):
    index = {"weight_map": {"model.norm.weight": "../model.safetensors"}}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "'../model.safetensors' is not a file beside it" in failure(checkpoint)


def test_invalid_index_is_refused(checkpoint):
    (checkpoint / "model.safetensors.index.json").write_text('{"weight_map": [1]}')
    assert "weight_map" in failure(checkpoint)


@pytest.fixture
def shards(tmp_path):
    """A valid checkpoint of several files: the directory and its index."""
    directory = tmp_path / "shards"
    save(transformers.LlamaConfig(**SIZES), directory, max_shard_size="100KB")
    return directory, json.loads((directory / "model.safetensors.index.json").read_text())


def spoil_index(directory, index, **places):
    index["weight_map"] |= places
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    "outside_directory", ["/etc/passwd", "../x", "a/../b", "", ".", "..", "sub/x", "nul\0byte"]
)
def test_index_may_name_only_files_beside_it(shards, outside_directory):
    directory, index = shards
    spoil_index(directory, index, **{"model.norm.weight": outside_directory})
    assert str(directory) in failure(directory)


def test_tensor_in_a_different_shard_than_indexed_is_named(shards):
    directory, index = shards
    first, second, *_ = sorted(set(index["weight_map"].values()))
    name = next(name for name, shard in index["weight_map"].items() if shard == first)
    spoil_index(directory, index, **{name: second})
    message = failure(directory)
    assert f"{directory / second}: tensor {name!r} is missing" in message


def test_indexed_tensor_missing_from_its_shard_is_named(shards):
    directory, index = shards
    shard = sorted(set(index["weight_map"].values()))[1]
    spoil_index(directory, index, **{"model.more": shard})
    assert f"{directory / shard}: tensor 'model.more' is missing" in failure(directory)


def test_tensor_missing_from_the_index_is_named(shards):
    directory, index = shards
    shard = index["weight_map"].pop("model.norm.weight")
    assert shard in index["weight_map"].values()
    spoil_index(directory, index)
    message = failure(directory)
    reason = "tensor 'model.norm.weight' is not in model.safetensors.index.json"
    assert f"{directory / shard}: {reason}" in message


def test_tensor_in_two_shards_is_reported_with_both_shards(shards):
    directory, index = shards
    first, second, *_ = sorted(set(index["weight_map"].values()))
    shutil.copy(directory / first, directory / second)
    message = failure(directory)
    assert str(directory / second) in message
    assert f"is also in {first}" in message


def test_shards_may_be_symbolic_links(shards, tmp_path):
    directory, index = shards
    for shard in set(index["weight_map"].values()):
        (directory / shard).rename(tmp_path / shard)
        (directory / shard).symlink_to(tmp_path / shard)
    assert load_model(directory, device=CPU).weight_bytes


def test_named_pipe_instead_of_weights_is_refused_without_blocking(checkpoint):
    (checkpoint / "model.safetensors").unlink()
    os.mkfifo(checkpoint / "model.safetensors")
    assert "model.safetensors: not a file" in failure(checkpoint)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tied_embedding_is_in_memory_once_and_matches_transformers(dtype, tmp_path):
    config = transformers.LlamaConfig(**SIZES, tie_word_embeddings=True)
    save(config, tmp_path / "float32")
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "float32", dtype=dtype)
    reference.save_pretrained(tmp_path / dtype)  # stored in the dtype that is loaded
    fractions = []
    loaded = load_model(tmp_path / dtype, device=CPU, dtype=dtype, report=fractions.append)
    parameters = sum(tensor.numel() for tensor in reference.parameters())  # counts a tied tensor once
    assert parameters * (2 if dtype == "bfloat16" else 4) == loaded.weight_bytes
    assert max(later - earlier for earlier, later in zip([0.0, *fractions], fractions, strict=False)) <= 0.05
    ids = torch.tensor([5, 3, 300])
    assert torch.equal(reference.get_input_embeddings()(ids), loaded.model.embedding(ids))
    x = torch.randn(4, SIZES["hidden_size"]).to(reference.dtype)
    torch.testing.assert_close(reference.lm_head(x), loaded.model.head(x))


def test_repository_with_its_own_code_is_refused(checkpoint):
    spoil_config(checkpoint, auto_map={"AutoModelForCausalLM": "modeling.Model"})
    assert "auto_map" in failure(checkpoint)


def test_unknown_architecture_is_reported_with_the_known_ones(checkpoint):
    spoil_config(checkpoint, architectures=["NoSuchForCausalLM"])
    message = failure(checkpoint)
    assert "NoSuchForCausalLM" in message
    assert "LlamaForCausalLM" in message


def test_config_of_another_size_is_refused_before_allocation(checkpoint):
    spoil_config(checkpoint, hidden_size=2**30)
    assert "model.embed_tokens.weight" in failure(checkpoint)


@pytest.mark.parametrize(
    ("model", "head", "vision"),
    [
        ("model.language_model.", "lm_head.", "model.vision_tower."),
        ("language_model.model.", "language_model.lm_head.", "multi_modal_projector."),
    ],
)
def test_text_part_of_a_gemma_vision_model_is_loaded(model, head, vision, tmp_path):
    config = transformers.Gemma3TextConfig(**SIZES, tie_word_embeddings=False, query_pre_attn_scalar=16)
    save(config, tmp_path)
    single = generate(load(tmp_path, kv_cache_bytes=1 << 20), [prompt_of(20)], GREEDY)

    def rename(tensors):
        renamed = {
            (
                head + name.removeprefix("lm_head.") if name.startswith("lm_head.") else model + name[6:]
            ): tensor
            for name, tensor in tensors.items()
        }
        tensors.clear()
        tensors.update(renamed, **{f"{vision}weight": torch.ones(1000, 1000)})

    spoil_tensors(tmp_path, rename)
    path = tmp_path / "config.json"
    text = json.loads(path.read_text())
    path.write_text(
        json.dumps(
            {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text, "dtype": "float32"}
        )
    )
    loaded = load(tmp_path, kv_cache_bytes=1 << 20)
    assert single == generate(loaded, [prompt_of(20)], GREEDY)
    assert loaded.weight_bytes < 4_000_000
    spoil_tensors(tmp_path, lambda tensors: tensors.update({f"{model}more": torch.ones(1)}))
    assert f"tensor '{model}more' is unexpected" in failure(tmp_path)


@pytest.mark.parametrize(
    ("name", "stored", "native", "expected"),
    [
        ("auto", "bfloat16", True, torch.bfloat16),
        ("auto", "bfloat16", False, torch.float32),
        ("auto", "float16", True, torch.bfloat16),
        ("auto", "float16", False, torch.float32),
        ("auto", "float32", True, torch.float32),
        ("float16", "float32", True, torch.float16),
        ("bfloat16", "float32", False, torch.bfloat16),
    ],
)
@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_auto_dtype_is_16_bit_only_where_the_cpu_computes_bfloat16(
    name, stored, native, expected, key, tmp_path, monkeypatch
):
    monkeypatch.setattr("fairlead.engine.models.numbers.cpu_computes_bfloat16", lambda: native)
    assert expected == choose_dtype(CheckpointConfig(tmp_path, {key: stored}), name, CPU)


def test_auto_dtype_on_a_gpu_keeps_float16(tmp_path):
    config = CheckpointConfig(tmp_path, {"dtype": "float16"})
    assert torch.float16 == choose_dtype(config, "auto", torch.device("cuda"))


@pytest.mark.parametrize("name", ["float8", "int8", ""])
def test_unsupported_dtypes_are_refused(name, tmp_path):
    with pytest.raises(LoadFailed, match="dtype"):
        choose_dtype(CheckpointConfig(tmp_path, {}), name, CPU)
