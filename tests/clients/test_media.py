"""OpenAI's package for sound, images and moderations, unmodified: through nodes, commands and fronts."""

import base64
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import openai
import pytest
import trio
from openai import OpenAI

from e2e.real_server import TIMEOUT_S, RealServer, real_server, until
from nodes import media_server
from nodes.media_server import TEXT, MediaServer

# Newer versions of the package call some of these methods deprecated.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

NODE, COMMAND = "media", "local"
MB = 1024 * 1024
# All processes of the server together, for an upload of 100 MB.
GROWTH_MB = 24


class MediaThread:
    """A media server in a thread. `call` runs a function there."""

    def __init__(self, server: MediaServer, token: trio.lowlevel.TrioToken) -> None:
        self.server = server
        self.token = token

    def go(self) -> None:
        """Let the answer that is held go on."""
        self.token.run_sync_soon(self.server.go.release)


@contextmanager
def media_thread() -> Iterator[MediaThread]:
    server = MediaServer()
    started = threading.Event()
    scope = trio.CancelScope()
    tokens: list[trio.lowlevel.TrioToken] = []

    async def serve() -> None:
        tokens.append(trio.lowlevel.current_trio_token())
        with scope:
            async with trio.open_nursery() as nursery:
                await nursery.start(server.serve)
                started.set()

    thread = threading.Thread(target=trio.run, args=(serve,), daemon=True)
    thread.start()
    assert started.wait(TIMEOUT_S)
    yield MediaThread(server, tokens[0])
    tokens[0].run_sync_soon(scope.cancel)
    thread.join(TIMEOUT_S)


@pytest.fixture(scope="module")
def stub() -> Iterator[MediaThread]:
    with media_thread() as running:
        yield running


@pytest.fixture(scope="module", params=[1, 2], ids=["one process", "two fronts"])
def server(
    request: pytest.FixtureRequest, stub: MediaThread, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RealServer]:
    configuration = {
        "fronts": request.param,
        "models": {
            COMMAND: {"cmd": f"{sys.executable} {Path(media_server.__file__)} --port ${{PORT}}"},
        },
        "nodes": [{"id": "remote", "url": stub.server.url}],
        "healthCheck": {"interval": "100ms"},
    }
    file = tmp_path_factory.mktemp("media") / "fairlead.yaml"
    file.write_text(json.dumps(configuration))
    with real_server("--config", str(file)) as running:
        until(lambda: any(node["state"] == "up" for node in running.http.get("/nodes").json()))
        yield running


