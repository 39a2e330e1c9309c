"""Keys and usage under `/v1/organization`: forms, who sees what, and effects without a restart."""

import csv
import hashlib
import io
import time
import typing
from datetime import UTC, datetime, timedelta

import msgspec
import openai
import pytest
from openai.types.admin.organization import AdminAPIKey
from openai.types.admin.organization.projects import ProjectSpendLimit

from fairlead.base.config import ApiKey, Budget, BudgetsConfig, Price
from fairlead.router.quotas.access import key_id
from fairlead.server.organization.budgets import month_at
from fairlead.server.organization.usage import COST_GROUPS, GROUPS, WIDTHS
from fairlead.server.routes.route_table import ROUTES
from fairlead.store.records import NANO, UsageCounts, UsageKey
from fake_fleet import FakeFleet
from fake_store import FakeStore
from server.routes.role_matrix import KEYS, header_of

CHAT = {"model": "small", "messages": [{"role": "user", "content": "hello"}]}
KEYS_PATH = "/v1/organization/api_keys"
ADMIN = header_of("admin")
DAY = 86_400
NOW = int(time.time()) // DAY * DAY
COUNTS = UsageCounts(2, 30, 10, 5, 1500, 250, 3 * NANO)


def bearer(value):
    return {"Authorization": f"Bearer {value}"}


@pytest.fixture
def store():
    return FakeStore()


@pytest.fixture
def server(client_with, store):
    client = client_with(*KEYS.values(), store=store)
    store.on_keys = client.app.change_stored_keys
    return client


async def made(server, **fields):
    reply = await server.post(KEYS_PATH, {"name": "ana's laptop", **fields}, headers=ADMIN)
    assert reply.status == 200, reply.body
    return reply.json


# Keys ------------------------------------------------------------------------------------------------


async def test_key_is_valid_when_it_is_made_and_shown_once(server, store, log):
    key = await made(server, user="ana", project_id="research")
    assert (await server.post("/v1/chat/completions", CHAT, headers=bearer(key["value"]))).status == 200
    assert server.gateway.job.tenant == "ana"
    assert server.gateway.job.owner == key["id"]
    listed = await server.get(KEYS_PATH, headers=ADMIN)
    assert listed.json["data"] == [{name: each for name, each in key.items() if name != "value"}]
    assert key["value"] not in listed.body.decode() + str(store.keys) + str(log)
    assert key["redacted_value"].startswith(key["value"][:6])


async def test_revoked_key_is_refused_at_once(server):
    key = await made(server)
    gone = await server.send("DELETE", f"{KEYS_PATH}/{key['id']}", b"", headers=ADMIN)
    assert gone.json == {"object": "organization.project.api_key.deleted", "id": key["id"], "deleted": True}
    assert (await server.get("/v1/models", headers=bearer(key["value"]))).status == 401
    again = await server.send("DELETE", f"{KEYS_PATH}/{key['id']}", b"", headers=ADMIN)
    assert again.status == 404


async def test_both_values_of_a_rotated_key_are_valid_for_a_time_and_are_one_tenant(server, monkeypatch):
    key = await made(server, concurrent=1)
    rotate = f"{KEYS_PATH}/{key['id']}/rotate"
    rotated = (await server.post(rotate, {"overlap_seconds": 60}, headers=ADMIN)).json
    assert (rotated["id"], rotated["secrets"]) == (key["id"], 2)
    for value in (key["value"], rotated["value"]):
        await server.post("/v1/chat/completions", CHAT, headers=bearer(value))
    assert {(job.tenant, job.owner) for job in server.gateway.jobs} == {(key["id"], key["id"])}
    now = time.time()
    monkeypatch.setattr(server.app._authenticator, "_now", lambda: now + 61)
    assert (await server.get("/v1/models", headers=bearer(key["value"]))).status == 401
    assert (await server.get("/v1/models", headers=bearer(rotated["value"]))).status == 200


async def test_expired_key_is_refused(server, monkeypatch):
    key = await made(server, expires_in_seconds=100)
    now = time.time()
    monkeypatch.setattr(server.app._authenticator, "_now", lambda: now + 99)
    assert (await server.get("/v1/models", headers=bearer(key["value"]))).status == 200
    monkeypatch.setattr(server.app._authenticator, "_now", lambda: now + 101)
    assert (await server.get("/v1/models", headers=bearer(key["value"]))).status == 401


