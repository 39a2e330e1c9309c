"""Requests for sound and images at a server: what it gets of a form, and what becomes of its answers."""

import json
from contextlib import asynccontextmanager
from functools import partial

import pytest
import trio

from fairlead.base.config import FiltersConfig
from fairlead.base.errors import NodeFull, NodeRefused, NodeUnsuited, UploadFailed
from fairlead.base.formats.multipart import FormParser
from fairlead.base.job import Form, FormPart, Job, Media, Relay, Sampling
from fairlead.nodes.http.client import Upstream, UpstreamFailed
from fairlead.nodes.remote_node import RemoteNode
from fairlead.nodes.streams.deltas import UNREAD_BYTES, Deltas
from fairlead.nodes.streams.media_relay import written_form
from fairlead.nodes.streams.passthrough import decode_head
from fairlead.nodes.streams.refusals import JSON
from fairlead.nodes.streams.upstream_stream import RelayFailed
from fairlead.server.routes import route_table  # noqa: F401  # defines the dialects, which read errors
from nodes.listening import CollectedDeltas, RecordingListener
from nodes.media_server import TEXT, MediaServer

TRANSCRIBE = "/v1/audio/transcriptions"


class Contents:
    """The contents of a form in memory. `reads` has the sizes of the reads."""

    def __init__(self, data: bytes, fails: bool = False) -> None:
        self.data = data
        self.fails = fails
        self.reads: list[int] = []

    async def read(self, start: int, size: int) -> bytes:
        await trio.lowlevel.checkpoint()
        if self.fails:
            raise UploadFailed("the disk is gone")
        self.reads.append(size)
        return self.data[start : start + size]


def form_of(*parts: tuple[str, str | None, bytes]) -> Form:
    listed, data = [], b""
    for name, filename, content in parts:
        kind = "" if filename is None else "audio/wav"
        listed.append(FormPart(name, filename, kind, len(data), len(content)))
        data += content
    return Form(tuple(listed), Contents(data))


SPEECH = (("file", "a.wav", b"RIFF"), ("model", None, b"ear"), ("language", None, b"de"))


def media_job(
    path: str = TRANSCRIBE, form: Form | None = None, *, method: str = "POST", **body: object
) -> Job:
    media = Media(method, "", form, "ear")
    relay = Relay(path, json.dumps(body).encode(), media=media)
    return Job(
        id="media-1",
        tenant="A",
        model="m",
        prompts=(),
        sampling=Sampling(max_tokens=1),
        request_id="r1",
        relay=relay,
        path=path,
    )


def transcription(**fields: str) -> Job:
    return media_job(form=form_of(*SPEECH, *((name, None, value.encode()) for name, value in fields.items())))


@asynccontextmanager
async def serving(**options):
    """Run a media server; yield it, and a node for it with the name `media` for the model."""
    server = MediaServer()
    async with trio.open_nursery() as nursery:
        await nursery.start(server.serve)
        upstream = Upstream(server.url, name="stub")
        node = RemoteNode("stub", upstream, RecordingListener(), names={"m": "media"}, seats=4, **options)
        node.came_up()
        yield server, node
        assert upstream.statistics().busy == 0
        upstream.close()
        nursery.cancel_scope.cancel()


async def relayed(node: RemoteNode, job: Job) -> tuple[str, bytes]:
    """Run a job; return the type and the bytes of its answer. Raises the error that ended it."""
    into = CollectedDeltas()
    async with node.generate(job, into):
        await into.over.wait()
    return told(into)


def told(into: CollectedDeltas) -> tuple[str, bytes]:
    """Return what a job has put into its sink. Raises the error that ended it."""
    if into.error is not None:
        raise into.error
    head, *rest = [piece for delta in into.deltas for piece in delta.raw]
    return decode_head(head).headers["Content-Type"], b"".join(rest)


# Requests --------------------------------------------------------------------------------------------


async def test_server_gets_the_form_with_its_own_name_of_the_model():
    async with serving() as (server, node):
        kind, answer = await relayed(node, transcription(prompt="x"))
        (request,) = server.jobs
    assert (kind, json.loads(answer)["text"]) == (JSON, TEXT)
    assert (request.method, request.path) == ("POST", TRANSCRIBE)
    assert request.names == ["model", "file", "language", "prompt"]
    assert request.fields == {"model": "media", "language": "de", "prompt": "x"}
    assert request.files == {"file": ("a.wav", "audio/wav", b"RIFF")}
    assert request.headers["x-request-id"] == "r1"
    assert int(request.headers["content-length"]) == request.size


async def test_json_body_gets_the_servers_name_and_its_filters():
    filters = FiltersConfig(strip_params=("voice",), set_params={"speed": 1.5})
    async with serving(filters=filters) as (server, node):
        kind, answer = await relayed(
            node, media_job("/v1/audio/speech", model="ear", input="hi", voice="anna")
        )
        (request,) = server.jobs
    assert (kind, answer) == ("audio/mpeg", b"ID3hi")
    assert request.fields == {"model": "media", "input": "hi", "speed": 1.5}


