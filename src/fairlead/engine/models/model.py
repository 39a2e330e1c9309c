"""A network as the engine uses it, whether it is built in or made by transformers.

T tokens of all sequences of a step, flattened; C hidden size; H query heads, K KV heads, D channels per
head; V vocabulary.
"""

from typing import Protocol

from torch import Tensor

from fairlead.language.checkpoint.shape import ModelShape


class AttentionFunction(Protocol):
    """Attention of each token to its sequence so far. The engine implements it, as it owns the cache."""

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Write `key` and `value` [T, K, D] to the cache; return `query`'s [T, H, D] attention: [T, H·D]."""


class Model(Protocol):
    """A network: T flattened tokens of many sequences in, logits out."""

    @property
    def shape(self) -> ModelShape: ...

    @property
    def score(self) -> Tensor | None:
        """The float32 row [1, C] that projects a text's last state to its score; None if it scores none."""

    @property
    def takes_embeddings(self) -> bool:
        """Whether `hidden` takes `embedded`."""

    def hidden(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attention: AttentionFunction,
        embedded: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Run all layers over token ids [T] at positions [T]: [T, C], not yet normalized.

        embedded: indices [E] of tokens, and what the first layer gets for them [E, C] in place of their
            embeddings, scaled as these are.
        """

    def states(self, hidden: Tensor) -> Tensor:
        """Return each token's final state, for embeddings, which a head would project: [T, C] → [T, C]."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the next-token logits: [T, C] → [T, V]. The model must have a head."""