async def test_limits_of_a_stored_key_hold(server):
    key = await made(server, requests_per_minute=1)
    replies = [
        await server.post("/v1/chat/completions", CHAT, headers=bearer(key["value"])) for _ in range(2)
    ]
    assert [reply.status for reply in replies] == [200, 429]
    assert replies[1].error["code"] == "rate_limited"


async def test_role_and_models_of_a_stored_key_hold(server):
    operator = await made(server, role="operator")
    user = await made(server, models=["other"])
    assert (await server.get(KEYS_PATH, headers=bearer(operator["value"]))).status == 403
    assert (await server.get("/models/small/logs", headers=bearer(operator["value"]))).status != 403
    assert (await server.post("/v1/chat/completions", CHAT, headers=bearer(user["value"]))).status != 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"name": ""}, "name"),
        ({"priority": "urgent"}, "priority"),
        ({"role": "admin", "models": ["small"]}, "role"),
        ({"tokens_per_day": 0}, "tokens_per_day"),
        ({"expires_in_seconds": 0}, "expires_in_seconds"),
        ({"hash": "sha256:abc"}, "hash"),
        ({"redacted_value": "x"}, "redacted_value"),
        ({"tokens_pre_day": 9}, "tokens_pre_day"),
    ],
)
async def test_faulty_settings_are_refused_with_their_names(server, store, fields, param):
    reply = await server.post(KEYS_PATH, {"name": "ana", **fields}, headers=ADMIN)
    assert (reply.status, reply.error["param"]) == (400, param)
    assert store.keys.keys == ()


async def test_key_from_elsewhere_is_known_by_its_hash(server):
    digest = hashlib.sha256(b"sk-of-litellm").hexdigest()
    key = await made(server, hash=f"sha256:{digest}", redacted_value="sk-...ellm")
    assert "value" not in key
    assert key["redacted_value"] == "sk-...ellm"
    assert (await server.get("/v1/models", headers=bearer("sk-of-litellm"))).status == 200


async def test_server_without_an_administrator_makes_no_keys(client_with, store):
    client = client_with(store=store)
    reply = await client.post(KEYS_PATH, {"name": "ana"})
    assert reply.status == 400
    assert "--admin-key" in reply.error["message"]


async def test_unknown_key_is_no_401_while_the_stored_keys_are_unknown(client_with, store):
    client = client_with(*KEYS.values(), store=store)
    reply = await client.get("/v1/models", headers=bearer("sk-perhaps"))
    assert (reply.status, reply.error["code"]) == (503, "store_unavailable")
    assert (await client.get("/v1/models", headers=ADMIN)).status == 200
    client.app.change_stored_keys(store.keys)
    assert (await client.get("/v1/models", headers=bearer("sk-perhaps"))).status == 401


async def test_change_that_the_store_does_not_take_is_no_success(server, store):
    key = await made(server)
    store.is_away = True
    assert (await server.post(KEYS_PATH, {"name": "ben"}, headers=ADMIN)).status == 503
    assert (await server.send("DELETE", f"{KEYS_PATH}/{key['id']}", b"", headers=ADMIN)).status == 503
    assert (await server.get("/v1/models", headers=bearer(key["value"]))).status == 200


async def test_server_without_a_store_says_so(client_with):
    client = client_with(*KEYS.values())
    for path in (KEYS_PATH, "/v1/organization/costs?start_time=0"):
        reply = await client.get(path, headers=ADMIN)
        assert reply.status == 501
        assert "store: none" in reply.error["message"]


BY_KEY = ("api_keys/{}", "admin_api_keys/{}", "projects/research/api_keys/{}", "projects/ops/api_keys/{}")


