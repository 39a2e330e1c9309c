"""Authentication and authorization: API keys, tenants, priorities. Independent of routes and the queue.

The queue is fair between tenants. The tenant of a request is, in this order:

1. the tenant that llm-d's gateway names, if it is trusted (`flow_control`): `KEY/alice` below the identity of
   the request's key, or `gateway/alice` without one;
2. the user that a *trusted* key names, in the header `X-OpenWebUI-User-Id` or the body's `user` or
   `safety_identifier`. Its prefix is the key's own identity, `portal/alice`: two trusted keys cannot name
   each other's users, and no named user can be taken for a key's user;
3. the key's user, or a hash of the key if it has none;
4. with no keys configured, the user that any request names: `user/alice`;
5. the client's address, `address/192.0.2.7`.

Kept responses and running jobs belong to a key, and of a trusted one to the user that it names
(`requester_of`). A request without a body names its user in a header.
"""

import ipaddress
import re
import time
from collections.abc import Callable, Iterable
from functools import lru_cache
from hashlib import sha256
from hmac import compare_digest
from math import inf
from typing import NamedTuple

from fairlead.base.config import ApiKey, QueueConfig, Role
from fairlead.base.errors import (
    Forbidden,
    InsufficientRole,
    InvalidApiKey,
    InvalidRequest,
    StoreUnavailable,
    quoted,
)
from fairlead.base.formats.headers import USER_HEADER, Headers
from fairlead.store.records import StoredKey

# Tenants are kept in the queue and written to the log: longer names become hashes.
MAX_TENANT_LENGTH = 128
NETWORK_CACHE_SIZE = 1024
BATCH_PREFIX = "batch:"
"""Begins the tenant of a batch's jobs: they must not count against the turns of what its user waits for."""

_WHOLE_NUMBER = re.compile(r"[-+]?[0-9]{1,10}", re.ASCII)


class Authenticator:
    """The configured keys, and those of the store. Without configured ones, every client is accepted.

    Stored keys alone do not close a server: it would be open to everybody when its store is away. While they
    are not known yet, an unknown key is refused with 503, not 401.

    api_keys: those of the configuration.
    has_store: whether `change_stored` will be called.
    now: returns the seconds since 1970.
    """

    def __init__(
        self, api_keys: Iterable[ApiKey], *, has_store: bool = False, now: Callable[[], float] = time.time
    ) -> None:
        self._stored: dict[bytes, _StoredSecret] = {}
        self._teams: dict[str, str] = {}
        self._knows_stored = not has_store
        self._now = now
        self.change(api_keys)

    def change(self, api_keys: Iterable[ApiKey]) -> None:
        """Replace the configured keys. Requests that were authenticated before continue."""
        # Digests have equal lengths, so comparing them does not reveal the length of a key.
        self._keys = tuple((api_key.digest, api_key) for api_key in api_keys)
        self._by_digest = dict(self._keys)
        self._add_teams(api_key for _, api_key in self._keys)

    def change_stored(self, keys: Iterable[StoredKey]) -> None:
        """Replace the keys of the store, as `change` does."""
        self._stored = {}
        self._knows_stored = True
        for key in keys:
            api_key = key.api_key()
            self._add_teams([api_key])
            for secret in key.secrets if key.revoked_at is None else ():
                expires_at = min(key.expires_at or inf, secret.expires_at or inf)
                self._stored[bytes.fromhex(secret.sha256)] = _StoredSecret(api_key, expires_at)

    def team_of(self, key_id: str) -> str:
        """Return the team of a key, also of one that was removed while this process runs; "": none."""
        return self._teams.get(key_id, "")

    def _add_teams(self, api_keys: Iterable[ApiKey]) -> None:
        self._teams |= {key_id(api_key): api_key.team or "" for api_key in api_keys}

    @property
    def has_keys(self) -> bool:
        """Whether a client needs a key."""
        return bool(self._keys)

    def authenticate(self, headers: Headers) -> ApiKey | None:
        """Return the caller's key; None if none is needed. Raises `InvalidApiKey`."""
        if not self._keys:
            return None
        presented = _presented_key(headers)
        if presented is None:
            raise InvalidApiKey("an API key is needed, as `Authorization: Bearer KEY`")
        digest = _digest(presented.encode("latin-1"))  # header bytes were decoded as Latin-1
        found = None
        for configured, api_key in self._keys:  # no early exit: the time must not reveal which key matches
            if compare_digest(configured, digest):
                found = api_key
        if found is None:
            found = self._find_stored(digest)
        if found is None and not self._knows_stored:
            raise StoreUnavailable("this API key is not known yet: the keys of the store were not read")
        if found is None:
            raise InvalidApiKey("this API key is not valid here")
        return found

    def find(self, headers: Headers) -> ApiKey | None:
        """Return the caller's key, if it is known. This grants nothing: use it to order requests.

        It takes as long for many keys as for one. The time may reveal a part of a digest, but never a key.
        """
        presented = _presented_key(headers) if self._keys else None
        if presented is None:
            return None
        digest = _digest(presented.encode("latin-1"))
        return self._by_digest.get(digest) or self._find_stored(digest)

    def with_id(self, key_id: str) -> ApiKey | None:
        """Return the key with this id, for work that it has requested before; None for "", if none is needed.

        Raises `InvalidApiKey`, and `StoreUnavailable` while the keys of the store are not known.
        """
        if not key_id and not self._keys:
            return None
        now = self._now()
        valid = [secret.api_key for secret in self._stored.values() if now < secret.expires_at]
        for api_key in (*self._by_digest.values(), *valid):
            if owner_of(api_key) == key_id:
                return api_key
        if not self._knows_stored:
            raise StoreUnavailable("the API key is not known yet: the keys of the store were not read")
        raise InvalidApiKey("the API key is not valid any more")

    def _find_stored(self, digest: bytes) -> ApiKey | None:
        """Return a stored key that is valid now. The time may reveal a part of a digest, but never a key."""
        found = self._stored.get(digest)
        return found.api_key if found is not None and self._now() < found.expires_at else None


