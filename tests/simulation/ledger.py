"""Counts the tokens that fake models really generated: the most that the product may count."""

from collections import defaultdict


class Ledger:
    """Generated tokens by the ticket of the prompt, over all attempts."""

    def __init__(self) -> None:
        self._tokens: defaultdict[str, int] = defaultdict(int)

    def add(self, _model: str, ticket: str, tokens: int, most: int | None = None) -> None:
        """Count tokens of an answer. `most`: the most that the product may count, if that is uncertain."""
        self._tokens[ticket] += tokens if most is None else most

    def of(self, ticket: str) -> int:
        """Return the tokens of all answers to a prompt."""
        return self._tokens.get(ticket, 0)

    @property
    def total(self) -> int:
        """The tokens of all answers."""
        return sum(self._tokens.values())
