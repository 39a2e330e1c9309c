"""The composition root: the only file that knows every room.

Fleet ⊃ dispatcher ⊃ HTTP. Shutting down is returning: the listener drains, then the contexts unwind, and
with the fleet's nursery the children end.
"""

import signal
from collections.abc import Sequence
from functools import partial
from typing import Protocol

import msgspec
import structlog
import trio

from fairlead.api.exchange import unwrap
from fairlead.api.routes import create_app
from fairlead.api.server import bind, serve_http
from fairlead.api.services import Services
from fairlead.collector import settle
from fairlead.config import CommandConfig, Config, ConfigError, ModelConfig
from fairlead.dispatch.dispatcher import Dispatcher
from fairlead.errors import FairleadError
from fairlead.gateway import Gateway
from fairlead.nodes.engine_node import EngineNode, worker_spec
from fairlead.nodes.fleet import Fleet
from fairlead.telemetry import logs
from fairlead.text.model import TextModel

logger = structlog.get_logger("fairlead.app")


class Announcer(Protocol):
    """Who tells the person at the terminal how far we are."""

    def loading(self, model: str, fraction: float, stage: str) -> None:
        """A model has been loaded this far: 0…1."""

    def ready(self, url: str, models: Sequence[str]) -> None:
        """The server answers at this address and every model is loaded."""

    def failed(self, model: str, reason: str) -> None:
        """The server cannot start; it ends after this."""

    def stopping(self) -> None:
        """The server takes no more requests and finishes those it has."""


def run(config: Config, announcer: Announcer) -> int:
    """Serve until SIGINT or SIGTERM; return the exit code: 0 good, 1 failed, 2 bad configuration."""
    logs.configure(json=config.log_json)
    names = ", ".join(model.name for model in config.models)
    try:
        trio.run(partial(serve, config, announcer), strict_exception_groups=True)
    except (Exception, BaseExceptionGroup) as error:
        cause = unwrap(error)
        if isinstance(cause, FairleadError | ConfigError | OSError):
            announcer.failed(names, str(cause))
            return 2 if isinstance(cause, ConfigError) else 1
        raise
    return 0


async def serve(
    config: Config,
    announcer: Announcer,
    *,
    task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Bind, load, serve, drain. Reports the server's address once every model is loaded.

    The listener answers from the beginning: `/health` is live, `/ready` is not yet, and jobs wait in the
    queue for the model to be loaded. Raises `ConfigError`, `LoadFailed` or `OSError` when it cannot start.
    """
    engine_models = _servable(config)
    sockets = bind(config.host, config.port)
    host, port = sockets[0].getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    dispatcher = Dispatcher(config.queue)
    models = {model.name: _text_model(model) for model in engine_models}
    fleet = Fleet(tuple(_node(model, models[model.name], dispatcher, announcer) for model in engine_models))
    services = Services(
        config=config,
        gateway=Gateway(dispatcher, request_timeout_s=config.request_timeout_s),
        models=models,
        aliases={alias: model.name for model in config.models for alias in model.aliases},
        ready=lambda: fleet.is_ready,
        problems=lambda: fleet.problems,
        estimate=lambda model, tenant, priority: msgspec.structs.asdict(
            dispatcher.forecast(model, tenant, priority)
        ),
        queue_statistics=lambda: msgspec.structs.asdict(dispatcher.statistics()),
        running=lambda: [msgspec.structs.asdict(status) for status in fleet.running()],
    )
    shutdown = trio.Event()

    async def load() -> None:
        async with trio.open_nursery() as loaded:
            await loaded.start(fleet.run)
            settle()
            announcer.ready(url, list(models))
            task_status.started(url)

    async with trio.open_nursery() as signals:
        signals.start_soon(_watch_signals, shutdown, dispatcher, announcer)
        async with trio.open_nursery() as nodes:
            nodes.start_soon(dispatcher.run)
            nodes.start_soon(load)
            await serve_http(create_app(services), sockets, limits=config.limits, shutdown=shutdown)
            nodes.cancel_scope.cancel()
        signals.cancel_scope.cancel()


def _servable(config: Config) -> tuple[ModelConfig, ...]:
    """Return the models. Raises `ConfigError` if the configuration asks for what is not built yet."""
    models = tuple(model for model in config.models if isinstance(model, ModelConfig))
    if config.nodes:
        raise ConfigError(f"nodes: {config.nodes[0].id} cannot be used yet, nor any other")
    for model in config.models:
        if isinstance(model, CommandConfig):
            raise ConfigError(f"models.{model.name}.cmd: models cannot be served by a command yet")
        if model.ttl_s:
            raise ConfigError(f"models.{model.name}.ttl: models cannot be unloaded yet")
    if len(models) != 1:
        raise ConfigError("models: exactly one model can be served")
    return models


def _text_model(model: ModelConfig) -> TextModel:
    return TextModel.load(
        model.path,
        name=model.name,
        max_model_len=model.max_model_len,
        max_input_tokens=model.max_input_tokens,
        max_output_tokens=model.max_output_tokens,
    )


def _node(model: ModelConfig, text: TextModel, dispatcher: Dispatcher, announcer: Announcer) -> EngineNode:
    return EngineNode(
        text,
        worker_spec(model),
        dispatcher,
        isolate_tenants=model.kv_cache.isolate_tenants,
        on_progress=partial(announcer.loading, model.name),
    )


async def _watch_signals(shutdown: trio.Event, dispatcher: Dispatcher, announcer: Announcer) -> None:
    """The first signal drains; a second one ends at once, by the default action."""
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async for number in signals:
            logger.info("stopping", signal=signal.Signals(number).name)
            announcer.stopping()
            dispatcher.drain()
            shutdown.set()
            break
