"""Which models are on which GPU, and how much memory each GPU has. Pure."""

from collections.abc import Iterable


class Gpus:
    """The known GPUs: `gpus_of` maps a model to its GPUs, as "cuda:0", and `total_mb` a GPU to its memory.

    Both change in place. A model without a GPU, or with one that is not determined yet, is not in `gpus_of`.
    A model that is divided takes the same memory on each of its GPUs. A GPU is in `total_mb` once a model has
    been loaded of which it is the first.
    """

    def __init__(self) -> None:
        self.gpus_of: dict[str, tuple[str, ...]] = {}
        self.total_mb: dict[str, float] = {}

    def on(self, gpu: str, models: Iterable[str]) -> list[str]:
        """Return those of `models` that are on this GPU."""
        return [model for model in models if gpu in self.gpus_of.get(model, ())]

    def capacity_mb(self, model: str) -> float:
        """Return the memory of the model's first GPU; 0 if it has none, or if that is not determined yet."""
        first = next(iter(self.gpus_of.get(model, ())), "")
        return self.total_mb.get(first, 0.0)
