"""The commands that run a server: arguments become a `Config`, which `app` runs."""

import os
from typing import TYPE_CHECKING

from msgspec.structs import replace

from fairlead.base.config import (
    NO_OPERATOR,
    NO_STORE,
    Config,
    ConfigError,
    QueueConfig,
    default_store,
    is_loopback,
    lacks_operator,
)
from fairlead.base.runtime.gc_tuning import freeze_imports
from fairlead.server.console.options import File, Flag, Model, ServeOptions

if TYPE_CHECKING:
    from fairlead.router.fleet.reload import ConfigSource


def serve(
    model: Model | None = None,
    /,
    *,
    config: File | None = None,
    watch_config: Flag = False,
    options: ServeOptions = ServeOptions(),  # noqa: B008 - frozen
) -> int:
    """Serve models over HTTP.

    Parameters
    ----------
    model
        Directory of the model, or its name on the Hugging Face hub (organization/name). Without it and
        without --config, the small demonstration model is served.
    config
        Configuration file (fairlead.yaml, or llama-swap's). Options on the command line override it.
    watch_config
        Reload the file whenever it changes, as on SIGHUP. Unchanged models keep running.
    """
    if watch_config and config is None:
        raise ConfigError("--watch-config: needs --config")
    file_config = Config(models=())
    source = None
    if config is not None:
        from fairlead.server.console.configuration import read, source_of

        reading = read(config)
        if reading is None:
            return 2
        file_config = reading.config
        source = source_of(config, model, options, is_watched=watch_config)
    return _serve(options.config(model, file_config), source, lifeline=options.lifeline)


def node(
    model: Model | None = None,
    /,
    *,
    config: File | None = None,
    options: ServeOptions = ServeOptions(),  # noqa: B008 - frozen
) -> int:
    """Serve a model to another Fairlead server. A job without a free seat is refused at once, not queued.

    The same as `serve` with --queue-capacity 0; the other server has the queue.

    Parameters
    ----------
    model
        Directory of the model, or its name on the Hugging Face hub (organization/name). Without it and
        without --config, the small demonstration model is served.
    config
        Configuration file. Its queue.capacity has no effect. Options override it.
    """
    if options.settings(QueueConfig).get("capacity"):
        raise ConfigError("--queue-capacity: a node never queues; `fairlead serve` does")
    if options.ray is not None:
        raise ConfigError("--ray: a node runs its models itself; `fairlead serve` starts others")
    file_config = Config(models=())
    if config is not None:
        from fairlead.server.console.configuration import read

        reading = read(config)
        if reading is None:
            return 2
        file_config = reading.config
    settings = options.config(model, file_config)
    queue = replace(settings.queue, capacity=0)
    # The other server counts its jobs, perhaps in the same store.
    store = settings.store if options.has_store(file_config) else NO_STORE
    responses = settings.responses
    if store == NO_STORE:
        responses = replace(responses, in_store=False)
    settings = replace(settings, queue=queue, store=store, responses=responses)
    return _serve(settings, None, lifeline=options.lifeline)


def dispatcher(*, config: File) -> int:
    """Run the dispatcher for fronts on other machines: the queue, and the nodes of the configuration.

    Needs dispatcher.listen and dispatcher.keyFile. Several dispatchers need a lease, which one of them holds.

    Parameters
    ----------
    config
        Configuration file.
    """
    return _serve_part(config, is_front=False)


def front(*, config: File) -> int:
    """Serve HTTP for a dispatcher on another machine.

    Needs dispatcher.addresses and dispatcher.keyFile.

    Parameters
    ----------
    config
        Configuration file.
    """
    return _serve_part(config, is_front=True)


def _serve_part(file: File, *, is_front: bool) -> int:
    from fairlead.server.console.announcer import open_announcer, report_warning
    from fairlead.server.console.configuration import read
    from fairlead.server.processes.machines import run_dispatcher, run_front

    freeze_imports()
    reading = read(file)
    if reading is None:
        return 2
    config = replace(reading.config, store=reading.config.store or default_store(os.environ))
    if is_front and not is_loopback(config.host) and not config.api_keys:
        report_warning(f"any client that reaches {config.host} may use this server: use apiKeys")
    if is_front and lacks_operator(config.api_keys):
        report_warning(NO_OPERATOR)
    with open_announcer(key_needed=bool(config.api_keys)) as announcer:
        return (run_front if is_front else run_dispatcher)(config, announcer)


def _serve(config: Config, source: "ConfigSource | None", *, lifeline: bool) -> int:
    if config.fronts > 1:
        from fairlead.server.processes.supervisor import run as run_server
    else:
        from fairlead.server.app import run as run_server
    from fairlead.server.console.announcer import end_with_standard_input, open_announcer, report_warning

    freeze_imports()
    if not is_loopback(config.host) and not config.api_keys:
        report_warning(f"any client that reaches {config.host} may use this server: use --api-key")
    if lacks_operator(config.api_keys):
        report_warning(NO_OPERATOR)
    if lifeline:
        end_with_standard_input()
    with open_announcer(key_needed=bool(config.api_keys), in_detail=lifeline) as announcer:
        return run_server(config, announcer, source)
