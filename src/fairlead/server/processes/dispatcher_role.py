"""The dispatcher as a process of its own: the queue, and the fleet whose processes the supervisor runs."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from ssl import SSLContext
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import structlog
import trio

from fairlead.base.config import ClusterConfig, ModelConfig, NodeConfig
from fairlead.base.requester import Requester
from fairlead.base.runtime.gc_tuning import freeze
from fairlead.base.supervision import contain, keep_running
from fairlead.distributed.frontends.server import FrontServer
from fairlead.distributed.frontends.shared_board import SharedBoard
from fairlead.distributed.frontends.shared_quotas import SharedQuotas
from fairlead.distributed.frontends.shared_store import SharedStore
from fairlead.distributed.ipc.address import LinkAddress, listen
from fairlead.distributed.ipc.handshake import HandshakeFailed
from fairlead.distributed.ipc.handshakes import PendingHandshakes
from fairlead.distributed.ipc.limited_log import LimitedLog
from fairlead.distributed.ray.controller import ClusterController
from fairlead.distributed.ray.running import run_cluster
from fairlead.distributed.supervisor import control
from fairlead.distributed.supervisor.fleet_state import encoded, state_of
from fairlead.distributed.supervisor.shared_counts import SharedCounts
from fairlead.distributed.supervisor.supervised_process import SupervisedProcesses
from fairlead.generation.metrics.board import RequestBoard
from fairlead.language.checkpoint.folder import read_folder
from fairlead.language.text.hub import find_model
from fairlead.language.text.model import TextModel
from fairlead.nodes.processes.health import Outcome
from fairlead.router.dispatch.dispatcher import Dispatcher
from fairlead.router.fleet.fleet import Fleet
from fairlead.router.fleet.node_registry import NodeRegistry
from fairlead.router.quotas.budgets import Budgets, subjects_of
from fairlead.server.processes.child import SupervisorLink
from fairlead.store.opening import store_of
from fairlead.store.store import StoreKeeper

SOCKET = "dispatcher.sock"
# After this time fronts are served although the replicas of an earlier dispatcher do not answer.
ADOPT_WAIT_S = 5.0

logger = structlog.get_logger("fairlead.dispatcher")


async def play(link: SupervisorLink, start: msgspec.Struct) -> None:
    """Run the dispatcher until cancelled.

    Raises `LoadFailed`, `ConfigError` or `OSError` if it cannot start.
    """
    assert isinstance(start, control.RunDispatcher)
    await DispatcherRole(link, start).run()


class DispatcherRole:
    """The parts of the dispatcher's process: fleet ⊃ dispatcher ⊃ the connections of fronts.

    link: the connection to the supervisor.
    start: what the supervisor has ordered.
    address: where it listens for fronts of other machines; None: only for those of this one.
    tls: the context for that address; None: plain.
    may_send: whether it leads still; otherwise it sends nothing.
    raise_epoch: as for `FrontServer`.
    """

    def __init__(
        self,
        link: SupervisorLink,
        start: control.RunDispatcher,
        *,
        address: LinkAddress | None = None,
        tls: SSLContext | None = None,
        may_send: Callable[[], bool] = lambda: True,
        raise_epoch: Callable[[int], bool] = lambda _epoch: False,
    ) -> None:
        config = control.unpack(start.config)
        self._address = address or LinkAddress(path=f"{start.directory}/{SOCKET}")
        self._tls = tls
        self._link = link
        self._start = start
        self._cluster = config.cluster
        self._dispatcher = Dispatcher(
            config.queue,
            rejects_loading=config.while_loading == "reject",
            scheduler=config.scheduler,
            epoch=start.epoch,
        )
        self._processes = SupervisedProcesses(start, link.send, lambda: self._dispatcher.next_grant)
        nodes = NodeRegistry(self._dispatcher.scheduler)
        self._fleet = Fleet(
            config,
            self._dispatcher,
            nodes,
            read=_find_files,
            on_progress=lambda *progress: link.send(control.LoadShown(*progress)),
            make_process=self._processes.make,
            adopted=self._processes.adoptable,
        )
        budgets = Budgets()
        self._quotas = SharedQuotas(budgets)
        store = store_of(config)
        self._keeper = None if store is None else StoreKeeper(store)
        if self._keeper is not None:
            self._keeper.on_spent = budgets.restore
            self._keeper.subjects = self._budget_subjects
        self._store = SharedStore(self._keeper, lambda: self._server.fronts)
        self._counts = SharedCounts()
        self._board = SharedBoard(RequestBoard(self._dispatcher.open_jobs))
        self._server = FrontServer(
            self._dispatcher,
            epoch=start.epoch,
            expected=start.expected,
            may_send=may_send,
            raise_epoch=raise_epoch,
            questions={
                "state": self._state,
                "waiting": lambda _front, request_id: self._dispatcher.estimate_of(request_id),
                "cancel": partial(cancel, self._dispatcher),
                "estimate": self._estimate,
                "output": self._output,
                "keep": lambda _front, model, ttl_s, by: self._fleet.keep(model, ttl_s, by=_requester(by)),
                "node_requested": self._count_request,
                **self._board.questions,
                **self._counts.questions,
                **self._quotas.questions,
                **self._store.questions,
            },
            on_front_connected=self._store.connected,
            on_front_ended=self._front_ended,
            orders={
                "load": self._load_model,
                "unload": self._unload,
                "add_node": self._add_node,
                "remove_node": self._remove_node,
                "drain_node": self._drain_node,
                **self._store.orders,
            },
        )
        self._refused = LimitedLog("front refused")
        self._handshakes = PendingHandshakes(name="dispatcher", key=start.key)
        self._nursery: trio.Nursery | None = None

    async def run(self) -> None:
        """Run until cancelled."""
        async with trio.open_nursery() as self._nursery:
            self._link.on_end = self._processes.end_with_supervisor
            self._link.serve(self._handle)
            await self._fleet.prepare()
            self._nursery.start_soon(self._dispatcher.run)
            if self._keeper is not None:
                self._nursery.start_soon(keep_running, "store", self._keeper.run)
            self._nursery.start_soon(self._load)
            await self._fleet.has_adopted.wait()
            self._processes.end_others()
            if self._cluster is not None:
                await self._start_cluster(self._cluster)
            listeners = await listen(self._address, self._tls)
            self._nursery.start_soon(self._server.run)
            self._link.send(control.RoleReady())
            logger.info("dispatching", epoch=self._start.epoch, models=len(self._start.running))
            await trio.serve_listeners(partial(contain, "connection of a front", self._serve), listeners)

    async def _start_cluster(self, cluster: ClusterConfig) -> None:
        """Keep the replicas of models on the cluster; return when those that run already are nodes."""
        assert self._nursery is not None
        if not self._start.directory:  # there is no supervisor, which would have the launcher
            run = partial(run_cluster, cluster, self._fleet, self._dispatcher)
            self._nursery.start_soon(keep_running, "cluster", run)
            return
        controller = ClusterController(cluster, self._fleet, self._dispatcher, self._start.directory)
        self._nursery.start_soon(keep_running, "cluster", controller.run)
        with trio.move_on_after(ADOPT_WAIT_S):
            await controller.has_adopted.wait()

    async def _load(self) -> None:
        async with trio.open_nursery() as fleet:
            await fleet.start(self._fleet.run)
            freeze()
            faulty = self._fleet.catalog.faults
            names = tuple(status.model for status in self._fleet.models() if status.model not in faulty)
            self._link.send(control.ModelsLoaded(names))

    async def _serve(self, stream: trio.abc.Stream) -> None:
        async with stream:
            try:
                name = await self._handshakes.authenticate(stream)
            except HandshakeFailed as error:
                self._refused.report(str(error))
                return
            await self._server.serve(stream, name)

    def _budget_subjects(self) -> list[str]:
        config, stored = self._fleet.catalog.config, self._keeper and self._keeper.keys
        keys = [key.api_key() for key in stored.keys] if stored else []
        return subjects_of((*config.api_keys, *keys), config.budgets, stored.budgets if stored else ())

    # Messages of the supervisor ----------------------------------------------------------------------

    def _handle(self, message: control.ToChildRole) -> None:
        match message:
            case control.Drain():
                self._dispatcher.scheduler.drain()
            case control.FrontEnded(name):
                self._server.end_front(name)
            case control.Reload(config):
                assert self._nursery is not None
                self._nursery.start_soon(contain, "reload", self._fleet.reload, control.unpack(config))
            case _:
                self._processes.handle(message)

    # Questions and orders of fronts ------------------------------------------------------------------

    def _state(self, _front: str) -> Any:
        state = state_of(self._fleet, self._dispatcher, self._processes)
        return encoded(msgspec.structs.replace(state, usage=self._quotas.usage()))

    def _estimate(self, _front: str, model: str, tenant: str, priority: int, team: str) -> Any:
        estimate = self._dispatcher.estimator.for_newcomer(model, tenant, priority, team=team)
        return msgspec.structs.asdict(estimate)

    def _output(self, _front: str, model: str, first: int) -> tuple[int, Sequence[str]]:
        """Return the lines of a model's processes from a number on, and the number of the first of them."""
        output = self._fleet.output(model)
        lines = output.since(first)
        return output.end - len(lines), lines

    def _count_request(self, _front: str, node_id: str, outcome: object, tenant: str) -> None:
        self._fleet.count_request(node_id, msgspec.convert(outcome, Outcome), tenant)

    def _front_ended(self, name: str) -> None:
        self._quotas.end_front(name)
        self._counts.end_front(name)
        self._board.end_front(name)
        self._store.end_front(name)

    async def _load_model(self, model: str, by: object) -> None:
        await self._fleet.load(model, by=_requester(by))

    async def _unload(self, model: str, force: bool, wait: bool, by: object) -> None:
        await self._fleet.unload(model, force=force, wait=wait, by=_requester(by))

    async def _add_node(self, config: object, by: object) -> None:
        await self._fleet.add_node(msgspec.convert(config, NodeConfig), by=_requester(by))

    async def _remove_node(self, node_id: str, by: object) -> None:
        await self._fleet.remove_node(node_id, by=_requester(by))

    async def _drain_node(self, node_id: str, by: object) -> None:
        await self._fleet.drain_node(node_id, by=_requester(by))


def cancel(dispatcher: Dispatcher, _front: str, request_id: str, by: object, others: object) -> bool:
    """Answer a front's question `cancel`; see `DispatchClient.cancel`."""
    models = msgspec.convert(others, frozenset[str] | None)
    return dispatcher.stop_job(request_id, msgspec.convert(by, Requester), others=models)


def _requester(by: object) -> Requester | None:
    return msgspec.convert(by, Requester | None)


async def _find_files(model: ModelConfig) -> TextModel:
    """Find a model's files, or fetch them from a hub, and read them but for their vocabulary.

    Only fronts have tokenizers. Raises `LoadFailed` or `ConfigError`.
    """

    def read() -> Path:
        path = find_model(model.path)
        read_folder(path, max_model_len=model.max_model_len)
        return path

    path = await trio.to_thread.run_sync(read, abandon_on_cancel=True)
    return cast(TextModel, SimpleNamespace(path=path))
