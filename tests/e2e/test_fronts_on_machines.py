"""Fronts and dispatchers as on different machines: TCP, a key, TLS, and a lease in a real Redis."""

import contextlib
import json
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading

import httpx
import pytest

from distributed.ipc.test_connection import make_certificate
from e2e.real_server import TIMEOUT_S, real_server, until

KEY = "a key that only these processes have"
MODEL = "fairlead-demo"
JOBS, TOKENS = 6, 300
needs_openssl = pytest.mark.skipif(
    shutil.which("openssl") is None, reason="needs openssl, which makes a certificate"
)
BODY = {"model": MODEL, "prompt": "Once", "ignore_eos": True, "temperature": 0}


def free_port():
    """Return a port that no outgoing connection gets from the kernel: a standby listens late at its port."""
    for port in random.SystemRandom().sample(range(20_000, 32_000), 100):
        with contextlib.suppress(OSError), socket.socket() as sock:
            sock.bind(("127.0.0.1", port))
            return port
    raise AssertionError("all ports are in use")


def configuration(folder, name, **settings):
    (folder / "key").write_text(KEY)
    file = folder / f"{name}.yaml"
    settings["dispatcher"].setdefault("keyFile", str(folder / "key"))
    file.write_text(json.dumps(settings))
    return file


class StartedDispatcher:
    """`fairlead dispatcher`, and the lines that it has logged."""

    def __init__(self, file):
        self.file = file
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

    def wait_until_leading(self):
        until(lambda: self.has_logged("leading") or self.has_ended())
        assert not self.has_ended(), "".join(self.log)


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


@pytest.fixture(scope="module")
def over_tls(tmp_path_factory):
    """Yield a folder, a dispatcher over TLS with a node, and the settings of its fronts."""
    folder = tmp_path_factory.mktemp("tls")
    certificate, private = make_certificate(folder)
    port = free_port()
    here = {"listen": f"tcp://127.0.0.1:{port}", "tlsCertificate": str(certificate), "tlsKey": str(private)}
    there = {"addresses": [f"tcp://127.0.0.1:{port}"], "tlsCa": str(certificate)}
    with real_server(kind="node") as node:
        nodes = [{"id": "n", "url": node.url}]
        dispatcher = StartedDispatcher(configuration(folder, "dispatcher", dispatcher=here, nodes=nodes))
        try:
            dispatcher.wait_until_leading()
            yield folder, dispatcher, there
        finally:
            dispatcher.stop()


