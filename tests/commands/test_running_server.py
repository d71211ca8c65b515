"""ps, load and stop, and what is said where no server of ours answers."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import pytest
from server_process import server_process

from mlx_backend.cli import main
from mlx_backend.commands import running_server
from mlx_backend.commands.running_server import default_url, names_meant
from mlx_backend.commands.terminal import console, print_json, print_table

if TYPE_CHECKING:
    from collections.abc import Iterator

KEY = "sesame"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with server_process(MLX_BACKEND_API_KEY=KEY) as server:
        yield server.url


def test_ps_load_and_stop(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    here = ["--url", url, "--key", KEY]
    embedding = "mlx-demo-embedding"

    def in_memory() -> dict[str, str]:
        assert main(["ps", "--json", *here]) == 0
        return {each["model"]: each["state"] for each in json.loads(capsys.readouterr().out)["models"]}

    assert in_memory() == {"mlx-demo": "ready"}
    assert main(["load", embedding, *here]) == 0
    assert capsys.readouterr().out == f"{embedding}: It is loaded.\n"
    assert in_memory() == {"mlx-demo": "ready", embedding: "ready"}
    assert main(["ps", *here]) == 0
    assert "stays" in capsys.readouterr().out
    assert main(["stop", embedding, *here]) == 0
    assert capsys.readouterr().out == f"{embedding}: It has been unloaded.\n"
    assert in_memory() == {"mlx-demo": "ready"}


@pytest.mark.parametrize(
    ("words", "key", "status", "message"),
    [
        (["ps"], None, 1, "wants an API key: give it with --key, or in $MLX_BACKEND_API_KEY"),
        (["load", "mlx-dmo"], KEY, 1, "has no model 'mlx-dmo'; did you mean"),
        (["stop", "mlx-demo"], KEY, 1, "pinned"),
        (["stop", "mlx-demo:high"], KEY, 1, "pinned"),
        (["load", "mlx-demo:hihg"], KEY, 1, "has no model 'mlx-demo:hihg'"),
        (["ps", "--url", "http://127.0.0.1:1"], KEY, 3, "http://127.0.0.1:1 (Connection refused). Start one"),
        (["ps", "--url", "ftp://x"], KEY, 3, "ftp://x"),
    ],
)
def test_what_a_server_does_not_do_is_said_in_a_sentence(
    url: str, words: list[str], key: str | None, status: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    server = [] if "--url" in words else ["--url", url]
    assert main([*words, *server, *(["--key", key] if key else [])]) == status
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("gpt-oss:20b", ["me/gpt-oss-20b-MXFP4-Q8"]),
        ("mlx-demo-vision", ["mlx-demo-vision"]),
        ("mlx-demo", []),
    ],
)
def test_a_short_name_means_a_longer_one_but_a_demonstration_models_means_no_other(
    name: str, meant: list[str]
) -> None:
    assert names_meant(name, ["mlx-demo-vision", "me/gpt-oss-20b-MXFP4-Q8"]) == meant


@pytest.mark.parametrize(
    ("url", "key", "message"),
    [
        ("http://me:hidden@127.0.0.1:1", "", "No server answers at http://127.0.0.1:1 "),
        ("http://127.0.0.1:1", "schlüssel", "An API key is sent in a header"),
    ],
)
def test_what_is_wrong_with_an_address_or_a_key_is_said_without_a_password(
    url: str, key: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ps", "--url", url, "--key", key]) != 0
    said = capsys.readouterr().err
    assert message in said
    assert "hidden" not in said


def test_a_wrong_key_is_not_called_a_missing_one(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ps", "--url", url, "--key", "wrong"]) == 1
    assert "The API key is wrong" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("variables", "url"),
    [
        ({}, "http://127.0.0.1:8080"),
        ({"MLX_BACKEND_PORT": "81", "MLX_BACKEND_HOST": "0.0.0.0"}, "http://127.0.0.1:81"),
        ({"MLX_BACKEND_HOST": "fd00::1"}, "http://[fd00::1]:8080"),
        ({"MLX_BACKEND_URL": "https://mac.lan", "MLX_BACKEND_PORT": "81"}, "https://mac.lan"),
    ],
)
def test_a_server_is_looked_for_where_the_variables_of_serve_put_it(
    variables: dict[str, str], url: str
) -> None:
    assert default_url(variables) == url


ODD = "\x1b]0;title\x07\x9b2J\ud83d"
ESCAPED = r"\u001b]0;title\u0007\u009b2J\ud83d"


class Odd(BaseHTTPRequestHandler):
    """What may answer where our server is looked for."""

    def do_GET(self) -> None:
        body: dict[str, Any] = {"server": "mlx-backend", "status": "ok"}
        if self.path == "/v1/models":
            body = {"data": [{"id": f"model{ODD}", "type": "llm"}]}
        if self.path == "/api/ps":
            body = {"error": {"message": ODD}}
        self.answer(json.dumps(body).encode(), 500 if "error" in body else 200)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.answer(b'data: {"choices": [{"delta": {"content": "half a"}}]}\n\n')

    def answer(self, body: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def odd() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Odd) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://me:secret@127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("words", [["ps"], ["ps", "--json"], ["load", "nothing"], ["connect", "codex"]])
def test_what_a_server_says_cannot_control_the_terminal(
    words: list[str], odd: str, capsys: pytest.CaptureFixture[str]
) -> None:
    main([*words, "--url", odd])
    printed = "".join(capsys.readouterr())
    assert "title" in printed
    assert not {"\x1b", "\x07", "\x9b", "\ud83d"} & set(printed)


def test_a_table_and_a_line_show_control_characters_as_escapes(capsys: pytest.CaptureFixture[str]) -> None:
    console().print(ODD)
    print_table(("NAME",), [(ODD,)])
    print_json(ODD)
    shown = capsys.readouterr().out.splitlines()
    assert shown == [ESCAPED, "NAME", ESCAPED, f'"{ESCAPED}"']


def test_a_reply_that_breaks_off_has_failed(
    odd: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", None)
    assert main(["chat", "model", "hi", "--url", odd]) == 1
    printed = capsys.readouterr()
    assert "broke off" in printed.err
    assert "secret" not in printed.err


def test_an_answer_without_end_is_refused(
    odd: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running_server, "MAX_ANSWER_BYTES", 8)
    assert main(["ps", "--url", odd]) == 1
    assert "is larger than" in capsys.readouterr().err
