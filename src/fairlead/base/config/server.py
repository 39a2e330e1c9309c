"""Settings of the server as a whole: the queue, limits of requests, and `Config`, which has all settings."""

import re
from collections.abc import Collection, Iterator
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from fairlead.base.config.access import (
    ApiKey,
    CorsConfig,
    FlowControlConfig,
    TeamConfig,
    faults_of_host,
    faults_of_proxies,
    is_loopback,
    read_key,
)
from fairlead.base.config.cluster import ClusterConfig, ReplicasConfig
from fairlead.base.config.fleet import HealthConfig, KeepSwap, NodeConfig, SwapConfig
from fairlead.base.config.lease import LeaseConfig
from fairlead.base.config.link import DispatcherConfig
from fairlead.base.config.models import AnyModelConfig, ModelConfig, runs_here
from fairlead.base.config.selectors import SelectorConfig, faults_of_names
from fairlead.base.config.spelling import (
    AtLeastOne,
    AtLeastZero,
    Fault,
    Seconds,
    SecondsOrNone,
    refuse_faults,
    spelled,
)
from fairlead.base.config.store import NO_STORE, BudgetsConfig, Price
from fairlead.base.config.urls import HTTP_URL, is_http_url

MOST_UPLOADS = 128
"""The most forms on disk at a time: each has a descriptor."""

_HOST_NAME = re.compile(r"[0-9A-Za-z._-]+")


class QueueConfig(msgspec.Struct, frozen=True, rename=spelled):
    """The queue: its limits, its timeouts and its order."""

    capacity: AtLeastZero = 100
    """Maximum number of queued jobs, over all tenants and models; further ones are refused with 429."""
    waiting_bytes: AtLeastOne = 256 * 1024 * 1024
    """Maximum bytes of queued requests for remote servers; further large ones are refused with 429."""
    timeout_s: Seconds = 60.0
    """How long a job may wait for a seat, and a stream for its first token, before it fails with 504."""
    max_estimated_wait_s: SecondsOrNone = 0.0
    """A job with a longer estimated wait is refused with 429 at once; 0: no limit."""
    fairness: Literal["roundRobin", "tokens"] = "roundRobin"
    """What tenants get equal shares of: turns or tokens."""
    estimate: Literal["mean", "quantile"] = "quantile"
    """How waits are estimated: from the mean service time, or (quantile) from predicted lengths, with a 90 %
    bound."""
    keep_alive_s: SecondsOrNone = 15.0
    """How long a stream is queued before its response begins, and reports its queue position. Also how long
    a stream is silent at most: then it gets a comment, a ping or an empty part, which clients skip. 0: never.
    """
    classes: tuple[str, ...] = ("high", "normal", "low")
    """Names of the priority classes, the highest first."""
    min_share: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """Minimum share (0 to 1) of job starts for each lower class that has queued jobs."""
    prompt_weight: Annotated[float, Meta(ge=0)] = 1.0
    """Cost of a prompt token, with fairness: tokens."""
    output_weight: Annotated[float, Meta(ge=0)] = 2.0
    """Cost of an output token, with fairness: tokens."""
    preempt: tuple[str, ...] = ()
    """Classes whose jobs do not wait for running answers of lower classes: these pause."""
    suspension: bool = True
    """Whether running answers pause for tenants that have fewer seats than their share, and of classes in
    `preempt`. Where answers cannot pause, seats are kept for such tenants.
    """
    quantum_s: Seconds = 1.0
    """How long an answer runs at least before it pauses, unless it has generated `quantumTokens`. How long a
    seat is kept.
    """
    quantum_tokens: AtLeastOne = 32
    """How many tokens an answer generates at least before it pauses, unless it has run for `quantum`."""
    tenant_weights: dict[str, Annotated[float, Meta(gt=0)]] = {}
    """Weights of tenants, with fairness: tokens. A tenant with weight 2 gets twice as much; 1 by default."""
    starvation_bound_s: Seconds = 60.0
    """How long a job may be queued because of later jobs for models that are already loaded."""

    @property
    def default_class(self) -> int:
        """The index of the class of jobs that request none: the middle one, of an even number the lower."""
        return len(self.classes) // 2

    def contradictions(self) -> Iterator[Fault]:
        """Yield faults of settings that contradict each other."""
        if not self.classes or len(set(self.classes)) < len(self.classes):
            yield Fault(("classes",), "must be one name or more, all different")
        for index, name in enumerate(self.preempt):
            if name not in self.classes:
                yield Fault(("preempt", index), f"must be one of {', '.join(self.classes)}")
        if self.prompt_weight == self.output_weight == 0:
            yield Fault(("outputWeight",), "must not be 0 when promptWeight is")


