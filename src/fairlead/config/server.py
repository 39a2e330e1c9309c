"""What the server as a whole is told: who may use it, who waits how long, what one client can hold."""

import ipaddress
import re
from collections.abc import Iterator
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from fairlead.config.fleet import HealthConfig, KeepSwap, NodeConfig, SwapConfig
from fairlead.config.models import HTTP_URL, CommandConfig, ModelConfig, is_http_url
from fairlead.config.selectors import SelectorConfig, faults_of_names
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

_ORIGIN = re.compile(r"([a-z][a-z0-9+.-]*)://[^\s/?#@*\\A-Z]+")
_ORIGIN_FORM = "an origin as browsers send it: scheme, name and port in small letters, without the usual port"
_USUAL_PORTS = {"http": ":80", "https": ":443"}
_HOST_NAME = re.compile(r"[0-9A-Za-z._-]+")


class KeyLimits(msgspec.Struct, frozen=True, rename=spelled):
    """What one API key may use; None: as much as it wants."""

    requests_per_minute: AtLeastOne | None = None
    """Requests in any minute."""
    tokens_per_minute: AtLeastOne | None = None
    """Tokens in any minute, of prompts and answers together."""
    concurrent: AtLeastOne | None = None
    """Jobs at a time, waiting or running."""


class ApiKey(msgspec.Struct, frozen=True, rename=spelled):
    """A key, whose it is and what it may do."""

    key: str
    """What a client sends, as `Authorization: Bearer KEY`."""
    user: str | None = None
    """Whose it is: the tenant. By default each key is a tenant of its own."""
    trusted: bool = False
    """Whether it may speak for other users, in X-OpenWebUI-User-Id or the field user."""
    priority: str | None = None
    """The highest class that it may ask for; by default the default class."""
    models: tuple[str, ...] = ()
    """The models that it may use, and sees in /nodes, /running, /events and /metrics; none named: all."""
    limits: KeyLimits = KeyLimits()

    def contradictions(self) -> Iterator[Fault]:
        """Say what no client could send."""
        if not self.key or any(letter.isspace() for letter in self.key):
            yield Fault(("key",), "must not be empty, and have no spaces")


class QueueConfig(msgspec.Struct, frozen=True, rename=spelled):
    """Who waits, for how long, and in which order."""

    capacity: AtLeastNone = 100
    """Jobs that may wait, over all tenants and models; the next one is answered 429."""
    waiting_bytes: AtLeastOne = 256 * 1024 * 1024
    """Bytes of the requests that wait to be passed on elsewhere; the next large one is answered 429."""
    timeout_s: Seconds = 60.0
    """How long a job may wait for a seat, and a stream for its first token, before it is answered 504."""
    max_estimated_wait_s: SecondsOrNone = 0.0
    """A job that would wait longer than this, by the estimate, is answered 429 at once; 0: it may wait."""
    fairness: Literal["roundRobin", "tokens"] = "roundRobin"
    """What tenants get equal shares of: turns, or tokens."""
    estimate: Literal["mean", "quantile"] = "quantile"
    """How waits are estimated: from the mean service time, or from predicted lengths, with a 90 % bound."""
    keep_alive_s: SecondsOrNone = 15.0
    """After so much waiting a stream is answered, and told its place now and then; 0: never."""
    classes: tuple[str, ...] = ("high", "normal", "low")
    """Names of the classes of priority, the first to be served first."""
    min_share: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """The part of all grants (0 to 1) that a lower class is sure of while it waits."""
    prompt_weight: Annotated[float, Meta(ge=0)] = 1.0
    """What a token of a prompt counts, where tokens are shared."""
    output_weight: Annotated[float, Meta(ge=0)] = 2.0
    """What a token of an answer counts there."""
    tenant_weights: dict[str, Annotated[float, Meta(gt=0)]] = {}
    """Tenants that get more than others there, or less: one with weight 2 gets twice as much."""
    starvation_bound_s: Seconds = 60.0
    """No job waits longer than this because of later ones for models that are loaded."""

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


