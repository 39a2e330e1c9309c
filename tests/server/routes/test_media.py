"""Routes for sound, images and moderations: which requests become jobs, and what limits their forms.

The answers of servers are in `answer/test_media_relay.py`, OpenAI's package in `clients/test_media.py`.
"""

import errno
import gc
import json
import os
from pathlib import Path

import httpx
import pytest
import trio

from fairlead.base.config import ApiKey, Config, KeyLimits, Limits, ModelConfig, QueueConfig, SelectorConfig
from fairlead.base.errors import NodeFailed, QueueFull
from fairlead.base.formats.multipart import MOST_PARTS
from fairlead.base.job import Delta
from fairlead.nodes.streams.passthrough import PassthroughHead, encode_head
from fairlead.server.routes import uploads
from fake_fleet import FakeFleet
from server.routes.conftest import client_of
from server.routes.raw_http import serving, until

TRANSCRIBE = "/v1/audio/transcriptions"
FORM_ROUTES = (TRANSCRIBE, "/v1/audio/translations", "/v1/images/edits", "/v1/images/variations")
JSON_ROUTES = ("/v1/audio/speech", "/v1/images/generations", "/v1/moderations")
WHOLE = "application/json"


def answered(*pieces: bytes, kind: str = WHOLE):
    """Return a script of an answer: its head with the first piece, then the others."""
    head = encode_head(PassthroughHead(200, {"Content-Type": kind}))
    rest = [[Delta(0, raw=[piece])] for piece in pieces[1:]]
    return lambda _job: [[Delta(0, raw=[head, pieces[0]])], *rest, [Delta(0, finish_reason="stop")]]


@pytest.fixture
def media_client(client_with):
    def make(*keys: ApiKey, **options):
        options.setdefault("gateway_script", answered(b'{"text": ', b'"hello"}'))
        return client_with(
            *keys,
            fleet=FakeFleet(["small"], ["whisper"]),
            aliases={"ear": "whisper", "tiny": "small"},
            **options,
        )

    return make


def form(
    fields=(), *, file: bytes | None = b"RIFF", file_first: bool = False
) -> tuple[bytes, dict[str, str]]:
    """Return a form and its headers."""
    fields = dict(fields)
    pairs = [(name, (None, value)) for name, value in fields.items()]
    files = [] if file is None else [("file", ("a.wav", file, "audio/wav"))]
    request = httpx.Request("POST", "http://test", files=[*files, *pairs] if file_first else [*pairs, *files])
    return request.read(), {"Content-Type": request.headers["Content-Type"]}


async def post_form(client, path=TRANSCRIBE, *, headers=(), file=b"RIFF", file_first=False, **fields):
    body, own = form(fields, file=file, file_first=file_first)
    return await client.post(path, body, headers={**own, **dict(headers)})


def bearer(key: ApiKey) -> dict[str, str]:
    return {"Authorization": f"Bearer {key.key}"}


# Jobs ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", FORM_ROUTES)
@pytest.mark.parametrize("file_first", [False, True])
async def test_form_becomes_a_job_of_its_model_wherever_that_is_named(media_client, path, file_first):
    client = media_client()
    reply = await post_form(
        client, path, file_first=file_first, model="ear", headers={"Accept": "application/json"}
    )
    assert (reply.status, reply.json) == (200, {"text": "hello"})
    job = client.gateway.job
    assert (job.model, job.sequences, job.stream, job.prompts, job.path) == ("whisper", 1, False, (), path)
    assert (job.relay.path, job.relay.body, job.relay.size) == (path, b"", 0)
    media = job.relay.media
    assert (media.method, media.accept, media.requested) == ("POST", "application/json", "ear")
    parts = {part.name: (part.filename, part.content_type, part.size) for part in media.form.parts}
    assert parts == {"model": (None, "", 3), "file": ("a.wav", "audio/wav", 4)}


@pytest.mark.parametrize("path", [*JSON_ROUTES, "/v1/images/edits"])
async def test_json_body_becomes_a_job_and_keeps_all_of_its_members(media_client, path):
    client = media_client()
    body = json.dumps({"model": "ear", "input": "hello", "unheard_of": [1]}).encode()
    assert (await client.post(path, body)).status == 200
    job = client.gateway.job
    assert (job.model, job.relay.path, job.relay.body, job.relay.media.form) == ("whisper", path, body, None)


