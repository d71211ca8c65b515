"""`mlx-backend chat` on a terminal and in a pipe, with the demo model."""

from __future__ import annotations

import json
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest
from PIL import Image, ImageDraw
from running_server import running
from scripted_engine import ScriptedEngine, ScriptedTokenizer
from server_process import COMMAND, ENVIRONMENT, server_process
from terminal_process import terminal_process

from mlx_backend.commands.chat_screen import split_finished
from mlx_backend.demo import MODEL_PATH

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

QUESTION = "What is 3+4?"
ANSWER = "3 + 4 = 7"
FINAL = "<|channel|>final<|message|>"
FINAL_TOKENS = ScriptedTokenizer().encode(FINAL, control_tokens=True)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with server_process("--model", "mlx-demo") as server:
        yield server.url


def piped(*arguments: str, text: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, "chat", *arguments],
        input=text,
        capture_output=True,
        text=True,
        env={**ENVIRONMENT, **environment},
        timeout=120,
    )


def test_a_talk_on_a_terminal(url: str, tmp_path: Path) -> None:
    saved = tmp_path / "talk.md"
    with terminal_process("run", "mlx-demo", "--url", url, XDG_STATE_HOME=str(tmp_path)) as talk:
        assert "effort none low medium* high" in talk.until(">>> ")
        talk.type(f"{QUESTION}\r")
        shown = talk.until("tok/s")
        assert "Reasoned for " in shown
        assert " tokens" in shown
        assert ANSWER in shown
        assert "effort medium · " in shown
        talk.until(">>> ")
        talk.type("/effort none\r")
        talk.until("effort none · levels: none low medium* high")
        talk.type('"""What is the capital\r')
        talk.until("... ")
        talk.type('of France?"""\r')
        shown = talk.until("tok/s")
        assert "Paris" in shown
        assert "effort none" in shown
        talk.until(">>> ")
        talk.type("/effrt\r")
        talk.until("There is no /effrt; did you mean /effort?")
        talk.type("/effort banana\r")
        talk.until("mlx-demo has none low medium* high.")
        talk.type(f"/save {saved}\r")
        talk.until("saved in")
        talk.type("/bye\r")
        talk.to_end()
        assert talk.process.wait(60) == 0
    assert ANSWER in saved.read_text()
    assert "What is the capital\nof France?" in saved.read_text()
    assert QUESTION in (tmp_path / "mlx-backend" / "chat_history").read_text()


def test_ctrl_c_stops_the_answer_and_not_the_talk(tmp_path: Path) -> None:
    engine = ScriptedEngine([f"{FINAL}1, 2, 3, 4, and so on", f"{FINAL}Well.<|return|>"], gated=True)
    with running(engine) as server:
        engine.advance(len(FINAL_TOKENS) + 2)  # up to "1, 2, ", where it stands still
        with terminal_process("chat", "--url", server.url, XDG_STATE_HOME=str(tmp_path)) as talk:
            talk.until(">>> ")
            talk.type("Count.\r")
            talk.until("1, 2")
            talk.type("\x03")
            talk.until("stopped")
            talk.until(">>> ")
            assert engine.requests[0].cancelled.wait(60)
            talk.type("\x03")
            talk.until("/bye or Ctrl-D ends.")
            engine.advance(100)
            talk.type("/retry\r")
            talk.until("Well.")
            talk.until("tok/s")
            talk.until(">>> ")
            talk.type("\x04")
            talk.to_end()
            assert talk.process.wait(60) == 0


