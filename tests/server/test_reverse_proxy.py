"""docs/reverse-proxy.md: its configurations are run where the program is installed, and its options are ones."""

from __future__ import annotations

import json
import re
import shutil
import socket
import ssl
import subprocess
import sys
from contextlib import contextmanager, suppress
from ipaddress import ip_network
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from free_ports import free_port
from running_server import HELLO, running
from scripted_engine import ScriptedEngine

from mlx_backend.commands.options import options_by_group
from mlx_backend.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/reverse-proxy.md").read_text(encoding="utf-8")
CERTIFICATES = ROOT / "tests/images/certificates"
CLIENT = "127.0.0.3"
LONG = "<|channel|>final<|message|>" + "word " * 200 + "<|return|>"


def configuration(language: str, **replaced: str) -> str:
    [text] = re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    for old, new in replaced.items():
        assert old in text
        text = text.replace(old, new)
    return str(text)


def haproxy(folder: Path, port: int, server: str) -> list[str]:
    certificate = folder / "llm.pem"
    parts = [(CERTIFICATES / name).read_text() for name in ("server.pem", "server.key")]
    certificate.write_text("".join(parts))
    replaced = {
        "bind :443": f"bind 127.0.0.1:{port}",
        "/etc/haproxy/llm.pem": str(certificate),
        "127.0.0.1:8080": server,
    }
    file = folder / "haproxy.cfg"
    file.write_text(configuration("haproxy", **replaced))
    return ["haproxy", "-db", "-f", str(file)]


def caddy(folder: Path, port: int, server: str) -> list[str]:
    tls = f"tls {CERTIFICATES / 'server.pem'} {CERTIFICATES / 'server.key'}"
    replaced = {"llm.example.com {": f"https://localhost:{port} {{\n{tls}", "127.0.0.1:8080": server}
    file = folder / "Caddyfile"
    options = "{\nadmin off\nauto_https disable_redirects\n}\n"
    file.write_text(options + configuration("caddyfile", **replaced))
    return ["caddy", "run", "--config", str(file), "--adapter", "caddyfile"]


@contextmanager
def proxied(command: list[str], folder: Path, port: int) -> Iterator[Callable[[bytes], ssl.SSLSocket]]:
    """A proxy; what is called with a request sends it over TLS from CLIENT."""
    trust = ssl.create_default_context(cafile=str(CERTIFICATES / "ca.pem"))

    def connect(request: bytes) -> ssl.SSLSocket:
        plain = socket.create_connection(("127.0.0.1", port), 60, source_address=(CLIENT, 0))
        connection = trust.wrap_socket(plain, server_hostname="localhost")
        connection.sendall(request)
        return connection

    environment = {"HOME": str(folder), "PATH": "/usr/sbin:/usr/bin:/bin"}
    with subprocess.Popen(command, cwd=folder, env=environment, stderr=subprocess.DEVNULL) as process:
        try:
            while process.poll() is None:
                with suppress(OSError):
                    socket.create_connection(("127.0.0.1", port), 60).close()
                    break
            assert process.poll() is None, f"{command[0]} has ended"
            yield connect
        finally:
            process.kill()


@pytest.mark.parametrize("proxy", [haproxy, caddy])
def test_a_stream_passes_at_once_and_whoever_leaves_frees_the_model(
    proxy: Callable[[Path, int, str], list[str]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if shutil.which(proxy.__name__) is None or sys.platform != "linux":  # which has more addresses of itself
        pytest.skip(f"{proxy.__name__} is not installed")
    caplog.set_level("INFO", "mlx_backend.requests")
    body = json.dumps({"messages": HELLO, "stream": True}).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nX-Forwarded-For: 192.0.2.7\r\n"
    request = head + b"Content-Length: %d\r\n\r\n" % len(body) + body
    port = free_port()
    trusted = (ip_network("127.0.0.1"),)
    with (
        ScriptedEngine([LONG, LONG], gated=True, max_concurrent=1) as engine,
        running(engine, trusted_proxies=trusted) as server,
        proxied(proxy(tmp_path, port, server.url.removeprefix("http://")), tmp_path, port) as connect,
    ):
        with connect(request) as stream:
            seen = b""
            while b'"role"' not in seen:  # the engine has not begun
                seen += stream.recv(4096)
            engine.advance(5)
            while b'"content":"' not in seen:
                seen += stream.recv(4096)
        while not engine.requests[0].cancelled.wait(0.05):  # HAProxy notices when it sends
            engine.advance(1)
        if proxy is caddy:
            with connect(request.replace(b"true", b"null")):
                while len(engine.requests) < 2:
                    pass
            assert engine.requests[1].cancelled.wait(60)
    # What the client claims is not believed.
    assert {line.split()[1] for line in caplog.messages} == {CLIENT}


def test_the_page_names_options_that_there_are_and_limits_that_hold() -> None:
    known = {option for options in options_by_group().values() for _, _, option, _ in options}
    assert set(re.findall(r"(--[a-z-]+)", PAGE)) <= known
    assert f"client_max_body_size {Settings().max_received_bytes >> 20}m;" in PAGE
    assert f"every {Settings().keepalive_seconds:g} seconds" in PAGE
    assert Settings().queue_seconds < 15 * 60
    assert configuration("haproxy").count("15m") == 2
