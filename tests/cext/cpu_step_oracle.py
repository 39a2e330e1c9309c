"""A dense decoder in plain numpy, with whole sequences in float64, and a driver for the kernel."""

from dataclasses import dataclass, field
from functools import cache, cached_property

import numpy as np

from fairlead._cext.cpustep import CpuModel

BLOCK = 16


@dataclass(frozen=True, kw_only=True)
class Network:
    """The sizes and options of a model: `windows` by group, `groups` and `rope_of` by layer."""

    vocab_size: int = 101
    hidden_size: int = 64
    intermediate_size: int = 96
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    norm_epsilon: float = 1e-5
    windows: tuple = (None,)
    groups: tuple = None
    rope_of: tuple = None
    rotated: tuple = (None,)  # rotated channels, by rope; None: all
    thetas: tuple = (10_000.0,)
    rope_scale: float = 1.0
    tied: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    query_key_norm: bool = False
    post_norms: bool = False
    gelu: bool = False
    embedding_scale: float = 1.0
    attention_scale: float = None
    attention_cap: float = 0.0
    logit_cap: float = 0.0

    @cached_property
    def scale(self):
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale

    def group(self, layer):
        return 0 if self.groups is None else self.groups[layer]

    def frequencies(self, rope):
        rotated = self.rotated[rope] or self.head_dim
        powers = np.arange(0, rotated, 2, dtype=np.float32) / max(rotated, 1)
        return (1.0 / np.float32(self.thetas[rope]) ** powers).astype(np.float32)


