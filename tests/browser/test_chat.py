"""The chat's settings, its history, what can be done with messages, and tables, links and formulas."""

import json

import pytest

from browser.headless import expect, violations, wait_until_live
from e2e.scripted_server import scripted_server
from fairlead.base.job import Delta


def answering(text):
    return lambda job: [[Delta(0, text, [10])], [Delta(0, "", [0], finish_reason="stop")]]


def ask(page, text):
    with page.expect_request("**/v1/chat/completions") as asked:
        page.locator("#question").fill(text)
        page.keyboard.press("Enter")
    expect(page.locator("#transcript .turn:not(.mine) .note").last).to_contain_text("tokens")
    return json.loads(asked.value.post_data)


def test_settings_are_sent_and_kept_in_the_browser(chromium):
    with scripted_server() as (url, _), chromium.open(url) as page:
        wait_until_live(page)
        page.locator(".chat-options summary").click()
        page.locator("#chat-settings [name=system]").fill("Be short.")
        page.locator("#chat-settings [name=temperature]").fill("0.5")
        page.locator("#chat-settings [name=limit]").fill("40")
        sent = ask(page, "Hello")
        assert sent["messages"][0] == {"role": "system", "content": "Be short."}
        assert (sent["temperature"], sent["max_tokens"]) == (0.5, 40)
        page.locator("#chat-settings [name=temperature]").fill("9")  # is not valid, so it is not used
        assert ask(page, "Again")["temperature"] == 0.5
        page.reload()
        wait_until_live(page)
        assert ask(page, "Hello")["messages"][0]["content"] == "Be short."


def test_answer_is_written_again_and_a_question_edited(chromium):
    with scripted_server() as (url, _), chromium.open(url) as page:
        wait_until_live(page)
        ask(page, "One")
        ask(page, "Two")
        lines = page.locator("#transcript .turn")
        with page.expect_request("**/v1/chat/completions") as asked:
            lines.nth(1).get_by_role("button", name="Write again").click()
        assert json.loads(asked.value.post_data)["messages"] == [{"role": "user", "content": "One"}]
        expect(lines).to_have_count(2)
        expect(lines.last.locator(".note")).to_contain_text("tokens")
        lines.first.get_by_role("button", name="Edit").click()
        expect(page.locator("#question")).to_have_value("One")
        expect(lines).to_have_count(0)
        assert ask(page, "Other")["messages"] == [{"role": "user", "content": "Other"}]


def test_chats_are_kept_in_the_browser_and_can_be_deleted(chromium):
    with scripted_server() as (url, _), chromium.open(url) as page:
        wait_until_live(page)
        ask(page, "First chat")
        page.locator("#chat-new").click()
        ask(page, "Second chat")
        page.reload()
        wait_until_live(page)
        history = page.locator("#chat-history")
        expect(history.locator("option")).to_have_text(["Earlier chats", "Second chat", "First chat"])
        history.select_option(label="First chat")
        expect(page.locator("#transcript .turn")).to_have_count(2)
        assert [message["content"] for message in ask(page, "More")["messages"]] == [
            *("First chat", "Hello world", "More")
        ]
        page.locator("#chat-forget").click()
        expect(page.locator("#transcript .turn")).to_have_count(0)
        expect(history.locator("option")).to_have_text(["Earlier chats", "Second chat"])


def test_chats_of_one_key_are_not_shown_to_another(chromium):
    with scripted_server("sk-1", "sk-2") as (url, _), chromium.open(url, expected="401") as page:
        page.locator("#key").fill("sk-1")
        page.keyboard.press("Enter")
        wait_until_live(page)
        ask(page, "Secret")
        page.locator("#key-button").click()
        page.locator("#key").fill("sk-2")
        page.keyboard.press("Enter")
        expect(page.locator("#transcript .turn")).to_have_count(0)
        expect(page.locator("#chat-history")).to_be_hidden()
        assert "Secret" not in page.locator("body").inner_text()


