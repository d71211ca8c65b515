"""Chatting on the page, as a person does: efforts, stopping, errors, pictures, tools, and what a browser keeps."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest
from page_actions import OpenPage, answers, finished, say
from playwright.sync_api import expect
from running_server import running
from scripted_engine import ScriptedEngine, Transcript
from scripted_server import ANSWER, CALL, WEATHER

from mlx_backend.errors import EngineError

if TYPE_CHECKING:
    from pathlib import Path

FAILS = "Failed to load resource"
LONG = "<|channel|>final<|message|>" + " ".join(f"word{number}" for number in range(200)) + "<|return|>"


def final(text: str) -> str:
    return f"<|channel|>final<|message|>{text}<|return|>"


def test_the_same_question_at_two_efforts(open_page: OpenPage, demo: str) -> None:
    page = open_page(demo)
    reasoned = []
    for effort in ("low", "high"):
        page.get_by_text(effort, exact=True).click()
        say(page, "What is the capital of France?")
        answer = finished(page)
        expect(answer.locator(".markdown")).to_have_text("The capital of France is Paris.")
        expect(answer.locator("footer")).to_contain_text(f"Effort {effort} (chosen here)")
        expect(answer.locator("footer")).to_contain_text(
            re.compile(r"\d+ tokens .*\d+ cached.*First token .* s.*tok/s")
        )
        expect(answer.locator(".thinking")).to_be_hidden()
        answer.locator("summary").click()
        expect(answer.locator(".thinking")).to_have_text(re.compile(r"\w"))  # written when it opens
        reasoned.append(len(answer.locator(".thinking").inner_text()))
    assert reasoned[1] > reasoned[0] > 0
    page.get_by_text("auto", exact=True).click()
    say(page, "And of Italy?")  # what was said before goes with it
    expect(finished(page).locator(".markdown")).to_have_text("The capital of Italy is Rome.")
    expect(answers(page).last.locator("footer")).to_contain_text("Effort medium (its own default)")


def test_a_model_that_does_not_reason_has_no_dial_and_sees_pictures(
    open_page: OpenPage, demo: str, tmp_path: Path
) -> None:
    image = pytest.importorskip("PIL.Image")
    draw = pytest.importorskip("PIL.ImageDraw")
    picture = image.new("RGB", (3000, 1500), "white")  # larger than what the page sends
    draw.Draw(picture).ellipse((900, 200, 2000, 1300), fill="red")
    picture.save(tmp_path / "circle.png")
    page = open_page(demo)
    expect(page.get_by_role("button", name="Add pictures")).to_be_hidden()
    page.get_by_label("Model", exact=True).select_option("mlx-demo-vision")
    expect(page.locator(".dial input")).to_have_count(0)
    page.locator("input[type=file]").set_input_files(tmp_path / "circle.png")
    expect(page.locator(".composer img")).to_have_count(1)
    say(page, "What is in this picture?")
    expect(finished(page).locator(".markdown")).to_contain_text("red circle")
    expect(page.locator("article.user img")).to_be_visible()
    page.reload()
    expect(page.locator("article.user img")).to_be_visible()


def test_an_answer_is_stopped_in_its_middle_and_continued(open_page: OpenPage) -> None:
    with ScriptedEngine(lambda _: LONG, gated=True) as engine, running(engine) as server:
        page = open_page(server.url)
        say(page, "hello")
        engine.advance(40)
        expect(answers(page).locator(".markdown")).to_contain_text("word5 ")
        page.get_by_role("button", name="Stop").click()
        expect(answers(page).locator(".note")).to_have_text("Stopped")
        assert engine.requests[0].cancelled.wait(30)
        kept = answers(page).locator(".markdown").inner_text()
        page.get_by_role("button", name="Continue").click()
        engine.advance(1000)
        expect(finished(page).locator(".markdown")).to_contain_text("word199")
        assert engine.requests[1].prompt.endswith(kept.rstrip())


def test_reasoning_is_counted_while_it_is_folded_and_unfolds_while_it_comes(open_page: OpenPage) -> None:
    with ScriptedEngine(lambda _: ANSWER, gated=True) as engine, running(engine) as server:
        page = open_page(server.url)
        say(page, "hello")
        engine.advance(6)
        folded = answers(page).locator(".reasoning")
        expect(folded.locator("summary")).to_contain_text(re.compile(r"Reasoning.* s · \d tokens"))
        expect(folded.locator(".preview")).to_contain_text("Cap")
        expect(folded.locator(".thinking")).to_be_hidden()
        folded.locator("summary").click()
        engine.advance(3)
        expect(folded.locator(".thinking")).to_contain_text("Capital of")
        engine.advance(100)
        expect(finished(page).locator(".markdown")).to_have_text("The capital is Paris.")
        expect(folded.locator(".thinking")).to_be_visible()


def test_a_reload_in_the_middle_keeps_what_had_come(open_page: OpenPage) -> None:
    with ScriptedEngine(lambda _: LONG, gated=True) as engine, running(engine) as server:
        page = open_page(server.url)
        say(page, "hello")
        engine.advance(40)
        expect(answers(page).locator(".markdown")).to_contain_text("word5 ")
        page.reload()
        expect(answers(page).locator(".markdown")).to_contain_text("word5")
        expect(answers(page).locator(".note")).to_have_text("Stopped")
        assert engine.requests[0].cancelled.wait(30)
        expect(page.locator(".chat-list a")).to_have_text(["hello"])


def test_a_chat_that_is_deleted_while_a_reply_comes_is_gone_and_the_reply_ends(open_page: OpenPage) -> None:
    with ScriptedEngine(lambda _: LONG, gated=True) as engine, running(engine) as server:
        page = open_page(server.url)
        page.on("dialog", lambda dialog: dialog.accept())
        say(page, "hello")
        engine.advance(40)
        expect(answers(page).locator(".markdown")).to_contain_text("word5 ")
        page.locator(".chat-list button").click()
        assert engine.requests[0].cancelled.wait(30)
        expect(page.locator(".chat-list a")).to_have_count(0)
        expect(answers(page)).to_have_count(0)
        page.reload()
        expect(page.get_by_role("button", name="Send")).to_be_visible()
        expect(page.locator(".chat-list a")).to_have_count(0)


@pytest.mark.parametrize(
    "text", ["", final("It began, and").removesuffix("<|return|>")], ids=["at once", "in its middle"]
)
def test_an_error_is_shown_with_its_answer_and_another_try_works(open_page: OpenPage, text: str) -> None:
    scripts = iter(
        [Transcript(text=text, failure=EngineError("The device has gone.")), Transcript(text=ANSWER)]
    )
    with ScriptedEngine(lambda _: next(scripts)) as engine, running(engine) as server:
        page = open_page(server.url, expected=(FAILS,))
        say(page, "hello")
        problem = page.get_by_role("alert").filter(has_text="The device has gone.")
        expect(problem).to_be_visible()
        page.get_by_role("button", name="Answer again").click()
        expect(finished(page).locator(".markdown")).to_have_text("The capital is Paris.")
        expect(problem).to_have_count(0)
        expect(answers(page)).to_have_count(1)


def test_a_server_that_is_lost_is_noticed_and_found_again(open_page: OpenPage) -> None:
    with ScriptedEngine(lambda _: ANSWER) as engine, running(engine) as server:
        page, port = open_page(server.url, expected=(FAILS,)), server.address[1]
        say(page, "hello")
        finished(page)
    say(page, "again")
    expect(answers(page).last.get_by_role("alert")).to_have_text("The connection to the server was lost.")
    expect(page.locator(".banner")).to_be_visible()
    with ScriptedEngine(lambda _: ANSWER) as engine, running(engine, port=port):
        expect(page.locator(".banner")).to_be_hidden(timeout=30_000)
        answers(page).last.get_by_role("button", name="Answer again").click()
        expect(finished(page).locator(".markdown")).to_have_text("The capital is Paris.")


def test_a_key_is_asked_for_and_kept_until_the_tab_is_closed(open_page: OpenPage) -> None:
    with ScriptedEngine(lambda _: ANSWER) as engine, running(engine, api_key="sesame") as server:
        page = open_page(server.url, expected=(FAILS,))
        for key in ("wrong", "sesame"):
            page.get_by_label("API key", exact=True).last.fill(key)
            page.get_by_role("button", name="Use the key").click()
            if key == "wrong":
                expect(page.get_by_text("The API key is wrong.")).to_be_visible()
        say(page, "hello")
        expect(finished(page).locator(".markdown")).to_have_text("The capital is Paris.")
        page.reload()
        expect(answers(page).locator(".markdown")).to_have_text("The capital is Paris.")
        expect(page.get_by_role("dialog")).to_have_count(0)
        assert "sesame" not in page.evaluate("JSON.stringify(localStorage)")
        other = page.context.new_page()
        other.goto(server.url)
        expect(other.get_by_role("dialog")).to_be_visible()


HOSTILE = """\
<script>globalThis.stolen = 1</script><img src=x onerror="globalThis.stolen = 1">

