"""`/metrics` as Prometheus parses it: every name, with the values of the server's own counters."""

import math

import pytest
from prometheus_client import generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from fairlead.base.config import ApiKey, Config
from fairlead.generation.metrics.metrics import CollectedMetrics, ServerMetrics
from fairlead.generation.metrics.scope import Scope
from fairlead.generation.metrics.tenants import TenantNames
from fairlead.router.fleet.status import LifetimeCounts, NodeStatus, RemoteDetails
from generation.metrics.sources import FakeSources, engine, engine_status, timeline

VLLM = (
    *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"),
    *("prefix_cache_queries_total", "prefix_cache_hits_total", "num_preemptions_total"),
    *("spec_decode_num_draft_tokens_total", "spec_decode_num_accepted_tokens_total"),
    *("prompt_tokens_total", "generation_tokens_total", "request_success_total"),
)
VLLM_HISTOGRAMS = (
    *("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds"),
    *("request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds"),
)


def pulled(sources: FakeSources, scope: Scope = Scope(), **config) -> CollectedMetrics:  # noqa: B008 — it is frozen
    tenants = TenantNames(Config(models=(), **config))
    overview = sources.overview()
    return ServerMetrics(overview, tenants=tenants).pull(scope)


def samples(sources: FakeSources, **config) -> dict:
    """Return the value of every sample by its name and labels."""
    text = generate_latest(pulled(sources, **config)).decode()
    families = list(text_string_to_metric_families(text))
    assert len({family.name for family in families}) == len(families)
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


def value(found: dict, name: str, **labels: str) -> float:
    return found[name, frozenset(labels.items())]


@pytest.fixture
def sources() -> FakeSources:
    """Return sources after four jobs of which one failed, with one running and one queued."""
    sources = FakeSources(refused={"invalid_api_key": 2})
    sources.fleet.statuses = [
        engine(
            busy=1,
            counts=LifetimeCounts(loads=2, stuck=1),
            engine=engine_status(
                cache_usage=0.25,
                blocks_total=100,
                preemptions=3,
                prefix_queries=40,
                prefix_hits=10,
                draft_tokens=9,
                accepted_tokens=7,
            ),
        ),
        engine("far", kind="remote"),
    ]
    sources.fleet.node_statuses = [
        NodeStatus(
            id="n",
            kind="remote",
            models=("far",),
            seats=4,
            busy=1,
            state="down",
            downs=2,
            remote=RemoteDetails(url="http://n"),
        )
    ]
    for outcome in ("success", "success", "client_left", "node_failed"):
        sources.gateway.metrics.add(timeline(outcome=outcome))
    sources.gateway.under_way = [
        timeline(ended_s=None, tokens=2),
        timeline(granted_s=None, first_delta_s=None, ended_s=None, tokens=0),
    ]
    return sources


async def test_vllm_metrics_have_the_values_of_the_jobs(sources):
    found = samples(sources)
    of_m = {"model_name": "m", "engine": "0"}
    values = {name: value(found, f"vllm:{name}", **of_m) for name in VLLM[:-1]}
    assert values == {
        "num_requests_running": 1,
        "num_requests_waiting": 1,
        "kv_cache_usage_perc": 0.25,
        "prefix_cache_queries_total": 40,
        "prefix_cache_hits_total": 10,
        "num_preemptions_total": 3,
        "spec_decode_num_draft_tokens_total": 9,
        "spec_decode_num_accepted_tokens_total": 7,
        "prompt_tokens_total": 15,
        "generation_tokens_total": 22,
    }
    ends = {
        reason: value(found, "vllm:request_success_total", **of_m, finished_reason=reason)
        for reason in ("stop", "length", "abort")
    }
    assert ends == {"stop": 2, "length": 0, "abort": 1}


async def test_endpoint_picker_finds_every_name_before_the_first_job():
    sources = FakeSources()
    status = engine_status(blocks_total=100, block_size=16, cache_dtype="bfloat16", keeps_prefixes=True)
    sources.fleet.statuses = [engine(engine=status)]
    found = samples(sources)
    of_m = {"model_name": "m", "engine": "0"}
    current = ("num_requests_waiting", "num_requests_running", "kv_cache_usage_perc")
    assert [value(found, f"vllm:{name}", **of_m) for name in current] == [0, 0, 0]
    cache = {"block_size": "16", "num_gpu_blocks": "100"}
    others = {"cache_dtype": "bfloat16", "enable_prefix_caching": "True"}
    assert value(found, "vllm:cache_config_info", **of_m, **cache, **others) == 1
    adapters = {"max_lora": "0", "running_lora_adapters": "", "waiting_lora_adapters": ""}
    assert value(found, "vllm:lora_requests_info", **adapters) > 0


async def test_vllm_histograms_have_consistent_counts_and_sums(sources):
    found = samples(sources)
    of_m = {"model_name": "m", "engine": "0"}
    for name in VLLM_HISTOGRAMS:
        count = value(found, f"vllm:{name}_count", **of_m)
        assert count == value(found, f"vllm:{name}_bucket", **of_m, le="+Inf")
    assert value(found, "vllm:time_to_first_token_seconds_sum", **of_m) == 4 * 3.0
    assert value(found, "vllm:e2e_request_latency_seconds_sum", **of_m) == 2 * 7.0
    assert value(found, "vllm:inter_token_latency_seconds_count", **of_m) == 2 * 4
    assert value(found, "vllm:inter_token_latency_seconds_bucket", **of_m, le="0.75") == 0
    assert value(found, "vllm:inter_token_latency_seconds_bucket", **of_m, le="1.0") == 8


