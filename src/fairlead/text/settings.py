"""Reads a model's length limit, end tokens and sampling defaults from its configuration files."""

from pathlib import Path

import msgspec

from fairlead.config import ConfigError
from fairlead.errors import LoadFailed
from fairlead.text.files import read_json, read_special_tokens
from fairlead.text.tokenizer import Tokenizer


class GenerationDefaults(msgspec.Struct, frozen=True):
    """Defaults of the sampling parameters of a request. The field names are OpenAI's and vLLM's."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


class TextSettings(msgspec.Struct, frozen=True):
    """The settings of the files. `created`: when config.json was written, in Unix time."""

    eos_token_ids: frozenset[int]
    max_model_len: int
    defaults: GenerationDefaults
    created: int


def read_settings(path: Path, tokenizer: Tokenizer, *, max_model_len: int | None = None) -> TextSettings:
    """Read the files of the directory `path`. Raises `LoadFailed`, which names the invalid file.

    `max_model_len` lowers the model's limit. Raises `ConfigError` if it is above that.
    """
    config_path = path / "config.json"
    config = read_json(config_path, _Config)
    generation_path = path / "generation_config.json"
    generation = read_json(generation_path, _Generation) if generation_path.exists() else _Generation()
    return TextSettings(
        _eos_token_ids(path, config, generation, tokenizer),
        _max_model_len(config_path, config, max_model_len),
        generation.defaults(),
        int(config_path.stat().st_mtime),
    )


TokenIds = int | list[int] | None


class _Limits(msgspec.Struct):
    max_position_embeddings: int | None = None
    n_positions: int | None = None


class _Config(_Limits):
    """The fields read from config.json. A multimodal model has those of its text model in `text_config`."""

    eos_token_id: TokenIds = None
    text_config: _Limits | None = None

    def limit(self) -> int | None:
        parts = [self, self.text_config or _Limits()]
        limits = (limit for part in parts for limit in (part.max_position_embeddings, part.n_positions))
        return next((limit for limit in limits if limit is not None), None)


class _Generation(msgspec.Struct):
    """The fields read from generation_config.json."""

    eos_token_id: TokenIds = None
    do_sample: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    def defaults(self) -> GenerationDefaults:
        """Return the sampling parameters of the file, unless they are for greedy decoding."""
        if self.do_sample is False:
            return GenerationDefaults()
        written = {name: getattr(self, name) for name in GenerationDefaults.__struct_fields__}
        return GenerationDefaults(**{name: value for name, value in written.items() if value is not None})


def _eos_token_ids(
    path: Path, config: _Config, generation: _Generation, tokenizer: Tokenizer
) -> frozenset[int]:
    written = config.eos_token_id if generation.eos_token_id is None else generation.eos_token_id
    ids = {written} if isinstance(written, int) else set(written or ())
    token = read_special_tokens(path).get("eos_token")
    if token is not None and (token_id := tokenizer.token_id(token)) is not None:
        ids.add(token_id)
    return frozenset(ids)


def _max_model_len(path: Path, config: _Config, requested: int | None) -> int:
    own = config.limit()
    if own is not None and requested is not None and requested > own:
        raise ConfigError(
            f"maxModelLen (--max-model-len): {requested} is above the model's own limit of {own} tokens, "
            f"which {path} gives; set it to {own} or less, or leave it out"
        )
    limits = [limit for limit in (own, requested) if limit is not None]
    if not limits:
        raise LoadFailed(f"{path} has no max_position_embeddings: set maxModelLen (--max-model-len)")
    if min(limits) < 2:
        raise LoadFailed(f"{path}: a limit of {min(limits)} tokens leaves no room for a prompt and an answer")
    return min(limits)
