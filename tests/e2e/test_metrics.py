"""`/metrics` and the log of a real server, after a workload that is known."""

import json
import time

import pytest
from prometheus_client.parser import text_string_to_metric_families

from e2e.real_server import real_server

# Longer than a block of the cache, so that the second request finds something.
QUESTION = "Count from 1 to 9, then down to 1 again, and do it all once more. What is Fairlead?"
CHAT = {"model": "fairlead-demo", "messages": [{"role": "user", "content": QUESTION}]}
TOKENS = 12
STREAMED, WHOLE = 3, 2
CHOICES = 64  # of the answer that is not waited for: two at a time, so that it is not over before we are gone
HISTOGRAMS = (
    *("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds"),
    *("request_prefill_time_seconds", "request_decode_time_seconds"),
)


@pytest.fixture(scope="module")
def worked():
    """A server of its own, what it said of its usage in all, its metrics, and how long it worked."""
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
            next(s.iter_lines())  # and away
        assert 400 == server.http.post("/v1/chat/completions", json={"messages": 7}).status_code
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


def test_tokens_and_requests_are_those_that_the_clients_were_told_of(worked):
    text, usages, _, _, took_s = worked
    found = samples(text)

    def value(name: str, **labels: str) -> float:
        return found[
            f"vllm:{name}", frozenset({"model_name": "fairlead-demo", "engine": "0", **labels}.items())
        ]

    assert STREAMED + WHOLE == value("request_success_total", finished_reason="length")
    assert 1 == value("request_success_total", finished_reason="abort")
    told = sum(usage["completion_tokens"] for usage in usages)
    assert (STREAMED + WHOLE) * TOKENS == told
    assert told < value("generation_tokens_total") <= told + 900 * CHOICES  # with those of who left
    prompts = sum(usage["prompt_tokens"] for usage in usages)
    assert prompts * 6 / 5 == value("prompt_tokens_total")
    assert (0, 0) == (value("num_requests_running"), value("num_requests_waiting"))
    for name in HISTOGRAMS:
        assert value(f"{name}_count") in (STREAMED + WHOLE, STREAMED + WHOLE + 1), name
        assert 0 <= value(f"{name}_sum") < took_s, name
    assert (STREAMED + WHOLE) * (TOKENS - 1) == value("inter_token_latency_seconds_count")
    assert 0 < value("inter_token_latency_seconds_sum") < took_s


def test_what_the_engine_counts_is_what_running_shows(worked):
    text, _, running, _, _ = worked
    found = samples(text)
    labels = frozenset({("model_name", "fairlead-demo"), ("engine", "0")})
    assert running["cache_usage"] == found["vllm:kv_cache_usage_perc", labels]
    assert running["preemptions"] == found["vllm:num_preemptions_total", labels]
    queries = found["vllm:prefix_cache_queries_total", labels]
    hits = found["vllm:prefix_cache_hits_total", labels]
    assert running["prefix_hit_rate"] == pytest.approx(hits / queries, abs=1e-4)
    assert 0 < hits < queries  # it was the same prompt again and again
    assert 1 == found["fairlead_model_loads_total", frozenset({("model", "fairlead-demo")})]


def test_each_request_is_one_line_of_the_log_that_tells_no_name(worked):
    *_, log, _ = worked
    lines = [json.loads(line) for line in log if line.startswith("{")]
    requests = [line for line in lines if line["event"] == "request"]
    assert STREAMED + WHOLE + 1 == len(requests)
    assert {"success": STREAMED + WHOLE, "client_left": 1} == {
        outcome: sum(line["outcome"] == outcome for line in requests)
        for outcome in ("success", "client_left")
    }
    (first,) = [line for line in requests if line["request_id"] == "w0"]
    assert (TOKENS, "engine:fairlead-demo") == (first["tokens"], first["node"])
    assert 0 <= first["waited_s"] <= first["first_token_s"] <= first["took_s"]
    refused = [line for line in lines if line["event"] == "request refused"]
    assert ["invalid_request"] == [line["outcome"] for line in refused]
    assert not [line for line in requests if "user" in line["tenant"] or "127.0.0.1" in line["tenant"]]
    assert 1 == sum(line["event"] == "model loaded" for line in lines)
