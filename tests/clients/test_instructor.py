"""instructor: responses as pydantic models, by a schema."""

import pytest
from openai import OpenAI

from clients.conftest import MODEL
from clients.forms import QUESTION, Trip
from clients.packages import package

instructor = package("instructor")

MESSAGES = [{"role": "user", "content": QUESTION}]


# The mode TOOLS calls a named function without `strict`.
@pytest.mark.parametrize("mode", ["JSON_SCHEMA", "TOOLS"])
def test_response_is_a_pydantic_model(base_url, mode):
    with OpenAI(base_url=base_url, api_key="unused", max_retries=0) as plain:
        client = instructor.from_openai(plain, mode=instructor.Mode[mode])
        answer, completion = client.chat.completions.create_with_completion(
            model=MODEL, messages=MESSAGES, response_model=Trip, max_retries=0, temperature=1, seed=2
        )
    assert isinstance(answer, Trip)
    assert completion.usage.completion_tokens > 0


def test_partial_response_grows_until_it_is_whole(base_url):
    with OpenAI(base_url=base_url, api_key="unused", max_retries=0) as plain:
        client = instructor.from_openai(plain, mode=instructor.Mode.JSON_SCHEMA)
        answers = list(
            client.chat.completions.create_partial(
                model=MODEL, messages=MESSAGES, response_model=Trip, max_retries=0, seed=2
            )
        )
    assert len(answers) > 2
    assert Trip.model_validate(answers[-1].model_dump())
