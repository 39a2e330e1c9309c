"""Reads a model's limits and sampling defaults from its configuration files."""

from pathlib import Path

import msgspec

from fairlead.language.checkpoint.architecture import ArchitectureSpec
from fairlead.language.checkpoint.checkpoint import open_checkpoint, read_config
from fairlead.language.checkpoint.config import CheckpointConfig
from fairlead.language.checkpoint.folder import read_max_model_len
from fairlead.language.checkpoint.generation import (
    GenerationDefaults,
    read_generation,
    read_generation_defaults,
)
from fairlead.language.checkpoint.registry import read_built_in

__all__ = ["GenerationDefaults", "TextSettings", "read_settings", "read_vocab_size"]


class TextSettings(msgspec.Struct, frozen=True):
    """The settings of the files.

    vocab_size: how many token ids the network has; None if that is not known.
    max_model_len: the most tokens of a sequence, prompt and output.
    defaults: the sampling parameters of requests without them.
    created: when config.json was written, in Unix time.
    """

    vocab_size: int | None
    max_model_len: int
    defaults: GenerationDefaults
    created: int


def read_settings(path: Path, *, max_model_len: int | None = None) -> TextSettings:
    """Read the checkpoint at `path`. Raises `LoadFailed`, which names the invalid file.

    One without weights will do, which `read_folder` refuses. `max_model_len` is the configured limit.
    Raises `ConfigError` if the model does not reach it.
    """
    checkpoint = open_checkpoint(path)
    config = read_config(checkpoint)
    return TextSettings(
        vocab_size=read_vocab_size(config),
        max_model_len=read_max_model_len(config, _read_spec(config), max_model_len),
        defaults=read_generation_defaults(read_generation(checkpoint)),
        created=checkpoint.created,
    )


def read_vocab_size(config: CheckpointConfig) -> int | None:
    """Return how many token ids the network has, by its family's default if need be; None: unknown."""
    spec = _read_spec(config)
    if spec is not None:
        return spec.vocab_size
    text = config.section("text_config") if "text_config" in config else config
    found = next((part for part in (text, config) if "vocab_size" in part), None)
    return None if found is None else found.integer("vocab_size")


def _read_spec(config: CheckpointConfig) -> ArchitectureSpec | None:
    return read_built_in(config) if "architectures" in config else None
