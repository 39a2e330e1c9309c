"""What a model is read from: a checkpoint, of which a folder with safetensors is the first kind.

A checkpoint has documents and tensors. Documents have the names of Hugging Face's layout, whatever the kind:
the configuration, the tokenizer, the chat template, and others beside them. A kind without such files, as a
single file with metadata, makes these documents of what it has. Each reader is written once.

Whatever reads a model opens it by `open_checkpoint`. Imports neither torch nor transformers.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from fairlead.base.errors import LoadFailed
from fairlead.language.checkpoint.config import CheckpointConfig, CheckpointDocument
from fairlead.language.checkpoint.gguf.checkpoint import GgufCheckpoint
from fairlead.language.checkpoint.listing import SafetensorsFolder, TensorListing

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import Tensor

CONFIG = "config.json"
TOKENIZER = "tokenizer.json"
TEMPLATE = "chat_template.jinja"


class CheckpointTensor(Protocol):
    """A tensor of a checkpoint, with its name there and its shape. Its content is not read yet.

    name: as the checkpoint names it.
    shape: of the numbers, whatever they are stored as.
    dtype: the checkpoint's own name of what the numbers are stored as.
    form: the name of the format of weights in which the rows are stored; None: they are plain numbers. Only
        `packed_pieces` reads rows in a format.
    packing: the name of the CPU kernel's format in which `stored_rows` returns its rows; None: it has none.
    nbytes: what it takes in its file.
    begin: the offset of its first byte in the file, for the alignment of `mapped`.
    """

    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> str: ...

    @property
    def nbytes(self) -> int: ...

    @property
    def begin(self) -> int: ...

    @property
    def form(self) -> str | None: ...

    @property
    def packing(self) -> str | None: ...

    def fails(self, reason: str) -> LoadFailed:
        """Return the error to raise for this tensor."""

    def check_floats(self) -> None:
        """Raise `LoadFailed` unless weights can be made from its numbers."""

    def array(self) -> "np.ndarray":
        """Return its numbers in place, read-only; bfloat16 as uint16."""

    def stored_rows(self) -> "np.ndarray":
        """Return its rows as they are stored, uint8 [rows, bytes], read-only."""

    def floats(self) -> "torch.dtype":
        """Return its dtype; `LoadFailed` unless weights can be made from it."""

    def mapped(self) -> "Tensor":
        """Return the tensor in place, read when it is used."""

    def rows(self, rows: range) -> "CheckpointTensor":
        """Return these rows as a tensor of their own."""

    def pieces(self, size_bytes: int) -> Iterator["Tensor"]:
        """Yield its elements in order, flat, about `size_bytes` at a time."""

    def packed_pieces(self, columns: range, size_bytes: int) -> Iterator[tuple["Tensor", ...]]:
        """Yield these columns of a matrix in order, some rows at a time, in their format."""

    def read_ahead(self, size_bytes: int) -> Iterator[int]:
        """Read it into memory, about `size_bytes` at a time; yield how many bytes each time."""

    def drop_pages(self) -> None:
        """Drop it from memory; it is read again if it is used again."""


class Checkpoint(Protocol):
    """A model's documents and tensors. Opening one reads nothing."""

    @property
    def path(self) -> Path:
        """What a configuration names, and errors too: a folder or a file."""

    @property
    def created(self) -> int:
        """When it was written, in Unix time. `LoadFailed` if it has no configuration."""

    def document(self, name: str) -> CheckpointDocument:
        """Return the document of this name, whether it exists or not."""

    def documents(self, pattern: str) -> Sequence[CheckpointDocument]:
        """Return the documents whose names match a pattern of `Path.glob`, in order."""

    def tensors(self) -> TensorListing:
        """Return what tensors there are, from headers. `LoadFailed` for a missing or broken file."""


KINDS: tuple[Callable[[Path], Checkpoint | None], ...] = (SafetensorsFolder.open, GgufCheckpoint.open)
"""Each returns the checkpoint at a path, or None if it is of another kind."""


def open_checkpoint(path: Path) -> Checkpoint:
    """Return the checkpoint at `path`; `LoadFailed` if there is none."""
    for kind in KINDS:
        if (found := kind(path)) is not None:
            return found
    raise LoadFailed(f"{path}: no such directory")


def read_config(checkpoint: Checkpoint) -> CheckpointConfig:
    """Return the configuration of the network. `LoadFailed`, which names the document, if it is invalid."""
    return CheckpointConfig.read(checkpoint.document(CONFIG))
