"""Schemathesis finds no fault with the requests that it generates from `/openapi.json`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from e2e.real_server import real_server
from fairlead.base.config import demonstration_model

HERE = Path(__file__).parent
FUZZING = ("--phases=fuzzing", "--max-examples=10")
COVERAGE = ("--phases=coverage",)


@pytest.mark.slow
@pytest.mark.parametrize("phases", [FUZZING, pytest.param(COVERAGE, marks=pytest.mark.nightly)])
def test_schemathesis_finds_no_fault(phases, tmp_path):
    settings = {
        "models": {"fairlead-demo": {"path": str(demonstration_model()), "preload": True}},
        "queue": {"timeout": "5s"},  # it adds nodes that do not exist, and then asks them
        "batches": {"folder": str(tmp_path / "batches")},
    }
    (tmp_path / "fairlead.yaml").write_text(json.dumps(settings))
    files = ("--config", str(tmp_path / "fairlead.yaml"), "--store", str(tmp_path / "fairlead.db"))
    with real_server(*files) as server:
        program = [sys.executable, "-m", "schemathesis.cli", f"--config-file={HERE / 'schemathesis.toml'}"]
        ended = subprocess.run(
            [*program, "run", f"{server.url}/openapi.json", *phases],
            cwd=tmp_path,  # it creates a folder there
            env={**os.environ, "PYTHONPATH": str(HERE)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        assert "generated" in ended.stdout
