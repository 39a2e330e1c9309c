"""The memory that each model takes, as far as known: configured, or measured while it ran. Pure."""

from collections.abc import Iterable

from fairlead.base.config import AnyModelConfig, ModelConfig
from fairlead.nodes.node import GpuUse
from fairlead.router.swap.gpus import Gpus

MIB = 1024 * 1024


class ModelMemory:
    """Keeps `memory_mb` by model and `gpus` up to date, for the eviction policies.

    A model takes its configured `memory`, else its `gpuMemory`, else the most that was measured. A fraction
    of a GPU counts once a model on that GPU was loaded; until then the GPU's size is not known.
    """

    def __init__(self) -> None:
        self.memory_mb: dict[str, float] = {}
        self.gpus = Gpus()
        self._configs: dict[str, AnyModelConfig] = {}
        self._measured_mb: dict[str, float] = {}
        self._auto: str | None = None  # the GPU that device `auto` was resolved to
        self._is_auto_resolved = False

    def configure(self, models: Iterable[AnyModelConfig]) -> None:
        """Use these models. Measurements of changed and removed models are forgotten."""
        before, self._configs = self._configs, {model.name: model for model in models}
        for name, config in before.items():
            if self._configs.get(name) != config:
                self._measured_mb.pop(name, None)
        self._derive()

    def loaded(self, model: str, gpu: GpuUse | None) -> None:
        """Record where a model was loaded: on this GPU, or on none."""
        config = self._configs.get(model)
        if isinstance(config, ModelConfig) and config.device == "auto":
            self._auto = None if gpu is None else gpu_name(gpu.device)
            self._is_auto_resolved = True
        if gpu is not None and (name := gpu_name(gpu.device)) is not None:
            self.gpus.total_mb[name] = gpu.total_bytes / MIB
        self._derive()

    def measured(self, model: str, taken_bytes: int) -> None:
        """Keep the maximum that was measured of a model."""
        if taken_bytes and model in self._configs:
            self._measured_mb[model] = max(taken_bytes / MIB, self._measured_mb.get(model, 0.0))
            self._derive()

    def _derive(self) -> None:
        """Derive the public attributes from what is known."""
        self.gpus.gpus_of.clear()
        self.memory_mb.clear()
        self.memory_mb.update(self._measured_mb)
        for name, config in self._configs.items():
            if (gpu := self._gpu_of(config)) is not None:
                self.gpus.gpus_of[name] = _from(gpu, config)
            if (declared_mb := self._declared_mb(config)) is not None:
                self.memory_mb[name] = declared_mb

    def _gpu_of(self, config: AnyModelConfig) -> str | None:
        """Return a model's first GPU, as far as that is known."""
        if not isinstance(config, ModelConfig):
            return None  # it is not known where a command's server computes
        if config.device != "auto":
            return gpu_name(config.device)
        is_meant_for_gpu = config.gpu_memory is not None and not self._is_auto_resolved
        return gpu_name("cuda") if is_meant_for_gpu else self._auto

    def _declared_mb(self, config: AnyModelConfig) -> float | None:
        if config.memory_mb is not None:
            return config.memory_mb
        if not isinstance(config, ModelConfig) or config.gpu_memory is None or self._gpu_of(config) is None:
            return None
        if config.gpu_memory > 1:
            return config.gpu_memory
        return config.gpu_memory * self.gpus.capacity_mb(config.name) or None


def _from(gpu: str, config: AnyModelConfig) -> tuple[str, ...]:
    """Return the GPUs of a model, of which this is the first."""
    if not isinstance(config, ModelConfig):
        return (gpu,)
    first = int(gpu.removeprefix("cuda:"))
    return tuple(f"cuda:{number}" for number in range(first, first + config.parallel))


def gpu_name(device: str) -> str | None:
    """Return a GPU's name, where "cuda" is the first GPU; None for a CPU."""
    if device == "cpu":
        return None
    return "cuda:0" if device == "cuda" else device
