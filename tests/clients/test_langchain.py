"""langchain-openai: `with_structured_output` by each of its methods, `bind_tools`, and streams."""

import httpx
import pytest

from clients.conftest import MODEL
from clients.forms import QUESTION, GetWeather, Trip
from clients.packages import package

langchain_openai, messages = package("langchain_openai"), package("langchain_core.messages")

# The package itself passes parsed models to pydantic where pydantic expects none.
pytestmark = pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")


@pytest.fixture(scope="module")
def model(base_url):
    with httpx.Client(timeout=60) as http:
        options = {"base_url": base_url, "api_key": "unused", "http_client": http, "max_retries": 0}
        yield langchain_openai.ChatOpenAI(model=MODEL, temperature=1, seed=1, **options)


@pytest.mark.parametrize("options", [{}, {"method": "function_calling", "strict": True}], ids=str)
def test_structured_output_is_a_pydantic_model(model, options):
    answer = model.with_structured_output(Trip, **options).invoke(QUESTION)
    assert isinstance(answer, Trip)


def test_structured_output_may_be_a_dictionary(model):
    schema = Trip.model_json_schema()
    answer = model.with_structured_output(schema, method="json_schema", strict=True).invoke(QUESTION)
    assert Trip.model_validate(answer)


def test_structured_output_has_the_raw_message_if_requested(model):
    answer = model.with_structured_output(Trip, include_raw=True).invoke(QUESTION)
    assert answer["parsing_error"] is None
    assert Trip.model_validate_json(answer["raw"].content) == answer["parsed"]


@pytest.mark.parametrize("strict", [True, False, None])
@pytest.mark.parametrize("choice", ["any", "required", "GetWeather", True])
def test_bound_tools_are_called(model, choice, strict):
    bound = model.bind_tools([GetWeather], tool_choice=choice, strict=strict, parallel_tool_calls=False)
    answer = bound.invoke(QUESTION, max_tokens=200)
    if strict:
        (call,) = answer.tool_calls
        assert call["name"] == "GetWeather"
        assert GetWeather.model_validate(call["args"])
    else:  # arguments may be cut, as any object is allowed
        assert {call["name"] for call in (*answer.tool_calls, *answer.invalid_tool_calls)} == {"GetWeather"}


def test_result_of_a_call_is_read(model):
    bound = model.bind_tools([GetWeather], tool_choice="any", strict=True, parallel_tool_calls=False)
    asked = messages.HumanMessage(QUESTION)
    called = bound.invoke([asked])
    result = messages.ToolMessage("4 degrees", tool_call_id=called.tool_calls[0]["id"])
    answer = model.bind_tools([GetWeather]).invoke([asked, called, result], max_tokens=20)
    assert answer.usage_metadata["input_tokens"] > called.usage_metadata["input_tokens"]


def test_streamed_calls_are_merged(model):
    bound = model.bind_tools([GetWeather], tool_choice="any", strict=True, parallel_tool_calls=False)
    chunks = list(bound.stream(QUESTION))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    (call,) = whole.tool_calls
    assert GetWeather.model_validate(call["args"])
    assert len([chunk for chunk in chunks if chunk.tool_call_chunks]) > 2


def test_streamed_structured_output_ends_with_the_model(model):
    *_, last = model.with_structured_output(Trip).stream(QUESTION)
    assert isinstance(last, Trip)
