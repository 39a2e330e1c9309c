"""How a folder keeps the codes of its matrices, by the `quantization_config` of its configuration.

Each scheme knows the tensors that stand for a matrix, and makes `Codes` of some of its rows. What it does not
know is refused by name. Imports numpy for the content only: the parent process reads configurations, too.

A word of 32 bits has eight codes of 4 bits, the first in the lowest bits. compressed-tensors has words along
the inputs of a row. GPTQ has the transposed matrix, with words along the inputs. AWQ has the transposed
matrix, with words along the outputs, in which eight outputs have the order 0 2 4 6 1 3 5 7.
"""

import struct
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import msgspec

from fairlead.language.checkpoint.config import CheckpointConfig
from fairlead.language.checkpoint.tensor_file import StoredTensor

if TYPE_CHECKING:
    import numpy as np

QUANTIZATION = "quantization_config"
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # of eight outputs in a word


class Codes(NamedTuple):
    """Some rows of a matrix: a weight is scale · (value − zero), with the scale of its group of inputs.

    values: codes, uint8 [rows, inputs], or what a codebook has for them, float32.
    scales: float16, float32, or bfloat16 as uint16, [rows, groups].
    zeros: integers [rows, groups]; None: 0.
    groups: the group of each input [inputs]; None: groups have the same number of inputs, in order.
    """

    values: "np.ndarray"
    scales: "np.ndarray"
    zeros: "np.ndarray | None"
    groups: "np.ndarray | None" = None


class Scheme(Protocol):
    """How a folder keeps its matrices.

    name: for messages and tables.
    key: the suffix of the tensor that a matrix in this scheme has, and another has not.
    needed: the suffixes of the tensors that it has beside it.
    others: those that it may have.
    bits: of a code.
    signed: whether the code of 0 is the same for all groups, in the middle.
    """

    key: ClassVar[str]

    @property
    def name(self) -> str: ...

    @property
    def needed(self) -> tuple[str, ...]: ...

    @property
    def others(self) -> tuple[str, ...]: ...

    @property
    def bits(self) -> int: ...

    @property
    def signed(self) -> bool: ...

    def shape(self, parts: Mapping[str, StoredTensor]) -> tuple[int, int]:
        """Return outputs and inputs. `LoadFailed` if the tensors do not fit each other."""

    def group_size(self, parts: Mapping[str, StoredTensor]) -> int | None:
        """Return how many inputs in a row share a scale; None if groups are not in order."""

    def codes(self, parts: Mapping[str, StoredTensor], rows: range) -> Codes:
        """Read some rows."""


def read_scheme(config: CheckpointConfig) -> Scheme | None:
    """Return the scheme of a configuration, None without one. `LoadFailed` if it is not supported."""
    if QUANTIZATION not in config:
        return None
    section = config.section(QUANTIZATION)
    method = section.text("quant_method")
    if method not in _METHODS:
        raise section.fails("quant_method", f"{method!r:.50} is not supported ({', '.join(_METHODS)} are)")
    scheme: Scheme = _METHODS[method](section)
    return scheme


def _one_of(config: CheckpointConfig, key: str, value: Any, known: tuple[Any, ...]) -> None:
    if value not in known:
        names = ", ".join(map(str, known))
        raise config.fails(
            key, f"{value!r:.50} is not supported ({names} {'is' if len(known) == 1 else 'are'})"
        )


def _words(tensor: StoredTensor) -> "np.ndarray":
    """Return the words of a matrix."""
    if tensor.dtype not in ("I32", "U32") or len(tensor.shape) != 2:
        raise tensor.fails(f"of {tensor.dtype} {list(tensor.shape)} is no matrix of words of 32 bits")
    return tensor.stored_rows().view("<u4").reshape(tensor.shape)


def _codes_of(words: "np.ndarray", bits: int) -> "np.ndarray":
    """Return the codes of words [..., n]: uint8 [..., n · 32 / bits]."""
    import numpy as np

    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    codes = (words[..., None] >> shifts & np.uint32((1 << bits) - 1)).astype(np.uint8)
    return codes.reshape(*words.shape[:-1], -1)


def _matrix(tensor: StoredTensor, shape: tuple[int, ...]) -> StoredTensor:
    if tensor.shape != shape:
        raise tensor.fails(f"has shape {list(tensor.shape)}, expected {list(shape)}")
    return tensor


