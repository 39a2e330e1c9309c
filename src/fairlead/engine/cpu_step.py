"""A model on a CPU that runs each step as one call of our compiled kernel: a `backend.Forward` without torch.

Owns the translation of an `ArchitectureSpec`, and of a step's `Inputs`, to the kernel's arguments. The kernel
(`fairlead._cext.cpustep`) owns weights, cache and buffers. Guarantees that loading holds a second copy of a
few rows only, and `LoadFailed` for a tensor with an infinity or NaN.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, ClassVar, Self

import numpy as np

from fairlead._cext.cpustep import CpuModel, formats, stored_formats, variants
from fairlead.base.errors import LoadFailed
from fairlead.engine.inputs import Inputs
from fairlead.engine.models.checkpoint_tensors import CheckpointTensors, tied_as_stored
from fairlead.engine.models.frequencies import inverse_frequencies
from fairlead.engine.models.numbers import rounded, widen
from fairlead.language.checkpoint.architecture import COMMON, ArchitectureSpec, TensorNames, unsupported

BLOCK_SIZE = 16
"""Tokens per block; the kernel supports no other size."""
PANEL = 32
"""Rows of a matrix that the kernel keeps together."""
_GROUPS_AT_MOST = 8
_DTYPES = ("float32", "bfloat16")

SUPPORTED = {
    **COMMON,
    "head_dim": range(2, 257, 2),
    "norm_placement": ("before", "before and after"),
    "query_key_norm": (None, "head"),
    "activation": ("silu", "gelu_tanh"),
}


def refusal(spec: ArchitectureSpec, dtype: str, quantization: str | None = None) -> str | None:
    """Return why the kernel does not run such a model in `dtype`; None if it does."""
    if dtype not in _DTYPES:
        return f"dtype {dtype} is not supported"
    if quantization is not None and quantization not in formats(dtype):
        return f"quantization {quantization} is not supported"
    if (value := unsupported(spec, SUPPORTED)) is not None:
        return f"{value} is not supported"
    if max(len(spec.groups), len(spec.distinct_ropes)) > _GROUPS_AT_MOST:
        return f"its layers have more than {_GROUPS_AT_MOST} different windows or rotary embeddings"
    return None


class CpuStep:
    """`fairlead.engine.backend.Forward` by the kernel. Logits are in a buffer, valid until the next step."""

    device = None
    samples_several = True
    columns: ClassVar[dict[str, int]] = {}

    def __init__(self, model: CpuModel, shape: ArchitectureSpec) -> None:
        self.model = model
        self.shape = shape
        self.vocab_size = shape.vocab_size
        self._logits = np.empty((0, shape.vocab_size), np.float32)

    @classmethod
    def load(
        cls,
        spec: ArchitectureSpec,
        tensors: CheckpointTensors,
        *,
        threads: int,
        max_batched_tokens: int,
        variant: str | None = None,
        quantization: str | None = None,
    ) -> Self:
        """Take every tensor of `spec` from `tensors`, and compute in their `number_type`.

        threads: how many compute a step, at most `engine.threads.MOST`.
        max_batched_tokens: the most tokens of a step.
        variant: one of `cpustep.variants`; None: the fastest that this processor has.
        quantization: one of `cpustep.formats`, to keep every matrix in it, embedding and head included; None:
            the weights' dtype.
        """
        tensors.rename(spec.names.renamed)
        spec = tied_as_stored(spec, tensors)
        problem = refusal(spec, tensors.number_type, quantization)
        if problem is None and (needed := count_weights(spec)) > (found := tensors.count_numbers()):
            problem = (
                f"hidden_size {spec.hidden_size}, intermediate_size {spec.intermediate_size} and vocab_size"
                f" {spec.vocab_size} make {needed} weights; the checkpoint has {found}"
            )
        stored = {} if quantization else choose_stored(spec, tensors, variant)
        if problem is None:
            try:
                model = make_model(
                    spec,
                    tensors.number_type,
                    threads=threads,
                    max_batched_tokens=max_batched_tokens,
                    variant=variant,
                    quantization=quantization,
                    stored=stored,
                )
            except ValueError as error:
                problem = str(error)
        if problem is not None:
            raise LoadFailed(f"{tensors.listing}: the CPU kernel cannot run this model: {problem}")
        for layer, name, parts in stored_tensors(model, spec.names):
            shapes = [model.rows(part) for part in parts]
            sizes = [shape[0] for shape in shapes]
            read = tensors.stored_pieces if (layer, parts[0]) in stored else tensors.pieces
            pieces = read(name, sum(sizes), *shapes[0][1:])
            try:
                for part, rows in _divide(pieces, parts, sizes):
                    _pack(model, layer, part, rows, spec)
            except ValueError as error:
                raise tensors.fails(name, f"cannot be used: {error}") from error
        return cls(model, spec)

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

    def __call__(self, inputs: Inputs) -> np.ndarray:
        if len(inputs.scored_tokens):
            tokens, order = np.unique(inputs.logit_tokens, return_inverse=True)
            scored = np.empty((len(tokens), self.vocab_size), np.float32)
            self._run(inputs, tokens.astype(np.int32), scored)
            ordered: np.ndarray = scored[order]
            return ordered
        samples = len(inputs.sample_tokens)
        if samples > len(self._logits):
            # Reused, because new memory for 32 rows of 150,000 would cause page faults at each step.
            self._logits = np.empty((max(samples, 2 * len(self._logits)), self.vocab_size), np.float32)
        logits = self._logits[:samples]
        self._run(inputs, inputs.sample_tokens, logits)
        return logits

    def _run(self, inputs: Inputs, tokens: np.ndarray, logits: np.ndarray) -> None:
        """Run a step; write the logits of `tokens`, int32, ascending."""
        self.model.run(
            inputs.token_ids,
            inputs.positions,
            inputs.slot_mapping,
            inputs.query_starts,
            inputs.sequence_lengths,
            inputs.slots,
            inputs.tables,
            tokens,
            logits,
        )


def count_weights(spec: ArchitectureSpec) -> int:
    """Return how many numbers the matrices have: memory for them is reserved before the first is read."""
    qkv = (spec.heads + 2 * spec.kv_heads) * spec.head_dim
    layer = spec.hidden_size * (qkv + spec.heads * spec.head_dim + 3 * spec.intermediate_size)
    return spec.layers * layer + spec.vocab_size * spec.hidden_size


def choose_stored(
    spec: ArchitectureSpec, tensors: CheckpointTensors, variant: str | None = None
) -> dict[tuple[int | None, str], str]:
    """Return the matrices that the kernel keeps as they are stored: (layer or None, name) → format.

    Parts of one matrix must suit each other, or are restored to numbers: gate and up have the same format,
    and queries, keys and values too, unless their rows are whole panels.
    """
    known = stored_formats(tensors.number_type, variant)
    whole = all(heads * spec.head_dim % PANEL == 0 for heads in (spec.heads, spec.kv_heads))
    found: dict[tuple[int | None, str], str] = {}
    ends = (("embedding",),) if spec.tied else (("embedding",), ("head",))
    for layer in (None, *range(spec.layers)):
        for together in ends if layer is None else _TOGETHER:
            named = [spec.names.stored(part, layer) for part in together]
            forms = [tensors.packing(f"{name}.weight") for name in named]
            is_fused = len(set(named)) < len(named)
            may_differ = whole and together[0] == "query" and set(forms) <= {*known, None}
            if not is_fused and (may_differ or (len(set(forms)) == 1 and forms[0] in known)):
                each = zip(together, forms, strict=True)
                found |= {(layer, part): form for part, form in each if form is not None}
    return found


_TOGETHER = (("query", "key", "value"), ("output",), ("gate", "up"), ("down",))


def make_model(spec: ArchitectureSpec, dtype: str, **options: Any) -> CpuModel:
    """Return a model of the kernel without its weights, whose memory is reserved but not used yet."""
    ropes = spec.distinct_ropes
    return CpuModel(
        dtype=dtype,
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        layers=spec.layers,
        heads=spec.heads,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        norm_epsilon=spec.norm_epsilon,
        ropes=[(inverse_frequencies(rope, spec.head_dim), rope.scale) for rope in ropes],
        windows=spec.groups,
        layer_groups=spec.layer_groups,
        layer_ropes=spec.layer_ropes,
        tied=spec.tied,
        qkv_bias=spec.qkv_bias,
        output_bias=spec.output_bias,
        mlp_bias=spec.mlp_bias,
        query_key_norm=spec.query_key_norm == "head",
        post_norms=spec.norm_placement == "before and after",
        gelu=spec.activation == "gelu_tanh",
        embedding_scale=rounded(spec.embedding_scale, dtype),  # as in training
        attention_scale=spec.attention_scale,
        attention_cap=spec.attention_cap or 0.0,
        logit_cap=spec.logit_cap or 0.0,
        **options,
    )


def stored_tensors(model: CpuModel, names: TensorNames) -> Iterator[tuple[int | None, str, list[str]]]:
    """Yield (layer, name in the checkpoint, kernel's names of its parts) of all tensors that `model` lacks.

    The largest come first. A tensor has several parts if the checkpoint has fused them.
    """

    def stored(missing: tuple[int | None, str]) -> tuple[int | None, str]:
        layer, part = missing
        name, is_bias, _ = part.partition("_bias")
        return layer, names.stored(name, layer) + (".bias" if is_bias else ".weight")

    all_parts = sorted(model.missing(), key=lambda missing: missing[0] is not None)
    for (layer, name), parts in groupby(all_parts, stored):
        yield layer, name, [part for _, part in parts]


def _divide(
    pieces: Iterator[np.ndarray], parts: Sequence[str], sizes: Sequence[int]
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the rows of each part of a tensor whose rows come in pieces: (part, rows), in order."""
    ends = np.cumsum(sizes)
    first = 0
    for piece in pieces:
        while len(piece):
            index = int(np.searchsorted(ends, first, side="right"))
            count = min(len(piece), int(ends[index]) - first)
            yield parts[index], piece[:count]
            piece, first = piece[count:], first + count  # noqa: PLW2901  what is left of it


def _pack(model: CpuModel, layer: int | None, name: str, rows: np.ndarray, spec: ArchitectureSpec) -> None:
    """Copy rows of a tensor into the kernel, which keeps no reference to them."""
    if rows.ndim == 1:  # a vector
        rows = widen(rows)
        if spec.norm_offset and name.endswith("norm"):
            rows = rows + np.float32(1)
    model.pack(name, rows, layer=layer)


__all__ = ["BLOCK_SIZE", "CpuStep", "refusal", "stored_tensors", "variants"]
