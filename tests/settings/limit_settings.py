"""Scenarios for the limits on the resources that a client can hold."""

import signal
from typing import Any
from unittest.mock import patch

import trio

from fairlead.language.structured.trial_messages import TrialResult
from fairlead.language.structured.trial_process import CALLS
from fairlead.language.structured.trials import GrammarTrials
from settings.cases import setting
from settings.queue_settings import RELAY_NODE
from settings.served import Pending, Served
from simulation.http_client import Client, request

SLOW_READER_BUFFER_BYTES = 400


def limited(**limits: object) -> dict[str, object]:
    return {"limits": limits}


async def status(server: Served, **options: object) -> int:
    return (await server.complete(**options).done()).status


@setting("limits.bodyBytes", limited(bodyBytes=1000))
async def bytes_of_a_body_are_limited(server: Served) -> None:
    assert await status(server, prompt="x" * 500) == 200
    assert await status(server, prompt="x " * 500) == 413


@setting("limits.bodyValues", limited(bodyValues=20))
async def values_of_a_body_are_limited(server: Served) -> None:
    assert await status(server, stop=["x"] * 4) == 200
    assert await status(server, logit_bias={str(number): 1 for number in range(20)}) == 400


@setting("limits.requestTokens", limited(requestTokens=50))
async def tokens_of_a_request_are_limited(server: Served) -> None:
    assert await status(server, prompt=[[5] * 20, [6] * 20]) == 200
    assert await status(server, prompt=[[5] * 30, [6] * 30]) == 400


@setting(
    "limits.bodiesBytes",
    limited(bodiesBytes=250_000, bodyBytes=150_000) | {"nodes": [RELAY_NODE | {"seats": 9}]},
)
async def bytes_of_all_bodies_are_limited(server: Served) -> None:
    server.upstream.delay_s = 5
    await server.until(lambda: server.upstream.times)
    jobs = []
    for _ in range(3):
        jobs.append(server.complete("x" * 100_000, model="far", host="10.0.3.9"))
        await trio.sleep(0.5)
    assert [(await job.done()).status for job in jobs] == [200, 200, 429]


FORM = {"Content-Type": "multipart/form-data; boundary=b"}
NODES = {"nodes": [RELAY_NODE | {"seats": 9}]}


def form(file: bytes = b"RIFF") -> bytes:
    """Return a form for speech, which a node transcribes."""
    disposition = b"--b\r\nContent-Disposition: form-data; name="
    return b"".join(
        (
            disposition,
            b"model\r\n\r\nfar\r\n",
            disposition,
            b"file; filename=a\r\n\r\n",
            file,
            b"\r\n--b--\r\n",
        )
    )


def transcribe(server: Served, file: bytes = b"RIFF", **options: Any) -> Pending:
    """Begin to send a form."""
    return server.start("/v1/audio/transcriptions", form(file), headers=FORM, **options)


@setting("limits.uploadBytes", limited(uploadBytes=1000) | NODES)
async def bytes_of_a_form_are_limited(server: Served) -> None:
    await server.until(lambda: server.upstream.times)
    sizes = (500, 1000)
    assert [(await transcribe(server, b"x" * size).done()).status for size in sizes] == [200, 413]


@setting("limits.uploadsBytes", limited(uploadsBytes=250_000, uploadBytes=150_000) | NODES)
async def bytes_of_all_forms_are_limited(server: Served) -> None:
    server.upstream.delay_s = 5
    await server.until(lambda: server.upstream.times)
    jobs = []
    for _ in range(3):
        jobs.append(transcribe(server, b"x" * 100_000, host="10.0.3.9"))
        await trio.sleep(0.5)
    assert [(await job.done()).status for job in jobs] == [200, 200, 429]


@setting("limits.answersBytes", limited(answersBytes=20_000))
async def bytes_of_unread_answers_are_limited(server: Served) -> None:
    """Two answers fit the budget for one tenant, but not a third."""
    for _ in range(3):
        end = server.system.network.open_connection("10.0.4.1", buffer_bytes=SLOW_READER_BUFFER_BYTES)
        await end.send(request("GET", "/metrics"))
        await trio.sleep(0.5)
    await server.until(lambda: any(event["event"] == "unread answer dropped" for event in server.log), 10)


@setting("limits.headerBytes", limited(headerBytes=2000))
async def bytes_of_headers_are_limited(server: Served) -> None:
    assert (await server.fetch("/queue", headers={"X-Long": "x" * 3000})).status == 431


