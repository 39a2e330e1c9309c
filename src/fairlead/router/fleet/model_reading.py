"""Finds a model's files, and reads what a process needs to tokenize for it."""

from collections.abc import Callable
from pathlib import Path

import structlog
import trio

from fairlead.base.config import ModelConfig
from fairlead.language.checkpoint.folder import read_folder
from fairlead.language.text.hub import find_model
from fairlead.language.text.model import TextModel

logger = structlog.get_logger("fairlead.model")


def read_files(model: ModelConfig, folder: Path) -> TextModel:
    """Read what the parent needs of a model from its folder, and check the rest as its process will do.

    Raises `LoadFailed` with the file and the key at fault, or `ConfigError` for a setting that does not suit
    the model. `fairlead serve`, `config check` and `doctor` report the same.
    """
    read_folder(folder, max_model_len=model.max_model_len)
    return TextModel.load(
        folder,
        name=model.name,
        max_model_len=model.max_model_len,
        max_input_tokens=model.max_input_tokens,
        max_output_tokens=model.max_output_tokens,
        special_tokens=model.special_tokens,
        close_at_limit=model.closes_at_limit,
        wire_format=model.wire_format,
    )


async def read_model(
    model: ModelConfig, *, on_progress: Callable[[str, float | None, str], None]
) -> TextModel:
    """Find a model's files, locally or on a hub, and read what the parent needs.

    Raises `LoadFailed` or `ConfigError`.
    """
    token = trio.lowlevel.current_trio_token()

    def fetched(fraction: float) -> None:  # called by threads of the hub's library
        token.run_sync_soon(on_progress, model.name, fraction, "fetching")

    def read() -> TextModel:
        return read_files(model, find_model(model.path, fetched))

    found = await trio.to_thread.run_sync(read, abandon_on_cancel=True)
    if tokens := found.untraced_tokens():
        reason = "the chat template writes them by an operation that is not traced"
        logger.warning("control tokens stay text", model=model.name, tokens=tokens, reason=reason)
    if found.ignored_end_tokens:
        reason = "the files name them, but the network has fewer token ids"
        logger.warning(
            "end tokens are ignored", model=model.name, ids=found.ignored_end_tokens, reason=reason
        )
    return found
