"""Maps the architecture names of `config.json` to classes. A new architecture needs one entry here."""

from collections.abc import Callable
from functools import partial
from typing import Protocol

import msgspec
from torch import Tensor

from fairlead.models.config import CheckpointConfig
from fairlead.models.gemma3 import Gemma3ForCausalLM, Gemma3ForConditionalGeneration
from fairlead.models.layers import Attend
from fairlead.models.llama import LlamaForCausalLM
from fairlead.models.mistral import MistralForCausalLM
from fairlead.models.mixture import MixtralForCausalLM, Qwen3MoeForCausalLM
from fairlead.models.qwen2 import Qwen2ForCausalLM
from fairlead.models.qwen3 import Qwen3ForCausalLM
from fairlead.models.shape import ModelShape
from fairlead.models.weights import Weights


class Model(Protocol):
    """A network as the engine uses it: T flattened tokens of many sequences in, logits out."""

    shape: ModelShape

    def hidden(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Run all layers: [T], [T] → [T, C]."""

    def states(self, hidden: Tensor) -> Tensor:
        """Return the states for embeddings, which a head would project: [T, C] → [T, C]."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the next-token logits: [T, C] → [T, V]. Not for a model without a head."""


class Architecture(Model, Protocol):
    """A built-in network: its class reads its `config.json` and builds it."""

    @classmethod
    def read_shape(cls, config: CheckpointConfig) -> ModelShape:
        """Read the architecture's own `config.json`; `LoadFailed` says what is wrong with it."""

    def __init__(self, shape: ModelShape, weights: Weights) -> None:
        """Take every tensor that it needs from `weights`."""


ARCHITECTURES: dict[str, type[Architecture]] = {
    "Gemma3ForCausalLM": Gemma3ForCausalLM,
    "Gemma3ForConditionalGeneration": Gemma3ForConditionalGeneration,
    "LlamaForCausalLM": LlamaForCausalLM,
    "MistralForCausalLM": MistralForCausalLM,
    "MixtralForCausalLM": MixtralForCausalLM,
    "Qwen2ForCausalLM": Qwen2ForCausalLM,
    "Qwen3ForCausalLM": Qwen3ForCausalLM,
    "Qwen3MoeForCausalLM": Qwen3MoeForCausalLM,
}


# Networks without a head, as embedding models are saved, and the architecture that each is the body of.
_BODIES = {
    "Gemma3TextModel": "Gemma3ForCausalLM",
    **{name.replace("ForCausalLM", "Model"): name for name in ARCHITECTURES if name.endswith("ForCausalLM")},
}


def architecture(config: CheckpointConfig) -> tuple[Callable[[Weights], Model], bool]:
    """Return what builds the model of `config` from its weights, and whether it will have a head.

    Raises `LoadFailed`. Architectures that are not built in need transformers to be installed.
    """
    if (found := built_in(config)) is not None:
        kind, shape = found
        return partial(_build, kind, shape), not shape.headless
    from fairlead.models.fallback import fallback

    return fallback(config, config.texts("architectures"), ARCHITECTURES), True


def built_in(config: CheckpointConfig) -> tuple[type[Architecture], ModelShape] | None:
    """Return the built-in class for `config`, and the shape; None if there is none."""
    for name in config.texts("architectures"):
        if (kind := ARCHITECTURES.get(_BODIES.get(name, name))) is not None:
            return kind, msgspec.structs.replace(kind.read_shape(config), headless=name in _BODIES)
    return None


def settle_names(weights: Weights) -> None:
    """Rename the tensors of a body that was saved alone to their names in the whole model."""
    if "embed_tokens.weight" in weights:
        weights.rename(lambda name: name if name.startswith("lm_head.") else f"model.{name}")


def _build(kind: type[Architecture], shape: ModelShape, weights: Weights) -> Model:
    settle_names(weights)
    return kind(shape, weights)
