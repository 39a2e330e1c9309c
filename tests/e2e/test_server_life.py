"""The server as a process: starting, torch, signals."""

import json
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from e2e.own_copy import own_copy
from e2e.real_server import TIMEOUT_S, RealServer, configured, real_server, until
from e2e.slow_motion import stopped
from fairlead.base.config import demonstration_model

LONG = {"model": "fairlead-demo", "prompt": "Count", "max_tokens": 450, "ignore_eos": True, "temperature": 0}


def test_importing_the_application_imports_no_torch():
    check = "import fairlead.server.app, sys; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


def test_neither_the_parent_nor_a_child_with_the_cpu_kernel_maps_libtorch(server: RealServer):
    server.http.post("/v1/completions", json=LONG | {"max_tokens": 2}).raise_for_status()
    assert "libtorch" not in Path(f"/proc/{server.process.pid}/maps").read_text()
    assert "libtorch" not in Path(f"/proc/{server.child_pid()}/maps").read_text()


def test_health_and_ready_are_200_once_the_model_is_loaded(server: RealServer):
    assert (server.http.get("/health").status_code, server.http.get("/ready").status_code) == (200, 200)


def test_node_refuses_what_has_no_free_seat(tmp_path: Path):
    directory = own_copy(tmp_path / "named-so")
    job = LONG | {"model": "named-so", "max_tokens": 20}
    with real_server(str(directory), "--slots", "1", kind="node") as server, ThreadPoolExecutor(1) as pool:
        url = f"{server.url}/v1/completions"
        with stopped(server.child_pid()):
            taken = pool.submit(httpx.post, url, json=job, timeout=TIMEOUT_S)
            until(lambda: server.queue()["running"] == 1)
            refused = httpx.post(url, json=job, timeout=TIMEOUT_S)
        assert taken.result().status_code == 200
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")


def test_two_tenants_with_five_jobs_and_two_on_one_seat_are_answered_a_b_a_b_a_a_a(tmp_path: Path):
    arguments = (*configured(tmp_path, {"slots": 1}), "--log-json")
    with real_server(*arguments) as server, ThreadPoolExecutor(7) as pool:

        def send_chat(tenant: str, number: int) -> None:
            body = LONG | {"max_tokens": 60, "user": tenant}
            headers = {"X-Request-Id": f"{tenant}{number}"}
            url = f"{server.url}/v1/completions"
            httpx.post(url, json=body, headers=headers, timeout=TIMEOUT_S).raise_for_status()

        with stopped(server.child_pid()):  # all requests arrive before the first is done
            answers = []
            for waiting, tenant in enumerate("AAAAABB"):
                answers.append(pool.submit(send_chat, tenant, waiting))
                until(lambda waiting=waiting: server.queue()["waiting"] == waiting)
                until(lambda: server.queue()["running"] == 1)
        for each in answers:
            each.result()
        server.stop()
        lines = [json.loads(line) for line in server.log if line.startswith("{")]
    answered = [line["request_id"] for line in lines if line["event"] == "request"]
    assert "".join(request_id[0] for request_id in answered) == "ABABAAA"


def test_sighup_without_a_configuration_file_is_harmless(server: RealServer):
    server.process.send_signal(signal.SIGHUP)
    until(lambda: any("no configuration is read again" in line for line in server.log))
    assert server.http.get("/health").status_code == 200


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_lets_the_running_stream_finish_and_then_ends_everything(number):
    with real_server("--drain-timeout", str(TIMEOUT_S)) as server:
        child = server.child_pid()
        text: list[str] = []
        started = threading.Event()

        def stream() -> None:
            with httpx.stream(
                "POST", f"{server.url}/v1/completions", json=LONG | {"stream": True}, timeout=TIMEOUT_S
            ) as response:
                for line in response.iter_lines():
                    text.append(line)
                    started.set()

        reader = threading.Thread(target=stream)
        reader.start()
        assert started.wait(TIMEOUT_S)
        server.process.send_signal(number)
        assert server.process.wait(2 * TIMEOUT_S) == 0
        reader.join(TIMEOUT_S)
        assert "data: [DONE]" in text
        assert not Path(f"/proc/{child}").exists()


def test_sigterm_ends_the_server_even_when_a_client_never_reads(tmp_path: Path):
    # Only the drain timeout ends it: the answer takes minutes, and a client may stall for an hour.
    model = {"path": str(own_copy(tmp_path / "model", max_position_embeddings=200_000))}
    arguments = configured(tmp_path, model, limits={"drain": "1s", "stall": "1h"})
    body = LONG | {"stream": True, "n": 8, "max_tokens": 20_000}
    with (
        real_server(*arguments) as server,
        httpx.Client(timeout=TIMEOUT_S) as client,
        client.stream("POST", f"{server.url}/v1/completions", json=body) as response,
    ):
        assert response.status_code == 200
        assert server.stop() == 0


def test_model_that_is_not_there_ends_the_program_with_one_clear_line(tmp_path: Path):
    command = [sys.executable, "-m", "fairlead", "serve", str(tmp_path / "nothing"), "--port", "0"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode in (1, 2)
    assert "nothing" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_truncated_model_ends_the_program_naming_the_file(tmp_path: Path):
    for file in demonstration_model().iterdir():
        content = file.read_bytes()
        (tmp_path / file.name).write_bytes(content[:-1000] if file.suffix == ".safetensors" else content)
    command = [sys.executable, "-m", "fairlead", "serve", str(tmp_path), "--port", "0"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 1
    assert "model.safetensors" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_port_that_is_taken_ends_the_program_naming_it(server: RealServer):
    port = str(server.address[1])
    command = [sys.executable, "-m", "fairlead", "serve", "--port", port]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode in (1, 2)
    assert port in ended.stderr
    assert "Traceback" not in ended.stderr


def test_demonstration_model_answers_its_questions_through_the_chat_endpoint(server: RealServer):
    from demonstration_questions import QUESTIONS

    wrong = []
    for question, expected in QUESTIONS:
        body = {"messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 100}
        answer = server.http.post("/v1/chat/completions", json=body | {"model": "fairlead-demo"}).json()
        text = answer["choices"][0]["message"]["content"]
        if not all(part.lower() in text.lower() for part in expected):
            wrong.append((question, text))
    assert wrong == []
