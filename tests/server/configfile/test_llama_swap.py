"""A llama-swap configuration file has the same meaning in Fairlead."""

from pathlib import Path
from textwrap import dedent

import msgspec
import pytest

from fairlead.base.config import (
    CommandConfig,
    Config,
    FiltersConfig,
    GroupSwap,
    KeepSwap,
    LruSwap,
    MatrixSwap,
    NodeConfig,
    TimeoutsConfig,
)
from fairlead.router.swap.group import GroupPolicy
from fairlead.router.swap.lru import LruPolicy
from fairlead.router.swap.matrix import MatrixPolicy
from fairlead.router.swap.policies import policy_for
from fairlead.router.swap.policy import KeepEverything
from fairlead.server.configfile import ConfigFileError, Reading, read_config

EXAMPLE = """\
healthCheckTimeout: 300
logLevel: debug
logToStdout: both
logTimeFormat: rfc3339
metricsMaxInMemory: 50
captureBuffer: 3
store: {path: /tmp/x.sqlite}
ui: {activity: {session_id: [X-Who]}}
performance: {disabled: true, every: 15s}
startPort: 9100
sendLoadingState: true
upstream: {ignorePaths: ['\\.(css|js)$', '^/ws$']}
profiles: {coding: {description: for code, pins: {helper: zeta, painter: ~}}}
includeAliasesInList: true
globalTTL: 30
unloadTimeout: 20
macros:
  server: >
    /opt/server --listen ${PORT}
  depth: 4096
  options: "--depth ${depth}"
  store: "${env.STORE}/models"
apiKeys: ["key-1", "${env.SECRET}"]
models:
  zeta:
    macros: {depth: 16384, heat: 0.7, calm: true}
    cmd: |
      # the ${server} of everybody
      ${server} \\
      --file ${store}/zeta.gguf
      # --not-this ${nobody}
      ${options} --names '{"a b": 1}'
    name: Zeta the Great
    description: on ${PORT}
    env: ["GPU=0,1", "EMPTY="]
    checkEndpoint: /ready
    ttl: 60
    unloadTimeout: 5
    compat: {ignoreWebsockets: true}
    useModelName: vendor/zeta
    filters:
      strip_params: "model, top_k, top_p, top_k"
      setParams: {temperature: "${heat}", model: other}
      setParamsByID:
        "${MODEL_ID}": {effort: low}
        "${MODEL_ID}:high": {effort: high, model: x}
    aliases: [z-4, zeta]
    metadata:
      port: ${PORT}
      heat: ${heat}
      list: ["${calm}", "at ${PORT} with ${heat}"]
    concurrencyLimit: 0
    sendLoadingState: false
    timeouts: {connect: 3, keepalive: 0, responseHeader: 40, tlsHandshake: 5, idleConn: 9}
    capabilities: {in: [text], tools: true}
  alpha:
    cmd: box run --name ${MODEL_ID} -p ${PORT}:80 image
    cmdStop: box stop ${MODEL_ID} ${PID}
    proxy: http://127.0.0.1:${PORT}
    ttl: 0
    concurrencyLimit: 4
    unlisted: true
  fixed:
    cmd: server --listen 7777
    proxy: http://127.0.0.1:7777/base
    checkEndpoint: none
    ttl: -1
hooks: {on_startup: {preload: [z-4, nobody]}}
routing:
  router:
    use: group
    settings:
      groups:
        pair: {swap: false, exclusive: false, members: [zeta, alpha, missing]}
        always: {persistent: true, members: [fixed]}
      matrix: {vars: {z: nowhere}, sets: {one: "z & y"}}
  scheduler: {use: fifo, settings: {fifo: {priority: {}}}}
peers:
  near: {proxy: http://10.0.0.9:8080, models: [m, shared, zeta]}
  far:
    proxy: https://far.example/api
    apiKey: ${env.SECRET}
    models: [vendor/m, shared]
    timeouts: {connect: 1}
    filters: {stripParams: temperature, setParams: {zdr: true}}
"""
ENVIRONMENT = {"STORE": "/srv", "SECRET": "s3cr:t #1".replace(" ", "_")}


def reading(folder: Path, text: str) -> Reading:
    path = folder / "config.yaml"
    path.write_text(dedent(text))
    return read_config(path, ENVIRONMENT)


def planned(model: CommandConfig) -> CommandConfig:
    """Return a command as it is started if its port is free."""
    return model if model.port is None else model.at_port(model.port)


def refusals(folder: Path, text: str) -> list[str]:
    with pytest.raises(ConfigFileError) as refused:
        reading(folder, text)
    return [f"{fault.key}: {fault.message}" for fault in refused.value.found]


