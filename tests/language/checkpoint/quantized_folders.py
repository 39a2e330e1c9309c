"""Writes folders whose matrices are codes with scales, by the layouts that their makers have published.

`quantize` rewrites a folder of numbers. It returns the numbers that the codes stand for, by name. They are
made of the codes before these are packed, so that a reader is compared with the layout's definition.
"""

import json

import torch
from safetensors.torch import load_file, save_file

GROUP = 64
_E4M3 = torch.float8_e4m3fn


def _packed(codes, bits, dimension):
    """Put codes of `bits` into words of 32 bits along a dimension, the first in the lowest bits."""
    codes = codes.long().transpose(-1, dimension)
    per_word = 32 // bits
    lacking = -codes.shape[-1] % per_word
    codes = torch.nn.functional.pad(codes, (0, lacking)).view(*codes.shape[:-1], -1, per_word)
    words = (codes << torch.arange(0, 32, bits)).sum(-1)
    words = torch.where(words >= 1 << 31, words - (1 << 32), words).int()
    return words.transpose(-1, dimension).contiguous()


def _drawn(shape, bits, generator, groups, scale_type, *, signed):
    """Return codes [out, in], scales and codes of 0 [out, groups]."""
    most = (1 << bits) - 1
    codes = torch.randint(0, most + 1, shape, generator=generator)
    scales = (torch.rand(shape[0], groups, generator=generator) + 0.5) * (0.6 / most)
    zeros = torch.full((shape[0], groups), 1 << bits - 1)
    if not signed:
        zeros = torch.randint(1, most + 1, (shape[0], groups), generator=generator)
    return codes, scales.to(scale_type), zeros


def _numbers(codes, scales, zeros, indices):
    return (codes - zeros[:, indices]).float() * scales.float()[:, indices]


