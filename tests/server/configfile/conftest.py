"""A configuration file that tests write, and the result of reading it."""

from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import pytest

from fairlead.server.configfile import ConfigFileError, Reading, read_config


class ConfigFile:
    """`fairlead.yaml` in a folder that has a model in `small`."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "fairlead.yaml"
        self.model = folder / "small"
        self.model.mkdir()
        self.environment: dict[str, str] = {}

    def reading(self, text: str | bytes) -> Reading:
        self.path.write_bytes(text if isinstance(text, bytes) else dedent(text).encode())
        return read_config(self.path, self.environment)

    def faults(self, text: str | bytes) -> list[str]:
        """Return the lines of the refusal, without the folder's name."""
        with pytest.raises(ConfigFileError) as refused:
            self.reading(text)
        return str(refused.value).replace(f"{self.path.parent}/", "").split("\n")


@pytest.fixture
def file(tmp_path: Path) -> ConfigFile:
    return ConfigFile(tmp_path)


@pytest.fixture
def config(file: ConfigFile) -> Callable:
    return lambda text: file.reading(text).config