@pytest.mark.parametrize("method", ["GET", "DELETE"])
async def test_each_list_has_its_own_keys_only(server, method):
    user = await made(server, project_id="research")
    admin = (await server.post("/v1/organization/admin_api_keys", {"name": "ops"}, headers=ADMIN)).json
    found = {}
    for kind in BY_KEY[1:]:
        for key in (user, admin):
            path = f"/v1/organization/{kind.format(key['id'])}"
            found[kind, key["id"]] = (await server.send(method, path, b"", headers=ADMIN)).status
    assert [at for at, status in found.items() if status == 200] == [
        (BY_KEY[1], admin["id"]),
        (BY_KEY[2], user["id"]),
    ]


async def test_lists_have_pages(server):
    keys = [(await made(server, name=str(number)))["id"] for number in range(5)]
    first = (await server.get(f"{KEYS_PATH}?limit=2", headers=ADMIN)).json
    assert first["has_more"]
    rest = (await server.get(f"{KEYS_PATH}?after={first['last_id']}", headers=ADMIN)).json
    assert not rest["has_more"]
    assert sorted(key["id"] for key in first["data"] + rest["data"]) == sorted(keys)
    for query in ("limit=0", "limit=x", "after=nothing", "order=up"):
        assert (await server.get(f"{KEYS_PATH}?{query}", headers=ADMIN)).status == 400


def test_objects_have_openais_form():
    assert {
        "id",
        "created_at",
        "name",
        "object",
        "owner",
        "redacted_value",
    } <= AdminAPIKey.model_fields.keys()
    assert openai.__version__


# Usage -----------------------------------------------------------------------------------------------

COMPLETIONS = "/v1/organization/usage/completions"
CHAT_PATH = "/v1/chat/completions"


def row(
    user, team="research", key=None, route="/v1/chat/completions", hour=NOW, model="small", counts=COUNTS
):
    return UsageKey(hour, key or f"key-{user}", user, team, model, route, "success"), counts


@pytest.fixture
def used(client_with):
    rows = [
        row("user-1"),
        row("other"),
        row("other", team="", hour=NOW - DAY, model="big"),
        row("user-1", route="/v1/embeddings"),
        row("user-1", route="/v1/audio/speech"),
        row("user-1/guest"),
    ]
    return client_with(
        *KEYS.values(), ApiKey("sk-limited", role="operator", models=("big",)), store=FakeStore(rows)
    )


async def results(client, path, headers=ADMIN):
    reply = await client.get(path, headers=headers)
    assert reply.status == 200, reply.body
    return [(bucket["start_time"], each) for bucket in reply.json["data"] for each in bucket["results"]]


async def test_usage_has_openais_form(used):
    reply = await used.get(f"{COMPLETIONS}?start_time={NOW - DAY}&limit=2", headers=ADMIN)
    page = reply.json
    assert (page["object"], page["has_more"], page["next_page"]) == ("page", False, None)
    assert [(b["object"], b["start_time"], b["end_time"]) for b in page["data"]] == [
        ("bucket", NOW - DAY, NOW),
        ("bucket", NOW, NOW + DAY),
    ]
    assert page["data"][1]["results"] == [
        {
            "object": "organization.usage.completions.result",
            "input_tokens": 90,
            "output_tokens": 15,
            "input_cached_tokens": 30,
            "input_audio_tokens": 0,
            "output_audio_tokens": 0,
            "batch": None,
            "num_model_requests": 6,
            **dict.fromkeys(
                (
                    *("project_id", "user_id", "api_key_id", "model", "service_tier", "api_source"),
                    *("route", "outcome"),
                )
            ),
            "seat_seconds": 4.5,
            "wait_seconds": 0.75,
        }
    ]


async def test_usage_is_grouped_and_filtered(used):
    path = f"{COMPLETIONS}?start_time={NOW - DAY}&group_by[]=project_id&group_by[]=model"
    found = [
        (at, each["project_id"], each["model"], each["num_model_requests"])
        for at, each in await results(used, path)
    ]
    assert found == [(NOW - DAY, "default", "big", 2), (NOW, "research", "small", 6)]
    for query, count in (
        ("project_ids=default", 1),
        ("project_ids[]=research&models[]=big", 0),
        ("user_ids=other&user_ids=user-1&bucket_width=1h&limit=168", 2),
        ("api_key_ids=key-other", 2),
    ):
        assert len(await results(used, f"{COMPLETIONS}?start_time={NOW - DAY}&{query}")) == count, query


