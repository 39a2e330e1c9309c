"""The matrices of a folder that are codes with scales, by the names that they would have as numbers.

A matrix stands for several tensors of the files. Its numbers are restored piece by piece, exactly as the
library that wrote them restores them. The CPU kernel gets blocks of 32 codes with their scale and code of 0,
if it has a format for them (`cext/cpustep/ggml.h`).
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar

import msgspec

from fairlead.base.errors import LoadFailed
from fairlead.language.checkpoint.quantized.schemes import Codes, Floats8, Scheme
from fairlead.language.checkpoint.tensor_file import StoredTensor

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import Tensor

_BLOCK = 32
# The kernel's formats, by the bits of a code, whether it is signed, and the type of a scale.
_PACKINGS = {
    (4, True, "F16"): "q4_0",
    (4, True, "BF16"): "s4_bf16",
    (4, False, "F16"): "u4_f16",
    (4, False, "BF16"): "u4_bf16",
    (8, True, "F16"): "q8_0",
    (8, True, "BF16"): "s8_bf16",
}


class QuantizedTensor(msgspec.Struct, frozen=True):
    """A matrix, or some of its rows: `CheckpointTensor`.

    name: as it would be called as numbers.
    shape: outputs and inputs.
    scheme: how its codes are kept.
    parts: the tensors of the files that it stands for, by the last part of their names.
    scale_type: the type of its scales.
    first: the first of these rows in the matrix.
    nbytes: what these rows take in the files.
    """

    form: ClassVar[str | None] = None  # its numbers can be had
    begin: ClassVar[int] = 1  # no numbers are at an aligned place: they are never used in place
    name: str
    shape: tuple[int, int]
    scheme: Scheme
    parts: Mapping[str, StoredTensor]
    scale_type: str
    nbytes: int
    first: int = 0

    @property
    def dtype(self) -> str:
        """How its codes are kept. Restored numbers are float32."""
        return self.scheme.name

    @property
    def packing(self) -> str | None:
        if isinstance(self.scheme, Floats8) or self.shape[1] % _BLOCK:
            return None
        size = self.scheme.group_size(self.parts)
        if size is None or size % _BLOCK:
            return None
        return _PACKINGS.get((self.scheme.bits, self.scheme.signed, self.scale_type))

    def fails(self, reason: str) -> LoadFailed:
        """Return the error to raise for this tensor."""
        path = next(iter(self.parts.values())).file.path
        return LoadFailed(f"{path}: tensor {self.name!r} {reason}")

    def check_floats(self) -> None:
        """Its codes are numbers."""

    def _codes(self) -> Codes:
        return self.scheme.codes(self.parts, range(self.first, self.first + self.shape[0]))

    def array(self) -> "np.ndarray":
        """Return its numbers, restored to float32."""
        import numpy as np

        codes = self._codes()
        scales = _as_floats(codes.scales)
        groups = codes.groups
        if groups is None:
            groups = np.arange(self.shape[1]) // (self.shape[1] // scales.shape[1])
        values = codes.values.astype(np.float32)
        if codes.zeros is not None:
            values -= codes.zeros.astype(np.float32)[:, groups]
        restored: np.ndarray = values * scales[:, groups]
        return restored

    def stored_rows(self) -> "np.ndarray":
        """Return its rows as blocks of the format that `packing` names."""
        import numpy as np

        codes = self._codes()
        rows, inputs = self.shape
        count = inputs // _BLOCK
        each = count // codes.scales.shape[1]
        scales = np.repeat(codes.scales, each, axis=1)[..., None].view(np.uint8).reshape(rows, count, 2)
        values = codes.values.reshape(rows, count, _BLOCK)
        if self.scheme.bits == 8:
            return np.concatenate((scales, values ^ 128), axis=-1).reshape(rows, -1)
        halves = values[..., :16] | values[..., 16:] << 4
        if self.scheme.signed or codes.zeros is None:
            return np.concatenate((scales, halves), axis=-1).reshape(rows, -1)
        zeros = np.repeat(codes.zeros, each, axis=1)[..., None].astype(np.uint8)
        return np.concatenate((scales, zeros, halves), axis=-1).reshape(rows, -1)

    def floats(self) -> "torch.dtype":
        """Return the dtype of its numbers."""
        import torch

        return torch.float32

    def mapped(self) -> "Tensor":
        """Return its numbers."""
        import torch

        return torch.from_numpy(self.array())

    def rows(self, rows: range) -> "QuantizedTensor":
        """Return these rows as a tensor of their own."""
        nbytes = self.nbytes * len(rows) // max(1, self.shape[0])
        shape = (len(rows), self.shape[1])
        return msgspec.structs.replace(self, shape=shape, first=self.first + rows.start, nbytes=nbytes)

    def pieces(self, size_bytes: int) -> Iterator["Tensor"]:
        """Yield its elements in order, flat, about `size_bytes` at a time."""
        for part in self._split(size_bytes):
            yield part.mapped().reshape(-1)

    def packed_pieces(self, columns: range, size_bytes: int) -> Iterator[tuple["Tensor", ...]]:
        """Yield these columns in order, some rows at a time."""
        for part in self._split(size_bytes):
            yield (part.mapped()[:, columns.start : columns.stop],)

    def read_ahead(self, size_bytes: int) -> Iterator[int]:
        """Yield the sizes of its parts: they are read when numbers are made of them."""
        for part in self._split(size_bytes):
            yield part.nbytes

    def drop_pages(self) -> None:
        """Drop it from memory with its last rows: some tensors have all rows side by side."""
        for part in self.parts.values():
            part.drop_pages()

    def _split(self, size_bytes: int) -> Iterator["QuantizedTensor"]:
        step = max(1, size_bytes // (4 * self.shape[1]))
        for first in range(0, self.shape[0], step):
            yield self.rows(range(first, min(first + step, self.shape[0])))


def _as_floats(scales: "np.ndarray") -> "np.ndarray":
    import numpy as np

    if scales.dtype == np.uint16:  # bfloat16
        return (scales.astype(np.uint32) << 16).view(np.float32)
    return scales.astype(np.float32)


def join_parts(
    tensors: Mapping[str, StoredTensor], scheme: Scheme
) -> dict[str, StoredTensor | QuantizedTensor]:
    """Return the tensors of a folder, with one in place of those that stand for a matrix.

    `LoadFailed` if one of these is missing, or does not fit the others.
    """
    joined: dict[str, StoredTensor | QuantizedTensor] = dict(tensors)
    for name, tensor in tensors.items():
        stem, _, last = name.rpartition(".")
        is_float8 = isinstance(scheme, Floats8) and last == "weight" and tensor.dtype.startswith("F8_")
        if last != scheme.key and not is_float8:
            continue
        if is_float8 and tensor.dtype != "F8_E4M3":
            raise tensor.fails(f"is of {tensor.dtype}, which is not supported (F8_E4M3 is)")
        parts = {last: tensor}
        for suffix in (*scheme.needed, *scheme.others):
            if (part := tensors.get(f"{stem}.{suffix}")) is not None:
                parts[suffix] = part
            elif suffix in scheme.needed:
                raise tensor.fails(f"has no {stem}.{suffix} beside it")
        for suffix in parts:
            del joined[f"{stem}.{suffix}"]
        scales = next(parts[suffix] for suffix in scheme.needed if "scale" in suffix)
        joined[f"{stem}.weight"] = QuantizedTensor(
            f"{stem}.weight",
            scheme.shape(parts),
            scheme,
            parts,
            scales.dtype,
            sum(part.nbytes for part in parts.values()),
        )
    return joined