@needs_openssl
def test_fronts_share_a_dispatcher_over_tls_and_need_its_key(over_tls):
    folder, dispatcher, there = over_tls
    (folder / "other").write_text("another key, of the same length too")
    wrong = configuration(folder, "wrong", port=0, dispatcher=there | {"keyFile": str(folder / "other")})
    stranger = subprocess.Popen(
        [sys.executable, "-m", "fairlead", "front", "--config", str(wrong)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    file = str(configuration(folder, "front", port=0, dispatcher=there))
    with (
        real_server("--config", file, kind="front") as one,
        real_server("--config", file, kind="front") as two,
    ):
        until(lambda: two.http.get("/v1/models").json().get("data"))
        until(lambda: complete(one, 20))
        assert complete(one, 20) == complete(two, 20)
        added = two.http.post("/nodes", json={"id": "n2", "url": "http://127.0.0.1:9"})
        assert added.status_code == 201
        assert {each["id"] for each in one.http.get("/nodes").json()} == {"n", "n2"}
        assert two.http.delete("/nodes/n2").status_code == 200
    until(lambda: dispatcher.has_logged("the keys differ"))
    stranger.terminate()
    stranger.wait(TIMEOUT_S)


@needs_openssl
def test_stopped_front_is_not_ready_while_it_takes_requests(over_tls):
    folder, _, there = over_tls
    file = configuration(folder, "stopped", port=0, dispatcher=there, limits={"drainDelay": "5s"})
    with real_server("--config", str(file), kind="front") as front:
        until(lambda: front.http.get("/v1/models").json().get("data"))
        assert front.http.get("/ready").status_code == 200
        front.process.send_signal(signal.SIGTERM)
        until(lambda: front.http.get("/ready").status_code == 503)
        assert complete(front, 5)
        front.http.close()  # the front waits some time for it
        assert front.process.wait(TIMEOUT_S) == 0


class Machines:
    """A node with one slot, dispatchers at two addresses, of which one leads, and two fronts."""

    def __init__(self, node, files):
        self.node = node
        self.fronts = []
        self._files = files
        self._running = []  # in the order of starts
        self._ended = []

    def leader_and_standby(self):
        """Return the dispatcher that leads and another one; start those that are missing."""
        files = [each.file for each in self._running]
        for file in self._files:
            if file not in files:
                self._running.append(StartedDispatcher(file))
                self._running[0].wait_until_leading()
        for front in self.fronts:
            until(lambda front=front: front.http.get("/v1/models").json().get("data"))
        return self._running

    def retire(self, dispatcher):
        """Stop a dispatcher, if it has not ended; another will be started at its address."""
        self._running.remove(dispatcher)
        self._ended.append(dispatcher)
        dispatcher.stop()

    def logs(self):
        """Return all that the processes have logged, for the report of a failure."""
        logs = {f"front {front.url}": front.log for front in self.fronts}
        for each in (*self._ended, *self._running):
            logs[f"{each.file.name}, process {each.process.pid}, exit status {each.process.poll()}"] = (
                each.log
            )
        return "\n".join(f"-- {name}\n{''.join(lines)}" for name, lines in logs.items())

    def stop(self):
        for each in list(self._running):
            self.retire(each)


@pytest.fixture(scope="module")
def machines(tmp_path_factory):
    pytest.importorskip("coredis")
    folder = tmp_path_factory.mktemp("machines")
    redis_port, ports = free_port(), (free_port(), free_port())
    command = ["redis-server", "--port", str(redis_port), "--save", "", "--dir", str(folder)]
    redis = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        # Nothing starts a dispatcher again here: a busy machine must be able to renew the lease in time.
        lease = {"redis": f"redis://127.0.0.1:{redis_port}", "duration": "6s"}
        queue = {"timeout": "1h"}
        addresses = [f"tcp://127.0.0.1:{port}" for port in ports]
        release_lease(redis_port)
        with real_server("--slots", "1", kind="node") as node:
            settings = {"lease": lease, "nodes": [{"id": "n", "url": node.url}], "queue": queue}
            files = [
                configuration(folder, f"d{index}", dispatcher={"listen": address}, **settings)
                for index, address in enumerate(addresses)
            ]
            there = {"addresses": addresses}
            file = str(configuration(folder, "front", port=0, dispatcher=there, queue=queue))
            started = Machines(node, files)
            try:
                started.leader_and_standby()
                with (
                    real_server("--config", file, kind="front") as one,
                    real_server("--config", file, kind="front") as two,
                ):
                    started.fronts += [one, two]
                    yield started
            finally:
                started.stop()
    finally:
        redis.terminate()
        redis.wait(TIMEOUT_S)


def release_lease(redis_port):
    """Write the record that a stopped leader leaves, once Redis runs: the first one need not wait for it."""
    record = json.dumps({"holder": "", "epoch": 1, "durationS": 6.0, "nonce": "0"})
    words = ["SET", "fairlead:lease", record]
    command = "".join([f"*{len(words)}\r\n", *(f"${len(word)}\r\n{word}\r\n" for word in words)])

    def is_written():
        with (
            contextlib.suppress(ConnectionRefusedError),
            socket.create_connection(("127.0.0.1", redis_port), TIMEOUT_S) as connection,
        ):
            connection.sendall(command.encode())
            return connection.recv(100) == b"+OK\r\n"

    until(is_written)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("redis-server") is None, reason="redis-server is not installed")
@pytest.mark.parametrize("strike", [signal.SIGKILL, signal.SIGSTOP])
def test_standby_takes_over_without_an_effect_on_streams_and_on_the_order_of_jobs(strike, machines):
    try:
        strike_leader(strike, machines)
    except Exception as error:
        error.add_note(machines.logs())
        raise


def strike_leader(strike, machines):
    leader, standby = machines.leader_and_standby()
    before = finished(machines.node)
    whole = []
    streamed(machines.fronts[0], TOKENS, whole)
    texts, began, clients = [], [], []
    for name in range(JOBS):
        front = machines.fronts[name % 2]
        client = threading.Thread(target=streamed, args=(front, TOKENS, texts, began, name))
        client.start()
        clients.append(client)
        # The order of arrival at the dispatcher: one job runs, the others wait.
        until(lambda count=name: machines.fronts[0].queue()["waiting"] + len(began) > count)
    leader.process.send_signal(strike)
    until(lambda: not any(map(threading.Thread.is_alive, clients)) or standby.has_ended())
    assert not standby.has_ended()
    assert texts == whole * JOBS
    assert began == list(range(JOBS))
    assert standby.has_logged("leading")
    if strike == signal.SIGSTOP:
        leader.process.send_signal(signal.SIGCONT)
        assert leader.process.wait(TIMEOUT_S) == 1
        until(lambda: leader.has_logged("the lease was not renewed in time"))
    machines.retire(leader)
    assert complete(machines.fronts[1], 5)
    # The first stream, the jobs and the completion: none was granted by both dispatchers.
    assert finished(machines.node) == before + 1 + JOBS + 1
