"""A model on a CPU that runs each step as one call of our compiled kernel: a `forward.Forward` without torch.

Owns the translation of a family's switches and tensor names, and of a step's `Inputs`, to the kernel's
arguments. The kernel (`fairlead._cext.cpustep`) owns weights, cache and buffers. Promises that loading never
holds a second copy of more than one tensor, and `LoadFailed` for a tensor with an infinity or NaN.
"""

from collections.abc import Iterator, Sequence
from typing import Self

import msgspec
import numpy as np
import torch
from torch import Tensor

from fairlead._cext.cpustep import CpuModel, variants
from fairlead.engine.inputs import Inputs
from fairlead.errors import LoadFailed
from fairlead.models.gemma3 import Gemma3ForCausalLM
from fairlead.models.llama import LlamaForCausalLM
from fairlead.models.mistral import MistralForCausalLM
from fairlead.models.qwen2 import Qwen2ForCausalLM
from fairlead.models.qwen3 import Qwen3ForCausalLM
from fairlead.models.registry import Model, settle_names
from fairlead.models.rope import inverse_frequencies
from fairlead.models.shape import ModelShape
from fairlead.models.weights import Weights

BLOCK_SIZE = 16
"""Tokens per block; the kernel supports no other size."""
THREADS_AT_MOST = 256
"""The kernel's limit, as BLOCK_SIZE is."""


class Family(msgspec.Struct, frozen=True, kw_only=True):
    """A family's switches that its shape lacks. `offset_norms`: a norm multiplies by 1 + its weight."""

    query_key_norm: bool = False
    post_norms: bool = False
    offset_norms: bool = False
    scaled_embedding: bool = False


FAMILIES: dict[type[Model], Family] = {
    LlamaForCausalLM: Family(),
    MistralForCausalLM: Family(),
    Qwen2ForCausalLM: Family(),
    Qwen3ForCausalLM: Family(query_key_norm=True),
    Gemma3ForCausalLM: Family(query_key_norm=True, post_norms=True, offset_norms=True, scaled_embedding=True),
}

