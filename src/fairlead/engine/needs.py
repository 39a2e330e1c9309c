"""What a model would need on this machine's CPU, from its headers: `fairlead doctor` shows it.

`main` is run in a process of its own, with a path: it prints `Needs` as JSON, or fails with the reason on its
last line. Reads no weights, and imports no torch.
"""

import sys
from math import prod
from pathlib import Path

import msgspec

from fairlead._cext.cpustep import read_rate
from fairlead.engine import threads
from fairlead.engine.cpu_step import choose_stored, make_model, refusal
from fairlead.engine.models.checkpoint_tensors import CheckpointTensors
from fairlead.engine.models.numbers import choose_cpu_dtype
from fairlead.language.checkpoint.folder import read_folder

_PROBE_BYTES = 256 << 20  # beyond most caches


class Needs(msgspec.Struct, frozen=True):
    """What loading a model would take.

    runs_on: what would compute it, in words.
    weight_bytes: the memory of its weights there.
    file_bytes: what they take in their files.
    restored: the types of tensors that are restored to numbers, which need more memory than in the file.
    tokens_per_s: at most so many for one stream: each reads all weights once. None: not known.
    """

    runs_on: str
    weight_bytes: int
    file_bytes: int
    restored: tuple[str, ...] = ()
    tokens_per_s: float | None = None


def estimate(path: Path) -> Needs:
    """Return the needs of the model at `path`. Raises `LoadFailed` as loading does."""
    folder = read_folder(path)
    dtype = choose_cpu_dtype(folder.config, "auto")
    with CheckpointTensors(folder.checkpoint, dtype=dtype) as tensors:
        listed = folder.checkpoint.tensors().tensors
        file_bytes = sum(tensor.nbytes for tensor in listed.values())
        numbers = sum(prod(tensor.shape) for tensor in listed.values())
        width = 4 if dtype == "float32" else 2
        narrow = {tensor.dtype for tensor in listed.values() if tensor.packing is not None}
        spec = folder.spec
        if spec is None or folder.pooling is not None:
            return Needs(f"torch, in {dtype}", numbers * width, file_bytes, tuple(sorted(narrow)))
        if (reason := refusal(spec, dtype)) is not None:
            why = f"torch, in {dtype}: in the CPU kernel {reason}"
            return Needs(why, numbers * width, file_bytes, tuple(sorted(narrow)))
        tensors.rename(spec.names.renamed)
        stored = choose_stored(spec, tensors)
        model = make_model(spec, dtype, threads=1, max_batched_tokens=512, stored=stored)
        kept = {spec.names.stored(part, layer) + ".weight" for layer, part in stored}
        restored = {
            tensor.dtype for name, tensor in listed.items() if tensor.packing is not None and name not in kept
        }
        rate = read_rate(_PROBE_BYTES, threads.default_threads())
        return Needs(
            f"the CPU kernel ({model.variant}), in {dtype}",
            model.weight_bytes,
            file_bytes,
            tuple(sorted(restored)),
            rate / model.weight_bytes,
        )


def main() -> None:
    sys.stdout.write(msgspec.json.encode(estimate(Path(sys.argv[1]))).decode())
