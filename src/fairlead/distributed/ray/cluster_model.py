"""A model on the cluster: its settings, its replicas, and what is known of these."""

import trio

from fairlead.base.config import ClusterConfig, ModelConfig, ReplicasConfig
from fairlead.distributed.ray.messages import StartReplica
from fairlead.distributed.ray.orders import start_order
from fairlead.distributed.ray.replica_set import ReplicaSet, ScalingRules

# A replica that Ray has not placed for so long waits for room.
PLACED_WITHIN_S = 10.0


class ClusterModel:
    """The settings of a model, and its replicas that have them. `scaling` decides how many there are."""

    def __init__(self, config: ModelConfig, replicas: ReplicasConfig, scaling: ReplicaSet) -> None:
        self.config = config
        self.replicas = replicas
        self.scaling = scaling
        self.digest = start_order(config, replicas, 0).digest
        self.entries: dict[int, ReplicaEntry] = {}
        self.problem: str | None = None

    def order(self, number: int) -> StartReplica:
        """Return the order to start a replica."""
        return start_order(self.config, self.replicas, number)

    def add(self, order: StartReplica) -> "ReplicaEntry":
        """Add a replica that this order has started."""
        entry = self.entries[order.number] = ReplicaEntry(order, self)
        return entry

    def waiting_for_room(self) -> str | None:
        """Return why replicas do not start, if no machine of the cluster has room for them."""
        waiting = [
            entry
            for number, entry in self.entries.items()
            if entry.machine is None
            and trio.current_time() - entry.began_at >= PLACED_WITHIN_S
            and self.scaling.state(number) == "starting"
        ]
        if not waiting:
            return None
        needs = waiting[0].order
        return f"{len(waiting)} replicas wait for a machine with {needs.cpus:g} CPUs and {needs.gpus:g} GPUs"


class ReplicaEntry:
    """A replica of a model: the order that started it, its machine, and since when it does not answer."""

    def __init__(self, order: StartReplica, model: ClusterModel) -> None:
        self.order = order
        self.model = model
        self.machine: str | None = None
        self.began_at = trio.current_time()
        self.silent_since: float | None = None

    @property
    def number(self) -> int:
        """Its number in the model's state machine."""
        return self.order.number


def rules_of(cluster: ClusterConfig, replicas: ReplicasConfig) -> ScalingRules:
    """Return the rules by which the number of a model's replicas changes."""
    return ScalingRules(
        min=replicas.min,
        max=replicas.most,
        target_wait_s=cluster.target_wait_s,
        up_after_s=cluster.scale_up_after_s,
        down_after_s=cluster.scale_down_after_s,
    )
