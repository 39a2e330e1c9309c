"""What a model is told: ours (a folder, run by the engine) or a command's (a server that we start)."""

import re
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from fairlead.config.spelling import (
    AtLeastOne,
    Command,
    Environment,
    Fault,
    Names,
    Seconds,
    SecondsOrNone,
    refuse_faults,
    spelled,
)

DEVICE = r"auto|cpu|cuda(:[0-9]+)?"


class KvCacheConfig(msgspec.Struct, frozen=True, rename=spelled):
    """The KV cache of one model, at most `max_entries` tokens and `max_memory_mb` MiB (None: what there is).

    What ended sequences leave in it is dropped, least recently used first, when the tokens or the memory in
    use pass `eviction_threshold` (a part of the bound, 0…1), looked at every `cleanup_interval_s`.
    `isolate_tenants`: nobody's prompts are answered faster because of another tenant's.
    """

    max_entries: AtLeastOne | None = 4 * 1024 * 1024
    max_memory_mb: AtLeastOne | None = None
    eviction_threshold: Annotated[float, Meta(gt=0, le=1)] = 0.8
    cleanup_interval_s: Seconds = 1.0
    isolate_tenants: bool = False


class ModelConfig(msgspec.Struct, frozen=True, rename=spelled):
    """One model: where it is and within which limits it runs. None: what the model or the machine allows.

    `slots` sequences run at once, `max_batch` of them in one step, which computes `max_batched_tokens`.
    A prompt has at most `max_input_tokens`, an answer `max_output_tokens`, both together `max_model_len`.
    A step that takes longer than `watchdog_s` ends the model's process, which is started again. `ttl_s`,
    `memory_mb` and `preload` as in `CommandConfig`. Raises `ConfigError`.
    """

    path: Path
    name: str
    aliases: tuple[str, ...] = ()
    device: Annotated[str, Meta(pattern=f"^({DEVICE})$")] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    slots: AtLeastOne | None = None
    max_batch: AtLeastOne | None = None
    max_batched_tokens: AtLeastOne | None = None
    max_input_tokens: AtLeastOne | None = None
    max_output_tokens: AtLeastOne | None = None
    max_model_len: Annotated[int, Meta(ge=2)] | None = None  # a token of the prompt and one of the answer
    kv_cache: KvCacheConfig = KvCacheConfig()
    watchdog_s: Seconds = 30.0
    threads: AtLeastOne | None = None
    ttl_s: SecondsOrNone = 0.0
    memory_mb: AtLeastOne | None = None
    preload: bool = False

    def __post_init__(self) -> None:
        """Refuse limits that cannot be, in the configuration's names."""
        refuse_faults(self, "models", self.name)

    def contradictions(self) -> Iterator[Fault]:
        """Say what cannot be together."""
        if not re.fullmatch(DEVICE, self.device):
            yield Fault(("device",), "must be auto, cpu, cuda or cuda:N")
        if self.slots is not None and self.max_batch is not None and self.max_batch > self.slots:
            yield Fault(("maxBatch",), f"must be at most slots, which is {self.slots}")
        for part in ("max_input_tokens", "max_output_tokens"):
            value = getattr(self, part)
            if value is not None and self.max_model_len is not None and value >= self.max_model_len:
                yield Fault((spelled(part),), f"must be less than maxModelLen, which is {self.max_model_len}")


class TimeoutsConfig(msgspec.Struct, frozen=True, rename=spelled):
    """How long a node may keep us waiting; 0: as long as it wants.

    For a connection (`connect_s`), for the first byte of an answer (`first_byte_s`) and from one to the next
    (`between_bytes_s`). A connection that nobody uses is closed after `idle_s`.
    """

    connect_s: SecondsOrNone = 30.0
    first_byte_s: SecondsOrNone = msgspec.field(default=0.0, name="responseHeader")
    between_bytes_s: SecondsOrNone = 300.0
    idle_s: SecondsOrNone = msgspec.field(default=90.0, name="idleConn")


class FiltersConfig(msgspec.Struct, frozen=True, rename=spelled):
    """What is changed in a request's body before a node gets it, in this order; `model` never is.

    `strip_params` are taken out, `set_params` put in, then those of `set_params_by_id` for the name by which
    the client called the model.
    """

    strip_params: Names = ()
    set_params: dict[str, Any] = {}
    set_params_by_id: dict[str, dict[str, Any]] = msgspec.field(default_factory=dict, name="setParamsByID")


class CommandConfig(msgspec.Struct, frozen=True, rename=spelled):
    """A model that somebody else's server serves, which we start with `cmd` (its words) when it is wanted.

    It answers at `proxy` (a URL), and is ready when `check_endpoint` there (a path, or "none") answers 200,
    at most `health_check_timeout_s` after its start. It is stopped by `cmd_stop`, where `${PID}` is its
    process, or else by SIGTERM, and killed `unload_timeout_s` later. It runs `concurrency_limit` jobs at once
    (its seats) and is called `use_model_name` there (None: as here).

    After `ttl_s` without a job it is unloaded (0: never). It takes `memory_mb` MiB (None: measure it).
    `preload`: load it at the start. `unlisted`: not shown among the models. `title`, `description`,
    `metadata` and `capabilities` are what is told about it. Raises `ConfigError`.
    """

    name: str = msgspec.field(name="id")
    cmd: Command
    aliases: tuple[str, ...] = ()
    cmd_stop: Command = ()
    env: Environment = {}
    proxy: str = "http://localhost:5800"
    check_endpoint: str = "/health"
    health_check_timeout_s: Seconds = 120.0
    unload_timeout_s: Seconds = 10.0
    ttl_s: SecondsOrNone = 0.0
    memory_mb: AtLeastOne | None = None
    preload: bool = False
    concurrency_limit: AtLeastOne = 1
    use_model_name: str | None = None
    filters: FiltersConfig = FiltersConfig()
    timeouts: TimeoutsConfig = TimeoutsConfig()
    unlisted: bool = False
    title: str = msgspec.field(default="", name="name")
    description: str = ""
    metadata: dict[str, Any] = {}
    capabilities: dict[str, Any] = {}

    def __post_init__(self) -> None:
        """Refuse what cannot be, in the configuration's names."""
        refuse_faults(self, "models", self.name)

    def contradictions(self) -> Iterator[Fault]:
        """Say what no server could be started or reached with."""
        if not self.cmd:
            yield Fault(("cmd",), "must not be empty")
        if not is_http_url(self.proxy):
            yield Fault(("proxy",), "must be a URL that begins with http:// or https://")
        if self.check_endpoint != "none" and not self.check_endpoint.startswith("/"):
            yield Fault(("checkEndpoint",), "must be a path that begins with /, or none")
        if any("=" in name or "\0" in name + value for name, value in self.env.items()):
            yield Fault(("env",), "must be names and values that an environment can have")


def is_http_url(text: str) -> bool:
    """Whether requests can be sent there."""
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:  # a port that is no number, a bracket that is not closed
        return False


def demonstration_model() -> Path:
    """Return the folder of the small model that ships with the package."""
    return Path(str(files("fairlead") / "demo" / "fairlead-demo"))