def _count_groups(tensor: StoredTensor, inputs: int, size: int | None) -> int:
    """Return how many groups of so many inputs a row has; None: one."""
    if size is not None and inputs % size:
        raise tensor.fails(f"has rows of {inputs} inputs, which are no whole groups of {size}")
    return 1 if size is None else inputs // size


class PackQuantized(msgspec.Struct, frozen=True):
    """compressed-tensors' `pack-quantized`: words along the inputs, scales [outputs, groups].

    size: the inputs of a group; None: a row is one.
    """

    key: ClassVar[str] = "weight_packed"
    name: str
    bits: int
    signed: bool
    size: int | None

    @property
    def needed(self) -> tuple[str, ...]:
        return ("weight_scale", "weight_shape", *(() if self.signed else ("weight_zero_point",)))

    @property
    def others(self) -> tuple[str, ...]:
        return ("weight_zero_point", "weight_g_idx")

    def shape(self, parts: Mapping[str, StoredTensor]) -> tuple[int, int]:
        packed, scales, shape = parts[self.key], parts["weight_scale"], parts["weight_shape"]
        if shape.dtype not in ("I64", "I32") or shape.shape != (2,):
            raise shape.fails(f"of {shape.dtype} {list(shape.shape)} is no shape of a matrix")
        kind = "<2q" if shape.dtype == "I64" else "<2i"
        outputs, inputs = sizes = list(struct.unpack_from(kind, shape.file.memory, shape.begin))
        if min(sizes) < 1 or packed.shape != (outputs, -(-inputs * self.bits // 32)):
            raise packed.fails(f"has shape {list(packed.shape)} for a matrix of {sizes}")
        groups = _count_groups(packed, inputs, self.size)
        scales.check_floats()
        _matrix(scales, (outputs, groups))
        if not self.signed:
            _matrix(parts["weight_zero_point"], (-(-outputs * self.bits // 32), groups))
        return outputs, inputs

    def group_size(self, parts: Mapping[str, StoredTensor]) -> int | None:
        return None if "weight_g_idx" in parts else self.size or self.shape(parts)[1]

    def codes(self, parts: Mapping[str, StoredTensor], rows: range) -> Codes:
        import numpy as np

        outputs, inputs = self.shape(parts)
        found = slice(rows.start, rows.stop)
        values = _codes_of(_words(parts[self.key])[found], self.bits)[:, :inputs]
        scales = parts["weight_scale"].array()[found]
        groups = None
        if "weight_g_idx" in parts:
            groups = _group_indices(parts["weight_g_idx"], inputs, scales.shape[1])
        if self.signed:
            return Codes(values, scales, np.full(scales.shape, 1 << self.bits - 1, np.uint8), groups)
        zeros = _codes_of(_words(parts["weight_zero_point"]).T, self.bits).T[:outputs]
        return Codes(values, scales, zeros[found], groups)


def _group_indices(tensor: StoredTensor, inputs: int, groups: int) -> "np.ndarray":
    """Return the group of each input."""
    if tensor.dtype not in ("I32", "I64") or tensor.shape != (inputs,):
        raise tensor.fails(f"of {tensor.dtype} {list(tensor.shape)} is no group for each of {inputs} inputs")
    indices = tensor.stored_rows().view("<i4" if tensor.dtype == "I32" else "<i8").reshape(inputs)
    if inputs and not 0 <= indices.min() <= indices.max() < groups:
        raise tensor.fails(f"has groups from {indices.min()} to {indices.max()}, of {groups}")
    return indices


class Transposed(msgspec.Struct, frozen=True):
    """GPTQ and AWQ: words of the transposed matrix, scales [groups, outputs], zeros in words along outputs.

    size: the inputs of a group; None: all.
    added: what is added to a stored code of 0: older files of GPTQ have one less.
    by_output: whether words are along the outputs, as AWQ has them.
    """

    key: ClassVar[str] = "qweight"
    name: str
    bits: int
    signed: bool
    size: int | None
    added: int
    by_output: bool

    @property
    def needed(self) -> tuple[str, ...]:
        return ("qzeros", "scales")

    @property
    def others(self) -> tuple[str, ...]:
        return ("g_idx",)

    def shape(self, parts: Mapping[str, StoredTensor]) -> tuple[int, int]:
        words, scales, zeros = parts[self.key], parts["scales"], parts["qzeros"]
        if len(words.shape) != 2:
            raise words.fails(f"has shape {list(words.shape)}, expected a matrix")
        inputs, outputs = words.shape
        per_word = 32 // self.bits
        inputs, outputs = (inputs, outputs * per_word) if self.by_output else (inputs * per_word, outputs)
        groups = _count_groups(words, inputs, self.size)
        scales.check_floats()
        _matrix(scales, (groups, outputs))
        _matrix(zeros, (groups, -(-outputs // per_word)))
        return outputs, inputs

    def group_size(self, parts: Mapping[str, StoredTensor]) -> int | None:
        import numpy as np

        _, inputs = self.shape(parts)
        size = self.size or inputs
        if "g_idx" in parts:
            indices = _group_indices(parts["g_idx"], inputs, inputs // size)
            if not np.array_equal(indices, np.arange(inputs) // size):
                return None
        return size

    def codes(self, parts: Mapping[str, StoredTensor], rows: range) -> Codes:
        _, inputs = self.shape(parts)
        found = slice(rows.start, rows.stop)
        words = _words(parts[self.key])
        if self.by_output:
            values = self._by_output(words, rows)
            zeros = self._by_output(_words(parts["qzeros"]), rows)
        else:
            values = _codes_of(words[:, found].T, self.bits)
            zeros = _codes_of(_words(parts["qzeros"]), self.bits)[:, found].T
        scales = parts["scales"].array()[:, found].T
        groups = None
        if "g_idx" in parts:
            groups = _group_indices(parts["g_idx"], inputs, scales.shape[1])
        return Codes(values, scales, zeros.astype("int16") + self.added, groups)

    def _by_output(self, words: "np.ndarray", rows: range) -> "np.ndarray":
        """Return the codes of some outputs [rows, inputs], of words [inputs, outputs / 8]."""
        first = rows.start // 8
        codes = _codes_of(words[:, first : -(-rows.stop // 8)], self.bits)
        ordered = codes.reshape(len(words), -1, 8)[..., _AWQ_PLACES].reshape(len(words), -1)
        found: np.ndarray = ordered[:, rows.start - 8 * first : rows.stop - 8 * first].T
        return found


class Floats8(msgspec.Struct, frozen=True):
    """8-bit floats, e4m3, with a scale for the matrix, each output, or each block of outputs and inputs.

    scale: the suffix of the scales' name.
    block: the outputs and inputs of a block; None: scales are by matrix or output.
    """

    key: ClassVar[str] = ""  # a matrix of 8-bit floats is called `weight`, as any other
    name: str
    scale: str
    block: tuple[int, int] | None
    bits: int = 8
    signed: bool = True

    @property
    def needed(self) -> tuple[str, ...]:
        return (self.scale,)

    @property
    def others(self) -> tuple[str, ...]:
        return ("input_scale", "weight_zero_point")

    def shape(self, parts: Mapping[str, StoredTensor]) -> tuple[int, int]:
        weight, scales = parts["weight"], parts[self.scale]
        if len(weight.shape) != 2:
            raise weight.fails(f"has shape {list(weight.shape)}, expected a matrix")
        outputs, inputs = weight.shape
        scales.check_floats()
        if self.block is not None:
            _matrix(scales, (-(-outputs // self.block[0]), -(-inputs // self.block[1])))
        elif scales.shape not in ((), (1,), (outputs, 1), (1, 1), (outputs,)):
            raise scales.fails(f"has shape {list(scales.shape)}, expected one scale, or {outputs}")
        return outputs, inputs

    def group_size(self, parts: Mapping[str, StoredTensor]) -> int | None:
        return self.block[1] if self.block else self.shape(parts)[1]

    def codes(self, parts: Mapping[str, StoredTensor], rows: range) -> Codes:
        import numpy as np

        outputs, inputs = self.shape(parts)
        values = e4m3()[parts["weight"].stored_rows()[rows.start : rows.stop]]
        scales = parts[self.scale].array()
        if self.block is None:
            spread = np.broadcast_to(scales.reshape(-1, 1), (outputs, 1))
            return Codes(values, spread[rows.start : rows.stop], None)
        groups = np.arange(inputs) // self.block[1]
        by_row = scales[np.arange(rows.start, rows.stop) // self.block[0]]
        return Codes(values, by_row, None, groups)


def e4m3() -> "np.ndarray":
    """Return the value of each 8-bit float: a sign, four bits of exponent, three of fraction; NaN."""
    import numpy as np

    codes = np.arange(256)
    exponents, fractions = codes >> 3 & 15, codes & 7
    sizes = np.where(exponents, (8 + fractions) * 2.0 ** (exponents - 10), fractions * 2.0**-9)
    sizes[codes & 127 == 127] = np.nan
    values: np.ndarray = np.where(codes & 128, -sizes, sizes).astype(np.float32)
    return values


def _size(config: CheckpointConfig) -> int | None:
    """Return the inputs of a group; −1 is for all of a row."""
    size = config.integer("group_size", least=-1)
    if size == 0:
        raise config.fails("group_size", "must be positive, or −1")
    return None if size < 0 else size


def _read_gptq(config: CheckpointConfig) -> Transposed:
    bits = config.integer("bits")
    _one_of(config, "bits", bits, (4, 8))
    kind = config.text("checkpoint_format", "gptq")
    _one_of(config, "checkpoint_format", kind, ("gptq", "gptq_v2"))
    if "dynamic" in config and config.section("dynamic").keys():
        raise config.fails("dynamic", "rules by module are not supported")
    return Transposed(
        f"GPTQ, {bits} bits", bits, False, _size(config), added=int(kind == "gptq"), by_output=False
    )


def _read_awq(config: CheckpointConfig) -> Transposed:
    bits = config.integer("bits")
    _one_of(config, "bits", bits, (4,))
    _one_of(config, "version", config.text("version", "gemm").lower(), ("gemm",))
    if not config.flag("zero_point", True):
        raise config.fails("zero_point", "false is not supported")
    return Transposed(f"AWQ, {bits} bits", bits, False, _size(config), added=0, by_output=True)


def _read_float8(config: CheckpointConfig) -> Floats8:
    _one_of(config, "fmt", config.text("fmt", "e4m3"), ("e4m3",))
    if "weight_block_size" not in config:
        return Floats8("FP8", "weight_scale", None)
    sizes = [int(size) for size in config.numbers("weight_block_size")]
    if len(sizes) != 2 or min(sizes) < 1:
        raise config.fails("weight_block_size", "must be the outputs and the inputs of a block")
    return Floats8("FP8, in blocks", "weight_scale_inv", (sizes[0], sizes[1]))


def _read_compressed(config: CheckpointConfig) -> Scheme:
    kind = config.text("format")
    _one_of(config, "format", kind, ("pack-quantized", "float-quantized"))
    groups = config.section("config_groups")
    if len(groups.keys()) != 1:
        raise config.fails("config_groups", f"{len(groups.keys())} groups are not supported (1 is)")
    group = groups.section(groups.keys()[0])
    _one_of(group, "targets", tuple(group.texts("targets")), (("Linear",),))
    weights = group.section("weights")
    bits, symmetric = weights.integer("num_bits"), weights.flag("symmetric", True)
    strategy = weights.text("strategy")
    if "kv_cache_scheme" in config:
        raise config.fails("kv_cache_scheme", "a narrow cache is not supported")
    if kind == "float-quantized":
        _one_of(weights, "type", weights.text("type"), ("float",))
        _one_of(weights, "num_bits", bits, (8,))
        _one_of(weights, "strategy", strategy, ("tensor", "channel", "block"))
        if strategy != "block":
            return Floats8(f"compressed-tensors, FP8 by {strategy}", "weight_scale", None)
        sizes = [int(size) for size in weights.numbers("block_structure")]
        if len(sizes) != 2:
            raise weights.fails("block_structure", "must be the outputs and the inputs of a block")
        return Floats8("compressed-tensors, FP8 by block", "weight_scale", (sizes[0], sizes[1]))
    _one_of(weights, "type", weights.text("type"), ("int",))
    _one_of(weights, "num_bits", bits, (4, 8))
    _one_of(weights, "strategy", strategy, ("group", "channel"))
    if "input_activations" in group:
        raise group.fails("input_activations", "are not supported beside packed integers")
    size = _size(weights) if strategy == "group" else None
    return PackQuantized(f"compressed-tensors, {bits} bits", bits, symmetric, size)


_METHODS: dict[str, Any] = {
    "awq": _read_awq,
    "compressed-tensors": _read_compressed,
    "fp8": _read_float8,
    "gptq": _read_gptq,
}
