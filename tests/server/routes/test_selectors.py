"""Selectors, which are names for several models: the choice of a model, permissions, and listing."""

import json

import pytest
import trio
import trio.testing

from fairlead.base.config import ApiKey, SelectorConfig, SelectorSettings
from fairlead.base.errors import NodeFailed
from fairlead.router.fleet.status import ModelStatus
from fake_fleet import FakeFleet
from server.routes.remote_responses import ALL, CHAT, complete_response, event_stream, relay_body

WARM = SelectorConfig("warm", ("gone", "small", "b", "slow"))
PIN = SelectorConfig("pin", ("gone", "b", "small"))
SPILL = SelectorConfig("spillover", ("b", "c", "d"), SelectorSettings(2))


class SelectorServer:
    """A client of an application with an engine's model, two commands and a remote node."""

    def __init__(self, client_with, *api_keys: ApiKey, **selectors: SelectorConfig) -> None:
        self.statuses = {
            "small": ModelStatus(model="small", kind="engine", node="engine:small", state="stopped"),
            "b": ModelStatus(model="b", kind="command", node="command:b", state="stopped"),
            "c": ModelStatus(model="c", kind="command", node="command:c", state="stopped"),
            "d": ModelStatus(model="d", kind="remote", node="remote", state="ready"),
        }
        self.selectors = selectors
        self.fleet = FakeFleet(statuses=list(self.statuses.values()))
        self.client = client_with(
            *api_keys,
            fleet=self.fleet,
            aliases={"tiny": "small", "slow": "c"},
            selectors=self.selectors,
            gateway_script=complete_response,
        )
        self.jobs = self.client.gateway.jobs

    def becomes(self, model: str, state: str, problem: str | None = None) -> None:
        status = self.statuses[model]
        self.statuses[model] = ModelStatus(
            model=model, kind=status.kind, node=status.node, state=state, problem=problem
        )
        self.fleet.statuses[:] = self.statuses.values()

    async def node_of_answer(self, name: str, key: ApiKey | None = None, path: str = CHAT):
        """Return the model of the job, or the status and code of the refusal."""
        headers = {} if key is None else {"Authorization": f"Bearer {key.key}"}
        reply = await self.client.post(path, relay_body(model=name), headers=headers)
        return self.jobs[-1].model if reply.status == 200 else (reply.status, reply.error["code"])


# Choice of the model ---------------------------------------------------------------------------------------


async def test_warm_chooses_a_loaded_model_and_otherwise_the_first_that_is_served(client_with):
    server = SelectorServer(client_with, w=WARM)
    server.becomes("b", "loading")
    assert await server.node_of_answer("w") == "b"
    server.becomes("c", "ready")
    assert await server.node_of_answer("w") == "c"
    server.becomes("b", "failed", "no such file")
    server.becomes("c", "draining")
    assert await server.node_of_answer("w") == "small"


async def test_pin_always_chooses_the_first_that_is_served(client_with):
    server = SelectorServer(client_with, p=PIN)
    server.becomes("b", "failed", "no such file")
    server.becomes("small", "ready")
    assert await server.node_of_answer("p") == "b"


@pytest.mark.parametrize("path", [path for path in ALL if path != CHAT])
async def test_every_route_has_selectors_and_the_server_gets_its_models_name(client_with, path):
    server = SelectorServer(client_with, p=PIN)
    assert await server.node_of_answer("p", path=path) == "b"
    request = json.loads(relay_body(model="p"))
    assert request | {"model": "b"} == json.loads(server.jobs[-1].relay.body)


async def test_target_may_be_an_alias_and_is_requested_by_it(client_with):
    # An alias may have parameters of its own.
    server = SelectorServer(client_with, p=SelectorConfig("pin", ("slow",)))
    assert await server.node_of_answer("p") == "c"
    assert json.loads(server.jobs[-1].relay.body)["model"] == "slow"


async def test_response_of_an_engines_model_has_its_own_name(client_with, chat):
    server = SelectorServer(client_with, p=SelectorConfig("pin", ("tiny",)))
    server.client.gateway.script = client_with().gateway.script
    reply = await server.client.post(CHAT, chat(model="p"))
    assert "small" == reply.json["model"] == server.jobs[-1].model


async def test_loadable_model_is_preferred_to_one_on_an_unresponsive_node(client_with):
    server = SelectorServer(
        client_with, w=SelectorConfig("warm", ("d", "b")), s=SelectorConfig("spillover", ("d", "b"))
    )
    assert [await server.node_of_answer(name) for name in "ws"] == ["d", "d"]
    server.becomes("d", "stopped", "it does not answer its probes")
    assert [await server.node_of_answer(name) for name in "ws"] == ["b", "b"]


async def test_engines_model_that_is_being_removed_is_skipped(client_with):
    server = SelectorServer(client_with, p=SelectorConfig("pin", ("old", "b")))
    server.fleet.statuses.append(ModelStatus(model="old", kind="engine", node="engine:old", state="ready"))
    assert await server.node_of_answer("p") == "b"


