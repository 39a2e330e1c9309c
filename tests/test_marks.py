"""Each test has the mark of its folder."""

import tomllib
from pathlib import Path

from conftest import MARKS, mark_of

TESTS = Path(__file__).parent


def test_marks_are_declared_and_belong_to_folders_that_exist():
    project = tomllib.loads((TESTS.parent / "pyproject.toml").read_text(encoding="utf-8"))
    declared = {line.partition(":")[0] for line in project["tool"]["pytest"]["ini_options"]["markers"]}
    assert {*MARKS.values(), "unit"} - declared == set()
    assert [folder for folder in MARKS if not (TESTS / folder).is_dir()] == []


def test_tests_get_the_mark_of_their_folder(request):
    assert mark_of(TESTS / "cext" / "test_slot_map.py") == "kernels"
    assert mark_of(TESTS / "server" / "routes" / "test_chat.py") == "unit"
    assert mark_of(TESTS / "nodes" / "test_remote_node.py") == "process"
    assert mark_of(TESTS / "nodes" / "streams" / "test_relay.py") == "unit"
    assert request.node.get_closest_marker("unit") is not None
