"""What a person does on the page, for its tests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from playwright.sync_api import expect

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page


class OpenPage(Protocol):
    def __call__(self, url: str, *, expected: tuple[str, ...] = (), **profile: Any) -> Page: ...


def say(page: Page, text: str) -> None:
    page.locator("#composer").fill(text)
    page.locator("#composer").press("Enter")


def answers(page: Page) -> Locator:
    return page.locator("article.assistant")


def finished(page: Page) -> Locator:
    """The last answer, once it has ended."""
    answer = answers(page).last
    expect(answer.locator("footer .actions")).to_be_visible(timeout=60_000)
    return answer
