"""Keeps the launcher running: the process that speaks to Ray, and that owns the replicas.

Its owner is the process that people start, so that replicas outlive a dispatcher which dies.
"""

import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import structlog
import trio

from fairlead.base.config import ClusterConfig, Config, ConfigError, Fault
from fairlead.nodes.processes.child import Child
from fairlead.router.fleet.instance import Restarts

SOCKET = "cluster.sock"
COMMAND = (sys.executable, "-P", "-m", "fairlead.distributed.ray.launcher")
END_WAIT_S = 8.0
LINES_KEPT = 5

logger = structlog.get_logger("fairlead.distributed.ray")


def refuse_without_ray(config: Config) -> None:
    """Raise `ConfigError` if the configuration has a cluster and Ray is not installed."""
    if config.cluster is not None and find_spec("ray") is None:
        fault = Fault(("cluster",), "needs the extra ray: pip install 'fairlead[ray]'")
        raise ConfigError(str(fault), [fault])


async def keep_launcher(config: ClusterConfig, directory: str, command: Sequence[str] = COMMAND) -> None:
    """Run the launcher until cancelled; start it again after a pause when it ends. It ends with this task.

    It listens at `SOCKET` in the directory once it is connected to the cluster.
    """
    restarts = Restarts()
    path = Path(directory) / SOCKET
    while True:
        began_at = trio.current_time()
        path.unlink(missing_ok=True)
        reason = await _run_launcher([*command, str(path), config.ray])
        logger.error("cluster launcher ended", cluster=config.ray, reason=reason)
        restarts.ran(trio.current_time() - began_at)
        await trio.sleep(restarts.next_backoff_s())


async def _run_launcher(command: Sequence[str]) -> str:
    """Run it to its end; return why it has ended."""
    try:
        child = await Child.start(
            command,
            stdin=subprocess.PIPE,  # it ends when this does
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
    except OSError as error:
        return str(error)
    printed: deque[str] = deque(maxlen=LINES_KEPT)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(child.read_output, printed.append)
        try:
            await child.wait()
        finally:
            await child.end(grace_s=END_WAIT_S, request=child.close_input)
    last = [line.strip() for line in printed if line.strip()][-1:]
    return ": ".join([child.ending or "", *last])
