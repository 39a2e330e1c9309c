"""`/v1/requests`, `/tenants` and `/timings`: what each caller sees, filters, and limits."""

import time

import pytest

from fairlead.base.config import ApiKey, Budget, BudgetsConfig, KeyLimits
from fairlead.base.errors import NoNode
from fairlead.generation.metrics.board import RequestBoard
from fairlead.router.quotas.access import key_id
from fake_fleet import FakeFleet
from generation.metrics.board_values import ended, running, waiting

ANA = ApiKey("sk-ana", user="ana", team="red", limits=KeyLimits(requests_per_minute=10, concurrent=2))
BEN = ApiKey("sk-ben", user="ben")
PORTAL = ApiKey("sk-portal", user="portal", trusted=True)
OPERATOR = ApiKey("sk-operator", user="olga", role="operator")
SMALL = ApiKey("sk-small", user="sam", role="operator", models=("small",))
KEYS = (ANA, BEN, PORTAL, OPERATOR, SMALL)
CARL = "portal/carl"
PATH = "/v1/requests"
PATHS = (PATH, "/tenants", "/timings")


def bearer(key, **more):
    return {"headers": {"Authorization": f"Bearer {key.key}", **more}}


def own(make, key, user="", **fields):
    owner = f"{key_id(key)}/{user}" if user else key_id(key)
    tenant = f"{key.user}/{user}" if user else key.user
    return make(tenant, request_id=f"{make.__name__}-{tenant}", owner=owner, **fields)


@pytest.fixture
def board():
    jobs = [
        own(running, ANA, team="red", model="small", tokens=9, first_token_s=1.5),
        own(waiting, BEN, model="remote"),
        own(waiting, PORTAL, "carl", model="small"),
    ]
    found = RequestBoard(lambda: jobs)
    now = time.time()
    found.add(own(ended, BEN, model="remote", ended_at=now))
    found.add(own(ended, PORTAL, "carl", model="small", ended_at=now))
    problem = "the node \x1b failed"
    found.add(own(ended, ANA, model="small", ended_at=now, outcome="node_failed", problem=problem))
    return found


@pytest.fixture
def server(client_with, board):
    fleet = FakeFleet(["small"], ["remote"])
    return client_with(*KEYS, board=board, fleet=fleet, aliases={"tiny": "small"})


async def seen(server, key, query="", **headers):
    reply = await server.get(f"{PATH}{query}", **bearer(key, **headers))
    assert reply.status == 200, reply.body
    return {row["tenant"] for row in reply.json["data"]}


async def test_operator_sees_all_and_everybody_else_only_their_own(server):
    assert await seen(server, OPERATOR) == {"ana", "ben", CARL}
    assert await seen(server, ANA) == {"ana"}
    assert await seen(server, BEN) == {"ben"}


async def test_operator_for_some_models_sees_the_requests_for_these(server):
    assert await seen(server, SMALL) == {"ana", CARL}


async def test_trusted_key_sees_its_users_and_one_of_them_only_itself(server):
    assert await seen(server, PORTAL) == {CARL}
    assert await seen(server, PORTAL, **{"X-OpenWebUI-User-Id": "carl"}) == {CARL}
    assert await seen(server, PORTAL, **{"X-OpenWebUI-User-Id": "dora"}) == set()
    assert await seen(server, BEN, **{"X-OpenWebUI-User-Id": "carl"}) == {"ben"}


@pytest.mark.parametrize("query", ["?tenant=ben", "?team=red", "?model=remote", "?state=waiting", "?limit=1"])
async def test_no_filter_shows_a_user_the_request_of_another(server, query):
    assert await seen(server, ANA, query) <= {"ana"}


async def test_people_are_all_for_operators_and_oneself_for_users(server):
    async def people(key):
        return [row["tenant"] for row in (await server.get("/tenants", **bearer(key))).json["data"]]

    assert set(await people(OPERATOR)) == {"ana", "ben", CARL}
    assert await people(ANA) == ["ana"]
    assert await people(PORTAL) == [CARL]
    assert await people(SMALL) == []


async def test_times_and_errors_of_a_user_are_its_own(server):
    async def outcomes(key):
        found = (await server.get("/timings?window=10m", **bearer(key))).json
        assert found["classes"] == ["high", "normal", "low"]
        return {name: sum(counts) for name, counts in found["outcomes"].items()}

    assert await outcomes(OPERATOR) == {"success": 2, "node_failed": 1}
    assert await outcomes(ANA) == {"node_failed": 1}
    assert await outcomes(BEN) == {"success": 1}


async def test_row_says_where_a_request_is_and_how_it_ended(server):
    live, over = (await server.get(PATH, **bearer(ANA))).json["data"]
    assert (live["state"], live["node"], live["model"], live["team"]) == ("running", "n", "small", "red")
    assert (live["key"], live["priority"], live["is_own"]) == (key_id(ANA), "normal", True)
    assert (live["wait_s"], live["first_token_s"], live["took_s"]) == (1.0, 1.5, 5.0)
    assert live["tokens_per_s"] == round(8 / 3.5, 3)
    assert (live["outcome"], live["ended_at"]) == (None, None)
    assert (over["state"], over["outcome"], over["attempts"]) == ("ended", "node_failed", 1)
    assert "\x1b" not in over["problem"]
    assert over["ended_at"] - over["arrived_at"] == pytest.approx(10, abs=0.01)
    (waits, _) = (await server.get(PATH, **bearer(BEN))).json["data"]
    assert (waits["position"], waits["estimated_wait_s"], waits["node"]) == (1, 3, None)


