"""Grafana's dashboard uses only metrics and labels that the server exports."""

import json
import re
from importlib.resources import files

from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from fairlead.router.fleet.status import NodeStatus
from generation.metrics.sources import FakeSources, engine, engine_status, timeline
from generation.metrics.test_metrics import pulled

_LANGUAGE = {"sum", "by", "rate", "increase", "histogram_quantile", "max", "min", "avg", "topk", "le"}


def _dashboard() -> dict:
    return json.loads((files("fairlead") / "generation" / "metrics" / "grafana.json").read_text())


def _expressions() -> list[str]:
    return [target["expr"] for panel in _dashboard()["panels"] for target in panel.get("targets", ())]


async def test_every_metric_and_label_of_the_dashboard_exists():
    sources = FakeSources(refused={"invalid_request": 1})
    sources.fleet.statuses = [engine(engine=engine_status())]
    sources.fleet.node_statuses = [NodeStatus(id="n", kind="remote", models=(), seats=1, busy=0, state="up")]
    sources.gateway.metrics.add(timeline())
    families = list(text_string_to_metric_families(generate_latest(pulled(sources)).decode()))
    names = {sample.name for family in families for sample in family.samples}
    labels = {label for family in families for sample in family.samples for label in sample.labels}
    expressions = _expressions()
    assert len(expressions) > 25
    for expression in expressions:
        words = set(re.findall(r"[a-z_:]{2,}", re.sub(r"\[[^]]*\]", "", expression)))
        assert words <= names | labels | _LANGUAGE, expression
        assert words & names, expression


def test_panels_neither_overlap_nor_exceed_the_grid():
    used = set()
    for panel in _dashboard()["panels"]:
        position = panel["gridPos"]
        cells = {
            (position["x"] + x, position["y"] + y) for x in range(position["w"]) for y in range(position["h"])
        }
        assert not cells & used
        assert all(x < 24 for x, _ in cells)
        used |= cells
    assert len({panel["id"] for panel in _dashboard()["panels"]}) == len(_dashboard()["panels"])
