"""A key that a llama-swap file leaves out has the default that llama-swap's documentation gives it.

Only keys that have an effect here are in the table; those that have none are named by `WITHOUT_EFFECT`.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from fairlead.base.config import Config
from fairlead.router.swap.policies import policy_for
from fairlead.server.configfile import read_config
from fairlead.server.configfile.llama_swap import WITHOUT_EFFECT

# Each setting that is required, and no other.
SMALLEST = """\
models: {a: {cmd: "serve ${PORT}"}, b: {cmd: "serve ${PORT}"}, c: {cmd: "serve ${PORT}"}}
groups: {pair: {members: [a, b]}}
selectors: {s: {strategy: pin, targets: [a]}}
peers: {p: {proxy: "http://10.0.0.9", models: [m]}}
"""
MATRIX = """\
models: {a: {cmd: "serve ${PORT}"}, b: {cmd: "serve ${PORT}"}, c: {cmd: "serve ${PORT}"}}
matrix: {sets: {one: "a & b", two: "b & c"}}
"""

DEFAULTS: dict[str, tuple[Any, Callable[[Config], Any]]] = {
    "logLevel": ("info", lambda config: config.log_level),
    "healthCheckTimeout": (120.0, lambda config: config.models[0].health_check_timeout_s),
    "startPort": ("5800", lambda config: str(config.models[0].port)),
    "globalTTL": (0.0, lambda config: config.models[0].ttl_s),
    "unloadTimeout": (10.0, lambda config: config.models[0].unload_timeout_s),
    "sendLoadingState": (False, lambda config: config.send_loading_state),
    "includeAliasesInList": (False, lambda config: config.include_aliases_in_list),
    "apiKeys": ((), lambda config: config.api_keys),
    "upstream.ignorePaths": (
        (r".*\.(js|json|css|png|gif|jpg|jpeg|ico|txt)$",),
        lambda config: config.upstream.patterns,
    ),
    "hooks.on_startup.preload": ([False] * 3, lambda config: [model.preload for model in config.models]),
    "routing.scheduler.settings.fifo.priority": ({}, lambda config: config.priorities),
    "models.*.proxy": ("http://localhost:${PORT}", lambda config: config.models[0].proxy),
    "models.*.cmdStop": ((), lambda config: config.models[0].cmd_stop),
    "models.*.aliases": ((), lambda config: config.models[0].aliases),
    "models.*.env": ({}, lambda config: config.models[0].env),
    "models.*.checkEndpoint": ("/health", lambda config: config.models[0].check_endpoint),
    "models.*.ttl": (0.0, lambda config: config.models[0].ttl_s),
    "models.*.unloadTimeout": (10.0, lambda config: config.models[0].unload_timeout_s),
    "models.*.unlisted": (False, lambda config: config.models[0].unlisted),
    "models.*.useModelName": (None, lambda config: config.models[0].use_model_name),
    "models.*.name": ("", lambda config: config.models[0].title),
    "models.*.description": ("", lambda config: config.models[0].description),
    "models.*.metadata": ({}, lambda config: config.models[0].metadata),
    "models.*.capabilities": ({}, lambda config: config.models[0].capabilities),
    "models.*.concurrencyLimit": (10, lambda config: config.models[0].concurrency_limit),
    "models.*.sendLoadingState": (None, lambda config: config.models[0].send_loading_state),
    "models.*.filters.stripParams": ((), lambda config: config.models[0].filters.strip_params),
    "models.*.filters.setParams": ({}, lambda config: config.models[0].filters.set_params),
    "models.*.filters.setParamsByID": ({}, lambda config: config.models[0].filters.set_params_by_id),
    "models.*.timeouts.connect": (30.0, lambda config: config.models[0].timeouts.connect_s),
    "models.*.timeouts.responseHeader": (0.0, lambda config: config.models[0].timeouts.first_byte_s),
    "models.*.timeouts.idleConn": (90.0, lambda config: config.models[0].timeouts.idle_s),
    "selectors.*.settings.spillover": (1, lambda config: config.selectors["s"].settings.spillover),
    "selectors.*.name": ("", lambda config: config.selectors["s"].title),
    "selectors.*.description": ("", lambda config: config.selectors["s"].description),
    "selectors.*.unlisted": (False, lambda config: config.selectors["s"].unlisted),
    "selectors.*.metadata": ({}, lambda config: config.selectors["s"].metadata),
    "groups.*.swap": (True, lambda config: config.swap.groups["pair"].swap),
    "groups.*.exclusive": (True, lambda config: config.swap.groups["pair"].exclusive),
    "groups.*.persistent": (False, lambda config: config.swap.groups["pair"].persistent),
    "peers.*.apiKey": (None, lambda config: config.nodes[0].api_key),
    "peers.*.timeouts.connect": (30.0, lambda config: config.nodes[0].timeouts.connect_s),
    "peers.*.timeouts.responseHeader": (60.0, lambda config: config.nodes[0].timeouts.first_byte_s),
    "peers.*.timeouts.idleConn": (90.0, lambda config: config.nodes[0].timeouts.idle_s),
    "peers.*.filters.stripParams": ((), lambda config: config.nodes[0].filters.strip_params),
    "peers.*.filters.setParams": ({}, lambda config: config.nodes[0].filters.set_params),
}

# Keys that are required in their section, and keys that have a test of their own below.
WITHOUT_DEFAULT = {
    "macros",
    "models.*.macros",
    "models.*.cmd",
    "selectors.*.strategy",
    "selectors.*.targets",
    "groups.*.members",
    "matrix.sets",
    "matrix.vars",
    "matrix.evict_costs",
    "routing.router.use",
    "peers.*.proxy",
    "peers.*.models",
}
NAMED = {("models",), ("selectors",), ("groups",), ("peers",)}  # sections with names as keys


def config_of(folder: Path, text: str) -> Config:
    path = folder / "config.yaml"
    path.write_text(text)
    return read_config(path, {}).config


@pytest.mark.parametrize("key", DEFAULTS)
def test_key_that_is_left_out_has_the_default_of_llama_swap(tmp_path, key):
    expected, of = DEFAULTS[key]
    assert of(config_of(tmp_path, SMALLEST)) == expected


def test_table_of_defaults_has_no_key_without_effect():
    without_effect = {".".join(pattern) for pattern, dropped in WITHOUT_EFFECT.items() if dropped}
    assert without_effect.isdisjoint(DEFAULTS)


def keys_of(section: Any, path: tuple[str, ...] = ()) -> set[str]:
    """Return the keys of a file down to those that are in a table of this module."""
    if path == ("routing", "router", "settings"):
        path = ()  # which has the same groups and matrix as the top level
    key = ".".join(path)
    if key in DEFAULTS or key in WITHOUT_DEFAULT or path in WITHOUT_EFFECT or not isinstance(section, dict):
        return {key}
    return {
        found
        for name, value in section.items()
        for found in keys_of(value, (*path, "*" if path in NAMED else name))
    }


def test_tables_have_every_key_of_the_example_of_llama_swap():
    example = yaml.safe_load(Path(__file__).with_name("llama_swap_example.yaml").read_text(encoding="utf-8"))
    without_effect = {".".join(pattern) for pattern in WITHOUT_EFFECT}
    assert keys_of(example) - DEFAULTS.keys() - WITHOUT_DEFAULT - without_effect == set()


def test_evicting_a_model_costs_one_by_default(tmp_path):
    # `b` may stay beside `a` or beside `c`, so `a` and `c` cost the same and the first set is chosen.
    policy = policy_for(config_of(tmp_path, MATRIX).swap, {})
    assert policy.eviction_for("b", ["a", "c"]) == {"c"}


def test_models_without_a_group_run_one_at_a_time_and_exclusively(tmp_path):
    text = "models: {a: {cmd: 'serve ${PORT}'}, b: {cmd: 'serve ${PORT}'}}"
    policy = policy_for(config_of(tmp_path, text).swap, {})
    assert policy.eviction_for("a", ["b"]) == {"b"}


@pytest.mark.parametrize("setting", ["", "concurrencyLimit: 0", "concurrencyLimit: null"])
def test_concurrency_limit_that_is_not_set_is_ten(tmp_path, setting):
    text = f"models:\n  a:\n    cmd: serve ${{PORT}}\n    {setting}\n"
    assert config_of(tmp_path, text).models[0].concurrency_limit == 10


def test_unload_timeout_of_zero_means_the_default_of_ten_seconds(tmp_path):
    text = "unloadTimeout: 0\nmodels: {a: {cmd: 'serve ${PORT}', unloadTimeout: 0}}"
    assert config_of(tmp_path, text).models[0].unload_timeout_s == 10.0


def test_ttl_of_minus_one_means_the_global_ttl(tmp_path):
    text = "globalTTL: 30\nmodels: {a: {cmd: 'serve ${PORT}', ttl: -1}}"
    assert config_of(tmp_path, text).models[0].ttl_s == 30.0
