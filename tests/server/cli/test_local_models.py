"""`fairlead pull`, `models`, `show` and `rm`, with a hub on the loopback interface and their own cache."""

import json
import os
import subprocess
import sys

import pytest

from fairlead.base.config import demonstration_model
from language.text.fake_hub import FakeHub

# The hub's library reads its environment once, so the commands run in a process of their own.
SCRIPT = """
import json, sys
from fairlead.server.cli import main
for command in json.loads(sys.argv[1]):
    code = main(command)
    print(f"\\n= {code}", flush=True)
assert "torch" not in sys.modules
"""


@pytest.fixture(scope="module")
def hub():
    files = {file.name: file.read_bytes() for file in demonstration_model().iterdir() if file.is_file()}
    with FakeHub({"org/model": files, "org/pickled": {"config.json": b"{}", "model.bin": b"x"}}) as hub:
        yield hub


def run(hub, cache, *commands: str) -> tuple[list[tuple[int, str]], str]:
    """Run commands one after another; return the exit code and the output of each, and all errors."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    variables |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(cache), "HF_HUB_DISABLE_TELEMETRY": "1"}
    variables |= {"PYTHONPATH": os.pathsep.join(sys.path), "COLUMNS": "100"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps([command.split() for command in commands])],
        env=variables,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    outputs, begun = [], ""
    for line in done.stdout.splitlines():
        if line.startswith("= "):
            outputs.append((int(line[2:]), begun.strip()))
            begun = ""
        else:
            begun += line + "\n"
    return outputs, done.stderr


def test_model_is_fetched_listed_shown_and_removed(hub, tmp_path):
    commands = (
        "pull org/model",
        "models --json",
        "ls",
        "show org/model --json",
        "rm org/model",
        "list --json",
    )
    (pulled, listed, table, shown, removed, left), errors = run(hub, tmp_path, *commands)
    assert [code for code, _ in (pulled, listed, table, shown, removed, left)] == [0] * 6, errors
    assert str(tmp_path) in pulled[1]
    model, demonstration = json.loads(listed[1])
    size = sum(file.stat().st_size for file in demonstration_model().iterdir() if file.is_file())
    assert model["name"] == "org/model"
    assert 0.9 * size < model["bytes"] <= size  # files that are not read are not fetched
    assert "org/model" in table[1]
    assert json.loads(shown[1])["architecture"] == "LlamaForCausalLM"
    assert json.loads(shown[1])["parameters"] == 2_656_704
    assert removed[1] == f"org/model is removed: {model['bytes'] / 1e6:,.0f} MB are free."
    assert json.loads(left[1]) == [demonstration]
    assert not list((tmp_path / "hub").glob("*org--model*"))


def test_commands_say_why_they_fail(hub, tmp_path):
    commands = (
        "pull org/pickled",
        "pull org/none",
        "pull model",
        "show org/model",
        "rm org/model",
        "rm ../x",
    )
    outputs, errors = run(hub, tmp_path, *commands)
    assert outputs == [(1, ""), (1, ""), (2, ""), (1, ""), (1, ""), (2, "")]
    reasons = [
        "pickled weights are never read",
        "no such model on the hub",
        "organization/name, not 'model'",
        "`fairlead pull org/model` fetches it",
        "`fairlead models` lists the models that are",
        "organization/name, not '../x'",
    ]
    for reason in reasons:
        assert reason in errors
