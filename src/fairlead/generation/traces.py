"""OpenTelemetry: one trace per request with its phases, and histograms, by the GenAI conventions.

Both are made from the times in a job's `RequestTimeline` when it has finished, without any work per token.
Threads of the SDK send them. Needs the extra `otel`, which is imported only if an endpoint is configured.

Conventions: https://opentelemetry.io/docs/specs/semconv/gen-ai/ (spans and server metrics). The SDK reads the
environment variables (headers, sampler, resource).
"""

import logging
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import structlog

from fairlead.base.config import ConfigError
from fairlead.base.job import Job
from fairlead.base.version import VERSION
from fairlead.generation.metrics.tenants import TenantNames
from fairlead.generation.timeline import LEFT, SUCCESS, RequestTimeline

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span
    from opentelemetry.util.types import AttributeValue

# Begin and end of a model's load, on the clock of the timelines; None if it is not loaded.
LoadTimes = tuple[float, float] | None

# The time limits of one export, and of the last one at the shutdown.
EXPORT_TIMEOUT_S = 5
CLOSE_TIMEOUT_S = 3.0
# The minimum time between two log lines about failed exports.
WARNING_INTERVAL_S = 60.0

logger = structlog.get_logger("fairlead.generation.metrics")

# By the prefix of a job's id, and by the path of a relayed request.
_OPERATIONS = {
    "chatcmpl": "chat",
    "cmpl": "text_completion",
    "embd": "embeddings",
    "rerank": "embeddings",
    "score": "embeddings",
}
_RELAYED = {
    "/v1/chat/completions": "chat",
    "/v1/messages": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
    "/v1/rerank": "embeddings",
    "/v2/rerank": "embeddings",
    "/v1/score": "embeddings",
}


class Traces:
    """Makes spans and histogram values of each finished job. `close` sends the remaining data."""

    def __init__(
        self,
        tracer_provider: "TracerProvider",
        meter_provider: "MeterProvider",
        *,
        tenants: TenantNames,
    ) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._providers = (tracer_provider, meter_provider)
        self._tenants = tenants
        self._tracer = tracer_provider.get_tracer("fairlead", VERSION)
        self._extract = TraceContextTextMapPropagator().extract
        meter = meter_provider.get_meter("fairlead", VERSION)
        self._duration = meter.create_histogram("gen_ai.server.request.duration", "s", "Whole request.")
        self._first_token = meter.create_histogram(
            "gen_ai.server.time_to_first_token", "s", "Time from the arrival to the first token."
        )
        self._per_token = meter.create_histogram(
            "gen_ai.server.time_per_output_token", "s", "Mean time between the tokens of an answer."
        )
        self._usage = meter.create_histogram("gen_ai.client.token.usage", "{token}", "Tokens of a request.")

    def __call__(self, timeline: RequestTimeline, load: LoadTimes) -> None:
        """Make the job's spans and add it to the histograms."""
        self._trace(timeline, load)
        self._measure(timeline)

    def close(self) -> None:
        """Send the remaining data and end the threads, for at most `CLOSE_TIMEOUT_S`."""
        closing = [threading.Thread(target=each.shutdown, daemon=True) for each in self._providers]
        for thread in closing:
            thread.start()
        ends_at = time.monotonic() + CLOSE_TIMEOUT_S
        for thread in closing:
            thread.join(max(0.0, ends_at - time.monotonic()))

    def _trace(self, timeline: RequestTimeline, load: LoadTimes) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        assert timeline.ended_s is not None
        parent = self._extract({"traceparent": timeline.job.traceparent})
        span = self._tracer.start_span(
            f"{_operation(timeline.job)} {timeline.job.model}",
            parent,
            SpanKind.SERVER,
            self._attributes(timeline),
            start_time=_at_ns(timeline, timeline.arrived_s),
        )
        if timeline.outcome not in (SUCCESS, LEFT):
            span.set_status(Status(StatusCode.ERROR, timeline.outcome))
        inside = set_span_in_context(span)
        for name, began_s, ended_s in _phases(timeline, load):
            phase: Span = self._tracer.start_span(name, inside, start_time=_at_ns(timeline, began_s))
            phase.end(_at_ns(timeline, ended_s))
        span.end(_at_ns(timeline, timeline.ended_s))

    def _attributes(self, timeline: RequestTimeline) -> "dict[str, AttributeValue]":
        job, sampling = timeline.job, timeline.job.sampling
        attributes: dict[str, AttributeValue] = {
            **_identity(job),
            "gen_ai.response.model": job.model,
            "gen_ai.response.id": job.id,
            "gen_ai.request.max_tokens": sampling.max_tokens,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
            "gen_ai.request.top_k": sampling.top_k,
            "gen_ai.request.presence_penalty": sampling.presence_penalty,
            "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
            "gen_ai.request.stream": job.stream,
            "gen_ai.response.finish_reasons": timeline.finish_reasons,
            "gen_ai.usage.input_tokens": job.prompt_tokens,
            "gen_ai.usage.output_tokens": timeline.tokens,
            "fairlead.outcome": timeline.outcome,
            "fairlead.request_id": job.request_id,
            "fairlead.tenant": self._tenants.shown(job.tenant),
            "fairlead.attempts": timeline.attempts,
        }
        if job.sequences > 1:
            attributes["gen_ai.request.choice.count"] = job.sequences
        if sampling.seed is not None:
            attributes["gen_ai.request.seed"] = sampling.seed
        if timeline.node is not None:
            attributes["fairlead.node"] = timeline.node
        return attributes | _failure(timeline)

    def _measure(self, timeline: RequestTimeline) -> None:
        assert timeline.ended_s is not None
        identity = _identity(timeline.job)
        self._duration.record(timeline.ended_s - timeline.arrived_s, identity | _failure(timeline))
        if timeline.first_delta_s is None:
            return
        self._first_token.record(timeline.first_delta_s - timeline.arrived_s, identity)
        if timeline.outcome == SUCCESS and timeline.token_gaps:
            self._per_token.record(timeline.token_gap_s, identity)
        self._usage.record(timeline.job.prompt_tokens, identity | {"gen_ai.token.type": "input"})
        self._usage.record(timeline.tokens, identity | {"gen_ai.token.type": "output"})