class Limits(msgspec.Struct, frozen=True, rename=spelled):
    """Limits of requests and connections."""

    body_bytes: AtLeastOne = 16 * 1024 * 1024
    """Maximum size of a request's body, in bytes."""
    body_values: AtLeastOne = 128 * 1024
    """Maximum number of JSON values in a body, at any depth; a number with a fraction counts as four. The
    numbers in `prompt`, `input` and `tokens` are not counted.
    """
    request_tokens: AtLeastOne = 1024 * 1024
    """Maximum number of tokens in all prompts or texts of a request together."""
    bodies_bytes: AtLeastOne = 256 * 1024 * 1024
    """Maximum size in bytes of all bodies in memory, of all clients. When it is exceeded, the newest
    request of the tenant with the most is refused with 429.
    """
    answers_bytes: AtLeastOne = 256 * 1024 * 1024
    """Maximum size in bytes of all answers that wait for their clients to read them. When it is exceeded,
    the tenant with the most loses the answers whose clients have not read for the longest time: their
    connections are closed.
    """
    upload_bytes: AtLeastOne = 256 * 1024 * 1024
    """Maximum size of a form with files, such as sound to transcribe, in bytes. It is kept in a file, not in
    memory.
    """
    uploads_bytes: AtLeastOne = 2 * 1024 * 1024 * 1024
    """Maximum size in bytes of all forms on disk, of all clients. Each counts as 1/128 of it at least. When
    it is exceeded, the newest request of the tenant with the most is refused with 429.
    """
    header_bytes: AtLeastOne = 64 * 1024
    """Maximum size of a request's headers, in bytes."""
    headers: AtLeastOne = 100
    """Maximum number of a request's headers."""
    connections: AtLeastOne = 4096
    """Maximum number of connections at a time, of all clients."""
    body_timeout_s: Seconds = 60.0
    """How long a body may take to arrive."""
    upload_timeout_s: Seconds = 600.0
    """How long a form with files may take to arrive."""
    header_timeout_s: Seconds = 20.0
    """How long the headers may take to arrive."""
    idle_timeout_s: Seconds = 75.0
    """How long a connection may stay open without a request."""
    stall_s: Seconds = 30.0
    """How long a client may stop reading the response, or sending the request."""
    drain_s: SecondsOrNone = 30.0
    """How long running jobs may take to finish when the server is stopped."""
    drain_delay_s: SecondsOrNone = 0.0
    """How long a server that is stopped still takes requests, while `/ready` is 503, so that load balancers
    notice. Then it refuses jobs, but answers probes and `/metrics` to its end. 0: it closes its port at once.
    """
    grammar_timeout_s: Seconds = 2.0
    """How much processor time it may take to compile an answer's schema or grammar. If it takes more, the
    request is refused with 400; a tool that is not strict is relaxed instead.
    """
    sequences: AtLeastOne = 64
    """Maximum number of answers of one request: prompts times n."""


