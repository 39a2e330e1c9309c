"""Which models of a configuration cannot be loaded here, for `fairlead config check` and `doctor`."""

from collections.abc import Iterator
from pathlib import Path

from fairlead.config import Config, ConfigError, ModelConfig
from fairlead.errors import LoadFailed
from fairlead.fleet.model_reading import read_files
from fairlead.text.hub import find_local, find_model, is_hub_id


def faults_of(config: Config, *, may_be_elsewhere: bool) -> dict[str, str]:
    """Return why models cannot be loaded, by name. Nothing is downloaded.

    A server reads the same files by the same function, and gives the same reasons. Models that are still on a
    hub have no faults. With `may_be_elsewhere`, nor have those whose folder does not exist: the file may be
    for another machine.
    """
    faults = {}
    for model in _engine_models(config):
        is_absent = _is_absent(model)
        if is_absent and (may_be_elsewhere or is_hub_id(str(model.path))):
            continue
        try:
            read_files(model, find_model(find_local(model.path) or model.path))
        except (LoadFailed, ConfigError) as error:
            faults[model.name] = str(error)
    return faults


def models_to_fetch(config: Config) -> list[str]:
    """Return the names of models that a server would fetch from a hub."""
    return [
        model.name for model in _engine_models(config) if _is_absent(model) and is_hub_id(str(model.path))
    ]


def _engine_models(config: Config) -> Iterator[ModelConfig]:
    for model in config.models:
        if isinstance(model, ModelConfig) and not model.is_on_cluster:
            yield model


def _is_absent(model: ModelConfig) -> bool:
    return find_local(model.path) is None and not Path(model.path).exists()
