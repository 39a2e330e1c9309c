"""`fairlead doctor`, `deploy`, `completion`, `node`, and the notifications to systemd."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath

import numpy as np
import pytest
import yaml

from fairlead.server.cli import main
from fairlead.server.configfile.read import read_config
from fairlead.server.console import doctor
from fairlead.server.console.announcer import PlainAnnouncer
from language.checkpoint.gguf_files import blocks, write
from language.checkpoint.test_gguf_header import LLAMA, SHAPES
from server.cli.terminal import Terminal
from server.cli.test_serve import FakeApp

ROOT = Path(__file__).parents[3]


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> FakeApp:
    fake = FakeApp()
    monkeypatch.setitem(sys.modules, "fairlead.server.app", fake)
    return fake


@pytest.fixture
def no_torch_inspection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the inspection of torch, which starts an interpreter; one test runs it."""
    torch = '{"version": "2.13.0", "cuda": null, "devices": [], "threads": 2}'
    monkeypatch.setattr(
        doctor, "_in_a_child", lambda code, *_: (torch, "") if "torch" in code else ("bfloat16: amx", "")
    )


def findings(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> dict[str, dict[str, str]]:
    port = () if "--port" in arguments else ("--port", "0")
    assert code == main(["doctor", "--json", *port, *arguments])
    return {finding["name"]: finding for finding in json.loads(capsys.readouterr().out)}


def test_doctor_reports_that_a_server_can_run():
    with Terminal(["doctor", "--port", "0"]) as terminal:
        shown = terminal.expect("A server will run here.")
        assert terminal.wait() == 0
    for name in ("Python", "torch", "processor", "kernels", "memory", "disk", "port", "model hub"):
        assert re.search(rf"[✓!]\S* {name}", shown), name


@pytest.mark.usefixtures("no_torch_inspection")
def test_doctor_reports_a_check_that_exceeds_its_time_limit(capsys, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(doctor, "CHILD_TIMEOUT_S", 0.2)
    monkeypatch.setattr(doctor, "TORCH_PROBE", "import time; time.sleep(60)")
    monkeypatch.setattr(doctor, "KERNEL_PROBE", "print('amx')")
    assert main(["doctor", "--port", "0"]) == 1
    assert "it did not end within 0.2 s" in capsys.readouterr().out


@pytest.mark.usefixtures("no_torch_inspection")
def test_doctor_does_not_promise_a_server_on_a_port_that_is_taken(capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        found = findings(capsys, "--port", port, code=1)
        assert main(["doctor", "--port", port]) == 1
    assert "will not run here yet" in capsys.readouterr().out
    assert found["port"]["verdict"] == "bad"
    advice = found["port"]["advice"]
    assert f"fairlead ps --url http://127.0.0.1:{port}" in advice
    assert "--port" in advice


@pytest.mark.usefixtures("no_torch_inspection")
def test_doctor_reports_the_faults_of_a_configuration(capsys, tmp_path):
    file = tmp_path / "fairlead.yaml"
    file.write_text("port: 80\nqueue:\n  capacity: -1\n")
    found = findings(capsys, "--config", str(file), code=1)["configuration"]
    assert found["verdict"] == "bad"
    assert "fairlead.yaml:3: queue.capacity" in found["found"]
    file.write_text("port: 80\n")
    assert findings(capsys, "--config", str(file))["configuration"]["verdict"] == "good"


@pytest.mark.usefixtures("no_torch_inspection")
def test_doctor_checks_the_given_address(capsys):
    found = findings(capsys, "--host", "127.0.0.3")["port"]["found"]
    assert found == "127.0.0.3:0 is free"


@pytest.mark.usefixtures("no_torch_inspection")
def test_doctor_reports_the_hubs_folder_and_token(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    found = findings(capsys)
    assert found["disk"]["found"].endswith(f"free for {tmp_path}")
    assert found["model hub"]["found"].endswith(", a token is set")
    monkeypatch.delenv("HF_TOKEN")
    assert findings(capsys)["model hub"]["found"].endswith(", no HF_TOKEN: open models only")


def test_doctor_has_a_hint_for_missing_torch(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "_in_a_child", lambda _code: (None, "ModuleNotFoundError: no torch"))
    found = findings(capsys, code=1)
    assert found["torch"]["verdict"] == "bad"
    assert "pip install" in found["torch"]["advice"]
    assert found["kernels"]["verdict"] == "bad"


def test_failed_child_returns_its_last_line():
    assert doctor._in_a_child("raise ValueError('three')") == (None, "ValueError: three")
    assert doctor._in_a_child("print(2 + 2)") == ("4", "")


@pytest.mark.parametrize(
    ("target", "names", "word"),
    [
        ("systemd", ["fairlead.service"], "Type=notify"),
        ("docker", ["Dockerfile", "Dockerfile.cuda"], "ENTRYPOINT"),
        ("compose", ["compose.yaml", "fairlead.yaml"], "FAIRLEAD_KEY"),
        (
            "kubernetes",
            [
                "base/kustomization.yaml",
                *(f"base/{name}.yaml" for name in ("front", "dispatcher", "node", "network")),
                *(f"base/config/{name}.yaml" for name in ("front", "dispatcher", "node")),
                *(f"overlays/gpu/{name}.yaml" for name in ("kustomization", "node")),
                *(f"overlays/autoscaling/{name}.yaml" for name in ("kustomization", "autoscaler")),
            ],
            "",
        ),
        ("grafana", ["grafana.json"], "fairlead_"),
    ],
)
def test_deploy_writes_the_files_and_names_them(tmp_path, capsys, target, names, word):
    folder = tmp_path / "new"
    assert main(["deploy", target, "-o", str(folder)]) == 0
    assert [str(folder / name) for name in names] == capsys.readouterr().out.split()
    assert all(word in (folder / name).read_text() for name in names)


def test_deploy_overwrites_only_on_request(tmp_path, capsys):
    existing = tmp_path / "Dockerfile"
    existing.write_text("existing")
    assert main(["deploy", "docker", "-o", str(tmp_path)]) == 2
    assert "--force" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["Dockerfile"]
    assert main(["deploy", "docker", "-o", str(tmp_path), "--force"]) == 0
    assert existing.read_text() != "existing"


def test_systemd_unit_runs_serve_with_a_configuration_and_a_json_log():
    unit = (Path(doctor.__file__).parents[1] / "deploy" / "fairlead.service").read_text()
    command = re.search(r"ExecStart=\S+/fairlead (.*)", unit)
    assert command is not None
    assert {"serve", "--config", "--log-json"} <= set(command[1].split())


@pytest.mark.parametrize(
    ("shell", "word"), [("bash", "complete -F"), ("zsh", "#compdef"), ("fish", "complete -c")]
)
def test_completion_is_in_the_language_of_the_shell_and_has_every_command(capsys, shell, word):
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert word in script
    for command in ("serve", "node", "run", "ps", "top", "logs", "stop", "doctor", "deploy", "config"):
        assert command in script


def test_node_is_a_server_without_a_queue(app, tmp_path):
    assert main(["node", str(tmp_path), "--port", "0"]) == 0
    assert app.configs[-1].queue.capacity == 0
    assert main(["node", str(tmp_path), "--queue-capacity", "5"]) == 2


def test_hub_model_is_resolved_only_when_the_server_starts(app):
    assert main(["serve", "organization/Some-Model-1B@main"]) == 0
    (model,) = app.configs[-1].models
    assert (model.name, model.path) == ("Some-Model-1B", Path("organization/Some-Model-1B@main"))


@pytest.mark.parametrize("abstract", [False, True])
def test_systemd_is_notified_of_readiness_and_of_stopping(tmp_path, monkeypatch, abstract):
    if abstract and sys.platform != "linux":
        pytest.skip("abstract sockets are Linux's")
    name = f"fairlead-{os.getpid()}" if abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind("\0" + name if abstract else name)
        monkeypatch.setenv("NOTIFY_SOCKET", "@" + name if abstract else name)
        announcer = PlainAnnouncer(key_needed=False)
        announcer.ready("http://127.0.0.1:1", ["small"])
        assert manager.recv(1024) == b"READY=1\nSTATUS=serving small at http://127.0.0.1:1"
        announcer.stopping()
        assert manager.recv(1024) == b"STOPPING=1"


def test_notify_socket_without_a_listener_is_ignored(tmp_path, monkeypatch):
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "unreachable_url"))
    PlainAnnouncer(key_needed=False).ready("http://127.0.0.1:1", ["small"])


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze")
def test_systemd_analyze_accepts_every_line_of_the_unit(tmp_path):
    assert main(["deploy", "systemd", "-o", str(tmp_path)]) == 0
    unit = tmp_path / "fairlead.service"
    program = tmp_path / "fairlead"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    unit.write_text(unit.read_text().replace("/opt/fairlead/bin/fairlead", str(program)))
    verified = subprocess.run(
        ["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False, timeout=60
    )
    assert (verified.returncode, verified.stdout + verified.stderr) == (0, "")


def test_compose_forwards_the_users_of_open_webui_to_fairlead(tmp_path, monkeypatch, capsys):
    assert main(["deploy", "compose", "-o", str(tmp_path)]) == 0
    services = yaml.safe_load((tmp_path / "compose.yaml").read_text())["services"]
    webui = services["open-webui"]["environment"]
    assert webui["ENABLE_FORWARD_USER_INFO_HEADERS"] == "true"
    assert webui["OPENAI_API_BASE_URL"] == "http://fairlead:8000/v1"
    assert webui["OPENAI_API_KEY"] == "${FAIRLEAD_KEY}"
    monkeypatch.setenv("FAIRLEAD_KEY", "sk-of-open-webui")
    config = read_config(tmp_path / "fairlead.yaml", os.environ).config
    (key,) = config.api_keys
    assert (key.key, key.trusted) == ("sk-of-open-webui", True)
    assert (config.host, config.port) == ("0.0.0.0", 8000)
    capsys.readouterr()
    assert main(["config", "check", str(tmp_path / "fairlead.yaml")]) == 0
    start = services["fairlead"]["command"]
    assert start[start.index("--config") + 1] in services["fairlead"]["volumes"][0]


def test_dockerfiles_copy_only_the_source():
    for name in ("Dockerfile", "Dockerfile.cuda"):
        text = (Path(doctor.__file__).parents[1] / "deploy" / name).read_text()
        assert "COPY . /source" in text
        assert "pip install fairlead" not in text
        start = json.loads(re.search(r"^ENTRYPOINT (.*)$", text, re.MULTILINE)[1])
        arguments = json.loads(re.search(r"^CMD (\[.*)$", text, re.MULTILINE)[1])
        assert [*start, arguments[0]] == ["fairlead", "serve"]


def is_ignored(path: str) -> bool:
    """Return whether `.dockerignore` has a path or one of its folders; `**/` stands for any folder."""
    at = PurePosixPath(path)
    patterns = [line for line in (ROOT / ".dockerignore").read_text().split("\n") if line and line[0] != "#"]
    return any(
        fnmatch(part.name if pattern.startswith("**/") else str(part), pattern.removeprefix("**/"))
        for part in (at, *at.parents)
        for pattern in patterns
    )


def test_docker_context_has_only_the_source():
    needed = ["pyproject.toml", "setup.py", "README.md", "LICENSE"]
    assert all((ROOT / name).exists() for name in needed)
    for folder in ("src", "cext"):
        files = (file.relative_to(ROOT) for file in (ROOT / folder).rglob("*") if file.is_file())
        needed += [str(file) for file in files if file.suffix != ".so" and "__pycache__" not in file.parts]
    assert [path for path in needed if is_ignored(path)] == []
    for path in (
        *(".git/config", ".venv/bin/python", "tests/check.py", "bench/results/a.json", "build/a.o"),
        *("src/fairlead/_cext/fairqueue.so", "src/fairlead/__pycache__/a.pyc", ".pytest_cache/a"),
    ):
        assert is_ignored(path), path


@pytest.mark.usefixtures("no_torch_inspection")
def test_doctor_checks_the_configured_port(capsys, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        file = tmp_path / "fairlead.yaml"
        port = taken.getsockname()[1]
        file.write_text(f"port: {port}\n")
        assert main(["doctor", "--json", "--config", str(file)]) == 1
    found = {finding["name"]: finding for finding in json.loads(capsys.readouterr().out)}
    assert found["port"]["verdict"] == "bad"
    assert f"127.0.0.1:{port}" in found["port"]["found"]


def write_gguf(path, kinds):
    """Write a small model; `kinds`: the type of a matrix by its part."""
    rng = np.random.default_rng(0)
    wide = {name: tuple(size * 8 if size > 3 else size for size in shape) for name, shape in SHAPES.items()}
    tensors = {}
    for name, shape in wide.items():
        kind = next((kind for part, kind in kinds.items() if part in name), "Q4_K")
        kind = "F32" if len(shape) == 1 else kind
        tensors[name] = blocks(kind, shape, rng), kind
    widths = ("embedding_length", "forward_length")
    sizes = {key: value * 8 for key, value in LLAMA.items() if key.endswith(widths)}
    return write(path, "llama", LLAMA | sizes, tensors)


def model_findings(capsys, path, code=0):
    assert main(["doctor", "--json", "--port", "0", str(path)]) == code
    return [each for each in json.loads(capsys.readouterr().out) if each["name"] == "model"]


def test_doctor_says_whether_a_gguf_runs_and_what_it_takes(capsys, tmp_path):
    speed, memory = model_findings(capsys, write_gguf(tmp_path / "small.gguf", {}))
    assert re.fullmatch(
        r"small runs on the CPU kernel \(\w+\), in \w+; one stream: at most \d+ tokens/s", speed["found"]
    )
    assert (memory["verdict"], memory["advice"]) == ("good", "")
    speed, memory = model_findings(capsys, write_gguf(tmp_path / "small.gguf", {"gate": "Q8_0"}))
    assert memory["advice"] == "Q4_K, Q8_0 are restored to numbers here, which takes more memory."


@pytest.mark.usefixtures("no_torch_inspection")
def test_doctor_says_why_a_gguf_does_not_run(capsys, tmp_path):
    path = tmp_path / "small.gguf"
    path.write_bytes(write_gguf(path, {}).read_bytes()[:-100])
    [finding] = model_findings(capsys, path, code=1)
    assert finding["verdict"] == "bad"
    assert "reaches beyond the end of the file" in finding["found"]
