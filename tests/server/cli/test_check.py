"""The commands that developers and CI start: `tests/check.py` and `.ci/run`."""

import os
import shutil
import subprocess
from itertools import chain
from pathlib import Path

import pytest
import yaml

import check

CI = Path(__file__).parents[3] / ".ci" / "run"


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Return a kernel's source and a newer build of it."""
    source, built = tmp_path / "queue.pyx", tmp_path / f"queue{check.EXTENSION_SUFFIX}"
    for age, path in enumerate((source, built), start=1):
        path.touch()
        os.utime(path, (age, age))
    monkeypatch.setattr(check, "KERNEL_SOURCES", tmp_path)
    monkeypatch.setattr(check, "KERNELS_BUILT", tmp_path)
    return source, built


def test_kernel_newer_than_its_source_is_up_to_date(kernel):
    assert check._stale_kernels() == []


def test_kernel_that_was_never_built_is_stale(kernel):
    kernel[1].unlink()
    assert check._stale_kernels() == ["queue"]


def test_kernel_older_than_its_source_is_stale(kernel):
    os.utime(kernel[0], (3, 3))
    assert check._stale_kernels() == ["queue"]


def test_kernel_older_than_a_part_in_its_folder_is_stale(kernel):
    part = kernel[0].with_suffix("") / "part.h"
    part.parent.mkdir()
    part.touch()
    assert check._stale_kernels() == ["queue"]


def test_output_of_a_tool_is_returned_if_it_fails_and_printed_if_shown(capfd):
    failed = check._python(["-c", "print('one'); print('two'); raise SystemExit(3)"])
    assert check.Outcome(passed=False, output="one\ntwo") == failed
    assert check._python(["-c", "print('one')"], shown=True).passed
    assert capfd.readouterr().out == "one\n"


@pytest.mark.parametrize(
    "line",
    [
        "==================== 12 passed in 0.05s ====================",
        "3 failed, 12 passed, 1 skipped in 65.40s (0:01:05)",
        "1 error in 0.10s",
        "no tests ran in 0.01s",
    ],
)
def test_summary_line_of_pytest_is_recognized(line):
    assert check.PYTEST_SUMMARY.search(line)


def test_test_that_fails_is_not_run_again(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # importing all plugins takes seconds
    (tmp_path / "pyproject.toml").write_text('[tool.pytest.ini_options]\naddopts = "-p xdist"\n')
    (tmp_path / "test_it.py").write_text(
        "from pathlib import Path\n\n"
        "def test_something():\n"
        "    runs = Path(__file__).with_name('runs')\n"
        "    runs.write_text((runs.read_text() if runs.exists() else '') + 'x')\n"
        "    assert runs.read_text() == 'xx'\n"
    )
    monkeypatch.setattr(check, "ROOT", tmp_path)
    steps = chain.from_iterable(check._groups(fast=False))
    (pytest_step,) = [step for step in steps if step.name == "pytest"]
    assert not pytest_step.check().passed
    assert (tmp_path / "runs").read_text() == "x"


def names_of(**options):
    return {step.name for steps in check._groups(fast=False, **options) for step in steps}


def test_parts_are_together_all_checks():
    parts = [names_of(only=part) for part in check.PARTS]
    assert set.union(*parts) == names_of()
    assert set.intersection(*parts) == {"kernels are built from these sources"}


def test_job_of_continuous_integration_runs_each_part():
    workflow = yaml.safe_load((CI.parents[1] / ".github" / "workflows" / "checks.yml").read_text())
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    runs = "\n".join(step.get("run", "") for step in steps)
    assert [part for part in check.PARTS if f"tests/check.py --only {part}" not in runs] == []
    assert ".ci/run" in runs


def run_ci(root: Path, readme: str) -> subprocess.CompletedProcess[str]:
    (root / ".ci").mkdir()
    shutil.copy(CI, root / ".ci" / "run")
    (root / "README.md").write_text(readme)
    return subprocess.run([root / ".ci" / "run"], capture_output=True, text=True, check=False, timeout=240)


@pytest.mark.slow
def test_ci_runs_the_readmes_command_in_a_fresh_environment(tmp_path):
    command = """python -c 'import sys; print(sys.prefix != sys.base_prefix)' && pwd && exit 7"""
    readme = f"# It\n\n```\nfalse\n```\n\n<!-- test-command -->\n```sh\n{command}\n```\n\n```\nfalse\n```\n"
    run = run_ci(tmp_path, readme)
    assert run.returncode == 7
    assert f"\nTrue\n{tmp_path}\n" in run.stdout
    assert f"==> {command}\n" in run.stdout


def test_ci_refuses_a_readme_without_the_command(tmp_path):
    run = run_ci(tmp_path, "# It\n\n```\nfalse\n```\n")
    assert run.returncode == 1
    assert "test-command" in run.stderr
