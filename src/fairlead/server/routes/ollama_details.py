"""What Ollama's routes report of a model: from its files, which are read once."""

from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import Any

import msgspec

from fairlead.base.config import AnyModelConfig, CommandConfig
from fairlead.base.errors import LoadFailed
from fairlead.base.reported import decoded
from fairlead.dialects.ollama.shapes import OllamaDetails
from fairlead.language.checkpoint.checkpoint import CONFIG, open_checkpoint
from fairlead.language.text.model import TextModel
from fairlead.language.text.settings import GenerationDefaults

_UNITS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K"))
# Members of `model_info`, by keys of Hugging Face's config.json.
_INFO = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "vocab_size": "vocab_size",
}

_decode_config = msgspec.json.Decoder(dict[str, Any]).decode


@dataclass(frozen=True)
class ModelFiles:
    """What the files of a model show. Empty if there are none here.

    size: The size of the weights, in bytes.
    parameters: The number of weights.
    dtype: The type of most of them.
    config: The content of config.json.
    """

    size: int = 0
    parameters: int = 0
    dtype: str = ""
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def family(self) -> str:
        """The name of the architecture."""
        family = self.config.get("model_type")
        return family if isinstance(family, str) else ""

    def details(self) -> OllamaDetails:
        """Return Ollama's `details`."""
        return OllamaDetails(
            parent_model="",
            format="safetensors" if self.size else "",
            family=self.family,
            families=[self.family] if self.family else [],
            parameter_size=_in_short(self.parameters) if self.parameters else "",
            quantization_level=self.dtype,
        )

    def info(self, model: TextModel | None) -> dict[str, Any]:
        """Return Ollama's `model_info`, as far as it is known."""
        family = self.family or "unknown"
        info: dict[str, Any] = {"general.architecture": family}
        if self.parameters:
            info["general.parameter_count"] = self.parameters
        if model is not None:
            info[f"{family}.context_length"] = model.max_model_len
        known = {key: self.config.get(key) for key in _INFO}
        return info | {f"{family}.{_INFO[key]}": value for key, value in known.items() if type(value) is int}


NO_FILES = ModelFiles()


@lru_cache(256)
def read_files(path: Path, created: int) -> ModelFiles:  # noqa: ARG001  # a changed directory is read again
    """Return what a model's checkpoint shows. What cannot be read is left out."""
    dtypes: Counter[str] = Counter()
    size = 0
    config = {}
    with suppress(LoadFailed, OSError):
        config = decoded(_decode_config, open_checkpoint(path).document(CONFIG).read_bytes()) or {}
    with suppress(LoadFailed):
        for tensor in open_checkpoint(path).tensors().tensors.values():
            size += tensor.nbytes
            dtypes[tensor.dtype] += prod(tensor.shape)
    dtype = dtypes.most_common(1)[0][0] if dtypes else ""
    return ModelFiles(size, dtypes.total(), dtype, config)


def capabilities_of(model: TextModel | None, config: AnyModelConfig | None) -> list[str]:
    """Return what a model can do, in Ollama's words; of another server's what the configuration says."""
    if model is None:
        stated = config.capabilities if isinstance(config, CommandConfig) else {}
        return [
            "completion",
            *(name for name in ("tools", "thinking", "insert", "vision") if stated.get(name)),
        ]
    if model.task != "generate":
        return ["embedding"] if model.task == "embed" else []
    found = ["completion"] if model.infill is None else ["completion", "insert"]
    wire_format = model.answer_format.wire_format if model.answer_format is not None else None
    if model.chat_template is not None and wire_format is not None:
        found += ["tools"] if wire_format.calls is not None else []
        found += ["thinking"] if wire_format.reasoning is not None else []
    return found


def parameters_of(model: TextModel | None) -> str:
    """Return the default parameters of an answer that are not off, one in each line."""
    if model is None:
        return ""
    off = GenerationDefaults()
    names = {"repetition_penalty": "repeat_penalty"}
    given = (
        (names.get(name, name), getattr(model.defaults, name))
        for name in GenerationDefaults.__struct_fields__
        if getattr(model.defaults, name) != getattr(off, name)
    )
    return "\n".join(f"{name:<30} {value}" for name, value in given)


def digest_of(name: str, model: TextModel | None) -> str:
    """Return an id of a model's files, in the form of a hash."""
    identity = name if model is None else f"{model.path} {model.created}"
    return sha256(identity.encode()).hexdigest()


def _in_short(number: int) -> str:
    """Return a number with a unit, as Ollama writes the number of parameters."""
    for size, unit in _UNITS:
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return str(number)
