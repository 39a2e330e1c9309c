"""Predictions of answer lengths from those of past answers, and what an answer costs.

Pure, without a clock or a queue. Counts output tokens of whole jobs or of single sequences, whichever the
caller uses; predictions are of the same kind.
"""

import msgspec

from fairlead.router.dispatch.window import SlidingWindow

KEPT_ANSWERS = 200
ENOUGH_ANSWERS = 20
UNKNOWN_TOKENS = 256.0


class TokenWeights(msgspec.Struct, frozen=True):
    """The cost of a token under `queue.fairness: tokens` (`promptWeight`, `outputWeight`)."""

    prompt: float = 1.0
    output: float = 2.0

    def cost(self, prompt_tokens: float, output_tokens: float) -> float:
        """Return the weighted cost of so many tokens, predicted or counted."""
        return self.prompt * prompt_tokens + self.output * output_tokens

    def cost_without_tokens(self, tokens: float) -> float:
        """Return the cost of a request that counts as so many tokens: of the kind with the larger weight."""
        return max(self.prompt, self.output) * tokens


class LengthPredictor:
    """Predicts output tokens: the median of the past answers that were longer than this one is so far.

    A tenant's own answers count once there are 20 of them, until then all answers of that model. Bounded: the
    last 200 answers of each of so many models, and of so many pairs of tenant and model. The pair or model
    without a new answer for longest is forgotten first.
    """

    def __init__(self, *, models: int = 64, tenants: int = 1000) -> None:
        self._by_model = _Histories(models)
        self._by_tenant = _Histories(tenants)
        self._silent: dict[str, None] = {}  # bounded as `_by_model`
        self._models = models

    def observe_silence(self, model: str) -> None:
        """Record an answer whose node reported no tokens."""
        if model not in self._silent and len(self._silent) >= self._models:
            del self._silent[next(iter(self._silent))]
        self._silent[model] = None

    def is_silent(self, model: str) -> bool:
        """Return whether the nodes of a model have answered, and never reported tokens."""
        return model in self._silent and self._by_model.get(model) is None

    def observe(self, tenant: str, model: str, output_tokens: int) -> None:
        """Record the length of an answer."""
        self._by_model.add(model, output_tokens)
        self._by_tenant.add((tenant, model), output_tokens)

    def predict(self, tenant: str, model: str, *, so_far: int = 0, max_tokens: int) -> float:
        """Return the predicted output tokens in all: 0…`max_tokens`, never fewer for a larger `so_far`.

        tenant: whose answer it is.
        model: the model that writes it.
        so_far: how many tokens there are already.
        max_tokens: the most tokens of the answer.

        An answer longer than all before is predicted to double, because long answers tend to continue.
        """
        answers = self._by_tenant.get((tenant, model))
        if answers is None or len(answers) < ENOUGH_ANSWERS:
            answers = self._by_model.get(model)
        if answers is None:
            return min(max_tokens, max(UNKNOWN_TOKENS, 2.0 * so_far))
        median = answers.median_above(so_far)
        return min(max_tokens, 2.0 * so_far if median is None else median)


class _Histories:
    """At most `most` windows, by key."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._windows: dict[object, SlidingWindow] = {}  # the key updated last is at the end

    def get(self, key: object) -> SlidingWindow | None:
        return self._windows.get(key)

    def add(self, key: object, value: float) -> None:
        window = self._windows.pop(key, None)
        if window is None:
            if len(self._windows) >= self._most:
                del self._windows[next(iter(self._windows))]
            window = SlidingWindow(kept=KEPT_ANSWERS)
        self._windows[key] = window
        window.add(value)
