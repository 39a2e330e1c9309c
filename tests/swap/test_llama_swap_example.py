"""llama-swap's own example configuration is read, and means here what its documentation says.

Real processes of it: `e2e/test_selectors.py`. Other groups, and a matrix: `nodes/test_fleet_swapping.py`.
"""

import json
from pathlib import Path

import pytest

from fairlead.cli import main
from fairlead.config import Config, SelectorConfig, SelectorSettings
from fairlead.configfile import Reading, read_config
from fairlead.swap.policies import policy_for

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


def test_config_check_takes_it(monkeypatch, capsys):
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    assert 0 == main(["config", "check", str(FILE), "--json"])
    told = json.loads(capsys.readouterr().out)
    assert (True, 3, 4) == (told["ok"], len(told["models"]), told["api_keys"])
    assert ["coding-model", "llm-plan", "llama"] == told["selectors"]
    assert 0 == main(["config", "check", str(FILE)])
    lines = capsys.readouterr().out.splitlines()
    assert "  selectors: coding-model, llm-plan, llama" in lines
    assert any(line.startswith("  note: models.unlisted-model.cmd: ") for line in lines)


def test_it_is_refused_for_a_variable_that_is_not_set_as_it_is_there(capsys, monkeypatch):
    for name in ENVIRONMENT:
        monkeypatch.setenv(name, "x")
    monkeypatch.delenv("API_KEY_2")
    assert 2 == main(["config", "check", str(FILE)])
    assert "apiKeys[3]: " in capsys.readouterr().err


def test_models_that_it_does_not_define_are_noted_wherever_they_are_named(reading):
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


def test_its_selectors_are_ours(config):
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


def test_a_command_that_says_nothing_of_a_port_finds_it_in_its_environment(config, reading):
    (model,) = [model for model in config.models if model.name == "unlisted-model"]
    assert (("some-upstream-server",), {"PORT": "10003"}) == (model.cmd, model.env)
    assert "http://localhost:10003" == model.proxy
    assert reading.remarks[0].startswith("models.unlisted-model.cmd: does not use ${PORT}")


def test_the_others_keep_the_ports_that_they_have_there(config):
    ports = {model.name: [word for word in model.cmd if "1000" in word] for model in config.models}
    assert ["10002"] == ports["gpt-oss-120b"]
    assert ["10001:8080"] == ports["docker-llama"]


def test_its_groups_evict_what_the_documentation_says(config):
    # `group2` is neither exclusive nor persistent; who is in no group is in an exclusive one, one at a time.
    policy = policy_for(config.swap, {})
    assert frozenset({"unlisted-model"}) == policy.eviction_for("gpt-oss-120b", ["unlisted-model"])
    assert frozenset({"docker-llama"}) == policy.eviction_for("unlisted-model", ["docker-llama"])
    assert frozenset() == policy.eviction_for("docker-llama", ["gpt-oss-120b"])
