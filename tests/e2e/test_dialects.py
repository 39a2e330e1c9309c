"""One conversation has the same answer and token counts in every dialect, also if the model is killed.

Chats and responses with a killed model are in `test_failover.py` and `test_responses_failover.py`.
"""

import json
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import httpx
import pytest

from e2e.own_copy import own_copy
from e2e.real_server import TIMEOUT_S, RealServer, configured, real_server
from e2e.test_failover import CONTEXT, NUMBERS, struck_midway, wait_until_ready

MODEL = "fairlead-demo"
MESSAGES = [
    {"role": "user", "content": "What is Fairlead?"},
    {"role": "assistant", "content": "A server."},
    {"role": "user", "content": "Count from 1 to 5."},
]


class Usage(NamedTuple):
    prompt: int
    generated: int


class Conversation(NamedTuple):
    """A dialect. `text` and `failure` read one event of a stream, `whole` and `usage` a whole answer.

    With the fields `long`, an answer has hundreds of tokens.
    """

    path: str
    fields: Callable[[int, float], dict[str, Any]]
    text: Callable[[dict[str, Any]], str | None]
    whole: Callable[[dict[str, Any]], str]
    usage: Callable[[dict[str, Any]], Usage]
    failure: Callable[[dict[str, Any]], Any]
    long: dict[str, Any] | None = None


CHAT = Conversation(
    "/v1/chat/completions",
    lambda tokens, temperature: {"messages": MESSAGES, "max_tokens": tokens, "temperature": temperature},
    lambda event: event["choices"][0]["delta"].get("content") if event.get("choices") else None,
    lambda answer: answer["choices"][0]["message"]["content"],
    lambda answer: Usage(answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]),
    lambda event: event.get("error", {}).get("code"),
)
RESPONSES = Conversation(
    "/v1/responses",
    lambda tokens, temperature: {
        "input": MESSAGES,
        "max_output_tokens": tokens,
        "temperature": temperature,
        "store": False,
    },
    lambda event: event["delta"] if event["type"] == "response.output_text.delta" else None,
    lambda answer: answer["output"][0]["content"][0]["text"],
    lambda answer: Usage(answer["usage"]["input_tokens"], answer["usage"]["output_tokens"]),
    lambda event: event["response"]["error"]["type"] if event["type"] == "response.failed" else None,
)
ANTHROPIC = Conversation(
    "/v1/messages",
    lambda tokens, temperature: {"messages": MESSAGES, "max_tokens": tokens, "temperature": temperature},
    lambda event: event["delta"].get("text") if event["type"] == "content_block_delta" else None,
    lambda answer: answer["content"][0]["text"],
    lambda answer: Usage(
        answer["usage"]["input_tokens"] + answer["usage"]["cache_read_input_tokens"],
        answer["usage"]["output_tokens"],
    ),
    lambda event: event["error"]["code"] if event["type"] == "error" else None,
    long={"output_config": {"format": {"type": "json_schema", "schema": NUMBERS}}},
)
OLLAMA = Conversation(
    "/api/chat",
    lambda tokens, temperature: {
        "messages": MESSAGES,
        "options": {"num_predict": tokens, "temperature": temperature},
    },
    lambda event: event.get("message", {}).get("content"),
    lambda answer: answer["message"]["content"],
    lambda answer: Usage(answer["prompt_eval_count"], answer["eval_count"]),
    lambda event: "node_failed" if "error" in event else None,
    long={"format": NUMBERS},
)
KILLED = {"messages": ANTHROPIC, "ollama": OLLAMA}
DIALECTS = {"chat": CHAT, "responses": RESPONSES, "messages": ANTHROPIC, "ollama": OLLAMA}


class StreamedAnswer(NamedTuple):
    text: str
    failure: str | None
    is_cut: bool


