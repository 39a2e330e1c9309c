"""Loads a model from a checkpoint into memory.

Guarantees that every tensor of the model was in the checkpoint, with the right shape, and that every tensor
of the checkpoint is in the model. Anything else is a `LoadFailed` that names the file and the key or tensor.
Runs nothing from the checkpoint and unpickles nothing.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import torch

from fairlead.base.errors import LoadFailed
from fairlead.engine.models.linear import WeightFormat
from fairlead.engine.models.model import Model
from fairlead.engine.models.network import Network
from fairlead.engine.models.numbers import check_dtype, choose_cpu_dtype
from fairlead.engine.models.parallel import ALONE, Ranks, refusal
from fairlead.engine.models.quantization import find_format
from fairlead.engine.models.weights import Weights
from fairlead.language.checkpoint.architecture import ArchitectureSpec
from fairlead.language.checkpoint.checkpoint import Checkpoint
from fairlead.language.checkpoint.config import CheckpointConfig
from fairlead.language.checkpoint.folder import FLOAT_TYPES, read_folder, read_stored_dtype, without_head
from fairlead.language.checkpoint.pooling import Pooling

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in FLOAT_TYPES}


class LoadedModelFiles(msgspec.Struct, frozen=True):
    """A model with its weights. `weight_bytes`: what they take in the device's memory.

    `pooling` is set if it was made for embeddings; it may have no head then.
    """

    model: Model
    dtype: torch.dtype
    weight_bytes: int
    pooling: Pooling | None = None


class WeightSource(msgspec.Struct, frozen=True):
    """A model's checkpoint, of which all but the weights has been read. `dtype` is the one to compute in.

    `spec`: the description of the network, if its architecture is built in. `ranks`: the processes that
    compute it together, of which this one reads its part.
    """

    checkpoint: Checkpoint
    build: Callable[[Weights], Model]
    spec: ArchitectureSpec | None
    dtype: torch.dtype
    quantization: WeightFormat
    pooling: Pooling | None
    ranks: Ranks = ALONE

    def weights(self, device: torch.device, report: Callable[[float], None]) -> Weights:
        """Open the checkpoint; `report` receives the fraction read at least every 5 %."""
        return Weights(
            self.checkpoint,
            dtype=self.dtype,
            device=device,
            report=report,
            quantization=self.quantization,
            readers=self.ranks.size,
        )

    def load(self, device: torch.device, report: Callable[[float], None]) -> LoadedModelFiles:
        """Build the model in torch."""
        with self.weights(device, report) as weights:
            model = self.build(weights)
            weights.finish()
            return LoadedModelFiles(model, self.dtype, weights.bytes_placed, self.pooling)


def load_model(
    directory: Path,
    *,
    device: torch.device,
    dtype: str = "auto",
    report: Callable[[float], None] = lambda _: None,
    needs_head: bool = True,
) -> LoadedModelFiles:
    """Load the model in `directory` in torch: `read_source` and `WeightSource.load` in one."""
    return read_source(directory, device=device, dtype=dtype, needs_head=needs_head).load(device, report)


def read_source(
    directory: Path,
    *,
    device: torch.device,
    dtype: str = "auto",
    quantization: str | None = None,
    needs_head: bool = True,
    max_model_len: int | None = None,
    ranks: Ranks = ALONE,
) -> WeightSource:
    """Read all but the weights of the model in `directory`.

    Raises `LoadFailed` or `ConfigError` as `read_folder`, and for what this process cannot do.

    device: where the model is computed.
    dtype: a name of `DTYPES`, or "auto" for the checkpoint's own if the device computes it.
    quantization: the name of a method, or None.
    needs_head: whether a model that makes no text is refused.
    max_model_len: the configured limit of a text; None: the model's own.
    ranks: the processes that compute the model together.
    """
    folder = read_folder(directory, max_model_len=max_model_len)
    config, spec, pooling = folder.config, folder.spec, folder.pooling
    if needs_head and spec is not None and spec.headless:
        raise without_head(
            config, "scores texts, and makes none" if spec.scores else "makes embeddings, no text"
        )
    chosen = choose_dtype(config, dtype, device)
    method = find_format(quantization)
    if (problem := method.refusal(device, chosen)) is not None:
        raise LoadFailed(f"quantization {quantization} {problem}")
    if ranks.size > 1 and (obstacle := _obstacle(config, spec, pooling, ranks.size)) is not None:
        raise LoadFailed(f"{config.path}: parallel: {obstacle}")
    build: Callable[[Weights], Model]
    if spec is not None:
        build = partial(Network, spec, ranks=ranks)
    elif quantization is not None:  # transformers makes the layers
        raise LoadFailed(f"{directory}: quantization {quantization} needs one of our own model families")
    else:
        from fairlead.engine.models.fallback import fallback

        build = fallback(directory, config, max_positions=folder.max_model_len)
    return WeightSource(folder.checkpoint, build, spec, chosen, method, pooling, ranks=ranks)


def _obstacle(
    config: CheckpointConfig, spec: ArchitectureSpec | None, pooling: Pooling | None, ranks: int
) -> str | None:
    """Return why so many ranks cannot compute the model together; None if they can."""
    if spec is None:
        return f"only our own model families can be divided, not {', '.join(config.texts('architectures'))}"
    if pooling is not None:
        return "models that make embeddings or scores are not divided"
    return refusal(spec, ranks)


def choose_dtype(config: CheckpointConfig, name: str, device: torch.device) -> torch.dtype:
    """Return the dtype to compute in: the requested one or, with "auto", the checkpoint's where it is fast.

    `numbers.choose_cpu_dtype` chooses for a CPU.
    """
    if device.type == "cpu":
        return DTYPES[choose_cpu_dtype(config, name)]
    check_dtype(name)
    return DTYPES[read_stored_dtype(config) if name == "auto" else name]
