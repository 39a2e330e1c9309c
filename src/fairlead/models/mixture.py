"""Mixture of experts: a router picks a few of many MLPs for every token; with Qwen3-MoE and Mixtral.

T tokens of all sequences of a step, flattened; C hidden size; E experts, k of them per token; V vocabulary.
"""

from collections.abc import Callable, Sequence

import msgspec
import torch
from torch import Tensor

from fairlead.models.config import CheckpointConfig
from fairlead.models.layers import GatedMLP, Linear
from fairlead.models.llama import LlamaForCausalLM
from fairlead.models.mistral import MistralForCausalLM
from fairlead.models.qwen3 import Qwen3Attention
from fairlead.models.shape import Experts, ModelShape, read_layers, read_shape
from fairlead.models.weights import Weights

_MOST_EXPERTS = 4096  # objects are made for each before the weights are checked


class MixtureMLP:
    """Runs each token through the k experts with the highest router weights, and sums their weighted outputs.

    Works expert by expert, each over all its tokens; an expert without tokens costs nothing.
    """

    def __init__(
        self, router: Linear, experts: Sequence[GatedMLP], per_token: int, *, normalize: bool
    ) -> None:
        self._router = router
        self._experts = experts
        self._per_token = per_token
        self._normalize = normalize

    def __call__(self, x: Tensor) -> Tensor:
        liking = self._router(x).softmax(-1, dtype=torch.float32)  # [T, E]
        weights, chosen = liking.topk(self._per_token, -1)  # [T, k]
        if self._normalize:
            weights = weights / weights.sum(-1, keepdim=True)
        # All (token, expert) pairs, grouped by expert, in the order of the tokens.
        order = chosen.flatten().argsort(stable=True)
        tokens = order // self._per_token
        shares = weights.flatten()[order, None].to(x.dtype)
        counts = torch.bincount(chosen.flatten(), minlength=len(self._experts)).tolist()
        result = torch.zeros_like(x)
        start = 0
        for expert, count in zip(self._experts, counts, strict=True):
            if count:
                rows = tokens[start : start + count]
                said = expert(x.index_select(0, rows)) * shares[start : start + count]
                result.index_add_(0, rows, said)
                start += count
        return result


class Qwen3MoeForCausalLM(LlamaForCausalLM):
    """Qwen3 with experts instead of one MLP in some or all layers."""

    attention = Qwen3Attention

    @classmethod
    def read_shape(cls, config: CheckpointConfig) -> ModelShape:
        bias = config.flag("attention_bias", default=False)
        windowed = config.flag("use_sliding_window", default=False) and "sliding_window" in config
        window = config.integer("sliding_window") if windowed else None
        layers = read_layers(config)
        shape = read_shape(config, head_dim=128, windows=(window,) * layers, qkv_bias=bias, output_bias=bias)
        step = config.integer("decoder_sparse_step", 1)
        dense = set(config.token_ids("mlp_only_layers"))
        experts = _read_experts(
            config,
            inner_size=config.integer("moe_intermediate_size"),
            normalize=config.flag("norm_topk_prob", default=False),
            layers=tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(layers)),
        )
        return msgspec.structs.replace(shape, experts=experts)

    def mlp(self, weights: Weights, prefix: str, layer: int) -> Callable[[Tensor], Tensor]:
        experts, hidden = self.shape.experts, self.shape.hidden_size
        if experts is None or not experts.layers[layer]:
            return super().mlp(weights, prefix, layer)
        return MixtureMLP(
            weights.linear({f"{prefix}.mlp.gate": experts.count}, hidden, exact=True),
            [
                weights.mlp(f"{prefix}.mlp.experts.{expert}", hidden, experts.inner_size)
                for expert in range(experts.count)
            ],
            experts.per_token,
            normalize=experts.normalize,
        )


class MixtralForCausalLM(MistralForCausalLM):
    """Mistral with experts in every layer, whose matrices have different names."""

    @classmethod
    def read_shape(cls, config: CheckpointConfig) -> ModelShape:
        shape = super().read_shape(config)
        experts = _read_experts(
            config, inner_size=shape.intermediate_size, normalize=True, layers=(True,) * shape.layers
        )
        return msgspec.structs.replace(shape, experts=experts)

    def mlp(self, weights: Weights, prefix: str, layer: int) -> Callable[[Tensor], Tensor]:  # noqa: ARG002
        experts, hidden = self.shape.experts, self.shape.hidden_size
        assert experts is not None
        name, inner = f"{prefix}.block_sparse_moe", experts.inner_size

        def expert(index: int) -> GatedMLP:
            matrices = f"{name}.experts.{index}"
            gate_up = weights.linear({f"{matrices}.w1": inner, f"{matrices}.w3": inner}, hidden)
            return GatedMLP(gate_up, weights.linear({f"{matrices}.w2": hidden}, inner))

        router = weights.linear({f"{name}.gate": experts.count}, hidden, exact=True)
        return MixtureMLP(
            router, [expert(index) for index in range(experts.count)], experts.per_token, normalize=True
        )


def _read_experts(
    config: CheckpointConfig, *, inner_size: int, normalize: bool, layers: tuple[bool, ...]
) -> Experts:
    """Read the experts' keys; transformers has used two names for their number."""
    key = "num_experts" if "num_experts" in config else "num_local_experts"
    count = config.integer(key, most=_MOST_EXPERTS)
    return Experts(
        count=count,
        per_token=config.integer("num_experts_per_tok", most=count),
        inner_size=inner_size,
        normalize=normalize,
        layers=layers,
    )