@pytest.mark.parametrize("path", [*FORM_ROUTES, *JSON_ROUTES])
async def test_routes_work_without_the_version(media_client, path):
    client = media_client()
    reply = await client.post(path.removeprefix("/v1"), {"model": "whisper"})
    assert (reply.status, client.gateway.job.relay.path) == (200, path)


async def test_answer_has_the_type_and_the_bytes_of_the_server_and_runs_nothing_in_a_browser(media_client):
    client = media_client(gateway_script=answered(b"<svg", b"/>", kind="image/svg+xml"))
    reply = await client.post("/v1/images/generations", {"model": "whisper"})
    assert (reply.pieces, reply.headers["content-type"]) == ([b"<svg", b"/>"], "image/svg+xml")
    assert reply.headers["x-content-type-options"] == "nosniff"
    assert reply.headers["content-security-policy"] == "default-src 'none'; sandbox"


async def test_answer_that_fails_midway_cuts_the_connection(media_client):
    script = [*answered(b"half")(None)[:1], NodeFailed("gone")]
    client = media_client(gateway_script=lambda _job: script)
    reply = await client.post("/v1/audio/speech", {"model": "whisper"})
    assert (reply.status, reply.body, reply.is_complete) == (200, b"half", False)


EVENT = b'data: {"type": "transcript.text.delta", "delta": "a"}\n\n'


async def test_pauses_of_events_have_comments(media_client, autojump_clock):
    head = answered(EVENT, kind="text/event-stream")(None)
    script = [head[0], 40.0, *head[1:]]
    client = media_client(gateway_script=lambda _job: script, queue=QueueConfig(keep_alive_s=15.0))
    reply = await post_form(client, model="whisper", stream="true")
    assert reply.pieces == [EVENT, b": running\n\n", b": running\n\n"]
    assert reply.headers["cache-control"] == "no-cache"


@pytest.mark.parametrize(("sent", "before"), [(EVENT, b""), (EVENT[:-1], b"\n\n")])
async def test_events_that_fail_midway_end_with_an_error(media_client, sent, before):
    script = [answered(sent, kind="text/event-stream; charset=utf-8")(None)[0], NodeFailed("gone")]
    reply = await post_form(media_client(gateway_script=lambda _job: script), model="whisper", stream="true")
    assert reply.pieces[0] == sent
    assert reply.pieces[1].startswith(before + b'data: {"error":{')
    assert not reply.is_complete


async def test_refusal_of_the_queue_is_answered_as_for_any_job(media_client):
    client = media_client()
    client.gateway.refusal = QueueFull("full")
    reply = await post_form(client, model="whisper")
    assert (reply.status, reply.error["code"]) == (429, "queue_full")


async def test_wait_is_reported_in_the_headers(media_client):
    client = media_client()
    client.gateway.estimated_wait_s, client.gateway.queue_position = 9, 2
    reply = await post_form(client, model="whisper")
    assert (reply.headers["x-estimated-wait"], reply.headers["x-queue-position"]) == ("9", "2")


# Models ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [*FORM_ROUTES, *JSON_ROUTES])
async def test_model_of_our_own_engine_is_refused_by_name(media_client, path):
    client = media_client()
    replies = [await client.post(path, {"model": "tiny"})]
    if path in FORM_ROUTES:
        replies.append(await post_form(client, path, model="tiny"))
    for reply in replies:
        assert (reply.status, reply.error["param"]) == (400, "model")
        message = f"model: 'small' writes text only, and is not served under {path}"
        assert message in reply.error["message"]
    assert client.gateway.jobs == []


@pytest.mark.parametrize("path", [TRANSCRIBE, "/v1/audio/voices", "/v1/moderations"])
async def test_without_a_model_the_only_one_of_the_key_is_meant(media_client, path):
    one, both = ApiKey("sk-one", models=("whisper",)), ApiKey("sk-both")
    client = media_client(one, both)

    async def status(key):
        if path.endswith("voices"):
            return (await client.get(path, headers=bearer(key))).status
        return (await client.post(path, {}, headers=bearer(key))).status

    assert (await status(one), await status(both)) == (200, 400)
    assert client.gateway.job.model == "whisper"


async def test_json_body_without_a_model_gets_the_only_one(media_client):
    one = ApiKey("sk-one", models=("whisper",))
    client = media_client(one)
    await client.post("/v1/moderations", {"input": "x"}, headers=bearer(one))
    assert json.loads(client.gateway.job.relay.body) == {"input": "x", "model": "whisper"}


