"""llama.cpp's native routes beside the real ones: as its server writes them, and relayed to it."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from e2e.real_server import until
from fairlead.base.config import demonstration_model
from peers.backend import MODEL
from peers.dialects import OPENAI
from peers.rigs import Rig, fairlead, marks, peer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400), *marks("llama.cpp", "routes")]

OURS, PATH = "fairlead-demo", "/completion"
SHORT = {"prompt": "hello", "n_predict": 4, "seed": 5, "ignore_eos": True}


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """Run llama.cpp's server, and a Fairlead with that as a node and with a model of its own."""
    folder = tmp_path_factory.mktemp("routes")
    with peer("llama.cpp", folder) as (program, backend, settings):
        models = {OURS: {"path": str(demonstration_model())}}
        with fairlead(folder, {**settings, "models": models}) as server:
            rig = Rig("llama.cpp", server, server.url, "unused", OPENAI, backend, program)
            until(lambda: rig.node()["state"] == "up")
            yield rig


def llama_cpp(rig: Rig, method: str, path: str, **options: Any) -> httpx.Response:
    """Return the answer of llama.cpp's server itself."""
    headers = {"Authorization": f"Bearer {rig.program.key}"}
    return httpx.request(method, rig.program.url + path, headers=headers, timeout=60, **options)


def kinds(value: Any) -> Any:
    """Return the form of a JSON value: its type, with the members of objects and of a list's first item."""
    if isinstance(value, dict):
        return {name: kinds(member) for name, member in value.items()}
    if isinstance(value, list):
        return [kinds(value[0])] if value else []
    return "number" if isinstance(value, int | float) and not isinstance(value, bool) else type(value)


def check_form(ours: Any, theirs: Any, path: str = "") -> None:
    """Check that each member of ours is in theirs, and of the same type."""
    if isinstance(ours, dict):
        assert isinstance(theirs, dict), path
        assert ours.keys() <= theirs.keys(), (path, ours.keys() - theirs.keys())
        for name, member in ours.items():
            check_form(member, theirs[name], f"{path}.{name}")
    elif isinstance(ours, list):
        if ours and theirs:
            check_form(ours[0], theirs[0], f"{path}[0]")
    else:
        assert ours == theirs, path


@pytest.mark.parametrize(
    "fields", [{}, {"n_probs": 2}, {"return_tokens": True}, {"prompt": ["hello", "a"]}], ids=str
)
def test_whole_answer_has_the_form_of_llama_cpps(rig, fields):
    ours = rig.server.http.post(PATH, json={"model": OURS} | SHORT | fields).json()
    theirs = llama_cpp(rig, "POST", PATH, json=SHORT | fields).json()
    check_form(kinds(ours), kinds(theirs))


@pytest.mark.parametrize("fields", [{}, {"n_probs": 1}])
def test_events_have_the_form_of_llama_cpps(rig, fields):
    body = SHORT | fields | {"stream": True}
    ours = events(rig.server.http.post(PATH, json={"model": OURS} | body).text)
    theirs = events(llama_cpp(rig, "POST", PATH, json=body).text)
    check_form(kinds(ours[0]), kinds(theirs[0]))
    check_form(kinds(ours[-1]), kinds(theirs[-1]))
    assert [event["stop"] for event in ours].count(True) == [event["stop"] for event in theirs].count(True)


@pytest.mark.parametrize("path", ["/props", "/slots"])
def test_description_has_the_form_of_llama_cpps(rig, path):
    ours = rig.server.http.get(f"{path}?model={OURS}").json()
    check_form(kinds(ours), kinds(llama_cpp(rig, "GET", path).json()))


def test_errors_have_the_members_that_clients_read(rig):
    ours = rig.server.http.post(PATH, json={"model": OURS}).json()["error"]
    theirs = llama_cpp(rig, "POST", PATH, json={}).json()["error"]
    assert ours["type"] == theirs["type"] == "invalid_request_error"
    assert isinstance(ours["message"], str)


def test_answer_is_relayed_as_it_is(rig):
    body = SHORT | {"temperature": 0, "return_tokens": True}
    direct = llama_cpp(rig, "POST", PATH, json=body).json()
    relayed = rig.server.http.post(PATH, json={"model": MODEL} | body).json()
    assert (relayed["content"], relayed["tokens"]) == (direct["content"], direct["tokens"])
    assert relayed["generation_settings"].keys() == direct["generation_settings"].keys()


def test_several_answers_are_relayed(rig):
    body = {"model": MODEL} | SHORT | {"prompt": ["hello", "a"]}
    answers = rig.server.http.post(PATH, json=body).json()
    assert [answer["index"] for answer in answers] == [0, 1]


def test_stream_is_relayed_and_its_tokens_are_counted(rig):
    def tokens() -> float:
        text = rig.server.http.get("/metrics").text
        lines = [line for line in text.splitlines() if line.startswith("fairlead_generated_tokens_total")]
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    before = tokens()
    body = {"model": MODEL} | SHORT | {"n_predict": 12, "stream": True}
    answer = rig.server.http.post(PATH, json=body)
    found = events(answer.text)
    assert found[-1]["tokens_predicted"] == 12
    assert sum(len(event["tokens"]) for event in found) == 12
    until(lambda: tokens() == before + 12)


def test_refusal_of_llama_cpp_is_relayed(rig):
    answer = rig.server.http.post(PATH, json={"model": MODEL, "n_predict": 1})
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")


def events(text: str) -> list[Any]:
    """Return the data of the events of a stream."""
    return [
        json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: ")
    ]