def to_bfloat16(values):
    """Round float32 to bfloat16, represented as uint16."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bfloat16(halves):
    return (halves.astype(np.uint32) << 16).view(np.float32)


def draw_weights(network, dtype, seed=0):
    """Return {(layer or None, name): float32 array}, with matrices already rounded to `dtype`."""
    rng = np.random.default_rng(seed)
    model = new_model(network, dtype)
    weights = {}
    for layer, name in model.missing():
        shape = model.rows(name)
        if len(shape) == 2:
            values = rng.normal(0, 1.0 if name == "embedding" else shape[1] ** -0.5, shape)
            values = values.astype(np.float32)
            weights[layer, name] = from_bfloat16(to_bfloat16(values)) if dtype == "bfloat16" else values
        elif name.endswith("bias"):
            weights[layer, name] = rng.normal(0, 0.2, shape).astype(np.float32)
        else:
            weights[layer, name] = (1 + rng.normal(0, 0.2, shape)).astype(np.float32)
    if network.tied:
        weights[None, "head"] = weights[None, "embedding"]
    return weights


def new_model(network, dtype, **options):
    ropes = [(network.frequencies(rope), network.rope_scale) for rope in range(len(network.thetas))]
    return CpuModel(
        dtype=dtype,
        vocab_size=network.vocab_size,
        hidden_size=network.hidden_size,
        intermediate_size=network.intermediate_size,
        layers=network.layers,
        heads=network.heads,
        kv_heads=network.kv_heads,
        head_dim=network.head_dim,
        norm_epsilon=network.norm_epsilon,
        ropes=ropes,
        windows=network.windows,
        layer_groups=network.groups,
        layer_ropes=network.rope_of,
        tied=network.tied,
        qkv_bias=network.qkv_bias,
        output_bias=network.output_bias,
        mlp_bias=network.mlp_bias,
        query_key_norm=network.query_key_norm,
        post_norms=network.post_norms,
        gelu=network.gelu,
        embedding_scale=network.embedding_scale,
        attention_scale=network.attention_scale,
        attention_cap=network.attention_cap,
        logit_cap=network.logit_cap,
        **options,
    )


def pack_all(model, weights):
    for layer, name in model.missing():
        values = weights[layer, name]
        if values.ndim == 2 and values.dtype != np.uint8 and model.dtype == "bfloat16":
            values = to_bfloat16(values)
        model.pack(name, values, layer=layer)


class Oracle:
    """Computes the logits of every position of a sequence from its token ids alone."""

    def __init__(self, network, weights):
        self.network = network
        self.weights = {key: values.astype(np.float64) for key, values in weights.items()}
        self._last_logits = {}

    def last_logits(self, token_ids):
        """Return the logits of the last position. Cached: the tests of all kernels use the same tokens."""
        key = tuple(map(int, token_ids))
        if key not in self._last_logits:
            self._last_logits[key] = self.logits(np.array(key))[-1]
        return self._last_logits[key]

    def logits(self, token_ids):
        net, weights = self.network, self.weights
        x = weights[None, "embedding"][token_ids] * net.embedding_scale
        for layer in range(net.layers):
            post = weights.get((layer, "post_attention_norm")), weights.get((layer, "post_mlp_norm"))
            update = self.attention(layer, self.norm(x, weights[layer, "attention_norm"]))
            x = x + (update if post[0] is None else self.norm(update, post[0]))
            update = self.mlp(layer, self.norm(x, weights[layer, "mlp_norm"]))
            x = x + (update if post[1] is None else self.norm(update, post[1]))
        logits = self.norm(x, weights[None, "norm"]) @ weights[None, "head"].T
        return self.cap(logits, net.logit_cap)

    def attention(self, layer, x):
        net, length = self.network, len(x)
        rope = 0 if net.rope_of is None else net.rope_of[layer]
        query = self.linear(layer, "query", x).reshape(length, net.heads, net.head_dim)
        key = self.linear(layer, "key", x).reshape(length, net.kv_heads, net.head_dim)
        value = self.linear(layer, "value", x).reshape(length, net.kv_heads, net.head_dim)
        if net.query_key_norm:
            query = self.norm(query, self.weights[layer, "query_norm"])
            key = self.norm(key, self.weights[layer, "key_norm"])
        query, key = self.rotate(rope, query), self.rotate(rope, key)
        share = net.heads // net.kv_heads
        key, value = key.repeat(share, axis=1), value.repeat(share, axis=1)
        # Matrix products are several times faster than `einsum`.
        scores = query.transpose(1, 0, 2) @ key.transpose(1, 2, 0)
        scores = self.cap(scores * net.scale, net.attention_cap)
        distance = np.arange(length)[:, None] - np.arange(length)
        window = net.windows[net.group(layer)] or length
        scores = np.where((distance >= 0) & (distance < window), scores, -np.inf)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        found = (shares @ value.transpose(1, 0, 2)).transpose(1, 0, 2).reshape(length, -1)
        return self.linear(layer, "output", found)

    def mlp(self, layer, x):
        gate, up = self.linear(layer, "gate", x), self.linear(layer, "up", x)
        if self.network.gelu:
            gate = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
        else:
            gate = gate / (1 + np.exp(-gate))
        return self.linear(layer, "down", gate * up)

    def linear(self, layer, name, x):
        return x @ self.weights[layer, name].T + self.weights.get((layer, f"{name}_bias"), 0.0)

    def norm(self, x, weight):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.network.norm_epsilon) * weight

    def rotate(self, rope, heads):
        frequencies = self.network.frequencies(rope)
        angles = np.float32(np.arange(len(heads), dtype=np.float32)[:, None] * frequencies).astype(np.float64)
        cosine = np.cos(angles)[:, None] * self.network.rope_scale
        sine = np.sin(angles)[:, None] * self.network.rope_scale
        half = len(frequencies)
        a, b, rest = heads[..., :half], heads[..., half : 2 * half], heads[..., 2 * half :]
        return np.concatenate((a * cosine - b * sine, b * cosine + a * sine, rest), -1)

    @staticmethod
    def cap(x, cap):
        return cap * np.tanh(x / cap) if cap else x


@cache
def oracle_of(network, dtype):
    """Return the oracle of the weights that `draw_weights` returns."""
    return Oracle(network, draw_weights(network, dtype))


@dataclass
class Sequence:
    """A sequence in `SequenceDriver`: all its tokens, and how many of them are in the cache."""

    slot: int
    token_ids: list
    computed: int = 0
    tables: list = field(default_factory=list)


class SequenceDriver:
    """Sequences that share one model, with their blocks scattered over the cache."""

    def __init__(self, network, dtype, *, slots=8, columns=24, seed=0, weights=None, **options):
        self.network = network
        self.rng = np.random.default_rng(seed)
        self.weights = draw_weights(network, dtype, seed) if weights is None else weights
        self.model = new_model(network, dtype, **options)
        pack_all(self.model, self.weights)
        groups = len(network.windows)
        self.blocks = [slots * columns + 3 + group for group in range(groups)]
        self.model.allocate_cache(self.blocks)
        self.free = [list(self.rng.permutation(count)) for count in self.blocks]
        self.tables = [np.full((slots, columns), -1, dtype=np.int32) for _ in range(groups)]
        self.slots = list(range(slots))

    def add_sequence(self, token_ids):
        return Sequence(self.slots.pop(int(self.rng.integers(len(self.slots)))), list(token_ids))

    def remove_sequence(self, sequence):
        for free, table in zip(self.free, self.tables, strict=True):
            free += [block for block in table[sequence.slot] if block >= 0]
            self.rng.shuffle(free)
            table[sequence.slot] = -1
        self.slots.append(sequence.slot)

    def arguments(self, rows):
        """Return the arguments of `run` for rows of (sequence, tokens to compute)."""
        ids, positions, starts, lengths, slots, samples = [], [], [0], [], [], []
        mapping = [[] for _ in self.tables]
        for sequence, count in rows:
            start, end = sequence.computed, sequence.computed + count
            ids += sequence.token_ids[start:end]
            positions += range(start, end)
            starts.append(len(ids))
            lengths.append(end)
            slots.append(sequence.slot)
            if end == len(sequence.token_ids):
                samples.append(len(ids) - 1)
            for group, table in enumerate(self.tables):
                self.slide(table[sequence.slot], group, start)
                for column in range(start // BLOCK, (end - 1) // BLOCK + 1):
                    if table[sequence.slot, column] < 0:
                        table[sequence.slot, column] = self.free[group].pop()
                mapping[group] += [
                    table[sequence.slot, p // BLOCK] * BLOCK + p % BLOCK for p in range(start, end)
                ]
        return {
            "input_ids": int32(ids),
            "positions": int32(positions),
            "slot_mapping": tuple(int32(indices) for indices in mapping),
            "query_starts": int32(starts),
            "sequence_lengths": int32(lengths),
            "slots": int32(slots),
            "block_tables": tuple(self.tables),
            "sample_tokens": int32(samples),
            "logits": np.full((len(samples), self.network.vocab_size), np.nan, dtype=np.float32),
        }

    def slide(self, table, group, computed):
        """Free the blocks that no token from `computed` on attends to."""
        window = self.network.windows[group]
        if window is None:
            return
        for column in range(max(0, computed - window + 1) // BLOCK):
            if table[column] >= 0:
                self.free[group].append(table[column])
                table[column] = -1

    def step(self, rows):
        """Run [(sequence, count)]. Return {slot: logits} for the rows that reached their last token."""
        arguments = self.arguments(rows)
        self.model.run(**arguments)
        for sequence, count in rows:
            sequence.computed += count
        ends = set(arguments["sample_tokens"])
        starts = arguments["query_starts"]
        sampled = [rows[row][0].slot for row in range(len(rows)) if starts[row + 1] - 1 in ends]
        return dict(zip(sampled, arguments["logits"], strict=True))


def int32(values):
    return np.array(values, dtype=np.int32)


def relative_error(actual, expected):
    return np.abs(actual - expected).max() / np.abs(expected).max()
