"""Makes the Grafana dashboard that ships as `grafana.json` from a table of its panels. Pure.

It queries the `fairlead_*` metrics; the vLLM names are for existing dashboards. Clients' waiting times come
first, then the models and nodes, then the tenants.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

COLUMNS = 24
QUANTILES = (0.5, 0.9, 0.99)


class Panel(NamedTuple):
    """One plot.

    title: its title.
    unit: the unit of its axis.
    targets: PromQL expressions, each with the legend of its lines.
    width: in columns of the grid.
    kind: the kind of plot.
    """

    title: str
    unit: str
    targets: tuple[tuple[str, str], ...]
    width: int = 8
    kind: str = "timeseries"


def _rate(metric: str, by: str) -> str:
    return f"sum by ({by}) (rate({metric}[$__rate_interval]))"


def _ratio(part: str, whole: str, by: str) -> str:
    return f"{_rate(part, by)} / {_rate(whole, by)}"


def _quantiles(metric: str) -> tuple[tuple[str, str], ...]:
    buckets = f"sum by (le) (rate({metric}_bucket[$__rate_interval]))"
    return tuple((f"histogram_quantile({part}, {buckets})", f"p{part * 100:g}") for part in QUANTILES)


_MEAN_WAIT = _ratio("fairlead_tenant_wait_seconds_total", "fairlead_tenant_jobs_total", "tenant")
_PREFIX_HIT_RATE = _ratio("fairlead_model_prefix_hits_total", "fairlead_model_prefix_queries_total", "model")
_ACCEPTANCE = _ratio("fairlead_model_accepted_tokens_total", "fairlead_model_draft_tokens_total", "model")

ROWS: tuple[tuple[str, tuple[Panel, ...]], ...] = (
    (
        "Latency and load",
        (
            Panel("Waiting", "short", (("sum(fairlead_queue_waiting_jobs)", ""),), 4, "stat"),
            Panel("Running", "short", (("sum(fairlead_running_jobs)", ""),), 4, "stat"),
            Panel("Mean wait", "s", (("avg(fairlead_queue_mean_wait_seconds)", ""),), 4, "stat"),
            Panel(
                "Tokens per second",
                "short",
                (("sum(rate(fairlead_generated_tokens_total[$__rate_interval]))", ""),),
                4,
                "stat",
            ),
            Panel("Cache in use", "percentunit", (("max(fairlead_model_cache_usage)", ""),), 4, "stat"),
            Panel("Ready", "short", (("min(fairlead_ready)", ""),), 4, "stat"),
            Panel("Time to first token", "s", _quantiles("fairlead_first_token_seconds")),
            Panel("Time in the queue", "s", _quantiles("fairlead_queue_seconds")),
            Panel("Time between tokens", "s", _quantiles("fairlead_token_gap_seconds")),
        ),
    ),
    (
        "The queue",
        (
            Panel(
                "Jobs",
                "short",
                (
                    ("sum(fairlead_queue_waiting_jobs)", "waiting"),
                    ("sum(fairlead_running_jobs)", "running"),
                    ("sum(fairlead_seats)", "seats"),
                    ("sum(fairlead_queue_capacity_jobs)", "capacity"),
                ),
            ),
            Panel(
                "Finished jobs, by outcome",
                "reqps",
                ((_rate("fairlead_jobs_total", "outcome"), "{{outcome}}"),),
            ),
            Panel(
                "Refused requests, by error code",
                "reqps",
                ((_rate("fairlead_requests_refused_total", "code"), "{{code}}"),),
            ),
            Panel("Request duration", "s", _quantiles("fairlead_request_seconds")),
            Panel("Prefill", "s", _quantiles("fairlead_prefill_seconds")),
            Panel("Decode", "s", _quantiles("fairlead_decode_seconds")),
        ),
    ),
    (
        "Models and nodes",
        (
            Panel(
                "Tokens per second",
                "short",
                (
                    (_rate("fairlead_generated_tokens_total", "model"), "{{model}} generated"),
                    (_rate("fairlead_prompt_tokens_total", "model"), "{{model}} prompt"),
                ),
            ),
            Panel("Cache in use", "percentunit", (("fairlead_model_cache_usage", "{{model}}"),)),
            Panel(
                "Prompt tokens found in the prefix cache",
                "percentunit",
                ((_PREFIX_HIT_RATE, "{{model}}"),),
            ),
            Panel("State", "short", (("fairlead_model_state == 1", "{{model}} {{state}}"),)),
            Panel(
                "Loads, restarts and failures, per hour",
                "short",
                (
                    ("increase(fairlead_model_loads_total[1h])", "{{model}} loads"),
                    ("increase(fairlead_model_evictions_total[1h])", "{{model}} evictions"),
                    ("increase(fairlead_model_load_failures_total[1h])", "{{model}} failed loads"),
                    ("increase(fairlead_model_restarts_total[1h])", "{{model}} restarts"),
                    ("increase(fairlead_model_stuck_total[1h])", "{{model}} stuck"),
                    ("increase(fairlead_retries_total[1h])", "{{model}} retries"),
                ),
            ),
            Panel("Memory", "bytes", (("fairlead_model_memory_bytes", "{{model}}"),)),
            Panel("Busy seats", "short", (("fairlead_node_busy_seats", "{{node}}"),)),
            Panel("Nodes up", "short", (("fairlead_node_up", "{{node}}"),)),
            Panel(
                "Preempted sequences",
                "short",
                (("increase(fairlead_model_preemptions_total[5m])", "{{model}}"),),
            ),
            Panel("Drafts of speculation that were right", "percentunit", ((_ACCEPTANCE, "{{model}}"),)),
        ),
    ),
    (
        "Tenants",
        (
            Panel(
                "Tokens per second, the ten largest tenants",
                "short",
                ((f"topk(10, {_rate('fairlead_tenant_generated_tokens_total', 'tenant')})", "{{tenant}}"),),
                12,
            ),
            Panel(
                "Mean wait of a job, the ten longest",
                "s",
                ((f"topk(10, {_MEAN_WAIT})", "{{tenant}}"),),
                12,
            ),
        ),
    ),
)


def dashboard() -> dict[str, Any]:
    """Return the dashboard in Grafana's import format, with a variable for the Prometheus data source."""
    return {
        "title": "Fairlead",
        "uid": "fairlead",
        "tags": ["fairlead", "llm"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [{"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"}]
        },
        "panels": list(_panels()),
    }


def _panels() -> Iterator[dict[str, Any]]:
    """Yield the panels, placed from left to right and row by row."""
    y = number = 0
    for title, panels in ROWS:
        number += 1
        yield {
            "id": number,
            "type": "row",
            "title": title,
            "collapsed": False,
            "gridPos": {"h": 1, "w": COLUMNS, "x": 0, "y": y},
            "panels": [],
        }
        y += 1
        x = height = 0
        for panel in panels:
            if x + panel.width > COLUMNS:
                x, y, height = 0, y + height, 0
            number += 1
            tall = 4 if panel.kind == "stat" else 8
            yield _panel(panel, number, {"h": tall, "w": panel.width, "x": x, "y": y})
            x, height = x + panel.width, max(height, tall)
        y += height


def _panel(panel: Panel, number: int, position: dict[str, int]) -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "${source}"}
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "datasource": source,
        "gridPos": position,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + index), "datasource": source, "expr": expression, "legendFormat": legend}
            for index, (expression, legend) in enumerate(panel.targets)
        ],
    }