class ResponsesConfig(msgspec.Struct, frozen=True, rename=spelled):
    """What is kept of the responses of `/v1/responses`, each for its own key: in memory, or in the store."""

    store: bool = True
    """Whether responses are kept, so that clients can read, continue and cancel them. If not, `store` in a
    request has no effect, and `previous_response_id` and `background` are refused.
    """
    max_bytes: AtLeastOne = 64 * 1024 * 1024
    """Maximum size in bytes of all kept responses. When it is exceeded, the tenant with the most loses its
    oldest ones.
    """
    ttl_s: Seconds = 3600.0
    """How long a response is kept after its end, or after the last request that continued it."""
    in_store: bool = False
    """Whether responses are kept in the store (`store`). They survive a restart then, and all fronts have
    them. With several fronts responses are kept only so. Fronts on other machines need PostgreSQL.
    """
    store_bytes: AtLeastOne = 1024 * 1024 * 1024
    """Maximum size in bytes of all kept responses in the store, as `maxBytes` in memory."""


class BatchesConfig(msgspec.Struct, frozen=True, rename=spelled):
    """OpenAI's Files and Batch API: files on disk, and requests that run in seats that nothing else needs."""

    folder: str | None = None
    """The folder of files, batches and their results, which is made if it is absent. Fronts on several
    machines must share it. Without it, `/v1/files` and `/v1/batches` are refused.
    """
    tenant_bytes: AtLeastOne = 1024 * 1024 * 1024
    """Maximum size in bytes of the files and results of one tenant; further files are refused with 413. Each
    counts as 4,096 bytes at least.
    """
    lines: AtLeastOne = 50_000
    """Maximum number of requests in a batch."""
    keep_days: AtLeastOne = 30
    """How many days files, results and ended batches are kept."""


# Files of a web page. A browser that requests them for an open page must not load a model.
_STATIC_FILES = r".*\.(js|json|css|png|gif|jpg|jpeg|ico|txt)$"


