"""The processes of a soak: the server under test and two remote nodes, and the faults injected into them.

Models: `steady` (engine, always loaded, without faults), `victim` (engine, the same weights), `vectors`
(engine, embeddings), `talker` (a command) and `far` (two remote nodes). Only one of `victim`, `vectors` and
`talker` is loaded at a time, so requests for the others cause swaps.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import trio

from fairlead.base.config import demonstration_model
from soaking.exchange import Client
from soaking.vectors import save_vectors

BENCH = Path(__file__).resolve().parents[1]
REMOTE_SERVER = Path(__file__).with_name("remote_server.py")
START_S = 120.0
STOP_S = 60.0
# For this time after a fault, a model's requests may fail: the watchdog waits, and a child loads again.
HARM_S = 45.0

SWAPPING = ("victim", "talker", "vectors")
TENANTS = ("ana", "bob", "greedy", "portal", "canary", "admin", "slow", "hostile")


class Deployment:
    """The server under test. `steady_pid` is the child that must live as long as the server."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "log.jsonl"
        self.address = ("127.0.0.1", 0)
        self.tasks = 0
        self.blocks = 0
        self.heap = 0
        self.steady_pid = 0
        self.began_s = time.monotonic()
        self.events: list[tuple[float, str]] = []
        self._config = folder / "soak.yaml"
        self._harmed: dict[str, float] = {}
        self._far: dict[str, subprocess.Popen[bytes]] = {}
        self._far_ports = {name: _free_port() for name in ("a", "b")}
        self._talker_port = _free_port()
        self._is_changed = False
        self._server: subprocess.Popen[bytes] | None = None
        self._reports = -1

    @property
    def pid(self) -> int:
        """The process id of the server."""
        assert self._server is not None
        return self._server.pid

    def client(self, tenant: str, *, pause_s: float = 0.0) -> Client:
        """Return a client with the tenant's key."""
        return Client(self.address, f"sk-{tenant}", pause_s=pause_s)

    def harm(self, event: str, *models: str) -> None:
        """Record a fault, after which requests for these models may fail for some time."""
        self.events.append((time.monotonic(), event))
        for model in models:
            self._harmed[model] = time.monotonic()

    def is_harmed(self, model: str, since_s: float) -> bool:
        """Whether the model had a fault after `since_s`, or shortly before."""
        harmed_s = self._harmed.get(model)
        return harmed_s is not None and harmed_s > since_s - HARM_S

    # Starting and stopping ------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start all processes; return when the server is ready."""
        save_vectors(self.folder / "vectors")
        for name in self._far_ports:
            self.start_remote_node(name)
        self._write_config()
        self._reports, theirs = os.pipe()
        os.set_blocking(self._reports, False)
        with self.log.open("wb") as log:
            self._server = subprocess.Popen(  # noqa: ASYNC220  # stop() waits for it without Trio
                [sys.executable, "-m", "soaking.driver", str(self._config), str(theirs)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[theirs],
                env=os.environ | {"PYTHONPATH": os.pathsep.join([str(BENCH), *sys.path])},
            )
        os.close(theirs)
        with trio.fail_after(START_S):
            while not self.address[1]:
                await trio.sleep(0.05)
                self.read_reports()
                if self._server.poll() is not None:
                    raise RuntimeError(f"the server ended:\n{self.log.read_text()[-3000:]}")
        (self.steady_pid,) = self.engine_children()

    def stop(self) -> int:
        """Stop the server with SIGTERM; return its exit code."""
        assert self._server is not None
        self._server.send_signal(signal.SIGTERM)
        try:
            return self._server.wait(STOP_S)
        except subprocess.TimeoutExpired:
            return -1

    def close(self) -> None:
        """End all remaining processes."""
        for process in (self._server, *self._far.values()):
            if process is not None and process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
                process.wait()
        if self._reports >= 0:
            os.close(self._reports)

    def read_reports(self) -> None:
        """Update the counts with the reports of the server's process."""
        with suppress(BlockingIOError):
            for line in os.read(self._reports, 1 << 20).splitlines():
                reports = json.loads(line)
                if url := reports.get("url"):
                    self.address = ("127.0.0.1", int(url.rpartition(":")[2]))
                self.tasks = reports.get("tasks", self.tasks)
                self.blocks = reports.get("blocks", self.blocks)
                self.heap = reports.get("heap", self.heap)

    # Faults ---------------------------------------------------------------------------------------------

    def children(self) -> dict[int, str]:
        """Return the command lines of the server's children, by process id."""
        found = {}
        for status in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):
                if int(status.read_text().rpartition(")")[2].split()[1]) == self.pid:
                    command = (status.parent / "cmdline").read_bytes()
                    found[int(status.parent.name)] = command.replace(b"\0", b" ").decode()
        return found

    def engine_children(self) -> list[int]:
        """Return the process ids of engine models."""
        return [pid for pid, command in self.children().items() if "fairlead.engine.worker.main" in command]

    def signal_victims(self, number: signal.Signals) -> None:
        """Send a signal to every engine child except the steady one."""
        self.harm(f"{number.name} to engine children", "victim", "vectors")
        for pid in self.engine_children():
            if pid != self.steady_pid:
                _send(pid, number)

    def signal_talker(self, number: signal.Signals) -> None:
        """Send a signal to the command's process."""
        self.harm(f"{number.name} to the command", "talker")
        for pid, command in self.children().items():
            if REMOTE_SERVER.name in command:
                _send(pid, number)

    def start_remote_node(self, name: str) -> None:
        """Start a remote node, or start it again."""
        command = [sys.executable, "-IS", str(REMOTE_SERVER), str(self._far_ports[name])]
        self._far[name] = subprocess.Popen(command, stdin=subprocess.DEVNULL)

    def kill_remote_node(self, name: str) -> None:
        """Kill a remote node."""
        self.harm(f"SIGKILL to node {name}", "far")
        self._far[name].kill()
        self._far[name].wait()

    def pause_remote_node(self, name: str, *, paused: bool) -> None:
        """Pause or continue a remote node."""
        self.harm(f"{'SIGSTOP' if paused else 'SIGCONT'} to node {name}", "far")
        self._far[name].send_signal(signal.SIGSTOP if paused else signal.SIGCONT)

    def reload(self, *, broken: bool = False) -> None:
        """Reload the configuration: with another number of slots, or `broken`."""
        self._is_changed ^= not broken
        self._write_config(broken=broken)
        self.harm("broken reload" if broken else "reload", *(() if broken else ("victim",)))
        _send(self.pid, signal.SIGHUP)

    def _write_config(self, *, broken: bool = False) -> None:
        engine: dict[str, Any] = {"path": str(demonstration_model()), "threads": 1, "watchdog": "10s"}
        settings: dict[str, Any] = {
            "port": 0,
            "startPort": self._talker_port,
            "apiKeys": [
                {
                    "key": f"sk-{name}",
                    "user": name,
                    "trusted": name == "portal",
                    "role": "admin" if name == "admin" else "user",
                }
                for name in TENANTS
            ],
            "queue": {"capacity": 60, "timeout": "30s"},
            "limits": {"stall": "5s", "bodyTimeout": "5s", "headerTimeout": "5s", "idleTimeout": "20s"},
            "healthCheck": {"interval": "2s", "timeout": "2s"},
            "groups": {
                "stays": {"members": ["steady"], "swap": False, "exclusive": False, "persistent": True},
                "swaps": {"members": list(SWAPPING), "exclusive": False},
            },
            "models": {
                "steady": engine | {"preload": True, "slots": 6},
                "victim": engine | {"slots": 3 if self._is_changed else 4},
                "vectors": engine | {"path": str(self.folder / "vectors"), "slots": 4},
                "talker": {
                    "cmd": f"{sys.executable} -IS {REMOTE_SERVER} ${{PORT}}",
                    "concurrencyLimit": 4,
                    "unloadTimeout": "2s",
                },
            },
            "nodes": [
                {
                    "id": name,
                    "url": f"http://127.0.0.1:{port}",
                    "seats": 3,
                    "models": ["far"],
                    "timeouts": {"responseHeader": "8s", "betweenBytes": "8s"},
                }
                for name, port in self._far_ports.items()
            ],
        }
        if broken:
            settings["queue"]["capacity"] = "many"
        if self._is_changed:
            settings["apiKeys"].append("sk-visitor")
        draft = self._config.with_suffix(".draft")
        draft.touch(0o600)
        draft.write_text(json.dumps(settings))
        draft.replace(self._config)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port: int = taken.getsockname()[1]
        return port


def _send(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)