def test_error_is_in_sight_although_the_transcript_is_scrolled(chromium):
    with scripted_server() as (url, _), chromium.open(url, expected="status of") as page:
        wait_until_live(page)
        for number in range(8):
            ask(page, f"Question {number}")
        body = json.dumps({"error": {"message": "x", "type": "x", "param": None, "code": "queue_full"}})
        page.route(
            "**/v1/chat/completions",
            lambda route: route.fulfill(status=429, headers={"Retry-After": "7"}, body=body),
        )
        page.locator("#question").fill("Hello")
        page.keyboard.press("Enter")
        page.evaluate("document.querySelector('#transcript').scrollTop = 0")
        expect(page.locator("#chat-problem")).to_have_text("The queue is full. Try again in 7s.")
        expect(page.locator("#chat-problem")).to_be_in_viewport()
        expect(page.locator("#question")).to_have_value("Hello")


RICH = """| Name | Value |
|---|--:|
| a | **1** |
| b \\| c | `x|y` |

See [the site](https://example.org/a?b=1) or https://example.com/x.
Not [this](javascript:alert(1)), not [that](/models).

The root is $x = \\frac{-b \\pm \\sqrt{b^2-4ac}}{2a}$ and costs $5 or $6.

$$
\\sum_{i=1}^{n} i^2 <img src=x onerror=alert(1)>
$$
"""


@pytest.mark.parametrize("look", ["light", "dark", "phone"])
def test_tables_links_and_formulas_are_rendered_safely(chromium, look):
    options = {"width": 380, "height": 800} if look == "phone" else {"color_scheme": look}
    with scripted_server(script=answering(RICH)) as (url, _), chromium.open(url, **options) as page:
        wait_until_live(page)
        ask(page, "Hello")
        text = page.locator("#transcript .turn:not(.mine) .text")
        expect(text.locator("td")).to_have_text(["a", "1", "b | c", "x|y"])
        links = text.locator("a")
        assert [link.get_attribute("href") for link in links.all()] == [
            *("https://example.org/a?b=1", "https://example.com/x")
        ]
        assert set(links.first.get_attribute("rel").split()) == {"noopener", "noreferrer", "nofollow"}
        expect(text).to_contain_text("[this](javascript:alert(1)), not [that](/models)")
        expect(text).to_contain_text("costs $5 or $6")
        expect(text.locator("math mfrac msqrt msup")).to_have_count(1)
        expect(text.locator("math[display=block] munderover")).to_have_count(1)
        assert text.locator("img, script").count() == 0
        assert violations(page) == []
        chromium.save_screenshot(page, f"rich-{look}")


HARD = [
    "\\frac{",
    "{" * 3000,
    "x_" * 3000,
    "\\begin{pmatrix}1&2\\\\3",
    "\\left(",
    "^^__",
    "\\sqrt[",
    "\\",
    "𝒳_1'",
]


def test_any_formula_is_shown_without_an_error(chromium):
    read = """async (sources) => {
      const { formula } = await import("/dashboard/math.js");
      return sources.map((source) => formula(source, true).localName);
    }"""
    with scripted_server() as (url, _), chromium.open(url) as page:
        assert page.evaluate(read, HARD) == ["math"] * len(HARD)


def test_only_models_that_make_text_are_offered(chromium):
    with scripted_server() as (url, _), chromium.open(url) as page:
        made = page.evaluate("""async () => {
          const { knowModels, textModels } = await import("/dashboard/models.js");
          const { server } = await import("/dashboard/server.js");
          const data = [
            { id: "a", task: "generate" }, { id: "b", task: "embed" }, { id: "c" },
            { id: "d", capabilities: { out: ["audio"] } }, { id: "e", capabilities: { out: ["text"] } },
          ];
          server.call = async () => new Response(JSON.stringify({ data }));
          const models = ["a", "b", "c", "d", "e"].map((model) => ({ model, state: "ready" }));
          await knowModels([...models, { model: "f", unlisted: true }], () => {});
          return textModels();
        }""")
    assert made == ["a", "c", "e"]
