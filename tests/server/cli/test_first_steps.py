"""Common first mistakes: each is reported with what to do about it."""

import io
import json
import os
import subprocess
import sys
import tomllib
from importlib.resources import files
from pathlib import Path

import pytest

import fairlead
from fairlead.base.config import demonstration_model
from fairlead.base.runtime.compilers import ADVICE
from fairlead.server.cli import main
from fairlead.server.console import doctor
from fairlead.server.listener.listener import bind
from language.text.model_folders import write_folder
from server.cli.test_serve import FakeApp

ROOT = Path(__file__).parents[3]
EXAMPLES = sorted((Path(str(files("fairlead"))) / "server" / "examples").glob("*.yaml"))


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> FakeApp:
    fake = FakeApp()
    monkeypatch.setitem(sys.modules, "fairlead.server.app", fake)
    return fake


# fairlead run "question" ----------------------------------------------------------------------------


@pytest.mark.parametrize("question", ["Why is the sky blue?", "Why?", "two words", "你好", "x" * 5000 + "?"])
def test_run_sends_a_question_given_without_a_model(server, capsys, question):
    assert main(["run", question, "--url", server.url]) == 0
    assert capsys.readouterr().out == "Hello there\n"
    (body,) = server.bodies
    assert (body["model"], body["messages"]) == ("first", [{"role": "user", "content": question}])


def test_run_uses_a_served_model_with_a_name_like_a_question(server, monkeypatch):
    server.models = ["first", "my model"]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"Hi")))
    assert main(["run", "my model", "--url", server.url]) == 0
    (body,) = server.bodies
    assert (body["model"], body["messages"][0]["content"]) == ("my model", "Hi")


def test_run_serves_a_directory_with_a_name_like_a_question(server, tmp_path):
    (tmp_path / "my model").mkdir()
    server.models = ["my model"]
    assert main(["run", str(tmp_path / "my model"), "Hi", "--url", server.url]) == 0
    assert server.bodies[0]["model"] == "my model"


@pytest.mark.parametrize("name", ["second", "org/second:7b@main", "Second-1.5_B"])
def test_run_uses_a_single_word_as_the_model(server, capsys, name):
    server.models = [name]
    assert main(["run", name, "Hi", "--url", server.url]) == 0
    assert server.bodies[0]["model"] == name


def test_error_for_a_single_word_that_is_no_model_shows_the_prompt_option(server, capsys):
    assert main(["run", "hello", "--url", server.url]) == 1
    printed = "there is no model hello here. If it is a question: fairlead run --prompt hello"
    assert capsys.readouterr().err == f"fairlead: {printed}\n"
    assert main(["run", "--prompt", "hello", "--url", server.url]) == 0
    assert server.bodies[0]["messages"][0]["content"] == "hello"


def test_error_for_a_single_word_without_a_server_shows_the_prompt_option(
    unreachable_url, capsys, monkeypatch
):
    monkeypatch.setattr("fairlead.server.console.chat.DEFAULT_URL", unreachable_url)
    assert main(["run", "hello"]) == 1
    missing = "hello is not a directory of a model or a GGUF file"
    printed = f"no server answers at {unreachable_url}, and {missing}"
    assert capsys.readouterr().err == (
        f"fairlead: {printed}. If it is a question: fairlead run --prompt hello\n"
    )


# Starting a server ----------------------------------------------------------------------------------


