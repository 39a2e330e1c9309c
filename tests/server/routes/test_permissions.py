"""What an API key may request: priorities and models."""

from dataclasses import replace

import pytest

from fairlead.base.config import ApiKey, QueueConfig

CHAT = "/v1/chat/completions"
PLAIN = ApiKey("sk-plain")
FIRST = ApiKey("sk-first", priority="high")
LAST = ApiKey("sk-last", priority="low")


def bearer(key: ApiKey | None, **more: str) -> dict[str, str]:
    return {**({"Authorization": f"Bearer {key.key}"} if key else {}), **more}


async def priority(client, chat, key=None, *, header=None, **fields):
    """Return the job's priority, or the status and param of the refusal."""
    client.gateway.jobs.clear()
    headers = bearer(key, **({"X-Priority": header} if header is not None else {}))
    reply = await client.post(CHAT, chat(**fields), headers=headers)
    if reply.status != 200:
        return reply.status, reply.error["param"]
    return client.gateway.job.priority


# Priority ------------------------------------------------------------------------------------------


async def test_without_keys_any_class_is_allowed_and_the_middle_one_is_the_default(client, chat):
    assert await priority(client, chat) == 1
    assert [await priority(client, chat, priority=name) for name in ("high", "normal", "low")] == [0, 1, 2]


async def test_header_takes_precedence_over_the_body(client, chat):
    assert await priority(client, chat, header="low", priority="high") == 2
    assert await priority(client, chat, header="", priority="high") == 0


async def test_key_allows_its_priority_and_lower_ones(client_with, chat):
    client = client_with(PLAIN, FIRST, LAST)
    refused = (403, "priority")
    for key, expected in (
        (PLAIN, [1, refused, 1, 2]),
        (FIRST, [1, 0, 1, 2]),
        (LAST, [2, refused, refused, 2]),
    ):
        requested = (None, "high", "normal", "low")
        assert expected == [await priority(client, chat, key, header=name) for name in requested]
        assert expected == [await priority(client, chat, key, priority=name) for name in requested]


async def test_refusal_names_both_priorities(client_with, chat):
    reply = await client_with(LAST).post(CHAT, chat(priority="high"), headers=bearer(LAST))
    assert reply.error["message"] == "priority: this API key allows at most 'low', not 'high'"
    assert (reply.error["code"], reply.error["type"]) == ("forbidden", "permission_error")


@pytest.mark.parametrize(
    "header",
    [
        *("High", "HIGH", "high,low", "1.0", "- 1", "²", "9" * 11, "urgent", "\xe9", "\x00", "'\"\\"),
        "x" * 60_000,
    ],
)
async def test_invalid_priority_is_a_short_400(client, chat, header):
    reply = await client.post(CHAT, chat(), headers={"X-Priority": header})
    assert (reply.status, reply.error["param"]) == (400, "priority")
    assert "high, normal, low" in reply.error["message"]
    assert len(reply.body) < 600


@pytest.mark.parametrize("value", [1.5, True, [], {}, 2**31, "urgent", "x" * 10_000])
async def test_bodys_priority_must_be_a_name_or_a_number(client, chat, value):
    assert await priority(client, chat, priority=value) == (400, "priority")


async def test_vllms_numbers_count_from_the_default_class_and_lower_ones_are_first(client, chat):
    numbers = (-(2**31), -2, -1, 0, 1, 2, 2**31 - 1)
    expected = [0, 0, 0, 1, 2, 2, 2]
    assert expected == [await priority(client, chat, priority=number) for number in numbers]
    assert expected == [await priority(client, chat, header=str(number)) for number in numbers]


async def test_number_is_bounded_by_the_key_as_a_name_is(client_with, chat):
    client = client_with(PLAIN, FIRST, LAST)
    refused = (403, "priority")
    for key, expected in (
        (PLAIN, [refused, 1, 2]),
        (FIRST, [0, 1, 2]),
        (LAST, [refused, 2, 2]),  # 0 requests no change
    ):
        assert expected == [await priority(client, chat, key, priority=number) for number in (-1, 0, 1)]
        assert expected == [await priority(client, chat, key, header=number) for number in ("-1", "0", "1")]


async def test_class_named_like_a_number_is_that_class(client_with, chat):
    client = client_with(queue=QueueConfig(classes=("0", "1")))
    assert [await priority(client, chat, priority=name) for name in ("0", "1")] == [0, 1]


