"""Makes tensors and layers of torch from a checkpoint's tensors (`checkpoint_tensors.CheckpointTensors`).

In memory, beside the weights, there is never more than the one tensor that is being made.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from fairlead.engine.models.checkpoint_tensors import CheckpointTensors
from fairlead.engine.models.layers import Embedding
from fairlead.engine.models.linear import Linear, Packed, WeightFormat
from fairlead.engine.models.quantization import find_format
from fairlead.engine.models.quantization.none import NONE, UnquantizedLinear
from fairlead.language.checkpoint.checkpoint import Checkpoint, CheckpointTensor

_SHARED_BUFFER_BYTES = 64 * 1024 * 1024  # twice the size up to which the allocator keeps freed memory

KeptRows = Mapping[str, Sequence[range]]
"""Which rows of each tensor to read, by name."""


class Weights(CheckpointTensors):
    """The tensors of a checkpoint, provided as `dtype` on `device`.

    `quantization` is the format of the layers that may be quantized. `bytes_placed` counts what is in the
    device's memory now. A file with a tensor that is used in place stays open at the end.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        dtype: torch.dtype,
        device: torch.device,
        report: Callable[[float], None] = lambda _: None,
        quantization: WeightFormat = NONE,
        readers: int = 1,
    ) -> None:
        super().__init__(checkpoint, dtype=str(dtype).removeprefix("torch."), report=report, readers=readers)
        self.dtype = dtype
        self._quantization = quantization
        self.device = device
        self.bytes_placed = 0
        self._shared_buffer = torch.empty(0, dtype=dtype)

    def tensor(self, name: str, *shape: int) -> Tensor:
        """Take one tensor, which must have this shape."""
        return self.stack({name: shape[0]}, shape[1:])

    def stack(
        self, rows: Mapping[str, int], rest: Sequence[int] = (), *, kept: KeptRows | None = None
    ) -> Tensor:
        """Take the named tensors, each [rows, *rest], and concatenate them along the rows.

        With `kept`, only these rows of each are read.
        """
        sources = self._take_all(rows, rest, kept)
        size = sum(source.shape[0] for source in sources)
        tensor = torch.empty((size, *rest), dtype=self.dtype, device=self.device)
        self._copy(sources, tensor)
        self.bytes_placed += tensor.nbytes
        return tensor

    def linear(
        self,
        rows: Mapping[str, int],
        inputs: int,
        *,
        bias: bool = False,
        quantized: bool = True,
        kept: KeptRows | None = None,
        columns: range | None = None,
    ) -> Linear:
        """Take projections of the same input, fused into one: `rows` maps names to their output sizes.

        With `kept` or `columns`, only these rows of each, biases included, or these inputs of all are read.

        Rows that are stored in a format are stacked in it, and keep it whatever `quantized` says. Others are
        packed piece by piece: no narrow weight is in memory expanded.
        """
        sources = self._take_all(_suffixed(rows, ".weight"), (inputs,), kept and _suffixed(kept, ".weight"))
        outputs = sum(source.shape[0] for source in sources)
        columns = range(inputs) if columns is None else columns
        form = self._form_of(sources, columns, quantized=quantized)
        if not form.suits(outputs, len(columns)):
            form = NONE
        packed = self._pack(form, sources, outputs, columns)
        offset = None
        if bias:
            offset = self.stack(_suffixed(rows, ".bias"), kept=kept and _suffixed(kept, ".bias"))
        linear = form.linear(packed, len(columns), offset)
        self.bytes_placed += linear.nbytes
        return linear

    def vocabulary(
        self,
        name: str,
        head: str | None,
        vocab_size: int,
        hidden: int,
        *,
        tied: bool,
        tokens: range | None = None,
    ) -> tuple[Embedding, Linear | None]:
        """Take the embedding `name` and the projection `head` to the vocabulary, `tied`: the same table.

        Whether it is tied is what `ties` says. With `tokens`, only their rows are read. Call it before making
        the layers: the head, the largest weight, is in memory twice while reordered.
        """
        rows = {f"{name}.weight": vocab_size}
        kept = None if tokens is None else {f"{name}.weight": [tokens]}
        if head is None:
            return Embedding(self.stack(rows, (hidden,), kept=kept)), None
        if not tied:
            return Embedding(self.stack(rows, (hidden,), kept=kept)), self.linear(
                {head: vocab_size},
                hidden,
                quantized=False,
                kept=None if tokens is None else {head: [tokens]},
            )
        if not (
            UnquantizedLinear.reorders(self.dtype, self.device) and self._usable_in_place(f"{name}.weight")
        ):
            table = self.stack(rows, (hidden,), kept=kept)
            return Embedding(table), self._tied_head(table)
        # Embedding rows are read from the mapped file, so that the table is in memory only as the head.
        [source] = self._take_all(rows, (hidden,), kept)
        for size in source.read_ahead(self._piece_bytes):
            self._read(size)
        table = source.mapped()
        projection = self._tied_head(table)
        source.drop_pages()
        return Embedding(table), projection

    def _take_all(
        self, rows: Mapping[str, int], rest: Sequence[int], kept: KeptRows | None
    ) -> list[CheckpointTensor]:
        taken = {name: self._take(name, (size, *rest)) for name, size in rows.items()}
        if kept is None:
            return list(taken.values())
        return [tensor.rows(part) for name, tensor in taken.items() for part in kept[name]]

    def _copy(self, sources: Sequence[CheckpointTensor], to: Tensor) -> None:
        flat, start = to.view(-1), 0
        for source in sources:
            for piece in source.pieces(self._piece_bytes):
                flat[start : start + len(piece)].copy_(piece)
                start += len(piece)
                self._read(piece.nbytes)

    def _form_of(
        self, sources: Sequence[CheckpointTensor], columns: range, *, quantized: bool
    ) -> WeightFormat:
        """Return the format of a weight with these rows: the one in which all are stored, if any."""
        forms = {source.form for source in sources}
        if forms == {None}:
            return self._quantization if quantized else NONE
        if len(forms) > 1 or len(columns) < sources[0].shape[1]:
            raise sources[0].fails("is stored in a format of its own, and cannot be divided or fused")
        return find_format(*forms)

    def _pack(
        self, form: WeightFormat, sources: Sequence[CheckpointTensor], rows: int, columns: range
    ) -> Packed:
        """Return these columns of all sources, one after another, in a format."""
        packed: Packed = (self._buffer(rows, len(columns)),) if form is NONE else ()
        first = 0
        for source in sources:
            for piece in source.packed_pieces(columns, self._piece_bytes):
                parts = piece
                if source.form is None and form is not NONE:
                    parts = form.pack(piece[0].to(device=self.device, dtype=self.dtype))
                if not packed:
                    packed = tuple(
                        torch.empty((rows, *part.shape[1:]), dtype=part.dtype, device=self.device)
                        for part in parts
                    )
                last = first + len(parts[0])
                for whole, part in zip(packed, parts, strict=True):
                    whole[first:last].copy_(part)
                first = last
                self._read(sum(part.nbytes for part in piece))
        return packed

    def _buffer(self, rows: int, columns: int) -> Tensor:
        """Return memory for a linear layer's weight [rows, columns].

        If the layer reorders it, this memory is free again at once. It is one reused buffer then, because
        pieces of all sizes would fragment the heap. The largest are returned to the system when freed.
        """
        size = rows * columns
        reorders = UnquantizedLinear.reorders(self.dtype, self.device)
        if not reorders or size * self.dtype.itemsize > _SHARED_BUFFER_BYTES:
            return torch.empty((rows, columns), dtype=self.dtype, device=self.device)
        if len(self._shared_buffer) < size:
            self._shared_buffer = torch.empty(size, dtype=self.dtype)
        return self._shared_buffer[:size].view(rows, columns)

    def _tied_head(self, table: Tensor) -> Linear:
        if UnquantizedLinear.reorders(self.dtype, self.device):
            self.bytes_placed += table.nbytes  # else the head uses the embedding's table
        return UnquantizedLinear(table)

    def _usable_in_place(self, name: str) -> bool:
        """Return whether the tensor can be used in place in its file."""
        if self.device.type != "cpu" or name not in self._tensors:
            return False
        tensor = self._tensors[name]
        return tensor.floats() == self.dtype and tensor.begin % self.dtype.itemsize == 0


_Value = TypeVar("_Value")


def _suffixed(values: Mapping[str, _Value], suffix: str) -> dict[str, _Value]:
    return {name + suffix: value for name, value in values.items()}
