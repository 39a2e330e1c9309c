"""Reads the models of a configuration file: their kinds, their defaults and their folders."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from fairlead.base.config import MODEL_KINDS, AnyModelConfig, CommandConfig, Fault, ModelConfig
from fairlead.base.config.models import NO_SETTINGS
from fairlead.base.config.spelling import KeyPath, settings_of
from fairlead.language.text.gguf_choice import absolute, is_gguf
from fairlead.language.text.hub import is_hub_id
from fairlead.server.configfile import llama_swap
from fairlead.server.configfile.convert import Conversion
from fairlead.server.configfile.sections import FileSettings


class ModelReader:
    """Makes the configurations of models. Adds to the faults of `conversion`, and continues after each.

    A relative path of a model begins at `folder`. `ports` are those of commands, by the names of the models.
    """

    def __init__(self, conversion: Conversion, folder: Path, ports: Mapping[str, int]) -> None:
        self._conversion = conversion
        self._faults = conversion.faults
        self._folder = folder
        self._ports = ports

    def read(self, raw: object, common: FileSettings) -> list[AnyModelConfig]:
        """Return the valid models; `common` has their defaults."""
        if raw is None:
            return []
        if not isinstance(raw, dict):
            self._faults.append(Fault(("models",), "must be a mapping from names to settings"))
            return []
        models = (self._model(name, settings, common) for name, settings in raw.items())
        return [model for model in models if model is not None]

    def _model(self, name: str, raw: object, common: FileSettings) -> AnyModelConfig | None:
        path = ("models", name)
        if not name.strip():
            self._faults.append(Fault(path, "the name of a model must not be empty"))
        if not isinstance(raw, dict):
            self._faults.append(Fault(path, "must be a mapping with path or cmd"))
            return None
        kinds = [key for key in MODEL_KINDS if raw.get(key) is not None]
        if len(kinds) != 1:
            self._report_kind(raw, path, both=bool(kinds))
            return None
        kind = MODEL_KINDS[kinds[0]]
        misplaced = {
            setting.spelling: f"is for models with {key}"
            for key, other in MODEL_KINDS.items()
            for setting in settings_of(other)
            if other is not kind and setting.name not in NO_SETTINGS
        }
        fixed: dict[str, Any] = {"name": name}
        if kind is CommandConfig:
            fixed["port"] = self._ports.get(name)
        made = self._conversion.struct(
            kind,
            _with_defaults(raw, common, kind),
            path,
            fixed=fixed,
            misplaced=misplaced,
        )
        if isinstance(made, ModelConfig):
            made = self._with_folder(made)
        elif isinstance(made, CommandConfig):
            timeout_s = max(made.health_check_timeout_s, llama_swap.MIN_READY_TIMEOUT_S)
            made = msgspec.structs.replace(made, health_check_timeout_s=timeout_s)
            made = llama_swap.without_model_filter(made)
        return None if made is None else _with_filter_aliases(made)

    def _report_kind(self, raw: dict[str, Any], path: KeyPath, *, both: bool) -> None:
        message = "must have path, a folder with a model, or cmd, a command that serves one"
        self._faults.append(Fault(path, f"{message}{'; not both' if both else ''}"))
        known = {setting.spelling for kind in MODEL_KINDS.values() for setting in settings_of(kind)}
        for key in raw:
            if key not in known:
                self._conversion.unknown(key, path, known, {})

    def _with_folder(self, model: ModelConfig) -> ModelConfig:
        """Resolve the model's folder or GGUF file, relative to the file's folder; return a hub id unchanged.

        A path that could be either is a missing folder if its parent folder exists, else a hub id. A folder
        of the cluster's machines need not be on this one.
        """
        try:
            path = self._folder / model.path.expanduser()
            folder = absolute(path) if is_gguf(path) else path.resolve()
            there = folder.is_file() if is_gguf(path) else folder.is_dir()
        except (OSError, RuntimeError):  # a name that is too long, a loop of links, no such home
            folder, there = model.path, False
        if not there and not folder.parent.is_dir() and is_hub_id(str(model.path)):
            return model
        at = ("models", model.name, "path")
        if not there and not model.is_on_cluster:
            self._faults.append(Fault(at, f"there is no {'file' if is_gguf(folder) else 'folder'} {folder}"))
        return msgspec.structs.replace(model, path=folder)


def _with_defaults(raw: dict[str, Any], common: FileSettings, kind: type[AnyModelConfig]) -> dict[str, Any]:
    """Return a model's settings with the file's defaults for all models, without values that mean not set."""
    settings = dict(raw)
    if settings.get("ttl") in (None, -1):
        settings["ttl"] = common.global_ttl_s
    if kind is CommandConfig:
        if settings.get("healthCheckTimeout") is None:
            settings["healthCheckTimeout"] = common.health_check_timeout_s
        if not settings.get("unloadTimeout"):
            settings["unloadTimeout"] = common.unload_timeout_s or 10.0
        for name in ("concurrencyLimit", "useModelName"):
            if settings.get(name) in (0, ""):  # these mean not set
                del settings[name]
        filters = settings.get("filters")
        if isinstance(filters, dict) and "strip_params" in filters:  # its older name
            filters = dict(filters)
            older = filters.pop("strip_params")
            filters.setdefault("stripParams", older)
            settings["filters"] = filters
    return settings


def _with_filter_aliases(model: AnyModelConfig) -> AnyModelConfig:
    """Add the names in `set_params_by_id` to a model's aliases, each once and never its own."""
    by_name: Iterable[str] = model.filters.set_params_by_id if isinstance(model, CommandConfig) else ()
    aliases = dict.fromkeys((*model.aliases, *by_name))
    aliases.pop(model.name, None)
    return msgspec.structs.replace(model, aliases=tuple(aliases))
