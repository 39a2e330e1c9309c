"""Any decoder that `ArchitectureSpec` describes, in torch: the reference for the other backends.

T tokens of all sequences of a step, flattened; C hidden size; H query heads, K KV heads, D channels per
head; V vocabulary.
"""

from typing import final

import torch
from torch import Tensor

from fairlead.base.errors import LoadFailed
from fairlead.engine.models.checkpoint_tensors import tied_as_stored
from fairlead.engine.models.layers import Embedding, GatedMLP, HeadRMSNorm, MixtureMLP, OffsetRMSNorm, RMSNorm
from fairlead.engine.models.linear import Linear
from fairlead.engine.models.model import AttentionFunction
from fairlead.engine.models.parallel import ALONE, Ranks, Shard, SharedEmbedding, SummedLinear
from fairlead.engine.models.rotary import Rotary, rotate
from fairlead.engine.models.weights import Weights
from fairlead.language.checkpoint.architecture import ANY, COMMON, ArchitectureSpec, Experts, unsupported

Angles = tuple[Tensor, Tensor]
Norm = RMSNorm | OffsetRMSNorm

SUPPORTED = {
    **COMMON,
    "norm_placement": ("before", "before and after"),
    "query_key_norm": (None, "head"),
    "activation": ("silu", "gelu_tanh"),
    "headless": (False, True),
    "scores": (False, True),
    "score_tokens": ANY,
    "experts": ANY,
}