async def test_fairlead_metrics_have_outcomes_refusals_states_and_failures(sources):
    found = samples(sources)
    outcomes = {
        outcome: value(found, "fairlead_jobs_total", model="m", outcome=outcome)
        for outcome in ("success", "client_left", "node_failed")
    }
    assert outcomes == {"success": 2, "client_left": 1, "node_failed": 1}
    assert value(found, "fairlead_requests_refused_total", code="invalid_api_key") == 2
    assert value(found, "fairlead_queue_waiting_jobs") == 2
    states = {dict(labels)["state"]: on for (name, labels), on in found.items() if name.endswith("l_state")}
    assert {state for state, on in states.items() if on} == {"ready"}
    assert len(states) == 6
    assert (
        value(found, "fairlead_node_up", node="n", kind="remote"),
        value(found, "fairlead_node_downs_total", node="n", kind="remote"),
    ) == (0, 2)
    assert (
        value(found, "fairlead_model_loads_total", model="m"),
        value(found, "fairlead_model_stuck_total", model="m"),
    ) == (2, 1)


async def test_dropped_log_lines_are_counted(sources, monkeypatch):
    assert value(samples(sources), "fairlead_log_lines_dropped_total") == 0
    monkeypatch.setattr("fairlead.generation.metrics.metrics.lines_dropped", lambda: 7)
    assert value(samples(sources), "fairlead_log_lines_dropped_total") == 7


async def test_unknown_value_of_a_model_has_no_sample(sources):
    found = samples(sources)
    assert ("fairlead_model_cache_usage", frozenset({("model", "far")})) not in found
    assert value(found, "fairlead_model_seats", model="far") == 8


async def test_five_thousand_tenants_make_a_thousand_and_one_labels():
    sources = FakeSources()
    for number in range(5000):
        sources.gateway.metrics.add(timeline(f"made up {number}"))
    found = samples(sources)
    tenants = {
        dict(labels)["tenant"]: n
        for (name, labels), n in found.items()
        if name == "fairlead_tenant_jobs_total"
    }
    assert (len(tenants), tenants["other"], sum(tenants.values())) == (1001, 4000, 5000)
    assert not any("made up" in tenant for tenant in tenants)


async def test_five_thousand_remote_models_make_a_thousand_labels():
    sources = FakeSources()
    sources.fleet.statuses = [engine(), *(engine(f"far {number}", kind="remote") for number in range(5000))]
    names = {dict(labels).get("model") for _, labels in samples(sources)} - {None}
    assert (len(names), "m" in names) == (1000, True)


async def test_tenant_names_are_shown_in_full_if_configured():
    sources = FakeSources()
    sources.gateway.metrics.add(timeline('ana "\\\n}'))
    found = samples(sources, tenant_names="plain", api_keys=(ApiKey("k"),))
    assert value(found, "fairlead_tenant_jobs_total", tenant='ana "\\\\n}') == 1


async def test_special_characters_in_names_are_escaped(sources):
    sources.fleet.statuses = [engine('m"\n} 1\nfake_metric 7\\')]
    sources.gateway.metrics.add(timeline(model='m"\n} 1\nfake_metric 7\\'))
    found = samples(sources)
    assert not [name for name, _ in found if name.startswith("fake")]
    assert value(found, "fairlead_model_seats", model='m"\n} 1\nfake_metric 7\\') == 8


async def test_metrics_are_available_in_the_openmetrics_format(sources):
    text = generate_openmetrics(pulled(sources)).decode()
    names = {family.name for family in parse_openmetrics(text)}
    assert {"fairlead_jobs", "vllm:prompt_tokens", "vllm:e2e_request_latency_seconds"} <= names


async def test_no_value_is_negative_or_not_a_number(sources):
    assert not [key for key, number in samples(sources).items() if number < 0 or math.isnan(number)]


async def test_pulled_metrics_do_not_change_while_they_are_formatted(sources):
    before = pulled(sources)
    sources.gateway.metrics.add(timeline("somebody else", outcome="success"))
    text = generate_latest(before).decode()
    ended = [
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "fairlead_tenant_jobs_total"
    ]
    assert ended == [4]


@pytest.mark.parametrize("tenant", [None, "ana", "nobody"])
async def test_scope_of_one_tenant_has_all_models_and_no_other_tenant(sources, tenant):
    for name in ("ana", "ana/bob", "anaconda", "carl"):
        sources.gateway.metrics.add(timeline(tenant=name))
    text = generate_latest(pulled(sources, Scope(tenant=tenant), tenant_names="plain")).decode()
    families = list(text_string_to_metric_families(text))
    labels = [sample.labels for family in families for sample in family.samples]
    shown = {label["tenant"] for label in labels if "tenant" in label}
    visible = {"ana": {"ana", "ana/bob"}, "nobody": set()}
    if tenant is None:
        assert {"ana", "ana/bob", "anaconda", "carl"} <= shown
    else:
        assert shown == visible[tenant]
    assert {"m", "far"} <= {label.get("model") for label in labels}