async def test_selector_without_served_targets_is_not_found(client_with):
    server = SelectorServer(client_with, none=SelectorConfig("warm", ("gone", "absent")))
    reply = await server.client.post(CHAT, relay_body(model="none"))
    assert (reply.status, reply.error["code"], reply.error["param"]) == (404, "model_not_found", "model")
    assert reply.error["message"] == "no model that 'none' stands for is served here"
    assert server.jobs == []


async def test_if_all_targets_failed_the_first_is_tried_and_its_error_returned(client_with):
    server = SelectorServer(client_with, w=WARM, s=SPILL)
    for model in server.statuses:
        server.becomes(model, "failed", "no such file")
    server.client.gateway.refusal = NodeFailed("it does not start")
    for name, first in (("w", "small"), ("s", "b")):
        reply = await server.client.post(CHAT, relay_body(model=name))
        assert (reply.status, server.jobs[-1].model) == (502, first)


# Spillover -------------------------------------------------------------------------------------------------


async def test_jobs_spill_over_while_others_run_and_return_when_these_have_ended(client_with):
    server = SelectorServer(client_with, s=SPILL)
    server.client.gateway.script = lambda job: [*complete_response(job), None]
    left = trio.Event()
    async with trio.open_nursery() as clients:
        for _ in range(6):
            clients.start_soon(lambda: server.client.post(CHAT, relay_body(model="s"), disconnected=left))
            await trio.testing.wait_all_tasks_blocked()
        assert [job.model for job in server.jobs] == ["b", "b", "c", "c", "d", "d"]
        left.set()
    server.client.gateway.script = complete_response
    assert [await server.node_of_answer("s") for _ in range(3)] == ["b"] * 3


@pytest.mark.parametrize("stream", [False, True])
async def test_disconnect_while_waiting_frees_a_place(client_with, stream, autojump_clock):
    server = SelectorServer(client_with, s=SPILL)
    server.client.gateway.wait_s = 100.0
    left = [trio.Event() for _ in range(3)]
    async with trio.open_nursery() as clients:
        for event in left:
            clients.start_soon(
                lambda event=event: server.client.post(
                    CHAT, relay_body(model="s", stream=stream), disconnected=event
                )
            )
            await trio.sleep(1)
        assert [job.model for job in server.jobs] == ["b", "b", "c"]
        left[0].set()
        await trio.sleep(1)
        clients.start_soon(lambda: server.client.post(CHAT, relay_body(model="s"), disconnected=left[1]))
        await trio.sleep(1)
        assert server.jobs[-1].model == "b"
        for event in left:
            event.set()
    server.client.gateway.wait_s = 0.0
    assert [await server.node_of_answer("s") for _ in range(3)] == ["b"] * 3


@pytest.mark.parametrize("body", [{"n": 1000}, {"stream": True, "n": 1000}])
async def test_request_that_is_refused_after_its_choice_takes_no_place(client_with, body):
    server = SelectorServer(client_with, s=SPILL)
    for _ in range(5):
        assert (await server.client.post(CHAT, relay_body(model="s", **body))).status == 400
    server.client.gateway.refusal = NodeFailed("gone")
    for _ in range(5):
        assert (await server.client.post(CHAT, relay_body(model="s"))).status == 502
    server.client.gateway.refusal = None
    assert [await server.node_of_answer("s") for _ in range(3)] == ["b"] * 3


async def test_stream_holds_its_place_to_its_end(client_with):
    server = SelectorServer(client_with, s=SPILL)
    server.client.gateway.script = lambda job: [*event_stream(job)[:2], None]
    left = trio.Event()
    async with trio.open_nursery() as clients:
        for _ in range(3):
            clients.start_soon(
                lambda: server.client.post(CHAT, relay_body(model="s", stream=True), disconnected=left)
            )
            await trio.testing.wait_all_tasks_blocked()
        assert [job.model for job in server.jobs] == ["b", "b", "c"]
        left.set()


async def test_running_jobs_of_a_changed_or_removed_selector_end_normally(client_with):
    server = SelectorServer(client_with, s=SPILL)
    server.client.gateway.script = lambda job: [*complete_response(job), None]
    left = trio.Event()
    async with trio.open_nursery() as clients:

        async def node_of_answer() -> None:
            clients.start_soon(lambda: server.client.post(CHAT, relay_body(model="s"), disconnected=left))
            await trio.testing.wait_all_tasks_blocked()

        await node_of_answer()
        server.selectors["s"] = SelectorConfig("spillover", ("c", "b"))
        await node_of_answer()
        await node_of_answer()
        server.selectors["s"] = PIN
        await node_of_answer()
        assert [job.model for job in server.jobs[:2] + server.jobs[3:]] == ["b", "c", "b"]
        del server.selectors["s"]
        assert (await server.client.post(CHAT, relay_body(model="s"))).status == 404
        left.set()
    server.selectors["s"] = SPILL
    server.client.gateway.script = complete_response
    assert [await server.node_of_answer("s") for _ in range(3)] == ["b"] * 3


