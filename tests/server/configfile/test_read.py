"""Valid configuration files, and the errors reported for invalid ones."""

import re

import pytest

from fairlead.base.config import (
    ApiKey,
    CommandConfig,
    Config,
    GroupConfig,
    GroupSwap,
    HealthConfig,
    KeepSwap,
    KeyLimits,
    KvCacheConfig,
    Limits,
    LruSwap,
    MatrixSwap,
    ModelConfig,
    NodeConfig,
    QueueConfig,
    TeamConfig,
    TimeoutsConfig,
)

EVERYTHING = """
host: 0.0.0.0
port: 9000
apiKeys:
  - key: sk-1
    user: ana
    trusted: true
    priority: high
    models: [qwen]
    limits: {requestsPerMinute: 60, concurrent: 4}
    role: operator
    team: red
  - sk-2
teams: {red: {weight: 2}, blue: {}}
queue: {capacity: 7, timeout: 1m30s, fairness: tokens, keepAlive: 250ms, minShare: 0.1,
        tenantWeights: {ana: 2}}
requestTimeout: 2m
limits: {bodyBytes: 1000, drain: 5}
whileLoading: reject
healthCheck: {interval: 2s, failures: 5}
models:
  qwen:
    path: small
    aliases: [q, 7]
    dtype: bfloat16
    slots: 8
    maxBatch: 4
    ttl: 5m
    memoryMb: 900
    preload: true
    kvCache: {maxEntries: 100, cleanupInterval: 500ms}
  other:
    cmd: "server --port ${PORT} 'a b'"
    ttl: 300
    concurrencyLimit: 2
    timeouts: {connect: 1, betweenBytes: 20s}
nodes:
  - {id: big, url: "http://10.0.0.2:8000", apiKey: sk-3, seats: 4, models: [qwen, large]}
"""


def test_file_can_set_every_configuration_field(file, config):
    expected = Config(
        host="0.0.0.0",
        port=9000,
        api_keys=(
            ApiKey(
                "sk-1", "ana", True, "high", ("qwen",), KeyLimits(60, concurrent=4), "operator", team="red"
            ),
            ApiKey("sk-2"),
        ),
        teams={"red": TeamConfig(2.0), "blue": TeamConfig()},
        queue=QueueConfig(
            7,
            timeout_s=90.0,
            fairness="tokens",
            keep_alive_s=0.25,
            min_share=0.1,
            tenant_weights={"ana": 2.0},
        ),
        request_timeout_s=120.0,
        limits=Limits(body_bytes=1000, drain_s=5.0),
        while_loading="reject",
        health_check=HealthConfig(2.0, 5),
        models=(
            ModelConfig(
                file.model,
                "qwen",
                aliases=("q", "7"),
                dtype="bfloat16",
                slots=8,
                max_batch=4,
                ttl_s=300.0,
                memory_mb=900,
                preload=True,
                kv_cache=KvCacheConfig(max_entries=100, cleanup_interval_s=0.5),
            ),
            CommandConfig(
                "other",
                cmd=("server", "--port", "${PORT}", "a b"),
                proxy="http://localhost:${PORT}",
                port=5800,
                ttl_s=300.0,
                concurrency_limit=2,
                timeouts=TimeoutsConfig(connect_s=1.0, between_bytes_s=20.0),
            ),
        ),
        nodes=(NodeConfig("big", "http://10.0.0.2:8000", "sk-3", 4, ("qwen", "large")),),
        swap=GroupSwap(),
    )
    assert expected == config(EVERYTHING)


def test_settings_that_are_left_out_have_their_defaults(config):
    assert Config(models=()) == config("port: 8000")


@pytest.mark.parametrize(
    ("text", "expected_s"),
    [
        ("60", 60),
        ("1.5", 1.5),
        ("60s", 60),
        ("250ms", 0.25),
        ("5m", 300),
        ("1h30m", 5400),
        ('"2"', 2),
        ("1d", 86400),
    ],
)
def test_times_are_read_with_and_without_units(config, text, expected_s):
    assert expected_s == config(f"requestTimeout: {text}").request_timeout_s


