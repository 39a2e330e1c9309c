"""Test parameters for the mutants that the kernels' state machines must detect."""

from collections.abc import Iterable
from typing import Any

import pytest


def mutant_params(mutants: Iterable[type]) -> list[Any]:
    """Return a parameter for each mutant. One with `detected_rarely` takes long, so it is nightly."""
    return [
        pytest.param(
            mutant,
            id=mutant.__name__,
            marks=[pytest.mark.nightly] if getattr(mutant, "detected_rarely", False) else [],
        )
        for mutant in mutants
    ]
