"""A headless Chromium, if one is installed, and pages that record console errors and foreign requests."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-core is not installed")

TIMEOUT_MS = 60_000  # also for a busy machine
playwright.expect.set_options(timeout=TIMEOUT_MS)

expect = playwright.expect

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def chromium() -> str | None:
    """Return the path of a Chromium: that of `FAIRLEAD_CHROMIUM`, or the first one on `PATH`."""
    return os.environ.get("FAIRLEAD_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """Opens the dashboard of local servers. Saves screenshots in `screenshots`."""

    def __init__(self, chromium, screenshots: Path) -> None:
        self._chromium = chromium
        self._screenshots = screenshots

    @contextmanager
    def open(
        self, url: str, *, width: int = 1360, height: int = 900, expected: str = "", **options
    ) -> Iterator[playwright.Page]:
        """Open the page. Fail at the end if it logged an error or a warning, or contacted another server.

        `expected`: messages that contain this text are allowed, because the test causes them.
        """
        messages: list[str] = []
        foreign_requests: list[str] = []
        context = self._chromium.new_context(
            viewport={"width": width, "height": height}, **{"locale": "en-US", **options}
        )
        context.set_default_timeout(TIMEOUT_MS)

        def record_message(message) -> None:
            if message.type in {"error", "warning"} and not (expected and expected in message.text):
                messages.append(message.text)

        def record_request(request) -> None:
            if urlsplit(request.url).netloc != urlsplit(url).netloc:
                foreign_requests.append(request.url)

        page = context.new_page()
        page.on("console", record_message)
        page.on("pageerror", lambda error: messages.append(str(error)))
        page.on("request", record_request)
        try:
            page.goto(url)
            yield page
        finally:
            context.close()
        assert messages == []
        assert foreign_requests == []

    def save_screenshot(self, page: playwright.Page, name: str) -> None:
        """Save a screenshot of the whole page."""
        page.screenshot(path=self._screenshots / f"{name}.png", full_page=True)


@contextmanager
def browser(screenshots: Path) -> Iterator[Browser]:
    """Start a browser and close it afterwards. Skip the test if none is installed."""
    path = chromium()
    if path is None:
        pytest.skip("no Chromium is on the path, and FAIRLEAD_CHROMIUM names none")
    with playwright.sync_playwright() as driver:
        # Without the sandbox, because tests may run as root in a container. It opens only pages of the tests.
        started = driver.chromium.launch(executable_path=path, args=["--no-sandbox"], timeout=TIMEOUT_MS)
        try:
            yield Browser(started, screenshots)
        finally:
            started.close()


def number(page, total: str):
    return page.locator(f'[data-total="{total}"] .number')


def wait_until_live(page) -> None:
    """Wait until the page is connected and has its first snapshot, which lists the models to chat with."""
    expect(page.locator("#link")).to_have_attribute("data-state", "live")
    expect(page.locator("#chat-model option")).not_to_have_count(0)


def violations(page, *impacts: str) -> list[str]:
    """Return the accessibility violations that axe-core finds, with these impacts; without any, all."""
    found = axe.Axe().run(page).response["violations"]
    return [
        f"{violation['id']}: {node['html']}: {node['failureSummary']}"
        for violation in found
        if not impacts or violation["impact"] in impacts
        for node in violation["nodes"]
    ]


def serious_violations(page) -> list[str]:
    """Return the serious and critical accessibility violations that axe-core finds."""
    return violations(page, "serious", "critical")


def tab_to(page, selector: str, most: int = 40) -> None:
    """Press Tab until the element has the focus; check that its focus outline is visible."""
    for _ in range(most):
        page.keyboard.press("Tab")
        if page.evaluate("selector => document.activeElement.matches(selector)", selector):
            width = page.evaluate("getComputedStyle(document.activeElement).outlineWidth")
            assert float(width.removesuffix("px")) >= 2
            return
    raise AssertionError(f"{selector} cannot be reached by keyboard")
