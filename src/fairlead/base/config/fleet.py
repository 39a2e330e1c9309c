"""Settings of remote nodes, and of which models may be loaded at the same time."""

import re
import ssl
from collections.abc import Iterator
from typing import Any

import msgspec

from fairlead.base.config.models import ANSWER_BYTES, MOST_DIALECTS, Dialects, FiltersConfig, TimeoutsConfig
from fairlead.base.config.spelling import AtLeastOne, Fault, Seconds, refuse_faults, spelled
from fairlead.base.config.urls import HTTP_URL, is_api_path, is_http_url, whole_route_advice

_PATH = re.compile(r"/[!-~]*")
MAX_ID_LENGTH = 128
DNS_SCHEME = "dns+"
LONGEST_ADDRESS = len("-ffff:ffff:ffff:ffff:ffff:ffff:255.255.255.255")

_OF_PROBES = frozenset({"check_endpoint", "health_check"})


class NodeConfig(msgspec.Struct, frozen=True, rename=spelled):
    """A remote server with an OpenAI-compatible API. Raises `ConfigError`."""

    id: str
    """Its name on this server."""
    url: str
    """Its URL, with or without /v1, or the root of its API, such as https://api.z.ai/api/paas/v4. A query is
    sent with every request, and not shown. With dns+http://NAME:PORT each address of the name is a node,
    `ID-ADDRESS`; they are looked up every 5 s."""
    api_key: str | None = None
    """The API key that is sent to it, as `Authorization: Bearer KEY`, and as `x-api-key` if it speaks
    messages."""
    seats: AtLeastOne = 1
    """Maximum number of sequences that it runs at a time; a job of n takes n seats, or all. With 1, a
    Fairlead server runs as many as it reports.
    """
    models: tuple[str, ...] | None = None
    """The models it is used for, by their names in requests. Default: the list that it reports."""
    model_names: dict[str, str] = {}
    """Its own names for some models, by their names in requests."""
    filters: FiltersConfig = FiltersConfig()
    timeouts: TimeoutsConfig = TimeoutsConfig()
    dialects: Dialects = MOST_DIALECTS
    """The dialects that it speaks: openai, responses, messages, ollama. Requests in others are translated to
    openai. A Fairlead server speaks all."""
    answer_bytes: AtLeastOne = ANSWER_BYTES
    """Maximum size in bytes of a response, or of one event of a streamed response; a larger one fails."""
    api_path: str | None = None
    """The path of its API behind the URL, in the place of /v1; /: none. Default: /v1, but none if the URL
    ends in a version (/v4), in /openai behind one, or in a deployment of Azure."""

    check_endpoint: str | None = None
    """Path of its probes, which answers 200; none: it is not probed. Default: /v1/models, or /health where
    that does not exist."""
    health_check: "HealthConfig | None" = None
    """Its own health check. Default: healthCheck of the server."""
    ca_file: str | None = None
    """A file in PEM with the certificates of the authorities that may have signed its own. Default: those of
    the system, or of SSL_CERT_FILE."""

    def __post_init__(self) -> None:
        """Raise `ConfigError` for invalid settings, with the names of a configuration file."""
        refuse_faults(self, "nodes", self.id)

    @property
    def relaying(self) -> tuple[object, ...]:
        """All settings except those for probes, which may change while it runs."""
        return tuple(getattr(self, name) for name in self.__struct_fields__ if name not in _OF_PROBES)

    @property
    def is_discovered(self) -> bool:
        """Whether it stands for the nodes at all addresses of a name."""
        return self.url.startswith(DNS_SCHEME)

    def contradictions(self) -> Iterator[Fault]:
        """Yield faults of settings with which no server could be reached."""
        if not self.id.strip() or not self.id.isprintable() or len(self.id) > MAX_ID_LENGTH:
            # It is part of paths, log lines and metric labels.
            yield Fault(("id",), f"must be 1 to {MAX_ID_LENGTH} printable characters")
        if self.is_discovered and len(self.id) + LONGEST_ADDRESS > MAX_ID_LENGTH:
            yield Fault(("id",), f"must be 1 to {MAX_ID_LENGTH - LONGEST_ADDRESS} characters with a dns+ URL")
        yield from self._faults_of_url()
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable()):
            yield Fault(("apiKey",), "has characters that no header may have")
        yield from self._faults_of_probes()
        if not self.dialects:
            yield Fault(("dialects",), "must be one or more")
        if self.models is not None and not self.models:
            yield Fault(("models",), "must be one name or more; omit it to query the node")
        if self.models is not None and not all(name.strip() for name in self.models):
            yield Fault(("models",), "must not have an empty name")

    def _faults_of_probes(self) -> Iterator[Fault]:
        if self.check_endpoint == "none":
            if self.models is None:
                yield Fault(("checkEndpoint",), "may be none only with models: nothing lists them")
        elif self.check_endpoint is not None and not _PATH.fullmatch(self.check_endpoint):
            yield Fault(("checkEndpoint",), "must be a path that begins with /, or none")
        if self.ca_file is not None:
            try:
                ssl.create_default_context().load_verify_locations(self.ca_file)
            except OSError as error:  # ssl.SSLError, too
                yield Fault(("caFile",), f"cannot be used: {error.strerror or error}")

    def _faults_of_url(self) -> Iterator[Fault]:
        url = self.url.removeprefix(DNS_SCHEME)
        if self.is_discovered and not url.startswith("http://"):
            yield Fault(("url",), "must begin with dns+http:// if it is looked up")
        if not is_http_url(url):
            yield Fault(("url",), f"must be {HTTP_URL}; its key goes into apiKey")
        elif (advice := whole_route_advice(url, has_api_path=True)) is not None:
            yield Fault(("url",), advice)
        if self.api_path is not None and not is_api_path(self.api_path):
            yield Fault(("apiPath",), "must be a path that begins with /, without a query")


