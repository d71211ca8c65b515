"""A real browser without a window, and pages in it. Whatever one logs as an error, or cannot load, fails its test."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest
from playwright.sync_api import Browser, Page, sync_playwright
from server_process import server_process

if TYPE_CHECKING:
    from collections.abc import Iterator

    from page_actions import OpenPage

DEMOS = ("mlx-demo", "mlx-demo-vision", "mlx-demo-embedding")
BROWSERS = (
    *("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome"),
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
    "/Applications/Chromium.app/Contents/MacOS/Chromium",
)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    program = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if program is None:
        pytest.fail(
            "No browser was found: install Chromium (apt install chromium, brew install chromium) or Chrome."
        )
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser: Browser) -> Iterator[OpenPage]:
    """Opens an address in a browser profile of its own. `expected` are parts of errors that a test is about.

    That a server is gone is none: tests end theirs while the page still asks how it is.
    """
    contexts = []
    problems: list[str] = []

    def opened(url: str, *, expected: tuple[str, ...] = (), **profile: Any) -> Page:
        usual = {"viewport": {"width": 1200, "height": 800}, "locale": "en-US"}
        contexts.append(context := browser.new_context(**{**usual, **profile}))
        page: Page = context.new_page()

        def note(text: str, is_problem: bool = True) -> None:
            if is_problem and not any(part in text for part in (*expected, "ERR_CONNECTION_REFUSED")):
                problems.append(text)

        own = ("/".join(url.split("/")[:3]) + "/", "data:", "blob:")
        page.on("console", lambda message: note(message.text, message.type in ("error", "warning")))
        page.on("pageerror", lambda error: note(str(error)))
        page.on("request", lambda request: note(request.url, not request.url.startswith(own)))
        page.goto(url)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert problems == []


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server with the three demo models."""
    config = tmp_path_factory.mktemp("page") / "models.toml"
    config.write_text("".join(f'[models.{name}]\nmodel = "{name}"\n' for name in DEMOS))
    with server_process("--config", str(config)) as server:
        yield server.url
