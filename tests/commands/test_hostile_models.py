"""A folder whose chat template takes all the time or memory there is: refused in a sentence, and the others served."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import urllib.error
import urllib.request
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from hostile_templates import HOSTILE
from server_process import ended, server_process

from mlx_backend.demo import MODEL_PATH

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from server_process import ServerProcess

SENTENCE = "cannot be used: it takes"
SOME = ("a list doubled, then printed", "paragraphs of nothing", "a macro that calls itself twice")
"""All of them are tried in tests/models/test_templates.py."""
GROWN = HOSTILE["a text doubled"]
WITH_A_WORD = f"{{% if 'boom' in messages[0].content %}}{GROWN}{{% endif %}}{{{{ messages[0].content }}}}"


def put(folder: Path, template: str | None = None) -> Path:
    shutil.copytree(MODEL_PATH, folder)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def configured(folder: Path, **fields: Any) -> None:
    """Add a copy of the demo model whose configuration says something else."""
    file = put(folder) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


NO_FILES = {
    "config.json": "/dev/zero",
    "tokenizer.json": "/dev/zero",
    "special_tokens_map.json": "",
    "model.safetensors": "",
    "generation_config.json": "",
    "vocab.json": "/dev/random",
}
"""What stands in a file's place: a link to a device, or else a pipe that nobody writes to."""


def replaced(folder: Path, name: str, link: str) -> None:
    file = put(folder) / name
    file.unlink(missing_ok=True)
    if link:
        file.symlink_to(link)
    else:
        os.mkfifo(file)


def enlarged(folder: Path, name: str, size: int) -> None:
    """Make a file as large as that, of which the disk holds little."""
    os.truncate(put(folder) / name, size)


def with_added(folder: Path, count: int) -> None:
    file = put(folder) / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    added = tokenizer["added_tokens"]
    added += [{**added[-1], "id": 10_000 + at, "content": f"<{at}>"} for at in range(count)]
    file.write_text(json.dumps(tokenizer))


def with_vocabulary(folder: Path, count: int) -> None:
    file = put(folder) / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    tokenizer["model"]["vocab"] |= {f"<{at}>": 10_000 + at for at in range(count)}
    file.write_text(json.dumps(tokenizer))


def with_pattern(folder: Path, pattern: str) -> None:
    """Have the tokenizer look for a pattern before it does anything else."""
    file = put(folder) / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    tokenizer["pre_tokenizer"]["pretokenizers"].insert(0, split)
    file.write_text(json.dumps(tokenizer))


def with_table(folder: Path, size: int) -> None:
    file = put(folder) / "model.safetensors"
    file.write_bytes(size.to_bytes(8, "little"))
    os.truncate(file, 2 * size)


FOLDERS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "many-layers": (lambda folder: configured(folder, num_hidden_layers=10**8), "says num_hidden_layers ="),
    "many-experts": (lambda folder: configured(folder, num_local_experts=10**8), "says num_local_experts ="),
    "large": (lambda folder: enlarged(folder, "tokenizer.json", 41 << 20), "larger than 41.9 MB"),
    "large-config": (lambda folder: enlarged(folder, "config.json", 17 << 20), "larger than 16.8 MB"),
    "many-added": (lambda folder: with_added(folder, 21_000), "adds more than 20,000 tokens"),
    "many-tokens": (lambda folder: with_vocabulary(folder, 500_000), "has more than 500,000 tokens"),
    "table": (lambda folder: with_table(folder, 64 << 20), "damaged or cut short"),
    "circle": (
        lambda folder: replaced(folder, "config.json", "config.json"),
        "cannot be read: Too many levels",
    ),
    **{
        f"endless-{at}": (
            partial(replaced, name=name, link=link),
            f"{name} of 'endless-{at}' is no file",
        )
        for at, (name, link) in enumerate(NO_FILES.items())
    },
}
"""How a folder is made, and what of the sentence says what is wrong with it."""


def call(url: str, body: Any = None) -> tuple[int, Any]:
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data), timeout=600) as response:
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
    with_pattern(folder / "repetitions", "(a+)+b")
    for name, (make, _) in FOLDERS.items():
        make(folder / name)
    (folder / "ring").symlink_to("ring")
    (folder / "good" / "up").symlink_to("..")
    for name in SOME:
        put(folder / name.replace(" ", "-"), HOSTILE[name])
    # A template has its limit of processor time; how long that takes, a busy machine may not decide.
    options = ("--models-dir", str(folder), "--model", str(folder / "good"), "--prepare-seconds", "600")
    with server_process(*options) as server:
        yield server
        server.send(signal.SIGTERM)
        server.process.wait(60)
        assert "Traceback" not in server.log_to_end()


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_that_would_fill_memory_or_never_end_is_refused_in_a_sentence(
    server: ServerProcess, name: str
) -> None:
    status, answer = chat(server, name)
    assert status >= 400
    assert FOLDERS[name][1] in answer["error"]["message"]


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


def test_a_text_that_the_tokenizers_pattern_gives_up_at_is_refused_and_the_others_are_served(
    server: ServerProcess,
) -> None:
    for text in ("a" * 40, "a" * 4000):
        status, answer = chat(server, "repetitions", text)
        assert status == 400
        assert "tokenizer cannot read this text: Onig" in answer["error"]["message"]
    assert chat(server, "repetitions")[0] == 200


def test_one_that_explodes_with_a_word_refuses_that_conversation_and_the_others_are_served(
    server: ServerProcess,
) -> None:
    status, answer = chat(server, "word", "boom")
    assert status == 400
    assert "cannot render this conversation: it takes" in answer["error"]["message"]
    assert chat(server, "word")[0] == 200
    assert chat(server, "good")[0] == 200
