"""langchain-anthropic and langchain-ollama: answers, streams, tools with a result, and structured output."""

from collections.abc import Iterator
from typing import Any

import pytest

from clients.conftest import MODEL
from clients.forms import QUESTION, GetWeather, Trip
from clients.packages import package
from e2e.real_server import RealServer

messages = package("langchain_core.messages")

# The packages leave connections open.
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.usefixtures("garbage_is_collected"),
]


def anthropic_model(server: RealServer) -> Any:
    package = pytest.importorskip("langchain_anthropic", exc_type=ImportError)
    return package.ChatAnthropic(
        model=MODEL, base_url=server.url, api_key="unused", temperature=0, max_tokens=200, max_retries=0
    )


def ollama_model(server: RealServer) -> Any:
    package = pytest.importorskip("langchain_ollama", exc_type=ImportError)
    return package.ChatOllama(model=MODEL, base_url=server.url, temperature=0, num_predict=200)


@pytest.fixture(params=[anthropic_model, ollama_model])
def model(request: pytest.FixtureRequest, server: RealServer) -> Iterator[Any]:
    yield request.param(server)
    assert not any(server.wait_until_at_rest().values())


def test_streamed_answer_is_that_of_the_whole_one(model):
    whole = model.invoke(QUESTION)
    chunks = list(model.stream(QUESTION))
    assert whole.text
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert whole.usage_metadata["output_tokens"] > 0


def test_structured_output_of_anthropics_model_is_a_pydantic_model(server):
    # Anthropic's package leaves bounds of numbers and lists out of a schema, so this one has none.
    chosen = anthropic_model(server).with_structured_output(GetWeather, method="json_schema")
    assert isinstance(chosen.invoke(QUESTION), GetWeather)


def test_structured_output_of_ollamas_model_is_a_pydantic_model(server):
    assert isinstance(ollama_model(server).with_structured_output(Trip).invoke(QUESTION), Trip)


def test_result_of_a_call_is_read(server):
    model = anthropic_model(server)
    bound = model.bind_tools([GetWeather], tool_choice="any", strict=True, parallel_tool_calls=False)
    asked = messages.HumanMessage(QUESTION)
    called = bound.invoke([asked])
    (call,) = called.tool_calls
    assert GetWeather.model_validate(call["args"])
    result = messages.ToolMessage("4 degrees", tool_call_id=call["id"])
    answer = model.bind_tools([GetWeather]).invoke([asked, called, result])
    assert answer.usage_metadata["input_tokens"] > called.usage_metadata["input_tokens"]
