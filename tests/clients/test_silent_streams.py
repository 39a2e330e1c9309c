"""Clients skip what keeps a silent stream open: packages of OpenAI, Anthropic and Ollama, unmodified."""

from collections.abc import Callable
from pathlib import Path

import pytest
import trio

from fairlead.base.config import QueueConfig
from fairlead.base.job import Delta, Job
from server.routes.conftest import Step, client_of, small_model
from server.routes.raw_http import serving

MESSAGES = [{"role": "user", "content": "hello"}]


def paused(_job: Job) -> list[Step]:
    """Return the script of an answer with a pause in its middle."""
    return [[Delta(0, "Hello", [10])], 0.3, [Delta(0, " world", [11], finish_reason="stop")]]


def openai_chat(url: str) -> str:
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        chunks = client.chat.completions.create(model="small", messages=MESSAGES, stream=True)
        return "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)


def openai_completion(url: str) -> str:
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        chunks = client.completions.create(model="small", prompt="hello", stream=True)
        return "".join(choice.text for chunk in chunks for choice in chunk.choices)


def openai_response(url: str) -> str:
    openai = pytest.importorskip("openai")
    with (
        openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client,
        client.responses.stream(model="small", input="hello") as events,
    ):
        return events.get_final_response().output_text


def anthropic_message(url: str) -> str:
    anthropic = pytest.importorskip("anthropic")
    with (
        anthropic.Anthropic(base_url=url, api_key="none") as client,
        client.messages.stream(model="small", messages=MESSAGES, max_tokens=9) as events,
    ):
        return events.get_final_text()


def ollama_chat(url: str) -> str:
    ollama = pytest.importorskip("ollama", exc_type=ImportError)
    with ollama.Client(url) as client:
        parts = client.chat("small", MESSAGES, stream=True)
        return "".join(part.message.content for part in parts)


def ollama_text(url: str) -> str:
    ollama = pytest.importorskip("ollama", exc_type=ImportError)
    with ollama.Client(url) as client:
        return "".join(part.response for part in client.generate("small", "hello", stream=True))


@pytest.mark.parametrize(
    "text_of",
    [openai_chat, openai_completion, openai_response, anthropic_message, ollama_chat, ollama_text],
    ids=lambda text_of: text_of.__name__,
)
async def test_client_reads_the_text_of_a_stream_with_a_pause(
    tmp_path: Path, text_of: Callable[[str], str]
) -> None:
    client = client_of(small_model(tmp_path), queue=QueueConfig(keep_alive_s=0.04))
    client.gateway.script = paused
    client.gateway.wait_s = 0.2
    async with serving(client.app) as listening:
        host, port = listening.address
        text = await trio.to_thread.run_sync(text_of, f"http://{host}:{port}")
    assert text == "Hello world"
