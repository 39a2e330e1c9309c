"""The launcher with a stand-in for Ray, its process, and the actor with a stand-in for its node."""

import json
import os
import socket
import sys
import threading
import time
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import pytest
import trio

from fairlead.base.config import ClusterConfig
from fairlead.base.frames import FrameSplitter, encode_frame
from fairlead.distributed.ray import replica_actor
from fairlead.distributed.ray.launcher import Launcher, actor_options, wait_for_raylet_death
from fairlead.distributed.ray.launcher_process import SOCKET, keep_launcher
from fairlead.distributed.ray.messages import (
    ReplicaEnded,
    ReplicaPlaced,
    Replicas,
    ReplicaUp,
    RunningReplica,
    StartReplica,
    StopReplica,
    from_launcher_decoder,
)
from fairlead.distributed.ray.replica_actor import ReplicaActor

ORDER = StartReplica("ray:qwen:1", "qwen", 1, "d", b"{}", cpus=2.0, gpus=1.0, memory_bytes=1024)
NODE = {"url": "http://10.0.0.2:1", "key": "sk"}


class FakeRay:
    """As much of Ray as the launcher uses: an actor whose methods' results the test sets."""

    class RayError(Exception):
        pass

    def __init__(self):
        self.exceptions = SimpleNamespace(RayError=self.RayError)
        self.options_given = None
        self.results = {name: Result() for name in ("machine", "start", "wait", "stop")}
        self.was_killed = threading.Event()

    def remote(self, _kind):
        return self

    def options(self, **options):
        self.options_given = options
        return SimpleNamespace(remote=lambda _config: self)

    def __getattr__(self, name):
        return SimpleNamespace(remote=lambda: self.results[name])

    def get(self, result, timeout=None):
        if not result.is_set.wait(10 if timeout is None else timeout):
            raise self.RayError("timeout")
        if isinstance(result.value, Exception):
            raise result.value
        return result.value

    def kill(self, _actor):
        self.was_killed.set()
        for result in self.results.values():
            if not result.is_set.is_set():
                result.set(self.RayError("The actor died.\nmore"))


class Result:
    def __init__(self):
        self.value = None
        self.is_set = threading.Event()

    def set(self, value):
        self.value = value
        self.is_set.set()


class Connection:
    """The server's end."""

    def __init__(self, sock):
        self.sock = sock
        self._splitter = FrameSplitter()
        self._received = []

    def send(self, message):
        self.sock.sendall(encode_frame(message))

    def receive(self):
        while not self._received:
            data = self.sock.recv(1 << 16)
            self._received += map(from_launcher_decoder.decode, self._splitter.feed(data))
        return self._received.pop(0)


@contextmanager
def connected(launcher):
    ours, theirs = socket.socketpair()
    ours.settimeout(10)
    serving = threading.Thread(target=launcher.serve, args=(theirs,))
    serving.start()
    try:
        yield Connection(ours)
    finally:
        ours.close()
        serving.join()
        launcher.disconnected()
        theirs.close()


def test_replica_is_reported_from_its_place_to_its_end():
    ray = FakeRay()
    with connected(Launcher(ray)) as server:
        assert server.receive() == Replicas()
        server.send(ORDER)
        ray.results["machine"].set("10.0.0.2")
        assert server.receive() == ReplicaPlaced(ORDER.id, "10.0.0.2")
        ray.results["start"].set(NODE)
        assert server.receive() == ReplicaUp(ORDER.id, "http://10.0.0.2:1", "sk")
        ray.results["wait"].set(-9)
        assert server.receive() == ReplicaEnded(ORDER.id, "ended with exit status -9")
        assert ray.was_killed.is_set()


@pytest.mark.parametrize(
    ("results", "reason"),
    [
        ({"machine": FakeRay.RayError("The actor died.\n\tnode_id: 7")}, "The actor died."),
        ({"machine": "10.0.0.2", "start": {"reason": "no folder"}}, "did not start: no folder"),
        ({"machine": ValueError("odd")}, "ValueError: odd"),
    ],
)
def test_replica_that_fails_is_reported_with_the_reason(results, reason):
    ray = FakeRay()
    for name, value in results.items():
        ray.results[name].set(value)
    with connected(Launcher(ray)) as server:
        server.receive()
        server.send(ORDER)
        messages = [server.receive()]
        while not isinstance(messages[-1], ReplicaEnded):
            messages.append(server.receive())
        assert messages[-1] == ReplicaEnded(ORDER.id, reason)


