"""The nightly search for new examples, and what its workflow keeps."""

from pathlib import Path

import yaml
from hypothesis import settings

ROOT = Path(__file__).parents[1]


def test_suite_generates_the_same_examples_in_each_run():
    suite = settings.get_profile("suite")
    assert (suite.derandomize, suite.database) == (True, None)


def test_nightly_profile_generates_new_examples_and_keeps_those_that_fail():
    nightly = settings.get_profile("nightly")
    assert not nightly.derandomize
    assert Path(nightly.database.path) == ROOT / ".hypothesis" / "examples"


def test_workflow_runs_the_nightly_profile_and_keeps_its_database_as_an_artifact():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "nightly.yml").read_text())
    steps = workflow["jobs"]["explore"]["steps"]
    runs = [step["run"] for step in steps if "pytest" in step.get("run", "")]
    assert any("--hypothesis-profile nightly" in run for run in runs)
    assert any("--nightly tests/language/text/test_as_transformers.py" in run for run in runs)
    kept = {step["uses"].partition("@")[0]: step for step in steps if step.get("if") == "always()"}
    assert set(kept) == {"actions/cache/save", "actions/upload-artifact"}
    assert {step["with"]["path"] for step in kept.values()} == {".hypothesis"}
