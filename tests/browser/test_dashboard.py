"""The dashboard in a browser, on a real server: its contents and its controls."""

import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from browser.headless import expect, number, serious_violations, tab_to, wait_until_live
from e2e.own_copy import blocked_load, own_copy
from e2e.real_server import TIMEOUT_S, RealServer, configured, real_server
from e2e.slow_motion import slowed, stopped

SEATS = 3
# The page must show new totals this soon, in each of `CHANGES` changes. They are sent within a quarter of
# a second; the rest allows for other tests that run at the same time.
UPDATE_S = 3.0
CHANGES = 20

# Records which totals the page shows, and since when, as Unix time in seconds.
RECORD_TOTALS = """() => {
  const numbers = ["running", "waiting"].map(
    (total) => document.querySelector(`[data-total="${total}"] .number`));
  globalThis.seen = [];
  const record = () => {
    const totals = numbers.map((n) => n.textContent).join();
    if (totals !== seen.at(-1)?.totals) seen.push({ totals, shown_s: Date.now() / 1000 });
    requestAnimationFrame(record);
  };
  record();
}"""
# Makes the page count down only when `tick` is called, and moves its clock ahead by `ahead_ms`.
CONTROL_THE_COUNTDOWN = """() => {
  const now = performance.now.bind(performance);
  globalThis.ahead_ms = 0;
  performance.now = () => now() + ahead_ms;
  globalThis.setInterval = (tick) => { globalThis.tick = tick; };
}"""


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return own_copy(tmp_path_factory.mktemp("dashboard") / "model")


@pytest.fixture(scope="module")
def server(chromium, model: Path) -> Iterator[RealServer]:
    # Without keep-alive comments, a waiting client is sent its position only once.
    arguments = configured(model.parent, {"path": str(model), "slots": SEATS}, queue={"keepAlive": "0s"})
    with real_server(*arguments) as running:
        yield running


@contextmanager
def jobs(server: RealServer, count: int) -> Iterator[None]:
    """Send `count` streaming requests as another user; disconnect when the block ends."""
    body = json.dumps(
        {
            "model": "fairlead-demo",
            "prompt": "Count from 1 to 90.",
            "stream": True,
            "max_tokens": 900,
            "ignore_eos": True,
            "user": "another-user",
        }
    ).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body)
    with ExitStack() as open_sockets:
        for _ in range(count):
            client = open_sockets.enter_context(socket.create_connection(server.address))
            client.sendall(head + body)
        yield


def wait_for_queue(server: RealServer, *, running: int, waiting: int) -> float:
    """Wait for these counts; return the last Unix time in seconds at which they differed."""
    deadline = time.monotonic() + TIMEOUT_S
    requested_at = before = time.time()
    while (counts := server.queue()) and (counts["running"], counts["waiting"]) != (running, waiting):
        assert time.monotonic() < deadline, counts
        before = requested_at
        time.sleep(0.01)
        requested_at = time.time()
    return before


def seconds_until_shown(page, totals: str, since: float) -> float:
    """Return how many seconds after `since`, when the totals became true, the page showed them."""
    page.wait_for_function("totals => seen.at(-1)?.totals === totals", arg=totals)
    return page.evaluate("seen.at(-1).shown_s") - since


# Contents of the page -------------------------------------------------------------------------------


def test_totals_are_updated_soon_after_each_change(chromium, server):
    with chromium.open(server.url) as page, stopped(server.child_pid()):
        wait_until_live(page)
        expect(number(page, "running")).to_have_text("0")
        page.evaluate(RECORD_TOTALS)
        took_s: list[float] = []
        while len(took_s) < CHANGES:
            with jobs(server, SEATS + 5):
                since = wait_for_queue(server, running=SEATS, waiting=5)
                took_s.append(seconds_until_shown(page, "3,5", since))
            since = wait_for_queue(server, running=0, waiting=0)
            took_s.append(seconds_until_shown(page, "0,0", since))
        assert max(took_s) <= UPDATE_S, took_s
        with jobs(server, SEATS + 5):
            expect(page.locator('[data-model="fairlead-demo"] .seats')).to_contain_text(f"{SEATS} / {SEATS}")
            chromium.save_screenshot(page, "load-light")
    wait_for_queue(server, running=0, waiting=0)


def test_events_name_no_tenants(chromium, server):
    with stopped(server.child_pid()), jobs(server, SEATS + 1):
        wait_for_queue(server, running=SEATS, waiting=1)
        received = ""
        with server.http.stream("GET", "/events") as events:
            for piece in events.iter_text():
                received += piece
                if "event: snapshot" in received and received.endswith("\n\n"):
                    break
    assert "event: history" in received
    assert "another-user" not in received
    wait_for_queue(server, running=0, waiting=0)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("light", {"color_scheme": "light"}),
        ("dark", {"color_scheme": "dark"}),
        ("phone", {"width": 380, "height": 800, "has_touch": True}),
        ("japanese", {"locale": "ja-JP", "color_scheme": "dark"}),
        ("chinese-phone", {"locale": "zh-CN", "width": 380, "height": 800}),
    ],
)
def test_page_has_no_serious_accessibility_violations(chromium, server, name, options):
    with chromium.open(server.url, **options) as page:
        wait_until_live(page)
        page.locator("#minutes summary").click()
        expect(page.locator("#minutes tbody tr").first).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        language = page.evaluate("document.documentElement.lang")
        assert options.get("locale", "en-US")[:2] == language[:2]
        assert serious_violations(page) == []
        chromium.save_screenshot(page, name)


