"""The dashboard with a scripted server: hostile answers, API keys and refusals; and its modules alone."""

import json
import re
from collections.abc import Iterator
from functools import partial

import pytest

from browser.headless import expect, serious_violations, wait_until_live
from e2e.scripted_server import scripted_server
from fairlead.base.config import ApiKey
from fairlead.base.errors import LoadFailed, NodeFailed
from fairlead.base.job import Delta
from fairlead.router.fleet.status import NodeStatus, RemoteDetails
from server.routes.conftest import FakeFleet


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """The URL of a server without API keys."""
    with scripted_server() as (address, _):
        yield address


# The JavaScript modules alone -----------------------------------------------------------------------


STREAM = (
    ': queued position=3 estimated_wait=24\n\ndata: {"é": "日本"}\n\n'
    "event: two\r\ndata: a\r\ndata:b\r\n\r\ndata: lost"
)


def test_events_are_parsed_alike_wherever_the_stream_is_split(chromium, url):
    read = """async (stream) => {
      const { eventsOf } = await import("/dashboard/sse.js");
      const bytes = new TextEncoder().encode(stream);
      const found = new Set();
      for (let cut = 0; cut <= bytes.length; cut += 1) {
        const body = new ReadableStream({ start(to) {
          for (const piece of [bytes.slice(0, cut), bytes.slice(cut)]) if (piece.length) to.enqueue(piece);
          to.close();
        } });
        const events = [];
        for await (const event of eventsOf(new Response(body))) events.push(event);
        found.add(JSON.stringify(events));
      }
      return [...found].map((each) => JSON.parse(each));
    }"""
    with chromium.open(url) as page:
        assert page.evaluate(read, STREAM) == [
            [
                {"comment": "queued position=3 estimated_wait=24"},
                {"event": "message", "data": '{"é": "日本"}'},
                {"event": "two", "data": "a\nb"},
            ]
        ]


MARKDOWN = (
    "# T *x*\n1. **b** `c`\n- <img src=x onerror=alert(1)>\n"
    "~~~js\n</code><script>1</script>\n~~~\n**a\n***\n`` ` ``"
)


def test_rendered_markdown_has_only_text_of_the_answer(chromium, url):
    read = """async (text) => {
      const { elementsOf } = await import("/dashboard/markdown.js");
      const tags = new Set();
      const invented = [];
      for (let end = 0; end <= text.length; end += 1) {
        const shown = document.createElement("div");
        shown.append(...elementsOf(text.slice(0, end)));
        for (const each of shown.querySelectorAll("*")) tags.add(each.localName);
        let at = 0;
        for (const letter of shown.textContent) {
          at = text.indexOf(letter, at) + 1;
          if (!at) { invented.push(end); break; }
        }
      }
      return [[...tags].sort(), invented];
    }"""
    tags = ["code", "em", "h4", "li", "ol", "p", "pre", "strong", "ul"]
    with chromium.open(url) as page:
        assert page.evaluate(read, MARKDOWN) == [tags, []]


# Answers of models and servers, and API keys ---------------------------------------------------------


HOSTILE = """<img src=x onerror="document.title='owned'"> **bold** `code`
<script>document.title = "owned"</script>

- [a link](javascript:alert(1))

```
<b>not bold</b>
```"""


def hostile(job):
    return [[Delta(0, HOSTILE, [10])], [Delta(0, "", [0], finish_reason="stop")]]


def test_markup_in_an_answer_is_shown_as_text(chromium):
    with scripted_server(script=hostile) as (url, _), chromium.open(url) as page:
        wait_until_live(page)
        page.locator("#question").fill("Hello")
        page.locator("#chat-button").click()
        text = page.locator("#transcript .turn:not(.mine) .text")
        expect(text.locator("pre")).to_have_text("<b>not bold</b>")
        expect(text.locator("strong")).to_have_text("bold")
        expect(text.locator("li")).to_have_text("[a link](javascript:alert(1))")
        assert text.locator("img, script, a, b").count() == 0
        assert page.title() == "Fairlead"


def error(code: str, message: str = "a reason") -> str:
    return json.dumps({"error": {"message": message, "type": "x", "param": None, "code": code}})


CHUNK = 'data: {"choices": [{"index": 0, "delta": {"content": "Half"}, "finish_reason": null}]}\n\n'
NO_ANSWERS = [
    (200, "data: [DONE]\n\n", "The answer is empty."),
    (200, f"{CHUNK}data: {error('node_failed')}\n\n", "The node that was answering failed."),
    (200, f"{CHUNK}data: {error('engine_failed', 'not a <b>number</b>')}\n\n", "not a <b>number</b>"),
    (200, CHUNK, "The answer broke off."),
    (429, error("queue_full"), "The queue is full. Try again in 7s."),
    (502, error("load_failed", "no such file"), "The model could not be loaded: no such file"),
    (502, "<html>a proxy's own page</html>", "The answer broke off."),
]


