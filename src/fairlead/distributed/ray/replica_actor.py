"""The actor of a replica, which runs in a process of Ray on a machine of the cluster: it owns a node.

The node ends with the actor, because its standard input does. Independent of Trio and of the server.
"""

import json
import os
import secrets
import subprocess
import sys
import tempfile
import threading
from typing import Any

COMMAND = (sys.executable, "-P", "-m", "fairlead", "node", "--lifeline", "--config")
STOP_WAIT_S = 10.0


class ReplicaActor:
    """Runs `fairlead node` with a configuration, to which it adds the address of this machine and a key.

    Ray calls the methods in threads, so that `stop` need not wait for `wait`.
    """

    def __init__(self, config: bytes) -> None:
        import ray

        self._config: dict[str, Any] = json.loads(config)
        self._machine: str = ray.util.get_node_ip_address()
        self._node: subprocess.Popen[str] | None = None
        self._is_stopped = False

    def machine(self) -> str:
        """Return the address of this machine."""
        return self._machine

    def start(self) -> dict[str, str]:
        """Start the node; return its `url` and `key` once it is ready, or the `reason` why it has ended."""
        key = secrets.token_urlsafe(32)
        # Trusted: the server names the tenant of each job, and tenants share no cached prefixes.
        keys = [{"key": key, "trusted": True}]
        settings = self._config | {"host": self._machine, "port": 0, "apiKeys": keys, "logJson": True}
        with tempfile.TemporaryFile() as file:  # without a name, so that nothing is left of it
            file.write(json.dumps(settings).encode())
            file.flush()
            node = self._node = subprocess.Popen(  # noqa: S603  our own program
                [*COMMAND, f"/dev/fd/{file.fileno()}"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                pass_fds=[file.fileno()],
                env={name: text for name, text in os.environ.items() if not name.startswith("FAIRLEAD_")},
            )
        if self._is_stopped:
            node.kill()
        reason = "it printed no reason"
        assert node.stdout is not None
        for line in node.stdout:
            print(line, end="", flush=True)  # noqa: T201  Ray keeps the output of its processes
            event = _event(line)
            if event.get("event") == "ready" and "url" in event:
                threading.Thread(target=self._copy_output, args=(node,), daemon=True).start()
                return {"url": event["url"], "key": key}
            reason = str(event.get("reason", reason)) if event else line.strip() or reason
        node.stdout.close()
        return {"reason": reason}

    def wait(self) -> int:
        """Return the exit status of the node when it has ended."""
        assert self._node is not None
        return self._node.wait()

    def stop(self) -> None:
        """End the node, and return when it has ended: its GPU is free then."""
        self._is_stopped = True
        if self._node is None:
            return
        self._node.terminate()
        try:
            self._node.wait(STOP_WAIT_S)
        except subprocess.TimeoutExpired:
            self._node.kill()
            self._node.wait()

    def _copy_output(self, node: "subprocess.Popen[str]") -> None:
        assert node.stdout is not None
        with node.stdout:
            for line in node.stdout:
                print(line, end="", flush=True)  # noqa: T201


def _event(line: str) -> dict[str, Any]:
    """Return the log event in a line; nothing if it is other output."""
    try:
        event = json.loads(line)
    except ValueError:
        return {}
    return event if isinstance(event, dict) else {}
