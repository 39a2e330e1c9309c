"""Which models of a configuration cannot be loaded here, for `fairlead config check` and `doctor`."""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from fairlead.base.config import Config, ConfigError, ModelConfig
from fairlead.base.errors import LoadFailed
from fairlead.language.checkpoint.folder import read_folder
from fairlead.language.text.hub import find_local, find_model, is_hub_id
from fairlead.router.fleet.model_reading import read_files

PROBE_TIMEOUT_S = 120


def faults_of(config: Config) -> dict[str, str]:
    """Return why models cannot be loaded, by name. Nothing is downloaded.

    A server reads the same files by the same function, and gives the same reasons. What transformers is
    needed for is read in another process, which imports torch. Models that are still on a hub have no faults.
    """
    faults, others = {}, {}
    for model in _engine_models(config):
        if _is_on_hub(model):
            continue
        try:
            folder = find_model(find_local(model.path) or model.path)
            read_files(model, folder)
            if read_folder(folder, max_model_len=model.max_model_len).spec is None:
                others[model.name] = (str(folder), model.max_model_len)
        except (LoadFailed, ConfigError) as error:
            faults[model.name] = str(error)
    return faults | _probe(others)


def models_to_fetch(config: Config) -> list[str]:
    """Return the names of models that a server would fetch from a hub."""
    return [model.name for model in _engine_models(config) if _is_on_hub(model)]


def _probe(models: Mapping[str, tuple[str, int | None]]) -> dict[str, str]:
    """Return the faults of models that transformers implements, by name; see `engine/models/probe.py`."""
    if not models:
        return {}
    command = [sys.executable, "-P", "-m", "fairlead.engine.models.probe"]
    try:
        ran = subprocess.run(  # noqa: S603 - our own code
            command,
            input=json.dumps(models),
            capture_output=True,
            text=True,
            timeout=PROBE_TIMEOUT_S,
            check=True,
        )
    except subprocess.CalledProcessError as error:
        reason = (error.stderr.strip().splitlines() or ["it printed no reason"])[-1]
        return dict.fromkeys(models, f"transformers cannot read it: {reason}")
    except subprocess.TimeoutExpired:
        return dict.fromkeys(models, f"transformers did not read it within {PROBE_TIMEOUT_S} s")
    faults: dict[str, str] = json.loads(ran.stdout.splitlines()[-1])
    return faults


def _engine_models(config: Config) -> Iterator[ModelConfig]:
    for model in config.models:
        if isinstance(model, ModelConfig) and not model.is_on_cluster:
            yield model


def _is_on_hub(model: ModelConfig) -> bool:
    is_here = Path(model.path).exists() or find_local(model.path) is not None
    return not is_here and is_hub_id(str(model.path))
