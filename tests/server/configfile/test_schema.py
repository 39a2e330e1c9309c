"""The schema of a configuration file accepts what the reader accepts; it refuses wrong types and keys."""

import json
from importlib.resources import files
from pathlib import Path

import msgspec
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from documents import documents
from fairlead.base.config.documentation import documentation_of
from fairlead.base.config.models import NO_SETTINGS
from fairlead.base.config.spelling import settings_of
from fairlead.server.cli import main
from fairlead.server.configfile import ConfigFileError, read_config
from fairlead.server.configfile.schema import schema
from server.configfile.test_llama_swap import EXAMPLE
from server.configfile.test_llama_swap_example import FILE

EXAMPLES = sorted((Path(str(files("fairlead"))) / "server" / "examples").glob("*.yaml"))
VALIDATOR = Draft202012Validator(schema())


def schema_errors(text: str) -> list[str]:
    return [error.json_path for error in VALIDATOR.iter_errors(yaml.safe_load(text))]


@pytest.mark.parametrize("path", documents(), ids=lambda path: path.name)
def test_generated_documents_are_up_to_date(path):
    assert documents()[path] == path.read_text(encoding="utf-8"), "python tests/documents.py writes it anew"


def test_schema_is_valid_and_ships_with_the_package():
    kept = json.loads((files("fairlead") / "base" / "config" / "schema.json").read_text())
    Draft202012Validator.check_schema(kept)
    assert kept == schema()


def test_command_line_prints_the_schema(capsys):
    assert main(["config", "schema"]) == 0
    assert json.loads(capsys.readouterr().out) == schema()


@pytest.mark.parametrize("text", [EXAMPLE, FILE.read_text()], ids=["reduced", "its own"])
def test_llama_swap_file_fits_the_schema(text):
    assert schema_errors(text) == []


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_each_example_fits_the_schema_and_is_read(path, tmp_path):
    text = path.read_text()
    assert schema_errors(text) == []
    for folder in ("qwen", "gemma", "demo"):
        (tmp_path / folder).mkdir()
    environment = {
        "MODELS": str(tmp_path),
        "ADMIN_KEY": "sk-r",
        "ANA_KEY": "sk-a",
        "PORTAL_KEY": "sk-p",
        "BATCH_KEY": "sk-b",
    }
    reading = read_config(path, environment)
    assert reading.config.models or reading.config.nodes
    assert reading.without_effect == ()


def test_examples_ship_with_the_package():
    assert [path.stem for path in EXAMPLES] == ["llama-swap", "single-shot-nodes", "small-machine", "team"]


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("prot: 8000", "$"),
        ("port: {}", "$.port"),
        ("port: 70000", "$.port"),
        ("queue: {capacity: -1}", "$.queue.capacity"),
        ("queue: {fairness: random}", "$.queue.fairness"),
        ("queue: {timeout: soon}", "$.queue.timeout"),
        ("apiKeys: [{user: ana}]", "$.apiKeys[0]"),
        ("apiKeys: [7, [8]]", "$.apiKeys[1]"),
        ("models: {m: {slots: 4}}", "$.models.m"),
        ("models: {m: {path: p, slots: 0}}", "$.models.m"),
        ("models: {m: {path: p, device: tpu}}", "$.models.m"),
        ("models: {m: {path: p, slotz: 4}}", "$.models.m"),
        ("models: {m: {path: p, wireFormat: hermez}}", "$.models.m"),
        ("nodes: [{id: n}]", "$.nodes[0]"),
        ("nodes: [{id: n, url: u, seats: none}]", "$.nodes[0].seats"),
        ("healthCheck: {interval: 0}", "$.healthCheck.interval"),
        ("lru: {maxLoaded: many}", "$.lru"),
        ("selectors: {a: {strategy: hot, targets: [b]}}", "$.selectors.a.strategy"),
        ("selectors: {a: {strategy: pin}}", "$.selectors.a"),
        (
            "routing: {scheduler: {settings: {fifo: {priority: {a: x}}}}}",
            "$.routing.scheduler.settings.fifo.priority.a",
        ),
    ],
)
def test_invalid_value_is_refused_by_path_and_by_the_reader(tmp_path, text, path):
    assert [path] == schema_errors(text)
    file = tmp_path / "config.yaml"
    file.write_text(text)
    with pytest.raises(ConfigFileError):
        read_config(file, {})


_MODEL = {"cmd": st.just("serve ${PORT}"), "ttl": st.sampled_from([-1, 0, "5m", "250ms", 3.5, "1h30m"])}
_FILES = st.fixed_dictionaries(
    {},
    optional={
        "port": st.integers(0, 65535),
        "logLevel": st.sampled_from(["debug", "info", "warn", "error"]),
        "apiKeys": st.lists(st.sampled_from(["a", "b", {"key": "c", "trusted": True}]), unique_by=str),
        "queue": st.fixed_dictionaries(
            {}, optional={"timeout": st.sampled_from([1, "60", "2m"]), "minShare": st.floats(0, 1)}
        ),
        "globalTTL": st.sampled_from([0, "0", "10s"]),
        "models": st.dictionaries(
            st.sampled_from(["x", "y"]),
            st.fixed_dictionaries(
                _MODEL,
                optional={
                    "env": st.sampled_from([["A=1"], {"A": "1"}]),
                    "aliases": st.just([]),
                    "concurrencyLimit": st.integers(0, 3),
                    "cmdStop": st.sampled_from(["stop ${PID}", ["stop", "${PID}"]]),
                },
            ),
        ),
        "nodes": st.just([{"id": "n", "url": "http://127.0.0.1:1", "models": ["m"]}]),
    },
)


@given(_FILES)
def test_schema_accepts_every_file_that_the_reader_accepts(tmp_path_factory, values):
    file = tmp_path_factory.mktemp("config") / "config.yaml"
    file.write_text(yaml.safe_dump(values) if values else "port: 1\n")
    try:
        read_config(file, {})
    except ConfigFileError as error:
        pytest.fail(str(error))
    assert schema_errors(file.read_text()) == []


def _structs() -> list[type[msgspec.Struct]]:
    """Return every struct with fields that a file can set."""
    from fairlead.base.config import CommandConfig, ModelConfig
    from fairlead.server.configfile.sections import FileSettings

    found: list[type[msgspec.Struct]] = []
    unvisited = [FileSettings, ModelConfig, CommandConfig]
    while unvisited:
        kind = unvisited.pop()
        if kind in found:
            continue
        found.append(kind)
        shapes = [setting.shape for setting in settings_of(kind)]
        kinds = [shape.kind if shape.item is None else shape.item.kind for shape in shapes]
        unvisited += [each for each in kinds if isinstance(each, type) and issubclass(each, msgspec.Struct)]
    return found


@pytest.mark.parametrize("kind", _structs(), ids=lambda kind: kind.__name__)
def test_every_setting_is_documented(kind):
    texts = documentation_of(kind)
    for setting in settings_of(kind):
        is_struct = isinstance(setting.shape.kind, type) and issubclass(setting.shape.kind, msgspec.Struct)
        if setting.name not in NO_SETTINGS and not is_struct:  # a struct has its own docstring
            assert texts[setting.name].endswith("."), setting.name
