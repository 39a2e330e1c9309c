"""The record of a lease in Kubernetes: a Lease object of coordination.k8s.io/v1.

The pod's service account needs the verbs get, create and update for leases. `leaseTransitions` is the epoch.
"""

import math
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

import msgspec
import trio

from fairlead.base.config.lease import ClusterAccess
from fairlead.base.errors import NodeFailed
from fairlead.distributed.lease.contender import LeaseRecord, Replace
from fairlead.distributed.lease.lease import StoreFailed, reason_of
from fairlead.nodes.http.client import ResponseTooLarge, Upstream

ANSWER_BYTES = 1024 * 1024  # of one answer of the API
_TIMEOUT_S = 10.0  # an upper bound; callers have shorter ones
_MOST_TRANSITIONS = 2**31 - 1  # `leaseTransitions` is an int32


class KubernetesStore:
    """A session with the API server.

    server: the API server.
    access: where the API is. The token is read for each request, because Kubernetes replaces it.
    namespace: the namespace of the lease.
    name: the name of the lease.
    """

    def __init__(self, server: Upstream, access: ClusterAccess, namespace: str, name: str) -> None:
        self._server = server
        self._access = access
        self._namespace = namespace
        self._name = name
        self._path = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._object: dict[str, Any] = {}  # as read last; fields of others are written back unchanged
        self._version = ""  # of that

    async def read(self) -> LeaseRecord | None:
        """Return the record, or None if there is none."""
        return self._read(await self._request("GET", f"{self._path}/{self._name}", missing=404))

    async def replace(self, write: Replace) -> LeaseRecord | None:
        """See `LeaseStore`. Without a resource version of the object that was read, it is created."""
        is_known = write.previous is None or self._version == write.previous.version
        # An object of an earlier session is read: an update without its other fields would remove them.
        if not is_known and await self.read() != write.previous:
            return None
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        before = self._object if write.previous else {}
        spec = {
            **(before.get("spec") or {}),
            "holderIdentity": write.holder,
            "leaseDurationSeconds": max(1, math.ceil(write.duration_s)),
            "leaseTransitions": min(write.epoch, _MOST_TRANSITIONS),
            "renewTime": now,
        }
        if write.previous is None or write.previous.epoch != write.epoch:
            spec["acquireTime"] = now
        metadata = {**before.get("metadata", {}), "name": self._name, "namespace": self._namespace}
        if write.previous is not None:
            metadata["resourceVersion"] = write.previous.version
        body = {
            **before,
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": metadata,
            "spec": spec,
        }
        if write.previous is None:
            return self._read(await self._request("POST", self._path, body, missing=409))
        path = f"{self._path}/{self._name}"
        return self._read(await self._request("PUT", path, body, missing=404, conflict=409))

    def _read(self, found: dict[str, Any] | None) -> LeaseRecord | None:
        if found is None:
            return None
        try:
            spec = found.get("spec") or {}
            record = LeaseRecord(
                str(spec.get("holderIdentity") or ""),
                int(spec.get("leaseTransitions") or 0),
                float(spec.get("leaseDurationSeconds") or 0),
                str(found["metadata"]["resourceVersion"]),
            )
        except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
            raise StoreFailed("Kubernetes: the answer is not a Lease") from error
        self._object, self._version = found, record.version
        return record

    async def _request(
        self, method: str, path: str, body: object = None, *, missing: int, conflict: int = 0
    ) -> dict[str, Any] | None:
        """Return the object of the answer, or None for the two statuses. Raises `StoreFailed`."""
        try:
            token = (await trio.Path(self._access.token_file).read_text()).strip()
            content = b"" if body is None else msgspec.json.encode(body)
            headers = {"Authorization": f"Bearer {token}"}
            async with self._server.exchange(
                method, path, content, headers=headers, within_s=_TIMEOUT_S
            ) as response:
                text = await response.read_all(ANSWER_BYTES)
        except ResponseTooLarge as error:
            raise StoreFailed("Kubernetes: the answer is too large") from error
        except NodeFailed as error:
            raise StoreFailed(error.message) from error
        except (OSError, UnicodeError) as error:
            raise StoreFailed(f"Kubernetes: {reason_of(error)}") from error
        status = response.head.status
        if status in (missing, conflict):
            return None
        if not 200 <= status < 300:
            raise StoreFailed(f"Kubernetes: {method} {path}: status {status}")
        try:
            return msgspec.json.decode(text, type=dict[str, Any])
        except msgspec.DecodeError as error:
            raise StoreFailed("Kubernetes: the answer is not JSON") from error


def least_epoch() -> int:
    """Return the Unix time in seconds: after the object was deleted, earlier epochs must not be repeated.

    In a record that has them already, epochs are counted on from there.
    """
    return min(int(time.time()), _MOST_TRANSITIONS - 2**24)


@asynccontextmanager
async def connect(access: ClusterAccess, name: str) -> AsyncIterator[KubernetesStore]:
    """Open a session. Raises `StoreFailed`."""
    try:
        namespace = (await trio.Path(access.namespace_file).read_text()).strip()
        tls = ssl.create_default_context(cafile=access.ca_file) if access.url.startswith("https:") else None
        server = Upstream(access.url, name="Kubernetes", tls=tls)
    except (OSError, UnicodeError, ValueError) as error:
        raise StoreFailed(f"Kubernetes: {error}") from error
    try:
        yield KubernetesStore(server, access, namespace, name)
    finally:
        server.close()
