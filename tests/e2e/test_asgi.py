"""`fairlead.asgi` under an unmodified Hypercorn: what clients and operators see."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import openai
import pytest
import trio
from openai import OpenAI

from e2e.real_server import START_S, configured, until
from e2e.slow_motion import slowed, stopped
from e2e.stock_server import StockServer, documented, stock_hypercorn

MODEL = "fairlead-demo"
ASK = [{"role": "user", "content": "Count from 1 to 5."}]
PROMPT = {"model": MODEL, "prompt": "Count from 1 to 90.", "ignore_eos": True}


@pytest.fixture(scope="module")
def server() -> Iterator[StockServer]:
    with stock_hypercorn() as running:
        yield running


@pytest.fixture(scope="module")
def client(server: StockServer) -> Iterator[OpenAI]:
    with open_client(server.url) as client:
        yield client


def open_client(url: str) -> OpenAI:
    return OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0)


@contextmanager
def long_stream(server: StockServer, max_tokens: int = 400) -> Iterator[tuple[httpx.Response, Iterator[str]]]:
    """Request a stream of hundreds of steps; yield the response and its lines from the second on."""
    body = {**PROMPT, "max_tokens": max_tokens, "n": 16, "stream": True}
    with server.http.stream("POST", "/v1/completions", json=body) as answer:
        lines = filter(None, answer.iter_lines())
        assert next(lines).startswith("data: {")
        yield answer, lines


def answers(server: StockServer) -> bool:
    """Return whether a new connection is served."""
    try:
        return httpx.get(f"{server.url}/health", timeout=0.5).status_code == 200
    except httpx.TransportError:
        return False


def is_gone(server: StockServer, children: set[int]) -> bool:
    """Check that the server exits with 0; return whether its models' processes have ended."""
    assert server.process.wait(START_S) == 0
    server.reader.join(START_S)
    return not any(Path(f"/proc/{pid}").exists() for pid in children)


def test_thirty_two_concurrent_streams_get_the_same_text_as_a_whole_answer(
    client: OpenAI, server: StockServer
):
    options = {"model": MODEL, "messages": ASK, "temperature": 0}
    whole = client.chat.completions.create(**options).choices[0].message.content

    def stream(number: int) -> str:
        chunks = client.chat.completions.create(stream=True, user=f"user-{number % 4}", **options)
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

    with ThreadPoolExecutor(32) as pool:
        texts = list(pool.map(stream, range(32)))
    assert whole == "1, 2, 3, 4, 5"
    assert texts == [whole] * 32
    assert not any(server.wait_until_at_rest().values())


def test_chunks_arrive_while_the_model_generates(server: StockServer):
    with long_stream(server) as (_, lines):
        with stopped(server.child_pid()):
            assert server.queue()["running"] == 1
        assert list(lines)[-1] == "data: [DONE]"
    assert not any(server.wait_until_at_rest().values())


def test_error_has_its_status_and_names_the_field(client: OpenAI):
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(model=MODEL, messages=ASK, temperature=9)
    assert error.value.param == "temperature"


@pytest.fixture(scope="module")
def narrow_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StockServer]:
    """A server with one slot, and a limit of 1000 bytes for bodies."""
    _, file = configured(tmp_path_factory.mktemp("narrow"), {"slots": 1}, limits={"bodyBytes": 1000})
    with stock_hypercorn(FAIRLEAD_CONFIG=file) as server:
        yield server


def test_body_over_the_limit_is_refused(narrow_server: StockServer):
    answer = narrow_server.http.post("/v1/completions", content=b"x" * 1001)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")


@pytest.mark.parametrize("stream", [True, False])
async def test_client_that_disconnects_while_its_job_runs_frees_slots_and_blocks(server: StockServer, stream):
    assert not any((await trio.to_thread.run_sync(server.wait_until_at_rest)).values())
    with slowed(server.child_pid()):  # unless cancelled, it would take minutes
        async with httpx.AsyncClient(base_url=server.url) as leaving:
            with trio.CancelScope() as asking:
                async with trio.open_nursery() as nursery:
                    body = {**PROMPT, "stream": stream, "max_tokens": 900, "n": 64}
                    nursery.start_soon(lambda: leaving.post("/v1/completions", json=body, timeout=None))
                    await trio.to_thread.run_sync(until, lambda: server.running()["sequences"])
                    asking.cancel()
        counts = await trio.to_thread.run_sync(server.wait_until_at_rest)
    assert not any(counts.values())


def test_client_that_disconnects_while_queued_is_dequeued_although_the_model_is_stopped(
    narrow_server: StockServer,
):
    server = narrow_server
    with stopped(server.child_pid()), ThreadPoolExecutor(2) as pool:
        clients = [httpx.Client(base_url=server.url) for _ in range(2)]
        for number, client in enumerate(clients):
            pool.submit(client.post, "/v1/completions", json={**PROMPT, "max_tokens": 900}, timeout=None)
            until(lambda n=number: (q := server.queue())["running"] + q["waiting"] == n + 1)
        _hang_up(clients[1])
        until(lambda: server.queue()["waiting"] == 0)
        assert server.queue()["running"] == 1
        _hang_up(clients[0])
        until(lambda: server.queue()["running"] == 0)
    assert not any(server.wait_until_at_rest().values())


