"""The configuration file without its models: our settings, and llama-swap's sections as types.

Defines how settings are spelled and which exclude each other, not what they do (`llama_swap`).
"""

from collections.abc import Iterator
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from fairlead.base.config import (
    Fault,
    FiltersConfig,
    GroupConfig,
    GroupSwap,
    KeepSwap,
    LruSwap,
    MatrixSwap,
    NamedSwap,
    ServerConfig,
    SwapConfig,
    TimeoutsConfig,
)
from fairlead.base.config.spelling import AtLeastOne, Seconds, SecondsOrNone, spelled
from fairlead.base.config.urls import HTTP_URL, is_http_url, whole_route_advice
from fairlead.router.swap.policies import POLICIES

FIRST_BYTE_OF_PEER_S = 60.0  # as in llama-swap


class Peer(msgspec.Struct, frozen=True, rename=spelled):
    """Another server, and the models it is used for."""

    proxy: str
    """Its URL, as that of a node."""
    models: tuple[str, ...]
    """The models it is used for."""
    api_key: str | None = None
    """The API key to send to it, as to a node."""
    seats: AtLeastOne = 10
    """Requests sent to it at the same time. llama-swap has no limit for peers."""
    filters: FiltersConfig = FiltersConfig()
    timeouts: TimeoutsConfig = TimeoutsConfig(first_byte_s=FIRST_BYTE_OF_PEER_S)

    def contradictions(self) -> Iterator[Fault]:
        """Yield a fault for each value with which no server could be reached."""
        if not is_http_url(self.proxy):
            yield Fault(("proxy",), f"must be {HTTP_URL}")
        elif (advice := whole_route_advice(self.proxy)) is not None:
            yield Fault(("proxy",), advice)
        if not self.models:
            yield Fault(("models",), "must be one name or more")


class Startup(msgspec.Struct, frozen=True, rename=spelled):
    """What happens at the start."""

    preload: tuple[str, ...] = ()
    """Models that are loaded at the start."""


class Hooks(msgspec.Struct, frozen=True, rename=spelled):
    """Actions on events."""

    on_startup: Startup = msgspec.field(default=Startup(), name="on_startup")


class Matrix(msgspec.Struct, frozen=True, rename=spelled):
    """Which models may be loaded at the same time."""

    sets: dict[str, str]
    """Expressions by name: each defines which models may run together, as "a & (b | c)"."""
    variables: dict[str, str] = msgspec.field(default_factory=dict, name="vars")
    """Short names for models in `sets`."""
    evict_costs: dict[str, AtLeastOne] = msgspec.field(default_factory=dict, name="evict_costs")
    """The cost of evicting a running model; 1 by default."""


class RouterSettings(msgspec.Struct, frozen=True, rename=spelled):
    """The settings of each eviction policy; only those of the one in use count."""

    groups: dict[str, GroupConfig] = {}
    """As `groups` at the top level."""
    matrix: Matrix | None = None
    """As `matrix` at the top level."""
    lru: LruSwap | None = None
    """As `lru` at the top level."""
    policy: dict[str, Any] = {}
    """The settings of another package's policy."""


class Router(msgspec.Struct, frozen=True, rename=spelled):
    """Which eviction policy is in use; `lru` and `keep` (evict nothing) are not in llama-swap."""

    use: str | None = None
    """The policy in use: group, matrix, lru or keep, or the name of an entry point
    `fairlead.eviction_policies` of an installed package.
    """
    settings: RouterSettings = RouterSettings()


class Fifo(msgspec.Struct, frozen=True, rename=spelled):
    """Which of the requested models are loaded first. Models with a starving job come before all others."""

    priority: dict[str, int] = {}
    """Numbers by model: a higher one is loaded first; 0 by default. They do not affect the order of jobs that
    wait for the same model.
    """


class SchedulerSettings(msgspec.Struct, frozen=True, rename=spelled):
    """The settings of the only scheduler."""

    fifo: Fifo = Fifo()


class LlamaSwapScheduler(msgspec.Struct, frozen=True, rename=spelled):
    """The order in which jobs are served."""

    settings: SchedulerSettings = SchedulerSettings()


