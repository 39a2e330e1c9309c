"""The command line: arguments become a `Config` or a chat, outcomes become exit codes.

Owns the names, ranges and help of the options. Knows nothing of how anything is served (`app`) or shown
(`console`). Importing it is cheap: a command imports what it needs when it runs.

Exit codes: 0 good, 1 failed, 2 bad usage or configuration, 130 interrupted.
"""

import os
import re
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from cyclopts import App, CycloptsError, Parameter, validators

from fairlead.config import (
    AnyModelConfig,
    ApiKey,
    Config,
    ConfigError,
    ModelConfig,
    demonstration_model,
    is_loopback,
)

S = TypeVar("S", bound=msgspec.Struct)

commands = App(
    "fairlead",
    help="A language-model server that gives every user a fair turn.",
    version=lambda: metadata.version("fairlead"),
)
commands.register_install_completion_command()


def _no_nan(_type: object, value: float | None) -> None:
    """Ranges are checked by comparison, and a NaN passes every comparison that is meant to fail."""
    if value is not None and value != value:  # noqa: PLR0124 - this is how a NaN is known
        raise ValueError("Must be a number.")


def _known_device(_type: object, value: str | None) -> None:
    if value is not None and not re.fullmatch(r"auto|cpu|cuda(:\d+)?", value):
        raise ValueError("Must be auto, cpu, cuda or cuda:N.")


AtLeastOne = Annotated[int | None, Parameter(validator=validators.Number(gte=1))]
File = Annotated[Path, Parameter(validator=validators.Path(exists=True, dir_okay=False))]
Seconds = Annotated[float | None, Parameter(validator=(validators.Number(gt=0, lt=float("inf")), _no_nan))]


commands.command(configuration := App("config", help="Look at configuration files."))


@commands.command
def serve(
    model: Annotated[Path | None, Parameter(validator=validators.Path(exists=True, file_okay=False))] = None,
    /,
    *,
    config: File | None = None,
    host: Annotated[str | None, Parameter(env_var="FAIRLEAD_HOST")] = None,
    port: Annotated[
        int | None, Parameter(env_var="FAIRLEAD_PORT", validator=validators.Number(gte=0, lte=65535))
    ] = None,
    api_key: Annotated[
        tuple[str, ...], Parameter(env_var="FAIRLEAD_API_KEY", negative="", show_default=False)
    ] = (),
    served_model_name: str | None = None,
    device: Annotated[str | None, Parameter(validator=_known_device)] = None,
    dtype: Literal["auto", "float32", "bfloat16", "float16"] | None = None,
    slots: AtLeastOne = None,
    max_batch: AtLeastOne = None,
    max_batched_tokens: AtLeastOne = None,
    max_model_len: AtLeastOne = None,
    kv_cache_memory_mb: AtLeastOne = None,
    threads: AtLeastOne = None,
    queue_capacity: Annotated[int | None, Parameter(validator=validators.Number(gte=0))] = None,
    queue_timeout: Seconds = None,
    fairness: Literal["roundRobin", "tokens"] | None = None,
    estimate: Literal["mean", "quantile"] | None = None,
    keep_alive: Annotated[
        float | None, Parameter(validator=(validators.Number(gte=0, lt=float("inf")), _no_nan))
    ] = None,
    request_timeout: Seconds = None,
    drain_timeout: Seconds = None,
    log_json: Annotated[bool, Parameter(negative="")] = False,
    lifeline: Annotated[bool, Parameter(negative="", show=False)] = False,
) -> int:
    """Serve a model over HTTP.

    Parameters
    ----------
    model
        Directory of the model. Without it and without --config, the small demonstration model is served.
    config
        A configuration file (fairlead.yaml, or llama-swap's). What is given here as well wins over it.
    host
        Address to listen on. Default: 127.0.0.1.
    port
        Port to listen on; 0 takes a free one. Default: 8000.
    api_key
        A key that clients must send: KEY, or USER=KEY to say whose it is. May be given several times.
    served_model_name
        What clients call the model. Default: the name of its directory.
    device
        auto, cpu, cuda or cuda:N. Default: auto.
    dtype
        Type of the weights and the KV cache. Default: auto.
    slots
        Sequences that run at once.
    max_batch
        Sequences in one step; at most --slots.
    max_batched_tokens
        Tokens in one step.
    max_model_len
        Tokens of prompt and answer together. Default: the model's own context.
    kv_cache_memory_mb
        Memory of the KV cache, in MiB.
    threads
        CPU threads of the engine.
    queue_capacity
        Jobs that may wait; the next one is answered 429. Default: 100.
    queue_timeout
        Seconds a job may wait for its turn. Default: 60.
    fairness
        What tenants get equal shares of: turns (roundRobin, the default) or tokens.
    estimate
        How waits are foretold: from the mean service time (default), or from predicted lengths (quantile).
    keep_alive
        Seconds after which a stream that still waits is told its position; 0: never. Default: 15.
    request_timeout
        Seconds a job may run. Default: 600.
    drain_timeout
        Seconds that running jobs are given to finish when the server is told to stop. Default: 30.
    log_json
        Log in JSON, one object a line.
    lifeline
        Stop when standard input ends: a parent that dies cannot leave us behind.
    """
    if max_batch and slots and max_batch > slots:
        raise ConfigError(f"--max-batch: must be at most --slots, which is {slots}")
    given = Config(models=())
    if config is not None:
        from fairlead.console.configuration import read

        reading = read(config)
        if reading is None:
            return 2
        given = reading.config
    models = _models(
        given,
        model,
        kv_cache_memory_mb,
        name=None if served_model_name is None else _not_empty("--served-model-name", served_model_name),
        device=device,
        dtype=dtype,
        slots=slots,
        max_batch=max_batch,
        max_batched_tokens=max_batched_tokens,
        max_model_len=max_model_len,
        threads=threads,
    )
    queue = _told(
        given.queue,
        capacity=queue_capacity,
        timeout_s=queue_timeout,
        fairness=fairness,
        estimate=estimate,
        keep_alive_s=keep_alive,
    )
    settings = _told(
        given,
        models=models,
        host=None if host is None else _not_empty("--host", host),
        port=port,
        api_keys=_parse_api_keys(api_key) or None,
        queue=queue,
        limits=_told(given.limits, drain_s=drain_timeout),
        request_timeout_s=request_timeout,
        log_json=log_json or None,
    )
    return _serve(settings, lifeline=lifeline)


