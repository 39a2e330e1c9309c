"""Measure how fast a model runs on this GPU, compared with the GPU's roofline.

    python bench/gpu.py [--shape 8b] [--quantization fp8] [--rounds 3] [--no-peer]
        [--json bench/results/gpu.json]

Creates a bfloat16 model of a well-known shape with random weights on the device, without a checkpoint, and
runs it through the engine: scheduler, batch, runner, kernels, graphs and greedy sampling, with overlapping
steps as in service. The process boundary and HTTP are not included.

Decode: the median time between the ends of steps in which all sequences decode. Prefill: one prompt, from its
submission to its first token. The roofline is measured in the same run: bytes per second of a copy, read and
written, and operations per second of a square matrix product. A decode step must read the weights and all
keys and values once; a prefill must do its multiplications. `of_roofline` is the time of that at the
roofline, divided by the measured time.

The peer is transformers' continuous batching on a model of the same shape, in the same run: 64 prompts of 128
tokens at once, with 128 output tokens each. The second of two runs counts, on both sides.
`--device cpu --shape tiny` with TRITON_INTERPRET=1 only tests that the benchmark runs.
"""

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch

from fairlead.engine.models.quantization import find_format
from fairlead.language.checkpoint.architecture import ArchitectureSpec
from fairlead.language.checkpoint.config import CheckpointConfig
from fairlead.language.checkpoint.llama import read_llama
from gpu_model import SHAPES, TINY, Event, Plan, RandomWeights, Served, synchronize


class Roofline(NamedTuple):
    """The measured limits of the device."""

    bytes_per_s: float
    operations_per_s: float


def timed(work: Callable[[], object], device: torch.device, times: int) -> float:
    """Return the median seconds of `work`, after two warm-up calls."""
    times_s = []
    for _ in range(times + 2):
        synchronize(device)
        began_s = time.perf_counter()
        work()
        synchronize(device)
        times_s.append(time.perf_counter() - began_s)
    return statistics.median(times_s[2:])


def measure_roofline(device: torch.device, *, small: bool) -> Roofline:
    """Measure a copy much larger than the caches, and a product of random square matrices."""
    count, side = (1 << 20, 256) if small else (1 << 31, 8192)
    halves = torch.ones((2, count), dtype=torch.uint8, device=device)
    left, right = torch.randn(2, side, side, device=device).bfloat16()
    return Roofline(
        2 * count / timed(lambda: halves[0].copy_(halves[1]), device, 10),
        2 * side**3 / timed(lambda: left @ right, device, 10),
    )


def decode_steps(events: Sequence[Event], batch: int) -> list[tuple[float, int]]:
    """Return the seconds and cached tokens of steps in which all sequences decoded, as in the step before."""
    return [
        (after.at_s - before.at_s, after.cached)
        for before, after in pairwise(events)
        if before.decodes == after.decodes == after.rows == batch
    ]


def count_parameters(shape: ArchitectureSpec) -> tuple[int, int]:
    """Return the numbers of parameters in the layers' matrices and in the head."""
    qkv = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    layer = shape.hidden_size * (qkv + shape.heads * shape.head_dim + 3 * shape.intermediate_size)
    return shape.layers * layer, shape.vocab_size * shape.hidden_size


def measure_decodes(served: Served, roofline: Roofline, rounds: int) -> list[dict[str, Any]]:
    # A step reads only a few rows of the embedding, so its size does not count.
    table_bytes = served.shape.vocab_size * served.shape.hidden_size * 2
    results = []
    for batch, context in served.plan.decodes:
        medians = []
        for _ in range(rounds):
            events = served.run([context] * batch, served.plan.output_of(batch))
            times_s, cached = zip(*decode_steps(events, batch), strict=True)
            medians.append(statistics.median(times_s))
        step_s = statistics.median(medians)
        cached_bytes = statistics.mean(cached) * served.shape.kv_elements_per_token[0] * 2
        least_s = (served.weight_bytes - table_bytes + cached_bytes) / roofline.bytes_per_s
        results.append(
            {
                "decode": batch,
                "context": context,
                "step_ms": round(1e3 * step_s, 3),
                "rounds_ms": [round(1e3 * each, 3) for each in medians],
                "tokens_per_s": round(batch / step_s, 1),
                "of_roofline": round(least_s / step_s, 3),
            }
        )
        print(results[-1], flush=True)
    return results


