"""The commands `ps`, `logs` and `run` against a real server."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import pytest

from e2e.real_server import TIMEOUT_S, RealServer, configured, real_server

# Prints each line that the test writes into a pipe.
ECHO_SCRIPT = "import sys; print('hello \\x1b[31mred'); [print(line, end='') for line in open(sys.argv[1])]"


@pytest.fixture(scope="module")
def spoken(tmp_path_factory) -> Iterator[tuple[Path, TextIO]]:
    """A pipe and its end for writing: what is written into it, the command `talker` prints."""
    path = tmp_path_factory.mktemp("talker") / "spoken"
    os.mkfifo(path)
    with os.fdopen(os.open(path, os.O_RDWR), "w", buffering=1) as pipe:
        yield path, pipe


@pytest.fixture(scope="module")
def server(tmp_path_factory, spoken):
    """The demonstration model, and a command which serves nothing and prints."""
    folder = tmp_path_factory.mktemp("server")
    arguments = configured(folder, {})
    file = folder / "fairlead.yaml"
    settings = json.loads(file.read_text())
    command = f'{sys.executable} -u -c "{ECHO_SCRIPT}" {spoken[0]} ${{PORT}}'
    settings["models"]["talker"] = {"cmd": command, "checkEndpoint": "none"}
    settings["routing"] = {"router": {"use": "lru", "settings": {"lru": {"maxLoaded": 5}}}}
    file.write_text(json.dumps(settings))
    with real_server(*arguments) as server:
        yield server


def fairlead(server: RealServer, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fairlead", *arguments, "--url", server.url]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        stdin=subprocess.DEVNULL,
    )


def test_run_answers_a_question_without_a_model_name(server):
    ran = fairlead(server, "run", "What is Fairlead?")
    assert (ran.returncode, "fair turn" in ran.stdout) == (0, True)


def test_ps_shows_every_model_and_the_rejected_requests(server):
    assert server.http.get("/nowhere").status_code == 404
    shown = fairlead(server, "ps").stdout
    assert "rejected" in shown
    assert all(name in shown for name in ("fairlead-demo", "talker"))
    status = json.loads(fairlead(server, "ps", "--json").stdout)
    assert {"queue", "tokens", "rejected", "cache_usage", "models", "nodes"} <= set(status)


def test_logs_of_a_command_are_what_its_process_prints(server):
    server.http.post("/models/load", json={"model": "talker"}).raise_for_status()
    lines: list[str] = []
    while not lines:
        lines = fairlead(server, "logs", "talker").stdout.splitlines()
    assert lines[0] == "hello red"


def test_following_logs_shows_new_lines_until_it_is_interrupted(server, spoken):
    server.http.post("/models/load", json={"model": "talker"}).raise_for_status()
    command = [sys.executable, "-m", "fairlead", "logs", "talker", "-f", "--url", server.url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "hello red\n"
        numbers = []
        for first in range(0, 20, 5):
            spoken[1].write("".join(f"{number}\n" for number in range(first, first + 5)))
            numbers += [int(process.stdout.readline()) for _ in range(5)]
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        assert process.wait(TIMEOUT_S) == 0
    assert numbers == list(range(20))


def test_output_to_a_pipe_is_one_line_of_progress_and_the_ready_line(server):
    printed = [line for line in server.log if line.startswith(("Fairlead is ready", "Loading fairlead-demo"))]
    assert [line.split(":")[0] for line in printed] == ["Loading fairlead-demo", "Fairlead is ready"]
    assert printed[1].endswith(
        f"(dashboard: {server.url}/  API: {server.url}/v1  chat: fairlead run --url {server.url}  "
        "stop: Ctrl-C)\n"
    )