@pytest.mark.parametrize(("kind", "requests"), [("completions", 6), ("embeddings", 2), ("audio_speeches", 2)])
async def test_each_kind_of_usage_has_its_routes(used, kind, requests):
    ((_, found),) = await results(used, f"/v1/organization/usage/{kind}?start_time={NOW}")
    assert found["num_model_requests"] == requests


async def test_costs_are_by_day_and_model(used):
    found = await results(used, f"/v1/organization/costs?start_time={NOW - DAY}&group_by=line_item")
    assert [(at, each["line_item"], each["amount"]) for at, each in found] == [
        (NOW - DAY, "big", {"value": 3.0, "currency": "usd"}),
        (NOW, "small", {"value": 15.0, "currency": "usd"}),
    ]


@pytest.mark.parametrize(
    ("filters", "models"),
    [
        ("line_items=big", ["big"]),
        ("line_items[]=small&line_items[]=big", ["big", "small"]),
        ("line_items=small&models=big", []),
    ],
)
async def test_costs_of_some_models_are_listed(used, filters, models):
    path = f"/v1/organization/costs?start_time={NOW - DAY}&group_by=line_item&{filters}"
    assert [each["line_item"] for _, each in await results(used, path)] == models


@pytest.mark.parametrize(
    ("caller", "users"),
    [
        ("user", ["user-1", "user-1/guest"]),
        ("operator", ["other", "user-1", "user-1/guest"]),
        ("admin", ["other", "user-1", "user-1/guest"]),
    ],
)
@pytest.mark.parametrize(
    "filters", ["", "&user_ids=other&user_ids=user-1&user_ids=user-1/guest", "&api_key_ids=key-other"]
)
async def test_no_user_reads_the_usage_of_others(used, caller, users, filters):
    for path, group in ((COMPLETIONS, "user_id"), ("/v1/organization/costs", "user_id")):
        found = await results(
            used, f"{path}?start_time={NOW - DAY}&group_by={group}{filters}", header_of(caller)
        )
        expected = [user for user in users if "key-other" not in filters or user == "other"]
        assert sorted({each[group] for _, each in found}) == expected


async def test_operator_of_some_models_reads_the_usage_of_these(used):
    path = f"{COMPLETIONS}?start_time={NOW - DAY}&group_by=model"
    for query in ("", "&models=small", "&models=big"):
        found = await results(used, path + query, bearer("sk-limited"))
        assert [each["model"] for _, each in found] == ([] if "small" in query else ["big"])


async def test_pages_follow_each_other(used):
    path = f"{COMPLETIONS}?start_time={NOW - 9 * DAY}"
    first = (await used.get(path, headers=ADMIN)).json
    assert (len(first["data"]), first["has_more"]) == (7, True)
    second = (await used.get(f"{path}&page={first['next_page']}", headers=ADMIN)).json
    assert second["data"][0]["start_time"] == first["data"][-1]["end_time"]
    assert not second["has_more"]


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("", "start_time"),
        ("start_time=-1", "start_time"),
        ("start_time=99999999999999999999999", "start_time"),
        ("start_time=86400&end_time=86400", "end_time"),
        ("start_time=0&bucket_width=5m", "bucket_width"),
        ("start_time=0&bucket_width=1m", "start_time"),
        ("start_time=0&batch=yes", "batch"),
        ("start_time=0&limit=32", "limit"),
        ("start_time=0&limit=٣", "limit"),
        ("start_time=0&group_by=hour", "group_by"),
        ("start_time=0&page=page_7", "page"),
        ("start_time=0&page=x", "page"),
        ("start_time=0&" + "&".join(["models=a"] * 101), "models"),
    ],
)
async def test_faulty_queries_are_refused_with_the_parameter(used, query, param):
    reply = await used.get(f"{COMPLETIONS}?{query}", headers=ADMIN)
    assert (reply.status, reply.error["param"]) == (400, param)