class UpstreamConfig(msgspec.Struct, frozen=True, rename=spelled):
    """Settings of requests below /upstream/MODEL/, which are forwarded to the model's own server."""

    ignore_paths: tuple[str, ...] = ()
    """Regular expressions, searched in the path after the model's name. A request with a match does not load
    the model; if it is not loaded, the answer is 409. Default: common files of web pages.
    """

    @property
    def patterns(self) -> tuple[str, ...]:
        """The expressions in effect."""
        return self.ignore_paths or (_STATIC_FILES,)

    def contradictions(self) -> Iterator[Fault]:
        """Yield faults of invalid regular expressions."""
        for index, pattern in enumerate(self.ignore_paths):
            try:
                re.compile(pattern)
            except re.error as error:
                yield Fault(("ignorePaths", index), f"is not a regular expression: {error}")


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True, rename=spelled):
    """All settings except the models, in the form of a configuration file. Raises `ConfigError`."""

    host: str = "127.0.0.1"
    """The address to listen on; `::`: all addresses of IPv6 and IPv4; unix:PATH: a Unix socket, without a
    port.
    """
    allowed_hosts: tuple[str, ...] = ()
    """Further names by which clients reach it, such as those of a reverse proxy, a container, or the machine
    on its network (ai, ai.local); without a port. Requests to other names are refused without API keys,
    because a web page could have made them; by addresses and localhost it can always be reached.
    """
    trusted_proxies: tuple[str, ...] = ()
    """Reverse proxies whose `X-Forwarded-For` or `Forwarded` names the client: addresses, networks such as
    10.0.0.0/8, or unix for a unix socket. Each must append its client's address, and remove the header
    that it does not append to.
    """
    cors: CorsConfig = CorsConfig()
    port: Annotated[int, Meta(ge=0, le=65535)] = 8000
    """The port to listen on; 0 picks a free one."""
    fronts: AtLeastOne = 1
    """Number of processes that serve HTTP on the port; 1: a single process does everything. With more, a
    dispatcher and the models run in processes of their own, and responses of `/v1/responses` are kept only
    with `responses.inStore`.
    """
    dispatcher: DispatcherConfig = DispatcherConfig()
    lease: LeaseConfig | None = None
    """How one of several dispatchers becomes the leader; without it, there may be only one."""
    cluster: ClusterConfig | None = None
    """The cluster of machines on which models with `replicas` run."""
    api_keys: tuple[Annotated[ApiKey, Meta(extra={"read": read_key})], ...] = ()
    """Keys, of which clients must send one, each as text or as a mapping; empty: no key is needed."""
    store: str | None = None
    """Where usage and further API keys are kept: the path of a SQLite file, postgresql://USER@HOST/NAME, or
    none. Default of `fairlead serve`: ~/.local/share/fairlead/fairlead.db.
    """
    usage_days: Annotated[int, Meta(ge=1, le=36500)] = 400
    """How many days usage is kept."""
    budgets: BudgetsConfig = BudgetsConfig()
    prices: dict[str, Price] = {}
    """Prices by model: those of other servers, and of models here without `price`."""
    teams: dict[str, TeamConfig] = {}
    """Teams by name. In the queue they take turns with each other, and with tenants without a team; the
    tenants of a team share its turns.
    """
    flow_control: FlowControlConfig = FlowControlConfig()
    queue: QueueConfig = QueueConfig()
    limits: Limits = Limits()
    responses: ResponsesConfig = ResponsesConfig()
    batches: BatchesConfig = BatchesConfig()
    upstream: UpstreamConfig = UpstreamConfig()
    request_timeout_s: Seconds = 600.0
    """How long a job may run, from its seat to its last token, before it fails with 408."""
    log_json: bool = False
    """Whether the log is JSON, one object per line."""
    log_level: Literal["debug", "info", "warn", "error"] = "info"
    """The lowest severity that is logged."""
    tenant_names: Literal["hashed", "plain"] = "hashed"
    """How tenants are shown in logs, metrics and traces."""
    otlp_endpoint: str | None = None
    """URL of an OpenTelemetry collector, such as http://localhost:4318, for traces and metrics. Needs the
    extra otel.
    """
    nodes: tuple[NodeConfig, ...] = ()
    """Remote servers that jobs can be sent to."""
    selectors: dict[str, SelectorConfig] = {}
    """Names that stand for several models each."""
    health_check: HealthConfig = HealthConfig()
    scheduler: str = "default"
    """The scheduler, which decides where jobs run and which models are loaded. It is default, or the name of
    an entry point in the group `fairlead.schedulers` of an installed package.
    """
    while_loading: Literal["wait", "reject"] = "wait"
    """Whether a job for a model that is not loaded is queued, or refused with 503 while the model loads."""
    send_loading_state: bool = False
    """Whether a streamed chat completion reports the progress of its model's load as reasoning content."""
    include_aliases_in_list: bool = False
    """Whether GET /v1/models lists aliases as models of their own."""

    def __post_init__(self) -> None:
        """Raise `ConfigError` for invalid settings, with the names of a configuration file."""
        refuse_faults(self)

    @property
    def has_store(self) -> bool:
        """Whether usage and further keys are kept."""
        return self.store not in (None, NO_STORE)

    @property
    def has_several_tenants(self) -> bool:
        """Whether requests may come from several tenants, as far as the settings tell.

        A single key that is not trusted is one tenant. Without keys, a server that only its own machine can
        reach is taken for one person's, unless the settings name a proxy, or other names of the server.
        """
        if self.flow_control.trusted_addresses or any(key.trusted for key in self.api_keys):
            return True
        if self.api_keys and self.has_store:  # which may have further keys
            return True
        if not self.api_keys:
            has_proxy = bool(self.allowed_hosts or self.trusted_proxies)
            return has_proxy or not is_loopback(self.host)
        return len({key.user or key.digest for key in self.api_keys}) > 1

    def contradictions(self) -> Iterator[Fault]:
        """Yield faults of settings that contradict each other."""
        yield from faults_of_host(self.host)
        if self.otlp_endpoint is not None and not is_http_url(self.otlp_endpoint):
            yield Fault(("otlpEndpoint",), f"must be {HTTP_URL}")
        for index, name in enumerate(self.allowed_hosts):
            if _HOST_NAME.fullmatch(name) is None:
                yield Fault(("allowedHosts", index), "must be a name without scheme, port and path")
        yield from faults_of_proxies(self.trusted_proxies)
        classes = self.queue.classes
        for index, api_key in enumerate(self.api_keys):
            if api_key.priority is not None and api_key.priority not in classes:
                yield Fault(("apiKeys", index, "priority"), f"must be one of {', '.join(classes)}")
        yield from _faults_of_teams(self.teams, self.api_keys)
        for objective, name in self.flow_control.objectives.items():
            if name not in classes:
                yield Fault(("flowControl", "objectives", objective), f"must be one of {', '.join(classes)}")
        yield from _twice(
            (("apiKeys", i, "hash" if api_key.hash else "key"), api_key.digest.hex())
            for i, api_key in enumerate(self.api_keys)
        )
        yield from _twice((("nodes", i, "id"), node.id) for i, node in enumerate(self.nodes))
        if self.responses.in_store and self.store == NO_STORE:
            yield Fault(("responses", "inStore"), "needs a store, and `store` is none")


