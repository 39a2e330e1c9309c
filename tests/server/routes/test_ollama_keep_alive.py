"""Requests without content, which load and unload models, and `keep_alive`, which sets how long they stay."""

from math import inf

import pytest

from fairlead.base.config import ApiKey, SelectorConfig
from fairlead.base.errors import InvalidRequest, LoadFailed, QueueFull
from fairlead.dialects.ollama.fields import keep_alive_s
from fairlead.dialects.ollama.shapes import OllamaChatAnswer, OllamaText
from fake_fleet import FakeFleet
from server.routes.ollama_lines import CHAT, GENERATE, checked, lines_of
from server.routes.remote_responses import complete_response

MESSAGES = [{"role": "user", "content": "hello"}]
FOREIGN = {"Host": "models.example.com"}


@pytest.fixture
def fleet(client):
    return client.app._jobs.services.fleet


def body(**fields):
    return {"model": "small", "messages": MESSAGES, **fields}


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (None, None),
        (0, 0),
        (300, 300),
        (1.5, 1.5),
        (-1, inf),
        ("0", 0),
        ("5m", 300),
        ("1h30m", 5400),
        ("1.5s", 1.5),
        ("250ms", 0.25),
        ("-1", inf),
        ("-1m", inf),
        ("90", 90),
        (1e300, inf),
    ],
)
def test_keep_alive_is_a_number_of_seconds_or_a_duration(value, seconds):
    assert keep_alive_s(value) == seconds


@pytest.mark.parametrize("value", ["", "5 m", "m", "5x", "five", "5m5", "1h 5m", "٥m", "nan", "inf"])
def test_other_text_is_refused(value):
    with pytest.raises(InvalidRequest, match=r"^keep_alive: must be a number of seconds or a duration"):
        keep_alive_s(value)


# Without content --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "fields", "kind"),
    [
        (CHAT, {}, OllamaChatAnswer),
        (CHAT, {"messages": []}, OllamaChatAnswer),
        (CHAT, {"messages": None, "stream": False}, OllamaChatAnswer),
        (GENERATE, {}, OllamaText),
        (GENERATE, {"prompt": ""}, OllamaText),
        (GENERATE, {"prompt": None, "system": "Be brief."}, OllamaText),
    ],
)
async def test_request_without_content_loads_the_model(client, fleet, path, fields, kind):
    reply = await client.post(path, {"model": "tiny", **fields})
    assert (reply.status, reply.headers["content-type"]) == (200, "application/json")
    assert reply.json.pop("created_at").endswith("Z")
    answer = {name: value for name, value in reply.json.items() if name != "created_at"}
    content = {"message": {"role": "assistant", "content": ""}} if path == CHAT else {"response": ""}
    assert answer == {"model": "small", **content, "done": True, "done_reason": "load"}
    assert fleet.calls == [("load", "small")]
    assert client.gateway.jobs == []


async def test_with_a_keep_alive_of_zero_it_unloads_the_model_and_waiting_requests_stay(client, fleet):
    reply = await client.post(GENERATE, {"model": "small", "keep_alive": 0})
    assert (reply.json["done"], reply.json["done_reason"]) == (True, "unload")
    assert fleet.calls == [("unload", "small", False, "wait")]


async def test_with_another_keep_alive_it_loads_and_keeps_the_model(client, fleet):
    await client.post(GENERATE, {"model": "small", "keep_alive": "5m"})
    assert fleet.calls == [("load", "small"), ("keep", "small", 300.0)]


async def test_load_that_fails_is_an_error(client, fleet):
    fleet.refusal = LoadFailed("no such file")
    reply = await client.post(CHAT, {"model": "small"})
    assert (reply.status, reply.json) == (502, {"error": "no such file"})


async def test_model_of_another_server_is_loaded_by_that_server(client_with):
    fleet = FakeFleet(["small"], ["remote"], dialects=("ollama",))
    client = client_with(fleet=fleet, gateway_script=complete_response)
    reply = await client.post(CHAT, {"model": "remote", "messages": []})
    assert reply.status == 200
    job = client.gateway.job
    assert (job.relay.path, job.relay.stream) == (CHAT, False)


async def test_model_of_a_server_with_another_api_is_loaded_when_it_has_requests(client_with):
    fleet = FakeFleet(["small"], ["remote"], dialects=("openai",))
    client = client_with(fleet=fleet)
    reply = await client.post(CHAT, {"model": "remote", "keep_alive": 60})
    assert (reply.status, reply.json["done_reason"]) == (200, "load")
    fleet.refusal = InvalidRequest("the model remote is on another server", param="model")
    reply = await client.post(CHAT, {"model": "remote", "keep_alive": 0})
    assert (reply.status, reply.json["error"]) == (400, "model: the model remote is on another server")
    assert client.gateway.jobs == []


async def test_only_models_of_the_key_are_loaded(client_with):
    client = client_with(ApiKey("sk-1", models=("other",)))
    reply = await client.post(CHAT, {"model": "small"}, headers={"Authorization": "Bearer sk-1"})
    assert (reply.status, set(reply.json)) == (403, {"error"})


# With content -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("value", "seconds"), [(0, 0.0), ("10m", 600.0), (-1, inf)])
async def test_model_is_kept_from_the_end_of_the_answer(client, fleet, stream, value, seconds):
    reply = await client.post(CHAT, body(stream=stream, keep_alive=value))
    assert reply.status == 200
    assert fleet.calls == [("keep", "small", seconds)]


async def test_without_a_keep_alive_nothing_changes(client, fleet):
    lines_of(await client.post(CHAT, body()))
    assert fleet.calls == []


async def test_refused_request_changes_nothing(client, fleet):
    assert (await client.post(CHAT, body(keep_alive=0, think="a lot"))).status == 400
    assert (await client.post(CHAT, body(keep_alive="soon"))).status == 400
    assert fleet.calls == []


async def test_keep_alive_of_a_request_that_the_queue_refuses_counts(client, fleet):
    client.gateway.refusal = QueueFull("no room")
    assert (await client.post(CHAT, body(keep_alive=60))).status == 429
    assert fleet.calls == [("keep", "small", 60.0)]


async def test_keep_alive_of_a_selector_concerns_no_model(client_with):
    fleet = FakeFleet(["small"])
    client = client_with(fleet=fleet, selectors={"any": SelectorConfig(strategy="pin", targets=("small",))})
    assert (await client.post(CHAT, body(model="any", keep_alive=0))).status == 200
    assert fleet.calls == []


async def test_page_of_another_server_may_not_unload_or_keep_a_model(client_with):
    fleet = FakeFleet(["small"])
    client = client_with(ApiKey("sk-1"), fleet=fleet)
    headers = {"Authorization": "Bearer sk-1", **FOREIGN}
    reply = await client.post(CHAT, body(keep_alive=0, stream=False), headers=headers)
    checked(reply.body, OllamaChatAnswer)
    unload = await client.post(CHAT, {"model": "small", "keep_alive": 0}, headers=headers)
    assert (unload.status, set(unload.json)) == (403, {"error"})
    load = await client.post(CHAT, {"model": "small", "keep_alive": 60}, headers=headers)
    assert (load.status, fleet.calls) == (200, [("load", "small")])
