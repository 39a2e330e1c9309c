"""The sampling parameters, each declared once, and their values by slot. Uses no logits and no device.

A new parameter is an entry of `PARAMETERS`, a field of `fairlead.base.job.Sampling` (its wire form; a test
compares the two), and its use: in a logits processor, or in the samplers, which find its column by name.
"""

import math
from collections.abc import Sequence
from operator import attrgetter
from struct import Struct
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from fairlead._cext.inputbatch import SequenceState
from fairlead.base.job import ReasoningLimit, Sampling
from fairlead.language.structured.constraint import Constraint

INT32_MAX = 2**31 - 1
_SEED_BITS = 0xFFFF_FFFF_FFFF_FFFF
_LARGEST_FLOAT32 = float(np.finfo(np.float32).max)
_FORMATS = {
    np.dtype(dtype).str: letter for dtype, letter in ((np.float32, "f"), (np.int32, "i"), (np.uint64, "Q"))
}

Use = Literal["batch", "logits", "constraint", "draw", "report"]


class SamplingParameter(msgspec.Struct, frozen=True):
    """A field of `Sampling`.

    `use`: what reads it: the batch, to find a sequence's end; a logits processor; the constraint of a
    sequence; the samplers, to draw a token; or the report of log-probabilities. `off` is the value without
    effect. Numbers outside `minimum` … `maximum` are refused; None: no bound. `dtype` is that of its column;
    None: it has none.
    """

    name: str
    value_type: Any
    default: Any
    use: Use
    off: Any
    minimum: float | None = None
    maximum: float | None = None
    dtype: type[np.generic] | None = None

    def check(self, value: Any) -> None:
        """Raise ValueError if the value is out of range; its default is not."""
        low, high = self.minimum, self.maximum
        if (low is not None and not value >= low) or (high is not None and not value <= high):
            bounds = f"at least {low}" if high is None else f"in {low}…{high}"
            raise ValueError(f"{self.name} is {value}, and must be {bounds}")

    def encode(self, value: Any) -> Any:
        """Return the value as its column stores it: a seed modulo 2⁶⁴, None as −1."""
        if self.dtype is np.float32:  # infinite is handled like any very large value
            return math.copysign(math.inf, value) if abs(value) > _LARGEST_FLOAT32 else value
        if self.dtype is np.uint64:
            return (value or 0) & _SEED_BITS
        return -1 if value is None else value


_Parameter = SamplingParameter
PARAMETERS: tuple[SamplingParameter, ...] = (
    _Parameter("max_tokens", int, msgspec.NODEFAULT, "batch", INT32_MAX, 1, INT32_MAX),
    _Parameter("temperature", float, 1.0, "draw", 0.0, 0, None, np.float32),
    _Parameter("top_p", float, 1.0, "draw", 1.0, 0, 1, np.float32),
    _Parameter("top_k", int, 0, "draw", 0, 0, INT32_MAX, np.int32),
    _Parameter("min_p", float, 0.0, "draw", 0.0, 0, 1, np.float32),
    _Parameter("seed", int | None, None, "draw", None, None, None, np.uint64),
    _Parameter("stop_token_ids", tuple[int, ...], (), "batch", ()),
    _Parameter("ignore_eos", bool, False, "batch", False),
    _Parameter("min_tokens", int, 0, "logits", 0, 0, INT32_MAX),
    _Parameter("presence_penalty", float, 0.0, "logits", 0.0, None, None, np.float32),
    _Parameter("frequency_penalty", float, 0.0, "logits", 0.0, None, None, np.float32),
    _Parameter("repetition_penalty", float, 1.0, "logits", 1.0, None, None, np.float32),
    _Parameter("logit_bias", dict[int, float], {}, "logits", {}),
    _Parameter("logprobs", int | None, None, "report", None, 0, INT32_MAX, np.int32),
    _Parameter("prompt_logprobs", int | None, None, "report", None, 0, INT32_MAX),
    _Parameter("grammar", str | None, None, "constraint", None),
    _Parameter("grammar_bytes", int, 0, "constraint", 0, 0),
    _Parameter("reasoning_limit", ReasoningLimit | None, None, "constraint", None),
    _Parameter("close_at_limit", bool, False, "constraint", False),
    _Parameter("repeat_last_n", int, -1, "logits", -1, -1, INT32_MAX),
    _Parameter("allowed_token_ids", tuple[int, ...] | None, None, "logits", None),
)


