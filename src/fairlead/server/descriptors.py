"""How many file descriptors this process may have, and how many of them clients may take.

A server that is out of descriptors cannot load a model or start a child again. So the soft limit, which is
1024 on most systems, is raised as far as the hard limit allows, and connections are kept below it with a
reserve for everything else.
"""

import os
import resource
import sys
from collections.abc import Iterator
from typing import NamedTuple

import msgspec
import structlog

from fairlead.base.config import MOST_UPLOADS, Config, Limits
from fairlead.nodes.http.idle_connections import MAX_IDLE
from fairlead.nodes.remote_node import SPARE_CONNECTIONS
from fairlead.server.listener.listener import REFUSALS

# Linux's default bound (`fs.nr_open`). Hard limits may be a thousand times as high, and are inherited by
# children, some of which close every possible descriptor.
MOST = 1 << 20
# `OPEN_MAX` of macOS, which accepts larger numbers but does not honor them.
MOST_ON_MACOS = 10240

# A client's socket, and a job's connection to a node.
PER_CONNECTION = 2
# A child has six: two sockets, their folder's lock, two pipes, and a handle of the process. Starting one
# takes as many again.
PER_MODEL = 12
# Probes, and the idle connections that are kept. A command's server counts as a model and as a node.
PER_NODE = SPARE_CONNECTIONS + MAX_IDLE
# Logs, configuration and model files, memory measurements, and the sockets of a hub's library.
FOR_THE_REST = 64

logger = structlog.get_logger("fairlead.server.descriptors")


class Share(NamedTuple):
    """The `connections` that clients may have at a time, given `descriptors`, some of them `reserved`."""

    connections: int
    descriptors: int
    reserved: int


def raise_limit() -> None:
    """Raise the soft limit of descriptors to the hard limit. A refusal by the system is only logged."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for requested in _candidates(hard):
        if _finite(soft) >= requested:
            return
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (requested, hard))
        except (OSError, ValueError) as error:
            logger.warning(
                "descriptor limit not raised", soft=soft, hard=hard, requested=requested, reason=str(error)
            )
        else:
            return


def share_of_clients(config: Config) -> Share:
    """Return how many connections fit this process's descriptors, `limits.connections` at most."""
    descriptors = _finite(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    return share(config, descriptors=descriptors, in_use=_in_use())


def limits_within_descriptors(config: Config) -> Limits:
    """Return the limits, with connections reduced to what the descriptors allow."""
    share = share_of_clients(config)
    if share.connections < config.limits.connections:
        logger.warning(
            "fewer connections than configured: the limit of open files is low",
            configured=config.limits.connections,
            connections=share.connections,
            descriptors=share.descriptors,
            reserved=share.reserved,
        )
    return msgspec.structs.replace(config.limits, connections=share.connections)


def share(config: Config, *, descriptors: int, in_use: int) -> Share:
    """Return the share for a limit of `descriptors`, of which `in_use` are open at the start. Pure."""
    local = config.local_models
    servers = sum(model.is_relayed for model in local) + len(config.nodes)
    servers += sum(replicas.most for _, replicas in config.cluster_models.values())
    needed = in_use + FOR_THE_REST + REFUSALS + MOST_UPLOADS
    needed += PER_MODEL * len(local) + PER_NODE * servers
    reserved = min(needed, descriptors // 2)  # where the limit is very low, clients have half of it
    fit = max(1, (descriptors - reserved) // PER_CONNECTION)
    return Share(min(config.limits.connections, fit), descriptors, reserved)


def _candidates(hard: int) -> Iterator[int]:
    most = MOST_ON_MACOS if sys.platform == "darwin" else MOST
    yield min(most, _finite(hard))
    yield min(MOST_ON_MACOS, _finite(hard))  # for a kernel with a lower bound


def _finite(limit: int) -> int:
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit


def _in_use() -> int:
    """Return how many descriptors are open now; 0 if the system does not say."""
    try:
        return len(os.listdir("/dev/fd"))  # noqa: PTH208  # it is not a directory of files
    except OSError:
        return 0
