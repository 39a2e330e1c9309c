"""Scenarios for models that a command serves. The command is simulated; its server is `SimulatedUpstream`."""

from typing import Any

import trio

from settings.cases import setting
from settings.served import NODE, Served


def command(*, extra: dict[str, Any] | None = None, **settings: object) -> dict[str, Any]:
    """Return a configuration with one model, which a command serves."""
    return {"models": {"m": None, "far": {"cmd": "model-server ${PORT}"} | settings}} | (extra or {})


async def chat(server: Served, model: str) -> str:
    """Return the body of a streamed chat, which may begin while its model is loaded."""
    messages = [{"role": "user", "content": "hello"}]
    answer = await server.fetch(
        "/v1/chat/completions", {"model": model, "messages": messages, "stream": True, "max_tokens": 2}
    )
    assert answer.status == 200, answer
    return answer.body.decode()


async def completion_status(server: Served, **options: object) -> int:
    return (await server.complete(model="far", **options).done()).status


@setting(
    "models.COMMAND.cmd", command(cmd="model-server ${PORT} --new"), alternative="model-server ${PORT} --old"
)
async def command_line_is_started(server: Served) -> None:
    assert await completion_status(server) == 200
    (process,) = server.processes_of("model-server")
    assert process.args == ["model-server", "5800", "--new"]


@setting("models.COMMAND.aliases", command(aliases=["near"]))
async def command_model_has_aliases(server: Served) -> None:
    assert (await server.complete(model="near").done()).status == 200


@setting("models.COMMAND.cmdStop", command(cmdStop="stopper ${PID}", unloadTimeout=2))
async def command_is_stopped_by_its_stop_command(server: Served) -> None:
    assert await completion_status(server) == 200
    (process,) = server.processes_of("model-server")
    await server.fetch("/models/unload", {"model": "far"})
    assert server.stopped == [process.pid]


@setting("models.COMMAND.env", command(env=["COLOR=blue"]))
async def command_receives_its_environment(server: Served) -> None:
    assert await completion_status(server) == 200
    (process,) = server.processes_of("model-server")
    assert server.environments[process.pid].get("COLOR") == "blue"


@setting("models.COMMAND.proxy", command(cmd="model-server 5999", proxy=f"http://{NODE[0]}:{NODE[1]}"))
async def jobs_are_sent_to_the_configured_address(server: Served) -> None:
    job = server.complete(model="far")
    await trio.sleep(5)
    assert job.is_over, job
    assert (await job.done()).status == 200


@setting("models.COMMAND.checkEndpoint", command(checkEndpoint="/alive"))
async def command_is_ready_when_its_health_path_answers(server: Served) -> None:
    assert await completion_status(server) == 200
    assert server.upstream.received[0].path == "/alive"


async def loading_fails_after_the_health_check_timeout(server: Served) -> None:
    server.upstream.is_healthy = False
    job = server.complete(model="far")
    await trio.sleep(25)
    assert job.is_over, job
    assert 19 < job.took_s < 22, job


setting("models.COMMAND.healthCheckTimeout", command(healthCheckTimeout=20))(
    loading_fails_after_the_health_check_timeout
)
setting("healthCheckTimeout", command(extra={"healthCheckTimeout": 20}))(
    loading_fails_after_the_health_check_timeout
)


async def command_is_killed_after_the_unload_timeout(server: Served) -> None:
    server.upstream.ignores_term = True
    assert await completion_status(server) == 200
    unload = server.start("/models/unload", {"model": "far"})
    await unload.done()
    assert 1.9 < unload.took_s < 4, unload


setting("models.COMMAND.unloadTimeout", command(unloadTimeout=2))(command_is_killed_after_the_unload_timeout)
setting("unloadTimeout", command(extra={"unloadTimeout": 2}))(command_is_killed_after_the_unload_timeout)


async def idle_command_is_unloaded_after_its_ttl(server: Served) -> None:
    assert await completion_status(server) == 200
    await trio.sleep(4)
    assert len(server.processes_of("model-server")) == 1
    await trio.sleep(4)
    assert server.processes_of("model-server") == []


setting("models.COMMAND.ttl", command(ttl=5))(idle_command_is_unloaded_after_its_ttl)
setting("globalTTL", command(extra={"globalTTL": 5}))(idle_command_is_unloaded_after_its_ttl)


