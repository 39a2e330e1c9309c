"""Settings of models: the built-in engine's (a folder), or a command's (a server that we start)."""

import re
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from fairlead.base.config.cluster import ReplicasConfig
from fairlead.base.config.spelling import (
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
from fairlead.base.config.store import Price
from fairlead.base.config.urls import HTTP_URL, is_http_url, whole_route_advice
from fairlead.base.wire_formats import formats

ModelKind = Literal["engine", "command"]
DialectName = Literal["openai", "responses", "messages", "ollama"]
Dialects = tuple[DialectName, ...]
MOST_DIALECTS: Dialects = ("openai", "responses", "messages")
ALL_DIALECTS: Dialects = (*MOST_DIALECTS, "ollama")
SpecialTokens = Literal["text", "parse"]
ConfiguredFormat = Annotated[str | dict[str, Any] | None, Meta(extra={"choices": formats.NAMES})]
Isolation = Annotated[bool | Literal["auto"], Meta(extra={"choices": ("auto",)})]
MOST_RANKS = 64
PORT_MACRO = "${PORT}"
ANSWER_BYTES = 16 * 1024 * 1024
DEVICE = r"auto|cpu|cuda(:[0-9]+)?"


class KvCacheConfig(msgspec.Struct, frozen=True, rename=spelled):
    """The KV cache of one model, with its prefix cache: the blocks of ended sequences, kept for reuse."""

    max_entries: AtLeastOne | None = 4 * 1024 * 1024
    """Maximum number of tokens of one request, and of the whole prefix cache; null: as many as fit."""
    max_memory_mb: AtLeastOne | None = None
    """The memory of the KV cache in MiB. Default: 1024 on a CPU; on a GPU 90 % of the free memory, or of what
    gpuMemory leaves beside the weights. The latter is also its maximum."""
    eviction_threshold: Annotated[float, Meta(gt=0, le=1)] = 0.8
    """Fraction of either bound (0 to 1) above which cached requests are evicted."""
    cleanup_interval_s: Seconds = 1.0
    """How often that is checked, also while idle. While idle, free memory on a CPU is released, too."""
    eviction_policy: Literal["lru", "fifo"] = "lru"
    """Which cached request is evicted first: the least recently used (lru) or the oldest (fifo)."""
    isolate_tenants: Isolation = "auto"
    """Whether tenants share no cached prefixes, so that neither `cached_tokens` nor response times reveal
    others' prompts. auto: if there can be several tenants, because of several keys, a trusted key, trusted
    addresses, or other machines that may send requests without a key."""


class SpeculationConfig(msgspec.Struct, frozen=True, rename=spelled):
    """Speculation of one model, which makes answers that repeat their prompts faster and changes none.

    Where the last tokens of a text occurred before, in its prompt or answer, those that followed there are
    computed in the same step, and accepted as far as the model chooses them. Answers with a schema, a grammar
    or a limit of the reasoning are computed without.
    """

    ngram: Annotated[int, Meta(ge=1, le=64)] = 3
    """How many last tokens must have occurred before."""
    drafts: Annotated[int, Meta(ge=1, le=64)] = 4
    """How many tokens are tried in one step. They take part of maxBatchedTokens."""


class ModelConfig(msgspec.Struct, frozen=True, rename=spelled, tag="engine", tag_field="kind"):
    """A model that the built-in engine runs. Limits that are not set are those of the model or the machine.

    Raises `ConfigError`.
    """

    kind: ClassVar[ModelKind] = "engine"
    unlisted: ClassVar = False

    path: Path
    """The model's folder, in Hugging Face's layout, its GGUF file, or its name on the hub: organization/name,
    or organization/name:Q4_K_M. A relative path begins at the folder of the configuration file."""
    name: str
    aliases: tuple[str, ...] = ()
    """Other names for it in requests."""
    device: Annotated[str, Meta(pattern=f"^({DEVICE})$")] = "auto"
    """The device that the model runs on: auto, cpu, cuda or cuda:N."""
    parallel: Annotated[int, Meta(ge=1, le=MOST_RANKS)] = 1
    """Number of processes that compute it together, each with a part of its weights and of its KV cache. On
    GPUs each has one of its own: the one that device names, and those after it."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """The data type of its weights and of its KV cache."""
    quantization: Literal["fp8", "int8", "int4"] | None = None
    """Keep the weights in fewer bits: fp8 on a Hopper GPU, int8 or int4 on a CPU."""
    slots: AtLeastOne | None = None
    """Maximum number of concurrent sequences: its seats. Default: 8 on a CPU; on a GPU by its cache."""
    max_batch: AtLeastOne | None = None
    """Maximum number of sequences in one step; at most slots."""
    max_batched_tokens: AtLeastOne | None = None
    """Maximum number of tokens in one step; longer prompts take several. Default: 512 (CPU) or 2048 (GPU)."""
    target_step_s: SecondsOrNone | None = None
    """How long a step should take that has running answers, or while several tenants send requests. It has
    as many tokens of prompts as fit by the measured cost, at least a block of 16. Where the answers alone
    take longer, prompts add at most half of that. While several tenants send requests, a step of a quick
    model is shorter: ten times as long as without prompts. 0: as many as maxBatchedTokens. Default: 50ms on a
    CPU, 25ms on a GPU."""
    max_input_tokens: AtLeastOne | None = None
    """Maximum length of a prompt, in tokens."""
    max_output_tokens: AtLeastOne | None = None
    """Maximum length of an answer, in tokens."""
    max_model_len: Annotated[int, Meta(ge=2)] | None = None  # one token each of prompt and answer
    """Maximum length of prompt and answer together, in tokens. Default: the model's own limit, which YaRN and
    linear scaling extend. Of a model with dynamic scaling that is the trained length; a greater value, up to
    the scaling's factor, gives all its texts the frequencies of that length.
    """
    special_tokens: SpecialTokens = "text"
    """How control tokens (`<|im_end|>`, `</s>`) in a client's messages, tools and chat_template_kwargs are
    treated. text: they remain text. parse: they become those tokens, with which a client can end its message
    and begin one of another role. The template's own are always parsed, and so are `<think>`, `<tool_call>`
    and others that appear in answers. Raw prompts are parsed unless a request says otherwise.
    """
    close_at_limit: bool | None = None
    """Whether an answer with a schema, a grammar or calls that nears its limit of tokens is closed, if the
    rest of it fits, so that it fits its schema. Default: only the demonstration model's."""
    wire_format: ConfiguredFormat = None
    """How its answers mark reasoning and tool calls: a known format or, in a file, a record in the vocabulary
    of Hugging Face's response_template. Default: its own response_template, or else the known format that
    its chat template uses; if that ignores tools or has no known tool calls, json, which a system message
    explains."""
    kv_cache: KvCacheConfig = KvCacheConfig()
    speculation: SpeculationConfig | None = None
    """Several tokens a step for answers that repeat their prompt. Default: off. With it, steps on a GPU do
    not overlap, and rounding there may change an answer, as a batch of another size does."""
    gpu_memory: Annotated[float, Meta(gt=0)] | None = None
    """Its budget of GPU memory, for weights and cache together: a fraction of the total up to 1, such as 0.9,
    or MiB; with parallel, of each of its GPUs. Default: the free memory. No effect on a CPU."""
    watchdog_s: Seconds = 30.0
    """How long a step may take before the model's process is killed and restarted."""
    threads: AtLeastOne | None = None
    """Number of compute threads, on a CPU; with parallel, of all its processes together."""
    ttl_s: SecondsOrNone = 0.0
    """How long it stays loaded without a job; 0: no limit."""
    memory_mb: AtLeastOne | None = None
    """Its memory use in MiB, for the choice of models to evict: GPU memory if it runs on a GPU, or that of
    each GPU if it runs on several. Default: gpuMemory, or measured."""
    preload: bool = False
    """Whether it is loaded at startup, not for its first job."""
    send_loading_state: bool | None = None
    """Overrides the server's setting of the same name for this model."""
    price: Price | None = None
    """What its tokens cost, for budgets and costs. Default: that of prices."""
    replicas: ReplicasConfig | None = None
    """It runs on the cluster, not on this machine: the path is a folder on each machine there, or a name on
    the hub."""

    @property
    def closes_at_limit(self) -> bool:
        """Whether an answer with a form is closed when it nears its limit of tokens."""
        if self.close_at_limit is None:
            return self.path == demonstration_model()
        return self.close_at_limit

    @property
    def is_on_cluster(self) -> bool:
        """Whether it runs on the cluster, not on this machine."""
        return self.replicas is not None

    @property
    def is_relayed(self) -> bool:
        """Whether its nodes take requests as clients write them."""
        return self.is_on_cluster

    @property
    def dialects(self) -> Dialects:
        """The dialects that the nodes speak to which its jobs are relayed, all of which are Fairleads."""
        return ALL_DIALECTS if self.is_on_cluster else ()

    def __post_init__(self) -> None:
        """Raise `ConfigError` for invalid settings, with the names of a configuration file."""
        refuse_faults(self, "models", self.name)

    def contradictions(self) -> Iterator[Fault]:
        """Yield faults of settings that contradict each other."""
        if self.replicas is not None:
            yield from self._faults_of_replicas(self.replicas)
        if not re.fullmatch(DEVICE, self.device):
            yield Fault(("device",), "must be auto, cpu, cuda or cuda:N")
        if self.wire_format is not None:
            try:
                formats.configured(self.wire_format)
            except ValueError as error:
                yield Fault(("wireFormat",), str(error))
        if self.slots is not None and self.max_batch is not None and self.max_batch > self.slots:
            yield Fault(("maxBatch",), f"must be at most slots, which is {self.slots}")
        if self.gpu_memory is not None and self.device == "cpu":
            yield Fault(("gpuMemory",), "needs a GPU, but device is cpu")
        for part in ("max_input_tokens", "max_output_tokens"):
            value = getattr(self, part)
            if value is not None and self.max_model_len is not None and value >= self.max_model_len:
                yield Fault((spelled(part),), f"must be less than maxModelLen, which is {self.max_model_len}")

    def _faults_of_replicas(self, replicas: ReplicasConfig) -> Iterator[Fault]:
        if self.device.startswith("cuda:"):
            yield Fault(("device",), "must be auto, cpu or cuda with replicas: Ray chooses the GPU")
        if self.device == "cpu" and replicas.gpus:
            yield Fault(("replicas", "gpus"), "must be 0, because device is cpu")
        if self.device == "cuda" and replicas.gpus == 0:
            yield Fault(("replicas", "gpus"), "must be above 0, because device is cuda")


class TimeoutsConfig(msgspec.Struct, frozen=True, rename=spelled):
    """Timeouts of requests to a node; 0: no limit."""

    connect_s: SecondsOrNone = 30.0
    """For a connection to be established."""
    first_byte_s: SecondsOrNone = msgspec.field(default=0.0, name="responseHeader")
    """For the first byte of a response."""
    between_bytes_s: SecondsOrNone = 300.0
    """Between two pieces of a response."""
    idle_s: SecondsOrNone = msgspec.field(default=90.0, name="idleConn")
    """How long an unused connection is kept open."""


class FiltersConfig(msgspec.Struct, frozen=True, rename=spelled):
    """Changes to a request's body before it is sent to a node, in this order. They never change `model`."""

    strip_params: Names = ()
    """Parameters to remove."""
    set_params: dict[str, Any] = {}
    """Parameters to set, with their values."""
    set_params_by_id: dict[str, dict[str, Any]] = msgspec.field(default_factory=dict, name="setParamsByID")
    """Further parameters to set, for each name of the model in requests."""


class CommandConfig(msgspec.Struct, frozen=True, rename=spelled, tag="command", tag_field="kind"):
    """A model that another program serves, which is started when it is needed. Raises `ConfigError`."""

    kind: ClassVar[ModelKind] = "command"
    is_relayed: ClassVar = True

    name: str = msgspec.field(name="id")
    cmd: Command
    """The command line that starts the server, without a shell; ${PORT} is its port, from startPort on, or
    the next one that is free. A command without ${PORT} and without proxy gets its port in the environment
    variable PORT.
    """
    aliases: tuple[str, ...] = ()
    """Other names for it in requests."""
    cmd_stop: Command = ()
    """The command line that stops it, where ${PID} is its process id. Default: it is sent SIGTERM."""
    env: Environment = {}
    """Environment variables, as NAME=value."""
    proxy: str = "http://localhost:5800"
    """The URL of the server, as that of a node."""
    api_key: str | None = None
    """The API key that the server requires, which is sent with every request to it. Default: the key that
    cmd has after --api-key or in the file after --api-key-file, or that LLAMA_API_KEY or VLLM_API_KEY has."""
    check_endpoint: str = "/health"
    """Path of its health check, which answers 200 once it is ready; none: there is no such path."""
    health_check_timeout_s: Seconds = 120.0
    """How long it may take to become ready; at least 15 s."""
    progress_pattern: str | None = None
    """A regular expression that finds the progress of its load in its output. It has one group with a
    percentage, or two with the amount done and the total. Without it the progress is unknown.
    """
    unload_timeout_s: Seconds = 10.0
    """How long it may take to stop before it is killed."""
    ttl_s: SecondsOrNone = 0.0
    """How long it stays loaded without a job; 0: no limit."""
    memory_mb: AtLeastOne | None = None
    """Its memory use in MiB, for the choice of models to evict. Default: measured."""
    preload: bool = False
    """Whether it is loaded at startup, not for its first job."""
    send_loading_state: bool | None = None
    """Overrides the server's setting of the same name for this model."""
    price: Price | None = None
    """What its tokens cost, for budgets and costs. Default: that of prices."""
    concurrency_limit: AtLeastOne = 10
    """Maximum number of concurrent requests: its seats. A request for n answers takes n of them, or all."""
    use_model_name: str | None = None
    """The server's name for the model. Default: the name here."""
    filters: FiltersConfig = FiltersConfig()
    timeouts: TimeoutsConfig = TimeoutsConfig()
    dialects: Dialects = MOST_DIALECTS
    """The dialects that the server speaks: openai, responses, messages, ollama. Requests in others are
    translated to openai."""
    answer_bytes: AtLeastOne = ANSWER_BYTES
    """Maximum size in bytes of a response, or of one event of a streamed response; a larger one fails."""
    unlisted: bool = False
    """Whether it is omitted from the list of models."""
    title: str = msgspec.field(default="", name="name")
    """Display name."""
    description: str = ""
    """Description for users."""
    metadata: dict[str, Any] = {}
    """Further information, shown in the list of models."""
    capabilities: dict[str, Any] = {}
    """Its capabilities, shown in the list of models."""
    port: int | None = None  # which ${PORT} stands for in cmd, cmdStop, env and proxy; None: they have none

    def at_port(self, port: int) -> "CommandConfig":
        """Return it with this port in the place of ${PORT}."""

        def put(text: str) -> str:
            return text.replace(PORT_MACRO, str(port))

        return msgspec.structs.replace(
            self,
            cmd=tuple(map(put, self.cmd)),
            cmd_stop=tuple(map(put, self.cmd_stop)),
            env={name: put(value) for name, value in self.env.items()},
            proxy=put(self.proxy),
            port=port,
        )

    def __post_init__(self) -> None:
        """Raise `ConfigError` for invalid settings, with the names of a configuration file."""
        refuse_faults(self, "models", self.name)

    def contradictions(self) -> Iterator[Fault]:
        """Yield faults of settings with which no server could be started or reached."""
        if not self.cmd:
            yield Fault(("cmd",), "must not be empty")
        if not self.dialects:
            yield Fault(("dialects",), "must be one or more")
        proxy = self.proxy if self.port is None else self.proxy.replace(PORT_MACRO, str(self.port))
        if not is_http_url(proxy):
            yield Fault(("proxy",), f"must be {HTTP_URL}")
        elif (advice := whole_route_advice(self.proxy)) is not None:
            yield Fault(("proxy",), advice)
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable()):
            yield Fault(("apiKey",), "has characters that no header may have")
        if self.check_endpoint != "none" and not self.check_endpoint.startswith("/"):
            yield Fault(("checkEndpoint",), "must be a path that begins with /, or none")
        if self.progress_pattern is not None:
            yield from _faults_of_pattern(self.progress_pattern)
        if any("=" in name or "\0" in name + value for name, value in self.env.items()):
            yield Fault(("env",), "must be names and values that an environment can have")


AnyModelConfig = ModelConfig | CommandConfig


def runs_here(model: AnyModelConfig) -> bool:
    """Return whether a model runs on this machine, not on the cluster."""
    return not (isinstance(model, ModelConfig) and model.is_on_cluster)


# The kinds of models, each by the setting in a file that identifies it.
MODEL_KINDS: dict[str, type[AnyModelConfig]] = {"path": ModelConfig, "cmd": CommandConfig}
# Their fields that no setting of the same name has: the key of the mapping, and the reader's choice.
NO_SETTINGS = ("name", "port")


def _faults_of_pattern(pattern: str) -> Iterator[Fault]:
    try:
        groups = re.compile(pattern).groups
    except re.error as error:
        yield Fault(("progressPattern",), f"is not a regular expression: {error}")
        return
    if groups not in (1, 2):
        yield Fault(("progressPattern",), f"must have one group or two, not {groups}")


def demonstration_model() -> Path:
    """Return the folder of the small model that ships with the package."""
    return Path(str(files("fairlead") / "server" / "demo" / "fairlead-demo"))