_PROJECTIONS = {
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "output": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


def supports(kind: type[Model], shape: ModelShape, dtype: torch.dtype) -> bool:
    """Return whether the kernel runs models of this class and shape in `dtype`."""
    head_fits = shape.head_dim <= 256 and shape.head_dim % 2 == 0
    return (
        kind in FAMILIES and dtype in {torch.float32, torch.bfloat16} and head_fits and len(shape.groups) <= 8
    )


class CpuStep:
    """`fairlead.engine.forward.Forward` by the kernel. Logits are in a buffer, valid until the next step."""

    device = torch.device("cpu")

    def __init__(self, model: CpuModel, shape: ModelShape) -> None:
        self.model = model
        self.shape = shape
        self.vocab_size = shape.vocab_size
        self._logits = torch.empty((0, shape.vocab_size))

    @classmethod
    def load(
        cls,
        kind: type[Model],
        shape: ModelShape,
        weights: Weights,
        *,
        threads: int,
        max_batched_tokens: int,
        variant: str | None = None,
        quantization: str | None = None,
    ) -> Self:
        """Take every tensor of `kind` and `shape` from `weights`, whose dtype is the one to compute in.

        `variant`: one of `cpustep.variants`, None for the fastest that this processor has. `quantization`:
        "int8" to round every matrix to 8 bits while loading, embedding and head included; else None.
        """
        family, dtype = FAMILIES[kind], str(weights.dtype).removeprefix("torch.")
        ropes = [shape.rope] + ([shape.window_rope] if shape.window_rope else [])
        scale = torch.tensor(shape.hidden_size**0.5, dtype=weights.dtype).item()  # rounded, as in training
        try:
            model = CpuModel(
                dtype=dtype,
                vocab_size=shape.vocab_size,
                hidden_size=shape.hidden_size,
                intermediate_size=shape.intermediate_size,
                layers=shape.layers,
                heads=shape.heads,
                kv_heads=shape.kv_heads,
                head_dim=shape.head_dim,
                norm_epsilon=shape.norm_epsilon,
                ropes=[(inverse_frequencies(rope, shape.head_dim).numpy(), rope.scale) for rope in ropes],
                windows=shape.groups,
                layer_groups=shape.layer_groups,
                layer_ropes=[int(len(ropes) > 1 and window is not None) for window in shape.windows],
                tied=shape.tied,
                qkv_bias=shape.qkv_bias,
                output_bias=shape.output_bias,
                mlp_bias=shape.mlp_bias,
                query_key_norm=family.query_key_norm,
                post_norms=family.post_norms,
                gelu=shape.activation == "gelu_tanh",
                embedding_scale=scale if family.scaled_embedding else 1.0,
                attention_scale=shape.attention_scale,
                attention_cap=shape.attention_cap or 0.0,
                logit_cap=shape.logit_cap or 0.0,
                threads=threads,
                max_batched_tokens=max_batched_tokens,
                variant=variant,
                quantization=quantization,
            )
        except ValueError as error:
            raise LoadFailed(f"{weights.listing}: the CPU kernel cannot run this model: {error}") from error
        settle_names(weights)
        if shape.tied and "lm_head.weight" in weights:  # some checkpoints keep a second copy
            weights.rename(lambda name: None if name == "lm_head.weight" else name)
        for layer, name, stored in tensors(model, family):
            tensor = weights.tensor(stored, *model.rows(name))
            try:
                _pack(model, layer, name, tensor, family)
            except ValueError as error:
                raise weights.fails(stored, f"cannot be used: {error}") from error
        return cls(model, shape)

    @property
    def kernel(self) -> str:
        """The instruction set that the kernel uses."""
        return self.model.variant

    @property
    def block_bytes(self) -> tuple[int, ...]:
        """Bytes of a block of each KV cache group over all its layers, padding included."""
        return tuple(self.model.block_bytes(group) for group in range(len(self.shape.groups)))

    def allocate_cache(self, blocks: Sequence[int]) -> None:
        """Make an empty KV cache with `blocks` blocks by group; memory is used once it is written."""
        try:
            self.model.allocate_cache(list(blocks))
        except ValueError as error:
            raise LoadFailed(f"the KV cache cannot be made: {error}") from error

    def with_cache(self, blocks: Sequence[int]) -> tuple[Self, int]:
        """Return itself with a cache of `blocks` blocks by group, and the cache's size in bytes."""
        self.allocate_cache(blocks)
        return self, sum(map(int.__mul__, blocks, self.block_bytes))

    def release(self, group: int, blocks: Sequence[int]) -> None:
        """Return the memory of these blocks of a KV cache group to the system. Ids must ascend."""
        self.model.release(group, blocks)

    def __call__(self, inputs: Inputs) -> Tensor:
        if len(inputs.scored_tokens):
            rows, order = _rows_of_scored(inputs)
            scored = torch.empty((len(order), self.vocab_size))
            self._run(rows, scored)
            return scored.index_select(0, order)
        samples = len(inputs.sample_rows)
        if samples > len(self._logits):
            # Reused, because new memory for 32 rows of 150,000 would cause page faults at each step.
            self._logits = torch.empty((max(samples, 2 * len(self._logits)), self.vocab_size))
        logits = self._logits[:samples]
        self._run(inputs, logits)
        return logits

    def _run(self, inputs: Inputs, logits: Tensor) -> None:
        self.model.run(
            inputs.token_ids.numpy(),
            inputs.positions.numpy(),
            [slots.numpy() for slots in inputs.slot_mapping],
            inputs.query_starts,
            inputs.sequence_lengths,
            inputs.slots,
            inputs.tables,
            inputs.sample_rows,
            logits.numpy(),
        )


def _rows_of_scored(inputs: Inputs) -> tuple[Inputs, Tensor]:
    """Return the step with each scored token in a row of its own, and the indices of the logits there.

    The kernel returns logits of rows' last tokens only. How rows are cut changes none of its results.
    """
    wanted = inputs.logit_tokens
    starts = inputs.query_starts
    cut = np.unique(np.concatenate([starts, inputs.scored_tokens, inputs.scored_tokens + 1])).astype(np.int32)
    rows = np.searchsorted(starts, cut[:-1], side="right") - 1
    tokens = np.sort(wanted)
    divided = msgspec.structs.replace(
        inputs,
        query_starts=cut,
        sequence_lengths=(inputs.sequence_lengths[rows] - starts[rows + 1] + cut[1:]).astype(np.int32),
        slots=inputs.slots[rows],
        sample_rows=(np.searchsorted(cut, tokens + 1) - 1).astype(np.int32),
        scored_tokens=inputs.scored_tokens[:0],
    )
    return divided, torch.from_numpy(np.searchsorted(tokens, wanted))


def tensors(model: CpuModel, family: Family) -> Iterator[tuple[int | None, str, str]]:
    """Yield (layer, kernel's name, checkpoint's name) of all tensors that `model` lacks, largest first."""
    norms = {
        "attention_norm": "input_layernorm",
        "mlp_norm": "pre_feedforward_layernorm" if family.post_norms else "post_attention_layernorm",
        "post_attention_norm": "post_attention_layernorm",
        "post_mlp_norm": "post_feedforward_layernorm",
        "query_norm": "self_attn.q_norm",
        "key_norm": "self_attn.k_norm",
    }
    whole = {"embedding": "model.embed_tokens", "head": "lm_head", "norm": "model.norm"}
    for layer, name in sorted(model.missing(), key=lambda wanted: wanted[0] is not None):
        if layer is None:
            stored = f"{whole[name]}.weight"
        elif name in norms:
            stored = f"model.layers.{layer}.{norms[name]}.weight"
        else:
            projection, _, part = name.partition("_")
            stored = f"model.layers.{layer}.{_PROJECTIONS[projection]}.{part or 'weight'}"
        yield layer, name, stored


def _pack(model: CpuModel, layer: int | None, name: str, tensor: Tensor, family: Family) -> None:
    """Copy one tensor into the kernel, which keeps no reference to it."""
    given: np.ndarray
    if tensor.dim() == 1:
        vector = tensor.float()
        given = (vector + 1 if family.offset_norms and name.endswith("norm") else vector).numpy()
    else:
        given = (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
    model.pack(name, given, layer=layer)


__all__ = [
    "BLOCK_SIZE",
    "FAMILIES",
    "THREADS_AT_MOST",
    "CpuStep",
    "Family",
    "supports",
    "tensors",
    "variants",
]
