"""A short soak test, and the checks behind its verdict. The full hour: `python bench/soak.py`."""

import random
from pathlib import Path

import msgspec
import numpy as np
import pytest

from soak import Options, run_soak
from soaking.deployment import Deployment
from soaking.exchange import Answer
from soaking.report import growth_of, problems_at_rest, problems_in_log, problems_of_growth
from soaking.sampling import Idle, Sample
from soaking.slopes import slope
from soaking.tenants import LoadReport, Tenants

HOUR_S = 3600


def samples(**growth_an_hour: float) -> list[Sample]:
    """Return an hour of noisy samples of a server which grows by these amounts."""
    chance = random.Random(1)
    usual = dict.fromkeys(Sample.__struct_fields__, 0) | {"uss": 100 << 20, "steady_uss": 100 << 20}
    made = []
    for at_s in range(0, HOUR_S, 5):
        values = {
            name: round(usual[name] + growth * at_s / HOUR_S + chance.gauss(0, growth / 20))
            for name, growth in growth_an_hour.items()
        }
        made.append(Sample(**usual | values | {"at_s": float(at_s), "requests": 20 * at_s}))
    return made


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_server_returns_to_its_initial_state_after_kills_stops_reloads_and_requests(tmp_path):
    """Checks counts only, because timings depend on the load of the machine."""
    short = Options(minutes=0.25, warm_up_s=2.0, chaos_every_s=1.5, sample_every_s=1.0, grace_s=2.0)
    report = await run_soak(tmp_path, short)
    assert report.problems == []
    assert report.canaries["same"] > 0
    assert len(report.events) > 3
    assert report.outcomes["success"] > 50


def test_slope_is_that_of_least_squares_with_a_valid_confidence_interval():
    chance = np.random.default_rng(0)
    xs = np.arange(2000.0)
    hits = 0
    for _ in range(200):
        ys = 3 + 0.5 * xs + chance.normal(0, 100, xs.size)
        found = slope(xs, ys)
        hits += found.low <= 0.5 <= found.high
    assert found.value == pytest.approx(np.polyfit(xs, ys, 1)[0], rel=0.02)
    assert 0.90 < hits / 200 < 0.99


def test_too_few_points_have_no_slope():
    with pytest.raises(ValueError, match="too few"):
        slope([1, 2, 3], [1, 2, 3])


@pytest.mark.parametrize(
    ("name", "slight_change", "too_much"),
    [
        ("heap", 2 << 20, 20 << 20),
        ("uss", 8 << 20, 80 << 20),
        ("steady_uss", 2 << 20, 20 << 20),
        ("descriptors", 4, 20),
        ("tasks", 10, 40),
        ("blocks", 20_000, 100_000),  # in 72,000 requests
    ],
)
def test_growth_is_a_problem_and_noise_is_not(name, slight_change, too_much):
    assert problems_of_growth(growth_of(samples(**{name: slight_change}), [])) == []
    (problem,) = problems_of_growth(growth_of(samples(**{name: too_much}), []))
    assert name in problem


def test_resources_in_use_at_rest_are_a_problem():
    before = Idle(20, 22, 5, ())
    assert problems_at_rest(before, Idle(21, 22, 9, ())) == []
    problems = problems_at_rest(before, Idle(40, 44, 5, ("queue: running 1",)))
    assert [problem.removeprefix("at rest: ").partition(",")[0] for problem in problems] == [
        "queue: running 1",
        "40 descriptors",
        "44 tasks",
    ]


def test_internal_error_in_the_log_is_a_problem():
    passing = [
        {"event": "request", "outcome": "node_failed", "level": "error"},
        {"event": "output", "line": "hi"},
    ]
    assert problems_in_log(passing) == []
    failing = [
        {"event": "request failed", "exception": "Traceback ..."},
        {"event": "crashed", "level": "critical"},
        {"event": "request", "outcome": "internal_error"},
        {"event": "output", "source": "steady", "line": "Traceback (most recent call last):"},
    ]
    assert len(failing) == len(problems_in_log(passing + failing))


def error(code: str) -> bytes:
    return msgspec.json.encode({"error": {"message": "no", "code": code}})


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        (Answer(200, b"{}", "whole"), "success"),
        (Answer(429, error("queue_full"), "whole"), "no room"),
        (Answer(504, error("queue_timeout"), "whole"), "no room"),
        (Answer(499, error("cancelled"), "whole"), "cancelled"),
        (Answer(502, error("node_failed"), "whole"), "refused"),
        (Answer(500, error("internal_error"), "whole"), "refused"),
        (Answer(200, b"{", "cut"), "cut"),
    ],
)
def test_only_requests_to_a_killed_model_may_fail(answer, outcome, tmp_path: Path):
    deployment = Deployment(tmp_path)
    tenants = Tenants(deployment, LoadReport(), 0)
    assert outcome == tenants._outcome(answer, "victim", is_stream=False, began_s=deployment.began_s)
    deployment.harm("SIGKILL", "victim")
    with_faults = "harmed" if answer.code == "node_failed" or answer.ending == "cut" else outcome
    assert with_faults == tenants._outcome(answer, "victim", is_stream=False, began_s=deployment.began_s)


@pytest.mark.parametrize(
    ("body", "outcome"),
    [
        (b'data: {"choices": []}\n\ndata: [DONE]\n\n', "success"),
        (b'event: message_stop\ndata: {"type": "message_stop"}\n\n', "success"),
        (b'data: {"choices": []}\n\n', "a stream without an end"),
        (b'data: {"choices": []}\n\ndata: ' + error("engine_failed") + b"\n\n", "refused"),
    ],
)
def test_stream_is_a_success_only_with_its_end(body, outcome, tmp_path: Path):
    tenants = Tenants(Deployment(tmp_path), LoadReport(), 0)
    answer = Answer(200, body, "whole")
    assert outcome == tenants._outcome(answer, "steady", is_stream=True, began_s=0.0)
