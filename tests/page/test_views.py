"""The page's other views, and what holds for all: languages, themes, narrow screens, keyboard, screen readers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from page_actions import OpenPage, answers, finished, say
from playwright.sync_api import Route, expect
from running_server import running
from scripted_engine import ScriptedEngine
from scripted_server import ANSWER

if TYPE_CHECKING:
    from collections.abc import Iterator

VIEWS = ("chat", "models", "activity", "connect")
PICTURES = Path(__file__).parents[2] / "docs" / "pictures"


@pytest.fixture(scope="module")
def scripted() -> Iterator[str]:
    with ScriptedEngine(lambda _: ANSWER) as engine, running(engine) as server:
        yield server.url


def test_models_are_loaded_and_unloaded(open_page: OpenPage, demo: str) -> None:
    page = open_page(f"{demo}/#/models")
    card = page.get_by_role("article", name="mlx-demo-embedding", exact=True)
    expect(card).to_contain_text("fits into memory")
    card.get_by_role("button", name="Load", exact=True).click()
    expect(card.locator(".state")).to_have_text("ready", timeout=60_000)
    card.get_by_role("button", name="Unload").click()
    expect(card.locator(".state")).to_have_text("not loaded", timeout=60_000)
    levels = page.get_by_role("article", name="mlx-demo", exact=True).locator(".chip")
    assert {"none", "low", "medium (default)", "high"} <= set(levels.all_inner_texts())


def test_activity_lists_a_request_without_its_contents(open_page: OpenPage, scripted: str) -> None:
    page = open_page(scripted)
    say(page, "a secret question")
    finished(page)
    page.get_by_role("link", name="Activity").click()
    row = page.locator("tbody tr").first
    expect(row).to_contain_text("/v1/chat/completions")
    expect(row).to_contain_text("complete")
    expect(page.get_by_role("img", name="Tokens per second")).to_be_visible()
    assert "secret" not in page.locator("main").inner_text()


def test_clients_are_shown_with_this_servers_address_and_copied(open_page: OpenPage, scripted: str) -> None:
    page = open_page(f"{scripted}/#/connect", permissions=["clipboard-read", "clipboard-write"])
    page.get_by_role("radio", name="Codex").focus()
    page.keyboard.press("ArrowDown")
    expect(page.get_by_role("radio", name="Claude Code")).to_be_focused()
    page.locator(".panel").get_by_role("button", name="Copy").first.click()
    assert f"ANTHROPIC_BASE_URL={scripted}" in page.evaluate("navigator.clipboard.readText()")


def test_the_api_is_shown_from_its_document(open_page: OpenPage, scripted: str) -> None:
    page = open_page(f"{scripted}/docs", expected=(scripted,))
    page.get_by_role("searchbox").fill("chat completions")
    shown = page.locator(".operation:not([hidden])")
    expect(shown).to_have_count(1)
    shown.locator("summary").first.click()
    expect(shown).to_contain_text("reasoning_effort")
    expect(shown.locator("pre")).to_contain_text(f"curl {scripted}/v1/chat/completions")


def test_a_websocket_is_shown_with_its_messages(open_page: OpenPage, scripted: str) -> None:
    page = open_page(f"{scripted}/docs#websocket_v1_responses", expected=(scripted,))
    shown = page.locator(".operation[open]")
    expect(shown).to_contain_text("generate")
    expect(shown).to_contain_text("sequence_number")
    expect(shown.locator("pre")).to_contain_text(f"{scripted.replace('http', 'ws')}/v1/responses")


@pytest.mark.parametrize(
    ("locale", "hello"),
    [("ja-JP", "何を聞きますか？"), ("zh-CN", "想问点什么？"), ("fr-FR", "What would you like to ask?")],
)
def test_the_browsers_language_is_taken_and_can_be_changed(
    open_page: OpenPage, scripted: str, locale: str, hello: str
) -> None:
    page = open_page(scripted, locale=locale)
    expect(page.get_by_role("heading", name=hello)).to_be_visible()
    page.locator(".choices select").first.select_option("zh")
    expect(page.get_by_role("heading", name="想问点什么？")).to_be_visible()
    assert page.evaluate("document.documentElement.lang") == "zh-Hans"


@pytest.mark.parametrize("locale", ["en-US", "ja-JP"])
@pytest.mark.parametrize("size", [(360, 640), (640, 400)], ids=["a phone", "a laptop at 200 %"])
def test_nothing_is_wider_than_a_narrow_screen(
    open_page: OpenPage, demo: str, size: tuple[int, int], locale: str
) -> None:
    page = open_page(demo, viewport={"width": size[0], "height": size[1]}, locale=locale)
    for view in (*VIEWS, "api"):
        page.goto(f"{demo}/#/{view}")
        page.wait_for_load_state("networkidle")
        width = page.evaluate(
            "Math.max(document.documentElement.scrollWidth, document.querySelector('main').scrollWidth)"
        )
        assert width <= size[0], view
    page.goto(f"{demo}/#/chat")
    composer = page.locator(".composer").bounding_box()
    assert composer is not None
    assert composer["y"] + composer["height"] <= size[1]


def test_on_a_phone_the_list_of_chats_opens_over_the_chat_and_closes(
    open_page: OpenPage, scripted: str
) -> None:
    page = open_page(scripted, viewport={"width": 360, "height": 640})
    menu = page.get_by_role("button", name="Navigation")
    expect(page.get_by_role("link", name="Models")).to_be_hidden()
    menu.click()
    expect(page.get_by_role("link", name="Chat", exact=True)).to_be_focused()
    page.keyboard.press("Escape")
    expect(menu).to_be_focused()
    menu.click()
    page.get_by_role("link", name="Models").click()
    expect(page.get_by_role("heading", name="Models")).to_be_visible()
    expect(page.get_by_role("link", name="Models")).to_be_hidden()


def test_the_list_of_chats_stays_open_when_it_was_opened_before_the_first_view_is_shown(
    open_page: OpenPage, scripted: str
) -> None:
    page = open_page(scripted, viewport={"width": 360, "height": 640})
    held: list[Route] = []
    page.route("**/v1/models", lambda route: held.append(route))
    with page.expect_request("**/v1/models"):
        page.reload()
    page.get_by_role("button", name="Navigation").click()
    for route in held:  # that of the page before is among them
        route.continue_()
    page.unroute("**/v1/models")
    expect(page.get_by_role("heading", name="What would you like to ask?")).to_be_visible()
    expect(page.get_by_role("link", name="Chat", exact=True)).to_be_focused()


def test_everything_is_done_with_the_keyboard(open_page: OpenPage, scripted: str) -> None:
    page = open_page(scripted)
    page.locator("#composer").focus()
    page.keyboard.press("Tab")
    page.keyboard.press("ArrowRight")  # from auto to the first level
    expect(page.locator(".dial input:checked")).not_to_have_value("")
    page.keyboard.press("Shift+Tab")
    page.keyboard.type("hello")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("there")
    page.keyboard.press("Enter")
    finished(page)
    expect(page.locator("article.user .said")).to_have_text("hello\nthere")
    expect(page.locator("#composer")).to_be_focused()
    expect(page.locator("#announcements")).to_have_text("The answer is complete")
    page.get_by_role("link", name="Skip to the content").focus()
    page.keyboard.press("Enter")
    expect(page.locator("main")).to_be_focused()


NAMELESS = """
[...document.querySelectorAll("button, a, input, select, textarea, img, meter, [role=img], [tabindex='0']")]
  .filter((each) => each.checkVisibility() && !each.textContent.trim() && !each.labels?.length && !each.title
    && !each.getAttribute("aria-label") && each.getAttribute("alt") === null)
  .map((each) => each.outerHTML)
