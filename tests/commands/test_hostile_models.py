"""A folder whose chat template takes all the time or memory there is: refused in a sentence, and the others served."""

from __future__ import annotations

import json
import shutil
import signal
import threading
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any

import pytest
from hostile_templates import HOSTILE
from server_process import ended, server_process

from mlx_backend.demo import MODEL_PATH

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from server_process import ServerProcess

SENTENCE = "cannot be used: it takes"
SOME = (
    *("a list doubled, then printed", "a list doubled, then compared", "a text doubled", "an indent"),
    *("lists added up", "paragraphs of nothing", "loops in loops", "a macro that calls itself twice"),
)
"""Of each kind one; all of them are tried in tests/models/test_templates.py."""
GROWN = HOSTILE["a text doubled"]
WITH_A_WORD = f"{{% if 'boom' in messages[0].content %}}{GROWN}{{% endif %}}{{{{ messages[0].content }}}}"


def put(folder: Path, template: str | None = None) -> Path:
    shutil.copytree(MODEL_PATH, folder)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def call(url: str, body: Any = None) -> tuple[int, Any]:
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data), timeout=120) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def chat(server: ServerProcess, model: str, text: str = "Hi") -> tuple[int, Any]:
    question = {"role": "user", "content": text}
    body = {"model": model, "messages": [question], "max_tokens": 4}
    return call(f"{server.url}/v1/chat/completions", body)


def test_alone_it_is_refused_at_the_start(tmp_path: Path) -> None:
    done = ended("--model", str(put(tmp_path / "hostile", HOSTILE["loops in loops"])))
    assert done.returncode == 1
    assert f"The chat template of 'hostile' {SENTENCE}" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("models")
    put(folder / "good")
    put(folder / "word", WITH_A_WORD)
    for name in SOME:
        put(folder / name.replace(" ", "-"), HOSTILE[name])
    with server_process("--models-dir", str(folder), "--model", str(folder / "good")) as server:
        yield server
        server.send(signal.SIGTERM)
        server.process.wait(60)
        assert "Traceback" not in server.log_to_end()


@pytest.mark.parametrize("name", SOME)
def test_among_others_it_is_refused_while_health_is_answered(server: ServerProcess, name: str) -> None:
    answers: list[tuple[int, Any]] = []
    asking = threading.Thread(target=lambda: answers.append(chat(server, name.replace(" ", "-"))))
    asking.start()
    while asking.is_alive():
        assert call(f"{server.url}/health")[0] == 200
        asking.join(0.05)
    status, answer = answers[0]
    assert status >= 400
    assert SENTENCE in answer["error"]["message"]


def test_one_that_explodes_with_a_word_refuses_that_conversation_and_the_others_are_served(
    server: ServerProcess,
) -> None:
    status, answer = chat(server, "word", "boom")
    assert status == 400
    assert "cannot render this conversation: it takes" in answer["error"]["message"]
    assert chat(server, "word")[0] == 200
    assert chat(server, "good")[0] == 200
