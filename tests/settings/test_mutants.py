"""Servers with one broken line each are noticed, and what follows from no single setting is so."""

import pytest

from settings.all_cases import MUTANTS
from settings.behaviours import BEHAVIOURS
from settings.play import play_behaviour, play_mutant, played


@pytest.mark.parametrize("name", BEHAVIOURS)
def test_server_behaves_so(name, simulators):
    played(simulators, play_behaviour, name)


@pytest.mark.slow  # all of them together
@pytest.mark.parametrize("name", MUTANTS)
def test_server_with_a_broken_line_is_caught(name, simulators):
    assert played(simulators, play_mutant, name) is not None


def test_there_are_mutants_of_all_four_kinds():
    assert len(MUTANTS) >= 60
