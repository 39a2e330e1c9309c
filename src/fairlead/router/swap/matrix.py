"""Expressions of which models may run together, and the cheapest evictions: llama-swap's matrix.

a & b        both          (a | b) & c   [a, c] or [b, c]
a | b        either        +other        the combinations of the set named other
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import product

from fairlead.router.swap.policy import EvictionPolicy, SwapReason

MAX_COMBINATIONS = 10_000
MAX_DEPTH = 50
_TOKEN = re.compile(r"\s*(?:(?P<sign>[&|()])|(?P<reference>\+)?(?P<name>[^\s&|()+][^\s&|()]*))")

Combination = frozenset[str]


class MatrixError(ValueError):
    """An expression is invalid; the message names the set."""


class MatrixPolicy(EvictionPolicy):
    """Chooses the cheapest combination that has the target; the first defined of several equal ones.

    A combination costs the sum of `evict_costs` (1 by default) of the running models outside it. All its
    subsets are allowed too. A model that is in no combination runs alone. Raises `MatrixError`.
    """

    def __init__(
        self,
        sets: Mapping[str, str],
        *,
        variables: Mapping[str, str] | None = None,
        evict_costs: Mapping[str, float] | None = None,
    ) -> None:
        names = variables or {}
        self._sets = _sets_of_combinations(sets, names)
        self._expressions = dict(sets)
        self.combinations = tuple(self._sets)
        self._costs = {names.get(name, name): cost for name, cost in (evict_costs or {}).items()}

    def eviction_for(self, target: str, running: Sequence[str]) -> frozenset[str]:
        """Return which of the `running` models must stop so that `target` can be loaded."""
        return frozenset(running) - self._best(target, running)

    def reason_for(self, target: str, running: Sequence[str]) -> SwapReason:
        """See `EvictionPolicy`: the rule is the set that allows the combination."""
        chosen = self._best(target, running)
        name = self._sets.get(chosen)
        return SwapReason(
            chosen=tuple(sorted(chosen)),
            cost=self._cost(frozenset(running) - chosen),
            rule="" if name is None else f"set {name}: {self._expressions[name]}",
        )

    def _best(self, target: str, running: Sequence[str]) -> Combination:
        """Return the cheapest combination that has the target; the target alone if it is in none."""
        everything = frozenset(running)
        choices = [allowed for allowed in self.combinations if target in allowed]
        return min(choices, key=lambda allowed: self._cost(everything - allowed), default=frozenset({target}))

    def _cost(self, evicted: frozenset[str]) -> float:
        return sum(self._costs.get(model, 1) for model in evicted)


def expand(sets: Mapping[str, str], variables: Mapping[str, str]) -> tuple[Combination, ...]:
    """Return all combinations that the sets allow, in order of definition, each once."""
    return tuple(_sets_of_combinations(sets, variables))


def _sets_of_combinations(sets: Mapping[str, str], variables: Mapping[str, str]) -> dict[Combination, str]:
    """Return all combinations, in order of definition, each with the first set that allows it."""
    found: dict[Combination, str] = {}
    for name in sets:
        for combination in _Expansion(sets, variables).of(name):
            found.setdefault(combination, name)
    return found


class _Expansion:
    """Expands one set, and those it refers to."""

    def __init__(self, sets: Mapping[str, str], variables: Mapping[str, str]) -> None:
        self._sets = sets
        self._variables = variables
        self._open: list[str] = []

    def of(self, name: str) -> list[Combination]:
        if name in self._open:
            raise MatrixError(f"sets.{name}: refers to itself ({' -> '.join([*self._open, name])})")
        self._open.append(name)
        tokens = _Tokens(name, self._sets[name])
        combinations = self._either(tokens, 0)
        if tokens.next is not None:
            raise MatrixError(f"sets.{name}: {tokens.next!r} is not expected there")
        self._open.pop()
        return combinations

    def _either(self, tokens: "_Tokens", depth: int) -> list[Combination]:
        combinations = self._all(tokens, depth)
        while tokens.accept("|"):
            combinations += self._all(tokens, depth)
            self._check_number(tokens, len(combinations))
        return combinations

    def _all(self, tokens: "_Tokens", depth: int) -> list[Combination]:
        combinations = self._one(tokens, depth)
        while tokens.accept("&"):
            others = self._one(tokens, depth)
            self._check_number(tokens, len(combinations) * len(others))
            combinations = [one | other for one, other in product(combinations, others)]
        return combinations

    def _one(self, tokens: "_Tokens", depth: int) -> list[Combination]:
        if depth > MAX_DEPTH:
            raise MatrixError(f"sets.{tokens.set_name}: is nested deeper than {MAX_DEPTH}")
        if tokens.accept("("):
            combinations = self._either(tokens, depth + 1)
            if not tokens.accept(")"):
                raise MatrixError(f"sets.{tokens.set_name}: a parenthesis is not closed")
            return combinations
        name = tokens.next
        if name is None or name in "&|)":
            raise MatrixError(f"sets.{tokens.set_name}: a model is missing before {name or 'the end'!r}")
        tokens.advance()
        if not name.startswith("+"):
            return [frozenset({self._variables.get(name, name)})]
        if name[1:] not in self._sets:
            raise MatrixError(f"sets.{tokens.set_name}: there is no set {name[1:]!r}")
        return self.of(name[1:])

    def _check_number(self, tokens: "_Tokens", count: int) -> None:
        if count > MAX_COMBINATIONS:
            raise MatrixError(f"sets.{tokens.set_name}: has more than {MAX_COMBINATIONS} combinations")


class _Tokens:
    """The names and operators of an expression, with one token of lookahead."""

    def __init__(self, set_name: str, expression: str) -> None:
        self.set_name = set_name
        self._rest = self._split(expression)
        self.next = next(self._rest, None)

    def advance(self) -> None:
        self.next = next(self._rest, None)

    def accept(self, sign: str) -> bool:
        found = self.next == sign
        if found:
            self.advance()
        return found

    def _split(self, expression: str) -> Iterator[str]:
        at, end = 0, len(expression.rstrip())
        while at < end:
            match = _TOKEN.match(expression, at)
            if match is None:
                raise MatrixError(f"sets.{self.set_name}: {expression[at:].strip()[:20]!r} is not valid")
            at = match.end()
            yield match["sign"] or (match["reference"] or "") + match["name"]
