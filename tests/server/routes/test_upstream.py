"""`/upstream/MODEL/…` in process: which requests become jobs, and how their responses are relayed.

The tests with real servers are in `e2e/test_llama_swap_file.py`.
"""

import pytest
import trio

from fairlead.base.config import ApiKey, Config, ConfigError, CorsConfig, KeyLimits, UpstreamConfig
from fairlead.base.errors import NodeFailed, QueueFull
from fairlead.base.job import Delta, Job, Passthrough, Relay, Sampling
from fairlead.nodes.streams.passthrough import PassthroughHead, encode_head
from fairlead.router.fleet.status import ModelStatus
from fake_fleet import FakeFleet
from server.routes.conftest import Client


def status(model: str, kind: str, state: str = "ready") -> ModelStatus:
    return ModelStatus(model=model, kind=kind, node=f"{kind}:{model}", state=state)


def answered(*pieces: bytes, code: int = 200, headers: dict[str, str] | None = None):
    """Return a script of a server's response: its head, then its body in pieces."""
    head = encode_head(PassthroughHead(code, headers or {}))
    body = [[Delta(0, raw=[piece])] for piece in pieces]
    return lambda _job: [[Delta(0, raw=[head])], *body, [Delta(0, finish_reason="stop")]]


@pytest.fixture
def client_of_command(client_with):
    def make(*keys: ApiKey, state: str = "ready", **options) -> Client:
        fleet = FakeFleet(
            statuses=[
                status("lab/external", "command", state),
                status("peer", "remote"),
                status("small", "engine"),
            ]
        )
        options.setdefault("gateway_script", answered(b"one", b"two", headers={"content-type": "text/plain"}))
        return client_with(*keys, fleet=fleet, aliases={"away": "lab/external"}, **options)

    return make


async def test_request_becomes_a_job_of_its_model_that_takes_a_seat(client_of_command):
    client = client_of_command()
    headers = {"X-Mine": "1", "Content-Type": "text/csv", "Authorization": "Bearer sk", "Host": "localhost"}
    reply = await client.post("/upstream/away/a/b?c=d", b"body", headers=headers)
    assert (reply.status, reply.body, reply.headers["content-type"]) == (200, b"onetwo", "text/plain")
    job = client.gateway.job
    assert (job.model, job.stream, job.sequences, job.prompt_tokens) == ("lab/external", False, 1, 1)
    assert (job.relay.path, job.relay.body) == ("/a/b?c=d", b"body")
    assert job.relay.passthrough.method == "POST"
    assert dict(job.relay.passthrough.headers) == {"X-Mine": "1", "Content-Type": "text/csv"}


async def test_pieces_of_a_response_are_sent_as_they_arrive(client_of_command):
    client = client_of_command(gateway_script=answered(b"1", b"2", b"3", code=206))
    reply = await client.get("/upstream/away/x")
    assert (reply.status, reply.pieces, reply.is_complete) == (206, [b"1", b"2", b"3"], True)
    assert "content-type" not in reply.headers


async def test_response_that_fails_midway_cuts_the_connection(client_of_command):
    head = encode_head(PassthroughHead(200, {}))
    script = [[Delta(0, raw=[head])], [Delta(0, raw=[b"half"])], NodeFailed("gone")]
    reply = await client_of_command(gateway_script=lambda _job: script).get("/upstream/away/x")
    assert (reply.status, reply.body, reply.is_complete) == (200, b"half", False)


async def test_refusal_of_the_queue_is_answered_as_for_any_job(client_of_command):
    client = client_of_command()
    client.gateway.refusal = QueueFull("full")
    reply = await client.get("/upstream/away/x")
    assert (reply.status, reply.error["code"]) == (429, "queue_full")


async def test_disconnect_ends_the_job(client_of_command, autojump_clock):
    client = client_of_command(gateway_script=lambda _job: [None])
    left = trio.Event()
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: client.send("GET", "/upstream/away/x", b"", disconnected=left))
            await trio.sleep(1)
            assert (len(client.gateway.jobs), client.gateway.ended) == (1, 0)
            left.set()
    assert client.gateway.ended == 1


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (
            "/upstream/small/v1/models",
            "the model 'small' has no server of its own that /upstream/ could reach",
        ),
        ("/upstream/peer/v1/models", "the model 'peer' has no server of its own"),
        ("/upstream/nobody/x", "model 'nobody' not found: it is not served here"),
        ("/upstream/lab/x", "model 'lab' not found: it is not served here"),
        ("/upstream/", "there is no such route"),
        ("/upstream/away/../small", "there is no such route"),
        ("/upstream/away/%2E%2e/small", "there is no such route"),
        ("/upstream/away//x", "there is no such route"),
        ("/upstream/away/x//", "there is no such route"),
        ("/upstream/away/%00", "there is no such route"),
    ],
)
async def test_path_that_leads_to_no_server_is_not_found(client_of_command, path, message):
    reply = await client_of_command().get(path)
    assert reply.status == 404
    assert message in reply.error["message"]


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("lab/external/", "/"),
        ("lab/external/x", "/x"),
        ("lab%2Fexternal/x", "/x"),
        ("away/lab/external", "/lab/external"),
        ("away/x/", "/x/"),
        ("away/%C3%A9?q=%20", "/%C3%A9?q=%20"),
    ],
)
async def test_path_after_the_name_is_relayed_as_it_is_spelled(client_of_command, path, expected):
    client = client_of_command()
    assert (await client.get(f"/upstream/{path}")).status == 200
    assert client.gateway.job.relay.path == expected