@configuration.command
def check(file: File, /, *, json: Annotated[bool, Parameter(negative="")] = False) -> int:
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


@commands.command
def run(
    model: str | None = None,
    prompt: str | None = None,
    *,
    url: Annotated[str | None, Parameter(env_var="FAIRLEAD_URL")] = None,
    api_key: Annotated[str | None, Parameter(env_var="FAIRLEAD_API_KEY")] = None,
) -> int:
    """Chat with a model in the terminal.

    Talks to the server at --url. When none is given and none runs at http://127.0.0.1:8000, one is started
    for as long as the chat lasts.

    Parameters
    ----------
    model
        Name of a served model, or the directory of one. Default: the first one the server has.
    prompt
        Ask this and end. Without it standard input is the prompt, or the chat when it is a terminal.
    url
        Address of the server.
    api_key
        The key to send.
    """
    from fairlead.console.chat import chat

    if url is not None and not url.startswith(("http://", "https://")):
        raise ConfigError(f"--url: must begin with http:// or https://, not {url!r}")
    key = _parse_api_keys(api_key.split()[:1])[0].key if api_key and api_key.strip() else None
    return chat(model=model, prompt=prompt, url=url, api_key=key)


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


def _serve(config: Config, *, lifeline: bool) -> int:
    from fairlead.app import run as run_server
    from fairlead.console.announcer import end_with_standard_input, open_announcer, warn

    if not is_loopback(config.host) and not config.api_keys:
        warn(f"anybody who can reach {config.host} may use this server; --api-key would ask them for a key")
    if lifeline:
        end_with_standard_input()
    with open_announcer(key_needed=bool(config.api_keys)) as announcer:
        return run_server(config, announcer)


def _models(
    given: Config, path: Path | None, kv_cache_memory_mb: int | None, **options: Any
) -> tuple[AnyModelConfig, ...]:
    """Return the models of the file, or else the one that the arguments mean, with the options put in."""
    asked = {name: value for name, value in options.items() if value is not None}
    if given.models or (given.nodes and path is None):
        if path is not None:
            raise ConfigError("MODEL: the models are those of --config")
        if not asked and kv_cache_memory_mb is None:
            return given.models
        model = given.models[0] if len(given.models) == 1 else None
        if not isinstance(model, ModelConfig):
            option = next(iter(asked), "kv_cache_memory_mb").replace("name", "served_model_name")
            raise ConfigError(f"--{option.replace('_', '-')}: --config must have one model, with a path")
    else:
        folder = (path or demonstration_model()).resolve()
        model = ModelConfig(path=folder, name=folder.name)
    return (_told(model, kv_cache=_told(model.kv_cache, max_memory_mb=kv_cache_memory_mb), **asked),)


def _told(settings: S, **options: Any) -> S:
    """Return the settings with what was asked for; None was not."""
    return msgspec.structs.replace(
        settings, **{name: value for name, value in options.items() if value is not None}
    )


def _parse_api_keys(texts: Sequence[str]) -> tuple[ApiKey, ...]:
    keys = tuple(map(_parse_api_key, texts))
    if len({key.key for key in keys}) < len(keys):
        raise ConfigError("--api-key: the same key is given twice")
    return keys


def _parse_api_key(text: str) -> ApiKey:
    """Read KEY or USER=KEY. Keys in base64 end in '=': that alone does not make the rest a user."""
    user, _, key = text.partition("=")
    if user and key.strip("="):
        return ApiKey(key=key, user=user)
    return ApiKey(key=_not_empty("--api-key", text))


def _not_empty(option: str, value: str) -> str:
    if not value.strip():
        raise ConfigError(f"{option}: must not be empty")
    return value


if __name__ == "__main__":
    sys.exit(main())
