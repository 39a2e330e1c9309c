"""Settings of access to the server: API keys, web pages of other origins, the loopback interface."""

import ipaddress
import os
import re
from collections.abc import Iterable, Iterator
from hashlib import sha256
from typing import Annotated, Literal, get_args

import msgspec
from msgspec import Meta

from fairlead.base.config.spelling import AtLeastOne, Fault, spelled
from fairlead.base.config.store import Budget

# Begins the address of a Unix socket, before its path.
UNIX_PREFIX = "unix:"
MAX_UNIX_PATH_BYTES = 107  # of the system, on Linux

HASH_PREFIX = "sha256:"
_HASH = re.compile(rf"{HASH_PREFIX}[0-9a-f]{{64}}")
_ORIGIN = re.compile(r"([a-z][a-z0-9+.-]*)://[^\s/?#@*\\A-Z]+")
_ORIGIN_FORM = "an origin as browsers send it: scheme, name and port in lower case, without the default port"
_USUAL_PORTS = {"http": ":80", "https": ":443"}

Role = Literal["user", "operator", "admin"]
ROLES: tuple[Role, ...] = get_args(Role)
NO_OPERATOR = (
    "no API key has the role operator: nobody can load and unload models, drain nodes, cancel requests of "
    "others or read logs; give a key `role: operator` or `role: admin` in apiKeys, or start with --admin-key"
)


class KeyLimits(msgspec.Struct, frozen=True, rename=spelled):
    """Rate limits of one API key; not set: no limit."""

    requests_per_minute: AtLeastOne | None = None
    """Maximum number of requests in any minute."""
    tokens_per_minute: AtLeastOne | None = None
    """Maximum number of tokens in any minute, of prompts and answers together."""
    concurrent: AtLeastOne | None = None
    """Maximum number of jobs at a time, queued or running."""


class TeamConfig(msgspec.Struct, frozen=True, rename=spelled):
    """A team: tenants that share its turns in the queue."""

    weight: Annotated[float, Meta(gt=0)] = 1.0
    """With queue.fairness: tokens, a team with weight 2 gets twice as much as one with 1."""


class ApiKey(msgspec.Struct, frozen=True, rename=spelled):
    """An API key, its user and its permissions."""

    key: str = ""
    """The key itself, which a client sends as `Authorization: Bearer KEY`."""
    user: str | None = None
    """The key's user, which is the tenant. Default: each key is a tenant of its own."""
    trusted: bool = False
    """Whether requests may name other users, in X-OpenWebUI-User-Id or the field user."""
    priority: str | None = None
    """The highest priority class that requests may have. Default: the default class."""
    models: tuple[str, ...] = ()
    """The models that it may use, and see in /nodes, /running, /events and /metrics; empty: all."""
    limits: KeyLimits = KeyLimits()
    role: Role = "user"
    """What it may control. user: its own requests. operator: also load and unload its models, read their
    logs, cancel requests for them, and drain nodes. admin: also add and remove nodes."""
    hash: str = ""
    """Instead of `key`: its SHA-256, as sha256: and 64 hexadecimal digits. Only for keys that nobody could
    guess, such as 32 random bytes: a short one can be found from its hash."""
    team: str | None = None
    """The key's team, for the queue, usage and budgets. Users that a trusted key names are in its team. With
    `teams`, it must be one of these. Default: none."""
    budget: Budget = Budget()

    def contradictions(self) -> Iterator[Fault]:
        """Yield faults of a key that no client could send, or that may do less than its role says."""
        if self.hash:
            if self.key:
                yield Fault(("hash",), "must not be there beside key")
            if _HASH.fullmatch(self.hash) is None:
                yield Fault(("hash",), "must be sha256: and 64 hexadecimal digits")
        elif not self.key:
            yield Fault(("key",), "is missing or empty")
        elif any(letter.isspace() for letter in self.key):
            yield Fault(("key",), "must have no spaces")
        if self.role == "admin" and self.models:
            yield Fault(("role",), "admin is for all models; with models, the highest role is operator")

    @property
    def digest(self) -> bytes:
        """The SHA-256 of the key."""
        if _HASH.fullmatch(self.hash) is not None:
            return bytes.fromhex(self.hash.removeprefix(HASH_PREFIX))
        return sha256(self.key.encode()).digest()

    def has_role(self, role: Role) -> bool:
        """Return whether the key has this role or a higher one."""
        return ROLES.index(self.role) >= ROLES.index(role)


class FlowControlConfig(msgspec.Struct, frozen=True, rename=spelled):
    """The headers in which llm-d's gateway names a request's tenant, objective and deadline.

    They are read of requests with a trusted key, and of those from trusted addresses.
    """

    trusted_addresses: tuple[str, ...] = ()
    """Addresses or networks of the gateway, such as 10.0.0.0/8; nothing else may reach the server from
    there."""
    objectives: dict[str, str] = {}
    """Priority classes by the names of objectives. A class is also an objective of its own name; any other
    objective is the same as none."""

    def contradictions(self) -> Iterator[Fault]:
        """Yield faults of addresses that are none."""
        for index, address in enumerate(self.trusted_addresses):
            try:
                ipaddress.ip_network(address)
            except ValueError:
                yield Fault(("trustedAddresses", index), "must be an address or a network such as 10.0.0.0/8")


class CorsConfig(msgspec.Struct, frozen=True, rename=spelled):
    """Which web pages of other origins may use the API from a browser."""

    origins: tuple[str, ...] = ()
    """The pages' origins, such as https://chat.example.com; "*": any page. Routes that load and unload
    models, show their logs, or show and change nodes remain forbidden to them.
    """

    def contradictions(self) -> Iterator[Fault]:
        """Yield faults of origins that no browser could send."""
        for index, origin in enumerate(self.origins):
            if origin != "*" and not _is_origin(origin):
                yield Fault(("origins", index), f'must be "*" or {_ORIGIN_FORM}')


def read_key(raw: object) -> object:
    """Return a key as a mapping; a file may also have its text alone."""
    return {"key": raw} if isinstance(raw, str) else raw


def faults_of_host(host: str) -> Iterator[Fault]:
    """Yield faults of `host`."""
    if not host.strip():
        yield Fault(("host",), "must not be empty")
    if host.startswith(UNIX_PREFIX):
        size = len(os.fsencode(host.removeprefix(UNIX_PREFIX)))
        if not 0 < size <= MAX_UNIX_PATH_BYTES or "\0" in host:
            yield Fault(("host",), f"the path of a socket must have 1 to {MAX_UNIX_PATH_BYTES} bytes")


def faults_of_proxies(entries: Iterable[str]) -> Iterator[Fault]:
    """Yield faults of `trustedProxies`."""
    for index, entry in enumerate(entries):
        try:
            if entry != "unix":
                ipaddress.ip_network(entry)
        except ValueError:
            message = "must be an address, a network such as 10.0.0.0/8, or unix"
            yield Fault(("trustedProxies", index), message)


def lacks_operator(api_keys: Iterable[ApiKey]) -> bool:
    """Return whether clients need a key, and no key may control models and nodes."""
    roles = [api_key.has_role("operator") for api_key in api_keys]
    return bool(roles) and not any(roles)


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a server that listens on `host`."""
    if host == "localhost" or host.startswith(UNIX_PREFIX):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _is_origin(text: str) -> bool:
    match = _ORIGIN.fullmatch(text)
    return match is not None and not text.endswith(_USUAL_PORTS.get(match[1], "/"))