class HealthConfig(msgspec.Struct, frozen=True, rename=spelled):
    """Health checks of nodes, and of the servers that commands start."""

    interval_s: Seconds = 5.0
    """Probe interval."""
    failures: AtLeastOne = 3
    """Number of consecutive failures, of probes or of connections for requests, after which a node gets no
    more jobs, until a probe succeeds. Failed connections do not count while requests of another tenant are
    served. When as many probes get no answer, its running jobs end, too. A command that fails to answer as
    many probes, and computes nothing meanwhile, is restarted."""
    timeout_s: Seconds = 5.0
    """Probe timeout: no response within this time is a failure."""


class GroupConfig(msgspec.Struct, frozen=True, rename=spelled):
    """A group of models."""

    members: tuple[str, ...] = ()
    """The names of its models."""
    swap: bool = True
    """Whether only one member is loaded at a time."""
    exclusive: bool = True
    """Whether loading a member unloads the members of all other groups, except persistent ones."""
    persistent: bool = False
    """Whether its members are never unloaded for models of other groups."""


class KeepSwap(msgspec.Struct, frozen=True, tag="keep"):
    """No eviction: all models fit at the same time."""


class GroupSwap(msgspec.Struct, frozen=True, tag="group"):
    """Eviction by groups. Models of no group form one of their own: exclusive, one model at a time."""

    groups: dict[str, GroupConfig] = {}

    def contradictions(self) -> Iterator[Fault]:
        """Yield faults of models that are in two groups."""
        seen: set[str] = set()
        for name, group in self.groups.items():
            for index, member in enumerate(group.members):
                if member in seen:
                    yield Fault(("groups", name, "members", index), f"{member} is in a group already")
                seen.add(member)


class MatrixSwap(msgspec.Struct, frozen=True, tag="matrix"):
    """Eviction by expressions of models that may be loaded together (`router/swap/matrix.py`).

    `sets` are the expressions by name, `variables` short names for models in them. `evict_costs` are the
    costs of evicting a running model, by default 1.
    """

    sets: dict[str, str]
    variables: dict[str, str] = msgspec.field(default_factory=dict, name="vars")
    evict_costs: dict[str, AtLeastOne] = {}

    def contradictions(self) -> Iterator[Fault]:
        """Yield a fault if there are no expressions."""
        if not self.sets:
            yield Fault(("sets",), "must be one or more")


class LruSwap(msgspec.Struct, frozen=True, tag="lru", rename=spelled):
    """Eviction of the least recently used models, above these limits. llama-swap has no such policy."""

    max_loaded: AtLeastOne | None = None
    """Maximum number of models that are loaded at the same time."""
    memory_mb: AtLeastOne | None = None
    """Maximum memory in MiB of all loaded models together."""


class NamedSwap(msgspec.Struct, frozen=True, tag="named"):
    """Eviction by the policy of another package: the entry point `policy`, which gets `settings`."""

    policy: str
    settings: dict[str, Any] = {}


SwapConfig = KeepSwap | GroupSwap | MatrixSwap | LruSwap | NamedSwap
