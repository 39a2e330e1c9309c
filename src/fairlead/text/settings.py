"""Reads a model's limits, end tokens and sampling defaults from its configuration files."""

from pathlib import Path

import msgspec

from fairlead.models.config import CheckpointConfig
from fairlead.models.folder import FILE, read_max_model_len
from fairlead.models.generation import GenerationDefaults, read_generation, read_generation_defaults
from fairlead.models.registry import read_built_in
from fairlead.text.files import read_special_tokens
from fairlead.text.tokenizer import Tokenizer

__all__ = ["GenerationDefaults", "TextSettings", "read_settings"]


class TextSettings(msgspec.Struct, frozen=True):
    """The settings of the files. `created`: when config.json was written, in Unix time.

    `vocab_size`: how many token ids the network has; None if that is not known.
    """

    eos_token_ids: frozenset[int]
    vocab_size: int | None
    max_model_len: int
    defaults: GenerationDefaults
    created: int


def read_settings(path: Path, tokenizer: Tokenizer, *, max_model_len: int | None = None) -> TextSettings:
    """Read the files of the directory `path`. Raises `LoadFailed`, which names the invalid file.

    A folder without weights will do, which `read_folder` refuses. `max_model_len` is the configured limit.
    Raises `ConfigError` if the model does not reach it.
    """
    config = CheckpointConfig.read(path / FILE)
    spec = read_built_in(config) if "architectures" in config else None
    generation = read_generation(path)
    return TextSettings(
        eos_token_ids=_eos_token_ids(path, config, generation, tokenizer),
        vocab_size=_read_vocab_size(config) if spec is None else spec.vocab_size,
        max_model_len=read_max_model_len(config, spec, max_model_len),
        defaults=read_generation_defaults(generation),
        created=int(config.path.stat().st_mtime),
    )


def _read_vocab_size(config: CheckpointConfig) -> int | None:
    text = config.section("text_config") if "text_config" in config else config
    found = next((part for part in (text, config) if "vocab_size" in part), None)
    return None if found is None else found.integer("vocab_size")


def _eos_token_ids(
    path: Path, config: CheckpointConfig, generation: CheckpointConfig, tokenizer: Tokenizer
) -> frozenset[int]:
    ids = set(generation.token_ids("eos_token_id") or config.token_ids("eos_token_id"))
    token = read_special_tokens(path).get("eos_token")
    if token is not None and (token_id := tokenizer.token_id(token)) is not None:
        ids.add(token_id)
    return frozenset(ids)
