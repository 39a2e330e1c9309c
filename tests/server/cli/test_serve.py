"""`fairlead serve`: how arguments become a configuration. The server itself is a fake."""

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pytest

from fairlead.base.config import (
    ApiKey,
    Config,
    ConfigError,
    KvCacheConfig,
    ModelConfig,
    QueueConfig,
    default_store,
    demonstration_model,
)
from fairlead.server.cli import main

FAKE_APP = """
import sys, time, types
app = types.ModuleType("fairlead.server.app")
def run(config, announcer, source):
    print("serving", flush=True)
    time.sleep(600)
    return 0
app.run = run
sys.modules["fairlead.server.app"] = app
"""


class FakeApp(ModuleType):
    """Replaces `fairlead.server.app`."""

    def __init__(self) -> None:
        super().__init__("fairlead.server.app")
        self.configs: list[Config] = []
        self.outcome: int | Exception = 0

    def run(self, config: Config, announcer: object, source: object = None) -> int:
        self.configs.append(config)
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> FakeApp:
    fake = FakeApp()
    monkeypatch.setitem(sys.modules, "fairlead.server.app", fake)
    return fake


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "small-model"
    path.mkdir()
    return path


def config_of(app: FakeApp, *arguments: str) -> Config:
    assert main(["serve", *arguments]) == 0
    return app.configs[-1]


def test_without_arguments_the_demonstration_model_is_served_on_loopback(app, monkeypatch, model):
    monkeypatch.setattr("fairlead.server.console.options.demonstration_model", lambda: model)
    expected = Config(
        models=(ModelConfig(path=model, name="small-model", preload=True),), store=default_store(os.environ)
    )
    assert expected == config_of(app)
    assert demonstration_model().name == "fairlead-demo"


def test_every_option_reaches_the_configuration(app, model):
    options = (
        "--host localhost --port 9 --api-key sk-1 --api-key ana=sk-2 --served-model-name tiny "
        "--device cuda:1 --dtype bfloat16 --slots 4 --max-batch 3 --max-batched-tokens 5 --max-model-len 6 "
        "--kv-cache-memory-mb 7 --threads 2 --parallel 2 --queue-capacity 0 --queue-timeout 1.5 "
        "--request-timeout 2.5 --fairness tokens --estimate quantile --keep-alive 0 --log-json"
    )
    expected = Config(
        models=(
            ModelConfig(
                path=model,
                name="tiny",
                device="cuda:1",
                dtype="bfloat16",
                slots=4,
                max_batch=3,
                max_batched_tokens=5,
                max_model_len=6,
                kv_cache=KvCacheConfig(max_memory_mb=7),
                threads=2,
                parallel=2,
                preload=True,
            ),
        ),
        host="localhost",
        port=9,
        api_keys=(ApiKey(key="sk-1"), ApiKey(key="sk-2", user="ana")),
        queue=QueueConfig(
            capacity=0, timeout_s=1.5, fairness="tokens", estimate="quantile", keep_alive_s=0.0
        ),
        request_timeout_s=2.5,
        log_json=True,
        store=default_store(os.environ),
    )
    assert expected == config_of(app, str(model), *options.split())


def test_relative_directory_is_named_after_itself(app, model, monkeypatch):
    monkeypatch.chdir(model)
    assert config_of(app, ".").models == (ModelConfig(path=model, name="small-model", preload=True),)


def test_command_line_overrides_the_defaults_of_the_environment(app, model, monkeypatch):
    monkeypatch.setenv("FAIRLEAD_HOST", "::1")
    monkeypatch.setenv("FAIRLEAD_PORT", "1234")
    monkeypatch.setenv("FAIRLEAD_API_KEY", "sk-1 ana=sk-2")
    config = config_of(app, str(model), "--port", "5678")
    assert (config.host, config.port) == ("::1", 5678)
    assert (ApiKey(key="sk-1"), ApiKey(key="sk-2", user="ana")) == config.api_keys


def test_admin_key_is_added_to_other_keys_with_the_role_admin(app, model):
    keys = config_of(app, str(model), "--admin-key", "eve=sk-0", "--api-key", "sk-1").api_keys
    assert keys == (ApiKey("sk-0", user="eve", role="admin"), ApiKey("sk-1"))
    assert config_of(app, str(model), "--admin-key", "sk-0").api_keys == (ApiKey("sk-0", role="admin"),)


def test_admin_key_is_added_to_the_keys_of_a_file(app, tmp_path):
    file = tmp_path / "fairlead.yaml"
    file.write_text("apiKeys: [{key: sk-file}]\nmodels: {}")
    keys = config_of(app, "--config", str(file), "--admin-key", "sk-0").api_keys
    assert keys == (ApiKey("sk-0", role="admin"), ApiKey("sk-file"))


@pytest.mark.parametrize("options", ["--admin-key sk-1 --admin-key sk-1", "--admin-key sk-1 --api-key sk-1"])
def test_admin_key_that_is_given_twice_is_refused(capsys, model, options):
    assert main(["serve", str(model), *options.split()]) == 2
    assert "--admin-key" in capsys.readouterr().err


def test_allowed_host_is_added_to_those_of_the_configuration(app, tmp_path):
    file = tmp_path / "fairlead.yaml"
    file.write_text("allowedHosts: [a]\nmodels: {}")
    options = ["--allowed-host", "ai", "--allowed-host", "ai.local"]
    assert config_of(app, "--config", str(file), *options).allowed_hosts == ("a", "ai", "ai.local")


