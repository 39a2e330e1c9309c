"""The console's pages on a real server under the load of three teams, for each role."""

import json
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

import httpx
import pytest

from browser.headless import expect, violations, wait_until_live
from e2e.real_server import configured, real_server, until
from e2e.slow_motion import slowed

TEAMS = {"ana": "red", "ben": "blue", "carl": "green"}
KEYS = [
    {
        "key": "sk-ana",
        "user": "ana",
        "team": "red",
        "limits": {"requestsPerMinute": 1000},
        "budget": {"tokensPerMonth": 100_000_000},
    },
    {"key": "sk-ben", "user": "ben", "team": "blue"},
    {"key": "sk-carl", "user": "carl", "team": "green"},
    {"key": "sk-dora", "user": "dora"},
    {"key": "sk-frida", "user": "frida"},
    {"key": "sk-portal", "user": "portal", "trusted": True},
    {"key": "sk-olga", "user": "olga", "role": "admin"},
]
PAGES = ("now", "people", "requests", "latency", "errors", "usage", "budgets", "keys", "connect")
LOOKS = {
    "light": {"color_scheme": "light"},
    "dark": {"color_scheme": "dark"},
    "phone": {"width": 380, "height": 800, "has_touch": True},
    "wide": {"width": 2400, "height": 1200},
}
SERVERS = {"one process": 1, "two fronts": 2}
# What a browser does with an answer is the same for all.
ONE_SERVER = pytest.mark.parametrize("server", [1], ids=["one process"], indirect=True)
SHOWN_S = 1.0
CHANGES = 5


@pytest.fixture(scope="module", params=SERVERS.values(), ids=SERVERS)
def server(chromium, request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("console")
    teams = {team: {} for team in TEAMS.values()}
    arguments = configured(folder, {"slots": 1}, fronts=request.param, apiKeys=KEYS, teams=teams)
    with real_server(*arguments, "--store", str(folder / "store.db")) as running:
        yield running


def bearer(user):
    return {"Authorization": f"Bearer sk-{user}"}


@contextmanager
def opened(chromium, server, user, page="now", *, expected="401", **options):
    """Open a page of the console with a user's key; `expected`: as for `Browser.open`."""
    with chromium.open(f"{server.url}/#{page}", expected=expected, **options) as found:
        found.locator("#key").fill(f"sk-{user}")
        found.keyboard.press("Enter")
        wait_until_live(found)
        yield found


def engine_pid(server):
    """Return the id of the process of the model, which is a child of the server or of a process of it."""
    (pid,) = (
        int(folder.name)
        for folder in Path("/proc").glob("[0-9]*")
        if b"fairlead.engine.worker.main" in read(folder / "cmdline") and is_below(folder, server.process.pid)
    )
    return pid


def is_below(folder, pid):
    """Return whether a process has this one among its parents."""
    while (found := read(folder / "stat").rpartition(b")")[2].split()) and int(found[1]) > 1:
        if int(found[1]) == pid:
            return True
        folder = folder.with_name(found[1].decode())
    return False


def read(file):
    """Return the content of a file of a process; empty if it has just ended."""
    try:
        return file.read_bytes()
    except OSError:
        return b""


@contextmanager
def requests(server, *users):
    """Have each user send a request that takes long; disconnect when the block ends.

    The model is slowed down meanwhile: it would keep a processor busy, of which pages and servers need more.
    """
    with ExitStack() as sockets:
        sockets.enter_context(slowed(engine_pid(server), run_s=0.01, rest_s=0.03))
        for number, user in enumerate(users):
            body = {
                "prompt": "Count from 1 to 90.",
                "n": 64,  # in turn: others wait for the end of one
                "max_tokens": 225,
                "ignore_eos": True,
                "stream": True,
            }
            content = json.dumps(body).encode()
            head = (
                f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer sk-{user}\r\n"
                f"X-Request-Id: {user}-{number}\r\nContent-Length: {len(content)}\r\n\r\n"
            )
            client = sockets.enter_context(socket.create_connection(server.address))
            client.sendall(head.encode() + content)
        yield
    until(lambda: not listed(server, "olga", state="running"))


def listed(server, user, **query):
    answer = httpx.get(f"{server.url}/v1/requests", params=query, headers=bearer(user), timeout=60)
    return answer.json()["data"]


def answered(server, user, count=1):
    for _ in range(count):
        body = {"prompt": "What is Fairlead?", "max_tokens": 8}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, headers=bearer(user), timeout=60)
        assert answer.status_code == 200


