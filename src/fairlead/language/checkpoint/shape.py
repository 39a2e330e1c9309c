"""The shape of a decoder-only model: what the engine needs to give it tokens and a KV cache."""

import msgspec


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes of a decoder-only model, and how it attends.

    vocab_size: the number of tokens.
    hidden_size: the width of the residual stream.
    layers: the number of layers.
    heads: the number of query heads.
    kv_heads: the number of key heads, which is that of value heads.
    head_dim: their size.
    max_positions: the longest sequence.
    windows: of each layer: how many positions, its own included, a token attends to there; None: all.
    attention_scale: attention scores are query · key · `attention_scale`.
    attention_cap: c: a score x becomes c·tanh(x / c).
    """

    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_positions: int
    windows: tuple[int | None, ...]
    attention_scale: float
    attention_cap: float | None = None

    @property
    def groups(self) -> tuple[int | None, ...]:
        """The KV cache groups: the distinct windows of the layers, the widest (None: all) first."""
        return tuple(sorted(set(self.windows), key=lambda window: (window is not None, -(window or 0))))

    @property
    def layer_groups(self) -> tuple[int, ...]:
        """The index into `groups` of each layer."""
        groups = self.groups
        return tuple(groups.index(window) for window in self.windows)

    @property
    def kv_elements_per_token(self) -> tuple[int, ...]:
        """Numbers that the KV cache holds per token, by group: a K and a V vector per layer and KV head."""
        return tuple(2 * self.windows.count(window) * self.kv_heads * self.head_dim for window in self.groups)
