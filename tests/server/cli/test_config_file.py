"""`fairlead serve --config FILE` and `fairlead config check FILE`. The server itself is a fake."""

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from fairlead.base.config import (
    NO_OPERATOR,
    ApiKey,
    CommandConfig,
    Config,
    GroupSwap,
    ModelConfig,
    NamedSwap,
    QueueConfig,
)
from fairlead.router.fleet.reload import ConfigSource
from fairlead.router.quotas.access import key_id
from fairlead.server.cli import main
from fairlead.server.configfile import Reading
from language.text.model_folders import write_folder

FILE = """\
host: localhost
port: 9000
apiKeys: [{key: sk-file, role: operator}]
queue: {capacity: 7, timeout: 5s}
logJson: true
models:
  qwen: {path: small, slots: 4, kvCache: {maxEntries: 99}}
"""


KEY = ApiKey("sk-file", role="operator")


class FakeApp(ModuleType):
    """Replaces `fairlead.server.app`."""

    def __init__(self) -> None:
        super().__init__("fairlead.server.app")
        self.configs: list[Config] = []
        self.sources: list[ConfigSource | None] = []

    def run(self, config: Config, announcer: object, source: ConfigSource | None = None) -> int:
        self.configs.append(config)
        self.sources.append(source)
        return 0


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> FakeApp:
    fake = FakeApp()
    monkeypatch.setitem(sys.modules, "fairlead.server.app", fake)
    return fake


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_folder(tmp_path / "small")
    (tmp_path / "fairlead.yaml").write_text(FILE)
    (tmp_path / "fairlead.yaml").chmod(0o600)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(folder: Path, text: str) -> None:
    (folder / "fairlead.yaml").write_text(text)


def served(app: FakeApp, *arguments: str) -> Config:
    assert main(["serve", "--config", "fairlead.yaml", *arguments]) == 0
    return app.configs[-1]


def refused(app: FakeApp, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["serve", "--config", "fairlead.yaml", *arguments]) == 2
    assert app.configs == []
    return capsys.readouterr().err


def test_file_configures_the_server(app, folder):
    config = served(app)
    assert (config.host, config.port, config.log_json) == ("localhost", 9000, True)
    assert config.api_keys == (KEY,)
    assert QueueConfig(capacity=7, timeout_s=5.0) == config.queue
    assert [("qwen", folder / "small", 4)] == [
        (model.name, model.path, model.slots) for model in config.models
    ]


def test_command_line_overrides_the_file(app, folder):
    options = (
        "--port 1 --api-key sk-line --queue-capacity 3 --slots 2 --kv-cache-memory-mb 5 --served-model-name m"
    )
    config = served(app, *options.split(), "--drain-timeout", "9")
    assert (config.host, config.port, config.limits.drain_s) == ("localhost", 1, 9.0)
    assert (ApiKey("sk-line"),) == config.api_keys
    assert QueueConfig(capacity=3, timeout_s=5.0) == config.queue
    (model,) = config.models
    assert (
        model.name,
        model.slots,
        model.kv_cache.max_memory_mb,
        model.kv_cache.max_entries,
    ) == ("m", 2, 5, 99)


def test_environment_overrides_the_file(app, folder, monkeypatch):
    monkeypatch.setenv("FAIRLEAD_PORT", "77")
    assert served(app).port == 77


def test_environment_variables_are_substituted(app, folder, monkeypatch):
    monkeypatch.setenv("MY_CAPACITY", "12")
    write(folder, "queue: {capacity: ${env.MY_CAPACITY}}\nmodels: {m: {path: small}}")
    assert served(app).queue.capacity == 12


def test_command_line_gives_the_model_if_the_file_has_none(app, folder):
    write(folder, "port: 9000")
    expected = ModelConfig(folder / "small", "small", slots=3, preload=True)
    assert (expected,) == served(app, "small", "--slots", "3").models
    assert [model.name for model in served(app).models] == ["fairlead-demo"]


