"""`fairlead run` with one question: the answer, the errors, and a server that it starts itself."""

import io
import sys
from pathlib import Path

import pytest

from fairlead.server.cli import main

# Replaces `fairlead.server.app` in a child process; needs no model.
FAKE_APP = """
import sys, types
app = types.ModuleType("fairlead.server.app")
def run(config, announcer, source):
    import os
    announcer.loading(config.models[0].name, 0.5, "weights")
    if config.models[0].name == "broken":
        announcer.failed("broken", "no config.json")
        return 1
    print("log line " * 20000, flush=True)
    announcer.ready(os.environ["FAKE_URL"], [config.models[0].name])
    print("log line " * 20000, flush=True)
    sys.stdin.read()
    return 0
app.run = run
sys.modules["fairlead.server.app"] = app
"""


@pytest.fixture
def own_app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server, unreachable_url) -> None:
    """Make the default address unreachable; `fairlead run` then starts the fake server."""
    (tmp_path / "sitecustomize.py").write_text(FAKE_APP)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(__file__).parents[3] / 'src'}")
    monkeypatch.setenv("FAKE_URL", server.url)
    monkeypatch.setattr("fairlead.server.console.chat.DEFAULT_URL", unreachable_url)


def test_answer_is_printed(server, capsys):
    assert main(["run", "second", "Hi", "--url", server.url, "--api-key", "ana=sk-1"]) == 0
    assert capsys.readouterr().out == "Hello there\n"
    assert server.bodies == [
        {"model": "second", "messages": [{"role": "user", "content": "Hi"}], "stream": True}
    ]
    assert server.keys == {"Bearer sk-1"}


def test_reasoning_is_not_part_of_standard_output(server, capsys):
    assert main(["run", "second", "please think", "--url", server.url]) == 0
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("Hello there\n", "")


def test_tool_calls_are_printed_with_each_argument_on_a_line(server, capsys):
    assert main(["run", "second", "please call", "--url", server.url]) == 0
    assert capsys.readouterr().out == (
        "Wait.\n"
        'call weather\n  city: "Zürich"\n  days: [1, 2]\n  note:\n    a\n    b\n'
        "call time\n"
        "call x\x1b[2J\n  no {\n"
    )


def test_first_model_is_the_default_and_a_v1_url_will_do(server, capsys):
    assert main(["run", "--prompt", "Hi", "--url", f"{server.url}/v1/"]) == 0
    assert server.bodies[0]["model"] == "first"


def test_directory_names_the_model_that_is_served_from_it(server, tmp_path, capsys):
    (tmp_path / "second").mkdir()
    assert main(["run", str(tmp_path / "second"), "Hi", "--url", server.url]) == 0
    assert server.bodies[0]["model"] == "second"


def test_prompt_may_come_from_standard_input(server, capsys, monkeypatch):
    monkeypatch.setenv("FAIRLEAD_URL", server.url)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"two\nlines \xff")))
    assert main(["run"]) == 0
    assert server.bodies[0]["messages"][0]["content"] == "two\nlines \ufffd"


def test_empty_prompt_is_bad_usage(server, capsys):
    assert main(["run", "first", " ", "--url", server.url]) == 2
    assert "PROMPT" in capsys.readouterr().err


def test_address_without_a_scheme_is_bad_usage(capsys):
    assert main(["run", "first", "Hi", "--url", "127.0.0.1:8000"]) == 2
    assert "--url" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("please refuse", "no: 429"),
        ("please break", "no: 500"),
        ("please fail", "the node failed"),
        ("please cut", "the server closed the stream before the end of the answer"),
    ],
)
def test_servers_error_is_one_line_and_exit_code_1(server, capsys, prompt, message):
    assert main(["run", "first", prompt, "--url", server.url]) == 1
    assert capsys.readouterr().err == f"fairlead: {message}\n"


def test_unknown_model_is_refused_with_the_servers_message(server, capsys):
    assert main(["run", "third", "Hi", "--url", server.url]) == 1
    assert capsys.readouterr().err == "fairlead: there is no model third here\n"


def test_unreachable_address_is_an_error(unreachable_url, capsys):
    assert main(["run", "first", "Hi", "--url", unreachable_url]) == 1
    assert capsys.readouterr().err == f"fairlead: no server answers at {unreachable_url}\n"


def test_name_that_is_not_a_directory_needs_a_server(own_app, unreachable_url, capsys):
    assert main(["run", "no-such-directory", "Hi"]) == 1
    assert (
        f"no server answers at {unreachable_url}, and no-such-directory is not a directory"
        in capsys.readouterr().err
    )


def test_run_without_a_server_starts_one_and_shows_the_progress(own_app, server, tmp_path, capsys):
    (tmp_path / "small").mkdir()
    server.models = ["small"]
    assert main(["run", str(tmp_path / "small"), "Hi"]) == 0
    printed = capsys.readouterr()
    assert printed.out == "Hello there\n"
    assert printed.err == "Loading small: 50 % weights\n"
    (key,) = server.keys
    assert key.startswith("Bearer ")


def test_failed_start_of_a_server_is_reported_with_the_reason(own_app, tmp_path, capsys):
    (tmp_path / "broken").mkdir()
    assert main(["run", str(tmp_path / "broken"), "Hi"]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == "fairlead: cannot serve broken: no config.json"