@pytest.fixture(scope="module")
def example(tmp_path_factory) -> Reading:
    return reading(tmp_path_factory.mktemp("example"), EXAMPLE)


@pytest.fixture(scope="module")
def config(example) -> Config:
    return example.config


def test_commands_are_split_without_comments_after_macros_are_expanded(config):
    zeta = planned(config.models[0])
    expected = [
        "/opt/server",
        "--listen",
        "9101",
        "--file",
        "/srv/models/zeta.gguf",
        "--depth",
        "16384",
        "--names",
    ]
    assert zeta.cmd == (*expected, '{"a b": 1}')


def test_ports_are_assigned_in_the_order_of_model_names(config):
    assert [planned(model).proxy for model in config.models] == [
        "http://localhost:9101",
        "http://127.0.0.1:9100",
        "http://127.0.0.1:7777/base",
    ]


def test_pid_in_cmd_stop_is_not_expanded_by_the_reader(config):
    assert config.models[1].cmd_stop == ("box", "stop", "alpha", "${PID}")


def test_value_that_is_only_a_macro_takes_its_type(config):
    expected = {"port": 9101, "heat": 0.7, "list": [True, "at 9101 with 0.7"]}
    assert expected == config.models[0].metadata
    assert config.models[0].description == "on 9101"


def test_filters_never_change_the_model_of_a_request(config):
    assert (
        FiltersConfig(
            strip_params=("top_k", "top_p"),
            set_params={"temperature": 0.7},
            set_params_by_id={"zeta": {"effort": "low"}, "zeta:high": {"effort": "high"}},
        )
        == config.models[0].filters
    )


def test_names_with_parameters_are_aliases(config):
    assert config.models[0].aliases == ("z-4", "zeta:high")


def test_global_settings_apply_to_models_that_do_not_set_them(config):
    assert [model.ttl_s for model in config.models] == [60.0, 0.0, 30.0]
    assert [model.unload_timeout_s for model in config.models] == [5.0, 20.0, 20.0]
    assert [model.health_check_timeout_s for model in config.models] == [300.0] * 3
    assert [model.concurrency_limit for model in config.models] == [10, 4, 10]
    assert TimeoutsConfig(3.0, 40.0, idle_s=9.0) == config.models[0].timeouts
    assert config.models[0].env == {"GPU": "0,1", "EMPTY": ""}
    assert (config.models[0].check_endpoint, config.models[2].check_endpoint) == ("/ready", "none")
    assert (config.models[0].use_model_name, config.models[1].use_model_name) == ("vendor/zeta", None)
    assert [model.unlisted for model in config.models] == [False, True, False]


def test_preload_accepts_aliases(config):
    assert [model.preload for model in config.models] == [True, False, False]


def test_keys_may_come_from_the_environment(config):
    assert [key.key for key in config.api_keys] == ["key-1", "s3cr:t_#1"]


def test_peer_models_have_full_names_and_also_short_names_if_unique(config):
    near, far = config.nodes
    assert near.models == ("near/m", "near/shared", "near/zeta", "m")
    assert near.model_names == {"near/m": "m", "near/shared": "shared", "near/zeta": "zeta"}
    assert (
        NodeConfig(
            "far",
            "https://far.example/api",
            "s3cr:t_#1",
            seats=10,
            models=("far/vendor/m", "far/shared", "vendor/m"),
            model_names={"far/vendor/m": "vendor/m", "far/shared": "shared"},
            filters=FiltersConfig(("temperature",), {"zdr": True}),
            timeouts=TimeoutsConfig(connect_s=1.0, first_byte_s=60.0),
        )
        == far
    )


def test_settings_without_effect_are_listed(example):
    assert set(example.without_effect) == {
        "logToStdout",
        "logTimeFormat",
        "metricsMaxInMemory",
        "captureBuffer",
        "store",
        "ui",
        "performance",
        "profiles",
        "models.zeta.compat.ignoreWebsockets",
        "models.zeta.name",
        "models.zeta.description",
        "models.zeta.metadata",
        "models.zeta.capabilities",
        "models.zeta.timeouts.keepalive",
        "models.zeta.timeouts.tlsHandshake",
        "hooks.on_startup.preload[1]",
        "routing.router.settings.groups.pair.members[2]",
        "routing.router.settings.matrix",
        "routing.scheduler.use",
    }


