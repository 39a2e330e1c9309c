"""Scenarios for the settings of the queue."""

import trio

from settings.cases import setting
from settings.prompts import random_text
from settings.served import NODE, Pending, Served

LONG_TOKENS = 60  # tokens: such a job takes the only seat for six seconds
RELAY_NODE = {"id": "n", "url": f"http://{NODE[0]}:{NODE[1]}", "models": ["far"]}


async def order(
    server: Served, *jobs: tuple[str, dict[str, object]], holder_key: str | None = None
) -> list[str]:
    """Submit all jobs while the only seat is taken; return their users in the order of the answers."""
    holder = server.complete(tokens=10, user="holder", key=holder_key)
    await trio.sleep(0.3)
    pending: list[tuple[str, Pending]] = []
    for user, fields in jobs:
        pending.append((user, server.complete(user=user, **fields)))
        await trio.sleep(0.01)
    for _, job in [("", holder), *pending]:
        assert (await job.done()).status == 200, job
    return [user for user, _ in sorted(pending, key=lambda pair: pair[1].ended_s)]


@setting("queue.capacity", {"queue": {"capacity": 1}})
async def full_queue_refuses_a_job(server: Served) -> None:
    jobs = []
    for _ in range(3):
        jobs.append(server.complete())
        await trio.sleep(0.01)
    assert [(await job.done()).status for job in jobs] == [200, 200, 429]


@setting("queue.waitingBytes", {"queue": {"waitingBytes": 100_000}, "nodes": [RELAY_NODE]})
async def large_request_for_a_remote_node_is_refused_instead_of_queued(server: Served) -> None:
    server.upstream.delay_s = 5
    await server.until(lambda: server.upstream.times)
    first = server.complete(model="far")
    await trio.sleep(0.5)
    large = server.complete("x" * 200_000, model="far")
    small = server.complete("x", model="far")
    assert [(await job.done()).status for job in (first, large, small)] == [200, 429, 200]


@setting("queue.timeout", {"queue": {"timeout": 2}})
async def job_in_the_queue_times_out(server: Served) -> None:
    server.complete(tokens=LONG_TOKENS)
    await trio.sleep(0.1)
    late = server.complete()
    assert (await late.done()).status == 504, late
    assert 1.9 < late.took_s < 2.5, late


@setting("queue.maxEstimatedWait", {"queue": {"maxEstimatedWait": 1}})
async def job_with_a_long_estimated_wait_is_refused(server: Served) -> None:
    await server.complete(tokens=LONG_TOKENS).done()
    server.complete(tokens=LONG_TOKENS)
    await trio.sleep(0.1)
    refused = server.complete(tokens=LONG_TOKENS)
    assert (await refused.done()).status == 429, refused
    assert refused.took_s < 0.1, refused


@setting("queue.fairness", {"queue": {"fairness": "tokens"}})
async def tenant_with_short_answers_gets_more_turns(server: Served) -> None:
    long, short = {"tokens": 40}, {"tokens": 4}
    served = await order(server, ("A", long), ("A", long), *[("B", short)] * 4)
    assert served[-1] == "A", served


@setting("queue.estimate", {"queue": {"estimate": "mean"}})
async def mean_estimate_has_no_p90(server: Served) -> None:
    await server.complete().done()
    server.complete(tokens=LONG_TOKENS)
    await trio.sleep(0.1)
    estimate = await server.get_json("/queue/estimate?model=m")
    assert estimate["estimated_wait_p90_s"] is None, estimate


@setting("queue.keepAlive", {"queue": {"keepAlive": 1}})
async def queued_stream_receives_keep_alive_comments(server: Served) -> None:
    server.complete(tokens=200)
    await trio.sleep(0.1)
    stream = await server.complete(stream=True).done()
    comments = [line for line in stream.body.decode().split("\n") if line.startswith(":")]
    assert len(comments) >= 3, comments
    assert all("position=1" in comment for comment in comments[:3]), comments


@setting("queue.classes", {"queue": {"classes": ["vip", "usual"]}})
async def classes_have_the_configured_names(server: Served) -> None:
    answer = await server.complete(headers={"X-Priority": "vip"}).done()
    assert answer.status == 200, answer


@setting("queue.minShare", {"queue": {"minShare": 0.5}})
async def lower_class_gets_its_minimum_share(server: Served) -> None:
    high, low = ({"headers": {"X-Priority": name}} for name in ("high", "low"))
    served = await order(server, *[("A", high)] * 6, ("B", low))
    assert served.index("B") <= 2, served


