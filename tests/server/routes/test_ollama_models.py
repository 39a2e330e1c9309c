"""Ollama's routes about models: lists, descriptions, what is not served, and errors below /api/."""

import json
import struct
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest

from fairlead.base.config import ApiKey, CommandConfig, SelectorConfig
from fairlead.dialects.ollama import shapes as ollama_shapes
from fairlead.language.text.embedding import EmbeddingSettings
from fairlead.router.fleet.status import ModelStatus
from fairlead.server.routes.ollama import OLLAMA_VERSION
from fake_fleet import FakeFleet
from server.routes.conftest import client_of, small_model
from server.routes.written_answers import OPENED

UNSERVED = [
    *(("POST", f"/api/{name}") for name in ("pull", "push", "create", "copy", "blobs/sha256:12")),
    ("DELETE", "/api/delete"),
]


def read(reply, kind):
    assert reply.status == 200, reply.body
    return msgspec.json.decode(reply.body, type=kind, strict=True)


def with_weights(directory: Path) -> Path:
    """Add a file of two tensors to a model's directory."""
    tensors = {
        "a": {"dtype": "BF16", "shape": [1000, 300], "data_offsets": [0, 600_000]},
        "b": {"dtype": "F32", "shape": [7], "data_offsets": [600_000, 600_028]},
        "__metadata__": {"format": "pt"},
    }
    header = json.dumps(tensors).encode()
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 600_028)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"model_type": "llama", "hidden_size": 64}))
    return directory


@pytest.fixture
def stored(tmp_path):
    """A model with weights, and a template that opens the reasoning."""
    made = small_model(tmp_path, OPENED)
    return replace(made, created=int(with_weights(tmp_path).stat().st_mtime) + 1)


# Lists ------------------------------------------------------------------------------------------------


async def test_tags_list_what_v1_models_lists(client_with, model):
    fleet = FakeFleet(["small"], ["remote"], lists_aliases=True)
    fleet.statuses = [msgspec.structs.replace(one, aliases=("tiny",)) for one in fleet.models()[:1]]
    fleet.statuses += FakeFleet([], ["remote"]).models()
    selectors = {"any": SelectorConfig(strategy="pin", targets=("small", "remote"))}
    client = client_with(fleet=fleet, selectors=selectors)
    listed = read(await client.get("/api/tags"), ollama_shapes.OllamaModels).models
    names = [one["id"] for one in (await client.get("/v1/models")).json["data"]]
    assert [one.name for one in listed] == [one.model for one in listed] == names
    assert names == ["small", "remote", "tiny", "any"]
    assert all(len(one.digest) == 64 for one in listed)
    assert listed[0].digest == listed[2].digest != listed[1].digest


async def test_tags_tell_what_is_known_of_the_files(stored):
    (listed,) = read(await client_of(stored).get("/api/tags"), ollama_shapes.OllamaModels).models
    assert listed.size == 600_028
    details = listed.details
    assert (details.family, details.families, details.format) == ("llama", ["llama"], "safetensors")
    assert (details.parameter_size, details.quantization_level) == ("300K", "BF16")


async def test_lists_have_only_the_models_of_the_key(client_with, model):
    key = ApiKey("sk-1", models=("small",))
    client = client_with(key, models={"small": model, "other": model})
    for path in ("/api/tags", "/api/ps"):
        reply = await client.get(path, headers={"Authorization": "Bearer sk-1"})
        assert [one["name"] for one in reply.json["models"]] == ["small"]
        assert (await client.get(path)).status == 401


async def test_ps_lists_the_models_that_are_loaded_here(client_with, model):
    def status(name, state, kind="engine"):
        return ModelStatus(model=name, kind=kind, node=name, state=state, memory_bytes=5000)

    states = ("ready", "draining", "loading", "stopping", "stopped", "failed")
    fleet = FakeFleet(expiry_s=300.0)
    fleet.statuses = [status("small", "ready"), *(status(state, state) for state in states)]
    fleet.statuses += [status("remote", "ready", "remote"), status("command", "ready", "command")]
    client = client_with(fleet=fleet)
    listed = read(await client.get("/api/ps"), ollama_shapes.OllamaRunningModels).models
    assert [one.name for one in listed] == ["small", "ready", "draining", "command"]
    first = listed[0]
    assert (first.size, first.size_vram, first.context_length) == (5000, 0, model.max_model_len)
    expected = datetime.now(UTC) + timedelta(seconds=300)
    assert abs(datetime.fromisoformat(first.expires_at) - expected) < timedelta(seconds=60)


