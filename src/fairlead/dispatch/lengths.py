"""How long an answer will be, from how long past ones were, and what it then costs.

Pure: knows no clock and no queue. Counts output tokens of whole jobs or of single sequences, whatever it is
told; it only promises to answer in kind.
"""

import msgspec

from fairlead.dispatch.window import Window

KEPT_ANSWERS = 200
ENOUGH_ANSWERS = 20
UNKNOWN_TOKENS = 256.0


class TokenWeights(msgspec.Struct, frozen=True):
    """What a token costs under `queue.fairness: tokens` (`promptWeight`, `outputWeight`)."""

    prompt: float = 1.0
    output: float = 2.0

    def cost(self, prompt_tokens: float, output_tokens: float) -> float:
        """Return the weighted service of so many tokens, foretold or counted."""
        return self.prompt * prompt_tokens + self.output * output_tokens


class LengthPredictor:
    """Predicts output tokens: the median of past answers, given that this one is longer than so far.

    A tenant's own answers count once there are 20 of them, until then everybody's with that model. Bounded:
    the last 200 answers of each of so many models and of so many pairs of tenant and model; the pair or the
    model that was not heard of for longest is forgotten first.
    """

    def __init__(self, *, models: int = 64, tenants: int = 1000) -> None:
        self._by_model = _Histories(models)
        self._by_tenant = _Histories(tenants)

    def observe(self, tenant: str, model: str, output_tokens: int) -> None:
        """Note how long an answer was."""
        self._by_model.add(model, output_tokens)
        self._by_tenant.add((tenant, model), output_tokens)

    def predict(self, tenant: str, model: str, *, so_far: int = 0, max_tokens: int) -> float:
        """Return the output tokens there will be in all: 0…`max_tokens`, never fewer for a larger `so_far`.

        Longer than any before: as much again, for what has lasted long tends to last.
        """
        answers = self._by_tenant.get((tenant, model))
        if answers is None or len(answers) < ENOUGH_ANSWERS:
            answers = self._by_model.get(model)
        if answers is None:
            return min(max_tokens, max(UNKNOWN_TOKENS, 2.0 * so_far))
        median = answers.median_above(so_far)
        return min(max_tokens, 2.0 * so_far if median is None else median)


class _Histories:
    """At most so many windows, by key."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._windows: dict[object, Window] = {}  # the key heard of last is at the end

    def get(self, key: object) -> Window | None:
        return self._windows.get(key)

    def add(self, key: object, value: float) -> None:
        window = self._windows.pop(key, None)
        if window is None:
            if len(self._windows) >= self._most:
                del self._windows[next(iter(self._windows))]
            window = Window(kept=KEPT_ANSWERS)
        self._windows[key] = window
        window.add(value)