def serve_until_the_error(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Start a server that ends before it loads a model; return its exit code and last line."""
    code = main(["serve", *arguments])
    return code, capsys.readouterr().err.splitlines()[-1]


def test_max_model_len_above_the_models_is_an_error(capsys):
    path = demonstration_model()
    own = json.loads((path / "config.json").read_text())["max_position_embeddings"]
    code, printed = serve_until_the_error(capsys, str(path), "--port", "0", "--max-model-len", str(own + 1))
    assert code == 2
    assert printed == (
        f"fairlead: cannot serve fairlead-demo: maxModelLen (--max-model-len): {own + 1} is above "
        f"the model's own limit of {own} tokens, which {path / 'config.json'} gives; "
        f"set it to {own} or less, or leave it out"
    )


def test_error_for_a_port_in_use_suggests_another_port(capsys):
    (taken,) = bind("127.0.0.1", 0)
    with taken:
        port = taken.getsockname()[1]
        code, printed = serve_until_the_error(capsys, "--port", str(port))
    assert code == 1
    assert printed == (
        f"fairlead: cannot serve fairlead-demo: port {port} of 127.0.0.1 is in use by another program, "
        "perhaps another Fairlead (`fairlead ps`): stop that one, or choose another port with --port"
    )


@pytest.mark.parametrize("command", ["serve", "node"])
def test_error_for_a_missing_gguf_names_it(app, capsys, tmp_path, command):
    assert main([command, str(tmp_path / "small.gguf")]) == 2
    assert "There is no such file." in capsys.readouterr().err
    assert app.configs == []


def test_gguf_is_served_by_its_name_without_the_ending(app, tmp_path):
    path = tmp_path / "small.Q4_K_M.gguf"
    path.touch()
    assert main(["serve", str(path)]) == 0
    [model] = app.configs[0].models
    assert (model.name, model.path) == ("small.Q4_K_M", path)


def test_gguf_of_a_hub_is_served_by_the_name_of_its_repository(app):
    assert main(["serve", "org/small-GGUF:Q8_0"]) == 0
    [model] = app.configs[0].models
    assert (model.name, str(model.path)) == ("small-GGUF", "org/small-GGUF:Q8_0")


def test_error_for_a_missing_gguf_in_a_configuration_names_it(capsys, tmp_path):
    file = tmp_path / "fairlead.yaml"
    file.write_text("models:\n  m: {path: small.gguf}\n")
    assert main(["config", "check", str(file)]) == 2
    assert f"{file}:2: models.m.path: there is no file {tmp_path / 'small.gguf'}" in capsys.readouterr().err


def test_error_for_a_broken_gguf_in_a_configuration_names_it(capsys, tmp_path):
    (tmp_path / "small.gguf").write_bytes(b"GGUF")
    file = tmp_path / "fairlead.yaml"
    file.write_text("models:\n  m: {path: small.gguf}\n")
    assert main(["config", "check", str(file)]) == 2
    assert "small.gguf: its beginning reaches beyond the end of the file" in capsys.readouterr().out


def test_error_for_a_gguf_path_without_a_server_says_what_is_missing(unreachable_url, capsys, monkeypatch):
    monkeypatch.setattr("fairlead.server.console.chat.DEFAULT_URL", unreachable_url)
    assert main(["run", "small.gguf", "Hi"]) == 1
    assert "small.gguf is not a directory of a model or a GGUF file" in capsys.readouterr().err


def test_run_uses_a_served_model_with_the_name_of_a_gguf_file(server):
    server.models = ["small.gguf"]
    assert main(["run", "small.gguf", "Hi", "--url", server.url]) == 0
    assert server.bodies[0]["model"] == "small.gguf"


# Installing -----------------------------------------------------------------------------------------


def test_old_python_is_refused_with_the_required_version():
    code = "import sys; sys.version_info = (3, 10, 13, 'final', 0); import fairlead.server.cli"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.stderr.splitlines()[-1] == (
        f"ImportError: Fairlead needs Python 3.11 or later; this is Python 3.10.13 ({sys.executable})"
    )


def test_package_metadata_requires_the_same_oldest_python():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == ">=" + ".".join(map(str, fairlead.OLDEST_PYTHON))


def test_error_of_a_build_without_a_compiler_has_a_hint(tmp_path):
    ran = subprocess.run(
        [sys.executable, "setup.py", "build_ext", "--force", "-b", tmp_path, "-t", tmp_path],
        cwd=ROOT,
        env={**os.environ, "CC": "no-such-compiler"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert ran.returncode == 1
    assert "Fairlead's kernels are written in Cython and C, and 'no-such-compiler' is not there" in ran.stderr
    assert ADVICE in ran.stderr
    assert list(tmp_path.rglob("*.so")) == []


def test_error_for_missing_kernels_suggests_a_new_installation(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "fairlead.server.app", None)
    name = "fairlead._cext.fairqueue"

    def missing(*_: object, **__: object) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr("fairlead.server.cli.servers._serve", missing)
    assert main(["serve"]) == 1
    assert capsys.readouterr().err == (
        f"fairlead: the compiled kernel {name} is missing. Install Fairlead again; before that {ADVICE}.\n"
    )


@pytest.mark.parametrize(
    ("variable", "installed", "named"),
    [("", (), True), ("", ("cc",), False), ("my-cc", ("my-cc",), False), ("my-cc", ("cc",), True)],
)
def test_doctor_names_the_compiler_that_triton_needs_on_a_gpu(monkeypatch, variable, installed, named):
    monkeypatch.setenv("CC", variable)
    torch = {
        "version": "2.9",
        "cuda": "12",
        "threads": 1,
        "devices": [{"name": "H100", "memory": 80 * 2**30}],
    }
    monkeypatch.setattr(doctor, "_in_a_child", lambda _code: (json.dumps(torch), ""))
    monkeypatch.setattr(doctor.shutil, "which", lambda name: name if name in installed else None)
    found = [finding for finding in doctor._torch() if finding.name == "C compiler"]
    expected = doctor.Finding("C compiler", "bad", "none; Triton needs one for its GPU kernels", f"{ADVICE}.")
    assert found == ([expected] if named else [])


# Configuration files --------------------------------------------------------------------------------


def check(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str) -> tuple[list[str], dict]:
    """Return the output of `config check` for a valid file, as lines and as JSON."""
    file = tmp_path / "fairlead.yaml"
    file.write_text(text)
    assert main(["config", "check", str(file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert main(["config", "check", str(file), "--json"]) == 0
    return lines, json.loads(capsys.readouterr().out)


def test_config_check_finds_commands_that_are_not_on_path(tmp_path, capsys):
    text = (
        "models:\n"
        "  a: {cmd: 'no-such-server --port ${PORT}', cmdStop: 'no-such-stopper ${PID}'}\n"
        "  b: {cmd: '/no/such/file ${PORT}'}\n"
        "  c: {cmd: 'sh -c ${PORT}'}\n"
        "  d: {cmd: 'sh ${PORT}', env: ['PATH=/nowhere']}\n"
    )
    lines, printed = check(tmp_path, capsys, text)
    missing = {
        "models.a.cmd": "no-such-server",
        "models.a.cmdStop": "no-such-stopper",
        "models.b.cmd": "/no/such/file",
        "models.d.cmd": "sh",
    }
    assert printed["missing_commands"] == missing
    assert lines[-4:] == [f"  not on PATH here: {key}: {program}" for key, program in missing.items()]


def test_config_check_finds_selectors_without_targets(tmp_path, capsys):
    text = (
        "models: {a: {cmd: 'sh ${PORT}', aliases: [x]}}\n"
        "selectors:\n"
        "  none: {strategy: pin, targets: [b, c]}\n"
        "  some: {strategy: pin, targets: [b, x]}\n"
    )
    lines, printed = check(tmp_path, capsys, text)
    message = "none of them is served here (b, c), so every request for none gets 404"
    assert printed["remarks"] == [f"selectors.none.targets: {message}"]
    assert f"  note: selectors.none.targets: {message}" in lines


def test_config_check_accepts_any_target_if_a_node_may_have_any_model(tmp_path, capsys):
    text = "nodes: [{id: n, url: 'http://n'}]\nselectors: {any: {strategy: pin, targets: [b]}}\n"
    assert check(tmp_path, capsys, text)[1]["remarks"] == []


def test_config_check_refuses_a_selector_without_targets(tmp_path, capsys):
    file = tmp_path / "fairlead.yaml"
    file.write_text("selectors: {none: {strategy: pin, targets: []}}\n")
    assert main(["config", "check", str(file)]) == 2
    assert capsys.readouterr().err == f"{file}:1: selectors.none.targets: must be one name or more\n"


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_shipped_examples_pass_config_check(tmp_path, capsys, monkeypatch, example):
    for folder in ("qwen", "gemma"):
        write_folder(tmp_path / folder, config={"max_position_embeddings": 65_536})
    for name, value in {
        "MODELS": str(tmp_path),
        "ADMIN_KEY": "r",
        "ANA_KEY": "a",
        "PORTAL_KEY": "p",
        "BATCH_KEY": "b",
    }.items():
        monkeypatch.setenv(name, value)
    assert main(["config", "check", str(example)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{example} is good."
    notes = [line for line in lines if line.startswith(("  without effect", "  note"))]
    assert notes == []
