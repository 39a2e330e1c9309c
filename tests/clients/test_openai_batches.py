"""OpenAI's package with files and batches: in one process, with two fronts, and after kill -9."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from clients.conftest import MODEL
from e2e.real_server import RealServer, configured, real_server, until

openai = pytest.importorskip("openai")

ENDPOINT = "/v1/chat/completions"
BODY = {"model": MODEL, "messages": [{"role": "user", "content": "Count from 1 to 5."}], "temperature": 0}
FINAL = {"completed", "failed", "expired", "cancelled"}


def requests(count: int, **fields: object) -> bytes:
    lines = [
        {"custom_id": f"id-{index}", "method": "POST", "url": ENDPOINT, "body": BODY | fields}
        for index in range(count)
    ]
    return "\n".join(map(json.dumps, lines)).encode()


@pytest.fixture(scope="module", params=[1, 2], ids=["one process", "two fronts"])
def server(request, tmp_path_factory) -> Iterator[RealServer]:
    folder = tmp_path_factory.mktemp("server")
    settings = {"batches": {"folder": str(folder / "batches")}, "fronts": request.param}
    with real_server(*configured(folder, {}, **settings)) as running:
        yield running


def open_client(server: RealServer) -> "openai.OpenAI":
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=2)


@pytest.fixture
def client(server: RealServer) -> Iterator["openai.OpenAI"]:
    with open_client(server) as client:
        yield client


def create(client, content: bytes):
    file = client.files.create(file=("requests.jsonl", content), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=ENDPOINT, completion_window="24h")


def ended(client, batch):
    with_time = time.monotonic() + 60
    while batch.status not in FINAL:
        assert time.monotonic() < with_time, batch
        time.sleep(0.05)
        batch = client.batches.retrieve(batch.id)
    return batch


def test_batch_is_answered_line_by_line(client):
    batch = ended(client, create(client, requests(6)))
    assert (batch.status, batch.request_counts.completed, batch.error_file_id) == ("completed", 6, None)
    lines = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
    assert sorted(line["custom_id"] for line in lines) == [f"id-{index}" for index in range(6)]
    alone = client.chat.completions.create(**BODY).choices[0].message.content
    answers = {line["response"]["body"]["choices"][0]["message"]["content"] for line in lines}
    assert answers == {alone}
    assert batch.id in [each.id for each in client.batches.list()]


def test_files_are_listed_read_and_deleted(client):
    files = [client.files.create(file=(f"{index}.jsonl", requests(1)), purpose="batch") for index in range(3)]
    listed = [file.id for file in client.files.list(limit=2)]
    assert {file.id for file in files} <= set(listed)
    assert len(set(listed)) == len(listed)
    assert client.files.content(files[0].id).read() == requests(1)
    assert client.files.retrieve(files[0].id) == files[0]
    assert client.files.delete(files[0].id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(files[0].id)


def test_cancelled_batch_ends(client):
    batch = create(client, requests(200, max_tokens=200, extra={"ignore_eos": True}))
    assert client.batches.cancel(batch.id).status == "cancelling"
    assert ended(client, batch).status == "cancelled"


def test_invalid_file_fails_with_its_line(client):
    batch = ended(client, create(client, requests(1) + b"\n{"))
    assert batch.status == "failed"
    assert [(fault.code, fault.line) for fault in batch.errors.data] == [("invalid_json_line", 2)]


@pytest.mark.parametrize("fronts", [1, 2])
def test_lines_of_a_batch_pay_the_discounted_price_of_an_engines_model(tmp_path: Path, fronts: int):
    arguments = configured(
        tmp_path,
        {"price": {"input": 1000, "output": 1000, "batchDiscount": 0.25}},
        fronts=fronts,
        batches={"folder": str(tmp_path / "batches")},
        apiKeys=[{"key": "unused", "user": "ana", "role": "admin"}],
        budgets={"batchDiscount": 0.5, "users": {"ana": {"tokensPerDay": 10**6, "costPerDay": 1000}}},
    )
    with real_server(*arguments) as server, open_client(server) as client:

        def spent() -> tuple[float, float]:
            listed = client.get("/organization/budgets", cast_to=dict[str, object])
            tokens, cost = (use["used"] for use in listed["data"][0]["uses"])
            return tokens, cost

        for _ in range(4):
            usage = client.chat.completions.create(**BODY).usage
        until(lambda: spent()[0] == 4 * usage.total_tokens)
        alone = spent()
        assert alone[1] == pytest.approx(0.001 * alone[0])
        assert ended(client, create(client, requests(4))).status == "completed"
        until(lambda: spent()[0] == alone[0] + 4 * -(-usage.total_tokens // 2))
        assert spent()[1] == pytest.approx(alone[1] * 1.75)


def test_each_line_has_one_result_after_kill_9(tmp_path: Path):
    settings = {"batches": {"folder": str(tmp_path / "batches")}}
    arguments = configured(tmp_path, {}, **settings)
    with real_server(*arguments) as server, open_client(server) as client:
        batch = create(client, requests(60))
        (folder,) = tmp_path.glob("batches/batches")
        journal = folder / f"{batch.id}.results"
        until(lambda: journal.exists() and journal.read_bytes().count(b"\n") >= 5)
        server.process.kill()
    done = journal.read_bytes().count(b"\n")
    assert 5 <= done < 60
    with real_server(*arguments) as server, open_client(server) as client:
        batch = ended(client, client.batches.retrieve(batch.id))
        assert (batch.status, batch.request_counts.completed) == ("completed", 60)
        lines = client.files.content(batch.output_file_id).text.splitlines()
        ids = sorted(json.loads(line)["custom_id"] for line in lines)
        assert ids == sorted(f"id-{index}" for index in range(60))