def test_chosen_language_and_appearance_are_kept(chromium, server):
    def background(page) -> str:
        return page.evaluate("getComputedStyle(document.body).backgroundColor")

    with chromium.open(server.url, color_scheme="light") as page:
        wait_until_live(page)
        light = background(page)
        page.locator("#theme").select_option("dark")
        page.locator("#language").select_option("zh")
        expect(page.locator("#models-heading")).to_have_text("模型与节点")
        assert light != background(page)
        page.reload()
        expect(page.locator("#models-heading")).to_have_text("模型与节点")
        assert light != background(page)
        page.locator("#theme").select_option("auto")
        assert light == background(page)


def test_lost_connection_is_shown_and_restored(chromium, server):
    with chromium.open(server.url, expected="ERR_INTERNET_DISCONNECTED") as page:
        wait_until_live(page)
        page.context.set_offline(True)
        page.evaluate("import('/dashboard/server.js').then(({ server }) => server.useKey(''))")  # disconnect
        expect(page.locator("#link")).to_have_attribute("data-state", "lost")
        page.context.set_offline(False)
        wait_until_live(page)


# Controls of the page -------------------------------------------------------------------------------


def test_model_can_be_unloaded_and_loaded(chromium, server, model):
    with chromium.open(server.url) as page:
        line = page.locator('[data-model="fairlead-demo"]')
        button, state = line.locator("button:not(.log)"), line.locator(".state")
        expect(state).to_have_attribute("data-state", "ready")
        button.click()
        expect(state).to_have_attribute("data-state", "stopped")
        assert server.http.get("/running").json() == []
        expect(button).to_have_text("Load")
        expect(button).not_to_have_attribute("aria-disabled", "true")
        with blocked_load(model):
            button.click()
            expect(state).to_have_attribute("data-state", "loading")
            expect(line.locator("progress")).to_be_visible()
        expect(state).to_have_attribute("data-state", "ready")
        assert server.running()["state"] == "ready"
        expect(page.locator("#fleet-status")).to_have_text("fairlead-demo: Ready")
        expect(line.locator(".problem")).to_be_hidden()


def test_chat_can_be_sent_read_and_stopped_with_the_keyboard(chromium, server):
    with chromium.open(server.url) as page:
        wait_until_live(page)
        tab_to(page, ".skip")
        page.keyboard.press("Enter")
        page.keyboard.type("Count from 1 to 90.")
        answer = page.locator("#transcript .turn:not(.mine)")
        with slowed(server.child_pid()) as blocked:
            page.keyboard.press("Enter")
            seen = ""
            for _ in range(3):  # the text grows between checks
                seen = page.wait_for_function(grown, arg=len(seen)).json_value()
            blocked.set()  # the answer cannot end before it is stopped
            assert server.queue()["running"] == 1
            page.keyboard.press("Escape")
            expect(answer.locator(".note")).to_have_text("Stopped")
            wait_for_queue(server, running=0, waiting=0)
        server.wait_until_at_rest()
        assert page.evaluate("document.activeElement.id") == "question"
        stopped_text = answer.locator(".text").inner_text()
        assert stopped_text.startswith(seen.strip())

        page.keyboard.type("What is Fairlead?")
        page.keyboard.press("Enter")
        expect(answer.nth(1).locator(".note")).to_contain_text("tokens in")
        expect(page.locator("#chat-status")).to_contain_text(answer.nth(1).locator(".text").inner_text())
        assert stopped_text == answer.nth(0).locator(".text").inner_text()


grown = """n => {
  const text = document.querySelector("#transcript .turn:not(.mine) .text")?.textContent ?? "";
  return text.length > n && text;
}"""


def test_waiting_chat_shows_its_queue_position_and_can_be_stopped(chromium, server):
    with chromium.open(server.url) as page:
        wait_until_live(page)
        page.evaluate(CONTROL_THE_COUNTDOWN)
        with stopped(server.child_pid()), jobs(server, SEATS + 2):
            wait_for_queue(server, running=SEATS, waiting=2)
            page.locator("#question").fill("What is Fairlead?")
            tab_to(page, "#chat-button")
            page.keyboard.press("Enter")
            note = page.locator("#transcript .note")
            expect(note).to_contain_text("Waiting at position")
            expect(page.locator("#chat-status")).to_contain_text("Waiting at position")
            wait_for_queue(server, running=SEATS, waiting=3)
            chromium.save_screenshot(page, "waiting")
            page.evaluate("ahead_ms = 3600_000; tick()")
            expect(note).to_have_text("Waiting longer than expected")  # instead of "1s" forever
            tab_to(page, "#chat-button")
            expect(page.locator("#chat-button")).to_have_text("Stop")
            page.keyboard.press("Enter")
            expect(note).to_have_text("Stopped")
            wait_for_queue(server, running=SEATS, waiting=2)
            expect(page.locator("#question")).to_have_value("What is Fairlead?")  # it can be sent again
        wait_for_queue(server, running=0, waiting=0)


def test_enter_that_ends_a_composition_sends_nothing(chromium, server):
    with chromium.open(server.url) as page:
        wait_until_live(page)
        page.locator("#question").fill("にほんご")
        press = """isComposing => document.querySelector("#question").dispatchEvent(
          new KeyboardEvent("keydown", { key: "Enter", isComposing, bubbles: true, cancelable: true }))"""
        page.evaluate(press, arg=True)
        assert page.locator("#transcript .turn").count() == 0
        page.evaluate(press, arg=False)
        expect(page.locator("#transcript .turn.mine .text")).to_have_text("にほんご")
