"""Probes cost a server nothing, read its list of models in any form, and say what is wrong."""

import json
import shutil
from contextlib import suppress

import pytest
import structlog
import trio

from fairlead.base.config import ConfigError, HealthConfig, NodeConfig
from fairlead.nodes.remote_node import remote_node
from fairlead.nodes.server_probe import ProbeAnswer, models_of
from nodes.listening import RecordingListener, tls_contexts
from nodes.scripted import full_response, scripted

HEALTH = HealthConfig(interval_s=1, failures=2, timeout_s=1)
MODELS = {"object": "list", "data": [{"id": "m1"}, {"id": "m2"}]}


class Paths:
    """Answers each path as told, all others with 404. `asked`: the paths of all requests."""

    def __init__(self, **answers):
        self.answers = answers
        self.asked = []

    def __call__(self, request):
        path = request.split(b" ")[1].decode()
        self.asked.append(path)
        answer = self.answers.get(path.removeprefix("/").replace("/", "_"))
        return [full_response(b"{}", status="404 None") if answer is None else answer]


def listing(document, **more):
    return full_response(json.dumps(document).encode(), **more)


async def probed(paths, seconds=3.5, **settings):
    """Return the node's status after some probes."""
    config = NodeConfig(id="n", url="http://127.0.0.1:1", **settings)
    with scripted(paths):
        node = remote_node(config, RecordingListener(), HEALTH)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(node.run)
            await trio.sleep(seconds)
            status = node.status()
            nursery.cancel_scope.cancel()
    return status


async def test_server_with_a_list_of_models_is_never_asked_for_its_health(autojump_clock):
    paths = Paths(v1_models=listing(MODELS), health=full_response(b"generated with every model"))
    status = await probed(paths)
    assert (status.is_up, status.models, status.problem) == (True, ("m1", "m2"), None)
    assert set(paths.asked) == {"/v1/models"}


async def test_server_without_a_list_is_asked_for_its_health(autojump_clock):
    paths = Paths(health=full_response(b"ok"))
    status = await probed(paths, models=("m",))
    assert (status.is_up, status.models) == (True, ("m",))
    assert paths.asked == ["/v1/models", "/health", "/health", "/health", "/health"]


async def test_server_is_probed_at_the_endpoint_of_its_configuration_only(autojump_clock):
    paths = Paths(ping=full_response(b"pong"))
    assert (await probed(paths, models=("m",), check_endpoint="/ping")).is_up
    assert set(paths.asked) == {"/ping"}
    silent = Paths()
    assert (await probed(silent, models=("m",), check_endpoint="none")).is_up
    assert silent.asked == []


async def test_own_health_check_of_a_node_is_used(autojump_clock):
    paths = Paths(v1_models=listing(MODELS))
    await probed(paths, 10.5, health_check=HealthConfig(interval_s=5))
    assert len(paths.asked) == 3


FORMS = {
    "OpenAI": (MODELS, {"m1", "m2"}),
    "a bare list, as Together's": ([{"id": "m1", "object": "model"}, {"id": "m2"}], {"m1", "m2"}),
    "Ollama": (
        {"models": [{"name": "m1:latest", "model": "m1:latest"}, {"name": "m2"}]},
        {"m1:latest", "m2"},
    ),
    "llama.cpp": ({"models": [{"name": "a.gguf", "model": "a.gguf"}], "data": [{"id": "m1"}]}, {"m1"}),
    "LM Studio": ({"data": [{"id": "m1", "type": "llm", "state": "loaded"}], "object": "list"}, {"m1"}),
    "names": (["m1", "m2"], {"m1", "m2"}),
    "an odd entry": (
        {"data": [{"id": "m1"}, {"id": None, "name": "odd"}, 5, {"id": "m2"}]},
        {"m1", "m2"},
    ),
    "an entry without an id": ({"data": [{"model": "m1", "provider": "p"}, {"id": "m2"}]}, {"m1", "m2"}),
    "names that no request could have": ({"data": [{"id": "x" * 300}, {"id": "a\nb"}, {"id": ""}]}, set()),
    "null": ({"object": "list", "data": None}, set()),
    "nothing": ({"data": []}, set()),
}


