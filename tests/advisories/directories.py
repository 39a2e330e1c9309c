"""Hostile model directories: copies of the demonstration model plus an attacker's files."""

import json
import os
import pickle
import shutil
import struct
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from fairlead.base import messages
from fairlead.base.config import demonstration_model
from fairlead.engine.worker.main import _load, serve

WEIGHTS = "model.safetensors"

_MAGIC = b"GGUF"
_STRING, _ARRAY, _UINT32 = 8, 9, 4


class RecordingChannel:
    """A channel that requests one model and then only records the frames."""

    def __init__(self, path: Path, listen: str) -> None:
        self.frames: list[messages.ToParent] = []
        self._spec = messages.WorkerSpec(path=str(path), device="cpu", dtype="float32", listen=listen)

    def receive(self) -> messages.WorkerSpec:
        return self._spec

    def send(self, message: messages.ToParent) -> None:
        self.frames.append(message)


def refusal(path: Path) -> str:
    """Return the error of a worker that loads the model; check that it is short and names the path."""
    with tempfile.TemporaryDirectory() as folder:
        channel = RecordingChannel(path, f"{folder}/engine")
        status = serve(channel, _load)  # outside of the assertion, because one test disables assertions
    assert status == 1
    last = channel.frames[-1]
    assert isinstance(last, messages.LoadFailure)
    assert str(path) in last.message
    assert len(last.message) < 1000
    return last.message


def demonstration_copy(to: Path) -> Path:
    """Copy the demonstration model."""
    shutil.copytree(demonstration_model(), to)
    return to


def transformers_model(to: Path) -> Path:
    """Save a small model that runs in transformers. Imports transformers, which takes seconds."""
    import transformers

    from engine.models.tiny import SIZES, save

    save(transformers.Olmo2Config(**{name: size for name, size in SIZES.items() if name != "head_dim"}), to)
    return to


def change_json(path: Path, **values: Any) -> None:
    """Set members of a JSON object in a file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


# Pickles -------------------------------------------------------------------------------------------


class _CreatesMarker:
    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._marker),)


def pickled(marker: Path) -> bytes:
    """Return a pickle that creates the directory `marker` when it is read."""
    return pickle.dumps(_CreatesMarker(marker), protocol=2)


def write_torch_archive(path: Path, marker: Path) -> None:
    """Write what `torch.save` writes: a zip archive around a pickle."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickled(marker))
        archive.writestr("archive/version", "3\n")


# GGUF ----------------------------------------------------------------------------------------------


def ggufs() -> dict[str, bytes]:
    """Return malformed GGUF files, by a description of their defect."""
    return {
        "only the magic number": _MAGIC,
        "2**62 pairs": _gguf(pairs=2**62),
        "2**62 tensors": _gguf(tensors=2**62),
        "negative counts": _gguf(tensors=-1, pairs=-1),
        "a key without end": _gguf(pairs=1) + struct.pack("<Q", 2**64 - 1) + b"key",
        "a text without end": _gguf(pairs=1) + _text(b"key") + struct.pack("<IQ", _STRING, 2**64 - 1),
        "an array without end": _gguf(pairs=1) + _text(b"key") + struct.pack("<IIQ", _ARRAY, _STRING, 2**61),
        "an unknown type": _gguf(pairs=1) + _text(b"key") + struct.pack("<I", 2**31),
        "no layers": _gguf(pairs=1) + _text(b"llama.block_count") + struct.pack("<II", _UINT32, 0),
        "no alignment": _gguf(pairs=1) + _text(b"general.alignment") + struct.pack("<II", _UINT32, 0),
        "a tensor of many dimensions": _gguf(tensors=1) + _text(b"weight") + struct.pack("<I", 2**31),
        "a tensor of 2**64 numbers": _gguf(tensors=1) + _tensor(2**32, 2**32),
        "a tensor of negative size": _gguf(tensors=1) + _tensor(-1, 2**62),
        "a tensor beyond the end": _gguf(tensors=1) + _tensor(4096, 4096),
        "a tensor of an unknown type": _gguf(tensors=1) + _tensor(4, 4, kind=2**31),
    }


def _gguf(*, tensors: int = 0, pairs: int = 0) -> bytes:
    return _MAGIC + struct.pack("<Iqq", 3, tensors, pairs)


def _text(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def _tensor(*sizes: int, kind: int = 0) -> bytes:
    shape = b"".join(struct.pack("<Q", size % 2**64) for size in sizes)
    return (
        _text(b"token_embd.weight") + struct.pack("<I", len(sizes)) + shape + struct.pack("<IQ", kind, 2**63)
    )