def test_file_with_only_nodes_can_be_served(app, folder):
    write(folder, "nodes: [{id: a, url: 'http://a'}]")
    assert served(app).models == ()


@pytest.mark.parametrize(
    ("text", "arguments", "named"),
    [
        (FILE, ["small"], "MODEL: cannot be given with --config, which has the models"),
        (
            "models: {a: {path: small}, b: {path: small}}",
            ["--slots", "1"],
            "--slots: --config must have one model",
        ),
        (
            "models: {a: {cmd: 'x ${PORT}'}}",
            ["--served-model-name", "x"],
            "--served-model-name: --config must have",
        ),
        (
            "models: {a: {cmd: 'x ${PORT}'}}",
            ["--kv-cache-memory-mb", "1"],
            "--kv-cache-memory-mb: --config must",
        ),
        (FILE, ["--max-batch", "9"], "maxBatch: must be at most slots, which is 4"),
        (FILE, ["--port", "x"], "--port"),
    ],
)
def test_options_that_contradict_the_file_are_refused(app, folder, capsys, text, arguments, named):
    write(folder, text)
    assert named in refused(app, capsys, *arguments)


def test_file_with_faults_is_not_served_and_each_fault_has_a_line(app, folder, capsys):
    write(folder, "models:\n  qwen:\n    path: small\n    slots: 0\nport: x\n")
    assert refused(app, capsys) == (
        "fairlead.yaml:4: models.qwen.slots: must be at least 1\n"
        "fairlead.yaml:5: port: must be a whole number, not text\n"
    )


def test_faults_are_json_if_the_file_sets_a_json_log(app, folder, capsys):
    write(folder, "logJson: true\nprot: 1\nport: x\n")
    events = [json.loads(line) for line in refused(app, capsys).splitlines()]
    assert [(event["event"], event["line"], event["key"]) for event in events] == [
        ("bad configuration", 2, "prot"),
        ("bad configuration", 3, "port"),
    ]


def test_bad_usage_is_json_if_the_command_line_sets_a_json_log(app, folder, capsys):
    (event,) = map(json.loads, refused(app, capsys, "--log-json", "--port", "x").splitlines())
    assert (event["level"], "--port" in event["event"]) == ("error", True)


def test_warnings_are_json_if_the_file_sets_a_json_log(app, folder, capsys):
    write(folder, FILE + "logToStdout: none\n")
    served(app)
    (event,) = map(json.loads, capsys.readouterr().err.splitlines())
    assert (event["level"], "without effect: 1" in event["event"]) == ("warning", True)


def test_missing_file_is_bad_usage(app, folder, capsys):
    assert main(["serve", "--config", "nowhere.yaml"]) == 2
    assert "--config" in capsys.readouterr().err
    assert main(["config", "check", "nowhere.yaml"]) == 2
    assert "FILE" in capsys.readouterr().err
    assert main(["config", "check", "small"]) == 2


def test_settings_without_effect_are_mentioned_when_serving(app, folder, capsys):
    write(folder, "logToStdout: both\nmodels: {m: {cmd: 'x ${PORT}'}}")
    command = CommandConfig("m", ("x", "${PORT}"), proxy="http://localhost:${PORT}", port=5800)
    assert served(app).models == (command,)
    assert GroupSwap() == app.configs[-1].swap
    assert "fairlead.yaml has settings without effect: 1" in capsys.readouterr().err


def test_valid_file_is_summarized_in_a_few_lines(folder, capsys):
    write(folder, FILE + "logToStdout: none\nnodes: [{id: big, url: 'http://a'}]")
    assert main(["config", "check", "fairlead.yaml"]) == 0
    assert capsys.readouterr().out == (
        "fairlead.yaml is good.\n  models: qwen\n"
        "  wire format of qwen: none, because the model has no chat template\n  nodes: big\n"
        "  evictions: none; all models must fit at the same time\n"
        "  address: localhost:9000\n"
        f"  API keys: 1\n    {key_id(KEY)}: no user, operator\n  without effect: logToStdout\n"
    )


