"""Reads a file into a `Config`, or reports every error in it with its line and key."""

import os
import shlex
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from fairlead.config import (
    MODEL_KINDS,
    AnyModelConfig,
    CommandConfig,
    Config,
    ConfigError,
    Fault,
    ModelConfig,
    NodeConfig,
)
from fairlead.config.spelling import KeyPath, dotted, settings_of
from fairlead.configfile import llama_swap
from fairlead.configfile.convert import Conversion
from fairlead.configfile.document import BYTES_AT_MOST, Document, UnreadableError
from fairlead.configfile.macros import Expansion
from fairlead.configfile.sections import FileSettings
from fairlead.dispatch.schedulers import SCHEDULERS
from fairlead.swap.policies import policy_for
from fairlead.swap.selectors import faults_of_spilling, unknown_targets, without_targets
from fairlead.text.hub import gguf_advice, is_gguf, is_hub_id

FAULTS_AT_MOST = 100
LETTERS_AT_MOST = 500
HAS_MODES = os.name == "posix"

N = TypeVar("N", CommandConfig, NodeConfig)


class FaultAt(NamedTuple):
    """An error on a line: `key` as displayed, '' if it concerns no setting."""

    line: int
    key: str
    message: str


class ConfigFileError(ConfigError):
    """A file is not a valid configuration. The message has a line for each fault: file, line, key, reason.

    `log_json`: the value of that setting, if it could be read.
    """

    def __init__(self, file: Path, found: Iterable[FaultAt], *, log_json: bool = False) -> None:
        self.log_json = log_json
        self.found = tuple(sorted(dict.fromkeys(found)))
        lines = [
            _on_one_line(": ".join(part for part in (f"{file}:{line}", key, text) if part))
            for line, key, text in self.found
        ]
        if len(lines) > FAULTS_AT_MOST:
            lines[FAULTS_AT_MOST:] = [f"{file}: and {len(lines) - FAULTS_AT_MOST} more"]
        super().__init__("\n".join(lines))


class Reading(NamedTuple):
    """A configuration, and the settings in its file (as displayed) that have no effect on serving.

    `remarks` are notes on settings that may be unintended, one line each.
    """

    config: Config
    without_effect: tuple[str, ...]
    remarks: tuple[str, ...] = ()


def read_config(file: Path, environment: Mapping[str, str]) -> Reading:
    """Read a file, which may use variables of `environment`. Raises `ConfigFileError` or `OSError`."""
    with file.open("rb") as source:
        content = source.read(BYTES_AT_MOST + 1)
        mode = stat.S_IMODE(os.fstat(source.fileno()).st_mode)
    try:
        document = Document(content, environment)
    except UnreadableError as error:
        raise ConfigFileError(file, [FaultAt(error.line, "", str(error))]) from None
    reader = _Reader(document, file.resolve().parent)
    config = reader.read()
    if config is None:
        found = [
            FaultAt(document.line(fault.path), dotted(fault.path), fault.message) for fault in reader.faults
        ]
        raise ConfigFileError(file, found, log_json=document.tree.get("logJson") is True)
    remarks = [str(remark) for remark in reader.remarks]
    if HAS_MODES and mode & (stat.S_IRGRP | stat.S_IROTH) and _has_literal_keys(content):
        remedy = f"chmod 600 {shlex.quote(str(file))}"
        remarks.append(f"other users of this machine can read its API keys (mode {mode:04o}): {remedy}")
    return Reading(
        config, tuple(dict.fromkeys(map(dotted, reader.without_effect))), tuple(map(_on_one_line, remarks))
    )