def test_next_server_gets_all_replicas():
    ray = FakeRay()
    launcher = Launcher(ray)
    with connected(launcher) as server:
        server.receive()
        server.send(ORDER)
        ray.results["machine"].set("10.0.0.2")
        server.receive()
    ray.results["start"].set(NODE)
    while launcher._replicas[ORDER.id].up is None:
        time.sleep(0.001)
    with connected(launcher) as server:
        up = ReplicaUp(ORDER.id, NODE["url"], NODE["key"])
        assert server.receive() == Replicas((RunningReplica(ORDER, "10.0.0.2", up),))
        ray.results["wait"].set(0)
        assert server.receive() == ReplicaEnded(ORDER.id, "ended with exit status 0")


def test_replica_that_waits_for_a_machine_can_be_ended():
    ray = FakeRay()
    with connected(Launcher(ray)) as server:
        server.receive()
        server.send(ORDER)
        server.send(StopReplica(ORDER.id))
        assert isinstance(server.receive(), ReplicaEnded)
        assert ray.was_killed.is_set()


def test_node_has_ended_before_ray_gives_its_place_to_another():
    ray = FakeRay()
    with connected(Launcher(ray)) as server:
        server.receive()
        server.send(ORDER)
        ray.results["machine"].set("10.0.0.2")
        ray.results["start"].set(NODE)
        server.receive()
        server.receive()
        server.send(StopReplica(ORDER.id))
        assert not ray.was_killed.wait(0.05)
        ray.results["stop"].set(None)
        assert isinstance(server.receive(), ReplicaEnded)


def test_ray_reserves_what_a_replica_takes():
    options = actor_options(ORDER)
    reserved = {name: options[name] for name in ("num_cpus", "num_gpus", "memory", "max_restarts")}
    assert reserved == {"num_cpus": 2.0, "num_gpus": 1.0, "memory": 1024, "max_restarts": 0}


# The process ---------------------------------------------------------------------------------------

PROGRAM = """
import socket, sys
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen()
server, _ = listener.accept()
server.sendall(sys.argv[2].encode())
server.recv(1)
"""


async def receive_address(path):
    """Return the address that the program sends, and let it end. Skips one that is already ending."""
    with trio.fail_after(20):
        while True:
            try:
                async with await trio.open_unix_socket(path) as stream:
                    if address := await stream.receive_some(100):
                        return address
            except (OSError, trio.BrokenResourceError):
                await trio.sleep(0.01)


async def test_launcher_is_started_again_when_it_ends(tmp_path):
    command = (sys.executable, "-c", PROGRAM)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(
            partial(keep_launcher, ClusterConfig(ray="10.0.0.1:6379"), str(tmp_path), command=command)
        )
        for _ in range(2):
            assert await receive_address(str(tmp_path / SOCKET)) == b"10.0.0.1:6379"
        nursery.cancel_scope.cancel()


async def test_launcher_ends_with_its_owner(tmp_path):
    program = "import os, sys; open(sys.argv[1], 'w').write(str(os.getpid())); sys.stdin.read()"
    path = tmp_path / SOCKET
    async with trio.open_nursery() as nursery:
        command = (sys.executable, "-c", program)
        nursery.start_soon(partial(keep_launcher, ClusterConfig(), str(tmp_path), command=command))
        with trio.fail_after(20):
            while not path.exists() or not path.read_text():  # noqa: ASYNC110  of another process
                await trio.sleep(0.01)
        nursery.cancel_scope.cancel()
    with pytest.raises(ProcessLookupError):
        os.kill(int(path.read_text()), 0)


# Ray's client, with one raylet that is dead when the first process checks it for the second time.
RAY = """
import os, pathlib, time
pause, starts = time.sleep, pathlib.Path(os.environ["STARTS"])
time.sleep = lambda _seconds: pause(0.01)
checks = 0

class exceptions:
    class RayError(Exception):
        pass

def init(*_options, **_named):
    with starts.open("a") as file:
        file.write("start\\n")

def get_runtime_context():
    return type("Context", (), {"get_node_id": lambda self: "ours"})()

def nodes():
    global checks
    checks += 1
    is_alive = checks == 1 or starts.read_text().count("start") > 1
    return [{"NodeID": "ours", "Alive": is_alive}, {"NodeID": "another", "Alive": True}]
"""


