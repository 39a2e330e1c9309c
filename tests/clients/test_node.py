"""The Node packages of OpenAI, Anthropic and Ollama, unmodified, in `node/cases.cjs`.

Node finds them in the folders of `NODE_PATH`. Without one of them, its tests are skipped.
"""

import json
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest

from clients.conftest import MODEL
from e2e.real_server import TIMEOUT_S, RealServer

CASES = Path(__file__).parent / "node" / "cases.cjs"
PACKAGES = {"openai": "openai", "anthropic": "@anthropic-ai/sdk", "ollama": "ollama"}
WEATHER = [{"city": city, "unit": unit} for city in ("Oslo", "Bergen") for unit in ("C", "F")]


@cache
def is_installed(package: str) -> bool:
    node = shutil.which("node")
    return (
        node is not None
        and subprocess.run([node, "-e", f"require('{package}')"], check=False).returncode == 0
    )


def run(case: str, server: RealServer):
    package = PACKAGES[case.partition("_")[0]]
    if not is_installed(package):
        pytest.skip(f"node has no package {package}")
    command = ["node", str(CASES), case, server.url, MODEL]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("case", ["openai_chat", "openai_responses", "anthropic_messages", "ollama_chat"])
def test_streamed_answer_is_that_of_the_whole_one(server: RealServer, case):
    answer = run(case, server)
    assert answer["whole"]
    assert answer["streamed"] == answer["whole"]
    assert not any(server.wait_until_at_rest().values())


@pytest.mark.parametrize("case", ["openai_tools", "anthropic_tools", "ollama_format"])
def test_answer_has_the_requested_form(server: RealServer, case):
    assert run(case, server) in WEATHER


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("openai_error", {"name": "NotFoundError", "status": 404, "code": "model_not_found"}),
        ("anthropic_error", {"name": "NotFoundError", "status": 404, "type": "not_found_error"}),
        ("ollama_error", {"name": "ResponseError", "status": 404}),
    ],
)
def test_unknown_model_is_the_exception_of_the_package(server: RealServer, case, expected):
    assert run(case, server) == expected
