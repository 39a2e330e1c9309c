"""Scenarios for models that our engine runs: the engine and its weights are real."""

from typing import Any

import trio

from fairlead.engine import threads
from language.text.model_folders import NO_TENSORS
from settings.cases import setting
from settings.command_settings import card, chat
from settings.prompts import random_text
from settings.served import Served
from simulation.parent import model_folder

DEMO_BYTES = 5_318_400


def model(**settings: object) -> dict[str, Any]:
    return {"models": {"m": settings}}


async def loaded(server: Served) -> dict[str, Any]:
    """Return the log line of the last model that was loaded."""
    await server.until(lambda: any(event["event"] == "model loaded" for event in server.log))
    return [event for event in server.log if event["event"] == "model loaded"][-1]


async def running(server: Served) -> dict[str, Any]:
    (found,) = await server.get_json("/running")
    return dict(found)


def _without_tensors() -> str:
    """Return a folder that a server accepts, but from which its model cannot be loaded."""
    folder = model_folder("without tensors")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").write_bytes(NO_TENSORS)
    return str(folder)


@setting("models.ENGINE.path", model(path="DEMO", preload=False), alternative=_without_tensors())
async def model_is_loaded_from_its_folder(server: Served) -> None:
    answer = await server.complete().done()
    assert answer.status == 200, answer


@setting("models.ENGINE.aliases", model(aliases=["n"]))
async def model_has_aliases(server: Served) -> None:
    assert (await server.complete(model="n").done()).status == 200


@setting("models.ENGINE.device", model(device="cuda:77", preload=False))
async def model_runs_on_the_configured_device(server: Served) -> None:
    answer = await server.complete().done()
    assert answer.status == 502, answer
    assert "cuda:77" in answer.document["error"]["message"], answer


@setting("models.ENGINE.dtype", model(dtype="float16"))
async def weights_have_the_configured_type(server: Served) -> None:
    assert (await loaded(server))["dtype"] == "float16"


@setting("models.ENGINE.quantization", model(quantization="int8"))
async def weights_are_quantized_to_8_bits(server: Served) -> None:
    assert (await loaded(server))["weight_bytes"] < 0.8 * DEMO_BYTES
    assert (await server.complete().done()).status == 200


@setting("models.ENGINE.slots", model(slots=2))
async def running_sequences_are_limited(server: Served) -> None:
    jobs = [server.complete(tokens=20) for _ in range(4)]
    await trio.sleep(0.5)
    assert (await running(server))["busy"] == 2
    assert [(await job.done()).status for job in jobs] == [200] * 4


@setting("models.ENGINE.maxBatch", model(slots=2, maxBatch=1))
async def sequences_of_a_step_are_limited(server: Served) -> None:
    jobs = [server.complete("a"), server.complete("a")]
    assert [(await job.done()).status for job in jobs] == [200] * 2
    assert server.engine.computed.count(2) <= 2, server.engine.computed  # at most the two prompts
    assert len(server.engine.computed) >= 10


@setting("models.ENGINE.maxBatchedTokens", model(maxBatchedTokens=32))
async def tokens_of_a_step_are_limited(server: Served) -> None:
    await server.complete(random_text(60)).done()
    assert max(server.engine.computed) == 32, server.engine.computed


@setting("models.ENGINE.targetStep", model(targetStep=0, slots=2, maxModelLen=512))
async def prompts_beside_answers_fill_the_step(server: Served) -> None:
    """Otherwise the first chunk is short, because its cost is not known."""
    answer = server.complete("a", tokens=60)
    await trio.sleep(1)
    assert (await server.complete(random_text(200), tokens=1).done()).status == 200
    assert (await answer.done()).status == 200
    assert max(server.engine.computed) > 150, server.engine.computed


@setting("models.ENGINE.speculation.ngram", model(speculation={"ngram": 64}, maxModelLen=512))
async def drafts_follow_only_as_many_tokens_as_are_configured(server: Served) -> None:
    assert (await server.complete([5, 6, 7, 8] * 4, tokens=40).done()).status == 200
    assert server.engine.statistics.draft_tokens == 0, server.engine.statistics


@setting("models.ENGINE.speculation.drafts", model(speculation={"ngram": 1, "drafts": 2}, maxModelLen=512))
async def drafts_of_a_step_are_limited(server: Served) -> None:
    await server.complete([5, 6, 7, 8] * 8, tokens=64).done()
    assert max(server.engine.computed[1:]) == 1 + 2, server.engine.computed
    metrics = (await server.fetch("/metrics")).body.decode()
    counts = [
        int(float(line.rpartition(" ")[2]))
        for name in ("draft", "accepted")
        for line in metrics.splitlines()
        if line.startswith(f'fairlead_model_{name}_tokens_total{{model="m"}}')
    ]
    assert 0 < counts[1] <= counts[0], metrics


@setting("models.ENGINE.maxInputTokens", model(maxInputTokens=20))
async def tokens_of_a_prompt_are_limited(server: Served) -> None:
    assert (await server.complete([5] * 20).done()).status == 200
    assert (await server.complete([5] * 21).done()).status == 400


