"""LiteLLM: the same conversation by each of the dialects that it speaks, and errors as its exceptions."""

import pytest

from clients.conftest import MODEL
from clients.forms import QUESTION, Trip
from clients.packages import package

litellm = package("litellm")

# The package itself shows pydantic types and values that this warns of, and leaves connections open.
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.usefixtures("garbage_is_collected"),
]
MESSAGES = [{"role": "user", "content": QUESTION}]


@pytest.fixture(params=["openai", "anthropic", "ollama_chat"])
def options(request: pytest.FixtureRequest, server, base_url):
    url = base_url if request.param == "openai" else server.url
    common = {"messages": MESSAGES, "temperature": 0, "max_tokens": 20, "num_retries": 0}
    yield {"model": f"{request.param}/{MODEL}", "api_base": url, "api_key": "unused", **common}
    assert not any(server.wait_until_at_rest().values())


def test_streamed_answer_is_that_of_the_whole_one(options):
    whole = litellm.completion(**options).choices[0].message.content
    chunks = litellm.completion(**options, stream=True)
    assert whole
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole


def test_structured_output_fits_the_schema(server, base_url):
    answer = litellm.completion(
        model=f"openai/{MODEL}",
        api_base=base_url,
        api_key="unused",
        messages=MESSAGES,
        response_format=Trip,
        num_retries=0,
    )
    assert Trip.model_validate_json(answer.choices[0].message.content)


def test_unknown_model_is_an_exception_of_the_package(options):
    provider = options["model"].partition("/")[0]
    with pytest.raises((litellm.NotFoundError, litellm.APIConnectionError)):
        litellm.completion(**options | {"model": f"{provider}/absent"})
