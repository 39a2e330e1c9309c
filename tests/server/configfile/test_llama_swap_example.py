"""llama-swap's own example configuration has the meaning that its documentation gives it.

With real processes: `e2e/test_selectors.py`. Other groups, and a matrix: `nodes/test_fleet_swapping.py`.
"""

import json
from pathlib import Path

import pytest

from fairlead.base.config import Config, SelectorConfig, SelectorSettings
from fairlead.router.swap.policies import policy_for
from fairlead.server.cli import main
from fairlead.server.configfile import Reading, read_config

FILE = Path(__file__).with_name("llama_swap_example.yaml")
ENVIRONMENT = {
    "HOME": "/home/ana",
    "API_KEY_1": "sk-1",
    "API_KEY_2": "sk-2",
    "OPENROUTER_API_KEY": "sk-3",
}


@pytest.fixture(scope="module")
def reading() -> Reading:
    return read_config(FILE, ENVIRONMENT)


@pytest.fixture(scope="module")
def config(reading) -> Config:
    return reading.config


def test_config_check_accepts_the_example(monkeypatch, capsys):
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    assert main(["config", "check", str(FILE), "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["ok"], len(summary["models"]), summary["api_keys"]) == (True, 3, 4)
    assert summary["selectors"] == ["coding-model", "llm-plan", "llama"]
    assert main(["config", "check", str(FILE)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "  selectors: coding-model, llm-plan, llama" in lines
    assert any(line.startswith("  note: models.unlisted-model.cmd: ") for line in lines)


def test_unset_environment_variable_is_refused_as_by_llama_swap(capsys, monkeypatch):
    for name in ENVIRONMENT:
        monkeypatch.setenv(name, "x")
    monkeypatch.delenv("API_KEY_2")
    assert main(["config", "check", str(FILE)]) == 2
    assert "apiKeys[3]: " in capsys.readouterr().err


def test_undefined_models_are_reported_wherever_they_are_named(reading):
    named = {
        key
        for key in reading.without_effect
        if key.startswith(
            ("selectors", "hooks", "routing.router.settings.groups", "routing.scheduler.settings")
        )
    }
    groups, priority = "routing.router.settings.groups", "routing.scheduler.settings.fifo.priority"
    assert {
        "selectors.coding-model.targets[1]",
        "selectors.llama.targets[1]",
        "selectors.llama.targets[2]",
        "hooks.on_startup.preload[0]",  # a selector
        *(f"{groups}.group1.members[{index}]" for index in range(2)),
        *(f"{groups}.group2.members[{index}]" for index in (1, 2)),
        *(f"{groups}.forever.members[{index}]" for index in range(3)),
        *(f"{priority}.{name}" for name in "ABCD"),
    } == named


def test_selectors_of_the_example_are_read(config):
    assert {
        "coding-model": SelectorConfig(
            "warm",
            ("gpt-oss-120b", "qwen-unlisted"),
            title="Coding Model",
            description="Best currently loaded coding model",
            metadata={"purpose": "coding"},
        ),
        "llm-plan": SelectorConfig("pin", ("gpt-oss-120b", "z-ai/glm-4.7")),
        "llama": SelectorConfig("spillover", ("docker-llama", "modelA", "modelB"), SelectorSettings(4)),
    } == config.selectors


def test_command_without_a_port_gets_it_in_its_environment(config, reading):
    (model,) = [model for model in config.models if model.name == "unlisted-model"]
    assert (model.cmd, model.env) == (("some-upstream-server",), {"PORT": "${PORT}"})
    assert (model.proxy, model.port) == ("http://localhost:${PORT}", 10003)
    assert reading.remarks[0].startswith("models.unlisted-model.cmd: uses neither ${PORT} nor a proxy")


def test_other_models_have_the_same_ports_as_in_llama_swap(config):
    models = {model.name: model.at_port(model.port) for model in config.models if model.port is not None}
    assert "10002" in models["gpt-oss-120b"].cmd
    assert "10001:8080" in models["docker-llama"].cmd


def test_groups_of_the_example_evict_as_documented(config):
    # `group2` is neither exclusive nor persistent; models without a group are in an exclusive one that swaps.
    policy = policy_for(config.swap, {})
    assert frozenset({"unlisted-model"}) == policy.eviction_for("gpt-oss-120b", ["unlisted-model"])
    assert frozenset({"docker-llama"}) == policy.eviction_for("unlisted-model", ["docker-llama"])
    assert policy.eviction_for("docker-llama", ["gpt-oss-120b"]) == frozenset()
