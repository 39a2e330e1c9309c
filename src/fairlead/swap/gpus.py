"""Which models are on which GPU, and how much memory each GPU has. Pure."""

from collections.abc import Iterable


class Gpus:
    """The known GPUs: `gpu_of` maps a model to its GPU, as "cuda:0", and `total_mb` a GPU to its memory.

    Both change in place. A model without a GPU, or with one that is not determined yet, is not in `gpu_of`. A
    GPU is in `total_mb` once a model has been loaded on it.
    """

    def __init__(self) -> None:
        self.gpu_of: dict[str, str] = {}
        self.total_mb: dict[str, float] = {}

    def sharing(self, model: str, others: Iterable[str]) -> list[str]:
        """Return those of `others` that are on the same GPU as the model."""
        gpu = self.gpu_of.get(model)
        return [] if gpu is None else [other for other in others if self.gpu_of.get(other) == gpu]

    def capacity_mb(self, model: str) -> float:
        """Return the memory of the model's GPU; 0 if it has none, or if that is not determined yet."""
        return self.total_mb.get(self.gpu_of.get(model, ""), 0.0)
