"""`tokenizer.json` and its companions, made of the metadata of a GGUF.

A vocabulary of the kind "gpt2" has bytes in the alphabet of GPT-2 and a list of merges. One of the kind
"llama" is SentencePiece's: its merges follow from the scores of its tokens. Others are refused by name.
"""

import json
from collections.abc import Iterator
from typing import Any

import msgspec

from fairlead.language.checkpoint.gguf.metadata import Metadata
from fairlead.language.checkpoint.gguf.pretokenizers import PRE_TOKENIZERS, PreTokenizer

_PREFIX = "tokenizer.ggml."
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
_SPACE = "▁"  # SentencePiece's
_ROLES = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
_ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")
_MOST_PIECE = 64  # characters of a token of which merges are derived: longer ones are added tokens


class Vocabulary(msgspec.Struct, frozen=True):
    """The tokens of a file.

    metadata: the file's.
    tokens: their spellings, by id.
    types: ggml's, by id.
    """

    metadata: Metadata
    tokens: list[str]
    types: list[int]

    @classmethod
    def read(cls, metadata: Metadata) -> "Vocabulary":
        """Read the tokens. `LoadFailed` if they are missing or wrong."""
        tokens = metadata.items(_PREFIX + "tokens", str)
        if not tokens:
            raise metadata.fails(_PREFIX + "tokens", "is empty")
        key = _PREFIX + "token_type"
        types = metadata.items(key, int) if key in metadata else [1] * len(tokens)
        if len(types) != len(tokens):
            raise metadata.fails(key, f"has {len(types)} entries for {len(tokens)} tokens")
        return cls(metadata, tokens, types)

    def tokenizer(self) -> bytes:
        """Return the content of `tokenizer.json`."""
        kind = self.metadata.text(_PREFIX + "model")
        if kind == "gpt2":
            document = self._byte_level()
        elif kind == "llama":
            document = self._sentence_piece()
        else:
            raise self.metadata.fails(_PREFIX + "model", f"{kind!r:.50} is not supported (gpt2, llama are)")
        document |= {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": list(self._added_tokens()),
            "post_processor": self._post_processor(),
        }
        return json.dumps(document).encode()

    def special_tokens(self) -> dict[str, str]:
        """Return the tokens with a role, by the names that transformers has for these."""
        found = {name: self._special(f"{role}_token_id") for role, name in _ROLES.items()}
        return {name: self.tokens[token_id] for name, token_id in found.items() if token_id is not None}

    def end_ids(self) -> list[int]:
        """Return the ids that end an answer."""
        return [token_id for key in _ENDS if (token_id := self._special(key)) is not None]

    def _special(self, name: str) -> int | None:
        key = _PREFIX + name
        if key not in self.metadata:
            return None
        token_id = self.metadata.integer(key)
        if token_id >= len(self.tokens):
            raise self.metadata.fails(key, f"{token_id} is not one of the {len(self.tokens)} tokens")
        return token_id

    def _ids(self) -> dict[str, int]:
        """Return the id of each spelling: the first, if several tokens have one."""
        ids: dict[str, int] = {}
        for token_id, token in enumerate(self.tokens):
            ids.setdefault(token, token_id)
        return ids

    def _added_tokens(self) -> Iterator[dict[str, Any]]:
        for token_id, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True)):
            if kind in (_CONTROL, _USER_DEFINED) and token:
                yield {
                    "id": token_id,
                    "content": token,
                    "single_word": False,
                    "lstrip": False,
                    "rstrip": False,
                    "normalized": False,
                    "special": kind == _CONTROL,
                }

    def _post_processor(self) -> dict[str, Any] | None:
        """Return the rule that adds the beginning and the end to texts; None if neither is added."""
        is_byte_level = self.metadata.text(_PREFIX + "model") == "gpt2"
        adds_bos = self._rule().add_bos if is_byte_level else True
        ends: dict[str, str] = {}
        for role, default in (("bos", adds_bos), ("eos", False)):
            token_id = self._special(f"{role}_token_id")
            if self.metadata.flag(f"{_PREFIX}add_{role}_token", default=default) and token_id is not None:
                ends[role] = self.tokens[token_id]
        if not ends:
            return None

        def around(*names: str) -> list[dict[str, Any]]:
            before, after = (
                [{"SpecialToken": {"id": ends[role], "type_id": 0}}] if role in ends else []
                for role in ("bos", "eos")
            )
            texts = [[*before, {"Sequence": {"id": name, "type_id": 0}}, *after] for name in names]
            return [each for text in texts for each in text]

        ids = self._ids()
        tokens = {text: {"id": text, "ids": [ids[text]], "tokens": [text]} for text in ends.values()}
        return {
            "type": "TemplateProcessing",
            "single": around("A"),
            "pair": around("A", "B"),
            "special_tokens": tokens,
        }

    def _rule(self) -> PreTokenizer:
        name = self.metadata.text(_PREFIX + "pre", "default")
        if (rule := PRE_TOKENIZERS.get(name)) is None:
            known = ", ".join(PRE_TOKENIZERS)
            raise self.metadata.fails(_PREFIX + "pre", f"{name!r:.50} is not supported ({known} are)")
        return rule

    def _byte_level(self) -> dict[str, Any]:
        rule, ids = self._rule(), self._ids()
        pairs = []
        for merge in self.metadata.items(_PREFIX + "merges", str):
            left, space, right = merge[:1], "", ""
            if (at := merge.find(" ", 1)) > 0:
                left, space, right = merge[:at], " ", merge[at + 1 :]
            if space and left in ids and right in ids and left + right in ids:
                pairs.append([left, right])
        splits = [
            {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
            for pattern in rule.patterns
        ]
        byte_level = {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": False,
        }
        return {
            "normalizer": None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, byte_level]},
            "decoder": byte_level,
            "model": self._model(ids, pairs, ignore_merges=rule.ignore_merges),
        }

    def _sentence_piece(self) -> dict[str, Any]:
        ids = self._ids()
        adds_space = self.metadata.flag(_PREFIX + "add_space_prefix", default=True)
        prepend = [{"type": "Prepend", "prepend": _SPACE}] if adds_space else []
        strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if adds_space else []
        replace = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
        restore = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
        decoders = [restore, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]
        unknown = next(
            (token for token, kind in zip(self.tokens, self.types, strict=True) if kind == _UNKNOWN), None
        )
        return {
            "normalizer": {"type": "Sequence", "normalizers": [*prepend, replace]},
            "pre_tokenizer": None,
            "decoder": {"type": "Sequence", "decoders": decoders},
            "model": self._model(
                ids,
                [[left, right] for left, right in self._merges(ids)],
                byte_fallback=True,
                fuse_unk=True,
                unk_token=unknown,
            ),
        }

    def _merges(self, ids: dict[str, int]) -> list[tuple[str, str]]:
        """Return all pairs of tokens that make a token, the one with the highest score first."""
        key = _PREFIX + "scores"
        scores = self.metadata.items(key, float)
        if len(scores) != len(self.tokens):
            raise self.metadata.fails(key, f"has {len(scores)} entries for {len(self.tokens)} tokens")
        found = []
        for token, token_id in ids.items():
            if self.types[token_id] != 1 or len(token) > _MOST_PIECE:
                continue
            score = scores[token_id]
            for at in range(1, len(token)):
                left, right = token[:at], token[at:]
                if left in ids and right in ids:
                    found.append((-score, ids[left], ids[right], left, right))
        found.sort()
        return [(left, right) for *_, left, right in found]

    def _model(self, ids: dict[str, int], merges: list[list[str]], **more: Any) -> dict[str, Any]:
        return {"type": "BPE", "dropout": None, "vocab": ids, "merges": merges, **more}
