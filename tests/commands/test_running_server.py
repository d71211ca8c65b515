"""ps, load and stop, and what is said where no server of ours answers."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from server_process import server_process

from mlx_backend.cli import main
from mlx_backend.commands.running_server import default_url

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
        (["ps", "--url", "http://127.0.0.1:1"], KEY, 3, "No server answers at http://127.0.0.1:1"),
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
