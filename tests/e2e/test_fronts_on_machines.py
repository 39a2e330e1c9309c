"""Fronts and dispatchers as on different machines: TCP, a key, TLS, and a lease in a real Redis."""

import contextlib
import json
import shutil
import signal
import socket
import subprocess
import sys
import threading

import httpx
import pytest

from e2e.real_server import TIMEOUT_S, real_server, until
from link.test_connection import make_certificate

KEY = "a key that only these processes have"
MODEL = "fairlead-demo"
JOBS, TOKENS = 6, 300
BODY = {"model": MODEL, "prompt": "Once", "ignore_eos": True, "temperature": 0}


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def configuration(folder, name, **settings):
    (folder / "key").write_text(KEY)
    file = folder / f"{name}.yaml"
    settings["dispatcher"].setdefault("keyFile", str(folder / "key"))
    file.write_text(json.dumps(settings))
    return file


class StartedDispatcher:
    """`fairlead dispatcher`, and the lines that it has logged."""

    def __init__(self, file):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "fairlead", "dispatcher", "--config", str(file)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.log = []
        self.reader = threading.Thread(target=lambda: self.log.extend(self.process.stdout), daemon=True)
        self.reader.start()

    def has_logged(self, text):
        return any(text in line for line in list(self.log))

    def has_ended(self):
        return self.process.poll() is not None

    def stop(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
        self.process.wait(TIMEOUT_S)
        self.reader.join(TIMEOUT_S)
        self.process.stdout.close()


@contextlib.contextmanager
def dispatchers(*files):
    started = []
    try:
        for file in files:
            started.append(StartedDispatcher(file))
            if len(started) == 1:
                until(lambda: started[0].has_logged("leading") or started[0].process.poll() is not None)
                assert started[0].process.poll() is None, started[0].log
        yield started
    finally:
        for each in started:
            each.stop()


def complete(front, tokens):
    answer = front.http.post("/v1/completions", json=BODY | {"max_tokens": tokens})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def streamed(front, tokens, texts, began=None, name=None):
    """Append the text of a stream, or its last line if it has no end; and its name when it begins."""
    pieces, last = [], ""
    body = BODY | {"max_tokens": tokens, "stream": True}
    with httpx.stream("POST", f"{front.url}/v1/completions", json=body, timeout=60) as response:
        for line in response.iter_lines():
            last = line or last
            if line.startswith("data: {"):
                if began is not None and not pieces:
                    began.append(name)
                event = json.loads(line.removeprefix("data: "))
                pieces += [choice["text"] for choice in event.get("choices", ())]
    texts.append("".join(pieces) if last == "data: [DONE]" else last)


def finished(node):
    """Return how many answers a node has finished, by any reason."""
    lines = node.http.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:request_success_total"))


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl, which makes a certificate")
def test_fronts_share_a_dispatcher_over_tls_and_need_its_key(tmp_path):
    certificate, private = make_certificate(tmp_path)
    port = free_port()
    here = {"listen": f"tcp://127.0.0.1:{port}", "tlsCertificate": str(certificate), "tlsKey": str(private)}
    there = {"addresses": [f"tcp://127.0.0.1:{port}"], "tlsCa": str(certificate)}
    (tmp_path / "other").write_text("another key, of the same length too")
    with real_server(kind="node") as node:
        nodes = [{"id": "n", "url": node.url}]
        with dispatchers(configuration(tmp_path, "dispatcher", dispatcher=here, nodes=nodes)) as started:
            wrong = configuration(
                tmp_path, "wrong", port=0, dispatcher=there | {"keyFile": str(tmp_path / "other")}
            )
            stranger = subprocess.Popen(
                [sys.executable, "-m", "fairlead", "front", "--config", str(wrong)],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            file = str(configuration(tmp_path, "front", port=0, dispatcher=there))
            with (
                real_server("--config", file, kind="front") as one,
                real_server("--config", file, kind="front") as two,
            ):
                until(lambda: two.http.get("/v1/models").json()["data"])
                until(lambda: complete(one, 20))
                assert complete(one, 20) == complete(two, 20)
                added = two.http.post("/nodes", json={"id": "n2", "url": "http://127.0.0.1:9"})
                assert added.status_code == 201
                assert {each["id"] for each in one.http.get("/nodes").json()} == {"n", "n2"}
            until(lambda: started[0].has_logged("the keys differ"))
            stranger.terminate()
            stranger.wait(TIMEOUT_S)


def test_stopped_front_is_not_ready_while_it_takes_requests(tmp_path):
    port = free_port()
    there = {"addresses": [f"tcp://127.0.0.1:{port}"]}
    limits = {"drainDelay": "5s"}
    with real_server(kind="node") as node:
        nodes = [{"id": "n", "url": node.url}]
        here = {"listen": f"tcp://127.0.0.1:{port}"}
        with dispatchers(configuration(tmp_path, "dispatcher", dispatcher=here, nodes=nodes)):
            file = str(configuration(tmp_path, "front", port=0, dispatcher=there, limits=limits))
            with real_server("--config", file, kind="front") as front:
                until(lambda: front.http.get("/v1/models").json()["data"])
                assert front.http.get("/ready").status_code == 200
                front.process.send_signal(signal.SIGTERM)
                until(lambda: front.http.get("/ready").status_code == 503)
                assert complete(front, 5)
                assert front.process.wait(TIMEOUT_S) == 0


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("redis-server") is None, reason="redis-server is not installed")
@pytest.mark.parametrize("strike", [signal.SIGKILL, signal.SIGSTOP])
def test_standby_takes_over_without_an_effect_on_streams_and_on_the_order_of_jobs(strike, tmp_path):
    pytest.importorskip("coredis")
    redis_port, ports = free_port(), (free_port(), free_port())
    redis = subprocess.Popen(
        ["redis-server", "--port", str(redis_port), "--save", "", "--dir", str(tmp_path)],
        stdout=subprocess.DEVNULL,
    )
    # Nothing starts a dispatcher again here, so that a busy machine must be able to renew the lease in time.
    lease = {"redis": f"redis://127.0.0.1:{redis_port}", "duration": "6s"}
    queue = {"timeout": "1h"}
    addresses = [f"tcp://127.0.0.1:{port}" for port in ports]
    try:
        with real_server("--slots", "1", kind="node") as node:
            nodes = [{"id": "n", "url": node.url}]
            files = [
                configuration(
                    tmp_path,
                    f"d{index}",
                    dispatcher={"listen": address},
                    lease=lease,
                    nodes=nodes,
                    queue=queue,
                )
                for index, address in enumerate(addresses)
            ]
            there = {"addresses": addresses}
            file = str(configuration(tmp_path, "front", port=0, dispatcher=there, queue=queue))
            with (
                dispatchers(*files) as (leader, standby),
                real_server("--config", file, kind="front") as one,
                real_server("--config", file, kind="front") as two,
            ):
                for front in (one, two):
                    until(lambda front=front: front.http.get("/v1/models").json()["data"])
                whole = []
                streamed(one, TOKENS, whole)
                texts, began, clients = [], [], []
                for name in range(JOBS):
                    client = threading.Thread(
                        target=streamed, args=((one, two)[name % 2], TOKENS, texts, began, name)
                    )
                    client.start()
                    clients.append(client)
                    # The order of arrival at the dispatcher: one job runs, the others wait.
                    until(lambda count=name: one.queue()["waiting"] + len(began) > count)
                leader.process.send_signal(strike)
                until(lambda: not any(map(threading.Thread.is_alive, clients)) or standby.has_ended())
                assert not standby.has_ended(), "".join(["", *leader.log, *standby.log])
                assert texts == whole * JOBS
                assert began == list(range(JOBS))
                assert standby.has_logged("leading")
                if strike == signal.SIGSTOP:
                    leader.process.send_signal(signal.SIGCONT)
                    assert leader.process.wait(TIMEOUT_S) == 1
                    assert leader.has_logged("the lease was not renewed in time")
                assert complete(two, 5)
                # The first stream, the jobs and the completion: none was granted by both dispatchers.
                assert finished(node) == 1 + JOBS + 1
    finally:
        redis.terminate()
        redis.wait(TIMEOUT_S)