async def wait_beside_long_answers(server: Served, pause_s: float, **fields: object) -> float:
    """Return how long a short answer takes that arrives so long after two long ones of another user."""
    for _ in range(2):
        server.complete(tokens=LONG_TOKENS, user="A")
    await trio.sleep(pause_s)
    short = server.complete(tokens=2, user="B", **fields)
    assert (await short.done()).status == 200, short
    return short.took_s


@setting("queue.suspension", {"queue": {"suspension": False}, "models": {"m": {"slots": 2}}})
async def running_answers_do_not_pause_for_others(server: Served) -> None:
    assert await wait_beside_long_answers(server, 1.5) > 3


@setting("queue.quantum", {"queue": {"quantum": 3}, "models": {"m": {"slots": 2}}})
async def answer_runs_for_a_quantum_before_it_pauses(server: Served) -> None:
    assert 2 < await wait_beside_long_answers(server, 0.3) < 4


@setting("queue.quantumTokens", {"queue": {"quantum": 8, "quantumTokens": 4}, "models": {"m": {"slots": 2}}})
async def answer_runs_for_some_tokens_before_it_pauses(server: Served) -> None:
    assert await wait_beside_long_answers(server, 0.3) < 2.9


@setting("queue.preempt", {"queue": {"preempt": ["high"]}})
async def answers_of_lower_classes_pause_for_a_class_that_preempts(server: Served) -> None:
    assert await wait_beside_long_answers(server, 1.5, headers={"X-Priority": "high"}) < 2


@setting("queue.promptWeight", {"queue": {"fairness": "tokens", "promptWeight": 0}})
async def prompt_tokens_with_weight_0_cost_nothing(server: Served) -> None:
    long_prompt, long_answer = {"prompt": random_text(60), "tokens": 4}, {"tokens": 40}
    served = await order(server, *[("A", long_prompt)] * 3, *[("B", long_answer)] * 2)
    assert served[-1] == "B", served


@setting("queue.outputWeight", {"queue": {"fairness": "tokens", "outputWeight": 0}})
async def output_tokens_with_weight_0_cost_nothing(server: Served) -> None:
    long_prompt, long_answer = {"prompt": random_text(60), "tokens": 4}, {"tokens": 60}
    served = await order(server, *[("A", long_prompt)] * 2, *[("B", long_answer)] * 3)
    assert served[-1] == "A", served


@setting("queue.tenantWeights", {"queue": {"fairness": "tokens", "tenantWeights": {"user/A": 10}}})
async def tenant_with_a_larger_weight_gets_more_turns(server: Served) -> None:
    served = await order(server, *[("B", {})] * 3, *[("A", {})] * 3)
    assert served[-2:] == ["B", "B"], served


def of_keys(names: str) -> list[tuple[str, dict[str, object]]]:
    """Return a job for each letter, with the key of this name."""
    return [(name, {"key": name}) for name in names]


@setting(
    "teams.NAME.weight",
    {
        "apiKeys": [{"key": "A", "team": "red"}, {"key": "B", "team": "blue"}, {"key": "D"}],
        "teams": {"red": {"weight": 10}, "blue": {}},
        "queue": {"fairness": "tokens"},
    },
)
async def team_with_a_larger_weight_gets_more_turns(server: Served) -> None:
    served = await order(server, *of_keys("BBBAAA"), holder_key="D")
    assert served[-2:] == ["B", "B"], served


@setting(
    "queue.starvationBound",
    {
        "queue": {"starvationBound": 6},
        "models": {"k": {"path": "DEMO"}},
        "lru": {"maxLoaded": 1},
    },
)
async def starving_model_is_loaded_while_another_is_busy(server: Served) -> None:
    busy = [server.complete(tokens=20) for _ in range(10)]
    await trio.sleep(0.1)
    starving = server.complete(model="k")
    later = [server.complete(tokens=20, user="late") for _ in range(10)]
    assert (await starving.done()).status == 200, starving
    assert starving.took_s < 10, starving
    assert all([(await job.done()).status == 200 for job in (*busy, *later)])


@setting("whileLoading", {"whileLoading": "reject", "models": {"m": {"preload": False}}})
async def job_for_an_unloaded_model_is_refused(server: Served) -> None:
    refused = await server.complete().done()
    assert (refused.status, refused.error) == (503, "model_loading"), refused
    await server.state("m", "up")
    assert (await server.complete().done()).status == 200
