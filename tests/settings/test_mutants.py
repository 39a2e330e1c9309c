"""Scenarios that depend on no single setting hold, and a server with one broken line fails a scenario."""

import pytest

from settings.all_cases import MUTANTS
from settings.behaviours import BEHAVIOURS
from settings.cases import FRONTS
from settings.composition_mutants import COMPOSITION, PLACEMENT
from settings.limit_mutants import LIMITS, RELOAD
from settings.play import play_behaviour, play_mutant, played


@pytest.mark.parametrize("fronts", FRONTS)
@pytest.mark.parametrize("name", BEHAVIOURS)
def test_behaviour_holds(name, fronts, simulators):
    played(simulators, play_behaviour, name, fronts)


@pytest.mark.slow  # all parameters together
@pytest.mark.parametrize("name", MUTANTS)
def test_server_with_a_broken_line_is_caught(name, simulators):
    assert played(simulators, play_mutant, name) is not None


def test_there_are_mutants_of_all_four_kinds():
    kinds = (COMPOSITION, PLACEMENT, LIMITS, RELOAD)
    assert min(map(len, kinds)) >= 10
    assert len(MUTANTS) == sum(map(len, kinds)) >= 60
