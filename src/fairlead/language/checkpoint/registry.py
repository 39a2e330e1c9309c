"""Maps the architecture names of `config.json` to family declarations. A new family needs one entry here."""

from collections.abc import Callable

import msgspec

from fairlead.language.checkpoint.architecture import ArchitectureSpec
from fairlead.language.checkpoint.config import CheckpointConfig
from fairlead.language.checkpoint.gemma3 import read_gemma3, read_multimodal_gemma3
from fairlead.language.checkpoint.llama import read_llama
from fairlead.language.checkpoint.mistral import read_mistral, read_mixtral
from fairlead.language.checkpoint.qwen import read_qwen2, read_qwen3, read_qwen3_moe

ARCHITECTURES: dict[str, Callable[[CheckpointConfig], ArchitectureSpec]] = {
    "Gemma3ForCausalLM": read_gemma3,
    "Gemma3ForConditionalGeneration": read_multimodal_gemma3,
    "LlamaForCausalLM": read_llama,
    "MistralForCausalLM": read_mistral,
    "MixtralForCausalLM": read_mixtral,
    "Qwen2ForCausalLM": read_qwen2,
    "Qwen3ForCausalLM": read_qwen3,
    "Qwen3MoeForCausalLM": read_qwen3_moe,
}


# Networks without a head, as embedding models are saved, and the architecture to which each belongs.
_BODIES = {
    "Gemma3TextModel": "Gemma3ForCausalLM",
    **{name.replace("ForCausalLM", "Model"): name for name in ARCHITECTURES if name.endswith("ForCausalLM")},
}

# Networks that score texts in place of a head.
_SCORERS = {
    "Gemma3TextForSequenceClassification": "Gemma3ForCausalLM",
    **{
        name.replace("ForCausalLM", "ForSequenceClassification"): name
        for name in ARCHITECTURES
        if name.endswith("ForCausalLM") and not name.startswith("Gemma3")
    },
}
_HEADLESS = _BODIES | _SCORERS


def read_built_in(config: CheckpointConfig) -> ArchitectureSpec | None:
    """Return the description of a built-in architecture, None for another. `LoadFailed` if it is invalid."""
    for name in config.texts("architectures"):
        if (read := ARCHITECTURES.get(_HEADLESS.get(name, name))) is not None:
            return msgspec.structs.replace(read(config), headless=name in _HEADLESS, scores=name in _SCORERS)
    return None