def names(page, column=1):
    return set(page.locator(f"#requests tbody td:nth-of-type({column + 1})").all_inner_texts())


def test_people_and_requests_are_shown_and_an_operator_cancels(chromium, server):
    with opened(chromium, server, "olga", "requests") as page, requests(server, "ana", "ben", "carl"):
        until(
            lambda: (
                len(listed(server, "olga", state="waiting") + listed(server, "olga", state="running")) == 3
            )
        )
        for user, number in (("ana", 0), ("ben", 1), ("carl", 2)):
            expect(page.locator(f'[data-row="{user}-{number}"]')).to_be_visible()
        row = page.locator('[data-row="ben-1"]')
        row.get_by_role("button").click()
        expect(row.get_by_role("button")).to_have_text("Confirm")
        row.get_by_role("button").click()
        expect(page.locator('[data-row^="ben-1 "]')).to_contain_text("Cancelled")
        expect(row).to_have_count(0)
        page.locator("#request-filters [name=tenant]").select_option("carl")
        expect(page.locator('[data-row="ana-0"]')).to_have_count(0)
        expect(page.locator('[data-row="carl-2"]')).to_be_visible()
        page.evaluate("location.hash = 'people'")
        expect(page.locator('#people [data-row="ana"]')).to_contain_text("red")
        expect(page.locator('#people [data-row="carl"]')).to_contain_text("fair")
        expect(page.locator('#people [data-row="ana"] .limits')).to_contain_text("requests a minute")


class Change(NamedTuple):
    """A change that a page shows.

    page: the page's name.
    cause: makes the change with this number, from 1, with a server.
    element: the selector of an element that shows it then.
    text: the text that the element has; None: any.
    """

    page: str
    cause: Callable[[Any, int], object]
    element: Callable[[int], str]
    text: Callable[[int], str] | None = None


def refused(server, number):
    body = {"model": "absent", "prompt": "x"}
    assert httpx.post(f"{server.url}/v1/completions", json=body, headers=bearer("dora")).status_code == 404


def asked(server, number):
    """Send the request of another user, which does not end before the test."""
    body = {"prompt": "Count from 1 to 90.", "n": 16, "max_tokens": 900, "ignore_eos": True}
    headers = bearer("portal") | {"X-Request-Id": f"probe-{number}", "X-OpenWebUI-User-Id": f"user{number}"}
    Thread(
        target=httpx.post,
        args=(f"{server.url}/v1/completions",),
        kwargs={"json": body, "headers": headers, "timeout": 600},
        daemon=True,
    ).start()
    until(lambda: listed(server, "olga", tenant=f"portal/user{number}"))


def ended(server, number):
    answered(server, "dora")


def changed(path, **fields):
    def change(server, number):
        body = {name: value(number) for name, value in fields.items()}
        made = httpx.post(f"{server.url}/v1/organization/{path}", json=body, headers=bearer("olga"))
        assert made.status_code == 200

    return change


def cell(table, row, column):
    return lambda _number: f'#{table} [data-row="{row}"] > :nth-child({column})'


SHOWN = {
    "requests": Change("requests", asked, lambda number: f'#requests [data-row="probe-{number}"]'),
    "people": Change("people", asked, lambda number: f'#people [data-row="portal/user{number}"]'),
    "latency": Change("latency", ended, lambda _: "#latency tbody tr:first-child > :nth-child(3)", str),
    "errors": Change("errors", refused, cell("errors", "model_not_found", 3), str),
    "budgets": Change(
        "budgets",
        changed("budgets", user=lambda _: "erin", tokens_per_day=lambda number: 100 + number),
        lambda _: "#budgets .limits span:first-child",
        lambda number: f"tokens a day: 0 of {100 + number}",
    ),
    "keys": Change(
        "keys",
        changed("api_keys", name=lambda number: f"probe {number}"),
        lambda _: "#accesses tbody th",
        lambda number: f"probe {number}",
    ),
}


def shown_after_s(page, change, server, number):
    """Make a change; return how many seconds after it the page shows it. The page's own clock is used."""
    page.evaluate(
        """([selector, text]) => {
          const isShown = (each) => text === null || each.textContent.trim() === text;
          window.shownAt = new Promise((resolve) => {
            const timer = setInterval(() => {
              if (![...document.querySelectorAll(selector)].some(isShown)) return;
              clearInterval(timer);
              resolve(Date.now() / 1000);
            }, 10);
          });
        }""",
        [change.element(number), None if change.text is None else change.text(number)],
    )
    change.cause(server, number)
    began = time.time()
    return page.evaluate("window.shownAt") - began


