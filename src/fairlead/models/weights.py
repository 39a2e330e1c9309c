"""Takes tensors out of a checkpoint: safetensors, mapped into memory, one file or shards with an index.

A model asks for what it is made of, by name and shape, while it is being built; `finish` then says
what nobody asked for. Promises `LoadFailed` with the file and the tensor at fault, and that beside the
weights there is never more in memory than the one tensor that is being made. Never unpickles.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from fairlead.errors import LoadFailed
from fairlead.models.config import Config
from fairlead.models.layers import Embedding, GatedMLP, Linear, RMSNorm
from fairlead.models.tensor_file import StoredTensor, TensorFile

_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_PROGRESS_STEPS = 40
_ROOM_BYTES = 64 * 1024 * 1024  # twice what the allocator keeps for itself when it is freed
_PIECE_BYTES = 16 * 1024 * 1024  # of a file that are in memory at once while they are copied


class Weights:
    """The tensors of the checkpoint in `directory`, given out as `dtype` on `device`.

    `report` is called with the fraction read, 0…1, at least every 5 %. `bytes_placed` counts what is in
    the device's memory now. `make_linear` makes the layers that need not be exact. Use it as a context: the
    files are closed at its end, but for those of which a tensor is used where it lies.
    """

    def __init__(
        self,
        directory: Path,
        *,
        dtype: torch.dtype,
        device: torch.device,
        report: Callable[[float], None] = lambda _: None,
        make_linear: Callable[[Tensor, Tensor | None], Linear] = Linear,
    ) -> None:
        self.dtype = dtype
        self._make_linear = make_linear
        self.device = device
        self.bytes_placed = 0
        self._report = report
        self._tensors: dict[str, StoredTensor] = {}
        self._taken: dict[str, StoredTensor] = {}
        self._listing = directory
        self._open(directory)
        self._bytes_total = self._count()
        self._shared_room = torch.empty(0, dtype=dtype)
        self._bytes_read = 0
        self._reported = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._tensors.clear()
        self._taken.clear()

    def __contains__(self, name: str) -> bool:
        """Whether the tensor is there and nobody has taken it yet."""
        return name in self._tensors

    @property
    def listing(self) -> Path:
        """The file that says which tensors there are."""
        return self._listing

    @property
    def bytes_total(self) -> int:
        """The size of all tensors in the checkpoint."""
        return self._bytes_total

    def fails(self, name: str, reason: str) -> LoadFailed:
        """The error to raise for a tensor that was taken."""
        return self._taken[name].fails(reason)

    def rename(self, rule: Callable[[str], str | None]) -> None:
        """Call every tensor what `rule` makes of its name; one of which it makes None is left out.

        For checkpoints that have a model's tensors as part of a larger one. `LoadFailed` if two get one name.
        """
        renamed: dict[str, StoredTensor] = {}
        for name, tensor in self._tensors.items():
            if (new := rule(name)) is None:
                continue
            if new in renamed:
                raise tensor.fails(f"is called {new!r} like {renamed[new].name!r}")
            renamed[new] = tensor
        self._tensors = renamed
        self._bytes_total = self._count()

    def tensor(self, name: str, *shape: int) -> Tensor:
        """Take one tensor, which must have this shape."""
        return self.stack({name: shape[0]}, shape[1:])

    def stack(self, rows: Mapping[str, int], rest: Sequence[int] = ()) -> Tensor:
        """Take the named tensors, each [rows, *rest], and lay them below one another."""
        sources = self._take_all(rows, rest)
        placed = torch.empty((sum(rows.values()), *rest), dtype=self.dtype, device=self.device)
        self._lay(sources, placed)
        return placed

    def linear(
        self, rows: Mapping[str, int], inputs: int, *, bias: bool = False, exact: bool = False
    ) -> Linear:
        """Take projections of the same input, fused into one: `rows` maps names to their output sizes.

        An `exact` one is never rounded to fewer bits.
        """
        sources = self._take_all({f"{name}.weight": size for name, size in rows.items()}, (inputs,))
        placed = self._room(sum(rows.values()), inputs)
        self._lay(sources, placed)
        offset = self.stack({f"{name}.bias": size for name, size in rows.items()}) if bias else None
        made = Linear(placed, offset) if exact else self._make_linear(placed, offset)
        self.bytes_placed -= made.saved_bytes
        return made

    def norm(self, name: str, size: int, epsilon: float) -> RMSNorm:
        return RMSNorm(self.tensor(f"{name}.weight", size), epsilon)

    def mlp(
        self, name: str, hidden: int, inner: int, *, bias: bool = False, activation: str = "silu"
    ) -> GatedMLP:
        gate_up = self.linear({f"{name}.gate_proj": inner, f"{name}.up_proj": inner}, hidden, bias=bias)
        down = self.linear({f"{name}.down_proj": hidden}, inner, bias=bias)
        return GatedMLP(gate_up, down, activation)

    def vocabulary(
        self, name: str, head: str | None, vocab_size: int, hidden: int, *, tied: bool
    ) -> tuple[Embedding, Linear | None]:
        """Take the embedding `name` and the projection `head` to the vocabulary, `tied`: the same table.

        Before the layers, since nothing is as large: while the head is rearranged, it is there twice.
        """
        if head is None:
            return Embedding(self.tensor(f"{name}.weight", vocab_size, hidden)), None
        if not tied:
            return Embedding(self.tensor(f"{name}.weight", vocab_size, hidden)), self.linear(
                {head: vocab_size}, hidden, exact=True
            )
        self._tensors.pop(f"{head}.weight", None)  # some checkpoints keep a second copy
        if not (Linear.rearranges(self.dtype, self.device) and self._fits_as_it_is(f"{name}.weight")):
            table = self.tensor(f"{name}.weight", vocab_size, hidden)
            return Embedding(table), self._tied_head(table)
        # Rows of it are looked up in the file, so that the table is in memory only once, as the head.
        source = self._take(f"{name}.weight", (vocab_size, hidden))
        for size in source.read_ahead(self._piece_bytes):
            self._read(size)
        table = source.mapped()
        projection = self._tied_head(table)
        source.let_go()
        return Embedding(table), projection

    def finish(self) -> None:
        """Report that all is read; a tensor that nobody took means that this is another model."""
        left = [tensor for name, tensor in self._tensors.items() if not name.endswith("rotary_emb.inv_freq")]
        for tensor in left:
            raise tensor.fails(f"is unexpected ({len(left)} in all): this is another model")
        self._report(1.0)

    def _take_all(self, rows: Mapping[str, int], rest: Sequence[int]) -> list[StoredTensor]:
        return [self._take(name, (size, *rest)) for name, size in rows.items()]

    def _lay(self, sources: Sequence[StoredTensor], placed: Tensor) -> None:
        flat, start = placed.view(-1), 0
        for source in sources:
            for piece in source.pieces(self._piece_bytes):
                flat[start : start + len(piece)].copy_(piece)
                start += len(piece)
                self._read(piece.nbytes)
        self.bytes_placed += placed.nbytes

    def _room(self, rows: int, columns: int) -> Tensor:
        """Memory for a linear layer's weight [rows, columns].

        Where the layer rearranges it, what it came in is free again at once: always the same piece of
        memory, since pieces of all sizes would leave holes. The largest ones are the system's own to free.
        """
        size = rows * columns
        if not Linear.rearranges(self.dtype, self.device) or size * self.dtype.itemsize > _ROOM_BYTES:
            return torch.empty((rows, columns), dtype=self.dtype, device=self.device)
        if len(self._shared_room) < size:
            self._shared_room = torch.empty(size, dtype=self.dtype)
        return self._shared_room[:size].view(rows, columns)

    @property
    def _piece_bytes(self) -> int:
        return min(_PIECE_BYTES, self._bytes_total // _PROGRESS_STEPS)

    def _tied_head(self, table: Tensor) -> Linear:
        head = Linear(table)
        if head.owns_a_copy:
            self.bytes_placed += table.nbytes
        return head

    def _fits_as_it_is(self, name: str) -> bool:
        """Whether the tensor can be used where it lies in its file."""
        if self.device.type != "cpu" or name not in self._tensors:
            return False
        tensor = self._tensors[name]
        return tensor.floats() == self.dtype and tensor.begin % self.dtype.itemsize == 0

    def _take(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        if name not in self._tensors:
            raise LoadFailed(f"{self._listing}: tensor {name!r} is missing")
        tensor = self._tensors.pop(name)
        if tensor.shape != shape:
            raise tensor.fails(f"has shape {list(tensor.shape)}, expected {list(shape)}")
        tensor.floats()
        self._taken[name] = tensor
        return tensor

    def _read(self, size_bytes: int) -> None:
        self._bytes_read += size_bytes
        fraction = min(1.0, self._bytes_read / self._bytes_total)
        if fraction - self._reported >= 1 / _PROGRESS_STEPS:
            self._reported = fraction
            self._report(fraction)

    def _count(self) -> int:
        return max(1, sum(tensor.nbytes for tensor in self._tensors.values()))

    def _open(self, directory: Path) -> None:
        """Open every file of the checkpoint; `_listing` becomes what names them."""
        index, single = directory / "model.safetensors.index.json", directory / "model.safetensors"
        if index.is_file():
            self._listing = index
            self._open_shards(Config.read(index), directory)
        elif single.exists():
            self._listing = single
            self._tensors = dict(TensorFile(single).tensors)
        elif any(found for pattern in _PICKLED for found in directory.glob(pattern)):
            raise LoadFailed(
                f"{directory}: only pickled weights here; safetensors are needed, pickle is never read"
            )
        else:
            raise LoadFailed(
                f"{directory}: neither model.safetensors nor model.safetensors.index.json is here"
            )

    def _open_shards(self, index: Config, directory: Path) -> None:
        """Open what the index names, beside it and nowhere else; both must say the same."""
        places = index.names("weight_map")
        for shard in sorted(set(places.values())):
            if Path(shard).name != shard or shard in {"", ".", ".."}:
                raise index.fails("weight_map", f"{shard!r} is not a file beside it")
            for name, tensor in TensorFile(directory / shard).tensors.items():
                if name in self._tensors:
                    raise tensor.fails(f"is also in {self._tensors[name].file.path.name}")
                if name not in places:
                    raise tensor.fails(f"is not in {index.path.name}")
                self._tensors[name] = tensor
        for name, shard in places.items():
            if name not in self._tensors or self._tensors[name].file.path.name != shard:
                raise LoadFailed(
                    f"{directory / shard}: tensor {name!r} is missing, which the index puts here"
                )