def test_priorities_accept_names_and_aliases_of_models(tmp_path):
    models = "models: {a: {cmd: 'x ${PORT}', aliases: [first]}, b: {cmd: 'x ${PORT}'}}"
    priority = "routing: {scheduler: {settings: {fifo: {priority: {first: 10, b: -1, nobody: 3}}}}}"
    found = reading(tmp_path, f"{models}\n{priority}")
    assert found.config.priorities == {"a": 10, "b": -1}
    assert found.without_effect == ("routing.scheduler.settings.fifo.priority.nobody",)


SELECTED = "groups: {g: {swap: false, members: [a, b]}}\nmodels: {a: {cmd: '${PORT}'}, b: {cmd: '${PORT}'}}\n"


@pytest.mark.parametrize(
    ("selectors", "expected"),
    [
        ("s: {targets: [a]}", "selectors.s.strategy: is missing"),
        ("s: {strategy: warm}", "selectors.s.targets: is missing"),
        ("s: {strategy: warm, targets: []}", "selectors.s.targets: must be one name or more"),
        ("s: {strategy: hot, targets: [a]}", "s.strategy: must be one of warm, pin, spillover"),
        ("a: {strategy: pin, targets: [b]}", "selectors.a: is the name of a model"),
        ("' ': {strategy: pin, targets: [b]}", "selectors. : the name of a selector must not be empty"),
        (
            "s: {strategy: pin, targets: [a]}, t: {strategy: pin, targets: [b, s]}",
            "selectors.t.targets[1]: s is a selector, which cannot be a target",
        ),
        (
            "s: {strategy: spillover, targets: [a, b], settings: {spillover: 0}}",
            "selectors.s.settings.spillover: must be at least 1",
        ),
        ("s: {strategy: spillover, targets: [a, b, a]}", "selectors.s.targets[2]: a occurs twice"),
    ],
)
def test_invalid_selectors_are_refused_by_name(tmp_path, selectors, expected):
    found = refusals(tmp_path, f"{SELECTED}selectors: {{{selectors}}}")
    assert [refusal for refusal in found if expected in refusal], found


def test_jobs_cannot_spill_over_between_models_that_evict_each_other(tmp_path):
    selectors = "selectors: {s: {strategy: spillover, targets: [a, b]}}"
    assert reading(tmp_path, SELECTED + selectors).without_effect == ()
    found = refusals(tmp_path, SELECTED.partition("\n")[2] + selectors)
    assert "selectors.s.targets[1]: b cannot be loaded together with a" in found


def test_peer_model_named_like_a_selector_has_only_its_full_name(tmp_path):
    text = "selectors: {s: {strategy: pin, targets: [p/s]}}\npeers: {p: {proxy: 'http://h', models: [s, m]}}"
    found = reading(tmp_path, text)
    assert found.config.nodes[0].models == ("p/s", "p/m", "m")
    assert found.without_effect == ()
    nodes = "nodes: [{id: n, url: 'http://h', models: [s]}]\nselectors: {s: {strategy: pin, targets: [x]}}"
    assert refusals(tmp_path, nodes) == ["selectors.s: is the name of a model"]


def test_unknown_target_is_accepted_if_a_node_does_not_list_its_models(tmp_path):
    text = "selectors: {s: {strategy: pin, targets: [x]}}\nnodes: [{id: n, url: 'http://h'}]"
    assert reading(tmp_path, text).without_effect == ()


@pytest.mark.parametrize("env", ["", "env: [A=1]", "env: {A: '1'}", "env:"])
def test_command_without_a_port_gets_one_in_its_environment(tmp_path, env):
    found = reading(tmp_path, f"models:\n  a:\n    cmd: x\n    {env}\n  b: {{cmd: 'x ${{PORT}}'}}")
    first, second = map(planned, found.config.models)
    assert first.proxy == "http://localhost:5800"
    assert ({"A": "1"} if "A" in env else {}) | {"PORT": "5800"} == first.env
    assert (second.proxy, second.env) == ("http://localhost:5801", {})
    assert [remark.partition(": ")[0] for remark in found.remarks] == ["models.a.cmd"]


def test_port_that_another_command_names_is_given_to_none(tmp_path):
    text = "models: {a: {cmd: '${PORT}'}, b: {cmd: x, proxy: 'http://127.0.0.1:5800'}, c: {cmd: '${PORT}'}}"
    assert [model.port for model in reading(tmp_path, text).config.models] == [5801, None, 5802]


