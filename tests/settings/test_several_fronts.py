"""A server of several processes starts as one does, and every cut wire between its parts is noticed."""

import pytest

from settings.cases import FRONTS
from settings.play import play_start_that_fails, play_with_cut, played
from settings.wires import UNSEEN, all_wires, cut, wires

WIRES = {wire.name: wire for wire in wires()}


@pytest.mark.parametrize("fronts", FRONTS)
def test_server_that_cannot_load_its_model_ends_with_the_reason(fronts, simulators):
    assert "cuda:77" in played(simulators, play_start_that_fails, fronts)


def test_every_wire_has_its_own_name_and_can_be_cut():
    assert len(WIRES) == sum(1 for _ in wires()) >= 250
    for wire in list(WIRES.values())[::10]:  # all at night
        with cut(wire):
            pass


def test_each_wire_that_scenarios_cannot_show_exists():
    assert set().union(*(wire.unseen for wire in all_wires())) == UNSEEN.keys()


@pytest.mark.nightly
@pytest.mark.parametrize("name", WIRES)
def test_server_with_a_cut_wire_is_caught(name, simulators):
    assert played(simulators, play_with_cut, name) is not None
