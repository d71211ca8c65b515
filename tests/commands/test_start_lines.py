"""What a server says when it is ready: on a Mac, containers reach it as it is."""

import pytest
from scripted_engine import ScriptedEngine

from mlx_backend.commands.start_lines import start_lines
from mlx_backend.demo import MODEL_NAME, VISION_MODEL_NAME, demo_path
from mlx_backend.models.engine_options import EngineOptions
from mlx_backend.models.spec import ModelSpec
from mlx_backend.registry.catalogue import Catalogue
from mlx_backend.registry.registry import MultiModelRegistry
from mlx_backend.settings import Settings


def dify_line(
    *,
    is_mac: bool,
    host: str = "127.0.0.1",
    api_key: str | None = None,
    demo: str = MODEL_NAME,
) -> tuple[str, str]:
    """The line for Dify, and all of them."""
    models = MultiModelRegistry(
        Catalogue([ModelSpec(name="demo", source=str(demo_path(demo)))]),
        lambda *_: ScriptedEngine(lambda _prompt: "yes"),
        EngineOptions(),
        Settings(),
        default_name="demo",
    )
    settings = Settings(host=host, api_key=api_key)
    lines = start_lines(f"http://{host}:8080", models, settings, demo=demo, is_mac=is_mac)
    models.stop()
    (line,) = [each for each in lines if "Dify in Docker" in each]
    return line, "\n".join(lines)


def test_on_a_mac_the_network_is_opened_only_if_it_must_be() -> None:
    line, _ = dify_line(is_mac=True)
    assert line == (
        "  Dify in Docker: http://host.docker.internal:8080/v1 "
        "(if the container cannot reach it, start with --host 0.0.0.0 --api-key KEY)"
    )


def test_docker_on_linux_cannot_reach_loopback() -> None:
    assert (
        "(start with --host 0.0.0.0 --api-key KEY so that containers can reach it)"
        in dify_line(is_mac=False)[0]
    )


def test_a_server_with_a_key_does_not_ask_for_one() -> None:
    line, _ = dify_line(is_mac=True, api_key="secret")
    assert line == (
        "  Dify in Docker: http://host.docker.internal:8080/v1 "
        "(if the container cannot reach it, start with --host 0.0.0.0)"
    )


@pytest.mark.parametrize("is_mac", [True, False])
def test_an_open_server_says_so_and_asks_for_a_key(is_mac: bool) -> None:
    line, lines = dify_line(is_mac=is_mac, host="0.0.0.0")
    assert line.endswith("/v1")
    assert "Everyone who can reach this address can use it: set --api-key" in lines
    assert "Everyone" not in dify_line(is_mac=is_mac, host="0.0.0.0", api_key="secret")[1]


@pytest.mark.parametrize("installed", [True, False])
def test_the_demo_model_that_sees_shows_a_picture_or_says_what_to_install(
    installed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlx_backend.commands.start_lines.is_installed", lambda: installed)
    _, lines = dify_line(is_mac=True, demo=VISION_MODEL_NAME)
    assert "it sees simple shapes and numbers and nothing else" in lines
    assert ("data:image/png;base64," in lines) == installed
    assert ("`make vision` in the server's clone" in lines) == (not installed)
    assert "France" not in lines


def test_the_demo_model_that_chats_shows_no_picture() -> None:
    _, lines = dify_line(is_mac=True)
    assert "a few toy skills" in lines
    assert "What is the capital of France?" in lines
    assert "vision" not in lines
    assert "image" not in lines
