"""OpenTelemetry: one trace per request with its phases, GenAI names, and the client's trace as parent."""

import json
import logging
import subprocess
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import structlog
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from fairlead.base.config import Config, ConfigError
from fairlead.base.job import Relay, Sampling
from fairlead.generation import traces
from fairlead.generation.metrics.tenants import TenantNames
from fairlead.generation.request_log import open_request_log
from fairlead.generation.traces import Traces
from generation.metrics.sources import timeline

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
NS = 1_000_000_000


class Collector:
    """Traces that keep their spans and metrics in memory."""

    def __init__(self, load=None) -> None:
        self._spans = InMemorySpanExporter()
        self._reader = InMemoryMetricReader()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self._spans))
        meters = MeterProvider([self._reader], shutdown_on_exit=False)
        tenants = TenantNames(Config(models=()))
        self.traces = Traces(provider, meters, tenants=tenants)
        self._load = load

    def add(self, timeline) -> None:
        self.traces(timeline, self._load)

    def spans(self) -> dict:
        """Return the finished spans by name; the request's own is `request`."""
        return {
            "request" if span.kind is SpanKind.SERVER else span.name: span
            for span in self._spans.get_finished_spans()
        }

    def phases(self) -> dict[str, tuple[float, float]]:
        """Return when each span began and ended, in seconds after the arrival."""
        return {
            name: ((span.start_time - 5 * NS) / NS, (span.end_time - 5 * NS) / NS)
            for name, span in self.spans().items()
        }

    def histograms(self) -> dict[str, tuple[int, float]]:
        """Return the count and the sum of each metric's values."""
        found: dict[str, tuple[int, float]] = {}
        for resource in self._reader.get_metrics_data().resource_metrics:
            for scope in resource.scope_metrics:
                for metric in scope.metrics:
                    points = metric.data.data_points
                    found[metric.name] = (sum(p.count for p in points), sum(p.sum for p in points))
        return found


def test_request_has_a_span_for_each_phase():
    collector = Collector()
    collector.add(timeline())
    assert collector.phases() == {
        "request": (0, 7),
        "queue": (0, 1),
        "prefill": (1, 3),
        "decode": (3, 7),
    }
    spans = collector.spans()
    ours = spans["request"].get_span_context()
    assert {ours.span_id} == {spans[name].parent.span_id for name in ("queue", "prefill", "decode")}
    assert {ours.trace_id} == {span.get_span_context().trace_id for span in spans.values()}
    assert spans["request"].parent is None


def test_model_load_during_the_wait_is_a_separate_span():
    collector = Collector(load=(99.0, 100.5))
    collector.add(timeline())
    assert collector.phases()["load"] == (0, 0.5)


@pytest.mark.parametrize("load", [(90.0, 99.0), (101.0, 102.0), None])
def test_model_load_outside_the_wait_is_not_in_the_trace(load):
    collector = Collector(load=load)
    collector.add(timeline())
    assert "load" not in collector.spans()


def test_request_span_is_a_child_of_the_clients_span():
    collector = Collector()
    collector.add(timeline(traceparent=PARENT))
    request = collector.spans()["request"]
    assert request.get_span_context().trace_id == 0x0AF7651916CD43DD8448EB211C80319C
    assert request.parent.span_id == 0xB7AD6B7169203331


@pytest.mark.parametrize(
    "sent", ["", "nonsense", PARENT[:-1], "00-" + "0" * 32 + "-" + "0" * 16 + "-01", "é" * 9]
)
def test_invalid_traceparent_begins_a_new_trace(sent):
    collector = Collector()
    collector.add(timeline(traceparent=sent))
    assert collector.spans()["request"].parent is None


def test_trace_that_the_client_does_not_sample_is_not_recorded():
    collector = Collector()
    collector.add(timeline(traceparent=PARENT[:-2] + "00"))
    assert collector.spans() == {}


def test_attributes_have_the_names_of_the_genai_convention():
    collector = Collector()
    sampling = Sampling(max_tokens=10, temperature=0.5, top_p=0.9, seed=7)
    collector.add(timeline("ana", sampling=sampling, n=2, id="chatcmpl-9"))
    request = collector.spans()["request"]
    attributes = dict(request.attributes)
    assert request.name == "chat m"
    tenant = attributes.pop("fairlead.tenant")
    assert "ana" not in tenant
    assert attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "fairlead",
        "gen_ai.request.model": "m",
        "gen_ai.response.model": "m",
        "gen_ai.response.id": "chatcmpl-9",
        "gen_ai.request.max_tokens": 10,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.top_k": 0,
        "gen_ai.request.presence_penalty": 0.0,
        "gen_ai.request.frequency_penalty": 0.0,
        "gen_ai.request.stream": False,
        "gen_ai.request.seed": 7,
        "gen_ai.request.choice.count": 2,
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 5,
        "fairlead.outcome": "success",
        "fairlead.request_id": "r-1",
        "fairlead.attempts": 1,
        "fairlead.node": "engine:m",
    }


