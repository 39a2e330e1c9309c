"""Scenarios of a server with two fronts: any front answers for all, and any process of the server may die.

Connections reach the fronts in turn, so that two requests in a row are answered by both.
"""

import signal
from typing import Any

import trio
from prometheus_client.parser import text_string_to_metric_families

from settings.behaviours import behaviour
from settings.documents import file_with
from settings.queue_settings import RELAY_NODE
from settings.response_settings import created, status
from settings.served import SECOND, Pending, Served

TWO = (2,)
FRONTS = ("front 1", "front 2")
COMMAND = {"models": {"m": None, "far": {"cmd": "model-server ${PORT}"}}}
LIMITED = {"apiKeys": [{"key": "k1", "limits": {"concurrent": 1, "requestsPerMinute": 9}}]}


async def metric(server: Served, name: str, key: str = "") -> list[float]:
    """Return the sum of a metric's samples, from each of the fronts.

    A front has the counts of others as of a second ago.
    """
    await trio.sleep(1.5)
    found = []
    for _ in FRONTS:
        text = (await server.fetch("/metrics", key=key)).body.decode()
        families = text_string_to_metric_families(text)
        found.append(sum(each.value for family in families for each in family.samples if each.name == name))
    return found


async def kill_front_of(server: Served, job: Pending) -> None:
    """Kill the front that has this job."""
    for name in FRONTS:
        server.kill(name)
        await trio.sleep(0.1)
        if job.is_over:
            return
    raise AssertionError("the job has no front")


async def has_finished(server: Served, within_s: float, **options: Any) -> None:
    """Check that a job gets its seat, and ends, in time."""
    job = server.complete(**options)
    with trio.move_on_after(within_s):
        assert (await job.done()).status == 200, job
    assert job.is_over, f"it is not over after {within_s:g} s"


# Any front answers for all ---------------------------------------------------------------------------------


@behaviour({}, fronts=TWO)
async def every_front_answers_with_the_totals_of_all(server: Served) -> None:
    for _ in FRONTS:
        assert (await server.complete(tokens=5).done()).status == 200
    assert await metric(server, "fairlead_generated_tokens_total") == [10, 10]
    instances = [(await server.get_json("/health"))["instance"] for _ in FRONTS]
    assert instances[0] == instances[1]
    server.complete(tokens=50)
    await trio.sleep(0.5)
    for _ in FRONTS:
        assert (await server.get_json("/queue"))["running"] == 1
        (model,) = await server.get_json("/running")
        assert (model["model"], model["busy"]) == ("m", 1)
        assert len(await server.get_json("/nodes")) == 1
    assert await metric(server, "vllm:num_requests_running") == [1, 1]


@behaviour({}, fronts=TWO)
async def every_front_serves_llama_cpps_and_sagemakers_routes(server: Served) -> None:
    server.complete(tokens=50)
    await trio.sleep(0.5)
    for _ in FRONTS:
        slots = await server.get_json("/slots")
        assert [slot["is_processing"] for slot in slots].count(True) == 1
    for _ in FRONTS:
        props = await server.get_json("/props")
        assert props["total_slots"] == len(slots)
    for _ in FRONTS:  # an odd number of requests, so that the next round begins at the other front
        assert props["chat_template"] == (await server.get_json("/tokenizer_info"))["chat_template"]
        body = {"prompt": "hello", "n_predict": 3, "ignore_eos": True, "surprise": 1}
        answer = await server.fetch("/completion", body)
        assert (answer.status, answer.document["tokens_predicted"]) == (200, 3), answer
        assert answer.headers["warning"] == '299 - "fields without effect: surprise"'
        chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3, "return_token_ids": True}
        answer = await server.fetch("/invocations", chat)
        assert answer.status == 200, answer
        prompt = (await server.fetch("/apply-template", {"messages": chat["messages"]})).document["prompt"]
        tokens = (await server.fetch("/tokenize", {"prompt": prompt})).document["tokens"]
        assert answer.document["prompt_token_ids"] == tokens


@behaviour({}, fronts=TWO)
async def job_is_cancelled_through_any_front(server: Served) -> None:
    for place in range(len(FRONTS)):
        job = server.complete(tokens=200, headers={"X-Request-Id": f"long-{place}"})
        await trio.sleep(0.5)
        for _ in range(place):  # the next connection reaches the front of the job
            await server.get_json("/queue")
        assert (await server.fetch(f"/v1/requests/long-{place}/cancel", {})).status == 200
        await trio.sleep(0.5)
        assert job.is_over, job


@behaviour({"models": {"m": {"preload": False}, "k": {"path": "DEMO"}}}, fronts=TWO)
async def model_is_loaded_and_unloaded_through_any_front(server: Served) -> None:
    for model in ("m", "k"):
        loaded = await server.fetch("/models/load", {"model": model})
        assert (loaded.status, loaded.document["state"]) == (200, "ready"), loaded
        job = server.complete(model=model, tokens=20)
        await trio.sleep(0.5)
        unloaded = await server.fetch("/models/unload", {"model": model})
        assert (unloaded.status, unloaded.document["state"]) == (200, "stopped"), unloaded
        assert job.is_over
        assert (await job.done()).status == 200


