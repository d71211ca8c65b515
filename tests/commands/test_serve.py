"""`mlx-backend` as a person starts it: what it says, what it answers, how it ends."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import urllib.request
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
from server_process import COMMAND, ENVIRONMENT, endless_completion
from vision_models import needs_mlx_vlm

from mlx_backend import version_and_commit
from mlx_backend.cli import main
from mlx_backend.demo import MODEL_PATH
from mlx_backend.device.machine import Machine

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def run_to_end(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments], capture_output=True, text=True, env=ENVIRONMENT, timeout=120
    )


@contextmanager
def started(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    """The process, its address, and what it printed at the start."""
    process = subprocess.Popen(
        [*COMMAND, *arguments, "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    )
    try:
        assert process.stdout is not None
        printed = address = ""
        for line in process.stdout:
            printed += line
            if line.startswith("Listening on "):
                address = line.split()[-1]
            if line.startswith("  Try: "):
                yield process, address, printed
                return
        raise AssertionError(f"it exited before it listened: {printed}{process.communicate()[1]}")
    finally:
        process.kill()
        process.communicate()


def test_the_demo_model_is_served_until_ctrl_c_and_says_what_it_is() -> None:
    with started("serve") as (process, url, printed):
        listens, model, *_ = (
            printed.splitlines()
        )  # in this order: that it listens is said before a model is loaded
        assert listens == f"Listening on {url}"
        assert model.startswith("Model mlx-demo")
        assert "a demonstration model, not an assistant" in printed
        assert "mlx-backend serve " in printed
        assert "host.docker.internal" in printed
        assert "--host 0.0.0.0" in printed
        assert "curl" in printed
        request = urllib.request.Request(
            f"{url}/v1/chat/completions",
            json.dumps(
                {"messages": [{"role": "user", "content": "What is the capital of France?"}]}
            ).encode(),
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            reply = json.load(response)
        assert reply["model"] == "mlx-demo"
        assert reply["usage"]["completion_tokens"] > 0
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
        assert process.returncode == 0
        assert "effort=medium" in err
        assert "Traceback" not in err


@needs_mlx_vlm
def test_the_demo_model_that_sees_answers_the_line_to_try() -> None:
    with started("--model", "mlx-demo-vision") as (_, _, printed):
        assert "it sees simple shapes and numbers and nothing else" in printed
        line = printed.rpartition("  Try: ")[2]
        shown = subprocess.run(["bash", "-c", line], check=True, capture_output=True, text=True).stdout
    assert json.loads(shown)["choices"][0]["message"]["content"] == "A red circle and a blue square."


def test_a_running_stream_ends_properly_when_the_server_stops_at_once() -> None:
    with started() as (process, url, _):
        request = urllib.request.Request(f"{url}/v1/completions", endless_completion())
        with urllib.request.urlopen(request, timeout=60) as response:
            response.readline()
            process.send_signal(signal.SIGTERM)
            process.send_signal(signal.SIGINT)  # the second signal: stop at once
            rest = response.read().decode()
        process.communicate(timeout=60)
        assert process.returncode == 0
        assert '"code":"shutting_down"' in rest


def test_a_port_in_use_is_one_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = run_to_end("--port", str(taken.getsockname()[1]))
    assert done.returncode == 1
    assert "is in use" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "status", "mention"),
    [
        (["--host", "999.1.1.1"], 1, "999.1.1.1"),
        (["--host", "203.0.113.7"], 1, "203.0.113.7"),
        (["--port", "0", "--model", "/no/such/folder"], 1, "/no/such/folder"),
        (["--port", "0", "--model", "nobody/nothing-here"], 1, "nobody/nothing-here"),
        (["--port", "0", "--chat-template", "{% for m in"], 1, "given chat template does not work"),
        (["--port", "0", "--adapter-path", "a=x", "--adapter-path", "a=y"], 1, "two adapters called 'a'"),
        (["--config", "/no/such/file.toml"], 1, "/no/such/file.toml"),
        (["--port", "70000"], 2, "70000"),
    ],
)
def test_what_cannot_be_started_says_why(arguments: list[str], status: int, mention: str) -> None:
    done = run_to_end(*arguments)
    assert done.returncode == status
    assert mention in done.stderr
    assert "Traceback" not in done.stderr


def test_help_and_version() -> None:
    assert run_to_end("--version").stdout == f"mlx-backend {version_and_commit()}\n"
    assert "--reasoning-effort" in run_to_end("serve", "--help").stdout
    assert "--dialect" in run_to_end("parse", "--help").stdout


def test_a_folder_is_served_under_the_name_it_is_given() -> None:
    with started("--model", str(MODEL_PATH), "--model-id", "mine", "--api-key", "sesame") as (
        _,
        url,
        printed,
    ):
        assert "demonstration" not in printed
        request = urllib.request.Request(f"{url}/v1/models", headers={"Authorization": "Bearer sesame"})
        with urllib.request.urlopen(request, timeout=60) as response:
            assert json.load(response)["data"][0]["id"] == "mine"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", ""], "--model: is empty"),
        (["--api-key", ""], "--api-key: is empty"),
        (["--port", "http"], "http"),
        (["--reasoning-effort", "banana"], "medium"),
        (["--reasoning-format", "banana"], "separate"),
        (["--max-tokens", "0"], "'0'"),
        (["--cache-gb", "-1"], "-1"),
        (["--temperature", "nan"], "nan"),
        (["--kv-group-size", "7"], "'7' is not one of 32, 64, 128"),
        (["--memory-gb", "0"], "above 0"),
        (["--no-such-option"], "--no-such-option"),
    ],
)
def test_what_cannot_be_meant_is_refused_in_words(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exited:
        main(words)
    assert exited.value.code == 2
    assert message in capsys.readouterr().err


def test_a_running_stream_is_finished_before_the_server_stops() -> None:
    with started() as (process, url, _):
        body = {"messages": [{"role": "user", "content": "Count to 15."}], "stream": True}
        request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=60) as response:
            response.readline()
            process.send_signal(signal.SIGTERM)
            rest = response.read().decode()
        assert '"finish_reason":"stop"' in rest
        assert "[DONE]" in rest
        assert process.wait(60) == 0


def test_a_server_whose_loop_fails_ends_so_that_it_can_be_started_again() -> None:
    fail = (
        "import sys; from mlx_backend.cli import main; from mlx_backend.server.wsgi_server import Server; "
        "Server._check = lambda *_: 1 / 0; sys.exit(main(['--port', '0']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", fail], capture_output=True, text=True, env=ENVIRONMENT, timeout=120
    )
    assert done.returncode == 1
    assert "ZeroDivisionError" in done.stderr


def test_a_file_says_which_models_there_are(tmp_path: Path) -> None:
    file = tmp_path / "models.toml"
    file.write_text(
        f"""
        [models.quick]
        model = "{MODEL_PATH}"
        reasoning_effort = "low"
        pinned = true
        [models.careful]
        model = "{MODEL_PATH}"
        reasoning_effort = "high"
        context_length = 2000  # of its own: else it would share what is in memory, and stay
        ttl = 0.05
        """
    )
    with started("--config", str(file), "--temperature", "0") as (_, url, printed):
        assert "quick" in printed
        thoughts = {}
        for name in ("quick", "careful"):
            body = {"model": name, "messages": [{"role": "user", "content": "What is 3 plus 4?"}]}
            request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode())
            with urllib.request.urlopen(request, timeout=60) as response:
                reply = json.load(response)
            assert reply["model"] == name
            thoughts[name] = reply["usage"]["completion_tokens_details"]["reasoning_tokens"]
        assert thoughts["careful"] > 3 * thoughts["quick"]
        states: dict[str, str] = {}
        while states.get("careful") != "unloaded":  # idle for longer than its ttl
            with urllib.request.urlopen(f"{url}/v1/models", timeout=60) as response:
                states = {model["id"]: model["state"] for model in json.load(response)["data"]}
        assert states["quick"] == "ready"


def test_a_mistake_in_the_file_is_named_with_its_place(tmp_path: Path) -> None:
    file = tmp_path / "models.toml"
    file.write_text(f'[models.m]\nmodel = "{MODEL_PATH}"\nreasoning_efort = "low"\n')
    done = run_to_end("--config", str(file))
    assert done.returncode == 1
    assert "reasoning_efort" in done.stderr
    assert "reasoning_effort" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_misspelt_variable_is_named_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MLX_BACKEND_MAX_TOKEN", "100")
    assert main(["--config", "/no/such/file.toml"]) == 1
    assert "MLX_BACKEND_MAX_TOKEN has no effect. Did you mean $MLX_BACKEND_MAX_TOKENS?" in caplog.text


def test_a_machine_without_mlx_is_told_so_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    intel = Machine(system="Darwin", processor="x86_64", macos=15)
    monkeypatch.setattr("mlx_backend.commands.serve.this_machine", lambda: intel)
    assert main([]) == 1
    assert "this one has an Intel processor" in capsys.readouterr().err
