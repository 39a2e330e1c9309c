"""Reads what `generation_config.json` says of generation: sampling defaults, and the ends of answers."""

from typing import TYPE_CHECKING

import msgspec

from fairlead.language.checkpoint.config import CheckpointConfig

if TYPE_CHECKING:
    from fairlead.language.checkpoint.checkpoint import Checkpoint

FILE = "generation_config.json"
END = "eos_token_id"


class GenerationDefaults(msgspec.Struct, frozen=True):
    """Defaults of the sampling parameters of a request. The field names are OpenAI's and vLLM's.

    temperature: 0 is greedy.
    top_p: the least sum of probabilities of the tokens that are kept; 1 is off.
    top_k: how many tokens are kept; 0 is off.
    min_p: the least probability of those that are kept, as a fraction of the highest; 0 is off.
    repetition_penalty: divides the logits of tokens that the prompt or the answer has; 1 is off.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


def read_generation(checkpoint: "Checkpoint") -> CheckpointConfig:
    """Return the document's object, which is empty if there is none."""
    path = checkpoint.document(FILE)
    return CheckpointConfig.read(path) if path.is_file() else CheckpointConfig(path, {})


def read_generation_defaults(generation: CheckpointConfig) -> GenerationDefaults:
    """Return the sampling parameters of the file, unless they are for greedy decoding.

    A `top_k` of -1 is off, as in vLLM.
    """
    off = GenerationDefaults()
    found = GenerationDefaults(
        temperature=generation.number("temperature", off.temperature, may_be_zero=True),
        top_p=generation.number("top_p", off.top_p, may_be_zero=True),
        top_k=max(0, generation.integer("top_k", off.top_k, least=-1)),
        min_p=generation.number("min_p", off.min_p, may_be_zero=True),
        repetition_penalty=generation.number("repetition_penalty", off.repetition_penalty),
    )
    return found if generation.flag("do_sample", default=True) else off


def read_end_ids(config: CheckpointConfig, generation: CheckpointConfig) -> frozenset[int]:
    """Return the ids of the tokens that end an answer, as `config.json` and this file name them.

    Those of a multimodal model may be in the section of its text model. As in transformers, null and negative
    numbers stand for no token.
    """
    parts = [config, generation]
    if "text_config" in config:
        parts.append(config.section("text_config"))
    return frozenset(id_ for part in parts for id_ in part.token_ids(END, may_be_negative=True) if id_ >= 0)
