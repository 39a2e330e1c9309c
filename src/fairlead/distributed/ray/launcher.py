"""The program that speaks to Ray: `python -m fairlead.distributed.ray.launcher SOCKET ADDRESS`.

A process of its own, without Trio: Ray's client starts threads, takes over signals, and ends its process when
the cluster does not answer any more. Replicas belong to this process: when it ends, Ray ends their actors,
and these their nodes. It ends with its standard input, which its owner holds open, and with the raylet of its
machine; its owner then starts it again.

A server connects to the socket, gets all replicas, and may order others. One server is connected at a time.
"""

import os
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from typing import Any

import msgspec

from fairlead.base.frames import FrameSocket, PeerGone
from fairlead.distributed.ray.messages import (
    FromLauncher,
    ReplicaEnded,
    ReplicaPlaced,
    Replicas,
    ReplicaUp,
    RunningReplica,
    StartReplica,
    StopReplica,
    ToLauncher,
    to_launcher_decoder,
)
from fairlead.distributed.ray.replica_actor import ReplicaActor

END_WAIT_S = 5.0
STOP_WAIT_S = 15.0
RAYLET_CHECK_S = 2.0


class Launcher:
    """All replicas, and the connection to the server. Each replica has a thread, which waits for Ray."""

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        self._lock = threading.Lock()
        self._replicas: dict[str, RunningReplica] = {}
        self._actors: dict[str, Any] = {}
        self._server: FrameSocket[ToLauncher] | None = None

    def serve(self, server: socket.socket) -> None:
        """Exchange messages with a server until it is gone; it may connect again."""
        connection = FrameSocket(server, to_launcher_decoder)
        with self._lock:
            self._server = connection
            self._send(Replicas(tuple(self._replicas.values())))
        with suppress(PeerGone):
            while True:
                match connection.receive():
                    case StartReplica() as order:
                        self._start(order)
                    case StopReplica(replica):
                        threading.Thread(target=self._stop, args=(replica,), daemon=True).start()

    def disconnected(self) -> None:
        """Keep what happens for the next server."""
        with self._lock:
            self._server = None

    # Replicas ----------------------------------------------------------------------------------------

    def _start(self, order: StartReplica) -> None:
        with self._lock:
            self._replicas[order.id] = RunningReplica(order)
        threading.Thread(target=self._run, args=(order,), daemon=True).start()

    def _run(self, order: StartReplica) -> None:
        reason = "was ended"
        try:
            actor = self._ray.remote(ReplicaActor).options(**actor_options(order)).remote(order.config)
            with self._lock:
                is_wanted = order.id in self._replicas
                self._actors[order.id] = actor
            if is_wanted:
                reason = self._follow(order.id, actor)
        except self._ray.exceptions.RayError as error:
            reason = _reason(error)
        except Exception as error:  # noqa: BLE001  what Ray raises is not documented
            reason = f"{type(error).__name__}: {_reason(error)}"
        finally:
            self._kill(order.id)
            with self._lock:
                self._replicas.pop(order.id, None)
                self._actors.pop(order.id, None)
                self._send(ReplicaEnded(order.id, reason))

    def _follow(self, replica: str, actor: Any) -> str:
        """Report what a replica does until it ends; return the reason."""
        get = self._ray.get
        machine = get(actor.machine.remote())
        self._note(replica, ReplicaPlaced(replica, machine), machine=machine)
        started = get(actor.start.remote())
        if "reason" in started:
            return f"did not start: {started['reason']}"
        up = ReplicaUp(replica, started["url"], started["key"])
        self._note(replica, up, up=up)
        return f"ended with exit status {get(actor.wait.remote())}"

    def _note(self, replica: str, message: FromLauncher, **changes: Any) -> None:
        with self._lock:
            self._replicas[replica] = msgspec.structs.replace(self._replicas[replica], **changes)
            self._send(message)

    def _stop(self, replica: str) -> None:
        """End a replica: its node first, so that its memory is free before Ray gives it to another."""
        with self._lock:
            actor, known = self._actors.get(replica), self._replicas.get(replica)
            if actor is None:  # not made yet: `_run` will see that it is not wanted
                self._replicas.pop(replica, None)
        if actor is None or known is None:
            return
        try:
            if known.machine is not None:
                self._ray.get(actor.stop.remote(), timeout=STOP_WAIT_S)
        except self._ray.exceptions.RayError:
            """It has ended already, or does not answer."""
        self._kill(replica)

    def _kill(self, replica: str) -> None:
        actor = self._actors.get(replica)
        if actor is not None:
            self._ray.kill(actor)

    def _send(self, message: FromLauncher) -> None:
        """Send a message; the lock is held. A server that does not read is disconnected."""
        if self._server is None:
            return
        try:
            self._server.send(message)
        except PeerGone:
            self._server.close()
            self._server = None


def actor_options(order: StartReplica) -> dict[str, Any]:
    """Return the options of the actor: what Ray reserves for it, and that it dies with this process.

    All ranks of a model are on one machine, so the actor alone reserves what they need together. A model on
    several machines would need a placement group here, in `scheduling_strategy`.
    """
    return {
        "num_cpus": order.cpus,
        "num_gpus": order.gpus,
        "memory": order.memory_bytes or None,
        "max_restarts": 0,  # the server decides what replaces it
        "max_concurrency": 3,
        "scheduling_strategy": "SPREAD",
    }


def _reason(error: BaseException) -> str:
    """Return the first line of an error's message."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _end_with_standard_input(ray: Any) -> None:
    def wait() -> None:
        while os.read(sys.stdin.fileno(), 4096):
            pass
        # The end of this process is what ends the actors; disconnecting only makes it sooner.
        threading.Timer(END_WAIT_S, os._exit, [0]).start()
        ray.shutdown()
        os._exit(0)

    threading.Thread(target=wait, daemon=True).start()


def wait_for_raylet_death(ray: Any, check_s: float = RAYLET_CHECK_S) -> None:
    """Return when the raylet that this process has connected to is dead, as the cluster's head sees it.

    The head then ends the job of this process, and its actors on all machines. Ray's client does not report
    that: it accepts further actors, which never start. Only another connection is another job.
    """
    connected_to = ray.get_runtime_context().get_node_id()
    is_alive = True
    while is_alive:
        time.sleep(check_s)
        try:
            is_alive = any(node["NodeID"] == connected_to and node["Alive"] for node in ray.nodes())
        except Exception:  # noqa: BLE001, S112  what Ray raises is not documented
            continue  # the head does not answer. If that lasts, Ray's client ends this process.


def _end_with_raylet(ray: Any) -> None:
    def wait() -> None:
        wait_for_raylet_death(ray)
        print("the raylet of this machine has ended", file=sys.stderr, flush=True)  # noqa: T201  the reason
        os._exit(1)  # without `ray.shutdown`, which needs the raylet

    threading.Thread(target=wait, daemon=True).start()


def main() -> None:
    """Connect to the cluster, and serve one server after the other."""
    path, address = sys.argv[1:]
    # Ctrl-C at a terminal is sent to all processes: only the owner decides what follows.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    _end_with_standard_input(ray)
    ray.init(address, log_to_driver=False, logging_level="error", namespace="fairlead")
    _end_with_raylet(ray)
    launcher = Launcher(ray)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        while True:
            server, _ = listener.accept()
            with server:
                launcher.serve(server)
                launcher.disconnected()


if __name__ == "__main__":
    main()
