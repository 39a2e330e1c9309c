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
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from fairlead._cext.inputbatch import InputBatch
from fairlead.engine.cache import KVCache
from fairlead.engine.device_forward import DeviceForward
from fairlead.engine.engine import Engine
from fairlead.engine.runner import ModelRunner
from fairlead.job import Sampling
from fairlead.models.architecture import ArchitectureSpec
from fairlead.models.config import CheckpointConfig
from fairlead.models.layers import Embedding
from fairlead.models.linear import Linear, Quantization
from fairlead.models.llama import read_llama
from fairlead.models.network import Network
from fairlead.models.quantization import find_quantization
from fairlead.models.quantization.none import NONE
from fairlead.models.weights import Weights

COMMON = {"rms_norm_eps": 1e-5, "hidden_act": "silu", "rope_theta": 500000.0, "tie_word_embeddings": False}
SHAPES: dict[str, dict[str, Any]] = {
    "8b": {
        **COMMON,
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "vocab_size": 128256,
        "max_position_embeddings": 16384,
    },
    "0.5b": {
        **COMMON,
        "num_hidden_layers": 24,
        "hidden_size": 896,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "intermediate_size": 4864,
        "vocab_size": 151936,
        "max_position_embeddings": 16384,
    },
    "tiny": {
        **COMMON,
        "num_hidden_layers": 1,
        "hidden_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 64,
        "vocab_size": 64,
        "max_position_embeddings": 256,
    },
}


class Plan(NamedTuple):
    """What to measure: (batch, context) of decodes, lengths of prompts, and the load for the peer."""

    decodes: tuple[tuple[int, int], ...] = ((1, 512), (1, 4096), (8, 1024), (64, 512), (64, 2048))
    decode_steps: int = 128
    prompts: tuple[int, ...] = (512, 2048, 8192)
    streams: int = 64
    prompt: int = 128
    output: int = 128
    slots: int = 64
    max_batched_tokens: int = 2048


TINY = Plan(((1, 20), (3, 5)), 8, (20,), 2, 8, 3, 4, 16)


class Roofline(NamedTuple):
    """The measured limits of the device."""

    bytes_per_s: float
    operations_per_s: float


class RandomWeights(Weights):
    """Random tensors, created on the device on request, instead of a checkpoint's."""

    def __init__(self, dtype: torch.dtype, device: torch.device, quantization: Quantization) -> None:
        self.dtype, self.device = dtype, device
        self.bytes_placed = 0
        self._quantization = quantization

    def rename(self, rule: Callable[[str], str | None]) -> None:
        """Do nothing: every name exists."""

    def tensor(self, name: str, *shape: int) -> Tensor:
        made = torch.empty(shape, dtype=self.dtype, device=self.device)
        self.bytes_placed += made.nbytes
        return made.fill_(1) if name.endswith("norm.weight") else made.normal_(0, 0.02)

    def stack(self, rows: Mapping[str, int], rest: Sequence[int] = ()) -> Tensor:
        return self.tensor("+".join(rows), sum(rows.values()), *rest)

    def linear(
        self, rows: Mapping[str, int], inputs: int, *, bias: bool = False, quantized: bool = True
    ) -> Linear:
        assert not bias
        weight = self.stack(rows, (inputs,))
        linear = (self._quantization if quantized else NONE).make(weight, None)
        self.bytes_placed += linear.nbytes - weight.nbytes
        return linear

    def vocabulary(
        self, name: str, head: str | None, vocab_size: int, hidden: int, *, tied: bool
    ) -> tuple[Embedding, Linear | None]:
        assert head is not None
        assert not tied
        table = self.tensor(name, vocab_size, hidden)
        return Embedding(table), self.linear({head: vocab_size}, hidden, quantized=False)


class Event(NamedTuple):
    """The end of a step: its time, its rows, and how many of them decoded and how many sampled."""

    at_s: float
    rows: int
    decodes: int
    samples: int


