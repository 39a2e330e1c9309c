"""Settings of the lease by which one of several dispatchers becomes the leader."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from fairlead.base.config.spelling import ConfigError, Fault, read_time, spelled

_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_FOLDER = "/var/run/secrets/kubernetes.io/serviceaccount"
_DURATION = Meta(ge=1, le=60, extra={"read": read_time, "must": "be a time from 1s to 60s"})


class LeaseConfig(msgspec.Struct, frozen=True, rename=spelled):
    """The lease by which one of several dispatchers becomes the leader: in Redis or in Kubernetes."""

    redis: str | None = None
    """URL of a Redis or Valkey server: redis:// or, with TLS, rediss://USER:PASSWORD@HOST:PORT/DATABASE.
    Needs the extra redis."""
    redis_key: str = "fairlead:lease"
    """The key in Redis. Dispatchers of different servers need different ones."""
    kubernetes: str | None = None
    """The name of a Lease object in the namespace of the pod."""
    duration_s: Annotated[float, _DURATION] = 3.0
    """How long a leader may be unreachable before another takes its place; 1s to 60s."""

    def contradictions(self) -> Iterator[Fault]:
        """Yield faults of a missing or second kind, and of addresses that cannot be used."""
        if (self.redis is None) == (self.kubernetes is None):
            yield Fault((), "must have either redis or kubernetes")
        if self.redis is not None and not _is_redis_url(self.redis):
            yield Fault(("redis",), "must be a URL such as rediss://:PASSWORD@HOST:PORT/DATABASE")
        if not self.redis_key:
            yield Fault(("redisKey",), "must not be empty")
        if self.kubernetes is not None and _NAME.fullmatch(self.kubernetes) is None:
            yield Fault(("kubernetes",), "must be a name of lower-case letters, digits, - and .")


@dataclass(frozen=True)
class ClusterAccess:
    """Where the API of the cluster is, and the files of the pod's service account.

    url: the API's address.
    token_file: has the token, which Kubernetes replaces from time to time.
    ca_file: has the certificate of the API's authority.
    namespace_file: has the pod's namespace.
    """

    url: str
    token_file: str = f"{_FOLDER}/token"
    ca_file: str = f"{_FOLDER}/ca.crt"
    namespace_file: str = f"{_FOLDER}/namespace"


def cluster_access(environment: Mapping[str, str]) -> ClusterAccess:
    """Return how a pod with this environment reaches the Kubernetes API. Raises `ConfigError`."""
    host = environment.get("KUBERNETES_SERVICE_HOST")
    if not host:
        message = "works in a pod only: the environment variable KUBERNETES_SERVICE_HOST is not set"
        fault = Fault(("lease", "kubernetes"), message)
        raise ConfigError(str(fault), [fault])
    port = environment.get("KUBERNETES_SERVICE_PORT") or "443"
    return ClusterAccess(f"https://{f'[{host}]' if ':' in host else host}:{port}")


def _is_redis_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        return False
    return (
        parts.scheme in ("redis", "rediss")
        and bool(parts.hostname)
        and port != 0
        and re.fullmatch(r"/?[0-9]{0,4}", parts.path) is not None
        and not parts.query
        and not parts.fragment
    )