def pack_quantized(name, shape, generator, *, bits=4, signed=True, size=GROUP, scale_type=torch.bfloat16):
    groups = 1 if size is None else shape[1] // size
    codes, scales, zeros = _drawn(shape, bits, generator, groups, scale_type, signed=signed)
    found = {
        f"{name}_packed": _packed(codes, bits, -1),
        f"{name}_scale": scales,
        f"{name}_shape": torch.tensor(shape),
    }
    if not signed:
        found[f"{name}_zero_point"] = _packed(zeros, bits, 0)
    return found, _numbers(codes, scales, zeros, torch.arange(shape[1]) // (size or shape[1]))


def gptq(name, shape, generator, *, bits=4, signed=True, scattered=False, stored=1, scale_type=torch.float16):
    groups = shape[1] // GROUP
    codes, scales, zeros = _drawn(shape, bits, generator, groups, scale_type, signed=signed)
    indices = torch.arange(shape[1]) // GROUP
    if scattered:  # desc_act
        indices = indices[torch.randperm(shape[1], generator=generator)]
    stem = name.removesuffix("weight")
    found = {
        f"{stem}qweight": _packed(codes.T, bits, 0),
        f"{stem}qzeros": _packed(zeros.T - stored, bits, -1),
        f"{stem}scales": scales.T.contiguous(),
        f"{stem}g_idx": indices.int(),
    }
    return found, _numbers(codes, scales, zeros, indices)


def awq(name, shape, generator):
    groups = shape[1] // GROUP
    codes, scales, zeros = _drawn(shape, 4, generator, groups, torch.float16, signed=False)
    order = [0, 2, 4, 6, 1, 3, 5, 7]  # of eight outputs, from the lowest bits up

    def ordered(values):
        return values.reshape(len(values), -1, 8)[..., order].reshape(len(values), -1)

    stem = name.removesuffix("weight")
    found = {
        f"{stem}qweight": _packed(ordered(codes.T), 4, -1),
        f"{stem}qzeros": _packed(ordered(zeros.T), 4, -1),
        f"{stem}scales": scales.T.contiguous(),
    }
    return found, _numbers(codes, scales, zeros, torch.arange(shape[1]) // GROUP)


def float8(name, shape, generator, *, strategy):
    codes = (torch.randn(shape, generator=generator) * 50).clamp(-448, 448).to(_E4M3)
    if strategy == "block":
        rows, columns = -(-shape[0] // 128), -(-shape[1] // 128)
        scales = (torch.rand(rows, columns, generator=generator) + 0.5) / 800
        spread = scales.repeat_interleave(128, 0)[: shape[0]].repeat_interleave(128, 1)[:, : shape[1]]
        return {name: codes, f"{name}_scale_inv": scales}, codes.float() * spread
    sizes = (1,) if strategy == "tensor" else (shape[0], 1)
    scales = ((torch.rand(sizes, generator=generator) + 0.5) / 800).bfloat16()
    return {name: codes, f"{name}_scale": scales}, codes.float() * scales.float()


def compressed(form="pack-quantized", **weights):
    group = {"targets": ["Linear"], "weights": {"type": "int", "symmetric": True, **weights}}
    if form == "float-quantized":
        group |= {"input_activations": {"dynamic": True, "num_bits": 8, "type": "float"}}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
_GROUPED = {"num_bits": 4, "strategy": "group", "group_size": GROUP}

SCHEMES = {
    "W4A16": (compressed(**_GROUPED), pack_quantized, {}, "s4_bf16"),
    "W4A16, float16 scales": (compressed(**_GROUPED), pack_quantized, {"scale_type": torch.float16}, "q4_0"),
    "W4A16, codes of 0": (
        compressed(**{**_GROUPED, "symmetric": False}),
        pack_quantized,
        {"signed": False},
        "u4_bf16",
    ),
    "W4A16, a scale a row": (
        compressed(num_bits=4, strategy="channel"),
        pack_quantized,
        {"size": None},
        "s4_bf16",
    ),
    "W8A16": (
        compressed(num_bits=8, strategy="channel"),
        pack_quantized,
        {"bits": 8, "size": None},
        "s8_bf16",
    ),
    "W8A16, float16 scales": (
        compressed(**{**_GROUPED, "num_bits": 8}),
        pack_quantized,
        {"bits": 8, "scale_type": torch.float16},
        "q8_0",
    ),
    "GPTQ": (GPTQ, gptq, {}, "u4_f16"),
    "GPTQ, codes of 0": (GPTQ | {"sym": False}, gptq, {"signed": False}, "u4_f16"),
    "GPTQ v2": (GPTQ | {"checkpoint_format": "gptq_v2"}, gptq, {"stored": 0, "signed": False}, "u4_f16"),
    "GPTQ, bfloat16 scales": (GPTQ, gptq, {"scale_type": torch.bfloat16}, "u4_bf16"),
    "GPTQ, desc_act": (GPTQ | {"desc_act": True}, gptq, {"scattered": True}, None),
    "GPTQ, 8 bits": (GPTQ | {"bits": 8}, gptq, {"bits": 8}, None),
    "AWQ": (AWQ, awq, {}, "u4_f16"),
    "FP8 by block": (
        {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "weight_block_size": [128, 128],
            "activation_scheme": "dynamic",
        },
        float8,
        {"strategy": "block"},
        None,
    ),
    "FP8 by channel": (
        compressed("float-quantized", type="float", num_bits=8, strategy="channel"),
        float8,
        {"strategy": "channel"},
        None,
    ),
    "FP8 by tensor": (
        compressed("float-quantized", type="float", num_bits=8, strategy="tensor"),
        float8,
        {"strategy": "tensor"},
        None,
    ),
}
"""By name: the configuration, what writes a matrix, its options, and the kernel's format of it."""


def quantize(folder, scheme, *, seed=0):
    """Rewrite the matrices of the layers in `folder`; return all numbers by name."""
    config, write, options, _ = SCHEMES[scheme]
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": config}))
    generator = torch.Generator().manual_seed(seed)
    kept, numbers = {}, {}
    for name, values in load_file(folder / "model.safetensors").items():
        if "_proj" not in name or values.ndim < 2:
            kept[name] = numbers[name] = values
            continue
        found, numbers[name] = write(name, tuple(values.shape), generator, **options)
        kept |= found
    save_file(kept, folder / "model.safetensors")
    return numbers