@setting(
    "models.COMMAND.memoryMb",
    command(memoryMb=600)
    | {"lru": {"memoryMb": 1000}}
    | {
        "models": {
            "m": {"memoryMb": 500},
            "far": {"cmd": "model-server ${PORT}", "memoryMb": 600},
        }
    },
)
async def declared_memory_of_a_command_is_reported(server: Served) -> None:
    for name in ("far", "m", "far"):
        assert (await server.complete(model=name).done()).status == 200
        await trio.sleep(15)
    assert await server.states() == {"m": "down", "far": "up"}


@setting("models.COMMAND.preload", command(preload=True))
async def command_is_preloaded(server: Served) -> None:
    assert len(server.processes_of("model-server")) == 1


@setting("models.COMMAND.concurrencyLimit", command(concurrencyLimit=3))
async def concurrent_jobs_of_a_command_are_limited(server: Served) -> None:
    server.upstream.delay_s = 2
    jobs = [server.complete(model="far") for _ in range(5)]
    assert [(await job.done()).status for job in jobs] == [200] * 5
    assert server.upstream.most_running == 3


@setting("models.COMMAND.useModelName", command(useModelName="inner"))
async def command_receives_its_own_model_name(server: Served) -> None:
    assert await completion_status(server) == 200
    assert server.upstream.posted[-1].document["model"] == "inner"


@setting("startPort", command(extra={"startPort": 6100}))
async def ports_begin_at_the_configured_number(server: Served) -> None:
    assert await completion_status(server) == 200
    (process,) = server.processes_of("model-server")
    assert process.args[1] == "6100"


@setting("hooks.on_startup.preload", command(extra={"hooks": {"on_startup": {"preload": ["far"]}}}))
async def models_in_the_preload_hook_are_preloaded(server: Served) -> None:
    assert len(server.processes_of("model-server")) == 1


async def card(server: Served, name: str = "far") -> dict[str, Any]:
    listing = await server.get_json("/v1/models")
    return {card["id"]: card for card in listing["data"]}.get(name, {})


@setting("models.COMMAND.unlisted", command(unlisted=True))
async def unlisted_model_is_left_out_of_the_list(server: Served) -> None:
    assert await card(server) == {}
    assert await completion_status(server) == 200


@setting("models.COMMAND.name", command(name="Far away"))
async def card_has_the_name(server: Served) -> None:
    assert (await card(server)).get("name") == "Far away"


@setting("models.COMMAND.description", command(description="knows much"))
async def card_has_the_description(server: Served) -> None:
    assert (await card(server)).get("description") == "knows much"


@setting("models.COMMAND.metadata", command(metadata={"size": 7}))
async def card_has_the_metadata(server: Served) -> None:
    assert (await card(server)).get("meta") == {"llamaswap": {"size": 7}}


@setting("models.COMMAND.capabilities", command(capabilities={"tools": True}))
async def card_has_the_capabilities(server: Served) -> None:
    assert (await card(server)).get("capabilities") == {"tools": True}


@setting(
    "models.COMMAND.macros",
    command(cmd="model-server ${PORT} ${mode}", macros={"mode": "--new"}),
    alternative={"mode": "--old"},
)
async def macro_of_the_model_is_expanded(server: Served) -> None:
    await command_line_is_started(server)


@setting("models.COMMAND.progressPattern", command(progressPattern=r"(\d+)%"))
async def load_progress_is_read_from_the_output(server: Served) -> None:
    server.upstream.is_healthy = False
    job = server.complete(model="far")
    await server.until(lambda: server.processes_of("model-server"))
    (process,) = server.processes_of("model-server")
    process.print("loading: 40%")
    await trio.sleep(1)
    statuses = {status["model"]: status for status in await server.get_json("/running")}
    assert statuses["far"]["load"]["progress"] == 0.4, statuses
    assert ("far", 0.4) in server.parent.announcer.progress
    server.upstream.is_healthy = True
    assert (await job.done()).status == 200


@setting("models.COMMAND.sendLoadingState", command(sendLoadingState=True))
async def load_of_a_command_is_reported_in_chats(server: Served) -> None:
    assert "Loading the model far" in await chat(server, "far")


@setting("upstream.ignorePaths", command(extra={"upstream": {"ignorePaths": ["^/quiet"]}}))
async def listed_paths_do_not_start_the_command(server: Served) -> None:
    assert (await server.fetch("/upstream/far/quiet")).status == 409
    assert server.processes_of("model-server") == []
