"""Impossible and contradictory settings are refused when the configuration is created."""

from pathlib import Path

import msgspec
import pytest

from fairlead.base.config import (
    ApiKey,
    CommandConfig,
    Config,
    ConfigError,
    FiltersConfig,
    FlowControlConfig,
    GroupConfig,
    GroupSwap,
    HealthConfig,
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

MODELS = (ModelConfig(path=Path(), name="m"),)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"queue": QueueConfig(classes=())}, "queue.classes: must be one name or more"),
        ({"queue": QueueConfig(classes=("a", "a"))}, "queue.classes: .* all different"),
        (
            {"api_keys": (ApiKey("a"), ApiKey("b", priority="urgent"))},
            r"apiKeys\[1\].priority: must be one of high, normal, low",
        ),
        (
            {"api_keys": (ApiKey("a", limits=KeyLimits(requests_per_minute=0)),)},
            r"apiKeys\[0\].limits.requestsPerMinute: must be at least 1",
        ),
        (
            {"api_keys": (ApiKey("a", limits=KeyLimits(concurrent=-1)),)},
            r"apiKeys\[0\].limits.concurrent: must be at least 1",
        ),
    ],
)
def test_impossible_setting_is_refused_by_its_name(settings, message):
    with pytest.raises(ConfigError, match=message):
        Config(models=MODELS, **settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"slots": 0}, "slots: must be at least 1"),
        ({"max_batch": -1}, "maxBatch: must be at least 1"),
        ({"slots": 4, "max_batch": 5}, "maxBatch: must be at most slots, which is 4"),
        ({"max_batched_tokens": 0}, "maxBatchedTokens: must be at least 1"),
        ({"max_input_tokens": 0}, "maxInputTokens: must be at least 1"),
        ({"max_output_tokens": 0}, "maxOutputTokens: must be at least 1"),
        ({"max_model_len": 1}, "maxModelLen: must be at least 2"),
        (
            {"max_model_len": 9, "max_input_tokens": 9},
            "maxInputTokens: .* maxModelLen, which is 9",
        ),
        ({"max_model_len": 9, "max_output_tokens": 10}, "maxOutputTokens: must be less than maxModelLen"),
        ({"threads": 0}, "threads: must be at least 1"),
        ({"watchdog_s": 0.0}, "watchdog: must be a time above 0"),
        ({"watchdog_s": float("inf")}, "watchdog: must be a time above 0"),
        ({"kv_cache": KvCacheConfig(max_entries=0)}, "kvCache.maxEntries: must be at least 1"),
        ({"kv_cache": KvCacheConfig(max_memory_mb=0)}, "kvCache.maxMemoryMb: must be at least 1"),
        (
            {"kv_cache": KvCacheConfig(eviction_threshold=0.0)},
            "kvCache.evictionThreshold: .* more than 0",
        ),
        ({"kv_cache": KvCacheConfig(eviction_threshold=1.1)}, "kvCache.evictionThreshold: .* at most 1"),
        ({"kv_cache": KvCacheConfig(eviction_threshold=float("nan"))}, "kvCache.evictionThreshold: "),
        (
            {"kv_cache": KvCacheConfig(cleanup_interval_s=-1.0)},
            "kvCache.cleanupInterval: .* above 0",
        ),
    ],
)
def test_impossible_limit_of_a_model_is_refused(settings, message):
    with pytest.raises(ConfigError, match=f"^models.qwen.{message}"):
        ModelConfig(path=Path(), name="qwen", **settings)


def test_largest_possible_limits_are_accepted():
    model = ModelConfig(
        path=Path(),
        name="m",
        slots=4,
        max_batch=4,
        max_model_len=2,
        max_input_tokens=1,
        max_output_tokens=1,
        kv_cache=KvCacheConfig(eviction_threshold=1.0),
    )
    assert model.max_batch == 4


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, float("nan"), float("inf")])
def test_invalid_request_timeout_is_refused(timeout_s):
    with pytest.raises(ConfigError, match=r"^requestTimeout: must be a time above 0"):
        Config(models=MODELS, request_timeout_s=timeout_s)


def test_priorities_are_checked_against_the_configured_classes():
    queue = QueueConfig(classes=("paid", "free"))
    assert Config(models=MODELS, queue=queue, api_keys=(ApiKey("a", priority="free"),)).queue is queue