@setting("limits.headers", limited(headers=10))
async def number_of_headers_is_limited(server: Served) -> None:
    assert (await server.fetch("/queue", headers={f"X-{number}": "1" for number in range(20)})).status == 431


@setting("limits.connections", limited(connections=4))
async def number_of_connections_is_limited(server: Served) -> None:
    for _ in range(4):
        server.connect()
    await trio.sleep(0.1)
    assert (await server.fetch("/queue")).status == 503


@setting("limits.grammarTimeout", limited(grammarTimeout=0.02))
async def time_to_compile_a_schema_is_limited(server: Served) -> None:
    """The process that compiles it cannot run here: `tests/language/structured/test_trials.py` ends a real
    one."""

    def run(self: GrammarTrials, _grammar: str, _owner: str) -> TrialResult:
        return TrialResult(f"it takes more than {self.cpu_s:g} s to compile")

    def call(_trials: GrammarTrials, name: str, *arguments: Any, owner: str) -> Any:
        assert owner
        return CALLS[name](*arguments)

    with patch.object(GrammarTrials, "run", run), patch.object(GrammarTrials, "call", call):
        answer = await server.complete(structured_outputs={"json": {}}, ignore_eos=False).done()
    assert answer.status == 400
    assert b"more than 0.02 s" in answer.body


@setting("limits.uploadTimeout", limited(uploadTimeout=2) | NODES)
async def slow_form_times_out(server: Served) -> None:
    await server.until(lambda: server.upstream.times)
    client = server.connect()
    began_s = trio.current_time()
    answer = await client.fetch(
        request("POST", "/v1/audio/transcriptions", form(b"x" * 100), headers=FORM)[:-50]
    )
    assert answer is not None
    assert answer.status == 408
    assert trio.current_time() - began_s < 3


@setting("limits.bodyTimeout", limited(bodyTimeout=2))
async def slow_body_times_out(server: Served) -> None:
    client = server.connect()
    began_s = trio.current_time()
    head = request("POST", "/v1/completions", b"x" * 100)
    answer = await client.fetch(head[:-50])
    assert answer is not None
    assert answer.status == 408
    assert trio.current_time() - began_s < 3


async def closed_after_s(client: Client) -> float:
    """Return how long the server kept a connection open."""
    began_s = trio.current_time()
    while await client.end.receive():
        pass
    return trio.current_time() - began_s


@setting("limits.headerTimeout", limited(headerTimeout=2))
async def slow_headers_time_out(server: Served) -> None:
    client = server.connect()
    await client.end.send(b"GET /queue HTTP/1.1\r\n")
    assert 1 < await closed_after_s(client) < 4


@setting("limits.idleTimeout", limited(idleTimeout=2))
async def idle_connection_is_closed(server: Served) -> None:
    client = server.connect()
    assert await client.fetch(request("GET", "/queue")) is not None
    assert 1 < await closed_after_s(client) < 4


@setting("limits.stall", limited(stall=2))
async def client_that_does_not_read_is_dropped(server: Served) -> None:
    end = server.system.network.open_connection("10.0.4.1", buffer_bytes=SLOW_READER_BUFFER_BYTES)
    body = {"model": "m", "prompt": "a", "stream": True, "ignore_eos": True}
    await end.send(request("POST", "/v1/completions", body))
    await server.until(
        lambda: any(event["event"] == "connection dropped" for event in server.log), within_s=10
    )


@setting("limits.drain", limited(drain=1))
async def running_job_is_ended_after_the_drain_timeout(server: Served) -> None:
    server.complete(tokens=200)
    await trio.sleep(0.5)
    began_s = trio.current_time()
    server.system.signals.send(signal.SIGTERM)
    await server.parent.has_ended.wait()
    assert 0.9 < trio.current_time() - began_s < 5


@setting("limits.drainDelay", limited(drainDelay=2))
async def stopped_server_takes_requests_for_a_time_and_then_answers_probes_only(server: Served) -> None:
    assert (await server.fetch("/ready")).status == 200
    server.system.signals.send(signal.SIGTERM)
    await trio.sleep(0.5)
    assert not server.parent.has_ended.is_set()
    assert (await server.fetch("/ready")).status == 503
    running = server.complete(tokens=200)
    await trio.sleep(2)
    assert (await server.fetch("/ready")).status == 503
    assert await status(server) == 503
    assert (await server.fetch("/metrics")).status == 200
    assert (await running.done()).status == 200
    await server.parent.has_ended.wait()


@setting("limits.sequences", limited(sequences=2))
async def number_of_answers_to_a_request_is_limited(server: Served) -> None:
    assert await status(server, n=2) == 200
    assert await status(server, n=3) == 400
