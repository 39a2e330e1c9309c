"""Reads configuration files for `serve` and `config check`, and prints their contents or their errors."""

import json
import os
import shutil
import sys
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import asdict

from fairlead.base.config import NO_OPERATOR, UNIX_PREFIX, CommandConfig, Config, lacks_operator
from fairlead.base.config.fleet import GroupSwap, KeepSwap, LruSwap, MatrixSwap, NamedSwap, SwapConfig
from fairlead.base.telemetry import streams
from fairlead.router.quotas.access import key_id
from fairlead.server.configfile import ConfigFileError, Reading, read_config
from fairlead.server.console.announcer import report_warning
from fairlead.server.console.options import ServeOptions

if TYPE_CHECKING:
    from fairlead.base.telemetry import logs
    from fairlead.router.fleet.reload import ConfigSource

EVICTIONS = {
    KeepSwap: "none; all models must fit at the same time",
    GroupSwap: "by groups",
    MatrixSwap: "by the matrix",
    LruSwap: "the least recently used model",
}


def read(file: Path) -> Reading | None:
    """Return a server's parsed file, or None after reporting its errors on standard error.

    Also configures the log as the file requires.
    """
    try:
        reading = read_config(file, os.environ)
    except ConfigFileError as error:
        _refuse(file, error)
        return None
    _configure_log(json=reading.config.log_json, level=reading.config.log_level)
    if reading.without_effect:
        number = len(reading.without_effect)
        report_warning(
            f"{file} has settings without effect: {number} ('fairlead config check {file}' names them)"
        )
    for remark in reading.remarks:
        report_warning(f"{file}: {remark}")
    return reading


def source_of(
    file: Path, model: str | None, options: ServeOptions, *, is_watched: bool, handles_signals: bool = True
) -> "ConfigSource":
    """Return what reads a server's file again on a reload.

    file: the file.
    model: the model of the command line, if any.
    options: the options, which still override the file.
    is_watched: whether a change of the file is a reload.
    handles_signals: whether SIGHUP is one.
    """
    import structlog

    from fairlead.router.fleet.reload import ConfigSource

    logger = structlog.get_logger("fairlead.router.fleet.reload")

    def read(running: Config | None) -> Config:
        reading = read_config(file, os.environ, running=running)
        for remark in reading.remarks:
            logger.warning("note on the configuration", file=str(file), note=remark)
        return options.config(model, reading.config)

    return ConfigSource(file, read, is_watched, handles_signals)


def _refuse(file: Path, error: ConfigFileError) -> None:
    import structlog

    _configure_log(json=error.log_json)
    if not streams.is_json():
        print(error, file=sys.stderr, flush=True)
        return
    logger = structlog.get_logger("fairlead.server.console")
    for fault in error.found:
        logger.error(
            "bad configuration", file=str(file), line=fault.line, key=fault.key, reason=fault.message
        )


def _configure_log(*, json: bool, level: "logs.Level" = "info") -> None:
    from fairlead.base.telemetry import logs

    logs.configure(json=json or streams.is_json(), level=level)  # the command line may request JSON


def check(file: Path, *, as_json: bool) -> int:
    """Print a summary of a file, or its errors. Return the exit code.

    0: it is valid, and its models can be loaded, as far as they are on this machine; 2: it is not so.
    """
    try:
        reading = read_config(file, os.environ)
    except ConfigFileError as error:
        if as_json:
            errors = [fault._asdict() for fault in error.found]
            print(json.dumps({"file": str(file), "ok": False, "errors": errors}, indent=2))
        else:
            print(error, file=sys.stderr, flush=True)
        return 2
    from fairlead.server.console.model_faults import faults_of

    faults = faults_of(reading.config)
    if as_json:
        summary = _summary(reading.config) | {
            "without_effect": reading.without_effect,
            "remarks": _remarks(reading),
            "missing_commands": _missing_commands(reading.config),
            "faulty_models": faults,
        }
        print(json.dumps({"file": str(file), "ok": not faults, **summary}, indent=2))
    else:
        print("\n".join(_lines(file, reading, faults)))
    return 2 if faults else 0


def print_schema() -> None:
    """Write the JSON Schema of configuration files to standard output."""
    print((files("fairlead") / "base" / "config" / "schema.json").read_text(encoding="utf-8"), end="")


def _summary(config: Config) -> dict[str, object]:
    from fairlead.server.console.wire_formats import formats_of

    formats = formats_of(config)
    return {
        "models": [
            {"name": model.name, "kind": model.kind}
            | ({"wire_format": asdict(formats[model.name])} if model.name in formats else {})
            for model in config.models
        ],
        "nodes": [node.id for node in config.nodes],
        "selectors": list(config.selectors),
        "swap": str(config.swap.__struct_config__.tag),
        "host": config.host,
        "port": config.port,
        "api_keys": len(config.api_keys),
        "keys": [
            {"id": key_id(key), "user": key.user, "role": key.role, "models": list(key.models)}
            for key in config.api_keys
        ],
    }


def _remarks(reading: Reading) -> list[str]:
    """Return the notes on a file, with one on keys that cannot control the server."""
    return [*reading.remarks, *([NO_OPERATOR] if lacks_operator(reading.config.api_keys) else [])]


def _lines(file: Path, reading: Reading, faults: dict[str, str]) -> list[str]:
    from fairlead.server.console.wire_formats import formats_of

    config = reading.config
    formats = formats_of(config)
    models = ", ".join(model.name for model in config.models) or "none"
    address = config.host if config.host.startswith(UNIX_PREFIX) else f"{config.host}:{config.port}"
    nodes = ", ".join(node.id for node in config.nodes) or "none"
    return [
        f"{file} is good." if not faults else f"{file} is valid, but has models that cannot be loaded.",
        *(f"  {model} cannot be loaded: {reason}" for model, reason in faults.items()),
        f"  models: {models}",
        *(f"  wire format of {model}: {found}" for model, found in formats.items()),
        *(
            f"  chat template of {model}: {'; '.join(found.rewritten)}"
            for model, found in formats.items()
            if found.rewritten
        ),
        f"  nodes: {nodes}",
        *([f"  selectors: {', '.join(config.selectors)}"] if config.selectors else []),
        f"  evictions: {_evictions(config.swap)}",
        f"  address: {address}",
        f"  API keys: {len(config.api_keys) or 'none'}",
        *(f"    {key_id(key)}: {key.user or 'no user'}, {key.role}" for key in config.api_keys),
        *(f"  without effect: {key}" for key in reading.without_effect),
        *(f"  note: {remark}" for remark in _remarks(reading)),
        *(f"  not on PATH here: {key}: {program}" for key, program in _missing_commands(config).items()),
    ]


def _evictions(swap: SwapConfig) -> str:
    return f"by the policy {swap.policy}" if isinstance(swap, NamedSwap) else EVICTIONS[type(swap)]


def _missing_commands(config: Config) -> dict[str, str]:
    """Return the programs that are missing on this machine, by the settings that name them.

    They are not errors: a file may be checked on a machine other than the server.
    """
    missing = {}
    for model in config.models:
        if not isinstance(model, CommandConfig):
            continue
        for setting, command in (("cmd", model.cmd), ("cmdStop", model.cmd_stop)):
            if command and shutil.which(command[0], path=model.env.get("PATH")) is None:
                missing[f"models.{model.name}.{setting}"] = command[0]
    return missing
