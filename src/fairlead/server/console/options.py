"""The options of `serve` and `node`, and how they combine with a configuration file.

The command line overrides the file.
"""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
from cyclopts import Parameter, validators

from fairlead.base.config import (
    AnyModelConfig,
    ApiKey,
    ClusterConfig,
    Config,
    ConfigError,
    KvCacheConfig,
    Limits,
    ModelConfig,
    QueueConfig,
    ReplicasConfig,
    Role,
    default_store,
    demonstration_model,
)
from fairlead.language.text.gguf_choice import absolute, is_gguf, model_name
from fairlead.server.console.setting_options import SettingOption, setting_options

# A model on the Hugging Face hub: `organization/name`, with `:FILE` for a GGUF there, and `@revision`.
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/([\w.-]+?)(:[\w./-]+)?(@[\w./-]+)?", re.ASCII)


def _known_device(_type: object, value: str | None) -> None:
    if value is not None and not re.fullmatch(r"auto|cpu|cuda(:\d+)?", value):
        raise ValueError("Must be auto, cpu, cuda or cuda:N.")


def _not_blank(_type: object, value: str | None) -> None:
    if value is not None and not value.strip():
        raise ValueError("Must not be empty.")


def _model(_type: object, value: str | None) -> None:
    if value is None or Path(value).is_dir():
        return
    if is_gguf(Path(value)) and ":" not in value:
        if not Path(value).is_file():
            raise ValueError("There is no such file.")
    elif Path(value).exists():
        raise ValueError("Must be a directory, a GGUF file, or a model of the hub (organization/name).")
    elif HUB_ID.fullmatch(value) is None:
        raise ValueError("There is no such directory, and a model of the hub is written organization/name.")


AtLeastOne = Annotated[int | None, Parameter(validator=validators.Number(gte=1))]
AtLeastZero = Annotated[int | None, Parameter(validator=validators.Number(gte=0))]
File = Annotated[Path, Parameter(validator=validators.Path(exists=True, dir_okay=False))]
Model = Annotated[str, Parameter(validator=_model)]
Port = Annotated[int, Parameter(validator=validators.Number(gte=0, lte=65535))]
Flag = Annotated[bool, Parameter(negative="")]


SERVE_OPTIONS = (
    SettingOption("host", Config, "host", env_var="FAIRLEAD_HOST", validator=_not_blank),
    SettingOption("port", Config, "port", env_var="FAIRLEAD_PORT"),
    SettingOption("device", ModelConfig, "device", validator=_known_device),
    *(
        SettingOption(name, ModelConfig, name)
        for name in (
            *("dtype", "quantization", "slots", "max_batch", "max_batched_tokens", "max_model_len"),
            *("wire_format", "threads", "parallel"),
        )
    ),
    SettingOption("kv_cache_memory_mb", KvCacheConfig, "max_memory_mb"),
    SettingOption("queue_capacity", QueueConfig, "capacity"),
    SettingOption("queue_timeout", QueueConfig, "timeout_s"),
    SettingOption("fairness", QueueConfig, "fairness"),
    SettingOption("estimate", QueueConfig, "estimate"),
    SettingOption("keep_alive", QueueConfig, "keep_alive_s"),
    SettingOption("request_timeout", Config, "request_timeout_s"),
    SettingOption("drain_timeout", Limits, "drain_s"),
    SettingOption("log_json", Config, "log_json"),
    SettingOption("store", Config, "store", env_var="FAIRLEAD_STORE", validator=_not_blank),
)