class CorsConfig(msgspec.Struct, frozen=True, rename=spelled):
    """Which web pages of other servers may use the API from a browser."""

    origins: tuple[str, ...] = ()
    """The pages' origins, as https://chat.example.com; "*": any page. Routes that load and unload models,
    show their logs, or show and change nodes stay closed to them.
    """

    def contradictions(self) -> Iterator[Fault]:
        """Say what no browser could send."""
        for index, origin in enumerate(self.origins):
            if origin != "*" and not _is_origin(origin):
                yield Fault(("origins", index), f'must be "*" or {_ORIGIN_FORM}')


class Limits(msgspec.Struct, frozen=True, rename=spelled):
    """What one client can make us hold."""

    body_bytes: AtLeastOne = 16 * 1024 * 1024
    """Bytes of a request's body."""
    body_values: AtLeastOne = 128 * 1024
    """JSON values in a body, however deep; a number with a fraction counts as four. Not counted are the
    numbers in `prompt`, `input` and `tokens`.
    """
    request_tokens: AtLeastOne = 1024 * 1024
    """Tokens in all prompts or texts of a request together."""
    bodies_bytes: AtLeastOne = 256 * 1024 * 1024
    """Bytes of all bodies in memory, of all clients. When they are more, the tenant with most of them is
    answered 429.
    """
    header_bytes: AtLeastOne = 64 * 1024
    """Bytes of its headers."""
    headers: AtLeastOne = 100
    """How many headers it may have."""
    connections: AtLeastOne = 4096
    """Connections at a time, of all clients."""
    body_timeout_s: Seconds = 60.0
    """How long a body may take to arrive."""
    header_timeout_s: Seconds = 20.0
    """How long the headers may take to arrive."""
    idle_timeout_s: Seconds = 75.0
    """How long a connection may stay open without a request."""
    stall_s: Seconds = 30.0
    """How long a client may not read, or not send, its part."""
    drain_s: SecondsOrNone = 30.0
    """How long running jobs are given when the server is told to stop."""
    sequences: AtLeastOne = 64
    """Answers that one request may ask for."""


# Files of a page: a browser that has one open does not load a model with them.
_STATIC_FILES = r".*\.(js|json|css|png|gif|jpg|jpeg|ico|txt)$"


class UpstreamConfig(msgspec.Struct, frozen=True, rename=spelled):
    """What holds for requests below /upstream/MODEL/, which go to the model's own server."""

    ignore_paths: tuple[str, ...] = ()
    """Regular expressions: a request to a path behind the model's name in which one of them is found does not
    load the model, but is answered 409. By default common files of web pages are ignored.
    """

    @property
    def patterns(self) -> tuple[str, ...]:
        """The expressions that hold."""
        return self.ignore_paths or (_STATIC_FILES,)

    def contradictions(self) -> Iterator[Fault]:
        """Say what is no regular expression."""
        for index, pattern in enumerate(self.ignore_paths):
            try:
                re.compile(pattern)
            except re.error as error:
                yield Fault(("ignorePaths", index), f"is no regular expression: {error}")