async def test_minutes_are_buckets_as_at_openai(client_with):
    now = int(time.time()) // 60 * 60
    rows = [
        (UsageKey(at // 3600 * 3600, "key-1", "ana", minute=at % 3600 // 60, route=CHAT_PATH), COUNTS)
        for at in (now - 60, now - 120, now - 120)
    ]
    client = client_with(*KEYS.values(), store=FakeStore(rows))
    page = (await client.get(f"{COMPLETIONS}?start_time={now - 3601}&bucket_width=1m", headers=ADMIN)).json
    assert (len(page["data"]), page["has_more"]) == (60, True), "the default"
    path = f"{COMPLETIONS}?start_time={now - 180}&bucket_width=1m&limit=1440"
    found = [(at, each["num_model_requests"]) for at, each in await results(client, path)]
    assert found == [(now - 120, 4), (now - 60, 2)]
    kept = await client.get(
        f"{COMPLETIONS}?start_time={now - 47 * 3600}&bucket_width=1m&limit=1440", headers=ADMIN
    )
    assert kept.status == 200
    gone = await client.get(f"{COMPLETIONS}?start_time={now - 49 * 3600}&bucket_width=1m", headers=ADMIN)
    assert (gone.status, gone.error["param"]) == (400, "start_time")
    assert "48 hours" in gone.error["message"]


async def test_batches_are_grouped_and_filtered_as_at_openai(client_with):
    key, counts = row("ana")
    rows = [(key, counts), (msgspec.structs.replace(key, batch=True), counts)]
    client = client_with(*KEYS.values(), store=FakeStore(rows))
    path = f"{COMPLETIONS}?start_time={NOW}"
    assert [each["batch"] for _, each in await results(client, f"{path}&group_by=batch")] == [False, True]
    for value in ("true", "false"):
        (found,) = await results(client, f"{path}&batch={value}&group_by=batch&group_by=service_tier")
        assert (found[1]["batch"], found[1]["service_tier"]) == (value == "true", None)
    costs = await results(client, f"/v1/organization/costs?start_time={NOW}&group_by=batch")
    assert [each["batch"] for _, each in costs] == [False, True]


def test_each_parameter_and_group_of_openais_package_is_known():
    from openai.types.admin.organization import (
        usage_audio_speeches_params,
        usage_completions_params,
        usage_costs_params,
        usage_embeddings_params,
    )

    for module, name, groups, widths, path in (
        (usage_completions_params, "UsageCompletionsParams", GROUPS, WIDTHS, COMPLETIONS),
        (
            usage_embeddings_params,
            "UsageEmbeddingsParams",
            GROUPS,
            WIDTHS,
            "/v1/organization/usage/embeddings",
        ),
        (
            usage_audio_speeches_params,
            "UsageAudioSpeechesParams",
            GROUPS,
            WIDTHS,
            "/v1/organization/usage/audio_speeches",
        ),
        (usage_costs_params, "UsageCostsParams", COST_GROUPS, {"1d": 0}, "/v1/organization/costs"),
    ):
        hints = typing.get_type_hints(getattr(module, name))
        (documented,) = [route.query for route in ROUTES if route.path == path]
        assert set(hints) <= set(documented), path
        (item,) = typing.get_args(hints["group_by"])
        assert set(typing.get_args(item)) <= set(groups), path
        assert set(typing.get_args(hints["bucket_width"])) <= set(widths), path


async def test_usage_is_csv_where_accepted_without_formulas(client_with):
    client = client_with(*KEYS.values(), store=FakeStore([row("=HYPERLINK(1)", team='a "b", c')]))
    path = f"{COMPLETIONS}?start_time={NOW}&group_by=user_id&group_by=project_id"
    reply = await client.get(path, headers=ADMIN | {"Accept": "text/csv"})
    assert reply.headers["content-type"].startswith("text/csv")
    (line,) = csv.DictReader(io.StringIO(reply.body.decode()))
    assert (line["user_id"], line["project_id"], line["input_tokens"]) == ("'=HYPERLINK(1)", 'a "b", c', "30")


# Budgets ---------------------------------------------------------------------------------------------

BUDGETS = "/v1/organization/budgets"


async def test_budget_that_is_set_holds_from_the_next_request_and_replaces_that_of_the_file(
    client_with, store
):
    key = ApiKey("sk-1", user="ana", team="research")
    budgets = BudgetsConfig(teams={"research": Budget(tokens_per_day=1000)})
    client = client_with(*KEYS.values(), key, store=store, fleet=FakeFleet(["small"], budgets=budgets))

    async def status() -> int:
        body = {"model": "small", "prompt": [1, 2, 3, 4]}
        return (await client.post("/v1/completions", body, headers=bearer("sk-1"))).status

    assert await status() == 200
    for owner in ({"user": "ana"}, {"team": "research"}):
        made = await client.post(BUDGETS, owner | {"tokens_per_day": 3}, headers=ADMIN)
        assert (made.status, made.json["source"], made.json["tokens_per_day"]) == (200, "store", 3)
        assert await status() == 429
        listed = (await client.get(BUDGETS, headers=ADMIN)).json["data"]
        assert {(each["team"], each["source"]) for each in listed if each["team"]} == {
            ("research", "store" if "team" in owner else "file")
        }
        at = f"{BUDGETS}/{made.json['id']}"
        assert (await client.get(at, headers=ADMIN)).json == made.json
        assert (await client.send("DELETE", at, b"", headers=ADMIN)).json["deleted"]
        assert await status() == 200
        assert (await client.send("DELETE", at, b"", headers=ADMIN)).status == 404


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tokens_per_day": 1}, "user"),
        ({"user": "ana", "team": "ops", "tokens_per_day": 1}, "user"),
        ({"user": "ana"}, "tokens_per_day"),
        ({"user": "ana", "tokens_per_day": 0}, "tokens_per_day"),
        ({"team": "", "tokens_per_day": 1}, "team"),
        ({"team": "ops", "cost_per_month": -1}, "cost_per_month"),
        ({"team": "ops", "cost_per_month": 1, "per_year": 2}, "per_year"),
    ],
)
async def test_faulty_budget_is_refused_with_the_field(server, body, param):
    reply = await server.post(BUDGETS, body, headers=ADMIN)
    assert (reply.status, reply.error["param"]) == (400, param)


