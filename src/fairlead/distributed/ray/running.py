"""The cluster of a server that is one process, which owns the launcher too."""

import trio

from fairlead.base.config import ClusterConfig
from fairlead.base.supervision import keep_running
from fairlead.distributed.ray.controller import ClusterController
from fairlead.distributed.ray.launcher_process import keep_launcher
from fairlead.nodes.processes.socket_folder import socket_folder
from fairlead.router.dispatch.dispatcher import Dispatcher
from fairlead.router.fleet.fleet import Fleet


async def run_cluster(cluster: ClusterConfig, fleet: Fleet, dispatcher: Dispatcher) -> None:
    """Keep the replicas, with a launcher of this process, until cancelled. Waits until the fleet runs."""
    await fleet.has_adopted.wait()
    with socket_folder() as directory:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(keep_running, "cluster launcher", keep_launcher, cluster, directory)
            await ClusterController(cluster, fleet, dispatcher, directory).run()
