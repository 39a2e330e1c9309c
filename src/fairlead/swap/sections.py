"""What a configuration file has besides models: our settings, and llama-swap's sections as types.

Knows how things are spelled and which cannot be together, not what becomes of them (`llama_swap`).
"""

from collections.abc import Iterator
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from fairlead.config import (
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
from fairlead.config.models import HTTP_URL, is_http_url
from fairlead.config.spelling import AtLeastOne, Seconds, SecondsOrNone, spelled
from fairlead.swap.policies import POLICIES

FIRST_BYTE_OF_PEER_S = 60.0  # as in llama-swap


class Peer(msgspec.Struct, frozen=True, rename=spelled):
    """Another server, and the models it is used for."""

    proxy: str
    """Where it answers, without /v1."""
    models: tuple[str, ...]
    """The models it is used for."""
    api_key: str | None = None
    """The key that it wants."""
    seats: AtLeastOne = 10
    """Requests that it is sent at once. llama-swap has no limit for peers."""
    filters: FiltersConfig = FiltersConfig()
    timeouts: TimeoutsConfig = TimeoutsConfig(first_byte_s=FIRST_BYTE_OF_PEER_S)

    def contradictions(self) -> Iterator[Fault]:
        """Say what no server could be reached with."""
        if not is_http_url(self.proxy):
            yield Fault(("proxy",), f"must be {HTTP_URL}")
        if not self.models:
            yield Fault(("models",), "must be one name or more")


class Startup(msgspec.Struct, frozen=True, rename=spelled):
    """What is done first: these models are loaded."""

    preload: tuple[str, ...] = ()
    """Models that are loaded at the start."""


class Hooks(msgspec.Struct, frozen=True, rename=spelled):
    """What is done when."""

    on_startup: Startup = msgspec.field(default=Startup(), name="on_startup")


class Matrix(msgspec.Struct, frozen=True, rename=spelled):
    """Which models may run together: `MatrixSwap` as a file spells it."""

    sets: dict[str, str]
    """Expressions by name: each says which models may run together, as "a & (b | c)"."""
    variables: dict[str, str] = msgspec.field(default_factory=dict, name="vars")
    """Short names for models in these."""
    evict_costs: dict[str, AtLeastOne] = msgspec.field(default_factory=dict, name="evict_costs")
    """What losing a running model costs; 1 by default."""


class Lru(msgspec.Struct, frozen=True, rename=spelled):
    """Who was used longest ago makes room: `LruSwap` as a file spells it. Not llama-swap's."""

    max_loaded: AtLeastOne | None = None
    """Models that may be loaded at the same time."""
    memory_mb: AtLeastOne | None = None
    """Memory in MiB that they may take together."""


class RouterSettings(msgspec.Struct, frozen=True, rename=spelled):
    """The settings of each way to make room; only those of the one in use count."""

    groups: dict[str, GroupConfig] = {}
    """As at the top."""
    matrix: Matrix | None = None
    """As at the top."""
    lru: Lru | None = None
    """As at the top."""
    policy: dict[str, Any] = {}
    """What the policy of another package is given."""


class Router(msgspec.Struct, frozen=True, rename=spelled):
    """Which way to make room is in use; `lru` and `keep` (make none) are not llama-swap's."""

    use: str | None = None
    """Which of them is in use: group, matrix, lru or keep, or the name of an entry point
    `fairlead.eviction_policies` of an installed package.
    """
    settings: RouterSettings = RouterSettings()


class Fifo(msgspec.Struct, frozen=True, rename=spelled):
    """Which models are loaded first, of those that are wanted. Who starves comes before them all the same."""

    priority: dict[str, int] = {}
    """Numbers of models, by name: the higher, the earlier; 0 by default. The turns of jobs that wait for one
    model are no matter of this.
    """


class SchedulerSettings(msgspec.Struct, frozen=True, rename=spelled):
    """Settings of the only scheduler."""

    fifo: Fifo = Fifo()


class Scheduler(msgspec.Struct, frozen=True, rename=spelled):
    """The order in which jobs are served."""

    settings: SchedulerSettings = SchedulerSettings()


class Routing(msgspec.Struct, frozen=True, rename=spelled):
    """How room is made for a model."""

    router: Router = Router()
    scheduler: Scheduler = Scheduler()


class FileSettings(ServerConfig, frozen=True, kw_only=True, rename=spelled):
    """All that a file has, but for models and macros."""

    start_port: Annotated[int, Meta(ge=1, le=65535)] = 5800
    """The first port that ${PORT} of a command may be."""
    health_check_timeout_s: Seconds = 120.0
    """How long commands may take to be ready, unless they say something else."""
    global_ttl_s: SecondsOrNone = msgspec.field(default=0.0, name="globalTTL")
    """How long models stay loaded without a job, unless they say something else; 0: for ever."""
    unload_timeout_s: SecondsOrNone = 10.0
    """How long commands may take to stop, unless they say something else."""
    groups: dict[str, GroupConfig] = msgspec.field(default_factory=dict)
    """Groups of models, by name: members swap with each other. Models of no group are one of their own."""
    matrix: Matrix | None = None
    """Expressions of which models may run together, instead of groups."""
    lru: Lru | None = None
    """How many models, or how much of them, may be loaded, instead of groups: least recently used out."""
    routing: Routing = Routing()
    """llama-swap's newer place for the same."""
    hooks: Hooks = Hooks()
    peers: dict[str, Peer] = msgspec.field(default_factory=dict)
    """Servers elsewhere, as llama-swap has them, by name; nodes can say more."""

    def choices(self) -> Iterator[tuple[tuple[str, ...], SwapConfig]]:
        """Yield each way to make room that the file asks for, and where it does."""
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
                yield (path, LruSwap(lru.max_loaded, lru.memory_mb))

    def idle(self) -> Iterator[tuple[str, ...]]:
        """Yield where there are settings of ways to make room that are not in use."""
        at, settings = ("routing", "router", "settings"), self.routing.router.settings
        used = [path for path, _ in self.choices()]
        for name, there in (("groups", settings.groups), ("matrix", settings.matrix), ("lru", settings.lru)):
            if there and (*at, name) not in used:
                yield (*at, name)
        if settings.policy and not any(isinstance(swap, NamedSwap) for _, swap in self.choices()):
            yield (*at, "policy")

    def contradictions(self) -> Iterator[Fault]:
        """Say what cannot be together: two ways to make room, or one without its settings."""
        yield from ServerConfig.contradictions(self)
        if "" in self.peers:
            yield Fault(("peers", ""), "the name of a peer must not be empty")
        found = [path for path, _ in self.choices()]
        for path in found[1:]:
            yield Fault(path, f"only one way to make room can be in use; {'.'.join(found[0])} is another")
        use = self.routing.router.use
        if use is not None:
            yield from POLICIES.faults(use, "routing", "router", "use")
        if use in ("matrix", "lru") and getattr(self.routing.router.settings, use) is None:
            yield Fault(("routing", "router", "use"), f"routing.router.settings.{use} is missing")