@pytest.fixture
def client(server: RealServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


BOTH = pytest.mark.parametrize("model", [NODE, COMMAND])


# Sound -----------------------------------------------------------------------------------------------


@BOTH
def test_speech_is_transcribed(client, model, tmp_path):
    file = tmp_path / "speech.wav"
    file.write_bytes(b"RIFF" * 1000)
    answer = client.audio.transcriptions.create(
        model=model, file=file, language="de", timestamp_granularities=["word", "segment"]
    )
    assert answer.text == TEXT
    as_text = client.audio.transcriptions.create(model=model, file=file, response_format="text")
    assert as_text == f"{TEXT}\n"
    assert "-->" in client.audio.transcriptions.create(model=model, file=file, response_format="srt")


@BOTH
def test_transcription_is_streamed(client, model):
    events = client.audio.transcriptions.create(model=model, file=("a.wav", b"RIFF"), stream=True)
    deltas = [event.delta for event in events if event.type == "transcript.text.delta"]
    assert deltas == TEXT.split()


@BOTH
def test_speech_is_translated(client, model):
    assert client.audio.translations.create(model=model, file=("a.wav", b"RIFF")).text == TEXT


@BOTH
def test_text_is_spoken_into_a_file(client, model, tmp_path):
    file = tmp_path / "speech.mp3"
    with client.audio.speech.with_streaming_response.create(
        model=model, voice="anna", input="hello"
    ) as answer:
        assert answer.headers["content-type"] == "audio/mpeg"
        answer.stream_to_file(file)
    assert file.read_bytes() == b"ID3hello"
    assert client.audio.speech.create(model=model, voice="anna", input="hi").read() == b"ID3hi"


@BOTH
def test_voices_are_listed(server, model):
    assert server.http.get(f"/v1/audio/voices?model={model}").json() == {"voices": ["anna", "ben"]}


# Images and moderations ------------------------------------------------------------------------------


def text_of(image) -> str:
    return base64.b64decode(image.b64_json).decode()


@BOTH
def test_images_are_generated_edited_and_varied(client, model):
    generated = client.images.generate(model=model, prompt="a fox", n=2)
    assert [text_of(image) for image in generated.data] == ["a fox", "a fox"]
    image = ("fox.png", b"\x89PNG" * 100)
    edited = client.images.edit(model=model, image=image, mask=image, prompt="a red fox", n=2)
    assert [text_of(image) for image in edited.data] == ["a red fox", "a red fox"]
    assert text_of(client.images.create_variation(model=model, image=image).data[0]) == "400"


def test_image_is_streamed(client):
    (event,) = client.images.generate(model=NODE, prompt="a fox", stream=True)
    assert (event.type, text_of(event)) == ("image_generation.completed", "a fox")


@BOTH
def test_texts_are_moderated(client, model):
    answer = client.moderations.create(model=model, input=["good", "bad"])
    assert [result.flagged for result in answer.results] == [False, True]


# Errors, order, leaving ------------------------------------------------------------------------------


def test_errors_are_those_of_the_package(client):
    file = ("a.wav", b"RIFF")
    with pytest.raises(openai.NotFoundError):
        client.audio.transcriptions.create(model="nobody", file=file)
    with pytest.raises(openai.BadRequestError) as caught:
        client.audio.transcriptions.create(model=NODE, file=file, prompt="refuse")
    assert caught.value.code == "of the stub"
    with pytest.raises(openai.NotFoundError):
        client.audio.transcriptions.create(model=NODE, file=file, prompt="missing")


def form_request(**fields: str) -> httpx.Request:
    return httpx.Request("POST", "http://test", data=fields, files={"file": ("a.wav", b"RIFF" * 1000)})


def test_turns_hold_across_kinds_of_routes(server, stub):
    """One seat; five requests of ana, then two of ben, each of another kind than the one before."""
    seen: list[str] = []
    stub.server.on_request = lambda request: seen.append(request.headers["x-request-id"])
    form = form_request(model=NODE, prompt="hold")
    body = form.read()
    kinds = [
        ("/v1/audio/transcriptions", body, form.headers["content-type"]),
        (
            "/v1/images/generations",
            json.dumps({"model": NODE, "prompt": "hold"}).encode(),
            "application/json",
        ),
        (
            "/v1/chat/completions",
            json.dumps({"model": NODE, "prompt": "hold", "messages": []}).encode(),
            "application/json",
        ),
        (
            "/v1/audio/speech",
            json.dumps({"model": NODE, "prompt": "hold", "input": "x"}).encode(),
            "application/json",
        ),
    ]
    names = ["A1", "A2", "A3", "A4", "A5", "B1", "B2"]
    statuses: dict[str, int] = {}

    def send(number: int, name: str) -> None:
        path, content, kind = kinds[number % len(kinds)]
        headers = {
            "Content-Type": kind,
            "X-Request-Id": name,
            "X-OpenWebUI-User-Id": name[0],
        }
        statuses[name] = httpx.post(
            f"{server.url}{path}", content=content, headers=headers, timeout=TIMEOUT_S
        ).status_code

    threads = []
    for number, name in enumerate(names):
        threads.append(threading.Thread(target=send, args=(number, name)))
        threads[-1].start()
        until(lambda: sum(server.queue()[key] for key in ("waiting", "running")) > number)  # noqa: B023
    for _ in range(2 * len(names)):
        stub.go()
    for thread in threads:
        thread.join(TIMEOUT_S)
    stub.server.on_request = lambda _request: None
    assert statuses == dict.fromkeys(names, 200)
    assert seen == ["A1", "B1", "A2", "B2", "A3", "A4", "A5"]


def test_leaving_ends_the_exchange_and_frees_the_seat(server, stub):
    stub.go()
    body = {"model": NODE, "prompt": "hold", "input": "hello"}
    with (
        httpx.Client(base_url=server.url, timeout=TIMEOUT_S) as client,
        client.stream("POST", "/v1/audio/speech", json=body) as answer,
    ):
        pieces = answer.iter_raw()  # kept: the connection is closed with it
        assert next(pieces) == b"ID3"
        until(lambda: (stub.server.running, server.queue()["running"]) == (1, 1))
    until(lambda: not stub.server.running and not server.queue()["running"])
    assert server.http.post("/v1/audio/speech", json={"model": NODE, "input": "hi"}).content == b"ID3hi"


# Memory ----------------------------------------------------------------------------------------------


def memory_mb(server: RealServer) -> float:
    """Return the resident memory of the server's processes, without the media servers of commands."""
    pids = [server.process.pid]
    for pid in pids:
        for task in Path(f"/proc/{pid}/task").iterdir():
            pids += map(int, (task / "children").read_text().split())
    total = 0
    for pid in pids:
        if b"media_server" in Path(f"/proc/{pid}/cmdline").read_bytes():
            continue
        (line,) = (each for each in Path(f"/proc/{pid}/status").read_text().splitlines() if "VmRSS" in each)
        total += int(line.split()[1])
    return total / 1024


class Upload:
    """A file of so many megabytes, which is never in memory."""

    def __init__(self, megabytes: int) -> None:
        self.left = self.size = megabytes * MB

    def read(self, size: int = -1) -> bytes:
        size = min(self.left, MB if size < 0 else size)
        self.left -= size
        return b"\0" * size

    def seek(self, offset: int, whence: int = 0) -> int:
        self.left = self.size - offset if whence == 0 else 0
        return self.size - self.left

    def tell(self) -> int:
        return self.size - self.left


@pytest.mark.parametrize("megabytes", [8, pytest.param(100, marks=pytest.mark.nightly)])
def test_upload_takes_no_memory(server, stub, megabytes):
    send_upload(server, 1)
    before = memory_mb(server)
    peaks = []
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(0.02):
            peaks.append(memory_mb(server))

    watching = threading.Thread(target=watch)
    watching.start()
    answer = send_upload(server, megabytes)
    stop.set()
    watching.join(TIMEOUT_S)
    assert answer["bytes"] > megabytes * MB
    grown = max(peaks) - before
    assert grown < min(GROWTH_MB, 2 + 4 * megabytes)


def send_upload(server: RealServer, megabytes: int) -> dict[str, object]:
    """Send a file, and after it the model, as curl does in OpenAI's examples."""
    files = [("file", ("a.wav", Upload(megabytes))), ("model", (None, NODE))]
    answer = httpx.post(f"{server.url}/v1/audio/transcriptions", files=files, timeout=TIMEOUT_S)
    assert answer.status_code == 200, answer.text
    return answer.json()
