"""A safetensors file, mapped into memory: which tensors it has, and their bytes piece by piece.

A file is 8 bytes with the header's length, the header in JSON, and the tensors' bytes without a gap.
Guarantees that any other file is a `LoadFailed` with its name before a tensor of it is touched, and that
pages which have been read are dropped from memory by `drop_pages`. Imports numpy and torch for the content
only, and torch only where a tensor of it is asked for: the parent process reads headers, too.
"""

import json
import math
import mmap
import stat
import struct
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from fairlead.base.errors import LoadFailed

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import Tensor

_LENGTH = struct.Struct("<Q")
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_MAX_DIMENSIONS = 8
# The dtypes that weights are made from: their names in torch, and their bits per element.
_FLOATS = {"F64": ("float64", 64), "F32": ("float32", 32), "F16": ("float16", 16), "BF16": ("bfloat16", 16)}
# Bits per element of the dtypes that a file may contain, but that weights cannot be made from.
_OTHERS = {
    "BOOL": 8,
    **{f"{kind}{bits}": bits for kind in "IU" for bits in (8, 16, 32, 64)},
    **dict.fromkeys(("F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "C64": 64,
}


class StoredTensor(msgspec.Struct, frozen=True):
    """A tensor as its file describes it; its content is not read yet.

    form: the format of its weights; a safetensors file has numbers, so it is None.
    file: the file.
    name: the tensor's name.
    dtype: the name of its type.
    shape: its sizes.
    begin: where its content begins in the file, in bytes.
    nbytes: the size of its content.
    """

    form: ClassVar[str | None] = None  # a safetensors file has numbers, in no format of weights
    packing: ClassVar[str | None] = None
    file: "TensorFile"
    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    nbytes: int

    def fails(self, reason: str) -> LoadFailed:
        """Return the error to raise for this tensor."""
        return LoadFailed(f"{self.file.path}: tensor {self.name!r} {reason}")

    def check_floats(self) -> None:
        """Raise `LoadFailed` unless weights can be made from its numbers."""
        if self.dtype not in _FLOATS:
            raise self.fails(f"is of {self.dtype}, which is not supported ({', '.join(_FLOATS)} are)")

    def array(self) -> "np.ndarray":
        """Return its numbers in place in the file, read-only; bfloat16 as uint16."""
        import numpy as np

        self.check_floats()
        name = _FLOATS[self.dtype][0]
        dtype = np.dtype("uint16" if name == "bfloat16" else name).newbyteorder("<")
        count = self.nbytes // dtype.itemsize
        return np.frombuffer(self.file.memory, dtype, count, self.begin).reshape(self.shape)

    def stored_rows(self) -> "np.ndarray":
        """Return its rows as bytes."""
        import numpy as np

        return np.frombuffer(self.file.memory, np.uint8, self.nbytes, self.begin).reshape(self.shape[0], -1)

    def floats(self) -> "torch.dtype":
        """Return its dtype; `LoadFailed` unless weights can be made from it."""
        import torch

        self.check_floats()
        dtype: torch.dtype = getattr(torch, _FLOATS[self.dtype][0])
        return dtype

    def mapped(self) -> "Tensor":
        """Return the tensor in place in the file: read-only, and read from there when it is used."""
        return self._view(0, self.nbytes).view(self.shape)

    def rows(self, rows: range) -> "StoredTensor":
        """Return these rows as a tensor of their own."""
        row_bytes = self.nbytes // self.shape[0] if self.shape[0] else 0
        return StoredTensor(
            self.file,
            self.name,
            self.dtype,
            (len(rows), *self.shape[1:]),
            self.begin + rows.start * row_bytes,
            len(rows) * row_bytes,
        )

    def pieces(self, size_bytes: int) -> Iterator["Tensor"]:
        """Yield its elements in order, flat, about `size_bytes` at a time; drop each piece after use."""
        for start, stop in self._ranges(size_bytes):
            yield self._view(start, stop)
            self.file.drop_pages(self.begin + start, self.begin + stop)

    def packed_pieces(self, columns: range, size_bytes: int) -> Iterator[tuple["Tensor", ...]]:
        """Yield these columns of a matrix in order, some rows at a time; drop each piece after use.

        Only they are read, as far as the system reads no whole page and none ahead.
        """
        size = self.shape[0]
        step = max(1, size_bytes * size // max(1, self.nbytes))
        for first in range(0, size, step):
            rows = self.rows(range(first, min(first + step, size)))
            yield (rows.mapped()[:, columns.start : columns.stop],)
            rows.drop_pages()

    def read_ahead(self, size_bytes: int) -> Iterator[int]:
        """Read it into memory, about `size_bytes` at a time; yield how many bytes each time."""
        for start, stop in self._ranges(size_bytes):
            self._view(start, stop)[:: mmap.PAGESIZE // self.floats().itemsize].sum()  # touches each page
            yield stop - start

    def drop_pages(self) -> None:
        """Drop its pages from memory; they are read again if they are used again."""
        self.file.drop_pages(self.begin, self.begin + self.nbytes)

    def _ranges(self, size_bytes: int) -> Iterator[tuple[int, int]]:
        itemsize = self.floats().itemsize
        step = max(itemsize, size_bytes // itemsize * itemsize)
        for start in range(0, self.nbytes, step):
            yield start, min(start + step, self.nbytes)

    def _view(self, start: int, stop: int) -> "Tensor":
        import torch

        dtype = self.floats()
        if start == stop:
            return torch.empty(0, dtype=dtype)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            count = (stop - start) // dtype.itemsize
            return torch.frombuffer(self.file.memory, dtype=dtype, count=count, offset=self.begin + start)


class TensorFile:
    """The file at `path`; `tensors` by name. The mapping lasts as long as anything made from it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would block forever
                raise self._fails("not a file")
            with path.open("rb") as file:
                size = path.stat().st_size
                if size < _LENGTH.size:
                    raise self._fails(f"{size} bytes are too few for a safetensors file")
                self.memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: the path is malformed
            raise self._fails(str(getattr(error, "strerror", None) or error)) from error
        header, begin = self._read_header()
        self.tensors = {name: self._describe(name, entry, begin) for name, entry in header.items()}
        self._check_layout(begin)

    def drop_pages(self, begin: int, end: int) -> None:
        """Drop the pages of these bytes from memory."""
        begin -= begin % mmap.PAGESIZE
        if hasattr(mmap, "MADV_DONTNEED") and begin < end:
            self.memory.madvise(mmap.MADV_DONTNEED, begin, end - begin)

    def _fails(self, reason: str) -> LoadFailed:
        return LoadFailed(f"{self.path}: {reason}")

    def _read_header(self) -> tuple[dict[str, Any], int]:
        """Return the header's entries without its metadata, and where the tensors' bytes begin."""
        (length,) = _LENGTH.unpack(self.memory[: _LENGTH.size])
        begin = _LENGTH.size + length
        if length > _MAX_HEADER_BYTES or begin > len(self.memory):
            raise self._fails(f"a header of {length} bytes in a file of {len(self.memory)}")
        try:
            header = json.loads(self.memory[_LENGTH.size : begin], object_pairs_hook=self._without_duplicates)
        except (ValueError, RecursionError) as error:
            raise self._fails(f"its header is not valid JSON: {error}") from error
        if not isinstance(header, dict):
            raise self._fails("its header is not a JSON object")
        header.pop("__metadata__", None)
        return header, begin

    def _without_duplicates(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        entries = dict(pairs)
        if len(entries) != len(pairs):
            names = [name for name, _ in pairs]
            duplicate = next(name for name in entries if names.count(name) > 1)
            raise self._fails(f"its header has {duplicate!r} twice")
        return entries

    def _describe(self, name: str, entry: object, begin: int) -> StoredTensor:
        match entry:
            case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(start), int(stop)]}:
                pass
            case _:
                raise self._fails(f"its header lacks dtype, shape or data_offsets of {name!r}")
        if len(shape) > _MAX_DIMENSIONS or not all(type(size) is int and size >= 0 for size in shape):
            raise self._fails(f"tensor {name!r} has the shape {shape!r:.200}")
        bits = _FLOATS[dtype][1] if dtype in _FLOATS else _OTHERS.get(dtype)
        if bits is None:
            raise self._fails(f"tensor {name!r} is of {dtype!r:.50}, which is not known")
        size = len(self.memory) - begin
        if not 0 <= start <= stop <= size:
            raise self._fails(
                f"tensor {name!r} is at {start}…{stop} of {size} bytes: the file is truncated or its header "
                "is wrong"
            )
        if math.prod(shape) * bits != (stop - start) * 8:
            raise self._fails(f"tensor {name!r} of {dtype} {shape} cannot take {stop - start} bytes")
        return StoredTensor(self, name, dtype, tuple(shape), begin + start, stop - start)

    def _check_layout(self, begin: int) -> None:
        """Check that each byte belongs to exactly one tensor; gaps could hide another file."""
        reached = begin
        for tensor in sorted(self.tensors.values(), key=lambda tensor: (tensor.begin, tensor.nbytes)):
            if tensor.begin != reached:
                what = "overlaps another" if tensor.begin < reached else "has a gap before it"
                raise tensor.fails(what)
            reached += tensor.nbytes
        if reached != len(self.memory):
            raise self._fails(f"{len(self.memory) - reached} bytes at its end belong to no tensor")
