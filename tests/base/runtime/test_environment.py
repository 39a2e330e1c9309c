"""An empty environment variable is an unset one."""

import pytest

from fairlead.base.config import Config
from fairlead.base.runtime.environment import remove_empty
from fairlead.server.asgi import _read_environment
from fairlead.server.cli import main


def test_only_empty_variables_that_fairlead_reads_are_removed():
    others = {"CUDA_VISIBLE_DEVICES": "", "MINE": "", "HF_TOKEN": "hf_1", "FAIRLEAD_HOST": " "}
    empty = ("FAIRLEAD_API_KEY", "HF_HOME", "SSL_CERT_FILE", "https_proxy", "HTTP_PROXY", "NO_COLOR")
    environment = others | dict.fromkeys(empty, "")
    remove_empty(environment)
    assert environment == others


@pytest.fixture
def all_empty(monkeypatch):
    for name in (
        "HOST",
        "PORT",
        "API_KEY",
        "ADMIN_KEY",
        "ALLOWED_HOST",
        "MODEL",
        "CONFIG",
        "WATCH_CONFIG",
        "URL",
    ):
        monkeypatch.setenv(f"FAIRLEAD_{name}", "")


@pytest.mark.usefixtures("all_empty")
def test_empty_variables_configure_a_server_like_unset_ones():
    config, source = _read_environment()
    default = Config(models=())
    assert (config.host, config.port, config.api_keys) == (default.host, default.port, ())
    assert (config.allowed_hosts, [model.name for model in config.models]) == ((), ["fairlead-demo"])
    assert source is None


@pytest.mark.usefixtures("all_empty")
def test_commands_ignore_empty_variables(capsys):
    assert main(["ps", "--url", "ftp://x"]) == 2
    assert "--url" in capsys.readouterr().err
    assert main(["ps"]) in (0, 1)  # with or without a server at the default address
    assert "must begin with" not in capsys.readouterr().err
