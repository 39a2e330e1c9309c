"""Each setting of a configuration file has an effect, shown on a whole server in virtual time.

The server is the real one from its composition root down, with the real engine in its children; the system
around it is simulated (see `simulation`). A new setting needs a scenario: see `cases.setting`.
"""

import ast
from pathlib import Path

import pytest

from settings.all_cases import CASES
from settings.keys import keys
from settings.play import play, play_after_reload, play_without, played

# Tests of settings that `app.run` applies before it serves, each run with the setting and without it.
ELSEWHERE = {
    "logJson": "test_logging_settings.py::test_log_json",
    "logLevel": "test_logging_settings.py::test_log_level",
    "otlpEndpoint": "test_logging_settings.py::test_otlp_endpoint",
}


def test_each_setting_has_a_scenario_or_another_test():
    assert sorted([*CASES, *ELSEWHERE]) == keys()


@pytest.mark.parametrize("named", ELSEWHERE.values())
def test_each_test_that_is_named_exists(named):
    file, _, name = named.partition("::")
    functions = ast.walk(ast.parse(Path(__file__).with_name(file).read_text()))
    assert name in {part.name for part in functions if isinstance(part, ast.FunctionDef)}


@pytest.mark.parametrize("key", CASES)
def test_setting_has_its_effect(key, simulators):
    played(simulators, play, key)


@pytest.mark.slow  # all parameters together
@pytest.mark.parametrize("key", CASES)
def test_scenario_fails_where_its_setting_is_ignored(key, simulators):
    assert played(simulators, play_without, key) is not None


@pytest.mark.parametrize("key", CASES)
def test_setting_is_applied_by_a_reload_or_reported_as_needing_a_restart(key, simulators):
    assert played(simulators, play_after_reload, key) in ([], [key])
