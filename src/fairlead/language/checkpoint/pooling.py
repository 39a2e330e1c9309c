"""Reads how a model makes a vector of each text, from the files that `sentence-transformers` writes.

These are `modules.json` and the configurations it names. `engine/models/pooler.py` makes the vectors.
"""

from pathlib import Path
from typing import Literal

import msgspec

from fairlead.base.errors import LoadFailed
from fairlead.language.checkpoint.checkpoint import Checkpoint
from fairlead.language.checkpoint.config import CheckpointConfig

FILE = "modules.json"
_MODES: dict[str, Literal["mean", "last"]] = {
    "mean": "mean",
    "lasttoken": "last",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}
_SWITCH = "pooling_mode_"
_SUPPORTED = (
    ["Transformer", "Pooling"],
    ["Transformer", "Pooling", "Normalize"],
    ["Transformer", "LogitScore"],
)


class Pooling(msgspec.Struct, frozen=True):
    """How a text's vector is made: its tokens' "mean" or "last" state, scaled to length 1 if `normalize`.

    `score_tokens`: the vector is the score of the text, the logit of the first one of these tokens, minus
    that of the second one if there are two.
    """

    kind: Literal["mean", "last"]
    normalize: bool
    score_tokens: tuple[int, ...] = ()


SCORE = Pooling("last", normalize=False)
"""The pooling of a model that scores texts by a row of its own."""


class _Module(msgspec.Struct):
    type: str
    path: str = ""


def read_pooling(checkpoint: Checkpoint, *, scores: bool = False) -> Pooling | None:
    """Return the pooling that `modules.json` defines; None if the model makes no embeddings and no scores.

    `scores`: the network scores texts by a row of its own. Modules other than the network, its pooling and a
    normalization, or the logits of a score, are a `LoadFailed`: ignoring them would change the vectors.
    """
    path = checkpoint.document(FILE)
    if not path.is_file():
        return SCORE if scores else None
    try:
        modules = msgspec.json.decode(path.read_bytes(), type=list[_Module])
    except OSError as error:
        raise LoadFailed(f"{path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise LoadFailed(f"{path}: {error}") from error
    kinds = [module.type.rpartition(".")[2] for module in modules]
    if scores and kinds == ["Transformer"]:
        return SCORE
    if scores or kinds not in _SUPPORTED:
        raise LoadFailed(
            f"{path}: only Transformer, Pooling, Normalize are supported, not {', '.join(kinds)}"
        )
    folder = modules[1].path
    if not folder or Path(folder).name != folder:
        raise LoadFailed(f"{path}: {folder!r} is not a directory beside it")
    config = CheckpointConfig.read(checkpoint.document(f"{folder}/config.json"))
    if kinds[1] == "LogitScore":
        return Pooling("last", normalize=False, score_tokens=_read_score_tokens(config))
    return Pooling(_read_kind(config), len(kinds) == 3)


def _read_score_tokens(config: CheckpointConfig) -> tuple[int, ...]:
    ids = (config.token_ids(name) for name in ("true_token_id", "false_token_id"))
    tokens = tuple(token_id for listed in ids for token_id in listed)
    if "true_token_id" not in config or len(tokens) > 2:
        raise config.fails("true_token_id", "must be a token id")
    return tokens


def _read_kind(config: CheckpointConfig) -> Literal["mean", "last"]:
    """Return the mode, given by its name or, in the older format, by the one switch that is on."""
    if "pooling_mode" in config:
        chosen, key = [config.text("pooling_mode")], "pooling_mode"
    else:
        chosen = [name for name in config.keys() if name.startswith(_SWITCH) and config.flag(name)]  # noqa: SIM118
        key = chosen[0] if chosen else f"{_SWITCH}mean_tokens"
    if len(chosen) != 1 or chosen[0] not in _MODES:
        raise config.fails(key, f"exactly one of {', '.join(_MODES)} is supported, not {chosen}")
    if not config.flag("include_prompt", default=True):
        raise config.fails("include_prompt", "leaving the instruction out of the mean is not supported")
    return _MODES[chosen[0]]
