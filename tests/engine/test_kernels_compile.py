"""Every kernel compiles for a GPU that need not be present, and fits its shared memory."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="there is no Triton here")
SHARED_BYTES = 227 * 1024  # per thread block on Hopper


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="Triton brings its assembler on Linux only")
def test_every_kernel_compiles_for_hopper_within_its_shared_memory(tmp_path):
    compiler = Path(__file__).with_name("kernel_compiler.py")
    # An empty cache, and a process in which Triton compiles instead of interpreting.
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    environment["PYTHONPATH"] = os.pathsep.join([str(compiler.parents[1]), *sys.path])
    done = subprocess.run(
        [sys.executable, compiler, "--few", "90"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    names = {one["kernel"] for one in reports}
    assert {"decode", "combine", "prefill", "write_cache", "unpack", "find_thresholds", "round_rows"} <= names
    assert {"add_and_normalize", "rotate_and_store", "activate_gate", "apply_token_masks"} <= names
    assert all(one["shared"] <= SHARED_BYTES for one in reports)
    assert all(not one.get("stack") for one in reports), [one for one in reports if one.get("stack")]
