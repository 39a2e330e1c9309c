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

SpecialTokens = Literal["text", "parse"]
ANSWER_BYTES = 16 * 1024 * 1024
DEVICE = r"auto|cpu|cuda(:[0-9]+)?"
HTTP_URL = "a URL that begins with http:// or https://, without a user's name"


class KvCacheConfig(msgspec.Struct, frozen=True, rename=spelled):
    """The KV cache of one model, and what of ended sequences it keeps for those that begin alike."""

    max_entries: AtLeastOne | None = 4 * 1024 * 1024
    """Tokens that one request may take, and that what is kept may take together; null: as many as fit."""
    max_memory_mb: AtLeastOne | None = None
    """Its memory in MiB. By default 1024 on a CPU; on a GPU 90 % of what is free, or of what gpuMemory leaves
    beside the weights, which it never exceeds."""
    eviction_threshold: Annotated[float, Meta(gt=0, le=1)] = 0.8
    """The part of either bound (0 to 1) up to which what is kept for reuse may fill it."""
    cleanup_interval_s: Seconds = 1.0
    """How often that is checked, also while nothing runs. A CPU's free memory is given back then."""
    eviction_policy: Literal["lru", "fifo"] = "lru"
    """Which request is dropped first: the one used least recently, or the one kept first."""
    isolate_tenants: bool = False
    """Whether nobody's prompts are answered faster because of another tenant's."""


class ModelConfig(msgspec.Struct, frozen=True, rename=spelled):
    """A model of ours: a folder, run by the engine. None: what the model or the machine allows.

    Raises `ConfigError`.
    """

    path: Path
    """The model's folder, in Hugging Face's layout; from the folder of the configuration file if relative."""
    name: str
    aliases: tuple[str, ...] = ()
    """Other names that clients may call it by."""
    device: Annotated[str, Meta(pattern=f"^({DEVICE})$")] = "auto"
    """Where it runs: auto, cpu, cuda or cuda:N."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """The type of its weights and of its KV cache."""
    quantization: Literal["fp8", "int8"] | None = None
    """Keep weights in 8 bits instead of those of their type: fp8 on a Hopper GPU, int8 on a CPU."""
    slots: AtLeastOne | None = None
    """Sequences that run at once: its seats. By default 8 on a CPU, and on a GPU what the cache allows."""
    max_batch: AtLeastOne | None = None
    """Sequences that one step computes; at most slots."""
    max_batched_tokens: AtLeastOne | None = None
    """Tokens that one step computes: longer prompts take several. By default 512 on a CPU, 2048 on a GPU."""
    max_input_tokens: AtLeastOne | None = None
    """Tokens that a prompt may have."""
    max_output_tokens: AtLeastOne | None = None
    """Tokens that an answer may have."""
    max_model_len: Annotated[int, Meta(ge=2)] | None = None  # a token of the prompt and one of the answer
    """Tokens that prompt and answer may have together; by default the model's own limit."""
    special_tokens: SpecialTokens = "text"
    """What becomes of a control token (`<|im_end|>`, `</s>`) that a client writes in a message, a tool or
    chat_template_kwargs. text: it stays text. parse: it becomes that token, with which a client can end its
    message and begin one of another role. The template's own are always parsed, and so are `<think>`,
    `<tool_call>` and others that answers show. Raw prompts are parsed unless a request says otherwise.
    """
    kv_cache: KvCacheConfig = KvCacheConfig()
    gpu_memory: Annotated[float, Meta(gt=0)] | None = None
    """What it may take of its GPU's memory, weights and cache together: a share of the whole up to 1, as 0.9,
    or MiB. By default what is free. Without effect on a CPU."""
    watchdog_s: Seconds = 30.0
    """How long a step may take before the model's process is ended and started again."""
    threads: AtLeastOne | None = None
    """Threads that compute, on a CPU."""
    ttl_s: SecondsOrNone = 0.0
    """How long it stays loaded without a job; 0: for ever."""
    memory_mb: AtLeastOne | None = None
    """What it takes, in MiB, where room for it has to be made: of the GPU's memory if it is on one. By
    default that is gpuMemory, or measured."""
    preload: bool = False
    """Whether it is loaded at the start, not by its first job."""
    send_loading_state: bool | None = None
    """Overrides the server's setting of the same name for this model."""

    def __post_init__(self) -> None:
        """Refuse limits that cannot be, in the configuration's names."""
        refuse_faults(self, "models", self.name)

    def contradictions(self) -> Iterator[Fault]:
        """Say what cannot be together."""
        if not re.fullmatch(DEVICE, self.device):
            yield Fault(("device",), "must be auto, cpu, cuda or cuda:N")
        if self.slots is not None and self.max_batch is not None and self.max_batch > self.slots:
            yield Fault(("maxBatch",), f"must be at most slots, which is {self.slots}")
        if self.gpu_memory is not None and self.device == "cpu":
            yield Fault(("gpuMemory",), "needs a GPU, but device is cpu")
        for part in ("max_input_tokens", "max_output_tokens"):
            value = getattr(self, part)
            if value is not None and self.max_model_len is not None and value >= self.max_model_len:
                yield Fault((spelled(part),), f"must be less than maxModelLen, which is {self.max_model_len}")


