"""The command line: arguments become a `Config` or a call of `console`, outcomes become exit codes.

Knows nothing of how anything is served (`app`) or shown (`console`). Importing it is cheap: a command imports
what it needs when it runs.

Exit codes: 0 good, 1 failed, 2 bad usage or configuration, 130 interrupted.
"""

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import App, CycloptsError, Parameter

from fairlead.config import Config, ConfigError, is_loopback
from fairlead.console.load_options import LoadOptions
from fairlead.console.options import (
    File,
    Flag,
    Model,
    Port,
    ServeOptions,
    parse_api_keys,
    told,
)

if TYPE_CHECKING:
    from fairlead.console.client import Client
    from fairlead.reload import Source

DEFAULT_URL = "http://127.0.0.1:8000"

commands = App(
    "fairlead",
    help="A language-model server that gives every user a fair turn.",
    version=lambda: metadata.version("fairlead"),
)
commands.register_install_completion_command()
commands.command(configuration := App("config", help="Look at configuration files."))


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Which server a command talks to.

    Parameters
    ----------
    url
        Address of the server. Default: http://127.0.0.1:8000.
    api_key
        The key to send.
    """

    url: Annotated[str | None, Parameter(env_var="FAIRLEAD_URL")] = None
    api_key: Annotated[str | None, Parameter(env_var="FAIRLEAD_API_KEY")] = None

    def __post_init__(self) -> None:
        """Refuse what is no URL."""
        if self.url is not None and not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"--url: must begin with http:// or https://, not {self.url!r}")

    @property
    def key(self) -> str | None:
        """The key alone: what the environment has may be for a server, with users and several."""
        if not self.api_key or not self.api_key.strip():
            return None
        return parse_api_keys(self.api_key.split()[:1])[0].key

    def ask(self, show: Callable[["Client"], int]) -> int:
        """Have something asked and shown; return the exit code, which is 1 if the server will not answer."""
        from fairlead.console.announcer import complain
        from fairlead.console.client import Client, ServerError

        try:
            with Client(self.url or DEFAULT_URL, api_key=self.key) as client:
                return show(client)
        except ServerError as error:
            complain(str(error))
            return 1


# Servers -------------------------------------------------------------------------------------------


@commands.command
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
        A configuration file (fairlead.yaml, or llama-swap's). What is given here as well wins over it.
    watch_config
        Read the file again whenever it has changed, as SIGHUP does. Models that did not change run on.
    """
    if watch_config and config is None:
        raise ConfigError("--watch-config: needs --config")
    given = Config(models=())
    if config is not None:
        from fairlead.console.configuration import read

        reading = read(config)
        if reading is None:
            return 2
        given = reading.config
    source = None if config is None else _source(config, model, options, is_watched=watch_config)
    return _serve(options.config(model, given), source, lifeline=options.lifeline)


@commands.command
def node(
    model: Model | None = None,
    /,
    *,
    options: ServeOptions = ServeOptions(),  # noqa: B008 - frozen
) -> int:
    """Serve a model for another Fairlead: what has no free seat here is refused at once, never queued.

    The same program as `serve`, with --queue-capacity 0: the server in front of it holds the one queue.

    Parameters
    ----------
    model
        Directory of the model, or its name on the Hugging Face hub (organization/name). Default: the small
        demonstration model.
    """
    if options.queue_capacity:
        raise ConfigError("--queue-capacity: a node never queues; `fairlead serve` does")
    config = options.config(model, Config(models=()))
    return _serve(told(config, queue=told(config.queue, capacity=0)), None, lifeline=options.lifeline)


# Clients of a server -------------------------------------------------------------------------------


@commands.command
def run(
    model: str | None = None,
    prompt: str | None = None,
    *,
    server: ServerOptions = ServerOptions(),
) -> int:
    """Chat with a model in the terminal. Ctrl-C stops the answer, not the program.

    Talks to the server at --url. When none is given and none runs at http://127.0.0.1:8000, one is started
    for as long as the chat lasts. There is no --json: `POST /v1/chat/completions` answers in JSON.

    Parameters
    ----------
    model
        Name of a served model, or the directory of one. Default: the first one the server has.
    prompt
        Ask this and end. Without it standard input is the prompt, or the chat when it is a terminal.
    """
    from fairlead.console.chat import chat

    return chat(model=model, prompt=prompt, url=server.url, api_key=server.key)


@commands.command
def ps(*, json: Flag = False, server: ServerOptions = ServerOptions()) -> int:
    """Show the queue, the models that are loaded, and the nodes of a server.

    Parameters
    ----------
    json
        Answer in JSON.
    """
    from fairlead.console.status import ps as show

    return server.ask(partial(show, as_json=json))


@commands.command
def top(*, json: Flag = False, server: ServerOptions = ServerOptions()) -> int:
    """Watch a server work, until q or Ctrl-C.

    Parameters
    ----------
    json
        Write each picture as a line of JSON.
    """
    from fairlead.console.top import top as watch

    return server.ask(partial(watch, as_json=json))


