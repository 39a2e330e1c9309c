"""Makes the lease that a configuration names."""

from collections.abc import Mapping

from fairlead.base.config import LeaseConfig
from fairlead.base.config.lease import cluster_access
from fairlead.distributed.lease import kubernetes, redis
from fairlead.distributed.lease.lease import Lease, LocalLease, StoredLease


def make_lease(config: LeaseConfig | None, environment: Mapping[str, str], *, epoch: int = 1) -> Lease:
    """Return the lease of the configuration. Raises `ConfigError`.

    In a pod, `environment` has the address of the Kubernetes API. Without a configured lease, `epoch` is that
    of the only term.
    """
    if config is None:
        return LocalLease(epoch)
    if config.redis is not None:
        redis.require_coredis()
        url = config.redis
        return StoredLease(
            lambda: redis.connect(url, config.redis_key),
            duration_s=config.duration_s,
            least_epoch=redis.least_epoch,
        )
    name = config.kubernetes
    assert name is not None, "LeaseConfig allows no other kind"
    access = cluster_access(environment)
    return StoredLease(
        lambda: kubernetes.connect(access, name),
        duration_s=config.duration_s,
        least_epoch=kubernetes.least_epoch,
    )
