"""Reads how many tokens a text may have, for architectures that only transformers implements."""

from fairlead.language.checkpoint.config import CheckpointConfig
from fairlead.language.checkpoint.rope import read_max_positions

_KEYS = ("max_position_embeddings", "n_positions")
# What transformers' configurations have without such a key, of dense decoders.
_BY_DEFAULT = {
    1024: "gpt2 gpt_bigcode",
    2048: "bitnet codegen diffllama doge exaone4 gpt_neox gptj granite hunyuan_v1_dense hyperclovax "
    "nanochat olmo olmo2 olmo3 opt phi",
    4096: "arcee helium nemotron phi3 starcoder2",
    8192: "cohere cohere2 gemma gemma2 jais2 vaultgemma",
    16_384: "persimmon",
    32_768: "smollm3",
    65_536: "apertus",
    131_072: "cwm ernie4_5 glm glm4 ministral",
    262_144: "ministral3",
    524_288: "seed_oss",
}
DEFAULT_POSITIONS = {name: number for number, names in _BY_DEFAULT.items() for name in names.split()}
"""By `model_type`; others must have the key."""


def read_own_positions(config: CheckpointConfig) -> int | None:
    """Return the longest text that the model is for; None if its configuration does not say that.

    A multimodal model has the keys of its text model in `text_config`.
    """
    parts = [config, *([config.section("text_config")] if "text_config" in config else [])]
    for part in parts:
        for key in _KEYS:
            if key in part:
                return read_max_positions(part, part.integer(key))
    text = parts[-1]
    kind = text.text("model_type", config.text("model_type", ""))
    default = DEFAULT_POSITIONS.get(kind)
    return None if default is None else read_max_positions(text, default)
