"""The counts of jobs and caches under vLLM's metric names, for existing dashboards. `engine` is always 0.

Names and meanings: https://docs.vllm.ai/en/stable/usage/metrics/. The endpoint picker of llm-d and of the
Gateway API inference extension reads five of them: the running and waiting requests, the cache usage, and two
whose labels are the information. It takes the first sample of a name, and reports an error if there is none.
"""

from collections.abc import Iterator, Mapping

from prometheus_client.core import Metric

from fairlead.generation.metrics.families import Counter, Gauge, Histogram, Row, families, identity
from fairlead.generation.metrics.job_metrics import ModelCounts
from fairlead.nodes.status import EngineStatus
from fairlead.router.fleet.status import ModelStatus

LABELS = ("model_name", "engine")
ENGINE = "0"
# Dashboards sum over these, so each has a sample from the beginning.
FINISH_REASONS = ("stop", "length", "abort")


# Of every model, also of one without a job.
CURRENT: tuple[Row[ModelCounts | None], ...] = (
    Gauge("vllm:num_requests_running", "Jobs that hold a seat.", lambda t: t.running if t else 0),
    Gauge("vllm:num_requests_waiting", "Jobs that wait for a seat.", lambda t: t.waiting if t else 0),
)
JOBS: tuple[Row[ModelCounts], ...] = (
    Counter("vllm:prompt_tokens", "Prompt tokens processed.", lambda t: t.prompt_tokens),
    Counter("vllm:generation_tokens", "Tokens generated.", lambda t: t.generated_tokens),
    Histogram(
        "vllm:time_to_first_token_seconds", "Time to the first token.", lambda t: t.durations.first_token
    ),
    Histogram("vllm:inter_token_latency_seconds", "Time between tokens.", lambda t: t.durations.token_gap),
    Histogram("vllm:e2e_request_latency_seconds", "Whole request.", lambda t: t.durations.end_to_end),
    Histogram("vllm:request_queue_time_seconds", "Time in the queue.", lambda t: t.durations.queue),
    Histogram("vllm:request_prefill_time_seconds", "Time in prefill.", lambda t: t.durations.prefill),
    Histogram("vllm:request_decode_time_seconds", "Time in decode.", lambda t: t.durations.decode),
)
ENGINES: tuple[Row[EngineStatus], ...] = (
    Gauge("vllm:kv_cache_usage_perc", "Fraction of cache blocks in use, 0 to 1.", lambda m: m.cache_usage),
    Counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the cache.", lambda m: m.prefix_queries),
    Counter("vllm:prefix_cache_hits", "Prompt tokens found in the cache.", lambda m: m.prefix_hits),
    Counter("vllm:num_preemptions", "Sequences that were preempted.", lambda m: m.preemptions),
    Counter("vllm:spec_decode_num_draft_tokens", "Drafts that were tried.", lambda m: m.draft_tokens),
    Counter(
        "vllm:spec_decode_num_accepted_tokens",
        "Drafts that the model chose itself.",
        lambda m: m.accepted_tokens,
    ),
)
CACHE_LABELS = (*LABELS, "block_size", "num_gpu_blocks", "cache_dtype", "enable_prefix_caching")
CACHE: Row[float] = Gauge(
    "vllm:cache_config_info", "1, with the size and number of cache blocks, on a GPU or not.", identity
)
ADAPTER_LABELS = ("max_lora", "running_lora_adapters", "waiting_lora_adapters")
ADAPTERS: Row[float] = Gauge(
    "vllm:lora_requests_info", "The time, in seconds since 1970. Adapters are not served.", identity
)
SUCCESS: Row[float] = Counter("vllm:request_success", "Finished answers, by finish reason.", identity)


def as_vllm(
    counts: Mapping[str, ModelCounts], models: tuple[ModelStatus, ...], *, at_s: float
) -> Iterator[Metric]:
    """Yield the families: of jobs from a model's first job on, of its cache while it is loaded.

    Running and waiting jobs have a sample for every model. `at_s`: the time of the values.
    """
    names = dict.fromkeys((*(model.model for model in models), *counts))
    yield from families(CURRENT, LABELS, [((name, ENGINE), counts.get(name)) for name in names])
    jobs = [((name, ENGINE), of_model) for name, of_model in counts.items()]
    yield from families(JOBS, LABELS, jobs)
    engines = [((model.model, ENGINE), model.engine) for model in models if model.engine is not None]
    yield from families(ENGINES, LABELS, engines)
    yield CACHE.family(CACHE_LABELS, [((*labels, *_cache(engine)), 1.0) for labels, engine in engines])
    yield ADAPTERS.family(ADAPTER_LABELS, [(("0", "", ""), at_s)])
    ends = [
        ((*labels, reason), float(of_model.finish_reasons.get(reason, 0)))
        for labels, of_model in jobs
        for reason in FINISH_REASONS
    ]
    yield SUCCESS.family((*LABELS, "finished_reason"), ends)


def _cache(engine: EngineStatus) -> tuple[str, ...]:
    return (str(engine.block_size), str(engine.blocks_total), engine.cache_dtype, str(engine.keeps_prefixes))
