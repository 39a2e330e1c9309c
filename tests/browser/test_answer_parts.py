"""The parts of an answer in the dashboard's chat: folded reasoning, text and tool calls."""

import json
import re

import pytest

from browser.headless import expect, serious_violations, wait_until_live
from browser.test_dashboard_scripted import HOSTILE
from e2e.scripted_server import scripted_server
from fairlead.base.job import CallPiece, Delta

HOSTILE_ARGUMENTS = {"city": HOSTILE, "days": [1, 2], "<b>": {"a": "<i>"}}


def thinking_and_calling(job):
    arguments = json.dumps(HOSTILE_ARGUMENTS, ensure_ascii=False)
    middle = len(arguments) // 2
    return [
        [Delta(0, reasoning=f"\n{HOSTILE}", token_ids=[1])],
        [Delta(0, reasoning=" and more", token_ids=[2])],
        [Delta(0, "**Wait.**", token_ids=[3])],
        [Delta(0, calls=[CallPiece(0, "<img src=x>", "")], token_ids=[4])],
        [Delta(0, calls=[CallPiece(0, None, arguments[:middle])], token_ids=[5])],
        [Delta(0, calls=[CallPiece(0, None, arguments[middle:]), CallPiece(1, "now")], token_ids=[6])],
        [Delta(0, calls=[CallPiece(2, "broken", "[1")], token_ids=[7], finish_reason="tool_calls")],
    ]


@pytest.mark.parametrize("look", ["light", "dark", "phone"])
def test_reasoning_is_folded_and_tool_calls_are_lists_of_arguments(chromium, look):
    options = {"width": 380, "height": 800} if look == "phone" else {"color_scheme": look}
    with scripted_server(script=thinking_and_calling) as (url, _), chromium.open(url, **options) as page:
        wait_until_live(page)
        page.locator("#question").fill("Hello")
        page.locator("#chat-button").click()
        turn = page.locator("#transcript .turn:not(.mine)")
        expect(turn.locator(".note")).to_contain_text("7 tokens")
        assert [part.get_attribute("class") for part in turn.locator(".parts > *").all()] == [
            *("reasoning", "text", "call", "call", "call")
        ]
        reasoning = turn.locator(".reasoning p")
        expect(reasoning).to_be_hidden()
        turn.locator("summary").click()
        expect(reasoning).to_have_text(f"{HOSTILE} and more", use_inner_text=False)
        expect(turn.locator("summary")).to_have_text(re.compile(r"^Thought for [\d.]+s$"))
        expect(turn.locator(".text strong")).to_have_text("Wait.")
        call = turn.locator(".call").first
        expect(call.locator("figcaption")).to_have_text("Tool call <img src=x>")
        assert [term.text_content() for term in call.locator("dt").all()] == [*HOSTILE_ARGUMENTS]
        shown = [value.text_content() for value in call.locator("dd").all()]
        assert shown[0] == HOSTILE
        assert [json.loads(value) for value in shown[1:]] == [*HOSTILE_ARGUMENTS.values()][1:]
        expect(turn.locator(".call").nth(1)).to_have_text("Tool call now")
        expect(turn.locator(".call").nth(2).locator("pre")).to_have_text("[1")
        assert turn.locator("img, script, a, b, i").count() == 0
        assert page.title() == "Fairlead"
        assert serious_violations(page) == []
        chromium.save_screenshot(page, f"parts-{look}")


def test_model_that_thinks_can_be_stopped(chromium):
    script = lambda job: [[Delta(0, reasoning="Let me see.", token_ids=[1])], None]  # noqa: E731
    with scripted_server(script=script) as (url, _), chromium.open(url) as page:
        wait_until_live(page)
        page.locator("#question").fill("Hello")
        page.keyboard.press("Enter")
        turn = page.locator("#transcript .turn:not(.mine)")
        expect(turn.locator("summary")).to_have_text("Thinking…")
        expect(turn.locator(".note")).to_be_hidden()
        chromium.save_screenshot(page, "thinking")
        page.keyboard.press("Escape")
        expect(turn.locator(".note")).to_have_text("Stopped")
        expect(turn.locator("summary")).to_have_text(re.compile("^Thought for"))


UNFINISHED = """async (deltas) => {
  const { AnswerParts } = await import("/dashboard/answer.js");
  const parts = new AnswerParts();
  const shown = [];
  for (const delta of deltas) {
    parts.add(delta);
    parts.draw();
    shown.push([...parts.body.children].map((part) => [part.className, part.textContent]));
  }
  parts.end();
  return [shown, [...parts.body.children].map((part) => part.className), parts.text, parts.spoken];
}"""


def test_parts_are_shown_while_they_are_written(chromium):
    deltas = [
        {"role": "assistant", "content": ""},
        {"reasoning": "Let", "content": None},
        {"reasoning_content": " me", "reasoning": " me"},
        {"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"a'}}, None], "content": 5},
    ]
    with scripted_server() as (url, _), chromium.open(url) as page:
        shown, classes, text, spoken = page.evaluate(UNFINISHED, deltas)
    assert shown[0] == []
    assert shown[1] == [["reasoning running", "Thinking…Let"]]
    assert shown[2] == [["reasoning running", "Thinking…Let me"]]
    assert shown[3][1] == ["call", "Tool call f"]
    assert shown[4][1] == ["call", 'Tool call f{"a']
    assert (classes, text, spoken) == (["reasoning", "call"], "", "Tool call f")


def test_next_question_carries_the_text_of_an_answer_without_its_reasoning(chromium):
    with scripted_server(script=thinking_and_calling) as (url, _), chromium.open(url) as page:
        wait_until_live(page)
        with page.expect_request("**/v1/chat/completions"):
            page.locator("#question").fill("Hello")
            page.keyboard.press("Enter")
        expect(page.locator("#transcript .note")).to_contain_text("7 tokens")
        with page.expect_request("**/v1/chat/completions") as asked:
            page.locator("#question").fill("Again")
            page.keyboard.press("Enter")
        assert json.loads(asked.value.post_data)["messages"] == [
            {"role": "user", "content": "Hello"},
            {"role": "assistant", "content": "**Wait.**"},
            {"role": "user", "content": "Again"},
        ]
