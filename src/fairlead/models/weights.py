"""Takes tensors out of a checkpoint: safetensors, mapped into memory, one file or shards with an index.

A model asks for what it is made of, by name and shape, while it is being built; `finish` then says
what nobody asked for. Promises `LoadFailed` with the file and the tensor at fault. Never unpickles.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fairlead.errors import LoadFailed
from fairlead.models.config import Config
from fairlead.models.layers import Embedding, GatedMLP, Linear, RMSNorm

_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_PROGRESS_STEPS = 40
_FLOATS = {torch.float64, torch.float32, torch.bfloat16, torch.float16}


class Weights:
    """The tensors of the checkpoint in `directory`, given out as `dtype` on `device`.

    `report` is called with the fraction read, 0…1, at least every 5 %. `bytes_placed` counts what is in
    the device's memory now. Use it as a context: the files are closed at its end.
    """

    def __init__(
        self,
        directory: Path,
        *,
        dtype: torch.dtype,
        device: torch.device,
        report: Callable[[float], None] = lambda _: None,
    ) -> None:
        self.dtype = dtype
        self.device = device
        self.bytes_placed = 0
        self._report = report
        self._files = ExitStack()
        self._tensors: dict[str, tuple[Path, Tensor]] = {}
        self._listing = directory
        try:
            for path in self._checkpoint_files(directory):
                self._open(path)
        except BaseException:
            self._files.close()
            raise
        self._bytes_total = max(1, sum(tensor.nbytes for _, tensor in self._tensors.values()))
        self._bytes_read = 0
        self._reported = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._tensors.clear()
        self._files.close()

    def tensor(self, name: str, *shape: int) -> Tensor:
        """Take one tensor, which must have this shape."""
        return self._stack({name: shape[0]}, shape[1:])

    def linear(self, rows: Mapping[str, int], inputs: int, *, bias: bool = False) -> Linear:
        """Take projections of the same input, fused into one: `rows` maps names to their output sizes."""
        weight = self._stack({f"{name}.weight": size for name, size in rows.items()}, (inputs,))
        offset = self._stack({f"{name}.bias": size for name, size in rows.items()}, ()) if bias else None
        return Linear(weight, offset)

    def norm(self, name: str, size: int, epsilon: float) -> RMSNorm:
        return RMSNorm(self.tensor(f"{name}.weight", size), epsilon)

    def mlp(self, name: str, hidden: int, inner: int, *, bias: bool) -> GatedMLP:
        gate_up = self.linear({f"{name}.gate_proj": inner, f"{name}.up_proj": inner}, hidden, bias=bias)
        return GatedMLP(gate_up, self.linear({f"{name}.down_proj": hidden}, inner, bias=bias))

    def head(self, name: str, embedding: Embedding, *, tied: bool) -> Linear:
        """Take the projection to the vocabulary, or make it of the embedding's table when `tied`."""
        if not tied:
            return self.linear({name: embedding.table.shape[0]}, embedding.table.shape[1])
        self._tensors.pop(f"{name}.weight", None)  # some checkpoints keep a second copy
        head = Linear(embedding.table)
        if head.owns_a_copy:
            self.bytes_placed += embedding.table.nbytes
        return head

    def finish(self) -> None:
        """Report that all is read; a tensor that nobody took means that this is another model."""
        left = {
            name: path
            for name, (path, _) in self._tensors.items()
            if not name.endswith("rotary_emb.inv_freq")
        }
        for name, path in left.items():
            raise LoadFailed(f"{path}: unexpected tensor {name!r} ({len(left)} in all)")
        self._report(1.0)

    def _stack(self, rows: Mapping[str, int], rest: tuple[int, ...]) -> Tensor:
        """Take the named tensors, each [rows, *rest], and lay them below one another."""
        sources = [self._take(name, (size, *rest)) for name, size in rows.items()]
        placed = torch.empty((sum(rows.values()), *rest), dtype=self.dtype, device=self.device)
        row = 0
        for source in sources:
            self._copy(source, placed[row : row + len(source)])
            row += len(source)
        self.bytes_placed += placed.nbytes
        return placed

    def _take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if name not in self._tensors:
            raise LoadFailed(f"{self._listing}: tensor {name!r} is missing")
        path, tensor = self._tensors.pop(name)
        if tuple(tensor.shape) != shape:
            raise LoadFailed(
                f"{path}: tensor {name!r} has shape {list(tensor.shape)}, expected {list(shape)}"
            )
        if tensor.dtype not in _FLOATS:
            raise LoadFailed(f"{path}: tensor {name!r} is of {tensor.dtype}, which is not supported")
        return tensor

    def _copy(self, source: Tensor, target: Tensor) -> None:
        """Copy in pieces small enough that an embedding of half the model still shows progress."""
        row_bytes = max(1, source.nbytes // max(1, len(source)))
        rows = max(1, self._bytes_total // _PROGRESS_STEPS // row_bytes)
        for start in range(0, len(source), rows):
            piece = source[start : start + rows]
            target[start : start + rows].copy_(piece)
            self._bytes_read += piece.nbytes
            fraction = min(1.0, self._bytes_read / self._bytes_total)
            if fraction - self._reported >= 1 / _PROGRESS_STEPS:
                self._reported = fraction
                self._report(fraction)

    def _checkpoint_files(self, directory: Path) -> list[Path]:
        """Every file of the checkpoint, in order; `_listing` becomes what names them."""
        index, single = directory / "model.safetensors.index.json", directory / "model.safetensors"
        if index.is_file():
            self._listing = index
            config = Config.read(index)
            shards = sorted(set(config.names("weight_map").values()))
            if stray := [name for name in shards if Path(name).name != name]:
                raise config.fails("weight_map", f"{stray[0]!r} is not a file beside it")
            return [directory / name for name in shards]
        if single.is_file():
            self._listing = single
            return [single]
        if any(found for pattern in _PICKLED for found in directory.glob(pattern)):
            raise LoadFailed(
                f"{directory}: only pickled weights here; safetensors are needed, pickle is never read"
            )
        raise LoadFailed(f"{directory}: neither model.safetensors nor model.safetensors.index.json is here")

    def _open(self, path: Path) -> None:
        try:
            file: Any = self._files.enter_context(safe_open(path, framework="pt"))
            for name in file.keys():  # noqa: SIM118  the file is no mapping
                if name in self._tensors:
                    raise LoadFailed(f"{path}: tensor {name!r} is also in {self._tensors[name][0].name}")
                self._tensors[name] = path, file.get_tensor(name)
        except (SafetensorError, OSError, ValueError, RuntimeError) as error:
            raise LoadFailed(f"{path}: not a readable safetensors file: {error}") from error