async def test_voices_are_requested_with_the_servers_name_of_the_model():
    async with serving() as (server, node):
        kind, answer = await relayed(node, media_job("/v1/audio/voices?language=de", method="GET"))
        (request,) = server.jobs
    assert (kind, json.loads(answer)) == (JSON, {"voices": ["anna", "ben"]})
    assert (request.method, request.query) == ("GET", "language=de&model=media")
    assert "content-type" not in request.headers


async def written(form: Form, filters: FiltersConfig | None = None) -> list[tuple[str, str | None, bytes]]:
    """Return the parts of a form as a server gets it."""
    kind, body = written_form(form, "media", filters, requested="ear")
    boundary = kind.partition("boundary=")[2].encode()
    data = b"".join([piece async for piece in body.pieces])
    assert len(data) == body.length
    parser = FormParser(boundary)
    contents = parser.feed(data)
    parser.end()
    return [
        (part.name, part.filename, contents[part.start : part.start + part.size]) for part in parser.parts
    ]


async def test_filters_apply_to_the_fields_of_forms():
    filters = FiltersConfig(
        strip_params=("language", "timestamp_granularities"),
        set_params={"temperature": 0, "include": ["a", "b"], "chunking": {"type": "auto"}, "none": None},
        set_params_by_id={"ear": {"prompt": "hello"}, "other": {"prompt": "no"}},
    )
    form = form_of(
        *SPEECH, ("timestamp_granularities[]", None, b"word"), ("temperature", None, b"1"), ("x", None, b"")
    )
    assert await written(form, filters) == [
        ("model", None, b"media"),
        ("temperature", None, b"0"),
        ("include[]", None, b"a"),
        ("include[]", None, b"b"),
        ("chunking[type]", None, b"auto"),
        ("prompt", None, b"hello"),
        ("file", "a.wav", b"RIFF"),
        ("x", None, b""),
    ]


async def test_form_is_written_with_a_boundary_that_its_client_cannot_know():
    hostile = form_of(("a", None, b"\r\n--b\r\nContent-Disposition: form-data; name=model\r\n\r\nother"))
    first, second = (written_form(hostile, "media", None, "")[0] for _ in range(2))
    assert first != second
    assert [name for name, _, _ in await written(hostile)] == ["model", "a"]
    quoted = form_of(('a"; filename="b\r\nX: y', 'c"\r\n', b"x"))
    assert await written(quoted) == [
        ("model", None, b"media"),
        ("a%22; filename=%22b%0D%0AX: y", "c%22%0D%0A", b"x"),
    ]


async def test_large_file_is_read_in_pieces_and_again_for_each_attempt():
    data = bytes(range(256)) * 4096
    form = form_of(("image", "a.png", data), ("model", None, b"ear"))
    for _ in range(2):
        assert (await written(form))[1] == ("image", "a.png", data)
    assert max(form.contents.reads) <= 64 * 1024


async def test_form_that_cannot_be_read_fails_its_request_and_not_the_node():
    job = transcription()
    job.relay.media.form.contents.fails = True
    async with serving() as (_, node):
        with pytest.raises(UploadFailed):
            await relayed(node, job)
        assert node.status().is_up


# Answers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "kind", "answer"),
    [
        ({"response_format": "text"}, "text/plain; charset=utf-8", f"{TEXT}\n".encode()),
        ({"response_format": "srt"}, "text/plain", f"1\n00:00:00,000 --> 00:00:01,000\n{TEXT}".encode()),
    ],
)
async def test_answer_of_any_type_is_relayed(fields, kind, answer):
    async with serving() as (_, node):
        assert await relayed(node, transcription(**fields)) == (kind, answer)


async def test_events_are_relayed_as_they_are():
    async with serving() as (_, node):
        kind, answer = await relayed(node, transcription(stream="true"))
    events = [json.loads(event.removeprefix(b"data: ")) for event in answer.split(b"\n\n")[:-1]]
    assert kind == "text/event-stream"
    assert [event.get("delta") for event in events] == [*TEXT.split(), None]
    assert events[-1] == {"type": "transcript.text.done", "text": TEXT}


@pytest.mark.parametrize(
    ("how", "kind", "message"),
    [
        ("full", NodeFull, "stub answered 503: the stub says full"),
        ("refuse", NodeRefused, "stub answered 400"),
        ("missing", NodeUnsuited, "stub answered 404"),
        ("page", RelayFailed, "stub answered with text/html"),
        ("error", NodeRefused, "stub answered 400: the stub is out of order"),
        ("half", UpstreamFailed, "stub"),
    ],
)
async def test_what_is_no_answer_is_an_error(how, kind, message):
    async with serving() as (_, node):
        with pytest.raises(kind) as caught:
            await relayed(node, transcription(prompt=how))
    assert message in str(caught.value)