async def test_budgets_of_users_teams_and_keys_are_listed_with_what_is_used_and_when_they_renew(
    client_with, store
):
    of_file = ApiKey("sk-1", user="ana", team="research", budget=Budget(tokens_per_month=100))
    budgets = BudgetsConfig(users={"ana": Budget(tokens_per_day=10, cost_per_day=1)})
    fleet = FakeFleet(
        ["small"],
        budgets=budgets,
        api_keys=(of_file, *KEYS.values()),
        prices={"small": Price(input=50_000, output=0)},
    )
    client = client_with(*KEYS.values(), of_file, store=store, fleet=fleet)
    store.on_keys = client.app.change_stored_keys
    await client.post(BUDGETS, {"team": "research", "cost_per_month": 5}, headers=ADMIN)
    of_store = await made(client, tokens_per_day=7)
    body = {"model": "small", "prompt": [1, 2, 3, 4]}
    assert (await client.post("/v1/completions", body, headers=bearer("sk-1"))).status == 200
    now = datetime.now(UTC)
    day = int((now.replace(hour=0, minute=0, second=0, microsecond=0) + timedelta(days=1)).timestamp())
    month = month_at(now.timestamp())[1]
    listed = (await client.get(BUDGETS, headers=ADMIN)).json["data"]
    assert [
        (
            each["user"] or each["team"] or each["api_key_id"],
            each["api_key_name"],
            each["source"],
            [(use["kind"], use["limit"], use["used"], use["renews_at"]) for use in each["uses"]],
        )
        for each in listed
    ] == [
        *sorted(
            [
                (key_id(of_file), "ana", "file", [("tokens_per_month", 100, 8, month)]),
                (of_store["id"], "ana's laptop", "store", [("tokens_per_day", 7, 0, day)]),
            ]
        ),
        ("research", None, "store", [("cost_per_month", 5, 0.2, month)]),
        ("ana", None, "file", [("tokens_per_day", 10, 8, day), ("cost_per_day", 1, 0.2, day)]),
    ]
    for each in listed:
        assert (await client.get(f"{BUDGETS}/{each['id']}", headers=ADMIN)).json == each
        removed = await client.send("DELETE", f"{BUDGETS}/{each['id']}", b"", headers=ADMIN)
        assert removed.status == (200 if each["team"] else 404)