def open_traces(endpoint: str, *, tenants: TenantNames) -> Traces:
    """Return an exporter to a collector at `endpoint`, over HTTP. Raises `ConfigError` without the extra."""
    try:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError("otlpEndpoint: needs OpenTelemetry: pip install 'fairlead[otel]'") from error
    _log_sdk_warnings()
    base = endpoint.rstrip("/")
    resource = Resource.create({"service.name": "fairlead", "service.version": VERSION})
    tracer_provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    tracer_provider.add_span_processor(
        BatchSpanProcessor(OTLPSpanExporter(f"{base}/v1/traces", timeout=EXPORT_TIMEOUT_S))
    )
    reader = PeriodicExportingMetricReader(OTLPMetricExporter(f"{base}/v1/metrics", timeout=EXPORT_TIMEOUT_S))
    meter_provider = MeterProvider([reader], resource=resource, shutdown_on_exit=False)
    return Traces(tracer_provider, meter_provider, tenants=tenants)


def _phases(timeline: RequestTimeline, load: LoadTimes) -> Iterator[tuple[str, float, float]]:
    """Yield the phases of the job: name, begin, end. A load is part of the wait in the queue."""
    ended_s = timeline.ended_s
    assert ended_s is not None
    granted_s = ended_s if timeline.granted_s is None else timeline.granted_s
    yield "queue", timeline.arrived_s, granted_s
    if load is not None:
        began_s, loaded_s = max(load[0], timeline.arrived_s), min(load[1], granted_s)
        if began_s < loaded_s:
            yield "load", began_s, loaded_s
    if timeline.granted_s is None:
        return
    first_s = ended_s if timeline.first_delta_s is None else timeline.first_delta_s
    yield "prefill", granted_s, first_s
    if timeline.first_delta_s is not None:
        yield "decode", first_s, ended_s


class _SdkWarnings(logging.Handler):
    """Copies the SDK's warnings to the server's log, at most one per minute. Any thread may call it."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._next_at = 0.0

    def emit(self, record: logging.LogRecord) -> None:
        if time.monotonic() >= self._next_at:
            self._next_at = time.monotonic() + WARNING_INTERVAL_S
            logger.warning("telemetry not sent", reason=record.getMessage())


def _log_sdk_warnings() -> None:
    sdk = logging.getLogger("opentelemetry")
    sdk.propagate = False
    sdk.handlers = [_SdkWarnings()]


def _identity(job: Job) -> "dict[str, AttributeValue]":
    return {
        "gen_ai.operation.name": _operation(job),
        "gen_ai.provider.name": "fairlead",
        "gen_ai.request.model": job.model,
    }


def _failure(timeline: RequestTimeline) -> "dict[str, AttributeValue]":
    return {} if timeline.outcome in (SUCCESS, LEFT) else {"error.type": timeline.outcome}


def _operation(job: Job) -> str:
    if job.relay is not None:
        return _RELAYED.get(job.relay.path, "generate_content")
    return _OPERATIONS.get(job.id.partition("-")[0], "generate_content")


def _at_ns(timeline: RequestTimeline, then_s: float) -> int:
    """Return a time of the timeline's clock as nanoseconds since 1970."""
    return timeline.began_at_ns + round((then_s - timeline.arrived_s) * 1e9)
