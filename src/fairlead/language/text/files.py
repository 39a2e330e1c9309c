"""Reads the JSON files of a model's directory. Every error is a `LoadFailed` that names the file.

Defines the fields that the package reads, not their use.
"""

import json
from typing import Any, TypeVar

import msgspec

from fairlead.base.errors import LoadFailed
from fairlead.language.checkpoint.checkpoint import Checkpoint
from fairlead.language.checkpoint.config import CheckpointDocument

T = TypeVar("T")


class AddedToken(msgspec.Struct):
    """A special token in the form of an object, of which only the text is read."""

    content: str


class NamedTemplate(msgspec.Struct):
    """One of several chat templates in one file."""

    name: str
    template: str


ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""The special tokens that every tokenizer may have."""

Templates = str | list[NamedTemplate] | dict[str, str]


class TokenizerConfig(msgspec.Struct):
    """The fields read from tokenizer_config.json and special_tokens_map.json."""

    chat_template: Templates | None = None
    response_template: Any = None  # checked by `structured.wire_format`
    bos_token: str | AddedToken | None = None
    eos_token: str | AddedToken | None = None
    unk_token: str | AddedToken | None = None
    sep_token: str | AddedToken | None = None
    pad_token: str | AddedToken | None = None
    cls_token: str | AddedToken | None = None
    mask_token: str | AddedToken | None = None
    added_tokens_decoder: Any = None

    def special_tokens(self) -> dict[str, str]:
        """Return the texts of the tokens that are set, by name ("eos_token")."""
        tokens = {name: getattr(self, name) for name in ROLES}
        return {
            name: token.content if isinstance(token, AddedToken) else token
            for name, token in tokens.items()
            if token is not None
        }


def read_text(path: CheckpointDocument) -> str:
    """Return the file's text. Raises `LoadFailed` if it is missing, unreadable or not UTF-8."""
    try:
        return path.read_bytes().decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
    except FileNotFoundError:
        raise LoadFailed(f"{path} is missing") from None
    except (OSError, UnicodeDecodeError) as error:
        raise LoadFailed(f"{path} cannot be read: {error}") from error


def read_json(path: CheckpointDocument, form: type[T]) -> T:
    """Return the file as a value of type `form`. Other fields are ignored.

    Uses Python's own parser, because these files may contain Infinity, which strict JSON does not have.
    """
    text = read_text(path)
    try:
        return msgspec.convert(json.loads(text), type=form, str_keys=True)
    except msgspec.ValidationError as error:
        raise LoadFailed(f"{path}: {error}") from error
    except (ValueError, RecursionError) as error:
        raise LoadFailed(f"{path} is not JSON: {error}") from error


def read_special_tokens(checkpoint: Checkpoint) -> dict[str, str]:
    """Return the special tokens by name, read as transformers 5 reads them.

    special_tokens_map.json overrides tokenizer_config.json, unless that has an `added_tokens_decoder`: then
    the other file is a copy that older versions need, and is not read.
    """
    path = checkpoint.document("tokenizer_config.json")
    config = read_json(path, TokenizerConfig) if path.is_file() else TokenizerConfig()
    tokens = config.special_tokens()
    path = checkpoint.document("special_tokens_map.json")
    if config.added_tokens_decoder is None and path.is_file():
        tokens |= read_json(path, TokenizerConfig).special_tokens()
    return tokens
