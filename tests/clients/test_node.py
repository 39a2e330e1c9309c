"""The Node packages of OpenAI, Anthropic and Ollama, unmodified, in `node/cases.cjs`.

Node finds them in the folders of `NODE_PATH`. Without one of them, its tests are skipped.
"""

import json
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from clients.conftest import MODEL
from e2e.real_server import TIMEOUT_S, RealServer, configured, real_server
from fairlead.base.config import demonstration_model

CASES = Path(__file__).parent / "node" / "cases.cjs"
PACKAGES = {"openai": "openai", "anthropic": "@anthropic-ai/sdk", "ollama": "ollama"}
WEATHER = [{"city": city, "unit": unit} for city in ("Oslo", "Bergen") for unit in ("C", "F")]


# Begins every answer with reasoning.
THINKING = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% if enable_thinking is not false %}<think>\n"
    "{% else %}<think>\n</think>\n{% endif %}{% endif %}"
)


@pytest.fixture(scope="module")
def reasoning_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    folder = tmp_path_factory.mktemp("reasoning")
    directory = folder / "model"
    shutil.copytree(demonstration_model(), directory)
    settings = directory / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": THINKING}))
    with real_server(*configured(folder, {"path": str(directory)})) as running:
        yield running


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


@pytest.mark.parametrize(
    "case", ["openai_tools", "openai_form", "anthropic_tools", "anthropic_form", "ollama_format"]
)
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


@pytest.mark.parametrize("package", PACKAGES)
def test_result_of_a_call_is_read(server: RealServer, package):
    assert isinstance(run(f"{package}_result", server)["text"], str)


@pytest.mark.parametrize("package", PACKAGES)
def test_streams_of_32_at_a_time_are_equal(server: RealServer, package):
    texts = run(f"{package}_many", server)["texts"]
    assert len(texts) == 32
    assert len(set(texts)) == 1


@pytest.mark.parametrize("package", PACKAGES)
def test_client_that_leaves_a_stream_frees_its_seat(server: RealServer, package):
    run(f"{package}_leaving", server)
    assert not any(server.wait_until_at_rest().values())


@pytest.mark.parametrize("package", PACKAGES)
def test_thinking_is_apart_from_the_text(reasoning_server: RealServer, package):
    assert run(f"{package}_thinking", reasoning_server)["thinking"]