@pytest.mark.parametrize(
    ("classes", "default"), [(("only",), 0), (("paid", "free"), 1), (("a", "b", "c", "d"), 2)]
)
async def test_classes_are_configurable(client_with, chat, classes, default):
    client = client_with(queue=QueueConfig(classes=classes))
    assert default == await priority(client, chat)
    assert await priority(client, chat, priority=classes[0]) == 0
    assert await priority(client, chat, priority="normal") == (400, "priority")


# X-No-Queue ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("headers", "expected"), [({}, False), ({"X-No-Queue": "1"}, True)])
async def test_header_x_no_queue_sets_no_queue(client, chat, headers, expected):
    await client.post(CHAT, chat(), headers=headers)
    assert expected is client.gateway.job.no_queue


@pytest.mark.parametrize("value", ["", "0"])
async def test_empty_header_or_a_zero_is_false(client, chat, value):
    await client.post(CHAT, chat(), headers={"X-No-Queue": value})
    assert client.gateway.job.no_queue is False


@pytest.mark.parametrize("value", ["yes", "11", "1,1", "\xb9", "x" * 10_000])
async def test_any_other_value_is_refused(client, chat, value):
    reply = await client.post(CHAT, chat(), headers={"X-No-Queue": value})
    assert (reply.status, reply.error["param"]) == (400, "X-No-Queue")
    assert len(reply.body) < 600
    assert client.gateway.jobs == []


# Owner ---------------------------------------------------------------------------------------------


async def test_owner_identifies_the_key_and_does_not_reveal_it(client_with, chat):
    keys = (ApiKey("sk-one", user="ana"), ApiKey("sk-two", user="ana", trusted=True))
    client = client_with(*keys)
    for key in keys:
        await client.post(CHAT, chat(user="bob"), headers=bearer(key))
    first, second = (job.owner for job in client.gateway.jobs)
    assert first != second
    assert not any("sk-" in owner or "one" in owner for owner in (first, second))


async def test_without_keys_there_are_no_owners(client, chat):
    await client.post(CHAT, chat())
    assert client.gateway.job.owner == ""


# Models --------------------------------------------------------------------------------------------


@pytest.fixture
def other(model):
    """Another model that responds like the first."""
    return replace(model, name="other")


def with_two(client_with, model, other, *keys):
    return client_with(*keys, models={"small": model, "other": other})


async def test_key_can_list_and_use_only_its_models(client_with, chat, model, other):
    key = ApiKey("sk-small", models=("tiny",))
    client = with_two(client_with, model, other, key, PLAIN)
    listed = (await client.get("/v1/models", headers=bearer(key))).json["data"]
    assert [card["id"] for card in listed] == ["small"]
    assert len((await client.get("/v1/models", headers=bearer(PLAIN))).json["data"]) == 2
    for name in ("small", "tiny"):
        assert (await client.post(CHAT, chat(model=name), headers=bearer(key))).status == 200
    for reply in (
        await client.post(CHAT, chat(model="other"), headers=bearer(key)),
        await client.post("/v1/completions", {"model": "other", "prompt": "a"}, headers=bearer(key)),
        await client.post("/tokenize", {"model": "other", "prompt": "a"}, headers=bearer(key)),
        await client.post("/detokenize", {"model": "other", "tokens": [1]}, headers=bearer(key)),
        await client.get("/v1/models/other", headers=bearer(key)),
        await client.get("/queue/estimate?model=other", headers=bearer(key)),
    ):
        assert (reply.status, reply.error["code"], reply.error["param"]) == (403, "forbidden", "model")
        assert "'other'" in reply.error["message"]
    assert (await client.post(CHAT, chat(model="huge"), headers=bearer(key))).status == 404


async def test_without_a_name_the_only_model_a_key_may_use_is_chosen(client_with, chat, model, other):
    key = ApiKey("sk-other", models=("other",))
    client = with_two(client_with, model, other, key, PLAIN)
    assert (await client.post(CHAT, chat(model=None), headers=bearer(key))).status == 200
    assert client.gateway.job.model == "other"
    assert (await client.post(CHAT, chat(model=None), headers=bearer(PLAIN))).status == 400


async def test_key_for_models_that_are_not_served_has_none(client_with, chat):
    key = ApiKey("sk-gone", models=("gone",))
    client = client_with(key)
    assert (await client.get("/v1/models", headers=bearer(key))).json["data"] == []
    assert (await client.post(CHAT, chat(model=None), headers=bearer(key))).status == 403