def asked(server: RealServer, dialect: Conversation, tokens: int = 20, **fields: Any) -> dict[str, Any]:
    body = {"model": MODEL, **dialect.fields(tokens, 0), "stream": False, **fields}
    reply = server.http.post(dialect.path, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def streamed(
    server: RealServer,
    dialect: Conversation,
    tokens: int,
    temperature: float,
    on_text: Callable[[], None] = lambda: None,
) -> StreamedAnswer:
    """Read a stream; call `on_text` when the first text has arrived."""
    body = {"model": MODEL, **dialect.fields(tokens, temperature), "stream": True}
    if tokens > 100:
        body |= dialect.long or {}
    texts: list[str] = []
    failure, is_cut, has_text = None, False, False
    with httpx.stream("POST", f"{server.url}{dialect.path}", json=body, timeout=TIMEOUT_S) as response:
        assert response.status_code == 200, response.read()
        try:
            for line in response.iter_lines():
                if not line.startswith(("data: {", "{")):
                    continue
                event = json.loads(line.removeprefix("data: "))
                texts.append(dialect.text(event) or "")
                failure = dialect.failure(event)
                if texts[-1] and not has_text:
                    has_text = True
                    on_text()
        except httpx.RemoteProtocolError:
            is_cut = True
    return StreamedAnswer("".join(texts), failure, is_cut)


def test_answer_and_token_counts_are_the_same_in_every_dialect(server: RealServer):
    answers = {name: asked(server, dialect) for name, dialect in DIALECTS.items()}
    texts = {dialect.whole(answers[name]) for name, dialect in DIALECTS.items()}
    counts = {dialect.usage(answers[name]) for name, dialect in DIALECTS.items()}
    assert len(texts) == len(counts) == 1
    assert counts.pop().generated <= 20
    assert texts == {streamed(server, dialect, 20, 0).text for dialect in DIALECTS.values()}
    assert not any(server.wait_until_at_rest().values())


@pytest.fixture(scope="module")
def doomed_server(tmp_path_factory: pytest.TempPathFactory):
    """A server with a model that is killed, and a context in which every answer fits."""
    folder = tmp_path_factory.mktemp("killed")
    model = {"path": str(own_copy(folder / "model", max_position_embeddings=CONTEXT))}
    with real_server(*configured(folder, model)) as running:
        yield running


@pytest.fixture(scope="module")
def expected(doomed_server: RealServer) -> dict[str, StreamedAnswer]:
    """Greedy answers that nothing disturbs."""
    with ThreadPoolExecutor(len(KILLED)) as pool:
        runs = {name: pool.submit(streamed, doomed_server, KILLED[name], 400, 0) for name in KILLED}
    return {name: run.result() for name, run in runs.items()}


@pytest.fixture(scope="module")
def answers(doomed_server: RealServer, expected: dict[str, StreamedAnswer]) -> dict[str, StreamedAnswer]:
    """Return the answers of all clients. The model is killed after each of them has got some text."""

    def client(name: str, tokens: int, temperature: float) -> Callable[[Callable[[], None]], StreamedAnswer]:
        return lambda begin: streamed(doomed_server, KILLED[name], tokens, temperature, begin)

    clients = {f"greedy {name}": client(name, 400, 0) for name in KILLED}
    clients |= {f"random {name}": client(name, 20_000, 1.5) for name in KILLED}
    struck = struck_midway(doomed_server, signal.SIGKILL, clients, sequences=len(clients))
    wait_until_ready(doomed_server)
    return struck


@pytest.mark.parametrize("name", KILLED)
def test_greedy_answer_continues_exactly_when_the_model_is_killed(
    doomed_server: RealServer, expected, answers, name
):
    assert answers[f"greedy {name}"] == expected[name]
    assert len(expected[name].text) > 300
    assert (expected[name].failure, expected[name].is_cut) == (None, False)
    assert not any(doomed_server.wait_until_at_rest().values())


@pytest.mark.parametrize("name", KILLED)
def test_random_answer_ends_with_an_error_and_a_cut_when_the_model_is_killed(
    doomed_server: RealServer, answers, name
):
    answer = answers[f"random {name}"]
    assert (answer.failure, answer.is_cut) == ("node_failed", True)
    assert not any(doomed_server.wait_until_at_rest().values())
