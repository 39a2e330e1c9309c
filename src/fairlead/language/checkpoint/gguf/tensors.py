"""The tensors of GGUF files, by the names of Hugging Face's layout, and in its order of rows.

A tensor is a range of a mapped file, with what is to be undone: llama.cpp stores the rows of queries and keys
in another order for some families, adds one to Gemma's norms, and stacks experts. Blocks are restored piece
by piece (`blocks.py`). The rows of the CPU kernel's own formats go to it as they are stored.
"""

import mmap
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import msgspec

from fairlead.base.errors import LoadFailed
from fairlead.language.checkpoint.gguf.header import BlockType, map_file

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import Tensor

_PLAIN = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class MappedFile:
    """A file in memory, mapped when its first byte is read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._memory: mmap.mmap | None = None

    @property
    def memory(self) -> mmap.mmap:
        if self._memory is None:
            self._memory = map_file(self.path)
        return self._memory

    def drop_pages(self, begin: int, end: int) -> None:
        """Drop the pages of these bytes from memory."""
        begin -= begin % mmap.PAGESIZE
        if hasattr(mmap, "MADV_DONTNEED") and begin < end:
            self.memory.madvise(mmap.MADV_DONTNEED, begin, end - begin)


class GgufTensor(msgspec.Struct, frozen=True):
    """A tensor, or some of its rows: `CheckpointTensor`.

    file: the file.
    name: ggml's name, for errors.
    shape: its sizes, the outermost first.
    type: how its numbers are stored.
    begin: where its content begins in the file, in bytes; of the whole matrix if rows are in another order.
    pairs: the number of heads whose rows have the channels of a pair side by side; 0: rows are in order.
    size: the rows of the whole matrix, if it has `pairs`.
    first: the first of these rows in the matrix, if it has `pairs`.
    offset: what was added to each number.
    """

    form: ClassVar[str | None] = None  # its numbers can be had whatever its type
    file: MappedFile
    name: str
    shape: tuple[int, ...]
    type: BlockType
    begin: int
    pairs: int = 0
    size: int = 0
    first: int = 0
    offset: float = 0.0

    @property
    def dtype(self) -> str:
        """ggml's name of how its numbers are stored. Restored numbers are float32."""
        return self.type.name

    @property
    def packing(self) -> str | None:
        """The kernel has ggml's names, in small letters."""
        return None if self.type.name in _PLAIN else self.type.name.lower()

    @property
    def nbytes(self) -> int:
        return self._row_bytes * self.shape[0] if self.shape else 0

    @property
    def _row_bytes(self) -> int:
        count = 1
        for size in self.shape[1:]:
            count *= size
        if len(self.shape) == 1:  # a row of a vector is a number
            return self.type.nbytes // self.type.elements
        return count // self.type.elements * self.type.nbytes

    def fails(self, reason: str) -> LoadFailed:
        """Return the error to raise for this tensor."""
        return LoadFailed(f"{self.file.path}: tensor {self.name!r} {reason}")

    def check_floats(self) -> None:
        """All types that the header's reader accepts are numbers."""

    def stored_rows(self) -> "np.ndarray":
        """Return its rows as they are stored, uint8 [rows, bytes], read-only."""
        import numpy as np

        rows, row_bytes, memory = self.shape[0], self._row_bytes, self.file.memory
        if not self.pairs:
            return np.frombuffer(memory, np.uint8, rows * row_bytes, self.begin).reshape(rows, row_bytes)
        whole = np.frombuffer(memory, np.uint8, self.size * row_bytes, self.begin)
        ordered: np.ndarray = whole.reshape(self.size, row_bytes)[self._order()]
        return ordered

    def _order(self) -> "np.ndarray":
        """Return where these rows are stored.

        A head of four channels is stored as 0 2 1 3: the first half of its channels, then the second, become
        pairs. So row i of the halves' order is stored at twice its place in its half, plus its half.
        """
        import numpy as np

        rows = np.arange(self.first, self.first + self.shape[0])
        channels = self.size // self.pairs
        head, channel = np.divmod(rows, channels)
        half, place = np.divmod(channel, channels // 2)
        order: np.ndarray = head * channels + 2 * place + half
        return order

    def array(self) -> "np.ndarray":
        """Return its numbers, bfloat16 as uint16: in place, unless they are restored or moved."""
        import numpy as np

        from fairlead.language.checkpoint.gguf.blocks import restore

        if self.type.name not in _PLAIN:
            return restore(self.stored_rows(), self.type.name).reshape(self.shape)
        dtype = np.dtype("uint16" if self.type.name == "BF16" else _PLAIN[self.type.name]).newbyteorder("<")
        numbers = self.stored_rows().view(dtype).reshape(self.shape)
        if not self.offset:
            return numbers
        floats = numbers if self.type.name != "BF16" else (numbers.astype(np.uint32) << 16).view(np.float32)
        less = floats.astype(np.float32) - np.float32(self.offset)
        if self.type.name == "BF16":  # exact: one less than a bfloat16 near 1 is one, too
            return (less.view(np.uint32) >> 16).astype(np.uint16)
        return less.astype(dtype)

    def floats(self) -> "torch.dtype":
        """Return the dtype of its numbers."""
        import torch

        dtype: torch.dtype = getattr(torch, _PLAIN.get(self.type.name, "float32"))
        return dtype

    def mapped(self) -> "Tensor":
        """Return its numbers: in place, unless they are restored or moved."""
        import torch

        array = self.array()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            return torch.from_numpy(array).view(self.floats())

    def rows(self, rows: range) -> "GgufTensor":
        """Return these rows as a tensor of their own."""
        shape = (len(rows), *self.shape[1:])
        if self.pairs:
            return msgspec.structs.replace(self, shape=shape, first=self.first + rows.start)
        return msgspec.structs.replace(self, shape=shape, begin=self.begin + rows.start * self._row_bytes)

    def parts(self) -> "list[GgufTensor]":
        """Return the tensors of which it is a stack, in order."""
        shape, nbytes = self.shape[1:], self.nbytes // self.shape[0]
        return [
            msgspec.structs.replace(self, shape=shape, begin=self.begin + index * nbytes)
            for index in range(self.shape[0])
        ]

    def pieces(self, size_bytes: int) -> Iterator["Tensor"]:
        """Yield its elements in order, flat, about `size_bytes` at a time; drop each piece after use."""
        for part in self._split(size_bytes):
            yield part.mapped().reshape(-1)
            part.drop_pages()

    def packed_pieces(self, columns: range, size_bytes: int) -> Iterator[tuple["Tensor", ...]]:
        """Yield these columns of a matrix in order, some rows at a time; drop each piece after use."""
        for part in self._split(size_bytes):
            yield (part.mapped()[:, columns.start : columns.stop],)
            part.drop_pages()

    def read_ahead(self, size_bytes: int) -> Iterator[int]:
        """Read it into memory, about `size_bytes` at a time; yield how many bytes each time."""
        for part in self._split(size_bytes):
            part.stored_rows()[:, :: mmap.PAGESIZE].sum()  # touches each page
            yield part.nbytes

    def drop_pages(self) -> None:
        """Drop it from memory; it is read again if it is used again.

        Rows in another order are dropped with the last of the matrix.
        """
        if not self.pairs:
            self.file.drop_pages(self.begin, self.begin + self.nbytes)
        elif self.first + self.shape[0] == self.size:
            self.file.drop_pages(self.begin, self.begin + self.size * self._row_bytes)

    def _split(self, size_bytes: int) -> Iterator["GgufTensor"]:
        """Yield its rows in order, some at a time, of about `size_bytes` when they are restored."""
        count = max(1, self.nbytes // self._row_bytes) if self.shape[0] else 1
        numbers = max(1, self._row_bytes // self.type.nbytes * self.type.elements)
        step = max(1, min(count, size_bytes // (numbers * self._number_bytes)))
        for first in range(0, self.shape[0], step):
            yield self.rows(range(first, min(first + step, self.shape[0])))

    @property
    def _number_bytes(self) -> int:
        return 2 if self.type.name in ("F16", "BF16") else 4
