"""Scenarios that depend on no single setting hold, and a server with one broken line fails a scenario."""

import pytest

from settings.all_cases import BEHAVIOURS, MUTANTS
from settings.composition_mutants import COMPOSITION, PLACEMENT
from settings.front_mutants import SEVERAL_FRONTS
from settings.limit_mutants import LIMITS, RELOAD
from settings.play import play_behaviour, play_mutant, played


@pytest.mark.parametrize(
    ("name", "fronts"), [(name, fronts) for name, found in BEHAVIOURS.items() for fronts in found.fronts]
)
def test_behaviour_holds(name, fronts, simulators):
    played(simulators, play_behaviour, name, fronts)


@pytest.mark.slow  # all parameters together
@pytest.mark.parametrize("name", MUTANTS)
def test_server_with_a_broken_line_is_caught(name, simulators):
    assert played(simulators, play_mutant, name) is not None


def test_there_are_mutants_of_all_five_kinds():
    kinds = (COMPOSITION, PLACEMENT, LIMITS, RELOAD, SEVERAL_FRONTS)
    assert min(map(len, kinds)) >= 10
    assert len(MUTANTS) == sum(map(len, kinds)) >= 60
