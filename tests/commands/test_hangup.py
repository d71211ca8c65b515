"""SIGHUP: a server reads its files again if it has any, and stops as it does for SIGTERM if its terminal is gone."""

from __future__ import annotations

import json
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest
from server_process import COMMAND, ENVIRONMENT, ended, server_process

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


TAKES_THE_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""
"""Runs a command in a session of its own whose terminal is its standard input, as a window has."""


def status_of(url: str, key: str) -> int:
    request = urllib.request.Request(f"{url}/v1/models", headers={"Authorization": f"Bearer {key}"})
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def test_keys_are_read_again_and_a_broken_file_keeps_the_old_ones(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text('[keys]\nalice = "sk-alice"\nbob = "sk-bob"')
    arguments = ("--api-key-file", str(file))
    with server_process(*arguments, MLX_BACKEND_API_KEYS="env=sk-env") as server:
        assert [status_of(server.url, key) for key in ("sk-alice", "sk-bob", "sk-env", "x")] == [
            200,
            200,
            200,
            401,
        ]

        file.write_text('[keys]\nalice = "sk-alice"\ncarol = 1')
        server.send(signal.SIGHUP)
        line = server.logged("The API keys stay as they were")
        assert "keys.carol: must be a key in quotes" in line
        assert [status_of(server.url, key) for key in ("sk-alice", "sk-bob")] == [200, 200]

        body = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "stream": True}
        request = urllib.request.Request(
            f"{server.url}/v1/chat/completions", json.dumps(body).encode(), {"x-api-key": "sk-bob"}
        )
        with urllib.request.urlopen(request, timeout=60) as stream:
            stream.readline()
            file.write_text('[keys]\nalice = "sk-alice"\ncarol = "sk-carol"')
            server.send(signal.SIGHUP)
            server.logged("The API keys have been read again")
            assert stream.read().endswith(b"data: [DONE]\n\n")  # bob's reply goes on
        assert [status_of(server.url, key) for key in ("sk-alice", "sk-bob", "sk-carol")] == [200, 401, 200]

        server.send(signal.SIGTERM)
        assert server.process.wait(60) == 0
        assert "sk-" not in server.printed + server.log_to_end()


@pytest.fixture
def hangups_end_a_process() -> Iterator[None]:
    """Also where the tests themselves were started with nohup: children inherit what is ignored."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def test_a_server_with_nothing_to_read_again_says_so_and_goes_on(hangups_end_a_process: None) -> None:
    with server_process() as server:
        server.send(signal.SIGHUP)
        server.logged("there is nothing to read again")
        assert status_of(server.url, "") == 200
        server.send(signal.SIGTERM)
        assert server.process.wait(60) == 0


def test_with_nohup_a_server_goes_on_when_the_window_is_closed(
    tmp_path: Path, hangups_end_a_process: None
) -> None:
    keys, output = tmp_path / "keys.toml", tmp_path / "output"
    keys.write_text('[keys]\nalice = "sk-alice"')
    os.mkfifo(output)
    command = shlex.join(["nohup", *COMMAND, "--api-key-file", str(keys), "--port", "0"])
    window, terminal = pty.openpty()
    shell = subprocess.Popen(
        [sys.executable, "-c", TAKES_THE_TERMINAL, "/bin/bash", "--norc", "-i"],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        env={**ENVIRONMENT, "HISTFILE": ""},
        start_new_session=True,
    )
    os.close(terminal)
    os.write(window, f"{command} > {shlex.quote(str(output))} 2>&1 &\necho 'server'=$!.\n".encode())
    shown = b""
    while (found := re.search(rb"server=(\d+)\.", shown)) is None:
        shown += os.read(window, 4096)
    server = int(found[1])
    try:
        with output.open() as lines:
            url = next(line.split()[-1] for line in lines if line.startswith("Listening on "))
            assert any(line.startswith("  Try: ") for line in lines)
            os.close(window)
            shell.wait(60)  # it has sent SIGHUP to what it had started
            assert status_of(url, "sk-alice") == 200
            keys.write_text('[keys]\ncarol = "sk-carol"')
            os.kill(server, signal.SIGHUP)
            # The shell's signal may be followed by this line, too.
            read = (line for line in lines if "The API keys have been read again" in line)
            assert any(status_of(url, "sk-carol") == 200 for _ in read)
            os.kill(server, signal.SIGTERM)
            assert "Traceback" not in lines.read()  # to its end
    finally:
        with suppress(ProcessLookupError):
            os.kill(server, signal.SIGKILL)


def test_a_server_with_keys_stops_when_its_terminal_is_closed(
    hangups_end_a_process: None, tmp_path: Path
) -> None:
    file = tmp_path / "keys.toml"
    file.write_text('[keys]\nalice = "sk-alice"')
    main, terminal = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", TAKES_THE_TERMINAL, *COMMAND, "--api-key-file", str(file), "--port", "0"],
        stdin=terminal,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
        start_new_session=True,
    )
    os.close(terminal)
    try:
        assert process.stdout is not None
        assert any(line.startswith("  Try: ") for line in process.stdout)
        os.close(main)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
        assert "Traceback" not in errors
    finally:
        process.kill()
        process.communicate()


def test_a_server_that_others_can_reach_starts_with_a_key_or_with_no_auth() -> None:
    refused = ended("--host", "0.0.0.0", "--port", "0")
    assert refused.returncode == 1
    assert refused.stderr == (
        "mlx-backend: On 0.0.0.0 other machines can connect: set a key with --api-key or --api-key-file, or say "
        "--no-auth to let everybody in without one.\n"
    )