async def test_key_may_use_only_its_models(media_client):
    key = ApiKey("sk-one", models=("small",))
    client = media_client(key)
    for reply in (
        await post_form(client, model="whisper", headers=bearer(key)),
        await client.post("/v1/audio/speech", {"model": "whisper"}, headers=bearer(key)),
        await client.get("/v1/audio/voices?model=whisper", headers=bearer(key)),
    ):
        assert (reply.status, reply.error["param"]) == (403, "model")
    assert client.gateway.jobs == []


async def test_selector_stands_for_its_target(client_with):
    client = client_with(
        fleet=FakeFleet(["small"], ["whisper"]),
        selectors={"any": SelectorConfig("pin", ("whisper",))},
        gateway_script=answered(b"{}"),
    )
    assert (await post_form(client, model="any")).status == 200
    assert (await client.post("/v1/audio/speech", {"model": "any"})).status == 200
    first, second = client.gateway.jobs
    assert (first.model, first.relay.media.requested) == ("whisper", "whisper")
    assert (second.model, json.loads(second.relay.body)["model"]) == ("whisper", "whisper")


async def test_fields_of_a_form_name_the_user_and_the_class(media_client):
    key = ApiKey("sk-portal", user="portal", trusted=True)
    client = media_client(key)
    for fields in ({"user": "ana", "priority": "low"}, {"safety_identifier": "ben", "priority": "1"}):
        assert (await post_form(client, model="whisper", **fields, headers=bearer(key))).status == 200
    first, second = client.gateway.jobs
    assert (first.tenant, first.priority) == ("portal/ana", 2)
    assert (second.tenant, second.priority) == ("portal/ben", 2)


# Voices ----------------------------------------------------------------------------------------------


async def test_voices_are_requested_with_the_query_except_its_model(media_client):
    client = media_client(gateway_script=answered(b'["anna"]'))
    reply = await client.get("/v1/audio/voices?model=ear&language=de%26")
    assert (reply.status, reply.json) == (200, ["anna"])
    relay = client.gateway.job.relay
    assert (client.gateway.job.model, relay.path) == ("whisper", "/v1/audio/voices?language=de%26")
    assert (relay.media.method, client.gateway.job.method, relay.body) == ("GET", "GET", b"")


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
async def test_page_of_another_server_cannot_have_a_model_loaded_for_its_voices(media_client, site):
    client = media_client()
    reply = await client.get("/v1/audio/voices?model=whisper", headers={"Sec-Fetch-Site": site})
    assert (reply.status, client.gateway.jobs) == (403, [])


# Charges ---------------------------------------------------------------------------------------------


async def test_request_counts_as_a_thousand_tokens_of_its_key(media_client):
    key = ApiKey("sk-limited", limits=KeyLimits(tokens_per_minute=2500))
    client = media_client(key)
    replies = [await post_form(client, model="whisper", headers=bearer(key)) for _ in range(3)]
    assert [reply.status for reply in replies] == [200, 200, 429]
    assert replies[1].headers["x-ratelimit-remaining-tokens"] == "500"
    assert [job.prompt_tokens for job in client.gateway.jobs] == [0, 0]


async def test_key_with_a_limit_below_that_may_send_one_request_a_minute(media_client):
    key = ApiKey("sk-limited", limits=KeyLimits(tokens_per_minute=10))
    client = media_client(key)
    assert [(await post_form(client, model="whisper", headers=bearer(key))).status for _ in range(2)] == [
        200,
        429,
    ]


async def test_limited_key_is_refused_before_its_form_arrives(media_client):
    key = ApiKey("sk-limited", limits=KeyLimits(requests_per_minute=1))
    client = media_client(key)
    assert (await post_form(client, model="whisper", headers=bearer(key))).status == 200
    body, headers = form({"model": "whisper"})
    reply = await client.post(TRANSCRIBE, body[:9], headers={**headers, **bearer(key)})
    assert (reply.status, reply.error["code"]) == (429, "rate_limited")


