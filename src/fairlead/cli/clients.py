"""The commands that talk to a server, whoever runs it: each has something of `console` ask and show."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from fairlead.config import ConfigError
from fairlead.console.load_options import LoadOptions
from fairlead.console.options import Flag, parse_api_keys

if TYPE_CHECKING:
    from fairlead.console.client import Client

DEFAULT_URL = "http://127.0.0.1:8000"


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


def run(
    model: str | None = None,
    prompt: str | None = None,
    *,
    server: ServerOptions = ServerOptions(),
) -> int:
    """Ask a question, or chat with a model in the terminal. Ctrl-C stops the answer, not the program.

    `fairlead run "Why is the sky blue?"` asks the first model, `fairlead run MODEL PROMPT` another one.
    Talks to the server at --url. When none is given and none runs at http://127.0.0.1:8000, one is started
    for as long as the chat lasts. There is no --json: `POST /v1/chat/completions` answers in JSON.

    Parameters
    ----------
    model
        Name of a served model, or the directory of one. Default: the first one the server has. If it comes
        alone and has a space or anything else that names of models do not have, it is the prompt.
    prompt
        Ask this and end. Without it standard input is the prompt, or the chat when it is a terminal.
    """
    from fairlead.console.chat import chat

    return chat(model=model, prompt=prompt, url=server.url, api_key=server.key)


def ps(*, json: Flag = False, server: ServerOptions = ServerOptions()) -> int:
    """Show what `top` shows, once: the queue, the models and the nodes of a server.

    Parameters
    ----------
    json
        Answer in JSON.
    """
    from fairlead.console.status import ps as show

    return server.ask(partial(show, as_json=json))


def top(*, json: Flag = False, server: ServerOptions = ServerOptions()) -> int:
    """Watch a server work, until q or Ctrl-C.

    Parameters
    ----------
    json
        Write each picture as a line of JSON.
    """
    from fairlead.console.top import top as watch

    return server.ask(partial(watch, as_json=json))


def logs(
    model: str,
    /,
    *,
    follow: Annotated[bool, Parameter(name=("--follow", "-f"), negative="")] = False,
    server: ServerOptions = ServerOptions(),
) -> int:
    """Show the last lines that a model's processes have printed: a command's output, an engine's errors.

    There is no --json: the output is those lines, without control characters.

    Parameters
    ----------
    model
        Name of the model.
    follow
        Go on with what they print from now on, until Ctrl-C.
    """
    from fairlead.console.status import logs as show

    return server.ask(partial(show, model=model, follow=follow))


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