def test_failed_answer_shows_the_reason(chromium, url):
    with chromium.open(url, expected="status of") as page:
        wait_until_live(page)
        for status, body, note in NO_ANSWERS:
            kind = "text/event-stream" if status == 200 else "application/json"
            headers = {"Content-Type": kind, "Retry-After": "7"}
            answer = partial(
                lambda route, **how: route.fulfill(**how), status=status, headers=headers, body=body
            )
            page.route("**/v1/chat/completions", answer)
            page.locator("#question").fill("Hello")
            page.keyboard.press("Enter")
            expect(page.locator("#transcript .note").last).to_have_text(note)
            expect(page.locator("#chat-status")).to_contain_text(note)
            expect(page.locator("#chat-button")).to_have_text("Send")


def test_truncated_answer_is_shown_as_failed(chromium):
    """A browser may lose the last bytes of a broken connection, so either of two notes may be shown."""
    script = lambda job: [[Delta(0, "Half", [1])], NodeFailed("it failed")]  # noqa: E731
    with scripted_server(script=script) as (url, _), chromium.open(url, expected="CHUNKED") as page:
        wait_until_live(page)
        page.locator("#question").fill("Hello")
        page.keyboard.press("Enter")
        note = page.locator("#transcript .note.problem")
        expect(note).to_have_text(
            re.compile(r"^The node that was answering failed\.$|^The answer broke off\.$")
        )


def test_page_requests_a_key_and_keeps_it_in_the_tab(chromium):
    with scripted_server("sesame") as (url, gateway), chromium.open(url, expected="401") as page:
        dialog = page.locator("#key-dialog")
        expect(dialog).to_be_visible()
        assert serious_violations(page) == []
        chromium.save_screenshot(page, "key")
        page.keyboard.type("open")
        page.keyboard.press("Enter")
        expect(page.locator("#key-problem")).to_have_text("This key is not valid here.")
        page.keyboard.type("sesame")
        page.keyboard.press("Enter")
        wait_until_live(page)
        expect(dialog).to_be_hidden()
        page.locator("#question").fill("Hello")
        page.keyboard.press("Enter")
        expect(page.locator("#transcript .turn:not(.mine) .text")).to_have_text("Hello world")
        assert len(gateway.jobs) == 1

        page.reload()
        wait_until_live(page)
        assert not dialog.is_visible()
        assert "sesame" not in page.content() + page.url
        assert "sesame" not in page.evaluate("JSON.stringify({...localStorage})")
        another = page.context.new_page()
        another.goto(url)
        expect(another.locator("#key-dialog")).to_be_visible()


NODE = NodeStatus(
    id="big",
    kind="remote",
    models=("far",),
    seats=4,
    busy=1,
    state="up",
    remote=RemoteDetails(url="http://192.0.2.1"),
)


def test_buttons_are_offered_to_operators_and_not_to_users(chromium):
    keys = [ApiKey("sk-user"), ApiKey("sk-operator", role="operator")]
    fleet = FakeFleet(["scripted"], node_statuses=[NODE])
    with scripted_server(*keys, fleet=fleet) as (url, _), chromium.open(url, expected="401") as page:
        buttons = page.locator(".row button")
        expect(page.locator("#key-dialog")).to_be_visible()  # which the first refusal opens
        for key, names in (("sk-user", []), ("sk-operator", ["Log", "Unload", "Drain"]), ("sk-user", [])):
            if not page.locator("#key-dialog").is_visible():
                page.locator("#key-button").click()
            page.locator("#key").fill(key)
            page.keyboard.press("Enter")
            wait_until_live(page)
            expect(page.locator(".row")).to_have_count(2)
            expect(buttons.filter(visible=True)).to_have_text(names)
            chromium.save_screenshot(page, f"role of {key}")


def test_draining_a_node_needs_confirmation_and_a_refusal_is_shown(chromium):
    node = NodeStatus(
        id="big/one",
        kind="remote",
        models=(),
        seats=4,
        busy=1,
        state="up",
        remote=RemoteDetails(url="http://192.0.2.1"),
    )
    fleet = FakeFleet(["scripted"], node_statuses=[node])
    with scripted_server(fleet=fleet) as (url, _), chromium.open(url, expected="502") as page:
        line = page.locator('[data-node="big/one"]')
        button = line.locator("button")
        button.focus()
        page.evaluate("globalThis.setTimeout = () => 0")  # so that the confirmation does not expire
        page.keyboard.press("Enter")
        expect(button).to_have_text("Confirm")
        expect(page.locator("#fleet-status")).to_contain_text("Drain big/one?")
        assert fleet.calls == []
        page.keyboard.press("Enter")
        expect(button).to_have_text("Drain")
        page.wait_for_function("button => !button.ariaDisabled", arg=button.element_handle())
        assert fleet.calls == [("drain", "big/one")]
        assert button.evaluate("button => button === document.activeElement")

        fleet.refusal = LoadFailed("there is <b>no room</b> for it")
        page.locator('[data-model="scripted"] button:not(.log)').click()
        problem = page.locator('[data-model="scripted"] .problem')
        expect(problem).to_have_text("there is <b>no room</b> for it")
        expect(page.locator("#fleet-status")).to_have_text("there is <b>no room</b> for it")