class TimeoutsConfig(msgspec.Struct, frozen=True, rename=spelled):
    """How long a node may keep us waiting; 0: as long as it wants."""

    connect_s: SecondsOrNone = 30.0
    """For a connection."""
    first_byte_s: SecondsOrNone = msgspec.field(default=0.0, name="responseHeader")
    """For the first byte of an answer."""
    between_bytes_s: SecondsOrNone = 300.0
    """From one piece of an answer to the next."""
    idle_s: SecondsOrNone = msgspec.field(default=90.0, name="idleConn")
    """A connection that nobody has used for so long is closed."""


class FiltersConfig(msgspec.Struct, frozen=True, rename=spelled):
    """What is changed in a request's body before a node gets it, in this order; `model` never is."""

    strip_params: Names = ()
    """Parameters that are taken out."""
    set_params: dict[str, Any] = {}
    """Parameters that are put in, with their values."""
    set_params_by_id: dict[str, dict[str, Any]] = msgspec.field(default_factory=dict, name="setParamsByID")
    """The same, for each name by which clients call the model."""


class CommandConfig(msgspec.Struct, frozen=True, rename=spelled):
    """A model that somebody else's server serves, which we start when it is wanted. Raises `ConfigError`."""

    name: str = msgspec.field(name="id")
    cmd: Command
    """The command line that starts the server; ${PORT} is a free port. No shell is involved. A command that
    does not use it, and has no proxy, finds its port in the variable PORT.
    """
    aliases: tuple[str, ...] = ()
    """Other names that clients may call it by."""
    cmd_stop: Command = ()
    """The command line that stops it, where ${PID} is its process; by default it is sent SIGTERM."""
    env: Environment = {}
    """Variables of its environment, as NAME=value."""
    proxy: str = "http://localhost:5800"
    """Where the server answers."""
    check_endpoint: str = "/health"
    """The path that answers 200 as soon as it is ready; none: there is no such path."""
    health_check_timeout_s: Seconds = 120.0
    """How long it may take to be ready; at least 15 s."""
    progress_pattern: str | None = None
    """A regular expression that finds in what it prints how far its load is: one group with a percentage, or
    two with how much is done and of how much. Without it the progress of a load is not known.
    """
    unload_timeout_s: Seconds = 10.0
    """How long it may take to stop before it is killed."""
    ttl_s: SecondsOrNone = 0.0
    """How long it stays loaded without a job; 0: for ever."""
    memory_mb: AtLeastOne | None = None
    """What it takes, in MiB, where room for it has to be made; by default that is measured."""
    preload: bool = False
    """Whether it is loaded at the start, not by its first job."""
    send_loading_state: bool | None = None
    """Overrides the server's setting of the same name for this model."""
    concurrency_limit: AtLeastOne = 10
    """Requests that it handles at once: its seats."""
    use_model_name: str | None = None
    """What the server calls the model; by default, as here."""
    filters: FiltersConfig = FiltersConfig()
    timeouts: TimeoutsConfig = TimeoutsConfig()
    answer_bytes: AtLeastOne = ANSWER_BYTES
    """Bytes of an answer that comes whole, and of one event of a streamed answer; a larger one fails."""
    unlisted: bool = False
    """Whether it is left out of the list of models."""
    title: str = msgspec.field(default="", name="name")
    """What people call it."""
    description: str = ""
    """What people should know of it."""
    metadata: dict[str, Any] = {}
    """Whatever else is to be told of it."""
    capabilities: dict[str, Any] = {}
    """What it can do."""

    def __post_init__(self) -> None:
        """Refuse what cannot be, in the configuration's names."""
        refuse_faults(self, "models", self.name)

    def contradictions(self) -> Iterator[Fault]:
        """Say what no server could be started or reached with."""
        if not self.cmd:
            yield Fault(("cmd",), "must not be empty")
        if not is_http_url(self.proxy):
            yield Fault(("proxy",), f"must be {HTTP_URL}")
        if self.check_endpoint != "none" and not self.check_endpoint.startswith("/"):
            yield Fault(("checkEndpoint",), "must be a path that begins with /, or none")
        if self.progress_pattern is not None:
            yield from _faults_of_pattern(self.progress_pattern)
        if any("=" in name or "\0" in name + value for name, value in self.env.items()):
            yield Fault(("env",), "must be names and values that an environment can have")


def _faults_of_pattern(pattern: str) -> Iterator[Fault]:
    try:
        groups = re.compile(pattern).groups
    except re.error as error:
        yield Fault(("progressPattern",), f"is no regular expression: {error}")
        return
    if groups not in (1, 2):
        yield Fault(("progressPattern",), f"must have one group or two, not {groups}")


def is_http_url(text: str) -> bool:
    """Whether requests can be sent there. A name or a password in it would be shown wherever it is."""
    try:
        parts = urlsplit(text)
        if "@" in parts.netloc:
            return False
        return parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:  # a port that is no number, a bracket that is not closed
        return False


def demonstration_model() -> Path:
    """Return the folder of the small model that ships with the package."""
    return Path(str(files("fairlead") / "demo" / "fairlead-demo"))