def test_of_several_models_one_is_chosen_and_the_talk_goes_on_with_another_that_sees(tmp_path: Path) -> None:
    models, picture = tmp_path / "models", tmp_path / "a square.png"
    for name in ("first", "second"):
        shutil.copytree(MODEL_PATH, models / name)
    image = Image.new("RGB", (64, 64), "white")
    ImageDraw.Draw(image).ellipse((12, 12, 52, 52), "red")
    image.save(picture)
    (tmp_path / "torn.png").write_bytes(picture.read_bytes()[:20])
    environment = {
        "XDG_STATE_HOME": str(tmp_path),
        "MLX_BACKEND_MODELS_DIR": str(models),
        "MLX_BACKEND_PORT": "1",
        "HOME": str(tmp_path),
    }
    with terminal_process("chat", **environment) as talk:
        assert "second" in talk.until("Which one? [1-4] ")
        talk.type("2\r")
        talk.until("Loading second …")  # before anything is known of how far it is
        assert "second · effort none low medium* high" in talk.until(">>> ")
        talk.type("/model\r")
        talk.until("second* mlx-demo mlx-demo-vision first")
        talk.type(f"/image {picture}\r")
        talk.until("second does not see pictures here.")
        talk.type("/model mlx-demo-visio\r")
        talk.until("mlx-demo-vision?")  # a line that is folded, where the address is long
        talk.type("/model mlx-demo-vision\r")
        talk.until("mlx-demo-vision · no levels of effort")
        talk.type("/effort high\r")
        talk.until("effort high · mlx-demo-vision has no levels")
        talk.type("/image ~/torn.png\r")
        talk.until("1 with the next message")
        talk.type("What is in this picture?\r")
        talk.until("~/torn.png: ")
        talk.until("/retry sends")
        talk.until(">>> ")
        talk.type(f"/image '{picture}'\r")
        talk.until("1 with the next message")
        talk.type("What is in this picture?\r")
        assert "red" in talk.until("tok/s")
        talk.until(">>> ")
        talk.type("/bye\r")
        talk.to_end()
        assert talk.process.wait(60) == 0


def test_where_no_server_runs_the_model_is_served_by_the_command_itself_and_answers_a_pipe() -> None:
    done = piped("mlx-demo", "--effort", "low", text=QUESTION, MLX_BACKEND_PORT="1")
    assert (done.stdout, done.returncode) == (f"{ANSWER}\n", 0), done.stderr


def test_what_is_piped_in_comes_after_the_prompt(url: str) -> None:
    done = piped("-p", "What is", "--url", url, text="3+4?\n")
    assert done.stdout == f"{ANSWER}\n"


def test_what_is_piped_in_and_is_no_text_is_refused() -> None:
    done = subprocess.run([*COMMAND, "chat"], input=b"caf\xe9", capture_output=True, env=ENVIRONMENT)
    assert done.returncode == 1
    assert b"not text in UTF-8: byte 4" in done.stderr


def test_a_name_may_end_with_an_effort_as_it_may_for_the_api(url: str) -> None:
    reply = json.loads(piped("mlx-demo:off", QUESTION, "--json", "--url", url).stdout)
    assert reply["model"] == "mlx-demo"
    assert "reasoning_content" not in reply["choices"][0]["message"]


def test_json_is_the_whole_reply(url: str) -> None:
    reply = json.loads(piped("mlx-demo", QUESTION, "--json", "--url", url).stdout)
    assert reply["choices"][0]["message"]["content"] == ANSWER
    assert reply["choices"][0]["message"]["reasoning_content"]
    assert reply["model"] == "mlx-demo"


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        ([], 1, "There is nothing to ask"),
        (
            ["mlx-demo", "-p", "hi", "--effort", "banana"],
            1,
            "mlx-demo has none low medium* high.",
        ),
        (["mlx-demo", "-p", "hi", "--image", "/no/such.png"], 1, "cannot be read: No such file"),
        (["mlx-demo", "-p", "hi", "--image", __file__], 1, "is no picture"),
        (["mlx-demo:hihg", "-p", "hi"], 1, "There is no model 'mlx-demo:hihg' here"),
        (["mlx-demo", "hi", "-p", "hi"], 2, "the prompt is there twice"),
        (["-p", "hi", "--url", "http://127.0.0.1:1"], 3, "No server answers at http://127.0.0.1:1"),
        (["mlx-dmo", "-p", "hi"], 1, "did you mean mlx-demo?"),
        (["/no/such/folder", "-p", "hi"], 1, "There is no folder '/no/such/folder'"),
    ],
)
def test_what_cannot_be_asked_is_said_in_a_sentence(arguments: list[str], status: int, message: str) -> None:
    done = piped(*arguments, MLX_BACKEND_PORT="1")
    assert done.returncode == status
    assert done.stderr.count(message) == 1
    assert "Traceback" not in done.stderr
    assert not done.stdout


@pytest.mark.parametrize(
    ("text", "finished"),
    [
        ("one\ntwo", ""),
        ("one\n\n", ""),
        ("one\n\ntwo", "one\n\n"),
        ("- a\n\n  of a", ""),
        ("```\na\n\nb", ""),
        ("```\na\n\nb\n```\n\nc", "```\na\n\nb\n```\n\n"),
        ("~~~\n```\n\nb\n~~~\n\nc", "~~~\n```\n\nb\n~~~\n\n"),
    ],
)
def test_markdown_is_printed_for_good_where_nothing_can_change_it(text: str, finished: str) -> None:
    assert split_finished(text) == (finished, text[len(finished) :])
