"""What a replica of a model is: the configuration of its node, and what it takes of its machine."""

import hashlib
from typing import Any

import msgspec

from fairlead.base.config import ModelConfig, NodeConfig, ReplicasConfig
from fairlead.distributed.ray.messages import StartReplica

# When an actor dies, its node ends soon after, so that another can have its GPU. Replicas that are ended on
# purpose have no jobs.
DRAIN_S = 1.0
MIB = 1024 * 1024
# Settings of a model that a replica's node does not have.
_LEFT_OUT = ("kind", "name", "aliases", "replicas", "ttl", "sendLoadingState", "memoryMb")
MODEL_NAME_CHARS = 100


def start_order(model: ModelConfig, replicas: ReplicasConfig, number: int) -> StartReplica:
    """Return the order to start a replica."""
    cpus = float(model.threads or 1) if replicas.cpus is None else replicas.cpus
    ranks = model.parallel if model.device == "cuda" else 0  # each has a GPU of the same machine
    gpus = float(ranks) if replicas.gpus is None else replicas.gpus
    config = node_settings(model, threads=max(1, int(cpus)))
    content = msgspec.json.encode(config)
    resources = (cpus, gpus, replicas.memory_mb)
    return StartReplica(
        id=f"ray:{model.name[:MODEL_NAME_CHARS]}:{number}",
        model=model.name,
        number=number,
        digest=hashlib.sha256(content + repr(resources).encode()).hexdigest(),
        config=content,
        cpus=cpus,
        gpus=gpus,
        memory_bytes=(replicas.memory_mb or 0) * MIB,
    )


def node_settings(model: ModelConfig, *, threads: int) -> dict[str, Any]:
    """Return the configuration of a replica's node, as in a file."""
    settings: dict[str, Any] = msgspec.to_builtins(model, enc_hook=str)
    kept = {name: value for name, value in settings.items() if name not in _LEFT_OUT and value is not None}
    kept |= {"preload": True, "threads": model.threads or threads}
    return {"models": {model.name: kept}, "limits": {"drain": DRAIN_S}}


def node_config(order: StartReplica, url: str, key: str) -> NodeConfig:
    """Return a replica as a node of the fleet."""
    return NodeConfig(
        id=order.id, url=url, api_key=key, models=(order.model,), model_names={order.model: order.model}
    )