def measure_prefills(served: Served, roofline: Roofline, rounds: int) -> list[dict[str, Any]]:
    shape, results = served.shape, []
    layers, head = count_parameters(shape)
    for prompt in served.plan.prompts:
        times_s = []
        for _ in range(rounds + 1):
            events = served.run([prompt], 1)
            times_s.append(next(event.at_s for event in events if event.samples) - events[0].at_s)
        first_s = statistics.median(times_s[1:])
        pairs = prompt * (prompt + 1) / 2
        operations = 2 * (layers * prompt + head) + 4 * pairs * shape.heads * shape.head_dim * shape.layers
        results.append(
            {
                "prefill": prompt,
                "first_token_ms": round(1e3 * first_s, 2),
                "tokens_per_s": round(prompt / first_s, 1),
                "of_roofline": round(operations / roofline.operations_per_s / first_s, 3),
            }
        )
        print(results[-1], flush=True)
    return results


def throughput(served: Served) -> float:
    """Return output tokens/s under the load compared with the peer."""
    plan = served.plan
    for _ in range(2):
        events = served.run([plan.prompt] * plan.streams, plan.output)
    return plan.streams * plan.output / (events[-1].at_s - events[0].at_s)


def peer_throughput(config: dict[str, Any], plan: Plan, device: torch.device) -> float:
    """Return output tokens/s of transformers' continuous batching with its default settings."""
    import transformers

    torch.set_default_dtype(torch.bfloat16)
    try:
        with device:
            peer_model = transformers.LlamaForCausalLM(
                transformers.LlamaConfig(**config, bos_token_id=None, eos_token_id=None, pad_token_id=0)
            ).eval()
    finally:
        torch.set_default_dtype(torch.float32)
    vocabulary = config["vocab_size"]
    prompts = [
        [(7 * key + 13 * index) % vocabulary for index in range(plan.prompt)] for key in range(plan.streams)
    ]
    generation = transformers.GenerationConfig(
        max_new_tokens=plan.output, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    with peer_model.continuous_batching_context_manager(generation_config=generation, block=True) as manager:
        best = 0.0
        for _ in range(2):
            synchronize(device)
            began_s = time.perf_counter()
            manager.add_requests(prompts, max_new_tokens=plan.output)
            tokens = 0
            for _ in prompts:
                result = manager.get_result(timeout=300)
                if result is None:
                    raise RuntimeError("the peer stopped without an answer")
                tokens += len(result.generated_tokens)
            best = tokens / (time.perf_counter() - began_s)
    return best


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="8b", help="shape of the model")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quantization", choices=("fp8",))
    parser.add_argument("--rounds", type=int, default=3, help="rounds of which the median counts")
    parser.add_argument("--no-peer", dest="peer", action="store_false", help="skip transformers")
    parser.add_argument("--json", type=Path, help="write the result to this file")
    options = parser.parse_args()
    device, config = torch.device(options.device), SHAPES[options.shape]
    plan = TINY if options.shape == "tiny" else Plan()
    shape = read_llama(CheckpointConfig(Path("config.json"), config))
    on_cuda = device.type == "cuda"
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device) if on_cuda else "cpu",
        "torch": str(torch.__version__),
        "shape": options.shape,
        "quantization": options.quantization,
    }
    quantization = find_format(options.quantization)
    dtype = torch.bfloat16 if on_cuda else torch.float32
    with torch.inference_mode():
        roofline = measure_roofline(device, small=not on_cuda)
        result |= {
            "copy_tb_per_s": round(roofline.bytes_per_s / 1e12, 3),
            "multiply_tflop_per_s": round(roofline.operations_per_s / 1e12, 1),
        }
        print(result, flush=True)
        served = Served(shape, RandomWeights(dtype, device, quantization), plan)
        result |= {"kernel": served.kernel, "prepared_s": round(served.prepared_s, 1)}
        result["decodes"] = measure_decodes(served, roofline, options.rounds)
        result["prefills"] = measure_prefills(served, roofline, options.rounds)
        result["output_tokens_per_s"] = round(throughput(served), 1)
        print("64 streams:", result["output_tokens_per_s"], "tokens/s", flush=True)
    del served
    gc.collect()
    if on_cuda:
        torch.cuda.empty_cache()
    if options.peer:
        try:
            result["peer_tokens_per_s"] = round(peer_throughput(config, plan, device), 1)
            result["over_peer"] = round(result["output_tokens_per_s"] / result["peer_tokens_per_s"], 2)
        except Exception as error:  # noqa: BLE001  its version may raise anything
            result["peer_problem"] = f"{type(error).__name__}: {error}"
        print({key: value for key, value in result.items() if "peer" in key}, flush=True)
    if options.json:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
    print(json.dumps({key: value for key, value in result.items() if not isinstance(value, list)}))


if __name__ == "__main__":
    main()