@pytest.mark.parametrize(
    ("classes", "expected"),
    [(("one",), "one"), (("high", "low"), "low"), (("high", "normal", "low"), "normal")],
)
def test_default_class_is_the_middle_one(classes, expected):
    assert expected == classes[QueueConfig(classes=classes).default_class]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cmd": ()}, "cmd: must not be empty"),
        ({"proxy": "localhost:80"}, "proxy: must be a URL"),
        ({"check_endpoint": "health"}, "checkEndpoint: must be a path"),
        ({"health_check_timeout_s": 0.0}, "healthCheckTimeout: must be a time above 0"),
        ({"concurrency_limit": 0}, "concurrencyLimit: must be at least 1"),
        ({"ttl_s": -1.0}, "ttl: must be a time, or 0"),
        ({"ttl_s": float("nan")}, "ttl: must be a time, or 0"),
        ({"memory_mb": 0}, "memoryMb: must be at least 1"),
        ({"env": {"A=B": "c"}}, "env: must be names and values"),
        ({"dialects": ()}, "dialects: must be one or more"),
        ({"timeouts": TimeoutsConfig(first_byte_s=-1.0)}, "timeouts.responseHeader: must be a time, or 0"),
    ],
)
def test_impossible_setting_of_a_command_is_refused(settings, message):
    with pytest.raises(ConfigError, match=f"^models.other.{message}"):
        CommandConfig(**{"name": "other", "cmd": ("serve",), **settings})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"url": "nowhere"}, "url: must be a URL"),
        ({"url": "http://[::1"}, "url: must be a URL"),
        ({"seats": 0}, "seats: must be at least 1"),
        ({"models": ()}, "models: must be one name or more"),
        ({"dialects": ()}, "dialects: must be one or more"),
    ],
)
def test_impossible_setting_of_a_node_is_refused(settings, message):
    with pytest.raises(ConfigError, match=f"^nodes.big.{message}"):
        NodeConfig(**{"id": "big", "url": "http://10.0.0.2:8000", **settings})


RED = {"red": TeamConfig()}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"nodes": (NodeConfig("a", "http://a"),) * 2}, r"nodes\[1\].id: is given twice"),
        ({"api_keys": (ApiKey("k"),) * 2}, r"apiKeys\[1\].key: is given twice"),
        ({"models": MODELS * 2}, "models.m: is given twice"),
        ({"health_check": HealthConfig(failures=0)}, "healthCheck.failures: must be at least 1"),
        ({"limits": Limits(connections=0)}, "limits.connections: must be at least 1"),
        ({"queue": QueueConfig(tenant_weights={"ana": 0.0})}, "queue.tenantWeights.ana: must be more than 0"),
        ({"teams": {"red": TeamConfig(weight=0)}}, "teams.red.weight: must be more than 0"),
        ({"teams": {"red\0": TeamConfig()}}, "teams.red\0: must be a name of printable characters"),
        (
            {"api_keys": (ApiKey("k", team="green"),), "teams": RED},
            r"apiKeys\[0\].team: must be one of the teams \(red\)",
        ),
        (
            {"api_keys": (ApiKey("k", user="a", team="red"), ApiKey("l", user="a")), "teams": RED},
            r"apiKeys\[1\].team: must be the same for all keys of the user a",
        ),
        ({"swap": LruSwap(max_loaded=0)}, "swap.maxLoaded: must be at least 1"),
        ({"swap": MatrixSwap({})}, "swap.sets: must be one or more"),
        ({"swap": GroupSwap({"g": GroupConfig(("a", "a"))})}, r"swap.groups.g.members\[1\]: a is in a group"),
        ({"port": 70000}, "port: must be at least 0 and at most 65535"),
    ],
)
def test_contradictory_settings_are_refused(settings, message):
    with pytest.raises(ConfigError, match=f"^{message}"):
        Config(**{"models": MODELS, **settings})


def test_each_fault_is_reported_on_its_own_line():
    with pytest.raises(ConfigError) as refused:
        Config(models=(), port=-1, host="", queue=QueueConfig(capacity=-1))
    assert 3 == len(str(refused.value).split("\n")) == len(refused.value.faults)


def test_filters_have_the_names_of_llama_swap():
    assert (
        msgspec.json.encode(FiltersConfig(set_params_by_id={"a": {"b": 1}}))
        .decode()
        .replace('"stripParams":[],"setParams":{},', "")
        == '{"setParamsByID":{"a":{"b":1}}}'
    )


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, False),
        ({"host": "::1"}, False),
        ({"host": "0.0.0.0"}, True),
        ({"trusted_proxies": ("127.0.0.1",)}, True),
        ({"allowed_hosts": ("chat.example",)}, True),  # a proxy forwards requests
        ({"api_keys": (ApiKey("a"),)}, False),
        ({"host": "0.0.0.0", "api_keys": (ApiKey("a"),)}, False),
        ({"api_keys": (ApiKey("a"), ApiKey("b"))}, True),
        ({"api_keys": (ApiKey("a", user="ana"), ApiKey("b", user="ana"))}, False),
        ({"api_keys": (ApiKey("a", user="ana"), ApiKey("b"))}, True),
        ({"api_keys": (ApiKey("a", trusted=True),)}, True),
        ({"flow_control": FlowControlConfig(trusted_addresses=("10.0.0.1",))}, True),
    ],
)
def test_settings_tell_whether_there_are_several_tenants(settings, expected):
    assert Config(models=MODELS, **settings).has_several_tenants is expected


def test_queue_holds_100_jobs_for_60_s_by_default():
    assert (QueueConfig().capacity, QueueConfig().timeout_s) == (100, 60.0)


@pytest.mark.parametrize("share", [0, -0.5, float("inf"), float("nan")])
def test_share_of_a_gpu_must_be_above_zero(share):
    with pytest.raises(ConfigError, match="gpuMemory: must be more than 0"):
        ModelConfig(path=Path(), name="m", gpu_memory=share)


def test_share_of_a_gpu_is_refused_for_a_model_on_the_cpu():
    with pytest.raises(ConfigError, match="gpuMemory: needs a GPU, but device is cpu"):
        ModelConfig(path=Path(), name="m", gpu_memory=0.5, device="cpu")