@behaviour({}, fronts=TWO)
async def job_that_waits_for_a_model_that_is_unloaded_waits_for_its_next_load_on_request(
    server: Served,
) -> None:
    for path, expected in (("/models/unload", 409), ("/models/unload?wait=true", 200)):
        running = server.complete(tokens=20)
        await trio.sleep(0.1)
        waiting = server.complete()
        await trio.sleep(0.1)
        unloading = server.start(path, {"model": "m"})
        assert (await waiting.done()).status == expected
        assert (await unloading.done()).status == 200
        assert (await running.done()).status == 200


@behaviour({}, fronts=TWO)
async def unloading_by_force_ends_the_jobs_of_all_fronts(server: Served) -> None:
    jobs = [server.complete(tokens=100), server.complete(tokens=100)]
    await trio.sleep(0.5)
    unloaded = server.start("/models/unload", {"model": "m", "force": True})
    await trio.sleep(3)
    assert unloaded.is_over
    assert (await unloaded.done()).document["state"] == "stopped"
    assert any(job.is_over for job in jobs)


@behaviour({"models": {"m": None}, "nodes": [RELAY_NODE]}, fronts=TWO)
async def node_is_added_and_removed_through_any_front(server: Served) -> None:
    await server.state("far", "up")
    added = {"id": "added", "url": f"http://{SECOND[0]}:{SECOND[1]}", "models": ["near"]}
    server.second.models = ("near",)
    assert (await server.fetch("/nodes", added)).status < 300
    await server.state("near", "up")
    for _ in FRONTS:
        assert (await server.complete(model="near").done()).status == 200
    assert (await server.start("/nodes/added", method="DELETE").done()).status < 300
    await trio.sleep(0.5)
    for _ in FRONTS:
        assert [node["id"] for node in await server.get_json("/nodes")] == ["n"]
        assert (await server.complete(model="near").done()).status == 404


@behaviour(COMMAND, fronts=TWO)
async def lines_that_a_command_prints_are_read_from_any_front(server: Served) -> None:
    await has_finished(server, 10, model="far")
    (process,) = server.processes_of("model-server")
    for line in ("one", "two"):
        process.print(line)
        await trio.sleep(1)
        for _ in FRONTS:
            logs = await server.fetch("/models/far/logs")
            assert line in logs.body.decode(), logs
    shown = {each["model"]: each for each in await server.get_json("/running")}["far"]
    assert shown["output"][-2:] == ["one", "two"], shown


@behaviour({}, fronts=TWO)
async def time_to_live_of_a_model_is_set_and_shown_by_any_front(server: Served) -> None:
    generate = {"model": "m", "prompt": "a", "stream": False, "keep_alive": 5, "options": {"num_predict": 2}}
    assert (await server.fetch("/api/generate", generate)).status == 200
    shown = [await server.get_json("/api/ps") for _ in FRONTS]
    assert shown[0]["models"][0]["expires_at"][:16] == shown[1]["models"][0]["expires_at"][:16]
    await trio.sleep(3)
    assert (await server.states())["m"] == "up"
    await trio.sleep(3)
    assert (await server.states())["m"] == "down"


@behaviour({"models": {"m": None}, "nodes": [RELAY_NODE]}, fronts=TWO)
async def waiting_job_is_told_its_place_by_the_dispatcher(server: Served) -> None:
    server.upstream.delay_s = 60
    await server.until(lambda: server.upstream.times)
    for _ in range(3):
        server.complete(model="far")
        await trio.sleep(0.1)
    estimates = [await server.get_json("/queue/estimate?model=far") for _ in FRONTS]
    assert [estimate["position"] for estimate in estimates] == [3, 3]


@behaviour({}, fronts=TWO)
async def several_fronts_keep_no_responses(server: Served) -> None:
    response_id = await created(server)
    assert [await status(server, response_id) for _ in FRONTS] == [404, 404]


@behaviour(LIMITED, fronts=TWO)
async def usage_of_a_key_is_shown_by_every_front(server: Served) -> None:
    for used in (1, 2, 3):
        assert (await server.complete(key="k1", tokens=2).done()).status == 200
        await trio.sleep(0.5)
        answers = [await server.fetch("/v1/models", key="k1") for _ in FRONTS]
        remaining = [int(answer.headers["x-ratelimit-remaining-requests"]) for answer in answers]
        assert remaining == [9 - used] * 2


# Any process may die ---------------------------------------------------------------------------------------


@behaviour(LIMITED, fronts=TWO)
async def front_that_dies_gives_back_its_seats_and_charges(server: Served) -> None:
    job = server.complete(key="k1", tokens=200)
    await trio.sleep(0.5)
    assert (await server.complete(key="k1").done()).status == 429
    await kill_front_of(server, job)
    await trio.sleep(0.5)
    await has_finished(server, 2, key="k1")