@pytest.mark.parametrize("name", FORMS)
def test_list_of_models_is_read_entry_by_entry_in_any_form(name):
    document, names = FORMS[name]
    assert models_of(ProbeAnswer(200, json.dumps(document).encode())) == names


PROBLEMS = {
    "a wrong key": (
        full_response(b"{}", status="401 No"),
        "it rejects our API key (GET /v1/models gave 401)",
    ),
    "a failure": (full_response(b"{}", status="500 No"), "it answers GET /v1/models with 500"),
    "a login page": (
        full_response(b"", None, "Location: https://login.example/", status="302 Found"),
        "it redirects GET /v1/models to https://login.example/",
    ),
}


@pytest.mark.parametrize("name", PROBLEMS)
async def test_problem_of_a_node_says_what_its_probe_got_and_is_logged_once(name, autojump_clock):
    answer, problem = PROBLEMS[name]
    with structlog.testing.capture_logs() as logs:
        status = await probed(Paths(v1_models=answer))
    assert (status.is_up, status.problem) == (False, problem)
    assert [log["reason"] for log in logs if log["event"] == "probe failed"] == [problem]


UNREADABLE = {
    "its list of models cannot be read: it is not JSON": full_response(b"<html>"),
    "its list of models cannot be read: it is no list": full_response(b'{"models": 5}'),
    "its list of models has none that can be used": listing({"data": None}),
}


@pytest.mark.parametrize("problem", UNREADABLE)
async def test_node_with_an_unreadable_list_says_so(problem, autojump_clock):
    status = await probed(Paths(v1_models=UNREADABLE[problem]))
    assert (status.is_up, status.models, status.problem) == (True, (), problem)


async def test_node_keeps_its_models_when_its_list_becomes_unreadable(autojump_clock):
    paths = Paths(v1_models=listing(MODELS))
    config = NodeConfig(id="n", url="http://127.0.0.1:1")
    with scripted(paths):
        node = remote_node(config, RecordingListener(), HEALTH)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(node.run)
            await trio.sleep(1.5)
            paths.answers["v1_models"] = full_response(b"{")
            await trio.sleep(2)
            status = node.status()
            nursery.cancel_scope.cancel()
    assert (status.models, status.is_up) == (("m1", "m2"), True)
    assert "cannot be read" in status.problem


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl, which makes a certificate")
@pytest.mark.parametrize("by", ["caFile", "SSL_CERT_FILE", None])
async def test_certificate_of_an_authority_in_a_file_is_trusted(by, tmp_path, monkeypatch):
    context, _ = tls_contexts(tmp_path)
    authority = str(tmp_path / "certificate.pem")
    if by == "SSL_CERT_FILE":
        monkeypatch.setenv("SSL_CERT_FILE", authority)

    async def serve(stream):
        async with trio.SSLStream(stream, context, server_side=True, https_compatible=True) as secure:
            with suppress(trio.BrokenResourceError):
                while await secure.receive_some():
                    await secure.send_all(listing(MODELS))

    async with trio.open_nursery() as nursery:
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(trio.serve_listeners, serve, listeners)
        url = f"https://localhost:{listeners[0].socket.getsockname()[1]}"
        config = NodeConfig(id="n", url=url, ca_file=authority if by == "caFile" else None)
        node = remote_node(config, RecordingListener(), HealthConfig(failures=1))
        nursery.start_soon(node.run)
        with trio.fail_after(10):
            await node.was_probed.wait()
        status = node.status()
        nursery.cancel_scope.cancel()
    assert status.is_up == (by is not None)
    assert by is not None or "certificate" in status.problem


@pytest.mark.parametrize("content", [None, "no certificate"])
def test_file_that_has_no_certificates_is_a_fault_of_the_configuration(content, tmp_path):
    path = tmp_path / "ca.pem"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match="caFile"):
        NodeConfig(id="n", url="https://localhost", ca_file=str(path))


def test_node_without_probes_needs_the_names_of_its_models():
    with pytest.raises(ConfigError, match="checkEndpoint"):
        NodeConfig(id="n", url="http://localhost", check_endpoint="none")