async def test_refusal_of_the_server_is_shown_as_it_is():
    async with serving() as (_, node):
        with pytest.raises(NodeRefused) as caught:
            await relayed(node, transcription(prompt="refuse"))
    assert json.loads(caught.value.body)["error"]["code"] == "of the stub"


async def test_server_that_does_not_speak_openais_api_is_unsuited():
    async with serving(dialects=("ollama",)) as (server, node):
        with pytest.raises(NodeUnsuited):
            await relayed(node, transcription())
        assert server.jobs == []


async def answer_of(*pieces: bytes, kind: str) -> tuple[str, bytes]:
    """Relay a speech request to a server with this answer."""

    async def serve(stream):
        async with stream:
            data = b""
            while b"}" not in data:
                data += await stream.receive_some()
            await stream.send_all(
                f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nConnection: close\r\n\r\n".encode()
            )
            for piece in pieces:
                await stream.send_all(piece)
                await trio.sleep(0.001)

    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(partial(trio.serve_tcp, serve, 0, host="127.0.0.1"))
        port = listeners[0].socket.getsockname()[1]
        upstream = Upstream(f"http://127.0.0.1:{port}", name="stub")
        node = RemoteNode("stub", upstream, RecordingListener(), names={"m": "m"}, seats=1)
        node.came_up()
        into = CollectedDeltas()
        async with node.generate(media_job("/v1/audio/speech", model="m"), into):
            await into.over.wait()
        nursery.cancel_scope.cancel()
    return told(into)


@pytest.mark.parametrize(
    ("kind", "pieces", "message"),
    [
        ("audio/mpeg", [], "stub sent an empty answer"),
        (JSON, [], "stub sent an empty answer"),
        ("text/event-stream", [], "stub sent an empty answer"),
        ("", [b"  <!DOCTYPE html>"], "stub answered with a page"),
        ("application/xhtml+xml", [b"x"], "stub answered with application/xhtml+xml"),
        ("text/event-stream", [b": hi\n\n", b'event: error\ndata: {"message": "gone"}\n\n'], "gone"),
        ("text/event-stream", [b'data: {"error": {"messa', b'ge": "gone"}}\n\n'], "gone"),
    ],
)
async def test_failures_with_status_200_are_found_before_the_client_gets_a_byte(kind, pieces, message):
    with pytest.raises(RelayFailed) as caught:
        await answer_of(*pieces, kind=kind)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "pieces"),
    [
        ("text/plain", []),
        (JSON, [b"[1, 2]"]),
        (JSON, [b'{"data": "', b"x" * 2**20, b"x" * 2**20, b'"}']),
        ("text/event-stream", [b": hi\n\n", b"data: [1]\n", b"\n", b"data: 2"]),
        ("audio/x-unheard-of", [b"\0\1", b"\2"]),
    ],
)
async def test_unusual_answers_are_relayed(kind, pieces):
    assert await answer_of(*pieces, kind=kind) == (kind, b"".join(pieces))


async def test_answer_without_a_type_gets_one_that_no_browser_shows():
    assert await answer_of(b"\0\1", kind="") == ("application/octet-stream", b"\0\1")


# Flow and leaving ------------------------------------------------------------------------------------


async def test_server_waits_for_a_client_that_does_not_read():
    sent = 0

    async def serve(stream):
        nonlocal sent
        async with stream:
            await stream.receive_some()
            await stream.send_all(b"HTTP/1.1 200 OK\r\nContent-Type: audio/wav\r\nConnection: close\r\n\r\n")
            while True:
                await stream.send_all(b"x" * 65536)
                sent += 65536

    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(partial(trio.serve_tcp, serve, 0, host="127.0.0.1"))
        port = listeners[0].socket.getsockname()[1]
        node = RemoteNode(
            "stub",
            Upstream(f"http://127.0.0.1:{port}", name="stub"),
            RecordingListener(),
            names={"m": "m"},
            seats=1,
        )
        node.came_up()
        deltas = Deltas(1)
        async with node.generate(media_job("/v1/audio/speech", model="m"), deltas):
            before = -1
            while before != sent:
                before = sent
                await trio.sleep(0.1)
            assert UNREAD_BYTES / 2 < sent < 3 * UNREAD_BYTES
        nursery.cancel_scope.cancel()


async def test_leaving_ends_the_exchange():
    async with serving() as (server, node):
        async with node.generate(transcription(prompt="hold"), CollectedDeltas()):
            while not server.running:  # noqa: ASYNC110  # it is in another task
                await trio.sleep(0.001)
            assert node.status().busy == 1
        assert node.status().busy == 0
        with trio.fail_after(5):
            while server.running:  # noqa: ASYNC110
                await trio.sleep(0.001)
