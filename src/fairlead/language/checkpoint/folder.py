"""Reads a checkpoint: all that both processes must know of it, but for its vocabulary and its weights.

The parent, the model's process, `config check` and `doctor` all read a model by `read_folder`, so that they
agree whether it can be loaded, and give the same reason if not. Imports neither torch nor transformers.
"""

from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import msgspec

from fairlead.base.config import ConfigError
from fairlead.base.errors import LoadFailed
from fairlead.language.checkpoint.architecture import ArchitectureSpec
from fairlead.language.checkpoint.checkpoint import Checkpoint, open_checkpoint, read_config
from fairlead.language.checkpoint.config import CheckpointConfig
from fairlead.language.checkpoint.generation import (
    GenerationDefaults,
    read_end_ids,
    read_generation,
    read_generation_defaults,
)
from fairlead.language.checkpoint.pooling import Pooling, read_pooling
from fairlead.language.checkpoint.positions import read_own_positions
from fairlead.language.checkpoint.quantized.schemes import QUANTIZATION
from fairlead.language.checkpoint.registry import ARCHITECTURES, read_built_in

# The endings of the names of transformers' models that make text.
_MAKE_TEXT = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
# Their makers gave this code to transformers, and name it in published checkpoints all the same.
_SAME_CODE = frozenset({"PhiForCausalLM", "Phi3ForCausalLM"})
FLOAT_TYPES = ("float32", "bfloat16", "float16")


class ModelFolder(msgspec.Struct, frozen=True):
    """What a model's checkpoint says.

    checkpoint: its documents and tensors.
    config: its `config.json`.
    generation: its `generation_config.json`; an empty object if it has none.
    defaults: the sampling parameters of that.
    spec: the network of an architecture that is built in; None: transformers has it.
    pooling: how it makes vectors or scores; None if it makes text.
    max_model_len: the most tokens of a text, prompt and answer.
    """

    checkpoint: Checkpoint
    config: CheckpointConfig
    generation: CheckpointConfig
    defaults: GenerationDefaults
    spec: ArchitectureSpec | None
    pooling: Pooling | None
    max_model_len: int


def read_folder(path: Path, *, max_model_len: int | None = None) -> ModelFolder:
    """Read the checkpoint at `path`. Raises `LoadFailed` with the file and the key at fault.

    `max_model_len` is the configured limit. Raises `ConfigError` if the model does not reach it.
    """
    checkpoint = open_checkpoint(path)
    config = read_config(checkpoint)
    _check_own_code(config)
    spec = read_built_in(config)
    pooling = read_pooling(checkpoint, scores=spec is not None and spec.scores)
    if pooling is not None and pooling.score_tokens:
        spec = _with_score(config, spec, pooling.score_tokens)
    if spec is None:
        _check_fallback(config)
    elif spec.headless and pooling is None:
        raise without_head(config, "has neither a head nor modules.json")
    read_stored_dtype(config)
    generation = read_generation(checkpoint)
    defaults = read_generation_defaults(generation)
    read_end_ids(config, generation)  # `text.end_tokens` adds those of the vocabulary and the template
    limit = read_max_model_len(config, spec, max_model_len)
    checkpoint.tensors()
    return ModelFolder(
        checkpoint,
        config,
        generation,
        defaults,
        None if spec is None else spec.for_context(limit),
        pooling,
        limit,
    )


def read_max_model_len(config: CheckpointConfig, spec: ArchitectureSpec | None, requested: int | None) -> int:
    """Return how many tokens a text may have: as many as requested, or else the model's own number.

    `spec` is that of a built-in architecture. Raises `ConfigError` if more are requested than the model can
    have, which are more than its own number with dynamic scaling.
    """
    own = read_own_positions(config) if spec is None else spec.max_positions
    most = own if spec is None else spec.most_positions
    if own is not None and requested is not None and most is not None and requested > most:
        raise ConfigError(
            f"maxModelLen (--max-model-len): {requested} is above the model's own limit of {most} tokens, "
            f"which {config.path} gives; set it to {most} or less, or leave it out"
        )
    limit = own if requested is None else requested
    if limit is None:
        reason = "is missing; set maxModelLen (--max-model-len)"
        raise config.fails("max_position_embeddings", reason)
    if limit < 2:
        raise LoadFailed(
            f"{config.path}: a limit of {limit} tokens leaves no room for a prompt and an answer"
        )
    return limit


def read_stored_dtype(config: CheckpointConfig) -> str:
    """Return the name of the dtype in which the weights are stored."""
    key = "dtype" if "dtype" in config else "torch_dtype"
    stored = config.text(key, "float32").removeprefix("torch.")
    if stored not in FLOAT_TYPES:
        raise config.fails(key, f"{stored!r} is not supported ({', '.join(FLOAT_TYPES)} are)")
    return stored


def without_head(config: CheckpointConfig, reason: str) -> LoadFailed:
    """Return the error for an architecture that lacks what is needed of it."""
    return config.fails("architectures", f"{config.texts('architectures')} {reason}")


def _check_own_code(config: CheckpointConfig) -> None:
    """Refuse a model that needs code from its repository, unless transformers has the same code.

    An empty `auto_map` names none. What it names beside the network, such as a tokenizer, is not needed.
    """
    if "auto_map" not in config or not config.section("auto_map").keys():
        return
    code = config.section("auto_map").text("AutoModelForCausalLM", "").rpartition(".")[2]
    if code not in _SAME_CODE or code not in config.texts("architectures"):
        raise config.fails("auto_map", "the model needs code from its repository, which is never run")


def _check_fallback(config: CheckpointConfig) -> None:
    """Refuse what is known not to run with transformers, as far as that is known without importing it."""
    if QUANTIZATION in config:
        raise config.fails(QUANTIZATION, "is supported for our own model families only")
    has_transformers = find_spec("transformers") is not None
    if not has_transformers or not any(name.endswith(_MAKE_TEXT) for name in config.texts("architectures")):
        raise unknown_architecture(config)


def unknown_architecture(config: CheckpointConfig) -> LoadFailed:
    """Return the error for an architecture that neither we nor transformers can run."""
    others = "more with fairlead[hf]"
    if find_spec("transformers") is not None:
        others = f"dense decoders of transformers {version('transformers')}"
    return config.fails(
        "architectures",
        f"{config.texts('architectures')} is not supported ({', '.join(ARCHITECTURES)} are, and {others})",
    )


def _with_score(
    config: CheckpointConfig, spec: ArchitectureSpec | None, tokens: tuple[int, ...]
) -> ArchitectureSpec:
    """Return the network with the score of these tokens in place of its head."""
    if spec is None:
        raise config.fails("architectures", "scores are supported for our own model families only")
    if max(tokens) >= spec.vocab_size:
        raise config.fails("vocab_size", f"{max(tokens)}, the token of its score, is not in the vocabulary")
    return msgspec.structs.replace(spec, headless=True, scores=True, score_tokens=tokens)