def test_summary_of_a_file_names_the_eviction_policy_of_another_package(folder, capsys, monkeypatch):
    config = Config(models=(), swap=NamedSwap("only"))
    reading = Reading(config, (), ())
    monkeypatch.setattr("fairlead.server.console.configuration.read_config", lambda *_: reading)
    assert main(["config", "check", "fairlead.yaml"]) == 0
    assert "  evictions: by the policy only\n" in capsys.readouterr().out


def test_valid_file_is_summarized_in_json_without_its_secrets(folder, capsys):
    assert main(["config", "check", "fairlead.yaml", "--json"]) == 0
    out = capsys.readouterr().out
    assert json.loads(out) == {
        "file": "fairlead.yaml",
        "ok": True,
        "models": [
            {
                "name": "qwen",
                "kind": "engine",
                "wire_format": {
                    "name": None,
                    "source": None,
                    "reasoning": False,
                    "tool_calls": False,
                    "tools_explained": False,
                    "template_calls": "",
                    "rewritten": [],
                    "note": "none, because the model has no chat template",
                },
            }
        ],
        "nodes": [],
        "selectors": [],
        "swap": "keep",
        "host": "localhost",
        "port": 9000,
        "api_keys": 1,
        "keys": [{"id": key_id(KEY), "user": None, "role": "operator", "models": []}],
        "without_effect": [],
        "remarks": [],
        "missing_commands": {},
        "faulty_models": {},
    }
    assert "sk-file" not in out


def test_keys_without_an_operator_are_noted_when_checking_and_when_serving(app, folder, capsys):
    write(folder, "apiKeys: [sk-1]\nmodels: {qwen: {path: small}}")
    assert main(["config", "check", "fairlead.yaml"]) == 0
    assert f"  note: {NO_OPERATOR}\n" in capsys.readouterr().out
    served(app)
    assert capsys.readouterr().err == f"fairlead: warning: {NO_OPERATOR}\n"
    served(app, "--admin-key", "sk-2")
    assert capsys.readouterr().err == ""


def test_id_of_a_key_is_what_sha256sum_prints():
    assert key_id(ApiKey("sk-ana")) == "key-67920450836a62d5"


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644])
def test_keys_that_others_can_read_are_warned_about_when_serving_and_when_checking(app, folder, capsys, mode):
    (folder / "fairlead.yaml").chmod(mode)
    write(folder, FILE.replace("logJson: true", ""))
    served(app)
    warning = f"other users of this machine can read its API keys (mode {mode:04o}): chmod 600 fairlead.yaml"
    assert f"fairlead: warning: fairlead.yaml: {warning}\n" == capsys.readouterr().err
    assert main(["config", "check", "fairlead.yaml"]) == 0
    assert f"  note: {warning}\n" in capsys.readouterr().out


def test_keys_that_only_their_owner_can_read_are_not_warned_about(app, folder, capsys):
    served(app)
    assert capsys.readouterr().err == ""


def test_keys_that_others_can_read_are_warned_about_at_a_reload(app, folder, capsys):
    write(folder, FILE.replace("logJson: true", ""))
    served(app)
    (folder / "fairlead.yaml").chmod(0o644)
    assert app.sources[-1].read(None).api_keys == (KEY,)
    assert "chmod 600 fairlead.yaml" in "".join(capsys.readouterr())


def test_faults_exit_with_2_on_standard_error_or_in_json(folder, capsys):
    write(folder, "prot: 1")
    assert main(["config", "check", "fairlead.yaml"]) == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", "fairlead.yaml:1: prot: is not a setting; did you mean port?\n")
    assert main(["config", "check", "fairlead.yaml", "--json"]) == 2
    fault = {"line": 1, "key": "prot", "message": "is not a setting; did you mean port?"}
    assert {"file": "fairlead.yaml", "ok": False, "errors": [fault]} == json.loads(capsys.readouterr().out)
