"""The output of a model's processes is kept across restarts, within bounds, for engines and commands."""

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlead.base.config import NodeConfig
from fairlead.base.errors import InvalidRequest, LoadFailed, ModelNotFound
from fairlead.nodes.processes import output
from fairlead.nodes.processes.output import CHARACTERS_KEPT, LINES_KEPT, ProcessOutput
from router.fleet.running_fleet import engine, running_fleet, sleeper


def test_lines_are_numbered_and_returned_from_a_number_on():
    kept = ProcessOutput()
    for line in ("a", "b", "c"):
        kept.add(line)
    assert (kept.begin, kept.end) == (0, 3)
    assert [kept.since(number) for number in range(4)] == [["a", "b", "c"], ["b", "c"], ["c"], []]


def test_oldest_lines_are_dropped_above_the_number_of_lines():
    kept = ProcessOutput()
    for number in range(LINES_KEPT + 5):
        kept.add(str(number))
    assert (kept.begin, kept.end) == (5, LINES_KEPT + 5)
    assert kept.since(0) == [str(number) for number in range(5, LINES_KEPT + 5)]


def test_oldest_lines_are_dropped_above_the_size():
    kept = ProcessOutput()
    for _ in range(300):
        kept.add("x" * 2000)
    assert kept.end - kept.begin == CHARACTERS_KEPT // 2000


@given(st.lists(st.text(max_size=8), max_size=60))
def test_output_is_the_end_of_all_lines_and_within_its_bounds(lines):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(output, "LINES_KEPT", 10)
        patch.setattr(output, "CHARACTERS_KEPT", 30)
        kept = ProcessOutput()
        for line in lines:
            kept.add(line)
        shown = list(kept.since(0))
    assert shown == lines[len(lines) - len(shown) :]
    assert len(shown) <= 10
    assert sum(map(len, shown)) <= 30


async def test_output_of_a_command_is_kept_across_restarts():
    script = "import time; print('serving', flush=True); time.sleep(1000)"
    async with running_fleet(sleeper("m", cmd=(sys.executable, "-c", script))) as opened:
        await opened.fleet.load("m")
        await opened.until(lambda: opened.fleet.output("m").end == 1)
        await opened.fleet.unload("m")
        await opened.fleet.load("m")
        await opened.until(lambda: opened.fleet.output("m").end == 2)
        assert opened.fleet.output("m").since(0) == ["serving", "serving"]


async def test_output_of_an_engines_child_is_kept_after_a_failed_load():
    async with running_fleet(engine("m", "die_in_load")) as opened:
        with pytest.raises(LoadFailed):
            await opened.fleet.load("m")
        assert opened.fleet.output("m").since(0) == ["about to die"]


async def test_unknown_and_remote_models_have_no_output():
    node = NodeConfig(id="a", url="http://127.0.0.1:1", models=("far",))
    async with running_fleet(engine("m"), nodes=(node,)) as opened:
        with pytest.raises(ModelNotFound):
            opened.fleet.output("none")
        with pytest.raises(InvalidRequest, match="on another server"):
            opened.fleet.output("far")
