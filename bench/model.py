"""Measure how fast a model runs on this CPU, compared with the machine's roofline.

    OMP_WAIT_POLICY=PASSIVE python bench/model.py [--models smollm2-135m qwen2.5-0.5b] [--dtype bfloat16]
        [--threads 2] [--rounds 3] [--no-torch] [--variant avx512bf16] [--quantization int4]
        [--stored q4_0 q4_k_m] [--contexts 160] [--batches 1 8 32] [--prompts 512]
        [--json bench/results/model.json]

Models with the shapes of real ones and random weights are saved as checkpoints and loaded as in service, by
the compiled step and by torch. Decode: tokens/s by batch and context, the median of the rounds' medians.
Prefill: tokens/s of one prompt. The two implementations take turns, so that other load affects both.

With `--stored`, the kernel also runs the shape with matrices of random blocks of a GGUF's types. q4_k_m is
the mix of Q4_K and Q6_K of llama.cpp's files; where rows are no multiple of 256, Q5_0 and Q8_0 instead.

The roofline is measured between the rounds, and its median is used: bytes per second read from memory larger
than the caches, and operations per second of torch's square matrix product. A decode step must read the
weights and all keys and values once; a prefill must do its multiplications. `of_roofline` is the time of that
at the roofline, divided by the measured time. It may exceed 1 for a prefill, because the kernel's matrix
product is faster than torch's.
"""

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from safetensors.torch import save_file

from fairlead._cext.cpustep import formats, read_rate
from fairlead.engine.backend import Forward
from fairlead.engine.cache import KVCache
from fairlead.engine.cpu_step import BLOCK_SIZE, CpuStep, make_model
from fairlead.engine.forward import TorchForward
from fairlead.engine.inputs import Inputs
from fairlead.engine.models.network import Network
from fairlead.engine.models.weights import Weights
from fairlead.language.checkpoint.architecture import ArchitectureSpec
from fairlead.language.checkpoint.checkpoint import open_checkpoint
from fairlead.language.checkpoint.config import CheckpointConfig
from fairlead.language.checkpoint.gguf.header import TYPES
from fairlead.language.checkpoint.registry import read_built_in

COMMON = {
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
}
MODELS: dict[str, dict[str, Any]] = {
    "smollm2-135m": {
        **COMMON,
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 30,
        "hidden_size": 576,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 1536,
        "vocab_size": 49152,
        "rope_theta": 100000.0,
    },
    "qwen2.5-0.5b": {
        **COMMON,
        "architectures": ["Qwen2ForCausalLM"],
        "num_hidden_layers": 24,
        "hidden_size": 896,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "intermediate_size": 4864,
        "vocab_size": 151936,
        "rope_theta": 1000000.0,
    },
}
BATCHES = (1, 8, 32)
CONTEXTS = (160, 1024)
PROMPTS = (128, 512)
STEPS = 12
MAX_TOKENS = 512
MATRICES = ("query", "key", "value", "output", "gate", "up", "down")
BLOCK_TYPES = {kind.name.lower(): kind for kind in TYPES.values() if kind.elements > 1}
FALLBACKS = {"q4_k": "q5_0", "q6_k": "q8_0"}
SCALE_BYTES = {"q2_k": (81, 83), "q3_k": (109,), "q6_k": (209,), "mxfp4": (0,)}
"""The upper bytes of a block's scales, which are to be small; of other types, bytes 1 and 3 at most."""


class Roofline(NamedTuple):
    """The measured limits of the machine."""

    read_bytes_per_s: float
    operations_per_s: float


