"""Scenarios for servers that jobs are relayed to: nodes, peers, and the filters and timeouts of commands."""

from collections.abc import Callable
from typing import Any

import trio

from settings.cases import setting
from settings.command_settings import command
from settings.served import NODE, Scenario, Served

URL = f"http://{NODE[0]}:{NODE[1]}"
UNUSED_URL = f"http://{NODE[0]}:8099"

Build = Callable[..., dict[str, Any]]


def node(**settings: object) -> dict[str, Any]:
    return {"nodes": [{"id": "n", "url": URL, "models": ["far"]} | settings]}


def peer(**settings: object) -> dict[str, Any]:
    return {"peers": {"p": {"proxy": URL, "models": ["far"]} | settings}}


# The sections of a file that name servers to relay to, each with a function that configures one.
SECTIONS: dict[str, Build] = {"models.COMMAND": command, "nodes[]": node, "peers.NAME": peer}
NODE_SECTIONS: dict[str, Build] = {"nodes[]": node, "peers.NAME": peer}


def section_setting(
    key: str, sections: dict[str, Build], **settings: object
) -> Callable[[Scenario], Scenario]:
    """Register one scenario for a key that several sections have."""

    def register(scenario: Scenario) -> Scenario:
        for section, build in sections.items():
            setting(f"{section}.{key}", build(**settings))(scenario)
        return scenario

    return register


async def post(server: Served, **more: object) -> dict[str, Any]:
    """Request a completion; return the document that the model's server received."""
    assert (await server.complete(model="far", **more).done()).status == 200
    return server.upstream.posted[-1].document


@section_setting("filters.stripParams", SECTIONS, filters={"stripParams": "top_p, stop"})
async def parameters_are_removed(server: Served) -> None:
    sent = await post(server, top_p=0.5, stop="x", seed=1)
    assert ("top_p" in sent, "stop" in sent, "seed" in sent) == (False, False, True)


@section_setting("filters.setParams", SECTIONS, filters={"setParams": {"seed": 7}})
async def parameters_are_set(server: Served) -> None:
    assert (await post(server)).get("seed") == 7


@section_setting("filters.setParamsByID", SECTIONS, filters={"setParamsByID": {"far": {"seed": 8}}})
async def parameters_are_set_by_model_name(server: Served) -> None:
    assert (await post(server)).get("seed") == 8


async def job_for_an_unreachable_node_is_refused_after_2_s(server: Served) -> None:
    job = server.complete(model="far")
    await trio.sleep(10)
    assert job.is_over, job
    answer = await job.done()
    assert answer.status in (502, 503, 504), answer


async def wait_until_up(server: Served) -> None:
    """Make sure that the model's server is up."""
    assert (await server.complete(model="far").done()).status == 200


@section_setting("timeouts.responseHeader", SECTIONS, timeouts={"responseHeader": 2})
async def node_without_a_response_times_out(server: Served) -> None:
    await wait_until_up(server)
    server.upstream.delay_s = 90
    await job_for_an_unreachable_node_is_refused_after_2_s(server)


@section_setting("timeouts.betweenBytes", SECTIONS, timeouts={"betweenBytes": 2})
async def node_that_stops_responding_times_out(server: Served) -> None:
    await wait_until_up(server)
    server.upstream.gap_s = 400
    await job_for_an_unreachable_node_is_refused_after_2_s(server)


@section_setting("timeouts.idleConn", SECTIONS, timeouts={"idleConn": 3})
async def idle_connection_is_not_reused(server: Served) -> None:
    for _ in range(2):  # each of two fronts has connections of its own
        await wait_until_up(server)
    await trio.sleep(0.1)
    connections_before = server.upstream.connections
    await trio.sleep(4.8)  # no longer than the time between two probes
    await wait_until_up(server)
    assert server.upstream.connections > connections_before


@section_setting("timeouts.connect", SECTIONS, timeouts={"connect": 2})
async def connecting_to_a_node_times_out(server: Served) -> None:
    await wait_until_up(server)
    server.system.network.unreachable |= {NODE[0], "127.0.0.1"}
    server.upstream.close_connections()
    await trio.sleep(0.1)
    await job_for_an_unreachable_node_is_refused_after_2_s(server)


@section_setting("answerBytes", {"models.COMMAND": command, "nodes[]": node}, answerBytes=1000)
async def bytes_of_an_answer_are_limited(server: Served) -> None:
    await wait_until_up(server)
    server.upstream.text = "x" * 2000
    assert (await server.complete(model="far").done()).status == 502


@section_setting("dialects", {"models.COMMAND": command, "nodes[]": node}, dialects=["openai"])
async def request_in_another_dialect_is_not_sent_as_it_is(server: Served) -> None:
    await wait_until_up(server)
    messages = [{"role": "user", "content": "hello"}]
    await server.fetch("/v1/messages", {"model": "far", "max_tokens": 5, "messages": messages})
    assert server.upstream.posted[-1].path != "/v1/messages"


@section_setting("apiKey", SECTIONS, apiKey="their-key")
async def node_receives_its_api_key(server: Served) -> None:
    await wait_until_up(server)
    assert server.upstream.posted[-1].headers.get("authorization") == "Bearer their-key"


@setting("nodes[].apiPath", node(apiPath="/v3"))
async def routes_of_a_node_are_below_the_path_of_its_api(server: Served) -> None:
    await wait_until_up(server)
    assert server.upstream.posted[-1].path == "/v3/completions"


@setting("nodes[].checkEndpoint", node(checkEndpoint="/ping"))
async def node_is_probed_at_this_path(server: Served) -> None:
    await wait_until_up(server)
    assert "/ping" in [request.path for request in server.upstream.received]


@section_setting("seats", NODE_SECTIONS, seats=3)
async def concurrent_jobs_of_a_node_are_limited(server: Served) -> None:
    await wait_until_up(server)
    server.upstream.delay_s = 2
    jobs = [server.complete(model="far") for _ in range(5)]
    assert [(await job.done()).status for job in jobs] == [200] * 5
    assert server.upstream.most_running == 3


@setting("nodes[].id", node(id="named"), alternative="other")
async def node_has_this_name(server: Served) -> None:
    assert "named" in [node["id"] for node in await server.get_json("/nodes")]


@setting("nodes[].url", node(), alternative=UNUSED_URL)
async def node_serves_jobs(server: Served) -> None:
    await trio.sleep(1)
    assert (await server.states())["far"] == "up"


@setting("peers.NAME.proxy", peer(), alternative=UNUSED_URL)
async def peer_serves_jobs(server: Served) -> None:
    await trio.sleep(1)
    assert (await server.states())["far"] == "up"


@setting("nodes[].models", node(models=["far"]))
async def node_serves_the_listed_models(server: Served) -> None:
    server.upstream.models = ("far", "other")
    await trio.sleep(6)
    assert (await server.complete(model="other").done()).status == 404
    await wait_until_up(server)


@setting("peers.NAME.models", peer(models=["far"]), alternative=["other"])
async def peer_serves_the_listed_models(server: Served) -> None:
    await trio.sleep(1)
    assert (await server.complete(model="far").done()).status == 200


@setting("nodes[].modelNames", node(modelNames={"far": "inner"}))
async def node_receives_its_own_model_names(server: Served) -> None:
    await trio.sleep(1)
    assert (await post(server))["model"] == "inner"