class _Reader:
    """Makes the configuration of one document. Continues after a fault to find the others."""

    def __init__(self, document: Document, folder: Path) -> None:
        self.without_effect: list[KeyPath] = []
        self.remarks: list[Fault] = []
        self._conversion = Conversion(document)
        self.faults = self._conversion.faults
        self._document = document
        self._folder = folder

    def read(self) -> Config | None:
        self.faults += self._document.faults
        self.without_effect = llama_swap.unused(self._document.tree)
        expansion = Expansion()
        tree = expansion.expand(self._document.tree)
        self.faults += expansion.faults
        self.remarks += expansion.remarks

        said_models = tree.pop("models", None)
        settings = self._conversion.struct(FileSettings, tree, (), also_known=("models", "macros"))
        common = settings or FileSettings()
        models = self._preloaded(self._models(said_models, common), common)
        if settings is None or self.faults:
            return None
        return self._config(settings, models)

    def _config(self, settings: FileSettings, models: list[AnyModelConfig]) -> Config | None:
        names = [model.name for model in models]
        commands = any(isinstance(model, CommandConfig) for model in models)
        at, swap = llama_swap.swap_of(settings, has_commands=commands)
        self.faults += (fault.under(*at) for fault in llama_swap.faults_of_swap(swap, names))
        self.without_effect += ((*at, *path) for path in llama_swap.unknown_members(swap, names))
        self.without_effect += settings.without_effect()
        priorities = self._priorities(settings, models)
        shared = {field: getattr(settings, field) for field in settings.__struct_fields__}
        shared = {field: value for field, value in shared.items() if field in Config.__struct_fields__}
        try:
            peers = llama_swap.nodes_of_peers(settings.peers, models, settings.selectors)
            nodes = tuple(map(_without_model_filter, settings.nodes + peers))
            config = Config(
                **shared | {"nodes": nodes}, models=tuple(models), swap=swap, priorities=priorities
            )
            if not self.faults:
                self._check_selectors(config)
            SCHEDULERS.find(config.scheduler, "scheduler")
        except ConfigError as error:
            self.faults += error.faults
        return None if self.faults else config

    def _check_selectors(self, config: Config) -> None:
        """Record targets that are not models, if all models are known, and faults of spillover."""
        local = _names_of(config.models)
        if all(node.models is not None for node in config.nodes):
            known = set(local).union(*(node.models or () for node in config.nodes))
            self.without_effect += (("selectors", *path) for path in unknown_targets(config.selectors, known))
            self.remarks += (fault.under("selectors") for fault in without_targets(config.selectors, known))
        memory_mb = {model.name: float(model.memory_mb or 0) for model in config.models}
        try:
            policy = policy_for(config.swap, memory_mb)
        except ConfigError:
            raise
        except ValueError as error:  # raised by another package's policy
            at = ("routing", "router", "settings", "policy")
            raise ConfigError(str(error), [Fault(at, str(error))]) from error
        faults = faults_of_spilling(config.selectors, local, policy)
        self.faults += (fault.under("selectors") for fault in faults)

    def _priorities(self, settings: FileSettings, models: list[AnyModelConfig]) -> dict[str, int]:
        """Return the priorities by model name. Names without a model are recorded as having no effect."""
        local = _names_of(models)
        raw = settings.routing.scheduler.settings.fifo.priority
        at = ("routing", "scheduler", "settings", "fifo", "priority")
        self.without_effect += ((*at, name) for name in raw if name not in local)
        return {local[name]: priority for name, priority in raw.items() if name in local}

    def _models(self, raw: object, common: FileSettings) -> list[AnyModelConfig]:
        if raw is None:
            return []
        if not isinstance(raw, dict):
            self.faults.append(Fault(("models",), "must be a mapping from names to settings"))
            return []
        models = (self._model(name, settings, common) for name, settings in raw.items())
        return [model for model in models if model is not None]

    def _model(self, name: str, raw: object, common: FileSettings) -> AnyModelConfig | None:
        path = ("models", name)
        if not name.strip():
            self.faults.append(Fault(path, "the name of a model must not be empty"))
        if not isinstance(raw, dict):
            self.faults.append(Fault(path, "must be a mapping with path or cmd"))
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
            if other is not kind
        }
        made = self._conversion.struct(
            kind,
            _with_defaults(raw, common, kind),
            path,
            fixed={"name": name},
            misplaced=misplaced,
        )
        if isinstance(made, ModelConfig):
            made = self._with_folder(made)
        elif isinstance(made, CommandConfig):
            made = _without_model_filter(_with_minimum_timeout(made))
        return None if made is None else _with_filter_aliases(made)

    def _report_kind(self, raw: dict[str, Any], path: KeyPath, *, both: bool) -> None:
        message = "must have path, a folder with a model, or cmd, a command that serves one"
        self.faults.append(Fault(path, f"{message}{'; not both' if both else ''}"))
        known = {setting.spelling for kind in MODEL_KINDS.values() for setting in settings_of(kind)}
        for key in raw:
            if key not in known:
                self._conversion.unknown(key, path, known, {})

    def _with_folder(self, model: ModelConfig) -> ModelConfig:
        """Resolve the model's folder, relative to that of the file; return a hub id unchanged.

        A path that could be either is a missing folder if its parent folder exists, else a hub id.
        """
        try:
            folder = (self._folder / model.path.expanduser()).resolve()
            there = folder.is_dir()
        except (OSError, RuntimeError):  # a name that is too long, a loop of links, no such home
            folder, there = model.path, False
        if not there and not folder.parent.is_dir() and is_hub_id(str(model.path)):
            return model
        at = ("models", model.name, "path")
        if is_gguf(folder):
            self.faults.append(Fault(at, gguf_advice(folder)))
        elif not there:
            self.faults.append(Fault(at, f"there is no folder {folder}"))
        return msgspec.structs.replace(model, path=folder)

    def _preloaded(self, models: list[AnyModelConfig], common: FileSettings) -> list[AnyModelConfig]:
        preloaded = set(common.hooks.on_startup.preload)
        for index, name in enumerate(common.hooks.on_startup.preload):
            if not any(name in (model.name, *model.aliases) for model in models):
                self.without_effect.append(("hooks", "on_startup", "preload", index))
        return [
            msgspec.structs.replace(model, preload=True)
            if preloaded.intersection((model.name, *model.aliases))
            else model
            for model in models
        ]


