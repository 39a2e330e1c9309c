"""The command `llm`: a prompt, a stream and a schema, as its documentation configures another server."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from clients.conftest import MODEL
from clients.forms import QUESTION
from clients.packages import package
from e2e.real_server import TIMEOUT_S, RealServer

package("llm")


@pytest.fixture
def ask(tmp_path: Path, server: RealServer, base_url: str):
    model = {"model_id": "team", "model_name": MODEL, "api_base": base_url, "supports_schema": True}
    # JSON is YAML.
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps([model]))

    def run(*options: str) -> str:
        command = [sys.executable, "-m", "llm", "-m", "team", "--no-log", *options, QUESTION]
        variables = os.environ | {"LLM_USER_PATH": str(tmp_path), "OPENAI_API_KEY": "unused"}
        done = subprocess.run(
            command,
            env=variables,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    yield run
    assert not any(server.wait_until_at_rest().values())


def test_streamed_answer_is_that_of_the_whole_one(ask):
    greedy = ["-o", "temperature", "0", "-o", "max_tokens", "20"]
    whole = ask("--no-stream", *greedy)
    assert whole.strip()
    assert ask(*greedy) == whole


def test_answer_fits_a_schema(ask):
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Oslo", "Bergen"]}},
        "required": ["city"],
        "additionalProperties": False,
    }
    assert json.loads(ask("--schema", json.dumps(schema)))["city"] in {"Oslo", "Bergen"}
