"""Folders whose matrices are codes with scales: their numbers, and what the engine computes with them."""

import json

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from engine.models.test_gguf import WIDE, logits_of
from engine.models.tiny import load, save
from engine.test_cpu_step import relative_error
from fairlead.base.errors import LoadFailed
from fairlead.language.checkpoint.checkpoint import open_checkpoint
from fairlead.language.checkpoint.folder import read_folder
from language.checkpoint.quantized_folders import AWQ, GPTQ, SCHEMES, compressed, quantize

CONFIG = transformers.LlamaConfig(**WIDE)


def folders(tmp_path, scheme):
    """Return a folder in a scheme, and the same model in numbers."""
    narrow, plain = tmp_path / "narrow", tmp_path / "plain"
    for folder in (narrow, plain):
        save(CONFIG, folder)
    numbers = quantize(narrow, scheme)
    save_file({name: values.contiguous() for name, values in numbers.items()}, plain / "model.safetensors")
    return narrow, plain


@pytest.mark.parametrize("scheme", SCHEMES)
def test_numbers_and_blocks_are_those_of_the_layout(scheme, tmp_path):
    narrow, plain = folders(tmp_path, scheme)
    tensors = open_checkpoint(narrow).tensors().tensors
    expected = load_file(plain / "model.safetensors")
    assert set(tensors) == set(expected)
    for name, values in expected.items():
        if "_proj" not in name:
            continue
        tensor = tensors[name]
        assert np.array_equal(tensor.array(), values.numpy())
        rows = tensor.rows(range(3, 21)).rows(range(2, 11))
        assert np.array_equal(rows.array(), values[5:14].numpy())
        assert tensor.packing == SCHEMES[scheme][3]
        if tensor.packing is not None:
            assert np.array_equal(rows.stored_rows(), tensor.stored_rows()[5:14])


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "torch"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_logits_are_those_of_the_numbers(scheme, compiled, tmp_path):
    narrow, plain = folders(tmp_path, scheme)
    expected, actual = logits_of(plain, compiled=False), logits_of(narrow, compiled=compiled)
    assert relative_error(actual, expected) <= 5e-5
    assert not torch.equal(actual[0], actual[1])


@pytest.mark.parametrize(
    ("scheme", "bits"), [("W4A16", 4.5), ("AWQ", 4.75), ("W8A16", 8.5), ("FP8 by tensor", 16)]
)
def test_codes_take_their_bits_and_restored_matrices_those_of_numbers(scheme, bits, tmp_path):
    narrow, plain = folders(tmp_path, scheme)
    matrices = sum(
        values.numel() for name, values in load_file(plain / "model.safetensors").items() if "_proj" in name
    )
    found, whole = (
        load(folder, dtype="bfloat16", kv_cache_bytes=4 << 20).weight_bytes for folder in (narrow, plain)
    )
    assert (whole - found) * 8 == pytest.approx(matrices * (16 - bits), rel=0.02, abs=64)


@pytest.mark.parametrize("scheme", ["W4A16", "W4A16, codes of 0", "W8A16", "W8A16, float16 scales"])
def test_numbers_are_those_of_the_library(scheme, tmp_path):
    library = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    narrow, _ = folders(tmp_path, scheme)
    parts = load_file(narrow / "model.safetensors")
    name, bits = "model.layers.1.mlp.down_proj.weight", 8 if "8" in scheme.split()[0] else 4
    shape = torch.Size(parts[f"{name}_shape"].tolist())
    scales = parts[f"{name}_scale"].float()
    values = library.unpack_from_int32(parts[f"{name}_packed"], bits, shape).float()
    size = shape[1] // scales.shape[1]
    if f"{name}_zero_point" in parts:
        zeros = library.unpack_from_int32(parts[f"{name}_zero_point"], bits, scales.shape, packed_dim=0)
        values -= zeros.float().repeat_interleave(size, 1)
    expected = values * scales.repeat_interleave(size, 1)
    assert np.array_equal(open_checkpoint(narrow).tensors().tensors[name].array(), expected.numpy())


REFUSED = {
    "quant_method: 'bitsandbytes' is not supported": {"quant_method": "bitsandbytes", "load_in_4bit": True},
    "quant_method: 'mxfp4' is not supported": {"quant_method": "mxfp4"},
    "quant_method: is missing": {},
    "bits: 3 is not supported (4, 8 are)": GPTQ | {"bits": 3},
    "checkpoint_format: 'marlin' is not supported": GPTQ | {"checkpoint_format": "marlin"},
    "group_size: must be positive": GPTQ | {"group_size": 0},
    "dynamic: rules by module": GPTQ | {"dynamic": {"-:.*down.*": {}}},
    "version: 'gemv' is not supported": AWQ | {"version": "gemv"},
    "zero_point: false is not supported": AWQ | {"zero_point": False},
    "fmt: 'e5m2' is not supported": {"quant_method": "fp8", "fmt": "e5m2"},
    "format: 'int-quantized' is not supported": compressed("int-quantized", num_bits=8, strategy="channel"),
    "format: 'nvfp4-pack-quantized' is not supported": compressed("nvfp4-pack-quantized", num_bits=4),
    "weights.num_bits: 2 is not supported": compressed(num_bits=2, strategy="channel"),
    "weights.strategy: 'tensor_group' is not supported": compressed(num_bits=4, strategy="tensor_group"),
    "config_groups: 2 groups": compressed(num_bits=4, strategy="channel")
    | {"config_groups": {"a": {}, "b": {}}},
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_is_not_known_is_refused_by_its_name(reason, tmp_path):
    save(CONFIG, tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": REFUSED[reason]}))
    with pytest.raises(LoadFailed) as raised:
        read_folder(tmp_path)
    assert f"{path}: quantization_config." in str(raised.value)
    assert reason in str(raised.value)


@pytest.mark.parametrize(
    ("scheme", "suffix", "reason"),
    [
        ("GPTQ", "qzeros", "has no model.layers.0.mlp.down_proj.qzeros beside it"),
        ("GPTQ", "scales", "has no model.layers.0.mlp.down_proj.scales beside it"),
        ("W4A16", "weight_scale", "has no model.layers.0.mlp.down_proj.weight_scale beside it"),
        ("W4A16, codes of 0", "weight_zero_point", "has no model.layers.0.mlp.down_proj.weight_zero_point"),
        ("FP8 by block", "weight_scale_inv", "has no model.layers.0.mlp.down_proj.weight_scale_inv beside"),
    ],
)
def test_missing_and_misshapen_parts_are_named(scheme, suffix, reason, tmp_path):
    narrow, _ = folders(tmp_path, scheme)
    path = narrow / "model.safetensors"
    parts = load_file(path)
    part = parts.pop(f"model.layers.0.mlp.down_proj.{suffix}")
    save_file(parts, path)
    with pytest.raises(LoadFailed, match=reason):
        read_folder(narrow)
    save_file(parts | {f"model.layers.0.mlp.down_proj.{suffix}": torch.cat([part, part])}, path)
    with pytest.raises(LoadFailed, match=r"down_proj.*has shape|down_proj.*expected"):
        read_folder(narrow)


def test_group_that_does_not_exist_is_named(tmp_path):
    narrow, _ = folders(tmp_path, "GPTQ, desc_act")
    path = narrow / "model.safetensors"
    parts = load_file(path)
    parts["model.layers.0.mlp.down_proj.g_idx"][7] = 99
    save_file(parts, path)
    with pytest.raises(LoadFailed, match=r"down_proj\.g_idx.* has groups from 0 to 99, of 8"):
        load(narrow)