class _StoredSecret(NamedTuple):
    """A secret of a stored key; `expires_at` is in seconds since 1970."""

    api_key: ApiKey
    expires_at: float


def tenant_of(
    api_key: ApiKey | None,
    headers: Headers,
    address: str | None,
    *,
    user: str | None,
    safety_identifier: str | None,
    fairness_id: str | None = None,
) -> str:
    """Return the tenant, at most `MAX_TENANT_LENGTH` characters.

    api_key: the request's key; None: it has none.
    headers: the request's headers, which may name a user.
    address: the client's address, for requests without anything else.
    user: the body's user.
    safety_identifier: the body's field of that name.
    fairness_id: that of a trusted gateway.
    """
    if fairness_id is not None:
        return _bounded(f"{'gateway' if api_key is None else identity_of(api_key)}/{fairness_id}")
    named = headers.get(USER_HEADER) or user or safety_identifier
    if api_key is not None:
        identity = identity_of(api_key)
        return _bounded(f"{identity}/{named}" if api_key.trusted and named else identity)
    return _bounded(f"user/{named}" if named else f"address/{_network(address)}")


def user_tenant(tenant: str, *, is_batch: bool) -> str:
    """Return the tenant that a job's usage and budgets count for: a batch's without its prefix."""
    return tenant.removeprefix(BATCH_PREFIX) if is_batch else tenant


def requester_of(
    api_key: ApiKey | None,
    headers: Headers,
    *,
    user: str | None = None,
    fairness_id: str | None = None,
) -> str:
    """Return who may read, continue and cancel what a request makes; "" without a key: all clients.

    api_key: the request's key; None: anybody may send any name, which proves nothing.
    headers: the request's headers, which may name a user.
    user: the body's user, which counts under a trusted key.
    fairness_id: as for `tenant_of`.
    """
    named = fairness_id
    if named is None and api_key is not None and api_key.trusted:
        named = headers.get(USER_HEADER) or user
    return _bounded(f"{owner_of(api_key)}/{named}") if named else owner_of(api_key)