@Parameter(name="*")
@setting_options(SERVE_OPTIONS)
class ServeOptions:
    """Options of a server: the settings of `SERVE_OPTIONS`, and those below.

    An option that is not given keeps the setting of the configuration file, or the default.

    Parameters
    ----------
    api_key
        A key that clients must send: KEY, or USER=KEY to name its user. May be repeated. Its role is user: it
        cannot control models and nodes. Replaces the keys of a configuration file.
    admin_key
        The same with the role admin, for the people who run the server. Added to the other keys.
    allowed_host
        A further name by which clients reach the server, such as ai.local. May be repeated.
    served_model_name
        Name of the model in the API. Default: the name of its directory, or of its hub repository.
    ray
        Address of a Ray cluster, HOST:PORT or auto, on which models with replicas run, and MODEL.
    lifeline
        Stop when standard input ends, so that the server does not outlive its parent.
    """

    api_key: Annotated[
        tuple[str, ...], Parameter(env_var="FAIRLEAD_API_KEY", negative="", show_default=False)
    ] = ()
    admin_key: Annotated[
        tuple[str, ...], Parameter(env_var="FAIRLEAD_ADMIN_KEY", negative="", show_default=False)
    ] = ()
    allowed_host: Annotated[
        tuple[str, ...], Parameter(env_var="FAIRLEAD_ALLOWED_HOST", negative="", show_default=False)
    ] = ()
    served_model_name: Annotated[str | None, Parameter(validator=_not_blank)] = None
    ray: Annotated[str | None, Parameter(validator=_not_blank)] = None
    lifeline: Annotated[bool, Parameter(negative="", show=False)] = False

    def has_store(self, given: Config) -> bool:
        """Return whether the options or the file say which store is used."""
        return bool(given.store or self.settings(Config).get("store"))

    def settings(self, owner: type[msgspec.Struct]) -> dict[str, Any]:
        """Return the settings of this struct that are given, by the names of its fields."""
        values = {
            option.field: getattr(self, option.name) for option in SERVE_OPTIONS if option.owner is owner
        }
        return {field: value for field, value in values.items() if value is not None and value is not False}

    def config(self, model: str | None, given: Config) -> Config:
        """Return `given` overridden by these options, with the requested model. Raises `ConfigError`."""
        cluster = given.cluster
        if self.ray is not None:
            cluster = msgspec.structs.replace(cluster or ClusterConfig(), ray=self.ray)
        return msgspec.structs.replace(
            given,
            cluster=cluster,
            models=self._models(model, given),
            api_keys=self._api_keys(given),
            allowed_hosts=(*given.allowed_hosts, *self.allowed_host),
            queue=msgspec.structs.replace(given.queue, **self.settings(QueueConfig)),
            limits=msgspec.structs.replace(given.limits, **self.settings(Limits)),
            **{"store": given.store or default_store(os.environ), **self.settings(Config)},
        )

    def _api_keys(self, given: Config) -> tuple[ApiKey, ...]:
        """Return the keys of the file or of `--api-key`, and those of `--admin-key`."""
        api_keys = parse_api_keys(self.api_key) or given.api_keys
        admin_keys = parse_api_keys(self.admin_key, "--admin-key", role="admin")
        if {key.key for key in admin_keys} & {key.key for key in api_keys}:
            raise ConfigError("--admin-key: is the same key as another, which has a role of its own")
        return (*admin_keys, *api_keys)

    def _models(self, requested: str | None, given: Config) -> tuple[AnyModelConfig, ...]:
        """Return the models of the file, or else the requested one, with these options applied."""
        settings, cache_settings = self.settings(ModelConfig), self.settings(KvCacheConfig)
        slots = settings.get("slots")
        if slots is not None and settings.get("max_batch", 0) > slots:
            raise ConfigError(f"--max-batch: must be at most --slots, which is {slots}")
        if self.served_model_name is not None:
            settings["name"] = self.served_model_name
        if given.models or (given.nodes and requested is None):
            if requested is not None:
                raise ConfigError("MODEL: cannot be given with --config, which has the models")
            if not settings and not cache_settings:
                return given.models
            model = given.models[0] if len(given.models) == 1 else None
            if not isinstance(model, ModelConfig):
                option = next(iter(settings), "kv_cache_memory_mb").replace("name", "served_model_name")
                raise ConfigError(f"--{option.replace('_', '-')}: --config must have one model, with a path")
        else:
            model = model_at(requested)
            if self.ray is not None:
                settings["replicas"] = ReplicasConfig()
        kv_cache = msgspec.structs.replace(model.kv_cache, **cache_settings)
        return (msgspec.structs.replace(model, kv_cache=kv_cache, **settings),)


def parse_api_keys(
    texts: Sequence[str], option: str = "--api-key", *, role: Role = "user"
) -> tuple[ApiKey, ...]:
    """Parse API keys of an option in the form KEY or USER=KEY. Raises `ConfigError` for a duplicate."""
    keys = tuple(_parse_api_key(text, option, role) for text in texts)
    if len({key.key for key in keys}) < len(keys):
        raise ConfigError(f"{option}: the same key is given twice")
    return keys


def _parse_api_key(text: str, option: str, role: Role) -> ApiKey:
    """Parse KEY or USER=KEY. A '=' that only ends the text, as in base64, belongs to the key."""
    user, _, key = text.partition("=")
    if user and key.strip("="):
        return ApiKey(key=key, user=user, role=role)
    if not text.strip():
        raise ConfigError(f"{option}: must not be empty")
    return ApiKey(key=text, role=role)


def model_at(requested: str | None) -> ModelConfig:
    """Return the model at a path or on the hub, which is not contacted before the server starts."""
    path = demonstration_model() if requested is None else Path(requested)
    hub = None if path.exists() or requested is None else HUB_ID.fullmatch(requested)
    if hub is not None and (hub[2] or not is_gguf(path)):
        return ModelConfig(path=path, name=hub[1], preload=True)
    found = absolute(path) if is_gguf(path) else path.resolve()
    return ModelConfig(path=found, name=model_name(found), preload=True)