@pytest.mark.parametrize(
    ("path", "operation"),
    [
        ("/v1/messages", "chat"),
        ("/v1/completions", "text_completion"),
        ("/v1/embeddings", "embeddings"),
        ("/v1/responses", "generate_content"),
    ],
)
def test_operation_of_a_relayed_request_is_named_by_its_path(path, operation):
    collector = Collector()
    collector.add(timeline(id="relay-1", relay=Relay(path, b"{}")))
    assert operation == collector.spans()["request"].attributes["gen_ai.operation.name"]


def test_error_has_a_type_and_a_client_disconnect_is_not_an_error():
    collector = Collector()
    collector.add(timeline(outcome="node_failed"))
    failed = collector.spans()["request"]
    assert (failed.status.status_code, failed.attributes["error.type"]) == (StatusCode.ERROR, "node_failed")
    collector = Collector()
    collector.add(timeline(outcome="client_left"))
    left = collector.spans()["request"]
    assert (left.status.status_code, "error.type" in left.attributes) == (StatusCode.UNSET, False)


def test_refused_job_has_only_a_queue_span():
    collector = Collector()
    collector.add(timeline(outcome="queue_timeout", granted_s=None, first_delta_s=None, tokens=0))
    assert set(collector.spans()) == {"request", "queue"}


def test_histograms_have_the_names_of_the_genai_convention():
    collector = Collector()
    collector.add(timeline())
    collector.add(timeline(outcome="queue_full", granted_s=None, first_delta_s=None, tokens=0))
    assert collector.histograms() == {
        "gen_ai.server.request.duration": (2, 14.0),
        "gen_ai.server.time_to_first_token": (1, 3.0),
        "gen_ai.server.time_per_output_token": (1, 1.0),
        "gen_ai.client.token.usage": (2, 8.0),
    }


@contextmanager
def collector_server():
    """Accept exports on the loopback interface; yield the URL and the list of paths posted to."""
    posted: list[str] = []

    class Answer(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            posted.append(self.path)
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_arguments) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", posted
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_remaining_telemetry_is_sent_to_the_collector_at_the_end(monkeypatch):
    for name in ("EXPORT_TIMEOUT_S", "CLOSE_TIMEOUT_S"):
        monkeypatch.setattr(traces, name, 60)
    before = set(threading.enumerate())
    with collector_server() as (url, posted):
        with open_request_log(Config(models=(), otlp_endpoint=f"{url}/")) as log:
            log.add(timeline(), None)
            log.flush()
        assert set(posted) == {"/v1/traces", "/v1/metrics"}
    assert set(threading.enumerate()) <= before  # threads of earlier tests may have ended meanwhile


def test_opentelemetry_is_imported_only_with_a_collector_and_without_asyncio():
    program = """
import json, os, sys
from fairlead.base.config import Config
from fairlead.generation.request_log import open_request_log
with open_request_log(Config(models=())):
    before = sorted(name for name in sys.modules if name.startswith("opentelemetry"))
from fairlead.generation.traces import open_traces
from fairlead.generation import traces
from fairlead.generation.metrics.tenants import TenantNames
sys.modules["asyncio"] = None  # structlog has imported it; any other import of it fails
open_traces("http://127.0.0.1:9", tenants=TenantNames(Config(models=())))
print(json.dumps(before), flush=True)
os._exit(0)  # does not wait for the export
"""
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, timeout=60)
    assert json.loads(output.stdout) == []


def test_endpoint_without_the_otel_extra_is_refused_by_its_key(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with (
        pytest.raises(ConfigError, match=r"^otlpEndpoint: needs .*fairlead\[otel\]"),
        open_request_log(Config(models=(), otlp_endpoint="http://127.0.0.1:9")),
    ):
        pass


def test_unresponsive_collector_does_not_block_shutdown(monkeypatch):
    monkeypatch.setattr(traces, "CLOSE_TIMEOUT_S", 0.05)
    answered = threading.Event()
    collector = Collector()
    collector.traces._providers[0].shutdown = answered.wait
    collector.traces.close()
    assert not answered.is_set()
    answered.set()


def test_sdk_errors_are_logged_but_not_for_every_retry():
    warnings = traces._SdkWarnings()
    with structlog.testing.capture_logs() as output:
        for _ in range(3):
            warnings.handle(logging.LogRecord("x", logging.ERROR, "", 1, "no answer", None, None))
    assert [(line["event"], line["reason"]) for line in output] == [("telemetry not sent", "no answer")]
