"""A model with random weights on a device and its engine, as `gpu.py` measures them."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fairlead._cext.inputbatch import InputBatch
from fairlead.base.job import Sampling
from fairlead.engine.cache import KVCache
from fairlead.engine.device_forward import DeviceForward
from fairlead.engine.engine import Engine
from fairlead.engine.models.layers import Embedding
from fairlead.engine.models.linear import Linear, WeightFormat
from fairlead.engine.models.network import Network
from fairlead.engine.models.quantization.none import NONE
from fairlead.engine.models.weights import Weights
from fairlead.engine.runner import ModelRunner
from fairlead.language.checkpoint.architecture import ArchitectureSpec

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
    """What to measure: (batch, context) of decodes, lengths of prompts, and the load for the peer.

    `decode_steps`: about how many steps there are in which the whole batch decodes.
    """

    decodes: tuple[tuple[int, int], ...] = ((1, 512), (1, 4096), (8, 1024), (64, 512), (64, 2048))
    decode_steps: int = 128
    prompts: tuple[int, ...] = (512, 2048, 8192)
    streams: int = 64
    prompt: int = 128
    output: int = 128
    slots: int = 64
    max_batched_tokens: int = 2048

    def output_of(self, batch: int) -> int:
        """Return how many tokens each must generate: the first ones decode while others are prefilled."""
        return self.decode_steps + 4 * batch


TINY = Plan(((1, 20), (3, 5)), 8, (20,), 2, 8, 3, 4, 16)


class RandomWeights(Weights):
    """Random tensors, created on the device on request, instead of a checkpoint's; always whole ones."""

    def __init__(self, dtype: torch.dtype, device: torch.device, quantization: WeightFormat) -> None:
        self.dtype, self.device = dtype, device
        self.bytes_placed = 0
        self._quantization = quantization

    def rename(self, rule: Callable[[str], str | None]) -> None:
        """Do nothing: every name exists."""

    def tensor(self, name: str, *shape: int) -> Tensor:
        made = torch.empty(shape, dtype=self.dtype, device=self.device)
        self.bytes_placed += made.nbytes
        return made.fill_(1) if name.endswith("norm.weight") else made.normal_(0, 0.02)

    def stack(self, rows: Mapping[str, int], rest: Sequence[int] = (), **_part: object) -> Tensor:
        return self.tensor("+".join(rows), sum(rows.values()), *rest)

    def linear(
        self,
        rows: Mapping[str, int],
        inputs: int,
        *,
        bias: bool = False,
        quantized: bool = True,
        **_part: object,
    ) -> Linear:
        assert not bias
        weight = self.stack(rows, (inputs,))
        form = self._quantization if quantized and self._quantization.suits(*weight.shape) else NONE
        linear = form.linear(form.pack(weight), inputs, None)
        self.bytes_placed += linear.nbytes - weight.nbytes
        return linear

    def vocabulary(
        self,
        name: str,
        head: str | None,
        vocab_size: int,
        hidden: int,
        *,
        tied: bool,
        **_part: object,
    ) -> tuple[Embedding, Linear | None]:
        assert head is not None
        assert not tied
        table = self.tensor(name, vocab_size, hidden)
        return Embedding(table), self.linear({head: vocab_size}, hidden, quantized=False)


class Event(NamedTuple):
    """The end of a step: its time, its rows, and how many of them decoded and how many sampled.

    `cached`: the number of tokens in the cache of all its sequences together.
    """

    at_s: float
    rows: int
    decodes: int
    samples: int
    cached: int


class Served:
    """A model and its engine. As in service, a step is launched before the previous one has ended."""

    def __init__(self, shape: ArchitectureSpec, weights: RandomWeights, plan: Plan) -> None:
        self.plan, self.shape, self.device = plan, shape, weights.device
        self._model = Network(shape, weights)
        self.weight_bytes = weights.bytes_placed
        longest = max(context + plan.output_of(batch) + 16 for batch, context in plan.decodes)
        longest = min(max(longest, *(prompt + 16 for prompt in plan.prompts)), shape.max_positions)
        tokens = max(batch * (context + plan.output_of(batch) + 32) for batch, context in plan.decodes)
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
        events = [Event(time.perf_counter(), 0, 0, 0, 0)]
        pending_step = None
        while True:
            step = engine.plan(time.monotonic())
            launched = None
            if step is not None:
                counts = step.rows, step.decodes, step.samples, sum(step.sequence_lengths)
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
