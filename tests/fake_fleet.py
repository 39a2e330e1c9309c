"""A fake fleet: it reports what the test sets, and records the calls."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import trio

from fairlead.base.config import (
    AnyModelConfig,
    ApiKey,
    BudgetsConfig,
    Config,
    NodeConfig,
    Price,
    SelectorConfig,
)
from fairlead.base.config.models import MOST_DIALECTS
from fairlead.base.errors import FairleadError, FaultyModel, InvalidRequest
from fairlead.base.requester import Requester
from fairlead.language.text.model import TextModel
from fairlead.nodes.processes.output import ProcessOutput
from fairlead.router.fleet.catalog import ModelCatalog
from fairlead.router.fleet.fleet import Fleet
from fairlead.router.fleet.status import ConfigChanges, ModelStatus, NodeStatus


@dataclass
class FakeFleet(Fleet):  # mypy checks the methods
    """Models that are always ready: those of the engine, and `remote` ones, for which jobs are relayed.

    `dialects` are those of all nodes. `calls` has all calls, and `requesters` who has requested the
    operations among them; each raises `refusal` if that is set.
    """

    engines: Iterable[str] = ()
    remote: Iterable[str] = ()
    statuses: list[ModelStatus] | None = None
    node_statuses: list[NodeStatus] = field(default_factory=list)
    refusal: FairleadError | None = None
    calls: list[tuple[Any, ...]] = field(default_factory=list)
    requesters: list[Requester | None] = field(default_factory=list)
    instance: str = "0" * 32
    outputs: dict[str, ProcessOutput] = field(default_factory=dict)
    drained: frozenset[str] = frozenset()
    lists_aliases: bool = False
    dialects: Iterable[str] = MOST_DIALECTS
    loading_state_of: Iterable[str] = ()
    configs: Iterable[AnyModelConfig] = ()
    texts: dict[str, TextModel] = field(default_factory=dict)
    faults: dict[str, FaultyModel] = field(default_factory=dict)
    is_ready: bool = True
    expiry_s: float = float("inf")
    prices: dict[str, Price] = field(default_factory=dict)
    budgets: BudgetsConfig = field(default_factory=BudgetsConfig)
    api_keys: tuple[ApiKey, ...] = ()

    @property
    def problems(self) -> dict[str, str]:
        return {}

    async def prepare(self) -> None:
        await trio.lowlevel.checkpoint()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        task_status.started()
        await trio.sleep_forever()

    def load_times(self, model: str) -> None:
        return None

    def models(self) -> list[ModelStatus]:
        if self.statuses is not None:
            return self.statuses
        local = [
            ModelStatus(model=name, kind="engine", node=f"engine:{name}", state="ready", seats=8)
            for name in self.engines
        ]
        remote = [
            ModelStatus(model=name, kind="remote", node="big", state="ready", seats=4) for name in self.remote
        ]
        return local + remote

    def model(self, name: str) -> ModelStatus | None:
        return next((status for status in self.models() if status.model == name), None)

    def nodes(self) -> list[NodeStatus]:
        return self.node_statuses

    def has(self, model: str) -> bool:
        return any(status.model == model for status in self.models())

    def offers(self, model: str) -> bool:
        return model not in self.drained

    def is_relayed(self, model: str) -> bool:
        return any(status.model == model and status.kind != "engine" for status in self.models())

    def speaks(self, model: str, dialect: str) -> bool:
        return dialect in self.dialects

    def output(self, model: str) -> ProcessOutput:
        self._record("output", model)
        return self.outputs.setdefault(model, ProcessOutput())

    @property  # created at each use, because a test may change the settings
    def catalog(self) -> "FakeCatalog":  # type: ignore[override]
        return FakeCatalog(self)

    def keep(self, model: str, ttl_s: float, *, by: Requester | None = None) -> None:
        self.requesters.append(by)
        self._record("keep", model, ttl_s)

    def expires_in_s(self, model: str) -> float:
        return self.expiry_s

    def gpu_bytes(self, model: str) -> int:
        return 0

    async def load(self, model: str, *, by: Requester | None = None) -> None:
        self.requesters.append(by)
        await self._change("load", model)

    async def unload(
        self, model: str, *, force: bool = False, wait: bool = False, by: Requester | None = None
    ) -> None:
        self.requesters.append(by)
        await self._change("unload", model, force, *(["wait"] * wait))

    async def add_node(self, config: NodeConfig, *, by: Requester | None = None) -> None:
        self.requesters.append(by)
        await self._change("add", config)

    async def remove_node(self, node_id: str, *, by: Requester | None = None) -> None:
        self.requesters.append(by)
        self._refuse_local(node_id)
        await self._change("remove", node_id)

    async def drain_node(self, node_id: str, *, by: Requester | None = None) -> None:
        self.requesters.append(by)
        self._refuse_local(node_id)
        self._record("drain", node_id)

    async def reload(self, config: Config) -> ConfigChanges:
        await self._change("reload", config)
        return ConfigChanges()

    def _refuse_local(self, node_id: str) -> None:
        if node_id in (f"engine:{name}" for name in self.engines):
            raise InvalidRequest(f"the node {node_id} is a local model: unload that", param="id")

    async def _change(self, *call: object) -> None:
        await trio.lowlevel.checkpoint()
        self._record(*call)

    def _record(self, *call: object) -> None:
        self.calls.append(call)
        if self.refusal is not None:
            raise self.refusal


class FakeCatalog(ModelCatalog):  # mypy checks the methods
    """The part of the catalog that routes use, from the settings of a `FakeFleet`."""

    def __init__(self, fleet: FakeFleet) -> None:  # no file is read
        self.models = {config.name: config for config in fleet.configs}
        self.config = Config(
            models=(),
            include_aliases_in_list=fleet.lists_aliases,
            budgets=fleet.budgets,
            api_keys=fleet.api_keys,
        )
        self.texts, self.faults = fleet.texts, fleet.faults
        self.aliases: dict[str, str] = {}
        self.selectors: dict[str, SelectorConfig] = {}
        self.prices = fleet.prices
        self._loading_state_of = fleet.loading_state_of

    def price_of(self, model: str, *, is_batch: bool = False) -> Price | None:
        price = self.prices.get(model)
        return price.of_batch() if price is not None and is_batch else price

    def sends_loading_state(self, model: str) -> bool:
        return model in self._loading_state_of
