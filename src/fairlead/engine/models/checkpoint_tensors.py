"""The tensors of a checkpoint, whose files are mapped into memory, while a model is made from them.

A model takes its tensors by name and shape; `finish` then rejects a checkpoint with tensors left over.
Guarantees `LoadFailed` with the file and the tensor at fault. Never unpickles, and never imports torch:
`engine/models/weights.py` makes tensors of torch from them.
"""

import logging
import math
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Self

import msgspec
import numpy as np

from fairlead.base.errors import LoadFailed
from fairlead.engine.models.numbers import narrow, widen
from fairlead.language.checkpoint.architecture import ArchitectureSpec
from fairlead.language.checkpoint.checkpoint import Checkpoint, CheckpointTensor

logger = logging.getLogger(__name__)

_PROGRESS_STEPS = 40
_PIECE_BYTES = 16 * 1024 * 1024  # of a file that are in memory at once during a copy


class CheckpointTensors:
    """The tensors of a checkpoint. Use it as a context manager: the files close at its end.

    dtype: the name of the numbers' type to compute in.
    report: called with the fraction read, 0…1, at least every 5 %.
    readers: how many processes divide the tensors among themselves. This one reads a part.

    `listing` is the file that lists the tensors, `bytes_total` their size. `bytes_read` counts what was read.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        dtype: str,
        report: Callable[[float], None] = lambda _: None,
        readers: int = 1,
    ) -> None:
        self.number_type = dtype
        self._report = report
        self._taken: dict[str, CheckpointTensor] = {}
        self.listing, listed = checkpoint.tensors()
        self._tensors = dict(listed)
        self.bytes_total = self._count()
        self.bytes_read = 0
        self._readers = readers
        self._reported = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._tensors.clear()
        self._taken.clear()

    def fails(self, name: str, reason: str) -> LoadFailed:
        """Return the error to raise for a tensor that was taken."""
        return self._taken[name].fails(reason)

    def rename(self, rule: Callable[[str], str | None]) -> None:
        """Rename every tensor by `rule`; drop those for which it returns None.

        For checkpoints that contain the model as part of a larger one. `LoadFailed` if two get one name.
        """
        renamed: dict[str, CheckpointTensor] = {}
        for name, tensor in self._tensors.items():
            if (new := rule(name)) is None:
                continue
            if new in renamed:
                raise tensor.fails(f"has the same name as {renamed[new].name!r}, {new!r}")
            renamed[new] = tensor
        self._tensors = renamed
        self.bytes_total = self._count()

    def ties(self, embedding: str, head: str) -> bool:
        """Return whether a `head` that the configuration ties to the `embedding` is tied.

        As in transformers 5, it is not if the checkpoint has both and they differ in the dtype that is
        computed in. Some fine-tunes train the head alone, and leave the configuration as it was. A second
        copy is dropped; a checkpoint may also have the head only.
        """
        table_name, head_name = f"{embedding}.weight", f"{head}.weight"
        own = self._tensors.get(head_name)
        if own is None:
            return True
        table = self._tensors.get(table_name)
        if table is not None and not self._are_equal(table, own):
            logger.warning("%s: %s is used: it differs from %s", self.listing, head_name, table_name)
            return False
        del self._tensors[head_name]
        self._tensors.setdefault(table_name, own)
        self.bytes_total = self._count()
        return True

    def pieces(self, name: str, *shape: int) -> Iterator[np.ndarray]:
        """Take one tensor, which must have this shape; yield its rows in order as `narrow` returns them.

        Some rows of a matrix at a time, or a whole vector. Pages of the file that were read are dropped.
        """
        tensor = self._take(name, shape)
        if tensor.form is not None:
            raise tensor.fails(f"is stored as {tensor.form}, which the CPU kernel does not read")
        # Blocks of a few bits become numbers of at least two bytes.
        row_bytes = max(1, tensor.nbytes // max(1, shape[0]), 2 * math.prod(shape[1:]))
        step = max(1, self._piece_bytes // row_bytes) if len(shape) > 1 else shape[0]
        for first in range(0, shape[0], step):
            rows = tensor.rows(range(first, min(first + step, shape[0])))
            yield narrow(rows.array(), rows.dtype, self.number_type)
            rows.drop_pages()
            self._read(rows.nbytes)

    def count_numbers(self) -> int:
        """Return how many numbers all tensors have."""
        return sum(math.prod(tensor.shape) for tensor in self._tensors.values())

    def packing(self, name: str) -> str | None:
        """Return the kernel's format in which a tensor is stored; None if it has none, or is not there."""
        return self._tensors[name].packing if name in self._tensors else None

    def stored_pieces(self, name: str, *shape: int) -> Iterator[np.ndarray]:
        """Take one matrix, which must have this shape; yield its rows in order as they are stored.

        They are uint8 [rows, bytes], some rows at a time. Pages of the file that were read are dropped.
        """
        tensor = self._take(name, shape)
        step = max(1, self._piece_bytes * shape[0] // max(1, tensor.nbytes))
        for first in range(0, shape[0], step):
            rows = tensor.rows(range(first, min(first + step, shape[0])))
            yield np.ascontiguousarray(rows.stored_rows())
            rows.drop_pages()
            self._read(rows.nbytes)

    def finish(self) -> None:
        """Report completion; raise `LoadFailed` if a tensor is left, because this is another model then."""
        left = [tensor for name, tensor in self._tensors.items() if not name.endswith("rotary_emb.inv_freq")]
        for tensor in left:
            raise tensor.fails(f"is unexpected ({len(left)} in all): this is another model")
        self._report(1.0)

    @property
    def _piece_bytes(self) -> int:
        return min(_PIECE_BYTES, self.bytes_total // _PROGRESS_STEPS)

    def _are_equal(self, one: CheckpointTensor, other: CheckpointTensor) -> bool:
        """Compare two tensors piece by piece, up to the first difference."""
        if one.shape != other.shape or not one.nbytes:
            return False
        size = one.shape[0]
        step = max(1, _PIECE_BYTES * size // max(one.nbytes, other.nbytes))
        for first in range(0, size, step):
            pieces = [tensor.rows(range(first, min(first + step, size))) for tensor in (one, other)]
            values = [widen(narrow(piece.array(), piece.dtype, self.number_type)) for piece in pieces]
            are_equal = np.array_equal(values[0], values[1])
            for piece in pieces:
                piece.drop_pages()
            if not are_equal:
                return False
        return True

    def _take(self, name: str, shape: tuple[int, ...]) -> CheckpointTensor:
        if name not in self._tensors:
            raise LoadFailed(f"{self.listing}: tensor {name!r} is missing")
        tensor = self._tensors.pop(name)
        if tensor.shape != shape:
            raise tensor.fails(f"has shape {list(tensor.shape)}, expected {list(shape)}")
        if tensor.form is None:
            tensor.check_floats()
        self._taken[name] = tensor
        return tensor

    def _read(self, size_bytes: int) -> None:
        self.bytes_read += size_bytes
        fraction = min(1.0, self._readers * self.bytes_read / self.bytes_total)
        if fraction - self._reported >= 1 / _PROGRESS_STEPS:
            self._reported = fraction
            self._report(fraction)

    def _count(self) -> int:
        return max(1, sum(tensor.nbytes for tensor in self._tensors.values()))


def tied_as_stored(spec: ArchitectureSpec, tensors: CheckpointTensors) -> ArchitectureSpec:
    """Return the network with its own head if the checkpoint has one that differs from the embedding.

    `tensors` must have the names of `spec` already.
    """
    has_head = not spec.headless or spec.score_tokens
    if not spec.tied or not has_head or tensors.ties(spec.names.embedding, spec.names.head):
        return spec
    return msgspec.structs.replace(spec, tied=False)