@behaviour({"models": {"m": {"slots": 2}}}, fronts=TWO)
async def counts_of_a_front_that_dies_stay_in_the_totals(server: Served) -> None:
    for _ in FRONTS:
        assert (await server.complete(tokens=5).done()).status == 200
    job = server.complete(tokens=500)
    await trio.sleep(2)
    assert await metric(server, "vllm:num_requests_running") == [1, 1]
    await kill_front_of(server, job)
    await trio.sleep(3)
    assert await metric(server, "vllm:num_requests_running") == [0, 0]
    totals = await metric(server, "fairlead_generated_tokens_total")
    assert totals == [totals[0]] * 2
    assert totals[0] > 20, "also what the job had generated"
    server.kill("dispatcher 1")
    await trio.sleep(5)
    assert await metric(server, "fairlead_generated_tokens_total") == totals


@behaviour({}, fronts=TWO)
async def front_that_dies_is_replaced(server: Served) -> None:
    (address,) = server.system.network.listeners
    for name in FRONTS:
        server.kill(name)
    await trio.sleep(5)
    assert server.system.network.listeners == [address]
    assert [len(server.processes_of(f"front {number}")) for number in (3, 4)] == [1, 1]
    for _ in FRONTS:
        await has_finished(server, 2)


@behaviour({"models": {"m": {"slots": 1}, "k": {"path": "DEMO"}}} | LIMITED, fronts=TWO)
async def dispatcher_that_dies_is_replaced_and_jobs_and_models_go_on(server: Served) -> None:
    running = server.complete(key="k1", tokens=60)
    await trio.sleep(0.5)
    server.kill("dispatcher 1")
    await trio.sleep(0.1)
    assert (await server.fetch("/ready")).status == 503
    await trio.sleep(3)
    assert len(server.processes_of("dispatcher 2")) == 1
    assert (await server.fetch("/ready")).status == 200
    assert (await server.get_json("/queue", key="k1"))["running"] == 1
    assert (await server.complete(key="k1").done()).status == 429, "the running job is charged still"
    assert (await running.done()).status == 200
    await has_finished(server, 2, key="k1")
    assert len(server.engine.specs) == 1, "the model has its process still"
    await has_finished(server, 5, key="k1", model="k")
    assert len(server.engine.specs) == 2


@behaviour({}, fronts=TWO)
async def waiting_jobs_keep_their_order_when_the_dispatcher_dies(server: Served) -> None:
    jobs = [server.complete(tokens=30, user="A")]
    for _ in range(6):
        await trio.sleep(0.1)
        jobs.append(server.complete(tokens=1, user="A"))
    server.kill("dispatcher 1")
    assert [(await job.done()).status for job in jobs] == [200] * 7
    ends = [job.ended_s for job in jobs]
    assert ends == sorted(ends)


@behaviour({"models": {"k": {"path": "DEMO", "preload": True}}}, fronts=TWO)
async def dispatcher_that_starts_ends_models_that_are_not_configured_any_more(server: Served) -> None:
    assert len(server.processes_of("fairlead.engine.worker.main")) == 2
    server.rewrite(file_with({}))
    for _ in range(12):  # no dispatcher lives long enough to hear of the reload
        for process in server.processes_of("fairlead.server.processes.main"):
            if process.args[-2].startswith("dispatcher"):
                process.send_signal(signal.SIGKILL)
        await trio.sleep(0.3)
    await trio.sleep(15)
    assert len(server.processes_of("fairlead.engine.worker.main")) == 1
    assert await server.states() == {"m": "up"}


def engine_of(server: Served) -> Any:
    (process,) = server.processes_of("fairlead.engine.worker.main")
    return process


@behaviour({}, fronts=TWO)
async def model_that_dies_is_replaced_and_its_jobs_run_again(server: Served) -> None:
    jobs = [server.complete(tokens=30) for _ in FRONTS]
    await trio.sleep(1)
    engine_of(server).send_signal(signal.SIGKILL)
    assert [(await job.done()).status for job in jobs] == [200, 200]
    (shown,) = await server.get_json("/running")
    assert shown["counts"]["restarts"] == 1, shown
    died = [event for event in server.log if event["event"] == "model died"]
    assert "SIGKILL" in died[-1]["reason"], died


@behaviour(COMMAND, fronts=TWO)
async def command_that_dies_is_replaced(server: Served) -> None:
    await has_finished(server, 10, model="far")
    (process,) = server.processes_of("model-server")
    process.send_signal(signal.SIGKILL)
    await server.until(lambda: server.processes_of("model-server") not in ([], [process]))
    for _ in FRONTS:
        await has_finished(server, 10, model="far")


@behaviour({"apiKeys": [{"key": "k1"}]}, fronts=TWO)
async def process_that_starts_after_a_reload_has_the_new_configuration(server: Served) -> None:
    document = {"apiKeys": [{"key": "k2"}], "models": {"k": {"path": "DEMO"}}}
    assert await server.reload(file_with(document)) == []
    for name in (*FRONTS, "dispatcher 1"):
        server.kill(name)
    await trio.sleep(8)
    for _ in FRONTS:
        assert (await server.complete(key="k1").done()).status == 401
        await has_finished(server, 5, key="k2", model="k")
