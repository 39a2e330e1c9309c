"""Where jobs can go besides models of our own, and which models may be loaded at the same time."""

from collections.abc import Iterator
from typing import Any

import msgspec

from fairlead.config.models import ANSWER_BYTES, HTTP_URL, FiltersConfig, TimeoutsConfig, is_http_url
from fairlead.config.spelling import AtLeastOne, Fault, Seconds, refuse_faults, spelled

LONGEST_ID = 128


class NodeConfig(msgspec.Struct, frozen=True, rename=spelled):
    """A server elsewhere that speaks OpenAI's dialect. Raises `ConfigError`."""

    id: str
    """Its name here."""
    url: str
    """Where it answers, without /v1."""
    api_key: str | None = None
    """The key that it wants."""
    seats: AtLeastOne = 1
    """Jobs that it runs at once."""
    models: tuple[str, ...] | None = None
    """The models it is used for, by the names clients call them; by default it is asked for its list."""
    model_names: dict[str, str] = {}
    """Its own names for some of them."""
    filters: FiltersConfig = FiltersConfig()
    timeouts: TimeoutsConfig = TimeoutsConfig()
    answer_bytes: AtLeastOne = ANSWER_BYTES
    """Bytes of an answer that comes whole, and of one event of a streamed answer; a larger one fails."""

    def __post_init__(self) -> None:
        """Refuse what cannot be, in the configuration's names."""
        refuse_faults(self, "nodes", self.id)

    def contradictions(self) -> Iterator[Fault]:
        """Say what no server could be reached with."""
        if not self.id.strip() or not self.id.isprintable() or len(self.id) > LONGEST_ID:
            # It stands in paths, logs and labels.
            yield Fault(("id",), f"must be 1 to {LONGEST_ID} printable characters")
        if not is_http_url(self.url):
            yield Fault(("url",), f"must be {HTTP_URL}; the key that it wants goes into apiKey")
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable()):
            yield Fault(("apiKey",), "has characters that no header may have")
        if self.models is not None and not self.models:
            yield Fault(("models",), "must be one name or more; leave it out to ask the node")
        if self.models is not None and not all(name.strip() for name in self.models):
            yield Fault(("models",), "must not have an empty name")


class HealthConfig(msgspec.Struct, frozen=True, rename=spelled):
    """When a node gets no more jobs."""

    interval_s: Seconds = 5.0
    """How often each node is asked how it is."""
    failures: AtLeastOne = 3
    """After so many in a row it gets no more jobs, until an answer is good. A command that is silent so often
    and computes nothing meanwhile is ended and started again."""
    timeout_s: Seconds = 5.0
    """No answer within this time is a failure."""


class GroupConfig(msgspec.Struct, frozen=True, rename=spelled):
    """Models that belong together, by name."""

    members: tuple[str, ...] = ()
    """Its models."""
    swap: bool = True
    """Whether only one member runs at a time."""
    exclusive: bool = True
    """Whether loading a member stops the members of all other groups, but for persistent ones."""
    persistent: bool = False
    """Whether no other group's models make it stop."""


class KeepSwap(msgspec.Struct, frozen=True, tag="keep"):
    """There is room for all models: none makes room for another."""


class GroupSwap(msgspec.Struct, frozen=True, tag="group"):
    """Groups decide. A model of no group is in a group of the rest, one at a time and exclusive."""

    groups: dict[str, GroupConfig] = {}

    def contradictions(self) -> Iterator[Fault]:
        """Say which model is in two places."""
        seen: set[str] = set()
        for name, group in self.groups.items():
            for index, member in enumerate(group.members):
                if member in seen:
                    yield Fault(("groups", name, "members", index), f"{member} is in a group already")
                seen.add(member)


class MatrixSwap(msgspec.Struct, frozen=True, tag="matrix"):
    """Expressions say which models may run together (`swap/matrix.py`).

    `sets` are the expressions by name, `variables` short names for models in them; losing a running model
    costs what `evict_costs` says, or 1.
    """

    sets: dict[str, str]
    variables: dict[str, str] = msgspec.field(default_factory=dict, name="vars")
    evict_costs: dict[str, AtLeastOne] = {}

    def contradictions(self) -> Iterator[Fault]:
        """Say that nothing is allowed."""
        if not self.sets:
            yield Fault(("sets",), "must be one or more")


class LruSwap(msgspec.Struct, frozen=True, tag="lru", rename=spelled):
    """At most `max_loaded` models, in at most `memory_mb` MiB together; who was used longest ago makes room.

    None: no such limit; without any, nobody makes room.
    """

    max_loaded: AtLeastOne | None = None
    memory_mb: AtLeastOne | None = None


class NamedSwap(msgspec.Struct, frozen=True, tag="named"):
    """The eviction policy of another package decides: the entry point `policy`, which is given `settings`."""

    policy: str
    settings: dict[str, Any] = {}


SwapConfig = KeepSwap | GroupSwap | MatrixSwap | LruSwap | NamedSwap
