"""The options of `serve` and `node`, and how they combine with a configuration file.

Owns the names, ranges and help texts of the options. The command line overrides the file.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from cyclopts import Parameter, validators

from fairlead.config import (
    AnyModelConfig,
    ApiKey,
    Config,
    ConfigError,
    ModelConfig,
    demonstration_model,
)
from fairlead.text.hub import gguf_advice, is_gguf

S = TypeVar("S", bound=msgspec.Struct)

# A model on the Hugging Face hub: `organization/name`, optionally with `@revision`.
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/([\w.-]+?)(@[\w./-]+)?", re.ASCII)


def _no_nan(_type: object, value: float | None) -> None:
    """Reject NaN: every comparison with it is false, so the range validators accept it."""
    if value is not None and value != value:  # noqa: PLR0124 - only NaN differs from itself
        raise ValueError("Must be a number.")


def _known_device(_type: object, value: str | None) -> None:
    if value is not None and not re.fullmatch(r"auto|cpu|cuda(:\d+)?", value):
        raise ValueError("Must be auto, cpu, cuda or cuda:N.")


def _model(_type: object, value: str | None) -> None:
    if value is not None and is_gguf(value):
        raise ValueError(gguf_advice(value))
    if value is None or Path(value).is_dir() or (HUB_ID.fullmatch(value) and not Path(value).exists()):
        return
    if Path(value).exists():
        raise ValueError("Must be a directory, or a model of the hub (organization/name).")
    raise ValueError("There is no such directory, and a model of the hub is written organization/name.")


AtLeastOne = Annotated[int | None, Parameter(validator=validators.Number(gte=1))]
AtLeastNone = Annotated[int | None, Parameter(validator=validators.Number(gte=0))]
File = Annotated[Path, Parameter(validator=validators.Path(exists=True, dir_okay=False))]
Model = Annotated[str, Parameter(validator=_model)]
Port = Annotated[int, Parameter(validator=validators.Number(gte=0, lte=65535))]
Seconds = Annotated[float | None, Parameter(validator=(validators.Number(gt=0, lt=float("inf")), _no_nan))]
SecondsOrNone = Annotated[
    float | None, Parameter(validator=(validators.Number(gte=0, lt=float("inf")), _no_nan))
]
Flag = Annotated[bool, Parameter(negative="")]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Options of a server. None: the setting of the configuration file, or the default.

    Parameters
    ----------
    host
        Address to listen on. Default: 127.0.0.1.
    port
        Port to listen on; 0 picks a free one. Default: 8000.
    api_key
        A key that clients must send: KEY, or USER=KEY to name its user. May be repeated.
    served_model_name
        Name of the model in the API. Default: the name of its directory, or of its hub repository.
    device
        Device to run on: auto, cpu, cuda or cuda:N. Default: auto.
    dtype
        Data type of the weights and the KV cache. Default: auto.
    quantization
        Quantize the weights to 8 bits: int8 on a CPU, fp8 on a Hopper GPU.
    slots
        Maximum number of concurrent sequences.
    max_batch
        Maximum number of sequences in one step; at most --slots.
    max_batched_tokens
        Maximum number of tokens in one step.
    max_model_len
        Maximum length of prompt and answer together, in tokens. Default: the model's own limit.
    kv_cache_memory_mb
        Memory of the KV cache, in MiB.
    threads
        CPU threads of the engine.
    queue_capacity
        Maximum number of queued jobs; further ones are refused with 429. Default: 100.
    queue_timeout
        Maximum time that a job may be queued, in seconds. Default: 60.
    fairness
        What tenants get equal shares of: turns (roundRobin, the default) or tokens.
    estimate
        How waits are estimated: from predicted lengths (quantile, the default), or from the mean service
        time (mean).
    keep_alive
        Seconds after which a queued stream begins to report its position; 0: never. Default: 15.
    request_timeout
        Maximum time that a job may run, in seconds. Default: 600.
    drain_timeout
        Seconds that running jobs may take to finish when the server is stopped. Default: 30.
    log_json
        Write the log as JSON, one object per line.
    lifeline
        Stop when standard input ends, so that the server does not outlive its parent.
    """

    host: Annotated[str | None, Parameter(env_var="FAIRLEAD_HOST")] = None
    port: Annotated[Port | None, Parameter(env_var="FAIRLEAD_PORT")] = None
    api_key: Annotated[
        tuple[str, ...], Parameter(env_var="FAIRLEAD_API_KEY", negative="", show_default=False)
    ] = ()
    served_model_name: str | None = None
    device: Annotated[str | None, Parameter(validator=_known_device)] = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] | None = None
    quantization: Literal["fp8", "int8"] | None = None
    slots: AtLeastOne = None
    max_batch: AtLeastOne = None
    max_batched_tokens: AtLeastOne = None
    max_model_len: AtLeastOne = None
    kv_cache_memory_mb: AtLeastOne = None
    threads: AtLeastOne = None
    queue_capacity: AtLeastNone = None
    queue_timeout: Seconds = None
    fairness: Literal["roundRobin", "tokens"] | None = None
    estimate: Literal["mean", "quantile"] | None = None
    keep_alive: SecondsOrNone = None
    request_timeout: Seconds = None
    drain_timeout: Seconds = None
    log_json: Flag = False
    lifeline: Annotated[bool, Parameter(negative="", show=False)] = False

    def config(self, model: str | None, given: Config) -> Config:
        """Return `given` overridden by these options, with the requested model. Raises `ConfigError`."""
        if self.max_batch and self.slots and self.max_batch > self.slots:
            raise ConfigError(f"--max-batch: must be at most --slots, which is {self.slots}")
        queue = told(
            given.queue,
            capacity=self.queue_capacity,
            timeout_s=self.queue_timeout,
            fairness=self.fairness,
            estimate=self.estimate,
            keep_alive_s=self.keep_alive,
        )
        return told(
            given,
            models=self._models(model, given),
            host=None if self.host is None else _not_empty("--host", self.host),
            port=self.port,
            api_keys=parse_api_keys(self.api_key) or None,
            queue=queue,
            limits=told(given.limits, drain_s=self.drain_timeout),
            request_timeout_s=self.request_timeout,
            log_json=self.log_json or None,
        )

    def _models(self, asked: str | None, given: Config) -> tuple[AnyModelConfig, ...]:
        """Return the models of the file, or else the requested one, with these options applied."""
        name = self.served_model_name
        settings: dict[str, Any] = {
            "name": None if name is None else _not_empty("--served-model-name", name),
            **{
                option: getattr(self, option)
                for option in (
                    *("device", "dtype", "quantization", "slots", "max_batch"),
                    *("max_batched_tokens", "max_model_len", "threads"),
                )
            },
        }
        settings = {option: value for option, value in settings.items() if value is not None}
        if given.models or (given.nodes and asked is None):
            if asked is not None:
                raise ConfigError("MODEL: the models are those of --config")
            if not settings and self.kv_cache_memory_mb is None:
                return given.models
            model = given.models[0] if len(given.models) == 1 else None
            if not isinstance(model, ModelConfig):
                option = next(iter(settings), "kv_cache_memory_mb").replace("name", "served_model_name")
                raise ConfigError(f"--{option.replace('_', '-')}: --config must have one model, with a path")
        else:
            model = _model_at(asked)
        return (
            told(model, kv_cache=told(model.kv_cache, max_memory_mb=self.kv_cache_memory_mb), **settings),
        )