@final
class Network:
    """The whole network: token ids and positions in, logits out. Takes all its tensors from `weights`.

    With several `ranks` it is this rank's part of the network: `shape` has its share of the heads, and only
    rank 0 gets logits.
    """

    takes_embeddings = True

    def __init__(self, spec: ArchitectureSpec, weights: Weights, ranks: Ranks = ALONE) -> None:
        if (value := unsupported(spec, SUPPORTED)) is not None:
            raise LoadFailed(f"{weights.listing}: torch cannot run this model: {value} is not supported")
        weights.rename(spec.names.renamed)
        spec = tied_as_stored(spec, weights)
        shard = Shard(spec, ranks)
        self.shape = shard.local
        self._ranks = ranks
        tokens = shard.rows("embedding", spec.vocab_size)
        embedding, self.head = weights.vocabulary(
            spec.names.embedding,
            None if spec.headless else spec.names.head,
            spec.vocab_size,
            spec.hidden_size,
            tied=spec.tied,
            tokens=tokens,
        )
        self.embedding: Embedding | SharedEmbedding = (
            embedding if ranks.size == 1 else SharedEmbedding(embedding.table, tokens, ranks.sum)
        )
        # Rounded to the weights' dtype, as in training.
        self.embedding_scale = (
            None
            if spec.embedding_scale == 1
            else torch.tensor(spec.embedding_scale, dtype=weights.dtype, device=weights.device)
        )
        self._rotaries = [
            Rotary(rope, spec.head_dim, dtype=weights.dtype, device=weights.device)
            for rope in spec.distinct_ropes
        ]
        self.layers = [Layer(_LayerWeights(shard, weights, layer)) for layer in range(spec.layers)]
        self.norm = _make_norm(spec, weights.tensor(f"{spec.names.norm}.weight", spec.hidden_size))
        self.score = self._take_score(weights) if spec.scores else None

    def _take_score(self, weights: Weights) -> Tensor:
        """Return the row of the score, [1, C], in float32."""
        spec = self.shape
        if not spec.score_tokens:
            return weights.tensor(f"{spec.names.score}.weight", 1, spec.hidden_size).float()
        head = f"{spec.names.head}.weight"
        table = self.embedding.table if spec.tied else weights.tensor(head, spec.vocab_size, spec.hidden_size)
        first, *second = table[list(spec.score_tokens)].float()
        row: Tensor = first - second[0] if second else first
        return row[None]

    def hidden(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attention: AttentionFunction,
        embedded: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Run all layers over token ids [T] at positions [T], as `Model` describes."""
        x = self.embed(token_ids)  # [T, C]
        if embedded is not None:
            x = x.index_copy(0, embedded[0], embedded[1].to(x.dtype))
        for layer, angles in zip(self.layers, self.angles(positions), strict=True):
            x = layer(x, angles, attention)
        return x

    def embed(self, token_ids: Tensor) -> Tensor:
        """Return the scaled embedding of token ids [T]: [T, C]."""
        x = self.embedding(token_ids)
        return x if self.embedding_scale is None else x * self.embedding_scale

    def angles(self, positions: Tensor) -> list[Angles]:
        """Return the angles of positions [T] for each layer: 2 × [T, 1, D]."""
        by_rope = [rotary.angles(positions) for rotary in self._rotaries]
        return [by_rope[rope] for rope in self.shape.layer_ropes]

    def states(self, hidden: Tensor) -> Tensor:
        """Return each token's final state, for embeddings, which a head would project: [T, C] → [T, C]."""
        return self.norm(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the next-token logits: [T, C] → [T, V]."""
        assert self.head is not None
        scores = self._ranks.gather_columns(self.head(self.norm(hidden)), self.shape.vocab_size)
        if (cap := self.shape.logit_cap) is None:
            return scores
        return (scores / cap).tanh_().mul_(cap)


class Attention:
    """The projections of one layer's attention; the engine computes the attention itself."""

    def __init__(self, take: "_LayerWeights") -> None:
        spec, local = take.spec, take.local
        self._layer = take.layer
        self._heads, self._kv_heads, self._head_dim = local.heads, local.kv_heads, local.head_dim
        queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        self.qkv = take.linear(
            {"query": queries, "key": keys, "value": keys}, spec.hidden_size, bias=spec.qkv_bias
        )
        self.output = take.linear({"output": spec.hidden_size}, queries, bias=spec.output_bias)
        self.head_norm: Norm | None = None
        if spec.query_key_norm is not None:
            query, key = take.vector("query_norm", spec.head_dim), take.vector("key_norm", spec.head_dim)
            # [H + K, D]: one pass over both
            both = torch.cat((query.expand(local.heads, -1), key.expand(local.kv_heads, -1)))
            kind = OffsetRMSNorm if spec.norm_offset else HeadRMSNorm
            self.head_norm = kind(both, spec.norm_epsilon)

    def __call__(self, x: Tensor, angles: Angles, attention: AttentionFunction) -> Tensor:
        heads = self.qkv(x).view(len(x), -1, self._head_dim)  # [T, H + 2·K, D]
        query_key, value = heads[:, : -self._kv_heads], heads[:, -self._kv_heads :]
        if self.head_norm is not None:
            query_key = self.head_norm(query_key)
        query_key = rotate(query_key, angles)  # [T, H + K, D]
        query, key = query_key[:, : self._heads], query_key[:, self._heads :]
        return self.output(attention(self._layer, query, key, value))  # [T, H·D] → [T, C]


class Layer:
    """Attention, then the MLP. Each reads the normalized residual stream, and its output is added to it.

    The output is normalized first if there is a norm for that.
    """

    def __init__(self, take: "_LayerWeights") -> None:
        spec = take.spec
        self.attention = Attention(take)
        self.mlp = _make_mlp(take)
        self.attention_norm, self.mlp_norm = take.norm("attention_norm"), take.norm("mlp_norm")
        self.post_attention_norm: Norm | None = None
        self.post_mlp_norm: Norm | None = None
        if spec.norm_placement == "before and after":
            self.post_attention_norm = take.norm("post_attention_norm")
            self.post_mlp_norm = take.norm("post_mlp_norm")

    def __call__(self, x: Tensor, angles: Angles, attention: AttentionFunction) -> Tensor:
        output = self.attention(self.attention_norm(x), angles, attention)  # [T, C]
        x = x + (output if self.post_attention_norm is None else self.post_attention_norm(output))
        output = self.mlp(self.mlp_norm(x))
        return x + (output if self.post_mlp_norm is None else self.post_mlp_norm(output))


class _LayerWeights:
    """Takes the tensors of one layer, or a rank's parts of them, by the names of `TensorNames`.

    Sizes are those of the whole network, `spec`; `local` is what this rank computes.
    """

    def __init__(self, shard: Shard, weights: Weights, layer: int) -> None:
        self.spec, self.local = shard.whole, shard.local
        self.layer = layer
        self.ranks = shard.ranks
        self._shard = shard
        self._weights = weights

    def linear(
        self,
        rows: dict[str, int],
        inputs: int,
        *,
        bias: bool = False,
        quantized: bool = True,
        expert: int | None = None,
    ) -> Linear:
        """Take projections of the same input, fused into one: `rows` maps parts to their output sizes.

        The outputs of one whose inputs are divided among ranks are the sums over all ranks, except those of
        experts, which are added first.
        """
        stored: dict[str, int] = {}
        kept: dict[str, list[range]] = {}
        for part, size in rows.items():
            name = self.spec.names.stored(part, self.layer, expert)
            first, share = stored.get(name, 0), self._shard.rows(part, size)
            stored[name] = first + size
            kept.setdefault(name, []).append(range(first + share.start, first + share.stop))
        columns = self._shard.columns(next(iter(rows)), inputs)
        if len(columns) == inputs or expert is not None:
            return self._weights.linear(
                stored, inputs, bias=bias, quantized=quantized, kept=kept, columns=columns
            )
        offset = (
            self._weights.stack({f"{name}.bias": size for name, size in stored.items()}) if bias else None
        )
        part_linear = self._weights.linear(stored, inputs, quantized=quantized, columns=columns)
        return SummedLinear(part_linear, offset, self.ranks.sum)

    def vector(self, part: str, size: int) -> Tensor:
        return self._weights.tensor(f"{self.spec.names.stored(part, self.layer)}.weight", size)

    def norm(self, part: str) -> Norm:
        return _make_norm(self.spec, self.vector(part, self.spec.hidden_size))


def _make_norm(spec: ArchitectureSpec, weight: Tensor) -> Norm:
    return (OffsetRMSNorm if spec.norm_offset else RMSNorm)(weight, spec.norm_epsilon)


def _make_mlp(take: _LayerWeights) -> GatedMLP | MixtureMLP:
    spec, experts = take.spec, take.spec.experts
    if experts is not None and experts.layers[take.layer]:
        return _make_mixture(take, experts)
    inner, hidden, bias = spec.intermediate_size, spec.hidden_size, spec.mlp_bias
    gate_up = take.linear({"gate": inner, "up": inner}, hidden, bias=bias)
    return GatedMLP(gate_up, take.linear({"down": hidden}, inner, bias=bias), spec.activation)


def _make_mixture(take: _LayerWeights, experts: Experts) -> MixtureMLP:
    hidden, inner = take.spec.hidden_size, experts.inner_size

    def make_expert(expert: int) -> GatedMLP:
        gate_up = take.linear({"expert_gate": inner, "expert_up": inner}, hidden, expert=expert)
        down = take.linear({"expert_down": hidden}, inner, expert=expert)
        return GatedMLP(gate_up, down, take.spec.activation)

    router = take.linear({"router": experts.count}, hidden, quantized=False)
    return MixtureMLP(
        router,
        list(map(make_expert, range(experts.count))),
        experts.per_token,
        normalize=experts.normalize,
        total=take.ranks.sum,
    )