@pytest.mark.parametrize("text", ["5 m", "m5", "-1s", "5x", "1.5.2s", "5m3", "[5]", "0", "-3", "true"])
def test_invalid_time_is_refused(file, text):
    (fault,) = file.faults(f"requestTimeout: {text}")
    assert fault.startswith("fairlead.yaml:1: requestTimeout: must be a ")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("models:\n  qwen:\n    path: small\n    slots: 0", "4: models.qwen.slots: must be at least 1"),
        (
            "models:\n  a.b: {path: small,\n    slots: x}",
            "3: models.a.b.slots: must be a whole number, not text",
        ),
        (
            "models: {q: {path: small, slots: 4, maxBatch: 5}}",
            "1: models.q.maxBatch: must be at most slots, which is 4",
        ),
        ("models: {q: {path: nowhere}}", "1: models.q.path: there is no folder "),
        ("models: {q: {path: ''}}", "1: models.q.path: must be a path, not text"),
        ("models: {q: {path: small, device: gpu}}", "1: models.q.device: must be auto, cpu, cuda or cuda:N"),
        ("models: {q: {path: small, dtype: int3}}", "1: models.q.dtype: must be one of auto, float32, "),
        ("models: {q: {path: small, slots: 1.5}}", "1: models.q.slots: must be a whole number, not a number"),
        ("models: {q: {path: small, cmd: x}}", "1: models.q: must have path, .*; not both"),
        ("models: {q: {slots: 1}}", "1: models.q: must have path, a folder with a model, or cmd"),
        ("models: {q: {path: small, proxy: 'http://h'}}", "1: models.q.proxy: is for models with cmd"),
        ("models: {q: {cmd: 'x ${PORT}', slots: 1}}", "1: models.q.slots: is for models with path"),
        (
            "models: {q: {cmd: 'x ${PORT} \"'}}",
            "1: models.q.cmd: cannot be split into words: no closing quotation",
        ),
        ("models: {q: {cmd: '# ${PORT}', proxy: 'http://h'}}", "1: models.q.cmd: must not be empty"),
        ("models: {q: {cmd: x, proxy: 'ftp://h'}}", "1: models.q.proxy: must be a URL"),
        ("models: {q: {cmd: x, proxy: 'http://h:x'}}", "1: models.q.proxy: must be a URL"),
        ("models: {q: {cmd: 'x ${PORT}', env: [HOME]}}", r"1: models.q.env: must be NAME=value, not 'HOME'"),
        (
            "models: {q: {cmd: 'x ${PORT}', checkEndpoint: health}}",
            "1: models.q.checkEndpoint: must be a path",
        ),
        ("models: [q]", "1: models: must be a mapping from names"),
        ("models: {q: small}", "1: models.q: must be a mapping with path or cmd"),
        ("models: {'': {path: small}}", "1: models.: the name of a model must not be empty"),
        (
            "models: {a: {path: small, aliases: [b]}, b: {path: small}}",
            r"1: models.a.aliases\[0\]: 'b' is the name of a",
        ),
        (
            "models: {a: {path: small, aliases: [x]}, b: {path: small, aliases: [x]}}",
            r"1: models.b.aliases\[0\]: 'x' is an alias of a already",
        ),
        ("queue:\n  capacity: -1", "2: queue.capacity: must be at least 0"),
        ("queue: {capcity: 1}", "1: queue.capcity: is not a setting; did you mean capacity"),
        ("queue: 5", "1: queue: must be a mapping, not a whole number"),
        ("queue: {minShare: 1.5}", "1: queue.minShare: must be at least 0 and at most 1"),
        ("queue: {tenantWeights: {ana: 0}}", "1: queue.tenantWeights.ana: must be more than 0"),
        ("queue: {tenantWeights: {ana: x}}", "1: queue.tenantWeights.ana: must be a number, not text"),
        ("queue: {classes: [a, a]}", "1: queue.classes: must be one name or more, all different"),
        ("queue: {fairness: lottery}", "1: queue.fairness: must be one of roundRobin, tokens"),
        ("limits: {stall: 0}", "1: limits.stall: must be a time above 0"),
        ("port: 65536", "1: port: must be at least 0 and at most 65535"),
        ("port: eighty", "1: port: must be a whole number, not text"),
        ("host: ' '", "1: host: must not be empty"),
        ("host: [a]", "1: host: must be text, not a list"),
        ("logJson: 1", "1: logJson: must be true or false, not a whole number"),
        ("apiKeys:\n  - a\n  - a", r"3: apiKeys\[1\].key: is given twice"),
        ("apiKeys: ['']", r"1: apiKeys\[0\].key: is missing or empty"),
        ("apiKeys: [{user: ana}]", r"1: apiKeys\[0\].key: is missing"),
        ("apiKeys: [{key: a, priority: urgent}]", r"1: apiKeys\[0\].priority: must be one of high"),
        (
            "apiKeys: [{key: a, limits: {concurrent: 0}}]",
            r"1: apiKeys\[0\].limits.concurrent: must be at least 1",
        ),
        ("nodes: [{id: a, url: nowhere}]", r"1: nodes\[0\].url: must be a URL"),
        ("nodes: [{id: a}]", r"1: nodes\[0\].url: is missing"),
        ("nodes: [{id: a, url: 'http://a', models: []}]", r"1: nodes\[0\].models: must be one name or more"),
        ("nodes: [{id: a, url: 'http://a'}, {id: a, url: 'http://b'}]", r"1: nodes\[1\].id: is given twice"),
        ("lru: {maxLoaded: 0}", "1: lru.maxLoaded: must be at least 1"),
        ("modles: {}", "1: modles: is not a setting; did you mean models"),
        ("whileLoding: wait", "1: whileLoding: is not a setting; did you mean whileLoading"),
    ],
)
def test_invalid_value_is_refused_with_line_and_key(file, text, expected):
    faults = file.faults(text)
    assert [fault for fault in faults if re.match(f"fairlead.yaml:{expected}", fault)], faults


