"""What the program is told, as plain frozen values with defaults. Reads no file and no environment yet.

Names here are snake_case; a configuration file will spell them in camelCase (spec 9).
"""

import ipaddress
from importlib.resources import files
from pathlib import Path

import msgspec


class ConfigError(ValueError):
    """A setting is wrong; the message names it."""


class ApiKey(msgspec.Struct, frozen=True):
    """A key and whose it is. `user` None: the key itself names the tenant. A trusted key may name others."""

    key: str
    user: str | None = None
    trusted: bool = False


class QueueConfig(msgspec.Struct, frozen=True):
    """`capacity` in waiting jobs; `timeout_s` from arrival to a seat (streaming: to the first delta)."""

    capacity: int = 100
    timeout_s: float = 60.0


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