class Served:
    """A model and its engine. As in service, a step is launched before the previous one has ended."""

    def __init__(self, shape: ArchitectureSpec, weights: RandomWeights, plan: Plan) -> None:
        self.plan, self.shape, self.device = plan, shape, weights.device
        self._model = Network(shape, weights)
        self.weight_bytes = weights.bytes_placed
        longest = max(context + plan.decode_steps + 16 for _, context in plan.decodes)
        longest = min(max(longest, *(prompt + 16 for prompt in plan.prompts)), shape.max_positions)
        tokens = max(batch * (context + plan.decode_steps + 32) for batch, context in plan.decodes)
        tokens = max(tokens, longest, plan.streams * (plan.prompt + plan.output + 32))
        self._blocks = -(-tokens // 16) + plan.slots
        cache = KVCache(
            shape, blocks=(self._blocks,), block_size=16, dtype=weights.dtype, device=weights.device
        )
        on_cuda = weights.device.type == "cuda"
        forward = DeviceForward.on_cuda(self._model, cache) if on_cuda else DeviceForward(self._model, cache)
        began_s = time.perf_counter()
        forward.prepare(
            slots=plan.slots,
            max_batch=plan.slots,
            max_batched_tokens=plan.max_batched_tokens,
            max_model_len=longest,
        )
        synchronize(self.device)
        self.prepared_s = time.perf_counter() - began_s
        size = InputBatch.arena_size(
            slots=plan.slots,
            max_batched_tokens=plan.max_batched_tokens,
            max_model_len=longest + 1,
            block_size=16,
        )
        pinned = (torch.empty(size, dtype=torch.uint8, pin_memory=on_cuda) for _ in range(2))
        self._longest = longest
        self._runner = ModelRunner(
            forward, (), overlaps=on_cuda, arenas=[arena.numpy().data for arena in pinned]
        )
        self.kernel = forward.kernel

    def run(self, prompts: Sequence[int], output: int) -> list[Event]:
        """Generate `output` tokens for prompts of these lengths; return one event for each step."""
        engine = Engine(
            self._runner,
            slots=self.plan.slots,
            max_batched_tokens=self.plan.max_batched_tokens,
            max_model_len=self._longest,
            max_batch=self.plan.slots,
            blocks_total=self._blocks,
            block_size=16,
            vocab_size=self.shape.vocab_size,
            eos_token_ids=(),
            draw_seed=lambda: 0,
            prefix_cache=False,
        )
        sampling = Sampling(max_tokens=output, temperature=0.0, ignore_eos=True)
        vocabulary = self.shape.vocab_size
        for key, length in enumerate(prompts):
            ids = [(7 * key + 13 * index) % vocabulary for index in range(length)]
            engine.submit(key, ids, sampling)
        synchronize(self.device)
        events = [Event(time.perf_counter(), 0, 0, 0)]
        pending_step = None
        while True:
            step = engine.plan(time.monotonic())
            launched = None
            if step is not None:
                counts = step.rows, step.decodes, step.samples
                launched = step, self._runner.launch(step, engine.batch), counts
                if not self._runner.overlaps:
                    launched, pending_step = None, launched
            if pending_step is not None:
                before, pending, counts = pending_step
                picks = pending.wait()
                events.append(Event(time.perf_counter(), *counts))
                engine.commit(before, picks)
            elif step is None:
                return events
            pending_step = launched


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


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


def decode_steps_s(events: Sequence[Event], batch: int) -> list[float]:
    """Return the seconds of steps in which all sequences decoded, as in the step before."""
    return [
        after.at_s - before.at_s
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
            events = served.run([context] * batch, served.plan.decode_steps)
            medians.append(statistics.median(decode_steps_s(events, batch)))
        step_s = statistics.median(medians)
        middle = context + served.plan.decode_steps // 2
        cached = batch * middle * served.shape.kv_elements_per_token[0] * 2
        least_s = (served.weight_bytes - table_bytes + cached) / roofline.bytes_per_s
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
    quantization = find_quantization(options.quantization)
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