@commands.command
def stop(
    model: str,
    /,
    *,
    force: Flag = False,
    server: ServerOptions = ServerOptions(),
) -> int:
    """Unload a model, so that all of its memory comes back. The next request for it loads it again.

    There is no --json: the exit code says all.

    Parameters
    ----------
    model
        Name of the model.
    force
        Do not let it finish the answers it is at.
    """
    from fairlead.console.status import stop as unload

    return server.ask(partial(unload, model=model, force=force))


@commands.command
def bench(
    model: str | None = None,
    /,
    *,
    load: LoadOptions = LoadOptions(),  # noqa: B008 - frozen
    json: Path | None = None,
    plot: Path | None = None,
    server: ServerOptions = ServerOptions(),
) -> int:
    """Put a load on any OpenAI-compatible server; report throughput, latencies and errors.

    Parameters
    ----------
    model
        Name of the model. Default: the first one the server has.
    json
        Write everything measured to this file.
    plot
        Draw the distributions into this PNG (needs fairlead[bench]).
    """
    from fairlead.console.bench import bench as measure

    return measure(
        load.options(server.url or DEFAULT_URL, model or ""), api_key=server.key, json=json, plot=plot
    )


# Files and machines --------------------------------------------------------------------------------


@configuration.command
def check(file: File, /, *, json: Flag = False) -> int:
    """Say whether a file is a configuration, naming file, line and key of everything that is wrong.

    Settings that are understood but have no effect are named, too.

    Parameters
    ----------
    file
        The configuration file.
    json
        Answer in JSON.
    """
    from fairlead.console.configuration import check as check_file

    return check_file(file, as_json=json)


@configuration.command
def schema() -> int:
    """Print the JSON Schema of configuration files, with which editors complete and explain them."""
    from fairlead.console.configuration import print_schema

    print_schema()
    return 0


@commands.command
def doctor(
    *, config: File | None = None, host: str | None = None, port: Port | None = None, json: Flag = False
) -> int:
    """Look whether a server would run here, and say what to do where it would not.

    Parameters
    ----------
    config
        A configuration file to look at, too.
    host
        Address that the server is to listen on. Default: the configuration's, or 127.0.0.1.
    port
        Port that the server is to listen on. Default: the configuration's, or 8000.
    json
        Answer in JSON.
    """
    from fairlead.console.doctor import doctor as look

    return look(config=config, host=host, port=port, as_json=json)


@commands.command
def deploy(
    target: Literal["systemd", "docker", "grafana"],
    /,
    *,
    folder: Annotated[Path, Parameter(name=("--folder", "-o"))] = Path(),
    force: Flag = False,
) -> int:
    """Write out the files that run Fairlead as a service, and name each.

    There is no --json: the output is the files' names, one a line.

    Parameters
    ----------
    target
        systemd: a unit. docker: Dockerfiles for the CPU and for CUDA. grafana: a dashboard over /metrics.
    folder
        Where to write them.
    force
        Write over what is there.
    """
    from fairlead.console.deploy import deploy as write

    return write(target, folder, force=force)


@commands.command
def completion(shell: Literal["bash", "zsh", "fish"], /) -> int:
    """Print the completion script for a shell. `fairlead --install-completion` puts it in its place.

    Parameters
    ----------
    shell
        The shell.
    """
    sys.stdout.write(commands.generate_completion(prog_name="fairlead", shell=shell))
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command (default: this process's arguments) and return its exit code."""
    from fairlead.console.announcer import complain

    try:
        code = commands(arguments, exit_on_error=False, print_error=False, result_action="return_value")
    except (CycloptsError, ConfigError) as error:
        complain(f"{error}\nTry 'fairlead --help'.")
        return 2
    except BrokenPipeError:
        # Whoever read our output has left. The interpreter must not fail again when it flushes the rest.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        complain(str(error))
        return 1
    except KeyboardInterrupt:
        return 130
    return code if isinstance(code, int) else 0


def _source(file: Path, model: str | None, options: ServeOptions, *, is_watched: bool) -> "Source":
    """Return how the file is read again: what the command line says still wins over it."""
    from fairlead.configfile import read_config
    from fairlead.reload import Source

    def read() -> Config:
        return options.config(model, read_config(file, os.environ).config)

    return Source(file, read, is_watched)


def _serve(config: Config, source: "Source | None", *, lifeline: bool) -> int:
    from fairlead.app import run as run_server
    from fairlead.console.announcer import end_with_standard_input, open_announcer, warn

    if not is_loopback(config.host) and not config.api_keys:
        warn(f"anybody who can reach {config.host} may use this server; --api-key would ask them for a key")
    if lifeline:
        end_with_standard_input()
    with open_announcer(key_needed=bool(config.api_keys)) as announcer:
        return run_server(config, announcer, source)


if __name__ == "__main__":
    sys.exit(main())