async def test_budgets_of_the_file_are_listed_without_a_store(client_with):
    budgets = BudgetsConfig(users={"ana": Budget(tokens_per_day=10)})
    client = client_with(*KEYS.values(), fleet=FakeFleet(["small"], budgets=budgets))
    (listed,) = (await client.get(BUDGETS, headers=ADMIN)).json["data"]
    assert (listed["user"], listed["source"]) == ("ana", "file")
    refused = await client.post(BUDGETS, {"user": "ana", "tokens_per_day": 1}, headers=ADMIN)
    assert (refused.status, "store: none" in refused.error["message"]) == (501, True)


async def test_store_that_is_away_changes_no_budget(server, store):
    store.is_away = True
    for reply in (
        await server.post(BUDGETS, {"team": "ops", "tokens_per_day": 1}, headers=ADMIN),
        await server.get(BUDGETS, headers=ADMIN),
    ):
        assert (reply.status, reply.error["code"]) == (503, "store_unavailable")


async def test_spend_limit_of_a_project_is_a_months_money_of_the_team(client_with):
    month = int(datetime.now(UTC).replace(day=1, hour=0, minute=0, second=0).timestamp()) // 3600 * 3600
    store = FakeStore([row("ana", team="research", hour=month)])
    client = client_with(*KEYS.values(), store=store)
    path = "/v1/organization/projects/research/spend_limit"
    assert (await client.get(path, headers=ADMIN)).status == 404
    await client.post(BUDGETS, {"team": "research", "tokens_per_day": 9}, headers=ADMIN)
    body = {"currency": "USD", "interval": "month", "threshold_amount": 250}
    for amount, status in ((250, "enforcing"), (301, "inactive")):
        made = await client.post(path, body | {"threshold_amount": amount}, headers=ADMIN)
        limit = ProjectSpendLimit.model_validate(made.json, strict=True)
        assert (limit.threshold_amount, limit.enforcement.status) == (amount, status)  # 3 are spent
        assert (await client.get(path, headers=ADMIN)).json == made.json
    assert store.keys.budgets == {"team:research": Budget(tokens_per_day=9, cost_per_month=3.01)}
    assert (await client.send("DELETE", path, b"", headers=ADMIN)).json["deleted"]
    assert store.keys.budgets == {"team:research": Budget(tokens_per_day=9)}
    assert (await client.send("DELETE", path, b"", headers=ADMIN)).status == 404
    default = path.replace("research", "default")
    assert (await client.post(default, body, headers=ADMIN)).status == 404


@pytest.mark.parametrize("owner", ["key", "user", "team", "cost"])
async def test_spent_budget_is_a_429_with_the_time_of_its_renewal(client_with, owner):
    budget, free = Budget(tokens_per_day=9), Budget()
    if owner == "cost":
        budget = Budget(cost_per_day=0.000009)
    key = ApiKey("sk-1", user="ana", team="research", budget=budget if owner in ("key", "cost") else free)
    budgets = BudgetsConfig(
        users={"ana": budget if owner == "user" else free},
        teams={"research": budget if owner == "team" else free},
    )
    fleet = FakeFleet(["small"], budgets=budgets, prices={"small": Price(1, 1)})
    client = client_with(key, ApiKey("sk-2", user="ben"), fleet=fleet)
    body = {"model": "small", "prompt": [1, 2, 3, 4]}
    first = await client.post("/v1/completions", body, headers=bearer("sk-1"))
    assert first.status == 200  # 4 + 4 tokens
    refused = await client.post("/v1/completions", body, headers=bearer("sk-1"))
    assert (refused.status, refused.error["code"]) == (429, "budget_exceeded")
    assert "renews at 20" in refused.error["message"]
    assert 0 < int(refused.headers["retry-after"]) <= DAY
    small = await client.post("/v1/completions", {**body, "prompt": [1]}, headers=bearer("sk-1"))
    assert "% of" in small.headers["x-fairlead-budget"]
    assert (await client.post("/v1/completions", body, headers=bearer("sk-2"))).status == 200
