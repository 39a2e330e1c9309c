"""Which class builds an architecture, by the name in `config.json`. One entry is all a new one needs."""

from typing import Protocol

from torch import Tensor

from fairlead.models.config import Config
from fairlead.models.layers import Attend
from fairlead.models.llama import LlamaForCausalLM
from fairlead.models.mistral import MistralForCausalLM
from fairlead.models.qwen2 import Qwen2ForCausalLM
from fairlead.models.qwen3 import Qwen3ForCausalLM
from fairlead.models.shape import ModelShape
from fairlead.models.weights import Weights


class Model(Protocol):
    """A network as the engine sees it: T flattened tokens of many sequences in, logits out."""

    shape: ModelShape

    @classmethod
    def read_shape(cls, config: Config) -> ModelShape:
        """Read the architecture's own `config.json`; `LoadFailed` says what is wrong with it."""

    def __init__(self, shape: ModelShape, weights: Weights) -> None:
        """Take every tensor it needs."""

    def hidden(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """[T], [T] → [T, C]."""

    def logits(self, hidden: Tensor) -> Tensor:
        """[T, C] → [T, V]."""


ARCHITECTURES: dict[str, type[Model]] = {
    "LlamaForCausalLM": LlamaForCausalLM,
    "MistralForCausalLM": MistralForCausalLM,
    "Qwen2ForCausalLM": Qwen2ForCausalLM,
    "Qwen3ForCausalLM": Qwen3ForCausalLM,
}


def architecture(config: Config) -> type[Model]:
    """Return the class that `config` asks for, or raise `LoadFailed`."""
    names = config.texts("architectures")
    for name in names:
        if name in ARCHITECTURES:
            return ARCHITECTURES[name]
    raise config.fails("architectures", f"{names} is not supported ({', '.join(ARCHITECTURES)} are)")
