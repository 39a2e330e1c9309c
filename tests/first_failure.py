"""Settings of Hypothesis for tests in which a fault must be found: the first failure ends the search."""

from hypothesis import Phase, settings
from hypothesis.internal.conjecture.providers import AVAILABLE_PROVIDERS, HypothesisProvider


class IndependentInputs(HypothesisProvider):
    """Draws each input independently of all earlier ones.

    Otherwise Hypothesis begins with 50 small inputs and runs variants of each. These seldom reach the state
    in which a fault of a state machine shows, so such a search takes three times as long.
    """


AVAILABLE_PROVIDERS["independent"] = f"{__name__}.{IndependentInputs.__name__}"


def until_first_failure(parent: settings | None = None, *, max_examples: int) -> settings:
    """Return settings that generate so many inputs at most, and shrink none."""
    return settings(
        parent,
        max_examples=max_examples,
        phases=[Phase.generate],
        report_multiple_bugs=False,
        backend="independent",
    )