class _Variables(Mapping[str, str]):
    """An environment that has every variable, each with a value that no file contains."""

    value = "\ue002"

    def __getitem__(self, _name: str) -> str:
        return self.value

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


def _has_literal_keys(content: bytes) -> bool:
    """Return whether a valid configuration file has an API key that uses no variable.

    Parsing the file again with marked variables follows them through macros, anchors and merged mappings.
    """
    tree = Expansion().expand(Document(content, _Variables()).tree)
    return any(key is not None and _Variables.value not in str(key) for key in _api_keys(tree))


def _api_keys(tree: dict[str, Any]) -> Iterator[object]:
    """Yield the server's keys and those that it sends to nodes and peers; None for one without a key."""
    for raw in tree.get("apiKeys") or ():
        yield raw.get("key") if isinstance(raw, dict) else raw
    for node in (*(tree.get("nodes") or ()), *(tree.get("peers") or {}).values()):
        yield node.get("apiKey") if isinstance(node, dict) else None


def _names_of(models: Iterable[AnyModelConfig]) -> dict[str, str]:
    """Map the name and the aliases of each model to its name."""
    return {name: model.name for model in models for name in (model.name, *model.aliases)}


def _on_one_line(text: str) -> str:
    """Escape and truncate a message, so that quoted text cannot begin a line or control a terminal."""
    shown = "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)
    return shown if len(shown) <= LETTERS_AT_MOST else f"{shown[:LETTERS_AT_MOST]}…"


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


def _with_minimum_timeout(model: CommandConfig) -> CommandConfig:
    timeout_s = max(model.health_check_timeout_s, llama_swap.READY_WITHIN_AT_LEAST_S)
    return msgspec.structs.replace(model, health_check_timeout_s=timeout_s)


def _without_model_filter(node: N) -> N:
    return msgspec.structs.replace(node, filters=llama_swap.without_model(node.filters))


def _with_filter_aliases(model: AnyModelConfig) -> AnyModelConfig:
    """Add the names in `set_params_by_id` to a model's aliases, each once and never its own."""
    by_name: Iterable[str] = model.filters.set_params_by_id if isinstance(model, CommandConfig) else ()
    aliases = dict.fromkeys((*model.aliases, *by_name))
    aliases.pop(model.name, None)
    return msgspec.structs.replace(model, aliases=tuple(aliases))