"""
CONTRASTS = """
() => {
  const canvas = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  const linear = (part) => (part <= 0.04 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
  const lightness = (color) => {
    canvas.fillStyle = color;
    canvas.fillRect(0, 0, 1, 1);
    const [red, green, blue] = [...canvas.getImageData(0, 0, 1, 1).data].map((part) => linear(part / 255));
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue + 0.05;
  };
  const ground = (each) => {
    const color = getComputedStyle(each).backgroundColor;
    return color === "rgba(0, 0, 0, 0)" ? ground(each.parentElement) : color;
  };
  const hasText = (each) => [...each.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
  return [...document.querySelectorAll("main *, aside *")]
    .filter((each) => each.checkVisibility() && !each.disabled && hasText(each))
    .map((each) => [each, [getComputedStyle(each).color, ground(each)].map(lightness).sort((a, b) => b - a)])
    .filter(([, [light, dark]]) => light / dark < 4.5)
    .map(([each, [light, dark]]) => `${each.className}: ${each.textContent.slice(0, 40)}: ${light / dark}`);
}
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_everything_has_a_name_and_can_be_read_in_light_and_dark(
    open_page: OpenPage, demo: str, scheme: str
) -> None:
    page = open_page(demo, color_scheme=scheme)
    say(page, "What is 17 + 5?")
    finished(page)
    for view in VIEWS:
        page.goto(f"{demo}/#/{view}" if view != "chat" else page.url)
        page.wait_for_load_state("networkidle")
        assert page.evaluate(NAMELESS) == [], view
        assert page.evaluate(CONTRASTS) == [], view


@pytest.mark.skipif(
    "PICTURES" not in os.environ, reason="make test-page PICTURES=1 writes those of the documentation"
)
def test_the_pictures_of_the_documentation_are_taken(open_page: OpenPage, demo: str) -> None:
    profiles: dict[str, dict[str, Any]] = {
        "page": {"color_scheme": "light", "viewport": {"width": 1100, "height": 720}},
        "page-dark": {"color_scheme": "dark", "viewport": {"width": 1100, "height": 720}},
        "page-phone": {"color_scheme": "light", "locale": "ja-JP", "viewport": {"width": 390, "height": 760}},
    }
    for name, profile in profiles.items():
        page = open_page(demo, **profile)
        for effort in ("low", "high"):
            page.locator(f".dial input[value={effort}]").check(force=True)
            say(page, "What is the capital of France?" if effort == "low" else "What is 17 + 5?")
            finished(page)
        answers(page).last.locator("summary").click()
        page.mouse.move(0, 0)
        if name == "page-dark":
            page.goto(f"{demo}/#/activity")
            page.wait_for_load_state("networkidle")
        page.screenshot(path=PICTURES / f"{name}.png")