def identity_of(api_key: ApiKey) -> str:
    """Return the tenant of a key's own jobs, which is also the prefix of users that a trusted key names."""
    return api_key.user or owner_of(api_key)


def owner_of(api_key: ApiKey | None) -> str:
    """Return the owner of a key's jobs, which is the key's id; "" without a key."""
    return key_id(api_key) if api_key is not None else ""


def key_id(api_key: ApiKey) -> str:
    """Return the id that names a key in the log and in errors: a part of its SHA-256, not of the key."""
    return f"key-{api_key.digest.hex()[:16]}"


def check_role(api_key: ApiKey | None, role: Role) -> None:
    """Raise `InsufficientRole` unless the key has this role or a higher one. Without keys, any client has."""
    if api_key is None or api_key.has_role(role):
        return
    raise InsufficientRole(
        f"this needs an API key with the role {role}; {key_id(api_key)} has the role {api_key.role}"
    )


def priority_of(api_key: ApiKey | None, requested: str | int | None, queue: QueueConfig) -> int:
    """Return the priority class of a job, an index into `queue.classes`; `requested` is the job's.

    A whole number is read as in vLLM, where lower means earlier: 0 is the default class, -1 the class before
    it, 1 the one after it. Numbers beyond the classes mean the first or last one. Within a class, tenants
    take turns, whichever number they send.

    A job that requests no class gets the default class, or the highest one its key allows if that is lower.
    Without keys, any class may be requested. Raises `InvalidRequest` and `Forbidden`.
    """
    highest = _highest_class(api_key, queue)
    if not requested:  # also 0
        return max(queue.default_class, highest)
    if requested in queue.classes:
        priority = queue.classes.index(str(requested))
    elif isinstance(requested, int) or _WHOLE_NUMBER.fullmatch(requested):
        priority = min(max(0, queue.default_class + int(requested)), len(queue.classes) - 1)
        if int(requested) == 0:
            priority = max(priority, highest)
    else:
        known = ", ".join(queue.classes)
        message = f"priority: must be one of {known}, or a whole number, not {quoted(requested)}"
        raise InvalidRequest(message, param="priority")
    if priority < highest:
        most = queue.classes[highest]
        raise Forbidden(
            f"priority: this API key allows at most {most!r}, not {requested!r}", param="priority"
        )
    return priority


def gateway_priority_of(api_key: ApiKey | None, name: str, queue: QueueConfig) -> int:
    """Return the class that a trusted gateway names; the highest one that the key allows if that is lower."""
    return max(queue.classes.index(name), _highest_class(api_key, queue))


def _highest_class(api_key: ApiKey | None, queue: QueueConfig) -> int:
    if api_key is None:
        return 0
    if api_key.priority is None:
        return queue.default_class
    return queue.classes.index(api_key.priority)


def flag_of(headers: Headers, name: str) -> bool:
    """Return whether a header is 1; absent and 0 mean false. Raises `InvalidRequest` for anything else."""
    value = headers.get(name, "")
    if value not in {"", "0", "1"}:
        raise InvalidRequest(f"{name}: must be 1 or absent, not {quoted(value)}", param=name)
    return bool(value == "1")


def _presented_key(headers: Headers) -> str | None:
    scheme, _, credentials = headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer" and credentials.strip():
        return credentials.strip()
    return headers.get("x-api-key") or None


@lru_cache(NETWORK_CACHE_SIZE)
def _network(address: str | None) -> str:
    """Return the address; for IPv6 its /64 network, or one client could be a new tenant with each address."""
    try:
        parsed = ipaddress.ip_address(address or "")
    except ValueError:
        return "unknown"  # for example a Unix socket
    if parsed.version == 6 and not parsed.is_loopback:
        return str(ipaddress.ip_network((parsed.packed, 64), strict=False))
    return str(parsed)


def _bounded(tenant: str) -> str:
    if len(tenant) <= MAX_TENANT_LENGTH:
        return tenant
    return f"sha256-{_digest(tenant.encode()).hex()}"


def _digest(secret: bytes) -> bytes:
    return sha256(secret).digest()