# Permissions -----------------------------------------------------------------------------------------------

ALL_OF_IT = ApiKey("sk-selector", models=("p", "s"))
SOME = ApiKey("sk-some", models=("slow",))
NONE = ApiKey("sk-none", models=("d",))


async def test_key_for_a_selector_may_use_its_targets_through_it_only(client_with):
    server = SelectorServer(client_with, ALL_OF_IT, SOME, NONE, p=PIN)
    assert await server.node_of_answer("p", ALL_OF_IT) == "b"
    assert await server.node_of_answer("b", ALL_OF_IT) == (403, "forbidden")


async def test_other_keys_get_those_targets_that_they_may_use(client_with):
    server = SelectorServer(client_with, ALL_OF_IT, SOME, NONE, s=SPILL, p=PIN)
    server.becomes("b", "ready")
    assert await server.node_of_answer("s", SOME) == "c"
    assert await server.node_of_answer("s", NONE) == "d"
    assert await server.node_of_answer("p", SOME) == (403, "forbidden")
    reply = await server.client.post(CHAT, relay_body(model="p"), headers={"x-api-key": NONE.key})
    assert reply.error["message"] == "this API key may use no model that 'p' stands for"


# Listing ---------------------------------------------------------------------------------------------------


async def listed(server: SelectorServer, key: ApiKey | None = None) -> dict[str, dict]:
    headers = {} if key is None else {"x-api-key": key.key}
    cards = (await server.client.get("/v1/models", headers=headers)).json["data"]
    return {card["id"]: card for card in cards}


async def test_selectors_are_listed_with_their_description(client_with):
    configured = SelectorConfig(
        "spillover",
        ("b", "gone", "slow"),
        SelectorSettings(3),
        title=" Best ",
        description="for code",
        metadata={"purpose": "coding", "type": "mine"},
    )
    server = SelectorServer(
        client_with, best=configured, p=PIN, hidden=SelectorConfig("pin", ("b",), unlisted=True)
    )
    cards = await listed(server)
    assert list(cards) == ["small", "b", "c", "d", "best", "p"]
    about = {"purpose": "coding", "type": "selector", "strategy": "spillover", "targets": ["b", "slow"]}
    assert {"name": "Best", "description": "for code", "meta": {"llamaswap": about | {"spillover": 3}}} == {
        key: cards["best"][key] for key in ("name", "description", "meta")
    }
    assert (cards["best"]["object"], cards["best"]["owned_by"]) == ("model", "fairlead")
    assert {"name", "description"}.isdisjoint(cards["p"])
    assert cards["best"] == (await server.client.get("/v1/models/best")).json
    assert (await server.client.get("/v1/models/hidden")).json["id"] == "hidden"


async def test_key_can_list_only_selectors_and_targets_that_it_may_use(client_with):
    server = SelectorServer(
        client_with, ALL_OF_IT, SOME, NONE, s=SPILL, p=PIN, none=SelectorConfig("pin", ("gone",))
    )
    assert list(await listed(server, SOME)) == ["c", "s"]
    assert (await listed(server, SOME))["s"]["meta"]["llamaswap"]["targets"] == ["c"]
    assert sorted(await listed(server, ALL_OF_IT)) == ["p", "s"]
    for name, status in (("p", 403), ("none", 404)):
        reply = await server.client.get(f"/v1/models/{name}", headers={"x-api-key": SOME.key})
        assert status == reply.status


async def test_estimate_and_tokens_are_those_of_the_model_that_a_job_would_get(client_with):
    server = SelectorServer(
        client_with, p=SelectorConfig("pin", ("tiny",)), remote=SelectorConfig("pin", ("b",))
    )
    assert (await server.client.get("/queue/estimate?model=p")).status == 200
    tokens = {"prompt": "hello"}
    of_model = (await server.client.post("/tokenize", tokens | {"model": "small"})).json
    assert of_model == (await server.client.post("/tokenize", tokens | {"model": "p"})).json
    assert (await server.client.post("/tokenize", tokens | {"model": "remote"})).status == 400


async def test_estimate_or_a_lookup_takes_no_place(client_with):
    server = SelectorServer(client_with, s=SPILL)
    for _ in range(5):
        assert (await server.client.get("/queue/estimate?model=s")).status == 200
        assert (await server.client.get("/v1/models/s")).status == 200
    assert await server.node_of_answer("s") == "b"


@pytest.mark.parametrize("path", ["/models/load", "/models/unload"])
async def test_selector_is_neither_loaded_nor_unloaded(client_with, path):
    server = SelectorServer(client_with, p=PIN)
    reply = await server.client.post(path, {"model": "p"})
    assert (reply.status, reply.error["param"]) == (400, "model")
    assert reply.error["message"] == "model: 'p' stands for several models; name one"
    assert server.fleet.calls == []
