"""The nightly search for new examples, and what its workflow keeps of it."""

from pathlib import Path

import yaml
from hypothesis import settings

ROOT = Path(__file__).parents[1]


def test_the_suite_makes_up_the_same_examples_in_each_run():
    suite = settings.get_profile("suite")
    assert (suite.derandomize, suite.database) == (True, None)


def test_nightly_looks_for_new_examples_and_keeps_those_that_fail():
    nightly = settings.get_profile("nightly")
    assert not nightly.derandomize
    assert Path(nightly.database.path) == ROOT / ".hypothesis" / "examples"


def test_the_workflow_runs_that_profile_and_keeps_its_database_as_an_artifact():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "nightly.yml").read_text())
    steps = workflow["jobs"]["explore"]["steps"]
    (run,) = [step["run"] for step in steps if "pytest" in step.get("run", "")]
    assert "--hypothesis-profile nightly" in run
    kept = {step["uses"].partition("@")[0]: step for step in steps if step.get("if") == "always()"}
    assert {"actions/cache/save", "actions/upload-artifact"} == set(kept)
    assert {".hypothesis"} == {step["with"]["path"] for step in kept.values()}
