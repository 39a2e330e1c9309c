"""Our counts under vLLM's metric names, so that dashboards for vLLM show them. `engine` is always 0 here.

The names and what each means: https://docs.vllm.ai/en/stable/usage/metrics/.
"""

from collections.abc import Iterator, Mapping

from prometheus_client.core import Metric

from fairlead.nodes.status import ModelStatus
from fairlead.tally import ModelTally
from fairlead.telemetry.families import Count, Gauge, Row, Spread, families, itself

LABELS = ("model_name", "engine")
ENGINE = "0"
# Dashboards sum over these, so they exist from the start.
FINISH_REASONS = ("stop", "length", "abort")


JOBS: tuple[Row[ModelTally], ...] = (
    Gauge("vllm:num_requests_running", "Jobs that hold a seat.", lambda t: t.running),
    Gauge("vllm:num_requests_waiting", "Jobs that wait for a seat.", lambda t: t.waiting),
    Count("vllm:prompt_tokens", "Prompt tokens processed.", lambda t: t.prompt_tokens),
    Count("vllm:generation_tokens", "Tokens generated.", lambda t: t.generated_tokens),
    Spread("vllm:time_to_first_token_seconds", "To the first token.", lambda t: t.durations.first_token),
    Spread("vllm:inter_token_latency_seconds", "Between tokens.", lambda t: t.durations.token_gap),
    Spread("vllm:e2e_request_latency_seconds", "From end to end.", lambda t: t.durations.whole),
    Spread("vllm:request_queue_time_seconds", "In the queue.", lambda t: t.durations.queue),
    Spread("vllm:request_prefill_time_seconds", "In prefill.", lambda t: t.durations.prefill),
    Spread("vllm:request_decode_time_seconds", "In decode.", lambda t: t.durations.decode),
)
ENGINES: tuple[Row[ModelStatus], ...] = (
    Gauge("vllm:kv_cache_usage_perc", "Part of the cache in use: 1 is all.", lambda m: m.cache_usage),
    Count("vllm:prefix_cache_queries", "Prompt tokens looked up in the cache.", lambda m: m.prefix_queries),
    Count("vllm:prefix_cache_hits", "Prompt tokens found in the cache.", lambda m: m.prefix_hits),
    Count("vllm:num_preemptions", "Sequences that stepped back.", lambda m: m.preemptions),
)
SUCCESS: Row[float] = Count("vllm:request_success", "Answers by the reason of their end.", itself)


def as_vllm(tallies: Mapping[str, ModelTally], models: tuple[ModelStatus, ...]) -> Iterator[Metric]:
    """Yield the families: of jobs from a model's first job on, of caches while the model is loaded."""
    jobs = [((name, ENGINE), tally) for name, tally in tallies.items()]
    yield from families(JOBS, LABELS, jobs)
    yield from families(ENGINES, LABELS, [((model.model, ENGINE), model) for model in models])
    ends = [
        ((*labels, reason), float(tally.finish_reasons.get(reason, 0)))
        for labels, tally in jobs
        for reason in FINISH_REASONS
    ]
    yield SUCCESS.family((*LABELS, "finished_reason"), ends)
