"""What the server as a whole is told: who may use it, who waits how long, what one client can hold."""

import ipaddress
from collections.abc import Iterator
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from fairlead.config.fleet import HealthConfig, KeepSwap, NodeConfig, SwapConfig
from fairlead.config.models import CommandConfig, ModelConfig
from fairlead.config.spelling import (
    AtLeastNone,
    AtLeastOne,
    Fault,
    Seconds,
    SecondsOrNone,
    refuse_faults,
    spelled,
)

AnyModelConfig = ModelConfig | CommandConfig


class KeyLimits(msgspec.Struct, frozen=True, rename=spelled):
    """What one API key may use; None: as much as it wants.

    Tokens are those of prompts and answers together. `concurrent` counts jobs, waiting or running.
    """

    requests_per_minute: AtLeastOne | None = None
    tokens_per_minute: AtLeastOne | None = None
    concurrent: AtLeastOne | None = None


class ApiKey(msgspec.Struct, frozen=True, rename=spelled):
    """A key, whose it is and what it may do.

    `user` None: the key itself names the tenant. A trusted key may name others. `priority` is the highest
    class it may ask for (None: the default class); `models` are those it may use (none named: all).
    """

    key: str
    user: str | None = None
    trusted: bool = False
    priority: str | None = None
    models: tuple[str, ...] = ()
    limits: KeyLimits = KeyLimits()

    def contradictions(self) -> Iterator[Fault]:
        """Say what no client could send."""
        if not self.key or any(letter.isspace() for letter in self.key):
            yield Fault(("key",), "must not be empty, and have no spaces")


class QueueConfig(msgspec.Struct, frozen=True, rename=spelled):
    """Who waits, for how long, and in which order.

    `capacity` in waiting jobs; `timeout_s` from arrival to a seat (streaming: to the first delta). After
    `keep_alive_s` of waiting a stream is answered early and told its position now and then; 0: never.
    `classes` of priority, the first to be served first; `min_share` is the part of all grants that a waiting
    lower class is sure of. The weights are those of `fairness: tokens`; a tenant with weight 2 gets twice as
    much. `starvation_bound_s`: no job waits longer than this because of later arrivals for other models.
    """

    capacity: AtLeastNone = 100
    timeout_s: Seconds = 60.0
    fairness: Literal["roundRobin", "tokens"] = "roundRobin"
    estimate: Literal["mean", "quantile"] = "mean"
    keep_alive_s: SecondsOrNone = 15.0
    classes: tuple[str, ...] = ("high", "normal", "low")
    min_share: Annotated[float, Meta(ge=0, le=1)] = 0.0
    prompt_weight: Annotated[float, Meta(ge=0)] = 1.0
    output_weight: Annotated[float, Meta(ge=0)] = 2.0
    tenant_weights: dict[str, Annotated[float, Meta(gt=0)]] = {}
    starvation_bound_s: Seconds = 60.0

    @property
    def default_class(self) -> int:
        """The index of the class of whoever asks for none: the middle one, of an even number the lower."""
        return len(self.classes) // 2

    def contradictions(self) -> Iterator[Fault]:
        """Say what cannot be together."""
        if not self.classes or len(set(self.classes)) < len(self.classes):
            yield Fault(("classes",), "must be one name or more, all different")
        if self.prompt_weight == self.output_weight == 0:
            yield Fault(("outputWeight",), "must not be 0 when promptWeight is")


class Limits(msgspec.Struct, frozen=True, rename=spelled):
    """What one client can make us hold. `stall_s`: how long a client may not read, or not send, its part."""

    body_bytes: AtLeastOne = 16 * 1024 * 1024
    header_bytes: AtLeastOne = 64 * 1024
    headers: AtLeastOne = 100
    connections: AtLeastOne = 4096
    body_timeout_s: Seconds = 60.0
    header_timeout_s: Seconds = 20.0
    idle_timeout_s: Seconds = 75.0
    stall_s: Seconds = 30.0
    drain_s: SecondsOrNone = 30.0
    sequences: AtLeastOne = 64


def read_key(said: object) -> object:
    """Return a key as an object, which may be given as nothing but its text."""
    return {"key": said} if isinstance(said, str) else said


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True, rename=spelled):
    """All but the models, as a file says it too. `request_timeout_s`: from the seat to the last delta.

    A job for a model that is being loaded waits, or is rejected (`while_loading`). Raises `ConfigError`.
    """

    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535)] = 8000
    api_keys: tuple[Annotated[ApiKey, Meta(extra={"read": read_key})], ...] = ()
    queue: QueueConfig = QueueConfig()
    limits: Limits = Limits()
    request_timeout_s: Seconds = 600.0
    log_json: bool = False
    log_level: Literal["debug", "info", "warn", "error"] = "info"
    nodes: tuple[NodeConfig, ...] = ()
    health_check: HealthConfig = HealthConfig()
    while_loading: Literal["wait", "reject"] = "wait"

    def __post_init__(self) -> None:
        """Check each setting, and what depends on two at once; in the configuration's names."""
        refuse_faults(self)

    def contradictions(self) -> Iterator[Fault]:
        """Say what cannot be together."""
        if not self.host.strip():
            yield Fault(("host",), "must not be empty")
        classes = self.queue.classes
        for index, api_key in enumerate(self.api_keys):
            if api_key.priority is not None and api_key.priority not in classes:
                yield Fault(("apiKeys", index, "priority"), f"must be one of {', '.join(classes)}")
        yield from _twice((("apiKeys", i, "key"), api_key.key) for i, api_key in enumerate(self.api_keys))
        yield from _twice((("nodes", i, "id"), node.id) for i, node in enumerate(self.nodes))


class Config(ServerConfig, frozen=True, kw_only=True, rename=spelled):
    """Everything `fairlead serve` needs to know. `swap`: which models make room for which."""

    models: tuple[AnyModelConfig, ...]
    swap: SwapConfig = KeepSwap()

    def contradictions(self) -> Iterator[Fault]:
        """Say what cannot be together, in this and among the models."""
        yield from ServerConfig.contradictions(self)
        yield from _twice((("models", model.name), model.name) for model in self.models)
        names = {model.name for model in self.models}
        owners: dict[str, str] = {}
        for model in self.models:
            for index, alias in enumerate(model.aliases):
                path = ("models", model.name, "aliases", index)
                if alias in names:
                    yield Fault(path, f"{alias!r} is the name of a model")
                elif alias in owners:
                    yield Fault(path, f"{alias!r} is an alias of {owners[alias]} already")
                owners[alias] = model.name


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server that listens on `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _twice(found: Iterator[tuple[tuple[str | int, ...], str]]) -> Iterator[Fault]:
    """Say what is there a second time, without showing it: it may be a secret."""
    seen: set[str] = set()
    for path, name in found:
        if name in seen:
            yield Fault(path, "is given twice")
        seen.add(name)