@pytest.mark.parametrize(
    ("text", "ports"),
    [
        ("models: {a: {cmd: '${PORT}'}, b: {cmd: '${PORT}'}, c: {cmd: '${PORT} x'}}", [5802, 5800, 5801]),
        ("models: {c: {cmd: '${PORT}'}, d: {cmd: '${PORT}'}}", [5801, 5800]),
        ("models: {b: {cmd: x, proxy: 'http://localhost:5801'}, c: {cmd: '${PORT}'}}", [None, 5800]),
        ("startPort: 5801\nmodels: {b: {cmd: '${PORT}'}, c: {cmd: '${PORT}'}}", [5802, 5801]),
    ],
)
def test_commands_keep_their_ports_when_the_file_is_read_again(tmp_path, text, ports):
    running = reading(tmp_path, "models: {b: {cmd: '${PORT}'}, c: {cmd: '${PORT}'}}").config
    assert [model.port for model in running.models] == [5800, 5801]
    path = tmp_path / "config.yaml"
    path.write_text(text)
    assert [model.port for model in read_config(path, {}, running=running).config.models] == ports


def test_port_is_not_a_setting(tmp_path):
    assert refusals(tmp_path, "models: {a: {cmd: '${PORT}', port: 1}}")[0].startswith("models.a.port: is not")


def test_empty_sections_are_accepted(tmp_path):
    text = (
        "profiles: {}\nselectors:\nupstream: {ignorePaths: []}\nmodels: {a: {cmd: 'x ${PORT}', compat: {}}}"
    )
    assert [model.name for model in reading(tmp_path, text).config.models] == ["a"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("macros: {PORT: 1}", "macros.PORT: is reserved"),
        ("macros: {'a b': 1}", "macros.a b: the name of a macro must be 1 to 63 letters"),
        (f"macros: {{{'a' * 64}: 1}}", "the name of a macro must be 1 to 63 letters, digits, - and _"),
        ("macros: {a: [1]}", "macros.a: must be text, a number, true or false"),
        ("macros: {a: 'x ${a}'}", "macros.a: refers to itself"),
        ("macros: [a]", "macros: must be a mapping"),
        ("host: ${nobody}", "host: there is no macro ${nobody}"),
        ("macros: {a: '${b}', b: x}\nhost: ${a}", "host: there is no macro ${b}"),  # b is defined after a
        ("models: {a: {cmd: 'x ${PORT} ${PID}'}}", "models.a.cmd: there is no macro ${PID}"),
        ("models: {a: {cmd: x, proxy: 'http://h:${PORT}'}}", "a.proxy: uses ${PORT}, but cmd does not"),
        ("models: {a: {cmd: x, env: [PORT=7]}}", "models.a.env: sets PORT, so proxy must have the address"),
        ("models: {a: {cmd: x, env: {PORT: 7}}}", "models.a.env: sets PORT, so proxy must have the address"),
        ("models: {a: {cmd: x, env: 7}}", "models.a.env: must be "),
        ("startPort: 65535\nmodels: {a: {cmd: x}, b: {cmd: x}}", "models.b.cmd: no port is left"),
        (
            "startPort: 65535\nmodels: {a: {cmd: '${PORT}'}, b: {cmd: '${PORT}'}}",
            "models.b.cmd: no port is left",
        ),
        ("startPort: 0", "startPort: must be at least 1"),
        ("models: {a: {cmd: '${PORT}', filters: {setParamsByID: {'${x}': {}}}}}", "there is no macro ${x}"),
        (
            "models: {a: {cmd: '${PORT}', filters: {setParamsByID: {'${MODEL_ID}': {}, a: {}}}}}",
            "models.a.filters.setParamsByID.a: is a, which occurs already",
        ),
        ("peers: {p: {proxy: 'http://h', models: []}}", "p.models: must be one name or more"),
        ("peers: {p: {proxy: h, models: [a]}}", "peers.p.proxy: must be a URL"),
        ("peers: {'': {proxy: 'http://h', models: [a]}}", "peers.: the name of a peer must not be empty"),
        ("peers: {p: {models: [a]}}", "peers.p.proxy: is missing"),
        ("globalTTL: -1", "globalTTL: must be a time, or 0"),
        ("models: {a: {cmd: '${PORT}', ttl: -2}}", "models.a.ttl: must be a time, or 0"),
    ],
)
def test_values_that_llama_swap_refuses_are_refused(tmp_path, text, expected):
    found = refusals(tmp_path, text)
    assert [refusal for refusal in found if expected in refusal], found


def test_expansion_of_macros_is_bounded(tmp_path):
    macros = "\n".join(f"  m{level}: '{f'${{m{level - 1}}}' * 10}'" for level in range(1, 12))
    found = refusals(tmp_path, f"macros:\n  m0: x\n{macros}\nhost: ${{m11}}")
    assert "host: would have more than 100000 characters" in found


