"""The messages between the server and the launcher, the process that speaks to Ray."""

import msgspec


class StartReplica(msgspec.Struct, frozen=True, tag="start"):
    """Start a replica: `fairlead node` on a machine with room for it.

    id: unique.
    model: the model that it serves.
    number: which of the model's replicas it is.
    digest: the same for replicas with equal settings.
    config: the content of its configuration file.
    cpus: how many processors it takes.
    gpus: how many GPUs it takes.
    memory_bytes: how much memory it takes.
    """

    id: str
    model: str
    number: int
    digest: str
    config: bytes
    cpus: float
    gpus: float
    memory_bytes: int = 0


class StopReplica(msgspec.Struct, frozen=True, tag="stop"):
    """End a replica, which has no jobs any more, or is not wanted while it starts."""

    id: str


class ReplicaPlaced(msgspec.Struct, frozen=True, tag="placed"):
    """Ray has found a machine for a replica, at this address."""

    id: str
    machine: str


class ReplicaUp(msgspec.Struct, frozen=True, tag="up"):
    """A replica has loaded its model; it takes requests at the `url` with the `key`."""

    id: str
    url: str
    key: str


class ReplicaEnded(msgspec.Struct, frozen=True, tag="ended"):
    """A replica has ended, or could not be started."""

    id: str
    reason: str


class RunningReplica(msgspec.Struct, frozen=True):
    """A replica that exists when a server connects to the launcher."""

    start: StartReplica
    machine: str | None = None
    up: ReplicaUp | None = None


class Replicas(msgspec.Struct, frozen=True, tag="replicas"):
    """The launcher's first message: all its replicas."""

    replicas: tuple[RunningReplica, ...] = ()


ToLauncher = StartReplica | StopReplica
FromLauncher = Replicas | ReplicaPlaced | ReplicaUp | ReplicaEnded

to_launcher_decoder = msgspec.msgpack.Decoder(ToLauncher)
from_launcher_decoder = msgspec.msgpack.Decoder(FromLauncher)