@pytest.mark.parametrize("name", SHOWN)
def test_page_is_right_within_a_second_under_the_load_of_three_teams(chromium, server, name):
    change = SHOWN[name]
    with opened(chromium, server, "olga", change.page) as page, requests(server, "ana", "ben", "carl"):
        until(lambda: len(listed(server, "olga", state="waiting")) >= 2)
        earlier = counted(server, name)
        try:
            delays = [
                shown_after_s(page, change, server, earlier + number) for number in range(1, CHANGES + 1)
            ]
        finally:
            cancel_all(server)
    # The median, because the machine may stall once for other tests.
    assert sorted(delays)[CHANGES // 2] < SHOWN_S, delays


def counted(server, name):
    """Return what a page of times has counted before."""
    timings = httpx.get(f"{server.url}/timings?window=1h", headers=bearer("olga"), timeout=60).json()
    if name == "latency":
        return timings["rows"][0]["wait"]["count"] if timings["rows"] else 0
    return sum(timings["outcomes"].get("model_not_found", [])) if name == "errors" else 0


def cancel_all(server):
    for row in listed(server, "olga"):
        if row["state"] != "ended" and row["id"].startswith("probe-"):
            httpx.post(f"{server.url}/v1/requests/{row['id']}/cancel", headers=bearer("olga"), timeout=60)


def test_user_sees_only_their_own(chromium, server):
    for user in TEAMS:
        answered(server, user)
    with requests(server, "ana", "ben", "carl"):
        until(lambda: len(listed(server, "ben")) > 1)
        with opened(chromium, server, "ben", "requests") as page:
            expect(page.locator('[data-row="ben-1"]')).to_be_visible()
            for hidden in ("requests", "people"):
                page.evaluate("page => { location.hash = page }", hidden)
                expect(page.locator(f"#{hidden} tbody tr").first).to_be_visible()
                shown = page.locator(f"#page-{hidden}").inner_text()
                assert "ben" in shown
                assert not [other for other in ("ana", "carl", "red", "green") if other in shown.split()]
            page.evaluate("location.hash = 'errors'")
            expect(page.locator("#errors-own")).to_contain_text("your own")
            expect(page.get_by_role("link", name="Keys")).to_be_hidden()
            content = page.content()
            assert "ana-0" not in content
            assert "carl-2" not in content


@ONE_SERVER
@pytest.mark.parametrize("look", LOOKS)
def test_pages_have_no_accessibility_violations(chromium, server, look):
    for user in TEAMS:
        answered(server, user, 2)
    refused = httpx.post(
        f"{server.url}/v1/completions", json={"model": "absent", "prompt": "x"}, headers=bearer("ana")
    )
    assert refused.status_code == 404
    budget = {"team": "red", "tokens_per_day": 10**9, "cost_per_month": 50}
    made = httpx.post(f"{server.url}/v1/organization/budgets", json=budget, headers=bearer("olga"))
    assert made.status_code == 200
    with requests(server, "ana", "ben", "carl"), opened(chromium, server, "olga", **LOOKS[look]) as page:
        for name in PAGES:
            page.evaluate("page => { location.hash = page }", name)
            section = page.locator(f"#page-{name}")
            expect(section).to_be_visible()
            if name in ("people", "requests", "latency", "errors", "usage", "budgets"):
                expect(section.locator("tbody tr").first).to_be_visible()
            if name in ("latency", "usage", "errors"):
                expect(section.locator("canvas").first).to_be_visible()
            expect(page.locator("#page-problem")).to_be_hidden()
            assert violations(page) == []
            width = page.evaluate(
                "document.documentElement.scrollWidth - document.documentElement.clientWidth"
            )
            assert width <= 0, name
            chromium.save_screenshot(page, f"console-{name}-{look}")
        if look == "phone":
            page.evaluate("location.hash = 'now'")
            chat, totals = (page.locator(each).bounding_box() for each in (".chat", "#totals"))
            assert chat["y"] < totals["y"]


def test_key_is_made_used_rotated_and_revoked(chromium, server):
    with opened(chromium, server, "olga", "keys") as page:
        page.get_by_text("Make a key").first.click()
        page.locator("#access-form [name=name]").fill("dora's laptop")
        page.locator("#access-form [name=user]").fill("dora")
        page.locator("#access-form button").click()
        value = page.locator("#access-made code").inner_text()
        row = page.locator("#accesses tbody tr").filter(has_text="dora's laptop")
        expect(row).to_contain_text("dora")
        headers = {"Authorization": f"Bearer {value}"}
        assert httpx.get(f"{server.url}/v1/models", headers=headers).status_code == 200
        row.get_by_role("button", name="Rotate").click()
        row.get_by_role("button", name="Rotate").click()
        expect(page.locator("#access-made code")).not_to_have_text(value)
        row.get_by_role("button", name="Revoke").click()
        row.get_by_role("button", name="Revoke").click()
        expect(row).to_have_count(0)
        assert httpx.get(f"{server.url}/v1/models", headers=headers).status_code == 401


def test_budget_is_set_reached_raised_and_removed(chromium, server):
    def status():
        body = {"prompt": [5] * 6, "max_tokens": 8, "ignore_eos": True}
        return httpx.post(
            f"{server.url}/v1/completions", json=body, headers=bearer("frida"), timeout=60
        ).status_code

    with opened(chromium, server, "olga", "budgets") as page:
        of_key = page.locator("#budgets tbody tr").filter(has_text="ana")
        expect(of_key).to_contain_text("of 100M")
        expect(of_key).to_contain_text("Configuration")
        expect(of_key.get_by_role("button")).to_have_count(0)
        page.get_by_text("Set a budget").first.click()
        page.locator("#budget-form [name=name]").fill("frida")
        page.locator("#budget-form [name=tokens_per_day]").fill("10")
        page.locator("#budget-form button").click()
        row = page.locator("#budgets tbody tr").filter(has_text="frida")
        expect(row).to_contain_text("0 of 10")
        assert [status(), status()] == [200, 429]
        expect(row).to_contain_text("14 of 10")
        expect(row.locator(".spent")).to_contain_text("reached · renews")
        assert violations(page) == []
        chromium.save_screenshot(page, "console-budget-reached")
        row.get_by_role("button", name="Edit").click()
        expect(page.locator("#budget-form [name=name]")).to_have_value("frida")
        page.locator("#budget-form [name=tokens_per_day]").fill("1000")
        page.locator("#budget-form button").click()
        expect(row).to_contain_text("14 of 1,000")
        assert status() == 200
        with opened(chromium, server, "frida", "people") as own:
            expect(own.locator('#people [data-row="frida"] .limits')).to_contain_text("renews")
            expect(own.get_by_role("link", name="Budgets")).to_be_hidden()
        row.get_by_role("button", name="Remove").click()
        expect(row.get_by_role("button", name="Remove")).to_have_text("Confirm")
        row.get_by_role("button", name="Remove").click()
        expect(row).to_have_count(0)


@ONE_SERVER
def test_budget_that_is_refused_says_why(chromium, server):
    with opened(chromium, server, "olga", "budgets", expected="status of 40") as page:
        page.get_by_text("Set a budget").first.click()
        page.locator("#budget-form [name=name]").fill("dora")
        page.locator("#budget-form button").click()
        for _ in range(2):  # also after the budgets were read again
            with page.expect_response("**/v1/organization/budgets"):
                pass
            expect(page.locator("#page-problem")).to_contain_text("give at least one of")
        page.evaluate("location.hash = 'keys'")
        expect(page.locator("#page-problem")).to_be_hidden()


def test_log_of_a_model_is_shown_to_operators(chromium, server):
    with opened(chromium, server, "olga") as page:
        page.get_by_role("button", name="Log of fairlead-demo").click()
        expect(page.locator("#log-dialog")).to_be_visible()
        expect(page.locator("#log-hint")).to_contain_text("Nothing was printed yet")
        assert violations(page) == []
        page.locator("#log-close").click()
    with opened(chromium, server, "ana") as page:
        expect(page.get_by_role("button", name="Log of fairlead-demo")).to_be_hidden()


@ONE_SERVER
def test_snippets_run_with_the_models_name(chromium, server):
    with opened(chromium, server, "ana", "connect") as page:
        expect(page.locator("#version")).not_to_be_empty()
        expect(page.locator("#address")).to_have_text(f"{server.url}/v1")
        expect(page.locator("#curl code")).to_contain_text('"model":"fairlead-demo"')
        expect(page.locator("#python code")).to_contain_text('model="fairlead-demo"')
