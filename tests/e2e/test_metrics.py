"""`/metrics` and the log of a real server, after a known workload."""

import json
import time

import pytest
from prometheus_client.parser import text_string_to_metric_families

from e2e.real_server import real_server

# Longer than a block of the cache, so that the second request has a prefix hit.
QUESTION = "Count from 1 to 9, then down to 1 again, and do it all once more. What is Fairlead?"
CHAT = {"model": "fairlead-demo", "messages": [{"role": "user", "content": QUESTION}]}
TOKENS = 12
STREAMED, WHOLE = 3, 2
CHOICES = 64  # of the abandoned answer; only two run at a time, so that it does not end before that
HISTOGRAMS = (
    *("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds"),
    *("request_prefill_time_seconds", "request_decode_time_seconds"),
)


@pytest.fixture(scope="module")
def worked():
    """Run the workload; yield metrics, usages, `/running`, the log and the duration in seconds."""
    with real_server("--log-json", "--slots", "2") as server:
        began = time.monotonic()
        usages = []
        body = {**CHAT, "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0}
        for number in range(WHOLE):
            reply = server.http.post(
                "/v1/chat/completions",
                json=body | {"user": f"user {number}"},
                headers={"X-Request-Id": f"w{number}"},
            )
            usages.append(reply.json()["usage"])
        for _ in range(STREAMED):
            options = {"stream": True, "stream_options": {"include_usage": True}}
            lines = server.http.post("/v1/chat/completions", json=body | options).text.split("\n\n")
            usages.append(json.loads(lines[-3].removeprefix("data: "))["usage"])
        endless = body | {"stream": True, "max_tokens": 900, "n": CHOICES}
        with server.http.stream("POST", "/v1/chat/completions", json=endless) as s:
            next(s.iter_lines())  # then disconnect
        assert server.http.post("/v1/chat/completions", json={"messages": 7}).status_code == 400
        server.wait_until_at_rest()
        text = server.http.get("/metrics").text
        took_s = time.monotonic() - began
        running = server.running()
        server.stop()
        yield text, usages, running, list(server.log), took_s


def samples(text: str) -> dict:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_token_and_request_counts_equal_those_sent_to_the_clients(worked):
    text, usages, _, _, took_s = worked
    found = samples(text)

    def value(name: str, **labels: str) -> float:
        return found[
            f"vllm:{name}", frozenset({"model_name": "fairlead-demo", "engine": "0", **labels}.items())
        ]

    assert value("request_success_total", finished_reason="length") == STREAMED + WHOLE
    assert value("request_success_total", finished_reason="abort") == 1
    generated = sum(usage["completion_tokens"] for usage in usages)
    assert generated == (STREAMED + WHOLE) * TOKENS
    assert (
        generated < value("generation_tokens_total") <= generated + 900 * CHOICES
    )  # plus those of the stream cut off
    prompts = sum(usage["prompt_tokens"] for usage in usages)
    assert prompts * 6 / 5 == value("prompt_tokens_total")
    assert (value("num_requests_running"), value("num_requests_waiting")) == (0, 0)
    for name in HISTOGRAMS:
        assert value(f"{name}_count") in (STREAMED + WHOLE, STREAMED + WHOLE + 1), name
        assert 0 <= value(f"{name}_sum") < took_s, name
    assert value("inter_token_latency_seconds_count") == (STREAMED + WHOLE) * (TOKENS - 1)
    assert 0 < value("inter_token_latency_seconds_sum") < took_s


def test_engine_metrics_equal_the_figures_of_running(worked):
    text, _, running, _, _ = worked
    found = samples(text)
    labels = frozenset({("model_name", "fairlead-demo"), ("engine", "0")})
    assert running["engine"]["cache_usage"] == found["vllm:kv_cache_usage_perc", labels]
    assert running["engine"]["preemptions"] == found["vllm:num_preemptions_total", labels]
    (cache,) = [dict(labels) for name, labels in found if name == "vllm:cache_config_info"]
    sizes = {"block_size": "16", "num_gpu_blocks": str(running["engine"]["blocks_total"])}
    assert cache.items() >= sizes.items()
    queries = found["vllm:prefix_cache_queries_total", labels]
    hits = found["vllm:prefix_cache_hits_total", labels]
    assert running["engine"]["prefix_hit_rate"] == pytest.approx(hits / queries, abs=1e-4)
    assert 0 < hits < queries  # all requests had the same prompt
    assert found["fairlead_model_loads_total", frozenset({("model", "fairlead-demo")})] == 1


def test_each_request_is_one_line_of_the_log_without_names(worked):
    *_, log, _ = worked
    lines = [json.loads(line) for line in log if line.startswith("{")]
    requests = [line for line in lines if line["event"] == "request"]
    assert len(requests) == STREAMED + WHOLE + 1
    assert {
        outcome: sum(line["outcome"] == outcome for line in requests)
        for outcome in ("success", "client_left")
    } == {"success": STREAMED + WHOLE, "client_left": 1}
    (first,) = [line for line in requests if line["request_id"] == "w0"]
    assert (first["tokens"], first["node"]) == (TOKENS, "engine:fairlead-demo")
    assert 0 <= first["waited_s"] <= first["first_token_s"] <= first["took_s"]
    refused = [line for line in lines if line["event"] == "request refused"]
    assert [line["outcome"] for line in refused] == ["invalid_request"]
    assert not [line for line in requests if "user" in line["tenant"] or "127.0.0.1" in line["tenant"]]
    assert sum(line["event"] == "model loaded" for line in lines) == 1
