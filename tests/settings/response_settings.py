"""Scenarios for the settings of kept responses."""

import trio

from settings.cases import setting
from settings.served import Served

PATH = "/v1/responses"
LARGE = "x " * 400


async def created(server: Served, text: str = "hello") -> str:
    """Create a response, and return its id."""
    body = {"model": "m", "input": text, "max_output_tokens": 3}
    answer = await server.fetch(PATH, body)
    assert answer.status == 200, answer
    return str(answer.document["id"])


async def status(server: Served, response_id: str) -> int:
    return (await server.fetch(f"{PATH}/{response_id}")).status


@setting("responses.store", {"responses": {"store": False}})
async def responses_are_not_kept(server: Served) -> None:
    assert await status(server, await created(server)) == 404
    refused = await server.fetch(PATH, {"model": "m", "input": "hello", "background": True})
    assert refused.status == 400, refused


@setting("responses.maxBytes", {"responses": {"maxBytes": 5000}})
async def oldest_response_is_removed_for_the_newest(server: Served) -> None:
    first = await created(server, LARGE)
    second = await created(server, LARGE)
    assert [await status(server, each) for each in (first, second)] == [404, 200]


@setting("responses.ttl", {"responses": {"ttl": 20}})
async def response_expires(server: Served) -> None:
    response_id = await created(server)
    await trio.sleep(15)
    assert await status(server, response_id) == 200
    await trio.sleep(10)
    assert await status(server, response_id) == 404