# Forms that lie --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "message", "param"),
    [
        (b"", "the form ends before its last boundary", None),
        (b'--b\r\nContent-Disposition: form-data; name="file"\r\n\r\nabc', "the form ends before", None),
        (b"{}" * 1000, "the body does not begin with the boundary that Content-Type names", None),
        (
            b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\nwhisper\r\n' * 2 + b"--b--",
            "model: is given twice",
            "model",
        ),
        (
            b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\n' + b"w" * 2**20 + b"\r\n--b--",
            "model: must have at most 4096 bytes",
            "model",
        ),
        (
            b'--b\r\nContent-Disposition: form-data; name="x"\r\n\r\n1\r\n' * 10_000 + b"--b--",
            f"a form may have {MOST_PARTS} parts",
            None,
        ),
        (
            b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\nnobody\r\n--b\r\nendless',
            "model 'nobody' not found: it is not served here",
            "model",
        ),
    ],
)
async def test_form_that_lies_is_refused_and_kept_nowhere(media_client, body, message, param):
    client, before = media_client(), open_forms()
    reply = await client.post(TRANSCRIBE, body, headers={"Content-Type": "multipart/form-data; boundary=b"})
    assert reply.status in (400, 404)
    assert message in reply.error["message"]
    assert reply.error["param"] == param
    assert (client.gateway.jobs, space_of(client).taken, open_forms()) == ([], 0, before)


async def test_form_without_a_boundary_is_refused(media_client):
    reply = await media_client().post(TRANSCRIBE, b"", headers={"Content-Type": "multipart/form-data"})
    assert (reply.status, reply.error["param"]) == (400, "Content-Type")


async def test_compressed_form_is_refused_with_what_to_send(media_client):
    body, headers = form({"model": "whisper"})
    reply = await media_client().post(TRANSCRIBE, body, headers={**headers, "Content-Encoding": "gzip"})
    assert (reply.status, reply.error["code"]) == (415, "unknown_coding")
    assert reply.headers["accept-encoding"] == "identity"


# Space -----------------------------------------------------------------------------------------------


def space_of(client):
    return client.app._reader.uploads.space


