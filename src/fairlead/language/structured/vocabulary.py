"""A model's vocabulary in the form that llguidance matches grammars with."""

from collections.abc import Callable, Collection, Sequence

from llguidance import LLTokenizer
from llguidance import TokenizerWrapper as Wrapper


class _Source:
    """The interface that llguidance needs. Text is tokenized only for messages about errors, byte by byte."""

    bos_token_id = None

    def __init__(self, tokens: list[bytes], special: Collection[int], eos_token_id: int) -> None:
        self.tokens = tokens
        self.special_token_ids = sorted(special)
        self.eos_token_id = eos_token_id
        self._single = {token: index for index, token in enumerate(tokens) if len(token) == 1}

    def __call__(self, text: bytes) -> list[int]:
        return [self._single[byte] for byte in map(bytes, zip(text, strict=True)) if byte in self._single]


def token_vocabulary(
    token_bytes: Callable[[int], bytes],
    *,
    vocab_size: int,
    special_ids: Collection[int],
    eos_token_ids: Sequence[int],
) -> LLTokenizer:
    """Return a vocabulary for llguidance. Takes seconds for 150,000 tokens.

    token_bytes: returns a token's bytes in a text, empty for an unknown id.
    vocab_size: the number of tokens, the width of the logits.
    special_ids: tokens that no text of a grammar matches.
    eos_token_ids: tokens that end an answer where the grammar allows it. If none of them is in the
        vocabulary, a token that the model lacks does, with the id `vocab_size`: llguidance needs one.
    """
    known_ends = [token_id for token_id in eos_token_ids if 0 <= token_id < vocab_size]
    tokens = [token_bytes(token_id) for token_id in range(vocab_size)]
    special = {token_id for token_id in (*special_ids, *known_ends) if token_id < vocab_size}
    if not known_ends:
        known_ends = [vocab_size]
        tokens.append(b"")
        special.add(vocab_size)
    source = _Source(tokens, special, known_ends[0])
    return LLTokenizer(Wrapper(source), n_vocab=len(tokens), eos_token=known_ends)