async def test_model_that_stays_loaded_expires_in_a_hundred_years(client):
    (listed,) = (await client.get("/api/ps")).json["models"]
    assert datetime.fromisoformat(listed["expires_at"]).year > datetime.now(UTC).year + 90


# Descriptions -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("named", [{"model": "small"}, {"name": "tiny"}, {"model": "small:latest"}])
async def test_show_describes_a_model(stored, named):
    shown = read(await client_of(stored).post("/api/show", named), ollama_shapes.OllamaShown)
    assert shown.capabilities == ["completion", "tools", "thinking"]
    assert shown.template == OPENED
    assert shown.parameters.split() == ["temperature", "0.7", "top_k", "20"]
    assert shown.details.family == "llama"
    assert shown.model_info == {
        "general.architecture": "llama",
        "general.basename": "small",
        "general.parameter_count": 300_007,
        "llama.context_length": 4096,
        "llama.embedding_length": 64,
    }


async def test_show_tells_what_a_model_can_do(client_with, model):
    embedder = replace(model, embedding=EmbeddingSettings(4, normalized=False))
    plain = replace(model, chat_template=None)
    command = CommandConfig(name="command", cmd=("x",), capabilities={"tools": True, "vision": False})
    fleet = FakeFleet(["small", "embedder", "plain"], ["command", "remote"], configs=[command])
    client = client_with(models={"small": model, "embedder": embedder, "plain": plain}, fleet=fleet)
    found = {}
    for name in ("small", "embedder", "plain", "command", "remote"):
        found[name] = (await client.post("/api/show", {"model": name})).json["capabilities"]
    assert found == {
        "small": ["completion", "tools"],
        "embedder": ["embedding"],
        "plain": ["completion"],
        "command": ["completion", "tools"],
        "remote": ["completion"],
    }


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({}, 400, "model: must be given"),
        ({"model": 7}, 400, "model: expected"),
        ({"model": "small", "verbose": 1}, 400, "verbose: expected"),
        ({"model": "nothing"}, 404, "model 'nothing' not found: it is not served here"),
        (b"[]", 400, "the body"),
    ],
)
async def test_show_refuses_what_it_cannot_describe(client, body, status, message):
    reply = await client.post("/api/show", body)
    assert (reply.status, set(reply.json)) == (status, {"error"})
    assert reply.json["error"].startswith(message)


async def test_version_is_one_that_clients_accept(client):
    assert (await client.get("/api/version")).json == {"version": OLLAMA_VERSION}
    assert tuple(map(int, OLLAMA_VERSION.split("."))) >= (0, 6, 4)


async def test_root_answers_clients_that_look_for_a_server(client):
    assert (await client.get("/")).status == 200
    assert (await client.send("HEAD", "/", b"")).status == 200


# Errors -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "path"), UNSERVED)
async def test_route_that_changes_models_is_not_served(client, method, path):
    reply = await client.send(method, path, b'{"model": "small"}')
    message = f"{path} is not served: the server's configuration has its models"
    assert (reply.status, reply.json) == (501, {"error": message})


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/api/nothing", 404),
        ("POST", "/api/chat/more", 404),
        ("GET", "/api/chat", 405),
        ("POST", "/api/tags", 405),
        ("HEAD", "/api/blobs/sha256:12", 405),
    ],
)
async def test_errors_of_routing_have_the_same_form(client, method, path, status):
    reply = await client.send(method, path, b"{}")
    assert reply.status == status
    assert method == "HEAD" or isinstance(reply.json["error"], str)


async def test_other_errors_below_api_have_the_same_form(client_with):
    client = client_with(ApiKey("sk-1"))
    for reply in (
        await client.get("/api/tags"),
        await client.get("/api/nothing"),
        await client.post("/api/pull", {}),
    ):
        assert (reply.status, set(reply.json)) == (401, {"error"})
        assert isinstance(reply.json["error"], str)


async def test_too_large_a_body_is_refused_in_the_same_form(client):
    reply = await client.post("/api/chat", b" " * (16 * 1024 * 1024 + 1))
    assert (reply.status, set(reply.json)) == (413, {"error"})