class RooflineProbe:
    """Data to measure the roofline with: memory much larger than the caches, and square matrices."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._left, self._right = (torch.randn(2048, 2048).to(dtype) for _ in range(2))

    def measure(self) -> Roofline:
        """Return the best of a few measurements; takes about 0.2 s."""
        products = []
        for _ in range(3):
            start = time.perf_counter()
            self._left @ self._right
            products.append(2 * 2048**3 / (time.perf_counter() - start))
        return Roofline(read_rate(1 << 29, torch.get_num_threads()), max(products))


def save_random(config: dict[str, Any], directory: Path, dtype: torch.dtype) -> None:
    """Save a checkpoint with this `config.json`. Its numbers repeat; this does not affect the speed."""
    (directory / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)
    values = (torch.randn(1 << 20, generator=generator) * 0.03).to(dtype)
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    kv = hidden // config["num_attention_heads"] * config["num_key_value_heads"]

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return values.repeat(-(-rows * columns // len(values)))[: rows * columns].view(rows, columns).clone()

    tensors = {"model.embed_tokens.weight": matrix(config["vocab_size"], hidden)}
    tensors["model.norm.weight"] = torch.ones(hidden, dtype=dtype)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        for name, rows in (("q", hidden), ("k", kv), ("v", kv), ("o", hidden)):
            tensors[f"{prefix}.self_attn.{name}_proj.weight"] = matrix(rows, hidden)
            if config["architectures"] == ["Qwen2ForCausalLM"] and name != "o":
                tensors[f"{prefix}.self_attn.{name}_proj.bias"] = torch.zeros(rows, dtype=dtype)
        for name, rows, columns in (("gate", inner, hidden), ("up", inner, hidden), ("down", hidden, inner)):
            tensors[f"{prefix}.mlp.{name}_proj.weight"] = matrix(rows, columns)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{name}.weight"] = torch.ones(hidden, dtype=dtype)
    save_file(tensors, directory / "model.safetensors")


class Implementation:
    """An implementation under test, with memory for `sequences` × `length` tokens in scattered blocks."""

    def __init__(self, name: str, forward: Forward, sequences: int, length: int) -> None:
        self.name = name
        self.forward = forward
        columns = -(-length // BLOCK_SIZE)
        blocks = np.random.default_rng(0).permutation(sequences * columns)
        self.table = blocks.astype(np.int32).reshape(sequences, columns)

    def step(self, sequences: int, start: int, count: int, *, sample: bool) -> float:
        """Compute `count` tokens of each sequence, from position `start` on; return the seconds."""
        positions = np.tile(np.arange(start, start + count, dtype=np.int32), sequences)
        rows = np.repeat(np.arange(sequences), count)
        cache_slots = self.table[rows, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
        inputs = Inputs(
            token_ids=np.full(len(rows), 5, dtype=np.int32),
            positions=positions,
            slot_mapping=(cache_slots.astype(np.int32),),
            query_starts=np.arange(0, len(rows) + 1, count, dtype=np.int32),
            sequence_lengths=np.full(sequences, start + count, dtype=np.int32),
            slots=np.arange(sequences, dtype=np.int32),
            sample_tokens=np.arange(1, sequences + 1 if sample else 1, dtype=np.int32) * count - 1,
            tables=(self.table,),
            decodes=sequences if count == 1 else 0,
        )
        began = time.perf_counter()
        with torch.inference_mode():
            self.forward(inputs)
        return time.perf_counter() - began

    def fill(self, sequences: int, length: int) -> None:
        chunk = max(1, MAX_TOKENS // sequences)
        for start in range(0, length, chunk):
            self.step(sequences, start, min(chunk, length - start), sample=False)

    def decode(self, sequences: int, context: int) -> float:
        """Return the median seconds of a few decode steps at about `context` tokens."""
        return statistics.median(
            self.step(sequences, context + number, 1, sample=True) for number in range(STEPS)
        )


def read_spec(directory: Path) -> ArchitectureSpec:
    spec = read_built_in(CheckpointConfig.read(directory / "config.json"))
    assert spec is not None
    return spec


def load_implementations(
    spec: ArchitectureSpec, directory: Path, options: argparse.Namespace
) -> list[Implementation]:
    dtype, device = getattr(torch, options.dtype), torch.device("cpu")
    sequences, length = max(options.batches), max([*options.contexts, *options.prompts]) + STEPS
    blocks = sequences * -(-length // BLOCK_SIZE)
    with Weights(open_checkpoint(directory), dtype=dtype, device=device) as weights:
        step = CpuStep.load(
            spec,
            weights,
            threads=options.threads,
            max_batched_tokens=MAX_TOKENS,
            variant=options.variant,
            quantization=options.quantization,
        )
    step.allocate_cache([blocks])
    name = ", ".join(filter(None, ("kernel", step.model.variant, options.quantization)))
    implementations = [Implementation(name, step, sequences, length)]
    for form in options.stored:
        narrow = load_stored(spec, form, options)
        narrow.allocate_cache([blocks])
        implementations.append(
            Implementation(f"kernel, {narrow.model.variant}, {form}", narrow, sequences, length)
        )
    if options.torch:
        with Weights(open_checkpoint(directory), dtype=dtype, device=device) as weights:
            model = Network(spec, weights)
        cache = KVCache(spec, blocks=(blocks,), block_size=BLOCK_SIZE, dtype=dtype, device=device)
        implementations.append(Implementation("torch", TorchForward(model, cache), sequences, length))
    return implementations


def stored_type(form: str, layer: int | None, name: str, inputs: int) -> str:
    """Return the type of a matrix in a file of this form."""
    if form == "q4_k_m":
        form = "q6_k" if layer is None or (name in ("value", "down") and layer % 2 == 0) else "q4_k"
    return FALLBACKS[form] if BLOCK_TYPES[form].elements == 256 and inputs % 256 else form


def load_stored(spec: ArchitectureSpec, form: str, options: argparse.Namespace) -> CpuStep:
    """Return the kernel with random blocks of a GGUF's types."""
    names: list[tuple[int | None, str]] = [(None, "embedding")]
    names += [(layer, name) for layer in range(spec.layers) for name in MATRICES]
    sizes = {"down": spec.intermediate_size, "output": spec.heads * spec.head_dim}
    stored = {key: stored_type(form, *key, sizes.get(key[1], spec.hidden_size)) for key in names}
    model = make_model(
        spec,
        options.dtype,
        threads=options.threads,
        max_batched_tokens=MAX_TOKENS,
        variant=options.variant,
        stored=stored,
    )
    rng = np.random.default_rng(0)
    for layer, name in model.missing():
        shape = model.rows(name)
        if (layer, name) not in stored:
            model.pack(name, np.ones(shape, np.float32), layer=layer)
            continue
        kind = BLOCK_TYPES[stored[layer, name]]
        raw = rng.integers(0, 256, (shape[0], shape[1] // kind.elements, kind.nbytes), dtype=np.uint8)
        pair = (1, 3) if kind.name in ("Q4_1", "Q5_1", "Q4_K", "Q5_K") else (1,)
        for at in SCALE_BYTES.get(stored[layer, name], pair):
            raw[..., at] = 115 if kind.name == "MXFP4" else 0x10
        model.pack(name, raw.reshape(shape[0], -1), layer=layer)
    return CpuStep(model, spec)


def count_parameters(shape: ArchitectureSpec) -> tuple[int, int]:
    """Return the numbers of parameters in the layers' matrices and in the head."""
    qkv = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    layer = shape.hidden_size * (qkv + shape.heads * shape.head_dim + 3 * shape.intermediate_size)
    return shape.layers * layer, shape.vocab_size * shape.hidden_size


def roofline_s(
    shape: ArchitectureSpec, roofline: Roofline, itemsize: int, rows: int, length: int, samples: int
) -> float:
    """Return the seconds of a step at the roofline: `rows` tokens of `samples` sequences of `length`."""
    layers, head = count_parameters(shape)
    cached = samples * length * shape.kv_elements_per_token[0]
    pairs = samples * (length if rows == samples else length * length / 2)
    operations = (
        2 * (layers * rows + head * samples) + 4 * pairs * shape.heads * shape.head_dim * shape.layers
    )
    read = (layers + head + cached) * itemsize
    return max(read / roofline.read_bytes_per_s, operations / roofline.operations_per_s)


def measure(name: str, options: argparse.Namespace, machine: RooflineProbe) -> list[dict[str, Any]]:
    results = []
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        save_random(MODELS[name], directory, getattr(torch, options.dtype))
        shape = read_spec(directory)
        implementations = load_implementations(shape, directory, options)
        itemsize = getattr(torch, options.dtype).itemsize

        def record(
            what: dict[str, Any], run: Callable[[Implementation], float], rows: int, length: int, samples: int
        ) -> None:
            taken: dict[str, list[float]] = {each.name: [] for each in implementations}
            rooflines = []
            for _ in range(options.rounds):
                rooflines.append(machine.measure())
                for each in implementations:
                    taken[each.name].append(run(each))
            roofline = Roofline(*map(statistics.median, zip(*rooflines, strict=True)))
            limit_s = roofline_s(shape, roofline, itemsize, rows, length, samples)
            for implementation, seconds in taken.items():
                median = statistics.median(seconds)
                result = {
                    "model": name,
                    "way": implementation,
                    **what,
                    "tokens_per_s": round(rows / median, 1),
                    "best_tokens_per_s": round(rows / min(seconds), 1),
                    "of_roofline": round(limit_s / median, 3),
                    "read_gb_per_s": round(roofline.read_bytes_per_s / 1e9, 1),
                    "multiply_tflop_per_s": round(roofline.operations_per_s / 1e12, 2),
                }
                results.append(result)
                print(*(f"{key} {value}" for key, value in result.items()), sep="  ", flush=True)

        for context in options.contexts:
            for batch in options.batches:
                for each in implementations:
                    each.fill(batch, context)
                record(
                    {"decode": batch, "context": context},
                    partial(Implementation.decode, sequences=batch, context=context),
                    batch,
                    context,
                    batch,
                )
        for prompt in options.prompts:
            record(
                {"prefill": prompt},
                partial(Implementation.step, sequences=1, start=0, count=prompt, sample=True),
                prompt,
                prompt,
                1,
            )
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="models to measure")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="threads that compute")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of which the median counts")
    parser.add_argument("--variant", help="variant of the kernel; default: the best one")
    parser.add_argument("--quantization", choices=formats("bfloat16"), help="format of the kernel's weights")
    parser.add_argument(
        "--stored", nargs="+", choices=(*BLOCK_TYPES, "q4_k_m"), default=[], help="types of a GGUF"
    )
    parser.add_argument("--contexts", nargs="+", type=int, default=CONTEXTS, help="tokens before a decode")
    parser.add_argument("--batches", nargs="+", type=int, default=BATCHES, help="rows of a decode")
    parser.add_argument("--prompts", nargs="*", type=int, default=PROMPTS, help="tokens of a prefill")
    parser.add_argument("--no-torch", dest="torch", action="store_false", help="skip torch")
    parser.add_argument("--json", type=Path, help="write the result to this file")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    machine = RooflineProbe(getattr(torch, options.dtype))
    results = [result for name in options.models for result in measure(name, options, machine)]
    if options.json:
        document = {
            "machine": platform.processor() or platform.machine(),
            "load_at_the_end": os.getloadavg(),
            "threads": options.threads,
            "dtype": options.dtype,
            "results": results,
        }
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n")


if __name__ == "__main__":
    main()
