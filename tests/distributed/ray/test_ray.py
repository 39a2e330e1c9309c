"""Models on a real Ray cluster of three raylets on this machine: a head without CPUs, and two others."""

import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest

from e2e.real_server import configured, real_server, until

# `find_spec` does not import Ray, which must not run in the process of the tests.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.alone,
    pytest.mark.timeout(400),
    pytest.mark.skipif(find_spec("ray") is None, reason="needs the extra ray"),
]

RAYLETS = Path(__file__).with_name("raylets.py")
MODEL = "fairlead-demo"
START_S = 90.0
ENVIRONMENT = {"RAY_USAGE_STATS_ENABLED": "0"}


class Raylets:
    """The cluster, whose machines can be killed. Number 0 is the head's, to which the launcher connects."""

    def __init__(self, process):
        self._process = process
        self.address = process.stdout.readline().strip()
        assert self.address, "the cluster has started"

    def order(self, order):
        self._process.stdin.write(f"{order}\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == "done\n"


@pytest.fixture(scope="module")
def raylets(tmp_path_factory):
    log = tmp_path_factory.mktemp("raylets") / "log"
    with log.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, str(RAYLETS), "2", "3"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=os.environ | ENVIRONMENT,
        )
        try:
            yield Raylets(process)
        finally:
            process.stdin.close()
            process.wait(60)
            process.stdout.close()


@contextmanager
def serving(folder, raylets, replicas, **more):
    """Serve the demonstration model on the cluster, with two slots a replica."""
    settings = {
        "cluster": {
            "ray": raylets.address,
            "targetWait": "500ms",
            "scaleUpAfter": "2s",
            "scaleDownAfter": "5s",
        },
        "healthCheck": {"interval": "500ms", "timeout": "5s"},
        **more,
    }
    arguments = configured(
        folder, {"slots": 2, "threads": 1, "replicas": {"cpus": 1, **replicas}}, **settings
    )
    with real_server(*arguments, environment=ENVIRONMENT) as server:
        yield server


def nodes_up(server):
    return sorted(node["id"] for node in server.http.get("/nodes").json() if node["state"] == "up")


def replicas_of(server):
    """Return the processes of replicas: their ids, in the order of their starts."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"node" in words and b"--lifeline" in words:
            found.append(int(process.name))
    return sorted(found)


class ClosedLoop:
    """Clients, each of which sends one request after the other. `outcomes` counts the answers."""

    def __init__(self, url, clients):
        self.outcomes = Counter()
        self._url = url
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._run) for _ in range(clients)]

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self._is_over.set()
        for thread in self._threads:
            thread.join(120)

    def _run(self):
        body = {"model": MODEL, "prompt": "Once", "max_tokens": 400, "ignore_eos": True, "temperature": 0}
        with httpx.Client(base_url=self._url, timeout=120) as client:
            while not self._is_over.is_set():
                self.outcomes[self._outcome(client, body)] += 1

    def _outcome(self, client, body):
        try:
            response = client.post("/v1/completions", json=body)
            if response.status_code == 200:
                return "answered" if response.json()["usage"]["completion_tokens"] == 400 else "cut off"
            return response.json()["error"]["code"]
        except (httpx.HTTPError, ValueError, KeyError) as error:
            return f"lost: {error!r}"


def test_replicas_follow_the_load_and_come_back_after_a_process_and_a_machine_are_killed(tmp_path, raylets):
    with serving(tmp_path, raylets, {"min": 1, "max": 3}) as server:
        until(lambda: len(nodes_up(server)) == 1, START_S)
        with ClosedLoop(server.url, clients=8) as load:
            until(lambda: len(nodes_up(server)) == 3, START_S)

            before = nodes_up(server)
            os.kill(replicas_of(server)[0], signal.SIGKILL)
            until(lambda: len(nodes_up(server)) == 3 and nodes_up(server) != before, START_S)

            before = nodes_up(server)
            raylets.order("kill 1")
            until(lambda: len(nodes_up(server)) == 3 and nodes_up(server) != before, START_S)
        until(lambda: len(nodes_up(server)) == 1 and len(server.http.get("/nodes").json()) == 1, START_S)
        metrics = server.http.get("/metrics").text
    assert f'fairlead_replicas{{model="{MODEL}",state="up"}} 1.0' in metrics
    assert load.outcomes["answered"] > 0
    assert not {outcome for outcome in load.outcomes if outcome not in ("answered", "node_failed")}
    until(lambda: replicas_of(server) == [])
    raylets.order("add")


def test_replicas_outlive_a_dispatcher_and_end_with_a_server_that_is_killed(tmp_path, raylets):
    with serving(tmp_path, raylets, {"min": 1}, fronts=2) as server:
        until(lambda: len(nodes_up(server)) == 1, START_S)
        before = replicas_of(server)
        with ClosedLoop(server.url, clients=1) as load:
            until(lambda: load.outcomes["answered"] > 0)
            os.kill(process_named("dispatcher 1"), signal.SIGKILL)
            until(lambda: any("epoch=2" in line for line in server.log))
            answered = load.outcomes["answered"]
            until(lambda: load.outcomes["answered"] > answered + 2)
        assert nodes_up(server) == [f"ray:{MODEL}:1"]
        assert replicas_of(server) == before
        assert {*load.outcomes} == {"answered"}
        server.process.kill()
        until(lambda: replicas_of(server) == [])


def test_replicas_come_back_when_the_raylet_of_this_machine_has_died_and_another_joins(tmp_path, raylets):
    with serving(tmp_path, raylets, {"min": 1}) as server:
        until(lambda: len(nodes_up(server)) == 1, START_S)
        raylets.order("kill all")
        until(lambda: any("the raylet of this machine has ended" in line for line in server.log), START_S)
        until(lambda: nodes_up(server) == [], START_S)
        raylets.order("add")
        until(lambda: len(nodes_up(server)) == 1, START_S)


def process_named(name):
    """Return the id of the server's child of this name."""
    (found,) = (
        int(process.name)
        for process in Path("/proc").glob("[0-9]*")
        if name.encode() in (process / "cmdline").read_bytes().split(b"\0")
    )
    return found
