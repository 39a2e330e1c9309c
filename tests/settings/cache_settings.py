"""Scenarios for the settings of the KV cache: the engine is real, its process is simulated."""

from typing import Any

import trio

from settings.cases import setting
from settings.prompts import random_text
from settings.served import Served

BLOCK = 16


def cache(**settings: object) -> dict[str, Any]:
    return {"models": {"m": {"kvCache": settings, "maxModelLen": 512}}}


async def hits(server: Served, prompt: str, user: str) -> int:
    """Request a completion; return how many tokens of the prompt were in the cache."""
    before = server.engine.statistics.prefix_hits
    assert (await server.complete(prompt, user=user, tokens=2).done()).status == 200
    return server.engine.statistics.prefix_hits - before


@setting("models.ENGINE.kvCache.isolateTenants", cache(isolateTenants=False))
async def tenants_may_share_the_cache(server: Served) -> None:
    prompt = random_text(80)
    assert await hits(server, prompt, "A") == 0
    assert await hits(server, prompt, "B") >= 2 * BLOCK


@setting("models.ENGINE.kvCache.maxEntries", cache(maxEntries=64))
async def tokens_of_a_request_and_of_the_cache_are_limited(server: Served) -> None:
    for number in range(4):
        await server.complete(random_text(20, number)).done()
    await trio.sleep(5)
    assert 0 < server.engine.statistics.cached_tokens <= 64, server.engine.statistics
    refused = await server.complete(random_text(200)).done()
    assert (refused.status, refused.error) == (400, "context_length_exceeded"), refused


@setting("models.ENGINE.kvCache.maxMemoryMb", {"models": {"m": {"kvCache": {"maxMemoryMb": 1}}}})
async def memory_of_the_cache_is_limited(server: Served) -> None:
    (running,) = await server.get_json("/running")
    # A block takes 24 KiB in bfloat16, and 48 KiB in float32, which processors without bfloat16 use.
    assert running["engine"]["blocks_total"] in {42, 21}, running


@setting("models.ENGINE.kvCache.evictionThreshold", cache(evictionThreshold=0.2))
async def kept_requests_fill_the_configured_fraction_of_the_cache(server: Served) -> None:
    for number in range(6):
        await server.complete(random_text(60, number), tokens=2).done()
    await trio.sleep(5)
    (running,) = await server.get_json("/running")
    engine = running["engine"]
    kept = engine["cached_tokens"] / (engine["blocks_total"] * BLOCK)
    assert 0 < kept <= 0.2, running


@setting(
    "models.ENGINE.kvCache.cleanupInterval", cache(cleanupInterval=100, evictionThreshold=0.1, maxEntries=500)
)
async def idle_cache_is_trimmed_at_the_interval(server: Served) -> None:
    for number in range(4):
        await server.complete(random_text(60, number), tokens=2).done()
    await trio.sleep(20)
    assert server.engine.statistics.cached_tokens > 50, server.engine.statistics
    await trio.sleep(100)
    assert server.engine.statistics.cached_tokens <= 50, server.engine.statistics


@setting("models.ENGINE.kvCache.evictionPolicy", cache(evictionPolicy="fifo", maxEntries=190))
async def request_kept_first_is_evicted_first(server: Served) -> None:
    first, second = random_text(60, 1), random_text(60, 2)
    await hits(server, first, "A")
    await hits(server, second, "A")
    assert await hits(server, first[:150], "A") > 0, "its beginning is used again"
    await hits(server, random_text(60, 3), "A")
    await trio.sleep(5)
    assert await hits(server, second, "A") > 0
