"""What the program is told, as plain frozen values with defaults. Reads no file and no environment yet.

Names here are snake_case; a configuration file will spell them in camelCase (spec 9).
"""

import ipaddress
from importlib.resources import files
from pathlib import Path
from typing import Literal

import msgspec


class ConfigError(ValueError):
    """A setting is wrong; the message names it."""


class KeyLimits(msgspec.Struct, frozen=True, rename="camel"):
    """What one API key may use; None: as much as it wants.

    Tokens are those of prompts and answers together. `concurrent` counts jobs, waiting or running.
    """

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent: int | None = None


class ApiKey(msgspec.Struct, frozen=True):
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


class QueueConfig(msgspec.Struct, frozen=True):
    """Who waits, for how long, and in which order.

    `capacity` in waiting jobs; `timeout_s` from arrival to a seat (streaming: to the first delta). After
    `keep_alive_s` of waiting a stream is answered early and told its position now and then; 0: never.
    `classes` of priority, the first to be served first; `min_share` is the part of all grants that a waiting
    lower class is sure of. The weights are those of `fairness: tokens`; a tenant with weight 2 gets twice as
    much. `starvation_bound_s`: no job waits longer than this because of later arrivals for other models.
    """

    capacity: int = 100
    timeout_s: float = 60.0
    fairness: Literal["roundRobin", "tokens"] = "roundRobin"
    estimate: Literal["mean", "quantile"] = "mean"
    keep_alive_s: float = 15.0
    classes: tuple[str, ...] = ("high", "normal", "low")
    min_share: float = 0.0
    prompt_weight: float = 1.0
    output_weight: float = 2.0
    tenant_weights: dict[str, float] = {}
    starvation_bound_s: float = 60.0

    @property
    def default_class(self) -> int:
        """The index of the class of whoever asks for none: the middle one, of an even number the lower."""
        return len(self.classes) // 2


class Limits(msgspec.Struct, frozen=True):
    """What one client can make us hold. `stall_s`: how long a client may not read, or not send, its part."""

    body_bytes: int = 16 * 1024 * 1024
    header_bytes: int = 64 * 1024
    headers: int = 100
    connections: int = 4096
    body_timeout_s: float = 60.0
    header_timeout_s: float = 20.0
    idle_timeout_s: float = 75.0
    stall_s: float = 30.0
    drain_s: float = 30.0
    sequences: int = 64


class ModelConfig(msgspec.Struct, frozen=True):
    """One model: where it is and within which limits it runs. None: what the model or the machine allows."""

    path: Path
    name: str
    aliases: tuple[str, ...] = ()
    device: str = "auto"
    dtype: str = "auto"
    slots: int | None = None
    max_batch: int | None = None
    max_batched_tokens: int | None = None
    max_model_len: int | None = None
    kv_cache_memory_mb: int | None = None
    threads: int | None = None


class Config(msgspec.Struct, frozen=True):
    """Everything `fairlead serve` needs to know. `request_timeout_s`: from the seat to the last delta."""

    models: tuple[ModelConfig, ...]
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[ApiKey, ...] = ()
    queue: QueueConfig = QueueConfig()
    limits: Limits = Limits()
    request_timeout_s: float = 600.0
    log_json: bool = False

    def __post_init__(self) -> None:
        """Check what depends on two settings at once. Raises `ConfigError`, in the configuration's names."""
        classes = self.queue.classes
        if not classes or len(set(classes)) < len(classes):
            raise ConfigError("queue.classes: must be one name or more, all different")
        for index, api_key in enumerate(self.api_keys):
            if api_key.priority is not None and api_key.priority not in classes:
                raise ConfigError(f"apiKeys[{index}].priority: must be one of {', '.join(classes)}")
            for setting in msgspec.structs.fields(KeyLimits):
                limit = getattr(api_key.limits, setting.name)
                if limit is not None and limit < 1:
                    raise ConfigError(f"apiKeys[{index}].limits.{setting.encode_name}: must be at least 1")


def demonstration_model() -> Path:
    """Return the folder of the small model that ships with the package."""
    return Path(str(files("fairlead") / "demo" / "fairlead-demo"))


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server that listens on `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