@setting("models.ENGINE.maxOutputTokens", model(maxOutputTokens=5))
async def tokens_of_an_answer_are_limited(server: Served) -> None:
    answer = await server.start("/v1/completions", {"model": "m", "prompt": "a", "ignore_eos": True}).done()
    assert answer.document["usage"]["completion_tokens"] == 5, answer


@setting("models.ENGINE.maxModelLen", model(maxModelLen=64))
async def tokens_of_a_prompt_and_its_answer_are_limited(server: Served) -> None:
    assert (await server.complete([5] * 60, tokens=4).done()).status == 200
    assert (await server.complete([5] * 64, tokens=1).done()).status == 400


@setting("models.ENGINE.specialTokens", model(specialTokens="parse"))
async def control_tokens_in_prompts_are_parsed(server: Served) -> None:
    lengths = []
    for text in ("x", "x" + "<|end|>" * 10):
        await server.fetch(
            "/v1/chat/completions",
            {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": text}]},
        )
        lengths.append(server.engine.submitted[-1])
    assert lengths[1] - lengths[0] == 10, lengths


@setting("models.ENGINE.wireFormat", model(wireFormat="llama-3"))
async def tools_are_explained_in_no_other_format_than_json(server: Served) -> None:
    """The demonstration model's template ignores tools, and its own format is json."""
    chat = {"model": "m", "messages": [{"role": "user", "content": "a"}]}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    answers = [await server.fetch("/tokenize", chat | tools) for tools in ({}, {"tools": [tool]})]
    assert answers[0].document["count"] == answers[1].document["count"]


@setting("models.ENGINE.watchdog", model(watchdog=3))
async def stuck_model_is_restarted(server: Served) -> None:
    server.engine.is_stuck = True
    job = server.complete()
    await trio.sleep(1)
    server.engine.is_stuck = False
    await trio.sleep(9)
    assert job.is_over, job
    assert (await running(server))["counts"]["stuck"] == 1


@setting("models.ENGINE.threads", model(threads=2))
async def number_of_threads_is_limited(server: Served) -> None:
    assert (await server.complete().done()).status == 200
    assert threads.get_threads() == 2


@setting("models.ENGINE.parallel", model(parallel=4, preload=False))
async def model_is_divided_among_processes(server: Served) -> None:
    answer = await server.complete().done()
    assert answer.status == 502, answer
    assert "parallel: its 6 attention heads" in answer.document["error"]["message"], answer


@setting("models.ENGINE.ttl", model(ttl=5))
async def idle_model_is_unloaded_after_its_ttl(server: Served) -> None:
    for idle_s in (3, 4):
        assert (await server.complete().done()).status == 200
        await trio.sleep(idle_s)
        assert (await server.states())["m"] == "up"
    await trio.sleep(3)
    assert (await server.states())["m"] == "down"


@setting(
    "models.ENGINE.memoryMb",
    {"models": {"m": {"memoryMb": 600}, "k": {"path": "DEMO", "memoryMb": 500}}, "lru": {"memoryMb": 1000}},
)
async def declared_memory_of_a_model_is_reported(server: Served) -> None:
    for name in ("k", "m", "k"):  # until the memory of both is known, at least by measurement
        assert (await server.complete(model=name).done()).status == 200
        await trio.sleep(15)
    assert await server.states() == {"m": "down", "k": "up"}


@setting("models.ENGINE.preload", model(preload=True))
async def model_is_preloaded(server: Served) -> None:
    assert (await server.states())["m"] == "up"


@setting(
    "macros",
    {"macros": {"tokens": 20}, "models": {"m": {"maxInputTokens": "${tokens}"}}},
    alternative={"tokens": 30},
)
async def macro_is_expanded(server: Served) -> None:
    assert (await server.complete([5] * 21).done()).status == 400


@setting(
    "models.ENGINE.macros",
    model(macros={"tokens": 20}, maxInputTokens="${tokens}"),
    alternative={"tokens": 30},
)
async def macro_of_the_model_is_expanded(server: Served) -> None:
    await macro_is_expanded(server)


@setting("models.ENGINE.gpuMemory", model(gpuMemory=0.25, preload=False))
async def fraction_of_gpu_memory_is_limited(server: Served) -> None:
    server.engine.gpu_mb = 1000
    assert (await server.complete().done()).status == 200
    await trio.sleep(1)
    # 100 MiB of weights, and nine tenths of the remaining 150 MiB of 250 MiB.
    assert (await running(server))["memory_bytes"] == 235 << 20


async def load_is_reported_in_chats(server: Served) -> None:
    assert "Loading the model m" in await chat(server, "m")


setting("models.ENGINE.sendLoadingState", model(sendLoadingState=True, preload=False))(
    load_is_reported_in_chats
)
setting("sendLoadingState", model(preload=False) | {"sendLoadingState": True})(load_is_reported_in_chats)


@setting("includeAliasesInList", model(aliases=["n"]) | {"includeAliasesInList": True})
async def aliases_are_listed(server: Served) -> None:
    assert (await card(server, "n")).get("id") == "n"