class SequenceSampling(NamedTuple):
    """One sequence's parameters, its `row` of the columns, and the bits of those `in_effect` (not off).

    `constraint`, with a grammar or a limit of the reasoning: which tokens may come next.
    `embeddings`: the optional column of the prompt, as `Engine.submit` has it.
    """

    parameters: Sampling
    row: bytes
    in_effect: int
    processes_logits: bool
    constraint: Constraint | None = None
    embeddings: np.ndarray | None = None


class ParameterTable:
    """Checks and encodes parameters as declared. The columns are the fields of one structured array.

    Only the parameters that differ from their defaults are checked and encoded one by one.
    """

    def __init__(self, parameters: Sequence[SamplingParameter]) -> None:
        columns = {one.name: one for one in parameters if one.dtype is not None}
        self.dtype = np.dtype([(name, one.dtype) for name, one in columns.items()])
        bits = {one.name: 1 << index for index, one in enumerate(parameters)}
        self.columns = {name: bits[name] for name in columns}  # their bits
        self._parameters = [(one, one.default, bits[one.name]) for one in parameters]
        self._values = attrgetter(*bits)
        self._defaults = {name: one.encode(one.default) for name, one in columns.items()}
        self._in_effect = sum(bit for one, default, bit in self._parameters if default != one.off)
        self._of_logits = sum(bits[one.name] for one in parameters if one.use == "logits")
        self._row = Struct("=" + "".join(_FORMATS[self.dtype[name].str] for name in columns))

    def encode(self, sampling: Sampling) -> SequenceSampling:
        """Return what a sequence has in the columns. ValueError for a parameter that is out of its range."""
        row, in_effect = self._defaults.copy(), self._in_effect
        for value, (parameter, default, bit) in zip(self._values(sampling), self._parameters, strict=True):
            if value != default:
                parameter.check(value)
                in_effect = in_effect & ~bit if value == parameter.off else in_effect | bit
                if parameter.dtype is not None:
                    row[parameter.name] = parameter.encode(value)
        packed = self._row.pack(*row.values())
        return SequenceSampling(sampling, packed, in_effect, bool(in_effect & self._of_logits))


TABLE = ParameterTable(PARAMETERS)


class BatchUpdate(NamedTuple):
    """The sequences that were added to slots since the previous update, and the slots that are empty now.

    Each state's `sampling` is its `SequenceSampling`.
    """

    removed: list[int]
    added: list[tuple[int, SequenceState]]


class SamplingColumns:
    """The values of the parameters with columns, by slot. A slot keeps its values until it is used again."""

    def __init__(self, slots: int) -> None:
        self._values = np.zeros(slots, TABLE.dtype)
        self._rows = self._values.view(f"V{TABLE.dtype.itemsize}")  # the same; a row is assigned in one piece
        self._in_effect = np.zeros(slots, np.int64)  # `SequenceSampling.in_effect`; 0 for empty slots
        self._used = 0  # the same, of any sequence

    def __getitem__(self, name: str) -> np.ndarray:
        """Return a whole column, [slots]."""
        return self._values[name]

    def update_state(self, update: BatchUpdate) -> None:
        """Store the values of new sequences, and forget those that left."""
        for slot in update.removed:
            self._in_effect[slot] = 0
        for slot, state in update.added:
            sampling: SequenceSampling = state.sampling
            self._rows[slot] = sampling.row
            self._in_effect[slot] = sampling.in_effect
        self._used = int(np.bitwise_or.reduce(self._in_effect))

    def gather(self, slots: np.ndarray) -> dict[str, np.ndarray]:
        """Return the values for `slots` [S] of the parameters that any sequence uses: arrays [S] by name."""
        used = [name for name, bit in TABLE.columns.items() if self._used & bit]
        return {name: self._values[name][slots] for name in used}