def test_admin_key_and_allowed_host_may_come_from_the_environment(app, model, monkeypatch):
    monkeypatch.setenv("FAIRLEAD_ADMIN_KEY", "eve=sk-0")
    monkeypatch.setenv("FAIRLEAD_ALLOWED_HOST", "ai ai.local")
    config = config_of(app, str(model))
    assert config.api_keys == (ApiKey("sk-0", user="eve", role="admin"),)
    assert config.allowed_hosts == ("ai", "ai.local")


def test_padding_of_a_base64_key_is_not_parsed_as_a_user(app, model):
    config = config_of(app, str(model), "--api-key", "b25l==", "--api-key", "ana=dHdv==")
    assert (ApiKey(key="b25l=="), ApiKey(key="dHdv==", user="ana")) == config.api_keys


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("/no/such/directory", "MODEL"),
        ("--port http", "--port"),
        ("--port 65536", "--port"),
        ("--slots 0", "--slots"),
        ("--slots 2 --max-batch 3", "--max-batch"),
        ("--max-batched-tokens -1", "--max-batched-tokens"),
        ("--max-model-len 0", "--max-model-len"),
        ("--kv-cache-memory-mb 0", "--kv-cache-memory-mb"),
        ("--threads 0", "--threads"),
        ("--parallel 0", "--parallel"),
        ("--device gpu", "--device"),
        ("--dtype int3", "--dtype"),
        ("--queue-capacity -1", "--queue-capacity"),
        ("--queue-timeout 0", "--queue-timeout"),
        ("--queue-timeout nan", "--queue-timeout"),
        ("--keep-alive -1", "--keep-alive"),
        ("--keep-alive nan", "--keep-alive"),
        ("--keep-alive inf", "--keep-alive"),
        ("--fairness lottery", "--fairness"),
        ("--estimate guess", "--estimate"),
        ("--request-timeout inf", "--request-timeout"),
        ("--api-key same --api-key ana=same", "--api-key"),
        ("--api-key=", "--api-key"),
        ("--host=", "--host"),
        ("--served-model-name=", "--served-model-name"),
        ("--no-such-option", "--no-such-option"),
        ("--port", "--port"),
    ],
)
def test_bad_usage_exits_with_2_and_names_the_option(app, capsys, arguments, named):
    assert main(["serve", *arguments.split()]) == 2
    assert named in capsys.readouterr().err.partition("\n")[0]
    assert app.configs == []


def test_invalid_setting_in_the_environment_is_named(app, capsys, monkeypatch):
    monkeypatch.setenv("FAIRLEAD_PORT", "http")
    assert main(["serve"]) == 2
    assert "FAIRLEAD_PORT" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("outcome", "code"),
    [
        (0, 0),
        (1, 1),
        (2, 2),
        (OSError("the port is taken"), 1),
        (ConfigError("models.small: is not there"), 2),
    ],
)
def test_exit_code_depends_on_how_the_server_ended(app, capsys, model, outcome, code):
    app.outcome = outcome
    assert main(["serve", str(model)]) == code
    stderr = capsys.readouterr().err
    assert stderr.startswith(f"fairlead: {outcome}") if isinstance(outcome, Exception) else stderr == ""


def test_warning_for_a_server_without_keys_on_all_addresses(app, capsys, model):
    config_of(app, str(model), "--host", "0.0.0.0")
    assert "--api-key" in capsys.readouterr().err
    config_of(app, str(model), "--host", "0.0.0.0", "--admin-key", "sk-1")
    config_of(app, str(model), "--host", "127.0.0.2")
    assert capsys.readouterr().err == ""


def test_warning_for_keys_of_which_none_is_an_operators(app, capsys, model):
    config_of(app, str(model), "--api-key", "sk-1")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("fairlead: warning: no API key has the role operator: nobody can load and unload")
    assert "--admin-key" in line
    config_of(app, str(model), "--api-key", "sk-1", "--admin-key", "sk-2")
    assert capsys.readouterr().err == ""


def test_version_is_that_of_the_package(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == metadata.version("fairlead")


def test_help_and_errors_about_unknown_commands_list_the_commands(capsys):
    assert main(["--help"]) == 0
    assert "serve" in capsys.readouterr().out
    assert main(["sreve"]) == 2
    assert "serve" in capsys.readouterr().err


def test_importing_the_command_line_imports_no_large_package():
    code = "import sys, fairlead.server.cli; print(*sys.modules)"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert not {"torch", "trio", "quart", "httpx", "rich", "numpy", "fairlead.server.app"} & set(
        output.split()
    )


def test_completion_script_can_be_written(tmp_path, capsys):
    script = tmp_path / "completion"
    assert main(["--install-completion", "--shell", "bash", "--output", str(script)]) == 0
    assert "serve" in script.read_text()


def test_server_with_the_lifeline_option_ends_when_its_standard_input_is_closed(model):
    code = FAKE_APP + "from fairlead.server.cli import main; main(sys.argv[1:])"
    command = [sys.executable, "-c", code, "serve", str(model), "--lifeline"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"serving\n"
        process.stdin.close()
        assert process.wait(60) == -15


def test_python_m_fairlead_runs_the_command():
    run = subprocess.run(
        [sys.executable, "-m", "fairlead", "serve", "--slots", "0"],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ,
    )
    assert (run.returncode, run.stdout) == (2, "")
    assert "--slots" in run.stderr