def told(settings: S, **options: Any) -> S:
    """Return the settings with these options replaced; an option that is None keeps its setting."""
    return msgspec.structs.replace(
        settings, **{name: value for name, value in options.items() if value is not None}
    )


def parse_api_keys(texts: Sequence[str]) -> tuple[ApiKey, ...]:
    """Parse API keys in the form KEY or USER=KEY. Raises `ConfigError` for a duplicate."""
    keys = tuple(map(_parse_api_key, texts))
    if len({key.key for key in keys}) < len(keys):
        raise ConfigError("--api-key: the same key is given twice")
    return keys


def _parse_api_key(text: str) -> ApiKey:
    """Parse KEY or USER=KEY. A '=' that only ends the text, as in base64, belongs to the key."""
    user, _, key = text.partition("=")
    if user and key.strip("="):
        return ApiKey(key=key, user=user)
    return ApiKey(key=_not_empty("--api-key", text))


def _model_at(asked: str | None) -> ModelConfig:
    """Return the model in a directory or on the hub, which is not contacted before the server starts."""
    path = demonstration_model() if asked is None else Path(asked)
    hub = None if path.exists() or asked is None else HUB_ID.fullmatch(asked)
    if hub is not None:
        return ModelConfig(path=path, name=hub[1], preload=True)
    folder = path.resolve()
    return ModelConfig(path=folder, name=folder.name, preload=True)


def _not_empty(option: str, value: str) -> str:
    if not value.strip():
        raise ConfigError(f"{option}: must not be empty")
    return value