def _hang_up(client: httpx.Client) -> None:
    """Shut down a client's connections while another thread waits for the answer."""
    for connection in client._transport._pool.connections:
        connection._connection._network_stream.get_extra_info("socket").shutdown(2)


def test_job_is_cancelled_by_its_request_id(server: StockServer):
    with long_stream(server) as (answer, lines):
        with stopped(server.child_pid()):
            path = f"/v1/requests/{answer.headers['x-request-id']}/cancel"
            assert server.http.post(path).status_code == 200
        with pytest.raises(httpx.RemoteProtocolError):  # an incomplete answer has no regular end
            _read_until_cancelled(lines)
    assert not any(server.wait_until_at_rest().values())


def _read_until_cancelled(lines: Iterator[str]) -> None:
    assert any('"code":"cancelled"' in line for line in lines)
    assert list(lines) == []


def test_sigterm_lets_running_answers_finish_within_graceful_timeout():
    with stock_hypercorn("--graceful-timeout", "60") as server:
        children = server.child_pids()
        with long_stream(server) as (_, lines):
            with stopped(server.child_pid()):
                server.process.send_signal(signal.SIGTERM)
                until(lambda: not answers(server))
            assert list(lines)[-1] == "data: [DONE]"
        assert is_gone(server, children)
        assert "outcome=success" in "".join(server.log)


def test_answer_that_takes_longer_than_graceful_timeout_is_cut_off_and_its_model_ends():
    with stock_hypercorn("--graceful-timeout", "1") as server:
        children = server.child_pids()
        with long_stream(server) as (_, lines):
            os.kill(server.child_pid(), signal.SIGSTOP)
            server.process.send_signal(signal.SIGTERM)
            with pytest.raises(httpx.RemoteProtocolError):
                list(lines)
        assert is_gone(server, children)


def test_server_that_drains_first_refuses_waiting_jobs_and_finishes_running_ones(tmp_path: Path):
    _, file = configured(tmp_path, {"slots": 1})
    program = documented("drain.py").replace("127.0.0.1:8000", "127.0.0.1:0")
    with (
        stock_hypercorn(command=("-c", program), FAIRLEAD_CONFIG=file) as server,
        ThreadPoolExecutor(1) as pool,
    ):
        children = server.child_pids()
        with long_stream(server, max_tokens=40) as (_, lines):
            with stopped(server.child_pid()):
                waiting = pool.submit(httpx.post, f"{server.url}/v1/completions", json=PROMPT, timeout=60)
                until(lambda: server.queue()["waiting"] == 1)
                server.process.send_signal(signal.SIGTERM)
                refused = waiting.result()
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
            assert list(lines)[-1] == "data: [DONE]"
        assert is_gone(server, children)


def test_wrong_configuration_ends_hypercorn_and_names_the_setting(tmp_path: Path):
    file = tmp_path / "fairlead.yaml"
    file.write_text("queue: {capacity: -1}\n")
    run = subprocess.run(
        [sys.executable, "-m", "hypercorn", "-k", "trio", "-b", "127.0.0.1:0", "fairlead.asgi:app"],
        env=os.environ | {"FAIRLEAD_CONFIG": str(file)},
        capture_output=True,
        text=True,
        timeout=START_S,
        check=False,
    )
    assert run.returncode == 0  # as `docs/asgi.md` warns
    assert re.search(r"Lifespan failure in startup\. '.*fairlead\.yaml:1: queue\.capacity: ", run.stderr)


def test_asyncio_worker_fails_with_a_message_that_requires_trio():
    run = subprocess.run(
        [sys.executable, "-m", "hypercorn", "-k", "asyncio", "-b", "127.0.0.1:0", "fairlead.asgi:app"],
        capture_output=True,
        text=True,
        timeout=START_S,
        check=False,
    )
    assert "Lifespan failure in startup. 'Fairlead runs on Trio only" in run.stderr


def test_app_answers_below_a_prefix_beside_another_quart_application(tmp_path: Path):
    (tmp_path / "website.py").write_text(documented("website.py"))
    path = os.pathsep.join([str(tmp_path), *sys.path])
    with stock_hypercorn(application="website:app", PYTHONPATH=path) as server:
        assert server.http.get("/").text == "the site"
        assert server.http.get("/llm/ready").json() == {"status": "ready"}
        assert 'src="dashboard/main.js"' in server.http.get("/llm/").text
        assert server.http.get("/llm/dashboard/main.js").status_code == 200
        assert server.http.get("/v1/models").status_code == 404
        with open_client(f"{server.url}/llm") as client:
            options = {"model": MODEL, "messages": ASK, "temperature": 0}
            whole = client.chat.completions.create(**options).choices[0].message.content
            chunks = client.chat.completions.create(stream=True, **options)
            assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole
