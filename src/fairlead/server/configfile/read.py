"""Reads a file into a `Config`, or reports every error in it with its line and key."""

import os
import shlex
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from fairlead.base.config import AnyModelConfig, CommandConfig, Config, ConfigError, Fault, runs_here
from fairlead.base.config.spelling import KeyPath, dotted
from fairlead.base.errors import printable
from fairlead.router.dispatch.schedulers import SCHEDULERS
from fairlead.router.swap.policies import policy_for
from fairlead.router.swap.selectors import faults_of_spilling, unknown_targets, without_targets
from fairlead.server.configfile import llama_swap
from fairlead.server.configfile.convert import Conversion
from fairlead.server.configfile.document import MAX_FILE_BYTES, Document, UnreadableError
from fairlead.server.configfile.literal_keys import has_literal_keys
from fairlead.server.configfile.macros import Expansion
from fairlead.server.configfile.models import ModelReader
from fairlead.server.configfile.sections import FileSettings

MAX_FAULTS = 100
MAX_MESSAGE_CHARS = 500
HAS_MODES = os.name == "posix"


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
        if len(lines) > MAX_FAULTS:
            lines[MAX_FAULTS:] = [f"{file}: and {len(lines) - MAX_FAULTS} more"]
        super().__init__("\n".join(lines))


class Reading(NamedTuple):
    """A configuration, and the settings in its file (as displayed) that have no effect on serving.

    `remarks` are notes on settings that may be unintended, one line each.
    """

    config: Config
    without_effect: tuple[str, ...]
    remarks: tuple[str, ...] = ()


def read_config(file: Path, environment: Mapping[str, str], *, running: Config | None = None) -> Reading:
    """Read a file, which may use variables of `environment`. Raises `ConfigFileError` or `OSError`.

    Commands keep the ports that they have in `running`, the configuration in force.
    """
    with file.open("rb") as source:
        content = source.read(MAX_FILE_BYTES + 1)
        mode = stat.S_IMODE(os.fstat(source.fileno()).st_mode)
    try:
        document = Document(content, environment)
    except UnreadableError as error:
        raise ConfigFileError(file, [FaultAt(error.line, "", str(error))]) from None
    reader = _Reader(document, file.resolve().parent, _ports_of(running))
    config = reader.read()
    if config is None:
        found = [
            FaultAt(document.line(fault.path), dotted(fault.path), fault.message) for fault in reader.faults
        ]
        raise ConfigFileError(file, found, log_json=document.tree.get("logJson") is True)
    remarks = [str(remark) for remark in reader.remarks]
    if HAS_MODES and mode & (stat.S_IRGRP | stat.S_IROTH) and has_literal_keys(content):
        remedy = f"chmod 600 {shlex.quote(str(file))}"
        remarks.append(f"other users of this machine can read its API keys (mode {mode:04o}): {remedy}")
    return Reading(
        config, tuple(dict.fromkeys(map(dotted, reader.without_effect))), tuple(map(_on_one_line, remarks))
    )


class _Reader:
    """Makes the configuration of one document. Continues after a fault to find the others."""

    def __init__(self, document: Document, folder: Path, ports: Mapping[str, int]) -> None:
        self.without_effect: list[KeyPath] = []
        self.remarks: list[Fault] = []
        self._conversion = Conversion(document)
        self.faults = self._conversion.faults
        self._document = document
        self._folder = folder
        self._ports = ports

    def read(self) -> Config | None:
        self.faults += self._document.faults
        self.without_effect = llama_swap.unused(self._document.tree, self._document.anchors)
        expansion = Expansion(self._ports)
        tree = expansion.expand(self._document.tree)
        self.faults += expansion.faults
        self.remarks += expansion.remarks

        raw_models = tree.pop("models", None)
        settings = self._conversion.struct(FileSettings, tree, (), also_known=("models", "macros"))
        common = settings or FileSettings()
        reader = ModelReader(self._conversion, self._folder, expansion.ports)
        models = self._preloaded(reader.read(raw_models, common), common)
        if settings is None or self.faults:
            return None
        return self._config(settings, models)

    def _config(self, settings: FileSettings, models: list[AnyModelConfig]) -> Config | None:
        names = [model.name for model in filter(runs_here, models)]
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
            nodes = tuple(map(llama_swap.without_model_filter, settings.nodes + peers))
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


def _ports_of(config: Config | None) -> dict[str, int]:
    """Return the ports of a configuration's commands, by model."""
    commands = [model for model in config.models if isinstance(model, CommandConfig)] if config else []
    return {model.name: model.port for model in commands if model.port is not None}


def _names_of(models: Iterable[AnyModelConfig]) -> dict[str, str]:
    """Map the name and the aliases of each model to its name."""
    return {name: model.name for model in models for name in (model.name, *model.aliases)}


def _on_one_line(text: str) -> str:
    """Escape and truncate a message, so that quoted text cannot begin a line or control a terminal."""
    shown = printable(text)
    return shown if len(shown) <= MAX_MESSAGE_CHARS else f"{shown[:MAX_MESSAGE_CHARS]}…"