class Config(ServerConfig, frozen=True, kw_only=True, rename=spelled):
    """All settings of `fairlead serve`. `swap`: which models are evicted for which.

    `priorities`: of the models to load, those with a higher number are loaded first; 0 by default.
    """

    models: tuple[AnyModelConfig, ...]
    swap: SwapConfig = KeepSwap()
    priorities: dict[str, int] = {}

    def price_of(self, model: str, *, is_batch: bool = False) -> Price | None:
        """Return the price of a model, by its canonical name, or that of batches; None: it has none."""
        own = next((each.price for each in self.models if each.name == model), None)
        price = own or self.prices.get(model)
        return price.of_batch() if price is not None and is_batch else price

    @property
    def local_models(self) -> tuple[AnyModelConfig, ...]:
        """The models that run on this machine."""
        return tuple(filter(runs_here, self.models))

    @property
    def cluster_models(self) -> dict[str, tuple[ModelConfig, ReplicasConfig]]:
        """The models that run on the cluster, by name, each with the settings of its replicas."""
        return {
            model.name: (model, model.replicas)
            for model in self.models
            if isinstance(model, ModelConfig) and model.replicas is not None
        }

    def contradictions(self) -> Iterator[Fault]:
        """Yield faults of settings that contradict each other, also among the models."""
        yield from ServerConfig.contradictions(self)
        yield from _twice((("models", model.name), model.name) for model in self.models)
        for model in self.models:
            if self.cluster is None and not runs_here(model):
                yield Fault(("models", model.name, "replicas"), "needs cluster, which says where they run")
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
        names.update(owners, *(node.models or () for node in self.nodes))
        yield from (fault.under("selectors") for fault in faults_of_names(self.selectors, names))


def _faults_of_teams(teams: Collection[str], api_keys: tuple[ApiKey, ...]) -> Iterator[Fault]:
    """Yield faults of names of teams, of unknown teams, and of keys of one user, a tenant, with several."""
    for name in teams:
        if not name or not name.isprintable():
            yield Fault(("teams", name), "must be a name of printable characters")
    of_user: dict[str, str | None] = {}
    for index, api_key in enumerate(api_keys):
        # Without any teams here, the name is for usage and budgets only.
        if teams and api_key.team is not None and api_key.team not in teams:
            yield Fault(("apiKeys", index, "team"), f"must be one of the teams ({', '.join(teams)})")
        if api_key.user is not None and of_user.setdefault(api_key.user, api_key.team) != api_key.team:
            yield Fault(
                ("apiKeys", index, "team"), f"must be the same for all keys of the user {api_key.user}"
            )


def _twice(found: Iterator[tuple[tuple[str | int, ...], str]]) -> Iterator[Fault]:
    """Yield a fault for each duplicate, without its value, which may be a secret."""
    seen: set[str] = set()
    for path, name in found:
        if name in seen:
            yield Fault(path, "is given twice")
        seen.add(name)