async def test_launcher_connects_again_when_the_raylet_of_its_machine_has_died(tmp_path, monkeypatch, capsys):
    (tmp_path / "ray.py").write_text(RAY)
    starts = tmp_path / "starts"
    monkeypatch.setenv("STARTS", str(starts))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(keep_launcher, ClusterConfig(ray="10.0.0.1:6379"), str(tmp_path))
        with trio.fail_after(30):
            while not starts.exists() or len(starts.read_text().split()) < 2:  # noqa: ASYNC110  of a process
                await trio.sleep(0.01)
            async with await _connected(str(tmp_path / SOCKET)) as stream:  # the second stays connected
                with trio.move_on_after(0.2):
                    assert await _message(stream) == Replicas()
                    await stream.receive_some()
                    raise AssertionError("the second launcher has ended")
        nursery.cancel_scope.cancel()
    assert "exit status 1: the raylet of this machine has ended" in capsys.readouterr().out


async def _connected(path):
    while True:
        try:
            return await trio.open_unix_socket(path)
        except OSError:
            await trio.sleep(0.01)


async def _message(stream):
    splitter, frames = FrameSplitter(), []
    while not frames:
        frames += splitter.feed(await stream.receive_some(1 << 16))
    return from_launcher_decoder.decode(frames[0])


class FakeCluster:
    """A cluster whose head gives these lists of raylets, one for each question; an error is raised."""

    def __init__(self, *answers):
        self.answers = list(answers)

    def get_runtime_context(self):
        return SimpleNamespace(get_node_id=lambda: "ours")

    def nodes(self):
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return [{"NodeID": name, "Alive": is_alive} for name, is_alive in answer.items()]


@pytest.mark.parametrize(
    "last", [{"ours": False, "another": True}, {"another": True}, {}], ids=["dead", "forgotten", "alone"]
)
def test_raylet_is_dead_when_the_head_says_so_or_does_not_know_it(last):
    cluster = FakeCluster(
        {"ours": True}, {"another": False, "ours": True}, RuntimeError("no answer"), {"ours": True}, last
    )
    wait_for_raylet_death(cluster, check_s=0)
    assert cluster.answers == []


# The actor -----------------------------------------------------------------------------------------

READY = """
import json, os, sys
settings = json.load(open(sys.argv[1]))
(key,) = settings["apiKeys"]
assert key["trusted"], "the server names the tenant of each job"
url = f"http://{settings['host']}:{key['key']}"
print("warming up")
print(json.dumps({"event": "ready", "url": url}), flush=True)
sys.stdin.read()
"""
FAILING = """
import json
print(json.dumps({"event": "cannot serve", "reason": "there is no folder /models/qwen"}))
"""


@pytest.fixture
def actor(monkeypatch):
    ray = SimpleNamespace(util=SimpleNamespace(get_node_ip_address=lambda: "10.0.0.2"))
    monkeypatch.setitem(sys.modules, "ray", ray)

    made = []

    def make(program):
        monkeypatch.setattr(replica_actor, "COMMAND", (sys.executable, "-c", program))
        made.append(ReplicaActor(json.dumps({"models": {}}).encode()))
        return made[-1]

    yield make
    for replica in made:
        replica._node.stdin.close()
        replica.wait()
        while not replica._node.stdout.closed:  # by the thread that reads it
            time.sleep(0.001)


def test_actor_gives_its_node_an_address_and_a_key_of_its_own(actor):
    replica = actor(READY)
    assert replica.machine() == "10.0.0.2"
    started = replica.start()
    assert started["url"] == f"http://10.0.0.2:{started['key']}"
    assert len(started["key"]) >= 32
    replica.stop()
    assert replica.wait() == -15


def test_node_ends_with_its_actor(actor):
    replica = actor(READY)
    replica.start()
    replica._node.stdin.close()  # as the end of the process does
    assert replica.wait() == 0


def test_actor_returns_why_its_node_did_not_start(actor):
    assert actor(FAILING).start() == {"reason": "there is no folder /models/qwen"}
    assert actor("import sys; sys.exit('no such file')").start() == {"reason": "no such file"}
