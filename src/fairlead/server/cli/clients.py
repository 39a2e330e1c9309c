"""The commands that connect to a server, local or remote. Each calls a function of `console`."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from fairlead.base.config import UNIX_PREFIX, ConfigError
from fairlead.server.console.load_options import LoadOptions
from fairlead.server.console.options import Flag, parse_api_keys

if TYPE_CHECKING:
    from fairlead.server.console.client import Client

DEFAULT_URL = "http://127.0.0.1:8000"


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """The server that a command connects to.

    Parameters
    ----------
    url
        Address of the server, also unix:PATH. Default: http://127.0.0.1:8000.
    api_key
        API key to send. `stop` and `logs` need one with the role operator.
    """

    url: Annotated[str | None, Parameter(env_var="FAIRLEAD_URL")] = None
    api_key: Annotated[str | None, Parameter(env_var=("FAIRLEAD_API_KEY", "FAIRLEAD_ADMIN_KEY"))] = None

    def __post_init__(self) -> None:
        """Raise `ConfigError` unless the URL begins with http://, https:// or unix:."""
        if self.url is not None and not self.url.startswith(("http://", "https://", UNIX_PREFIX)):
            raise ConfigError(f"--url: must begin with http://, https:// or unix:, not {self.url!r}")

    @property
    def key(self) -> str | None:
        """The first key, without its user: FAIRLEAD_API_KEY may hold a server's keys, USER=KEY each."""
        if not self.api_key or not self.api_key.strip():
            return None
        return parse_api_keys(self.api_key.split()[:1])[0].key

    def run(self, show: Callable[["Client"], int]) -> int:
        """Call `show` with a client; return its exit code, or 1 after reporting a `ServerError`."""
        from fairlead.server.console.announcer import report_error
        from fairlead.server.console.client import Client, ServerError

        try:
            with Client(self.url or DEFAULT_URL, api_key=self.key) as client:
                return show(client)
        except ServerError as error:
            report_error(str(error))
            return 1


def run(
    model: str | None = None,
    prompt: str | None = None,
    *,
    server: ServerOptions = ServerOptions(),
) -> int:
    """Ask a question, or chat with a model in the terminal. Ctrl-C stops the answer, not the program.

    `fairlead run "Why is the sky blue?"` asks the first model, `fairlead run MODEL PROMPT` another one.
    Connects to the server at --url. Without --url, and without a server at http://127.0.0.1:8000, a server is
    started for the duration of the chat. There is no --json; `POST /v1/chat/completions` returns JSON.

    Parameters
    ----------
    model
        Name of a served model, or directory of a model. Default: the server's first model. If it is the only
        argument and cannot be a model's name (it has a space, for example), it is the prompt.
    prompt
        Answer this prompt and exit. Default: standard input, or a chat if that is a terminal.
    """
    from fairlead.server.console.chat import chat

    return chat(model=model, prompt=prompt, url=server.url, api_key=server.key)


def ps(*, json: Flag = False, server: ServerOptions = ServerOptions()) -> int:
    """Show the queue, models, nodes, tenants and requests of a server once; `top` shows them continuously.

    Tenants and requests are those that the key may see: with an operator's key all.

    Parameters
    ----------
    json
        Print JSON.
    """
    from fairlead.server.console.status import ps as show

    return server.run(partial(show, as_json=json))


def top(*, json: Flag = False, server: ServerOptions = ServerOptions()) -> int:
    """Show the queue, models, nodes, tenants and requests of a server continuously, until q or Ctrl-C.

    Tenants and requests are those that the key may see: with an operator's key all.

    Parameters
    ----------
    json
        Print each snapshot as a line of JSON.
    """
    from fairlead.server.console.top import top as watch

    return server.run(partial(watch, as_json=json))


def logs(
    model: str,
    /,
    *,
    follow: Annotated[bool, Parameter(name=("--follow", "-f"), negative="")] = False,
    server: ServerOptions = ServerOptions(),
) -> int:
    """Show the last output of a model's processes: a command's output, an engine's errors.

    There is no --json: the output is plain lines, without control characters.

    Parameters
    ----------
    model
        Name of the model.
    follow
        Keep printing new lines, until Ctrl-C.
    """
    from fairlead.server.console.status import logs as show

    return server.run(partial(show, model=model, follow=follow))


def stop(
    model: str,
    /,
    *,
    force: Flag = False,
    server: ServerOptions = ServerOptions(),
) -> int:
    """Unload a model and free all of its memory. The next request for it loads it again.

    There is no --json: the exit code is the result.

    Parameters
    ----------
    model
        Name of the model.
    force
        Do not wait for its running jobs; they fail.
    """
    from fairlead.server.console.status import stop as unload

    return server.run(partial(unload, model=model, force=force))


def bench(
    model: str | None = None,
    /,
    *,
    load: LoadOptions = LoadOptions(),  # noqa: B008 - frozen
    json: Path | None = None,
    plot: Path | None = None,
    server: ServerOptions = ServerOptions(),
) -> int:
    """Run a load test against any OpenAI-compatible server; report throughput, latencies and errors.

    Parameters
    ----------
    model
        Name of the model. Default: the server's first model.
    json
        Write all measurements to this file, as JSON.
    plot
        Plot the distributions to this PNG file (needs fairlead[bench]).
    """
    from fairlead.server.console.bench import bench as measure

    return measure(
        load.options(server.url or DEFAULT_URL, model or ""), api_key=server.key, json=json, plot=plot
    )
