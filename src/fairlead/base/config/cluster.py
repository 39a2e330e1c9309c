"""Settings of a Ray cluster on which models run, and of the replicas of a model there."""

import re
from collections.abc import Iterator
from typing import Annotated

import msgspec
from msgspec import Meta

from fairlead.base.config.spelling import AtLeastOne, AtLeastZero, Fault, Seconds, spelled

Amount = Annotated[float, Meta(ge=0)]
_ADDRESS = re.compile(r"auto|[0-9A-Za-z._-]+:[0-9]{1,5}|\[[0-9A-Fa-f:.]+\]:[0-9]{1,5}")


class ClusterConfig(msgspec.Struct, frozen=True, rename=spelled):
    """A Ray cluster, on which the replicas of models run. Needs the extra ray."""

    ray: str = "auto"
    """The address of the cluster's head, HOST:PORT; auto: of the cluster that this machine belongs to. This
    machine must belong to it."""
    target_wait_s: Seconds = 5.0
    """The estimated wait of a new job above which a model gets another replica."""
    scale_up_after_s: Seconds = 10.0
    """For how long the estimated wait must be above the target before each further replica."""
    scale_down_after_s: Seconds = 300.0
    """For how long a replica must have been unnecessary before it is drained."""

    def contradictions(self) -> Iterator[Fault]:
        """Yield a fault of an address that cannot be used."""
        if _ADDRESS.fullmatch(self.ray) is None:
            yield Fault(("ray",), "must be HOST:PORT, the address of the cluster's head, or auto")


class ReplicasConfig(msgspec.Struct, frozen=True, rename=spelled):
    """How many replicas of a model run on the cluster, and what each of them takes of its machine."""

    min: AtLeastZero = 1
    """Minimum number; with 0, the first job starts one."""
    max: AtLeastOne | None = None
    """Maximum number. Default: min, or 1."""
    cpus: Amount | None = None
    """CPUs that Ray reserves for each. Default: threads of the model, or 1."""
    gpus: Amount | None = None
    """GPUs that Ray reserves for each. Default: those of the model (`parallel`) with device: cuda, else 0."""
    memory_mb: AtLeastOne | None = None
    """Memory in MiB, not of a GPU, that Ray reserves for each. Default: none."""

    @property
    def most(self) -> int:
        """The maximum number."""
        return max(self.min, 1) if self.max is None else self.max

    def contradictions(self) -> Iterator[Fault]:
        """Yield a fault of a maximum below the minimum."""
        if self.max is not None and self.max < self.min:
            yield Fault(("max",), f"must be at least min, which is {self.min}")
