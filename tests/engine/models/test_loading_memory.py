"""The peak memory of loading one or two gigabytes, in its own process: the weights are there once."""

import json
import math
import struct
import subprocess
import sys

import pytest

VOCABULARY, HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM = 64_000, 2048, 5632, 16, 8, 128
SCRIPT = """
import json, sys, torch
from pathlib import Path
from fairlead.engine.loading import load_runner
from fairlead.base.messages import WorkerSpec

def peak():
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024

small = torch.ones(64, 64, dtype=torch.bfloat16)
torch.nn.functional.linear(small, small)  # what the libraries take for themselves
before, fractions = peak(), [0.0]
spec = WorkerSpec(path=sys.argv[1], device="cpu", dtype=sys.argv[2], quantization=sys.argv[4] or None)
loaded = load_runner(spec, lambda fraction, _: fractions.append(fraction), compiled=sys.argv[3] == "compiled")
steps = max(later - sooner for sooner, later in zip(fractions, fractions[1:]))
print(json.dumps([loaded.weight_bytes, peak() - before, steps, fractions[-1]]))
"""


def tensors_of(layers, *, tied):
    """Yield the names and shapes of a Llama's tensors."""
    yield "model.embed_tokens.weight", (VOCABULARY, HIDDEN)
    if not tied:
        yield "lm_head.weight", (VOCABULARY, HIDDEN)
    yield "model.norm.weight", (HIDDEN,)
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        for name, heads in {"q": HEADS, "k": KV_HEADS, "v": KV_HEADS}.items():
            yield f"{prefix}.self_attn.{name}_proj.weight", (heads * HEAD_DIM, HIDDEN)
        yield f"{prefix}.self_attn.o_proj.weight", (HIDDEN, HEADS * HEAD_DIM)
        yield f"{prefix}.mlp.gate_proj.weight", (INNER, HIDDEN)
        yield f"{prefix}.mlp.up_proj.weight", (INNER, HIDDEN)
        yield f"{prefix}.mlp.down_proj.weight", (HIDDEN, INNER)
        yield f"{prefix}.input_layernorm.weight", (HIDDEN,)
        yield f"{prefix}.post_attention_layernorm.weight", (HIDDEN,)


def write_checkpoint(directory, dtype, layers, *, tied, shards):
    """Write a checkpoint of zeros as sparse files, which take no disk space."""
    itemsize = {"BF16": 2, "F32": 4}[dtype]
    shapes = list(tensors_of(layers, tied=tied))
    places = {}
    for shard in range(shards):
        header, end = {}, 0
        for name, shape in shapes[shard::shards]:
            begin, end = end, end + itemsize * math.prod(shape)
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
        file = f"model-{shard}.safetensors" if shards > 1 else "model.safetensors"
        places |= dict.fromkeys(header, file)
        text = json.dumps(header).encode()
        with (directory / file).open("wb") as files_opened:
            files_opened.write(struct.pack("<Q", len(text)) + text)
            files_opened.truncate(8 + len(text) + end)
    if shards > 1:
        (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": tied,
    }
    (directory / "config.json").write_text(json.dumps(config))


@pytest.mark.slow
@pytest.mark.alone  # takes several gigabytes of memory, and every core
@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
@pytest.mark.parametrize(
    ("stored", "layers", "tied", "shards", "dtype", "ranges", "quantization"),
    [
        pytest.param("BF16", 16, False, 1, "bfloat16", "torch", "", marks=pytest.mark.nightly),
        pytest.param("BF16", 18, True, 3, "bfloat16", "torch", "", marks=pytest.mark.nightly),
        ("BF16", 18, True, 3, "bfloat16", "compiled", ""),
        pytest.param("F32", 8, True, 1, "float32", "torch", "", marks=pytest.mark.nightly),
        pytest.param("F32", 8, True, 1, "float32", "compiled", "", marks=pytest.mark.nightly),
        ("F32", 8, True, 2, "bfloat16", "torch", ""),
        pytest.param("F32", 18, True, 2, "bfloat16", "torch", "", marks=pytest.mark.nightly),
        ("BF16", 40, True, 3, "bfloat16", "compiled", "int8"),
    ],
)
def test_loading_gigabytes_takes_at_most_ten_percent_more(
    stored, layers, tied, shards, dtype, ranges, quantization, tmp_path
):
    write_checkpoint(tmp_path, stored, layers, tied=tied, shards=shards)
    command = [sys.executable, "-c", SCRIPT, str(tmp_path), dtype, ranges, quantization]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    assert ended.returncode == 0, ended.stderr
    weight_bytes, taken_bytes, step, last = json.loads(ended.stdout)
    assert weight_bytes > (1.9e9 if layers > 8 else 0.9e9)
    assert taken_bytes <= 1.1 * weight_bytes
    assert step <= 0.05
    assert last == 1