def read_key(said: object) -> object:
    """Return a key as an object, which may be given as nothing but its text."""
    return {"key": said} if isinstance(said, str) else said


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True, rename=spelled):
    """All but the models, as a file says it too. Raises `ConfigError`."""

    host: str = "127.0.0.1"
    """The address to listen on."""
    allowed_hosts: tuple[str, ...] = ()
    """Names besides its own that clients may call it by, as those of a proxy before it; without a port.
    Without API keys, requests to any other name that a public server could have are refused.
    """
    cors: CorsConfig = CorsConfig()
    port: Annotated[int, Meta(ge=0, le=65535)] = 8000
    """The port to listen on; 0 takes a free one."""
    api_keys: tuple[Annotated[ApiKey, Meta(extra={"read": read_key})], ...] = ()
    """Keys that clients must send, each as text or as a mapping; none: everybody may call."""
    queue: QueueConfig = QueueConfig()
    limits: Limits = Limits()
    upstream: UpstreamConfig = UpstreamConfig()
    request_timeout_s: Seconds = 600.0
    """How long a job may run, from its seat to its last token, before it is answered 408."""
    log_json: bool = False
    """Whether the log is JSON, one object a line."""
    log_level: Literal["debug", "info", "warn", "error"] = "info"
    """What is logged: this and what is worse."""
    tenant_names: Literal["hashed", "plain"] = "hashed"
    """How tenants are shown in logs, metrics and traces."""
    otlp_endpoint: str | None = None
    """Where OpenTelemetry's collector listens, as http://localhost:4318: traces and metrics go there. Needs
    the extra otel.
    """
    nodes: tuple[NodeConfig, ...] = ()
    """Servers elsewhere that jobs can go to."""
    selectors: dict[str, SelectorConfig] = {}
    """Names that stand for several models each."""
    health_check: HealthConfig = HealthConfig()
    scheduler: str = "default"
    """What decides which job runs where and which models are loaded: default, or the name of an entry point
    `fairlead.schedulers` of an installed package.
    """
    while_loading: Literal["wait", "reject"] = "wait"
    """Whether a job for a model that is not loaded waits, or is rejected with 503 while it is loaded."""
    send_loading_state: bool = False
    """Whether a streamed chat completion reports the progress of its model's load as reasoning content."""
    include_aliases_in_list: bool = False
    """Whether GET /v1/models lists aliases as models of their own."""

    def __post_init__(self) -> None:
        """Check each setting, and what depends on two at once; in the configuration's names."""
        refuse_faults(self)

    def contradictions(self) -> Iterator[Fault]:
        """Say what cannot be together."""
        if not self.host.strip():
            yield Fault(("host",), "must not be empty")
        if self.otlp_endpoint is not None and not is_http_url(self.otlp_endpoint):
            yield Fault(("otlpEndpoint",), f"must be {HTTP_URL}")
        for index, name in enumerate(self.allowed_hosts):
            if _HOST_NAME.fullmatch(name) is None:
                yield Fault(("allowedHosts", index), "must be a name without scheme, port and path")
        classes = self.queue.classes
        for index, api_key in enumerate(self.api_keys):
            if api_key.priority is not None and api_key.priority not in classes:
                yield Fault(("apiKeys", index, "priority"), f"must be one of {', '.join(classes)}")
        yield from _twice((("apiKeys", i, "key"), api_key.key) for i, api_key in enumerate(self.api_keys))
        yield from _twice((("nodes", i, "id"), node.id) for i, node in enumerate(self.nodes))


class Config(ServerConfig, frozen=True, kw_only=True, rename=spelled):
    """Everything `fairlead serve` needs to know. `swap`: which models make room for which.

    `priorities`: of models that are wanted, those with the higher number are loaded first; 0 by default.
    """

    models: tuple[AnyModelConfig, ...]
    swap: SwapConfig = KeepSwap()
    priorities: dict[str, int] = {}

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
        names.update(owners, *(node.models or () for node in self.nodes))
        yield from (fault.under("selectors") for fault in faults_of_names(self.selectors, names))


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server that listens on `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _is_origin(text: str) -> bool:
    match = _ORIGIN.fullmatch(text)
    return match is not None and not text.endswith(_USUAL_PORTS.get(match[1], "/"))


def _twice(found: Iterator[tuple[tuple[str | int, ...], str]]) -> Iterator[Fault]:
    """Say what is there a second time, without showing it: it may be a secret."""
    seen: set[str] = set()
    for path, name in found:
        if name in seen:
            yield Fault(path, "is given twice")
        seen.add(name)