async def test_operators_may_cancel_all_and_users_their_own(server):
    async def cancelable(key):
        rows = (await server.get(PATH, **bearer(key))).json["data"]
        return {row["id"] for row in rows if row["may_cancel"]}

    assert await cancelable(ANA) == {"running-ana"}
    assert await cancelable(OPERATOR) == {"running-ana", "waiting-ben", f"waiting-{CARL}"}


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("state=waiting", {"waiting-ben", f"waiting-{CARL}"}),
        ("state=ended", {"ended-ben", f"ended-{CARL}", "ended-ana"}),
        ("tenant=ben", {"waiting-ben", "ended-ben"}),
        ("model=tiny&state=running", {"running-ana"}),
        ("outcome=failed", {"ended-ana"}),
        ("node=n&state=running", {"running-ana"}),
        ("priority=high", set()),
    ],
)
async def test_filters(server, query, expected):
    rows = (await server.get(f"{PATH}?{query}", **bearer(OPERATOR))).json["data"]
    assert {row["id"] for row in rows} == expected


async def test_counts_are_of_all_that_were_wanted(server):
    reply = (await server.get(f"{PATH}?limit=1", **bearer(OPERATOR))).json
    assert (len(reply["data"]), reply["waiting"], reply["running"]) == (2, 2, 1)


@pytest.mark.parametrize(
    ("path", "param"),
    [
        (f"{PATH}?state=old", "state"),
        (f"{PATH}?priority=urgent", "priority"),
        (f"{PATH}?limit=0", "limit"),
        (f"{PATH}?limit=1001", "limit"),
        (f"{PATH}?limit=x", "limit"),
        (f"{PATH}?limit=²", "limit"),
        ("/timings?window=1y", "window"),
    ],
)
async def test_invalid_parameter_is_named(server, path, param):
    reply = await server.get(path, **bearer(OPERATOR))
    assert (reply.status, reply.error["param"]) == (400, param)


async def test_person_has_limits_and_budgets_and_what_is_used_of_them(client_with, board):
    budgets = BudgetsConfig(
        users={"ana": Budget(tokens_per_day=100)}, teams={"red": Budget(cost_per_month=5)}
    )
    fleet = FakeFleet(["small"], ["remote"], budgets=budgets)
    server = client_with(*KEYS, board=board, fleet=fleet)
    chat = {"model": "small", "messages": [{"role": "user", "content": "hello"}]}
    await server.post("/v1/chat/completions", chat, **bearer(ANA))
    (row,) = (await server.get("/tenants", **bearer(ANA))).json["data"]
    limits = {use["kind"]: use for use in row["limits"]}
    assert set(limits) == {"requests_per_minute", "concurrent", "tokens_per_day", "cost_per_month"}
    assert (limits["requests_per_minute"]["used"], limits["requests_per_minute"]["limit"]) == (1, 10)
    assert limits["concurrent"] == {
        "kind": "concurrent",
        "subject": key_id(ANA),
        "limit": 2,
        "used": 0,
        "renews_in_s": None,
    }
    assert (limits["tokens_per_day"]["subject"], limits["cost_per_month"]["subject"]) == (
        "user:ana",
        "team:red",
    )
    assert 0 < limits["tokens_per_day"]["used"] < 100
    assert 0 < limits["tokens_per_day"]["renews_in_s"] <= 86_400


async def test_without_keys_everybody_sees_all_with_tenants_as_the_log_shows_them(client_with):
    board = RequestBoard(lambda: [waiting("address/192.0.2.9", owner="")])
    server = client_with(board=board)
    (row,) = (await server.get(PATH)).json["data"]
    assert (row["is_own"], row["may_cancel"], row["key"]) == (False, True, None)
    assert "192.0.2.9" not in row["tenant"]
    assert len((await server.get(f"{PATH}?tenant={row['tenant']}")).json["data"]) == 1
    assert (await server.get(f"{PATH}?tenant=address/192.0.2.9")).json["data"] == []
    (person,) = (await server.get("/tenants")).json["data"]
    assert person["tenant"] == row["tenant"]


@pytest.mark.parametrize("path", PATHS)
async def test_without_a_dispatcher_it_is_503(client_with, path):
    class Silent:
        def refuse(self, _code):
            pass

        async def requests(self, *_):
            raise NoNode("the dispatcher does not answer")

        people = timings = requests

    assert (await client_with(board=Silent()).get(path)).status == 503


async def test_errors_of_all_include_requests_that_became_no_jobs(server):
    await server.post("/v1/chat/completions", {"model": "absent"}, **bearer(ANA))

    async def outcomes(key):
        return (await server.get("/timings", **bearer(key))).json["outcomes"]

    assert sum((await outcomes(OPERATOR))["model_not_found"]) == 1
    assert set(await outcomes(BEN)) == {"success"}


@pytest.mark.parametrize("path", PATHS)
async def test_pages_of_other_servers_may_not_read_it(server, path):
    reply = await server.get(
        path, headers={"Authorization": "Bearer sk-ana", "Origin": "https://evil.example"}
    )
    assert reply.status == 403