@pytest.mark.parametrize("origin", ["cross-site", "same-site"])
async def test_page_of_another_server_cannot_have_a_model_loaded(client_of_command, origin):
    client = client_of_command(state="stopped")
    reply = await client.get("/upstream/away/x", headers={"Sec-Fetch-Site": origin})
    assert (reply.status, client.gateway.jobs) == (403, [])
    for own in ("same-origin", "none"):
        assert (await client.get("/upstream/away/x", headers={"Sec-Fetch-Site": own})).status == 200


@pytest.mark.parametrize("origins", [("https://chat.example",), ("*",)])
@pytest.mark.parametrize("site", ["cross-site", "same-site"])
async def test_page_of_a_configured_origin_is_accepted_if_the_browser_names_it(
    client_of_command, origins, site
):
    client = client_of_command(config=Config(models=(), cors=CorsConfig(origins=origins)), state="stopped")
    of_page = {"Host": "localhost", "Sec-Fetch-Site": site}
    named = of_page | {"Origin": "https://chat.example"}
    reply = await client.post("/upstream/away/x", b"{}", headers=named)
    assert reply.status == (await client.get("/upstream/away/x", headers=named)).status == 200
    assert reply.headers["access-control-allow-origin"] == origins[0]
    response = await client.send(
        "OPTIONS", "/upstream/away/x", b"", headers=named | {"Access-Control-Request-Method": "PUT"}
    )
    assert (response.status, "PUT" in response.headers["access-control-allow-methods"]) == (204, True)
    assert len(client.gateway.jobs) == 2
    image = await client.get("/upstream/away/x", headers=of_page)  # browsers do not report of which page
    assert (image.status, image.error["param"], len(client.gateway.jobs)) == (403, "Sec-Fetch-Site", 2)


async def test_page_of_no_configured_origin_is_refused(client_of_command):
    config = Config(models=(), cors=CorsConfig(origins=("https://chat.example",)))
    client = client_of_command(config=config)
    for origin in ("https://evil.example", "null"):
        headers = {"Host": "localhost", "Sec-Fetch-Site": "cross-site", "Origin": origin}
        reply = await client.get("/upstream/away/x", headers=headers)
        assert (reply.status, reply.error["param"]) == (403, "Origin")
    assert client.gateway.jobs == []


@pytest.mark.parametrize("state", ["stopped", "loading", "failed"])
async def test_file_of_a_page_does_not_load_a_model(client_of_command, state):
    client = client_of_command(state=state)
    reply = await client.get("/upstream/away/assets/site.css")
    assert (reply.status, reply.error["code"], client.gateway.jobs) == (409, "unloaded", [])
    assert (await client.get("/upstream/away/site.css/x")).status == 200


async def test_ignored_paths_are_configurable(client_of_command):
    config = Config(models=(), upstream=UpstreamConfig(ignore_paths=("^/ws$",)))
    client = client_of_command(state="stopped", config=config)
    assert (await client.get("/upstream/away/site.css")).status == 200
    assert (await client.get("/upstream/away/ws")).status == 409


def test_ignored_path_that_is_no_expression_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"upstream.ignorePaths\[1\]: is not a regular expression"):
        Config(models=(), upstream=UpstreamConfig(ignore_paths=("a", "(")))


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ({"models": ("away",)}, 200),
        ({"models": ("small",)}, 403),
        ({"limits": {"tokens_per_minute": 10}}, 403),
        ({"limits": {"requests_per_minute": 10}}, 200),
    ],
)
async def test_limits_of_a_key_are_enforced(client_of_command, key, expected):
    limits = KeyLimits(**key.pop("limits", {}))
    client = client_of_command(ApiKey("sk-1", limits=limits, **key))
    assert (await client.get("/upstream/away/x")).status == 401
    assert (await client.get("/upstream/away/x", headers={"x-api-key": "sk-1"})).status == expected


async def test_body_of_a_get_request_is_refused(client_of_command):
    client = client_of_command()
    reply = await client.send("GET", "/upstream/away/x", b"ab", headers={"Content-Length": "2"})
    assert (reply.status, reply.error["message"]) == (400, "a GET request must have no body")


async def test_body_without_a_content_type_is_not_sent_as_json(client_of_command):
    client = client_of_command()
    await client.post("/upstream/away/x", b"bytes")
    headers = dict(client.gateway.job.relay.passthrough.headers)
    assert headers["Content-Type"] == "application/octet-stream"


def job_of(method: str) -> Job:
    relay = Relay("/x", b"", passthrough=Passthrough(method, ()))
    return Job("1", "A", "m", (), Sampling(max_tokens=1), relay=relay)


@pytest.mark.parametrize(
    ("method", "expected"),
    [("GET", True), ("PUT", True), ("DELETE", True), ("POST", False), ("PATCH", False)],
)
def test_only_requests_with_idempotent_methods_are_repeated(method, expected):
    assert job_of(method).may_be_repeated == expected


async def test_name_without_a_path_is_redirected_below_the_servers_prefix(client_of_command):
    app = client_of_command().app

    async def below(scope, receive, send):
        await app({**scope, "root_path": "/llm"}, receive, send)

    reply = await Client(below, None).get("/llm/upstream/lab/external")
    assert (reply.status, reply.headers["location"]) == (301, "/llm/upstream/lab/external/")
