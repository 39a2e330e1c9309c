"""pydantic-ai: agents that return a pydantic model, by a tool and by a schema, and agents with tools."""

import asyncio
from typing import Annotated

import httpx
import pytest
from pydantic import Field

from clients.conftest import MODEL
from clients.forms import QUESTION, City, GetWeather, Trip
from clients.packages import package

pydantic_ai = package("pydantic_ai")
models, providers = package("pydantic_ai.models.openai"), package("pydantic_ai.providers.openai")

# Without a client of ours, its connections stay open until the process ends.
pytestmark = pytest.mark.filterwarnings("ignore:`httpx.AsyncClient` support")


def output_of(base_url, output_type):
    """Return what an agent with this type of output answers."""

    async def run():
        async with httpx.AsyncClient(timeout=60) as http:
            provider = providers.OpenAIProvider(base_url=base_url, api_key="unused", http_client=http)
            model = models.OpenAIChatModel(MODEL, provider=provider)
            agent = pydantic_ai.Agent(model, output_type=output_type, retries=0, model_settings={"seed": 3})
            return await agent.run(QUESTION)

    return asyncio.run(run()).output


def test_output_by_a_schema_is_a_pydantic_model(base_url):
    assert isinstance(output_of(base_url, pydantic_ai.NativeOutput(Trip, strict=True)), Trip)


def test_output_by_a_tool_is_a_pydantic_model(base_url):
    assert isinstance(output_of(base_url, pydantic_ai.ToolOutput(Trip, strict=True)), Trip)


@pytest.mark.parametrize("many", [False, True])
def test_output_may_be_one_of_several_types_or_a_list(base_url, many):
    kinds = Annotated[list[City], Field(max_length=2)] if many else [City, GetWeather]
    answer = output_of(base_url, pydantic_ai.NativeOutput(kinds, strict=True))
    assert all(isinstance(one, City | GetWeather) for one in (answer if many else [answer]))


def test_streamed_output_ends_with_the_model(base_url):
    async def run():
        async with httpx.AsyncClient(timeout=60) as http:
            provider = providers.OpenAIProvider(base_url=base_url, api_key="unused", http_client=http)
            agent = pydantic_ai.Agent(
                models.OpenAIChatModel(MODEL, provider=provider), output_type=pydantic_ai.NativeOutput(Trip)
            )
            async with agent.run_stream(QUESTION, model_settings={"seed": 3}) as stream:
                return [one async for one in stream.stream_output(debounce_by=None)]

    answers = asyncio.run(run())
    assert isinstance(answers[-1], Trip)