class Routing(msgspec.Struct, frozen=True, rename=spelled):
    """How models are evicted for others."""

    router: Router = Router()
    scheduler: LlamaSwapScheduler = LlamaSwapScheduler()


class FileSettings(ServerConfig, frozen=True, kw_only=True, rename=spelled):
    """All settings of a file but its models and macros."""

    start_port: Annotated[int, Meta(ge=1, le=65535)] = 5800
    """The first port for ${PORT} in commands."""
    health_check_timeout_s: Seconds = 120.0
    """How long a command may take to become ready, unless it has its own setting."""
    global_ttl_s: SecondsOrNone = msgspec.field(default=0.0, name="globalTTL")
    """How long a model stays loaded without a job, unless it has its own setting; 0: for ever."""
    unload_timeout_s: SecondsOrNone = 10.0
    """How long a command may take to stop, unless it has its own setting."""
    groups: dict[str, GroupConfig] = msgspec.field(default_factory=dict)
    """Groups of models, by name: the members replace each other. Models of no group form one of their own."""
    matrix: Matrix | None = None
    """Expressions that define which models may run together, instead of groups."""
    lru: LruSwap | None = None
    """Bounds on loaded models or their memory, instead of groups: the least recently used are evicted."""
    routing: Routing = Routing()
    """llama-swap's newer section for the same."""
    hooks: Hooks = Hooks()
    peers: dict[str, Peer] = msgspec.field(default_factory=dict)
    """Remote servers in llama-swap's form, by name; `nodes` has more settings."""

    def choices(self) -> Iterator[tuple[tuple[str, ...], SwapConfig]]:
        """Yield each eviction policy that the file selects, and the path of the setting."""
        router, settings = self.routing.router, self.routing.router.settings
        at = ("routing", "router", "settings")
        if router.use == "keep":
            yield (("routing", "router", "use"), KeepSwap())
        elif router.use not in (None, "group", "matrix", "lru"):
            yield (("routing", "router", "use"), NamedSwap(str(router.use), settings.policy))
        if settings.groups and router.use in (None, "group"):
            yield ((*at, "groups"), GroupSwap(settings.groups))
        elif router.use == "group":
            yield (("routing", "router", "use"), GroupSwap())
        if self.groups:
            yield (("groups",), GroupSwap(self.groups))
        for path, matrix in ((("matrix",), self.matrix), ((*at, "matrix"), settings.matrix)):
            if matrix is not None and (len(path) == 1 or router.use == "matrix"):
                yield (path, MatrixSwap(matrix.sets, matrix.variables, matrix.evict_costs))
        for path, lru in ((("lru",), self.lru), ((*at, "lru"), settings.lru)):
            if lru is not None and (len(path) == 1 or router.use == "lru"):
                yield (path, lru)

    def without_effect(self) -> Iterator[tuple[str, ...]]:
        """Yield the paths of settings for policies that are not in use."""
        at, settings = ("routing", "router", "settings"), self.routing.router.settings
        used = [path for path, _ in self.choices()]
        for name, there in (("groups", settings.groups), ("matrix", settings.matrix), ("lru", settings.lru)):
            if there and (*at, name) not in used:
                yield (*at, name)
        if settings.policy and not any(isinstance(swap, NamedSwap) for _, swap in self.choices()):
            yield (*at, "policy")

    def contradictions(self) -> Iterator[Fault]:
        """Yield faults for settings that exclude each other: two policies, or one without its settings."""
        yield from ServerConfig.contradictions(self)
        if "" in self.peers:
            yield Fault(("peers", ""), "the name of a peer must not be empty")
        found = [path for path, _ in self.choices()]
        for path in found[1:]:
            yield Fault(path, f"only one eviction policy can be in use; {'.'.join(found[0])} selects another")
        use = self.routing.router.use
        if use is not None:
            yield from POLICIES.faults(use, "routing", "router", "use")
        if use in ("matrix", "lru") and getattr(self.routing.router.settings, use) is None:
            yield Fault(("routing", "router", "use"), f"routing.router.settings.{use} is missing")