def test_total_size_of_expanded_macros_is_bounded(tmp_path):
    text = f"macros: {{a: {'x' * 1000}, b: '{'${a}' * 90}'}}\nx-all: 1\nmodels:\n" + "".join(
        f"  m{number}: {{cmd: '${{PORT}}', env: ['A=${{b}}']}}\n" for number in range(60)
    )
    assert any("expands to more than" in refusal for refusal in refusals(tmp_path, text))


def test_macros_of_a_model_override_those_of_the_file_and_may_use_earlier_ones(tmp_path):
    text = """\
        macros: {a: 1, b: "b${a}"}
        models:
          m: {macros: {a: 2, c: "c${b}"}, cmd: "${PORT} ${a} ${b} ${c} ${MODEL_ID}"}
        """
    (model,) = reading(tmp_path, text).config.models
    assert planned(model).cmd == ("5800", "2", "b2", "cb2", "m")


def test_health_check_timeout_is_at_least_fifteen_seconds(tmp_path):
    text = "healthCheckTimeout: 3\nmodels: {a: {cmd: '${PORT}'}}"
    assert reading(tmp_path, text).config.models[0].health_check_timeout_s == 15.0


def test_anchors_may_be_defined_in_extra_sections(tmp_path):
    text = """\
        defs: {c: &c {tools: true}}
        x-env: &e [A=1]
        models: {a: {cmd: "${PORT}", env: *e, capabilities: {<<: *c}}}
        """
    (model,) = reading(tmp_path, text).config.models
    assert (model.env, model.capabilities) == ({"A": "1"}, {"tools": True})


def test_key_that_only_holds_an_anchor_has_no_effect_but_is_no_error(tmp_path):
    text = """\
        defaults: &defaults
          proxy: http://127.0.0.1:9081
          ttl: &idle 600
        words: [&word [A=1], B=2]
        models:
          alpha-8b: {cmd: llama-server --port 9081, env: *word, <<: *defaults}
          beta: {cmd: "${PORT}", ttl: *idle}
        """
    found = reading(tmp_path, text)
    assert set(found.without_effect) == {"defaults", "words"}
    alpha, beta = found.config.models
    assert (alpha.ttl_s, alpha.proxy, alpha.env, beta.ttl_s) == (
        600,
        "http://127.0.0.1:9081",
        {"A": "1"},
        600,
    )


@pytest.mark.parametrize("value", ["&unused {ttl: 5}", "{a: &a 5, b: *a}", "5"])
def test_unknown_key_to_which_nothing_refers_is_an_error(tmp_path, value):
    with pytest.raises(ConfigFileError, match="defaults: is not a setting"):
        reading(tmp_path, f"defaults: {value}\nmodels: {{a: {{cmd: '${{PORT}}'}}}}")


def test_setting_that_others_refer_to_keeps_its_effect(tmp_path):
    text = "globalTTL: &ttl 7\nmodels: {a: {cmd: '${PORT}'}, b: {cmd: '${PORT}', ttl: *ttl}}"
    assert [model.ttl_s for model in reading(tmp_path, text).config.models] == [7, 7]


@pytest.mark.parametrize(
    ("swap", "kind", "running", "evicted"),
    [
        (KeepSwap(), KeepEverything, ["b"], set()),
        (GroupSwap(), GroupPolicy, ["b"], {"b"}),
        (MatrixSwap({"s": "a & c"}, {"c": "b"}), MatrixPolicy, ["b"], set()),
        (LruSwap(max_loaded=1), LruPolicy, ["b"], {"b"}),
        (LruSwap(memory_mb=10), LruPolicy, ["b"], {"b"}),
    ],
)
def test_each_swap_setting_has_its_policy(swap, kind, running, evicted):
    policy = policy_for(swap, {"a": 6.0, "b": 6.0})
    assert isinstance(policy, kind)
    assert frozenset(evicted) == policy.eviction_for("a", running)


def test_groups_of_a_file_evict_as_documented(config):
    policy = policy_for(config.swap, {})
    assert policy.eviction_for("zeta", ["alpha", "fixed"]) == frozenset()
    assert frozenset({"alpha"}) == policy.eviction_for("fixed", ["alpha"])


def test_settings_can_be_converted_to_a_json_schema():
    from fairlead.server.configfile.sections import Peer, Routing

    kinds = [
        NodeConfig,
        FiltersConfig,
        TimeoutsConfig,
        GroupSwap | LruSwap | KeepSwap | MatrixSwap,
        Peer,
        Routing,
    ]
    _, schemas = msgspec.json.schema_components(kinds)
    assert "setParamsByID" in schemas["FiltersConfig"]["properties"]
