"""The snippets of README and docs, run as they are written against the demonstration model.

Those of a document run in order and share their names, because later ones go on where earlier ones end.
"""

import ast
import contextlib
import io
import json
import os
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from e2e.real_server import RealServer, configured, real_server

# The snippets leave their clients open.
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.usefixtures("garbage_is_collected"),
]

ROOT = Path(__file__).parents[2]
DOCUMENTS = ("README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")))
ADDRESS = "http://127.0.0.1:8000"
LANGUAGES = {"python": "python", "sh": "sh", "bash": "sh", "console": "sh"}
PACKAGES = ("openai", "anthropic", "ollama")
REQUESTS = {
    "custom_id": "1",
    "method": "POST",
    "url": "/v1/chat/completions",
    "body": {"model": "fairlead-demo", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4},
}
# What does not run here: the document, words of the snippet, and why.
SKIPPED = [
    ("README.md", "pip install", "installs packages"),
    ("README.md", "fairlead serve /models", "needs another model"),
    ("docs/administration.md", "", "needs the commands' own keys; tests/e2e/test_store.py does the same"),
    ("docs/asgi.md", "", "applications of other servers; tests/e2e/test_asgi.py runs them"),
    ("docs/benchmarks.md", "", "measures for minutes"),
    ("docs/clients.md", 'model="NAME"', "needs a model that reasons"),
    ("docs/clients.md", "whisper", "needs models of sound and images"),
    ("docs/clients.md", "lm_eval", "needs another program, and another model"),
    ("docs/clients.md", "ANTHROPIC_MODEL=NAME", "sets variables only"),
    ("docs/clients.md", "aider", "needs another program, and another model"),
    ("docs/models-and-hardware.md", "pip install", "installs packages"),
    ("docs/scaling.md", "192.168.1.12", "needs another machine"),
]


class Snippet(NamedTuple):
    """A block of a document. `line` is its first one."""

    document: str
    line: int
    language: str
    text: str

    def reason(self) -> str | None:
        """Return why it is not run; None: it is."""
        return next((why for at, words, why in SKIPPED if at == self.document and words in self.text), None)


def snippets(document: str) -> list[Snippet]:
    found = []
    text = (ROOT / document).read_text()
    for match in re.finditer(r"^```(\w+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        if match[1] in LANGUAGES:
            line = text.count("\n", 0, match.start()) + 2
            found.append(Snippet(document, line, LANGUAGES[match[1]], match[2]))
    return found


ALL = [snippet for document in DOCUMENTS for snippet in snippets(document)]


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[RealServer]:
    folder = tmp_path_factory.mktemp("snippets")
    batches = {"folder": str(folder / "batches")}
    with real_server(*configured(folder, {}, batches=batches)) as running:
        yield running


def test_each_reason_for_skipping_belongs_to_a_snippet():
    unused = [
        (document, words)
        for document, words, _ in SKIPPED
        if not any(each.document == document and words in each.text for each in ALL)
    ]
    assert unused == []


@pytest.mark.parametrize("snippet", [each for each in ALL if each.reason()], ids=lambda each: f"{each[:2]}")
def test_skipped_snippet_of_python_is_valid(snippet):
    if snippet.language == "python":
        compile(snippet.text, snippet.document, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    pytest.skip(snippet.reason())


@pytest.mark.parametrize(
    "document", sorted({each.document for each in ALL if each.language == "python" and not each.reason()})
)
def test_python_snippets_of_a_document_run_in_order(document, server, tmp_path, monkeypatch):
    for package in PACKAGES:
        pytest.importorskip(package)
    (tmp_path / "requests.jsonl").write_text(json.dumps(REQUESTS))
    monkeypatch.chdir(tmp_path)
    sleep = time.sleep
    monkeypatch.setattr(time, "sleep", lambda seconds: sleep(min(seconds, 0.05)))
    names: dict[str, object] = {}
    for snippet in snippets(document):
        if snippet.language != "python" or snippet.reason():
            continue
        text = "\n" * (snippet.line - 1) + snippet.text.replace(ADDRESS, server.url)
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(text, document, "exec"), names)  # our own document
        if "print(" in snippet.text and "tool_calls" not in snippet.text:  # the model need not call any
            assert printed.getvalue().strip(), snippet


@pytest.mark.parametrize(
    "snippet",
    [each for each in ALL if each.language == "sh" and not each.reason()],
    ids=lambda each: f"{each[:2]}",
)
def test_commands_of_a_snippet_succeed(snippet, server, tmp_path):
    text = snippet.text.replace(ADDRESS, server.url).replace("curl ", "curl --fail-with-body -sS ")
    ended = subprocess.run(
        ["sh", "-euc", text],
        cwd=tmp_path,
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip()