def open_forms() -> list[str]:
    """Return the deleted files that this process has open."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = str(entry.readlink())
        except OSError:  # the descriptor of the directory itself
            continue
        if "(deleted)" in target and "/tmp" in target:
            found.append(target)
    return found


def configured(**limits) -> dict[str, object]:
    return {"config": Config(models=(ModelConfig(Path(), "small"),), limits=Limits(**limits))}


@pytest.mark.parametrize("bypasses_quart", [True, False])
async def test_form_is_kept_until_its_request_ends(model, bypasses_quart):
    client = client_of(
        model,
        fleet=FakeFleet(["small"], ["whisper"]),
        gateway_script=lambda _job: [*answered(b"{}")(None)[:1], None],
        bypasses_quart=bypasses_quart,
    )
    left = trio.Event()
    body, headers = form({"model": "whisper"}, file=b"x" * 200_000)
    gc.collect()
    before = len(open_forms())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: client.send("POST", TRANSCRIBE, body, headers=headers, disconnected=left))
        await until(lambda: client.gateway.jobs)
        contents = client.gateway.job.relay.media.form.contents
        assert await contents.read(3, 5) == b"sperx"
        assert len(open_forms()) == before + 1
        assert space_of(client).taken == max(len(body), space_of(client).total // 128)
        left.set()
    assert (client.gateway.ended, len(open_forms()), space_of(client).taken) == (1, before, 0)


async def test_full_disk_is_reported_and_nothing_remains(media_client, monkeypatch, log):
    def full(**_options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(uploads.tempfile, "TemporaryFile", full)
    client = media_client()
    reply = await post_form(client, model="whisper")
    assert (reply.status, reply.error["code"]) == (503, "upload_failed")
    assert reply.error["message"] == "the form cannot be kept on the server's disk: No space left on device"
    assert (client.gateway.jobs, space_of(client).taken) == ([], 0)
    assert [entry["event"] for entry in log].count("form not kept") == 1


async def test_form_above_the_limit_is_too_large(model):
    client = client_of(model, fleet=FakeFleet(["small"], ["whisper"]), **configured(upload_bytes=1000))
    reply = await post_form(client, model="whisper", file=b"x" * 1000)
    assert (reply.status, reply.error["code"]) == (413, "body_too_large")
    body, headers = form({"model": "whisper"})
    announced = {**headers, "Content-Length": "1001"}
    assert (await client.post(TRANSCRIBE, body, headers=announced)).status == 413


def raw(body: bytes, headers: dict[str, str], *, user: str = "ana", length: int | None = None) -> bytes:
    size = len(body) if length is None else length
    head = f"POST {TRANSCRIBE} HTTP/1.1\r\nHost: localhost\r\nX-OpenWebUI-User-Id: {user}\r\n"
    head += "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"{head}Content-Length: {size}\r\n\r\n".encode() + body


async def test_tenant_with_the_most_on_disk_loses_its_newest_form(model):
    limits = {"upload_bytes": 60_000, "uploads_bytes": 100_000}
    client = client_of(
        model, fleet=FakeFleet(["small"], ["whisper"]), gateway_script=answered(b"{}"), **configured(**limits)
    )
    body, headers = form({"model": "whisper"}, file=b"x" * 40_000)
    async with serving(client.app, Limits(**limits)) as server:
        first, second = await server.connect(), await server.connect()
        await first.send(raw(body, headers)[:-1])
        await until(lambda: space_of(client).taken >= len(body) - 1)
        await second.send(raw(body, headers)[:-1])
        await until(lambda: space_of(client).taken >= 2 * (len(body) - 1))
        assert (await server.fetch(raw(body, headers, user="ben"))).status == 200
        refused = await second.answer()
        assert (refused.status, refused.error["code"]) == (429, "uploads_full")
        await first.send(b"\n")
        assert (await first.answer()).status == 200
        await until(lambda: not space_of(client).taken)


async def test_number_of_forms_is_limited_by_the_least_that_each_counts(model):
    client = client_of(model, fleet=FakeFleet(["small"], ["whisper"]), **configured(uploads_bytes=128_000))
    body, headers = form({"model": "whisper"})
    async with serving(client.app) as server:
        for _ in range(128):
            await (await server.connect()).send(raw(body, headers)[:-1])
        await until(lambda: space_of(client).taken == 128_000)
        last = await server.connect()
        assert (await last.fetch(raw(body, headers))).error["code"] == "uploads_full"


@pytest.mark.parametrize(
    ("pause_s", "message"),
    [(3.0, "the client sent nothing for 2 s"), (1.5, "the form took longer than 10 s to arrive")],
)
async def test_slow_form_times_out(model, autojump_clock, pause_s, message):
    limits = {"stall_s": 2.0, "upload_timeout_s": 10.0, "body_timeout_s": 1.0}
    client = client_of(model, fleet=FakeFleet(["small"], ["whisper"]), **configured(**limits))
    body, headers = form({"model": "whisper"}, file=b"x" * 100)
    async with serving(client.app, Limits(**limits)) as server:
        connection = await server.connect()
        await connection.send(raw(body, headers, length=10_000))
        with trio.move_on_after(60):
            async with trio.open_nursery() as nursery:

                async def drip() -> None:
                    while True:
                        await trio.sleep(pause_s)
                        await connection.send_ignoring_close(b"x")

                nursery.start_soon(drip)
                answer = await connection.answer()
                nursery.cancel_scope.cancel()
        assert (answer.status, answer.error["code"], answer.error["message"]) == (
            408,
            "body_timeout",
            message,
        )
        assert space_of(client).taken == 0


async def test_form_may_take_longer_than_other_bodies(model, autojump_clock):
    limits = {"stall_s": 2.0, "upload_timeout_s": 60.0, "body_timeout_s": 1.0}
    client = client_of(
        model, fleet=FakeFleet(["small"], ["whisper"]), gateway_script=answered(b"{}"), **configured(**limits)
    )
    body, headers = form({"model": "whisper"}, file=b"x" * 100)
    async with serving(client.app, Limits(**limits)) as server:
        connection = await server.connect()
        data = raw(body, headers)
        for start in range(0, len(data), 40):
            await connection.send(data[start : start + 40])
            await trio.sleep(1.5)
        assert (await connection.answer()).status == 200


def test_forms_are_kept_in_the_folder_that_the_environment_names(monkeypatch):
    monkeypatch.delenv("TMPDIR", raising=False)
    usual = uploads.directory()
    assert usual is None or usual == Path("/var/tmp")
    monkeypatch.setenv("TMPDIR", "/elsewhere")
    assert uploads.directory() is None  # `tempfile` reads the variable


async def test_client_that_leaves_amid_its_form_leaves_nothing(model):
    client = client_of(model, fleet=FakeFleet(["small"], ["whisper"]), **configured())
    body, headers = form({"model": "whisper"}, file=b"x" * 200_000)
    before = len(open_forms())
    async with serving(client.app) as server:
        connection = await server.connect()
        await connection.send(raw(body, headers)[:-1])
        await until(lambda: space_of(client).taken and len(open_forms()) > before)
        connection.reset()
        await until(lambda: not space_of(client).taken and len(open_forms()) == before)
    assert client.gateway.jobs == []
