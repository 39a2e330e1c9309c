"""Adds the tokens that a model's other files list and its tokenizer.json lacks, as transformers does.

Fine-tunes are published with tokens that only tokenizer_config.json, special_tokens_map.json or
added_tokens.json has. Their ids follow those of the vocabulary in the order below, whatever the files say:
1. `added_tokens_decoder` of tokenizer_config.json, by id. Without it, added_tokens.json.
2. the tokens that have a role, such as `pad_token`,
3. `extra_special_tokens`, or `additional_special_tokens`, its former name.
"""

from collections.abc import Container
from typing import Any

import msgspec
from tokenizers import AddedToken, Tokenizer

from fairlead.base.errors import LoadFailed
from fairlead.language.checkpoint.checkpoint import Checkpoint
from fairlead.language.checkpoint.config import CheckpointDocument
from fairlead.language.text.files import ROLES, read_json


class _Token(msgspec.Struct):
    """A token in the form of an object; `normalized` None: unless it is special."""

    content: str
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool | None = None
    special: bool = False

    def made(self, *, special: bool) -> AddedToken:
        chosen = {} if self.normalized is None else {"normalized": self.normalized}
        token = AddedToken(
            self.content, single_word=self.single_word, lstrip=self.lstrip, rstrip=self.rstrip, **chosen
        )
        token.special = special or self.special
        return token


_AnyToken = str | _Token
_Extra = list[_AnyToken] | dict[str, _AnyToken] | None


class _Config(msgspec.Struct):
    """The lists of tokens in tokenizer_config.json, or in special_tokens_map.json."""

    added_tokens_decoder: dict[int, _Token] | None = None
    extra_special_tokens: _Extra = None
    additional_special_tokens: _Extra = None

    def named(self) -> dict[str, _AnyToken]:
        """Return the further special tokens that have a name."""
        return self.extra_special_tokens if isinstance(self.extra_special_tokens, dict) else {}

    def unnamed(self) -> list[_AnyToken]:
        """Return the further special tokens without one."""
        lists = (self.extra_special_tokens, self.additional_special_tokens)
        return next((tokens for tokens in lists if isinstance(tokens, list) and tokens), [])


def add_tokens(checkpoint: Checkpoint, tokenizer: Tokenizer) -> None:
    """Add the missing tokens of the checkpoint's files. Raises `LoadFailed`, which names the invalid file."""
    config, roles = _read(checkpoint.document("tokenizer_config.json"))
    unnamed = config.unnamed()
    taken = tokenizer.get_added_tokens_decoder()
    if config.added_tokens_decoder is None:  # else the other files are copies that older versions need
        other, other_roles = _read(checkpoint.document("special_tokens_map.json"))
        roles |= other_roles
        unnamed = [*unnamed, *other.unnamed()]
        # As transformers finds them: not the objects in tokenizer_config.json, nor a model's own roles.
        known_roles = [token for name, token in roles.items() if name in ROLES]
        special = {token for token in (*known_roles, *unnamed) if isinstance(token, str)}
        special |= {_text(token) for name, token in other_roles.items() if name in ROLES}
        special |= set(map(_text, other.unnamed()))
        listed = _listed(checkpoint.document("added_tokens.json"), special, taken)
    else:
        decoder = config.added_tokens_decoder
        listed = [decoder[token_id].made(special=False) for token_id in sorted(decoder)]
    usual = [roles.pop(name) for name in ROLES if name in roles]
    with_role = [*usual, *roles.values()]
    for token in listed:
        token.special = token.special or token.content in map(_text, with_role)
    known = {token.content for token in (*taken.values(), *listed)}
    named = [token for token in (*with_role, *unnamed) if _text(token) not in known]
    tokenizer.add_tokens([*listed, *map(_special, named)])


def _read(path: CheckpointDocument) -> tuple[_Config, dict[str, _AnyToken]]:
    """Return what a file lists, and the tokens with a role by its name; models have some of their own."""
    if not path.is_file():
        return _Config(), {}
    config, values = read_json(path, _Config), read_json(path, dict[str, Any])
    roles: dict[str, _AnyToken] = {}
    for name, value in values.items():
        if name.endswith("_token") and isinstance(value, str | dict):
            try:
                roles[name] = msgspec.convert(value, type=_AnyToken)
            except msgspec.ValidationError as error:
                raise LoadFailed(f"{path}: {name}: {error}") from error
    return config, roles | config.named()


def _listed(path: CheckpointDocument, special: set[str], taken: Container[int]) -> list[AddedToken]:
    """Return the tokens of added_tokens.json by id, except those whose id tokenizer.json has `taken`."""
    ids = read_json(path, dict[str, int]) if path.is_file() else {}
    texts = {token_id: text for text, token_id in ids.items() if token_id not in taken}
    return [
        _Token(text, normalized=text not in special).made(special=text in special)
        for _, text in sorted(texts.items())
    ]


def _special(token: _AnyToken) -> AddedToken:
    return (_Token(token) if isinstance(token, str) else token).made(special=True)


def _text(token: _AnyToken) -> str:
    return token if isinstance(token, str) else token.content