<b onmouseover="globalThis.stolen = 1">bold</b> [click](javascript:globalThis.stolen=1) ![pixel](https://stranger.test/?said=all)

| a | b |
|---|---|
| 1 | 2 |

```html
<script>globalThis.stolen = 1</script>
```
"""


def test_what_a_model_writes_is_markdown_and_never_runs_or_fetches(open_page: OpenPage) -> None:
    with ScriptedEngine(lambda _: final(HOSTILE)) as engine, running(engine) as server:
        page = open_page(server.url)
        say(page, "hello")
        shown = finished(page).locator(".markdown")
        expect(shown).to_contain_text("<script>globalThis.stolen = 1</script><img")
        expect(shown.locator("pre code .hljs-tag").first).to_be_visible()
        expect(shown.locator("td")).to_have_text(["1", "2"])
        expect(shown.locator("img, script, b")).to_have_count(0)
        links = shown.locator("a[href]")
        expect(links).to_have_count(1)  # to the picture, which is not fetched
        assert links.get_attribute("rel") == "noopener noreferrer"
        assert page.evaluate("globalThis.stolen") is None


def test_a_tool_is_called_and_gets_its_result_by_hand(open_page: OpenPage) -> None:
    scripts = iter([CALL, final("It rains in Oslo.")])
    with ScriptedEngine(lambda _: next(scripts)) as engine, running(engine) as server:
        page = open_page(server.url)
        page.get_by_role("button", name="Chat settings").click()
        page.get_by_label("System prompt").fill("Be brief.")
        page.get_by_label("Tools").fill(json.dumps([WEATHER]))
        page.keyboard.press("Escape")
        say(page, "What is the weather?")
        expect(finished(page)).to_contain_text("Calls weather")
        page.get_by_label("Result of weather").fill("rain")
        page.get_by_role("button", name="Send the results").click()
        expect(answers(page).last.locator(".markdown")).to_have_text("It rains in Oslo.")
        prompt = engine.requests[1].prompt
        assert "Be brief." in prompt
        assert "<|start|>functions.weather to=assistant<|channel|>commentary<|message|>rain" in prompt


def test_a_question_is_edited_and_settings_go_with_the_request(open_page: OpenPage) -> None:
    def count(prompt: str) -> str:
        return final(f"You said {prompt.count('again')}.")

    with ScriptedEngine(count) as engine, running(engine) as server:
        page = open_page(server.url)
        page.get_by_role("button", name="Chat settings").click()
        page.get_by_label("Max tokens").fill("77")
        page.get_by_role("button", name="Close").click()
        say(page, "first")
        expect(finished(page).locator(".markdown")).to_have_text("You said 0.")
        page.locator("article.user").hover()
        page.get_by_role("button", name="Edit").click()
        page.locator("article.user textarea").fill("again")
        page.get_by_role("button", name="Send again").click()
        expect(answers(page).locator(".markdown")).to_have_text("You said 1.")
        assert [each.request.max_tokens for each in engine.requests] == [77, 77]
        assert "first" not in engine.requests[1].prompt


def test_chats_are_listed_opened_exported_and_deleted(open_page: OpenPage) -> None:
    with ScriptedEngine(lambda _: ANSWER) as engine, running(engine) as server:
        page = open_page(server.url)
        for question in ("one", "two"):
            page.get_by_role("link", name="New chat").click()
            say(page, question)
            finished(page)
        chats = page.locator(".chat-list a")
        expect(chats).to_have_text(["two", "one"])
        chats.last.click()
        expect(page.locator("article.user .said")).to_have_text("one")
        exported: dict[str, Any] = {}
        for name in ("Markdown", "JSON"):
            page.get_by_role("button", name="Chat settings").click()
            with page.expect_download() as download:
                page.get_by_role("button", name=f"Export as {name}").click()
            exported[name] = download.value.path().read_text(encoding="utf-8")
            page.keyboard.press("Escape")
        assert "## user\n\none\n\n## assistant" in exported["Markdown"]
        assert json.loads(exported["JSON"])["messages"][1]["text"] == "The capital is Paris."
        page.on("dialog", lambda dialog: dialog.accept())
        page.get_by_role("button", name="Delete the chat “one”?").click()
        expect(chats).to_have_text(["two"])
        page.reload()
        expect(chats).to_have_text(["two"])