def test_all_faults_are_reported_at_once_in_the_order_of_lines(file):
    text = """\
        queue:
          capacity: -1
          timeot: 5
        models:
          a: {path: small, slots: 0, threads: x}
          b: {cmd: "x ${PORT}", nonsense: 1}
        port: -1
        """
    assert file.faults(text) == [
        "fairlead.yaml:2: queue.capacity: must be at least 0",
        "fairlead.yaml:3: queue.timeot: is not a setting; did you mean timeout?",
        "fairlead.yaml:5: models.a.slots: must be at least 1",
        "fairlead.yaml:5: models.a.threads: must be a whole number, not text",
        "fairlead.yaml:6: models.b.nonsense: is not a setting",
        "fairlead.yaml:7: port: must be at least 0 and at most 65535",
    ]


def test_at_most_a_hundred_faults_are_reported(file):
    faults = file.faults("".join(f"x{number}: 1\n" for number in range(103)))
    assert len(faults) == 101
    assert faults[-1] == "fairlead.yaml: and 3 more"


def test_fault_is_one_escaped_line_of_bounded_length(file):
    (fault,) = file.faults('models: {m: {path: "a\\nb\\e[31m"}}')
    assert fault.endswith(r"a\nb\x1b[31m")
    (fault,) = file.faults(f"{'x' * 1000}: 1")
    assert len(fault) + len(f"{file.path.parent}/") == 501


def test_model_path_is_relative_to_the_folder_of_the_file(file, config, monkeypatch, tmp_path_factory):
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    (model,) = config("models: {m: {path: ./small/../small}}").models
    assert file.model == model.path


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("models: {m: {path: small}}", KeepSwap()),
        ("models: {m: {cmd: 'x ${PORT}'}}", GroupSwap()),
        ("groups: {g: {members: [m], swap: no}}", GroupSwap({"g": GroupConfig(("m",), swap=False)})),
        (
            "matrix: {sets: {s: a | m}, vars: {a: m}, evict_costs: {m: 2}}",
            MatrixSwap({"s": "a | m"}, {"a": "m"}, {"m": 2}),
        ),
        ("lru: {maxLoaded: 2, memoryMb: 100}", LruSwap(2, 100)),
        ("routing: {router: {use: keep}}", KeepSwap()),
        ("routing: {router: {use: group}}", GroupSwap()),
        ("routing: {router: {use: lru, settings: {lru: {maxLoaded: 2}, groups: {g: {}}}}}", LruSwap(2)),
        (
            "routing: {router: {settings: {groups: {g: {members: [m]}}}}}",
            GroupSwap({"g": GroupConfig(("m",))}),
        ),
    ],
)
def test_swap_policy_is_read_from_the_file(config, text, expected):
    models = "" if "models" in text else "models: {m: {path: small}}\n"
    assert expected == config(models + text).swap


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "lru: {}\ngroups: {g: {members: [m]}}",
            "only one eviction policy can be in use; groups selects another",
        ),
        ("routing: {router: {use: matrix}}", "routing.router.settings.matrix is missing"),
        ("groups: {g: {members: [m]}, h: {members: [m]}}", r"groups.h.members[0]: m is in a group already"),
        ("matrix: {sets: {}}", "matrix.sets: must be one or more"),
        ("matrix: {sets: {s: m & x}}", "matrix.sets.s: there is no model x"),
        ("matrix: {sets: {s: (m}}", "matrix.sets.s: a parenthesis is not closed"),
        ("matrix: {sets: {s: +t}}", "matrix.sets.s: there is no set 't'"),
        ("matrix: {sets: {s: m}, vars: {a: x}}", "matrix.vars.a: there is no model x"),
        (
            "matrix: {sets: {s: m}, evict_costs: {x: 1}}",
            "matrix.evict_costs.x: is neither one of vars nor a model",
        ),
        ("matrix: {sets: {s: m}, evict_costs: {m: 0}}", "matrix.evict_costs.m: must be at least 1"),
    ],
)
def test_two_swap_policies_or_unknown_models_are_refused(file, text, expected):
    faults = file.faults("models: {m: {path: small}}\n" + text)
    assert [fault for fault in faults if expected in fault], faults


def test_hub_name_is_accepted_but_a_missing_folder_is_refused(file):
    (model,) = file.reading("models: {q: {path: organization/some-model@v1}}").config.models
    assert str(model.path) == "organization/some-model@v1"
    for missing in ("./some-model", "small/some-model", "a/b/c", "/organization/some-model"):
        (fault,) = file.faults(f"models: {{q: {{path: {missing}}}}}")
        assert "models.q.path: there is no folder" in fault
