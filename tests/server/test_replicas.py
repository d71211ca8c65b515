"""docs/replicas.md: its configuration is run, with two servers as processes of their own behind HAProxy."""

from __future__ import annotations

import http.client
import json
import re
import shutil
import signal
import socket
import ssl
import subprocess
from collections import defaultdict
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from free_ports import free_port
from server_process import ServerProcess, endless_completion, server_process

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/replicas.md").read_text(encoding="utf-8")
CERTIFICATES = ROOT / "tests/images/certificates"
QUESTION = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 1}
LONG = {**json.loads(endless_completion()), "max_tokens": 300}

pytestmark = pytest.mark.skipif(
    shutil.which("haproxy") is None,
    reason="HAProxy is not installed: apt install haproxy, or brew install haproxy",
)


class Replicas:
    """Two servers by the names they have in the configuration, and the proxy's port."""

    def __init__(self, port: int, servers: dict[str, ServerProcess]) -> None:
        self.port = port
        self.servers = servers

    def request(
        self, body: bytes, path: str = "/v1/chat/completions", **headers: str
    ) -> tuple[http.client.HTTPSConnection, http.client.HTTPResponse]:
        trust = ssl.create_default_context(cafile=str(CERTIFICATES / "ca.pem"))
        connection = http.client.HTTPSConnection("localhost", self.port, timeout=60, context=trust)
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request("POST", path, body, {"Content-Type": "application/json", **named})
        return connection, connection.getresponse()

    def ask(self, padding: int = 0, **headers: str) -> tuple[str, Any]:
        """Which machine answered a question, and its answer, which must be one."""
        connection, response = self.request(
            json.dumps(QUESTION | {"user": "x" * padding}).encode(), **headers
        )
        with closing(connection):
            answer = json.load(response)
        assert response.status == 200, answer
        return str(response.headers["x-served-by"]), answer


@pytest.fixture
def replicas(tmp_path: Path) -> Iterator[Replicas]:
    [text] = re.findall(r"```haproxy\n(.*?)```", PAGE, re.DOTALL)
    certificate = tmp_path / "llm.pem"
    certificate.write_text(
        "".join((CERTIFICATES / name).read_text() for name in ("server.pem", "server.key"))
    )
    options = ("--no-auth", "--trusted-proxy", "127.0.0.1", "--drain-seconds", "120")
    with (
        server_process(*options) as first,
        server_process(*options) as second,
    ):
        port = free_port()
        for written, real in {
            "bind :443": f"bind 127.0.0.1:{port}",
            "/etc/haproxy/llm.pem": str(certificate),
            "10.0.0.11:8080": first.url.removeprefix("http://"),
            "10.0.0.12:8080": second.url.removeprefix("http://"),
        }.items():
            assert written in text
            text = text.replace(written, real)
        configuration = tmp_path / "haproxy.cfg"
        configuration.write_text(text)
        command = ["haproxy", "-db", "-f", str(configuration)]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            try:
                while process.poll() is None:
                    with suppress(OSError):
                        socket.create_connection(("127.0.0.1", port), 60).close()
                        break
                assert process.stderr is not None
                assert process.poll() is None, process.stderr.read()
                yield Replicas(port, {"first": first, "second": second})
            finally:
                process.kill()


def test_replicas_keep_a_conversation_and_one_that_drains_hands_over_all_others(replicas: Replicas) -> None:
    """One test, as two servers take a while to start."""
    # The same session goes to the same machine, by whatever header; sessions are spread over both.
    for header in (
        "session_id",
        "x_session_id",
        "x_claude_code_session_id",
        "x_openwebui_chat_id",
        "authorization",
    ):
        machines = defaultdict(set)
        for number in range(8):
            for _ in range(2):
                machines[number].add(replicas.ask(0, **{header: f"Bearer {number}"})[0])
        assert all(len(each) == 1 for each in machines.values()), header
        assert set.union(*machines.values()) == set(replicas.servers), header
    # A session counts for more than the key, and nothing else tells this client from others.
    machine = {replicas.ask(session_id="one", authorization=f"Bearer {key}")[0] for key in range(6)}
    assert len(machine) == 1
    assert len({replicas.ask()[0] for _ in range(6)}) == 1
    again = replicas.ask(session_id="one")[1]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0

    # A machine that drains finishes its stream; what else was its own is answered by the other one, long or short.
    connection, stream = replicas.request(json.dumps(LONG).encode(), "/v1/completions", session_id="one")
    with closing(connection):
        draining = replicas.servers[machine.pop()]
        assert stream.headers["x-served-by"] in replicas.servers
        stream.read(100)
        draining.send(signal.SIGTERM)
        assert draining.process.stdout is not None
        assert any(line.startswith("Stopping …") for line in draining.process.stdout)
        for padding in (0, 500_000):
            name, _ = replicas.ask(padding, session_id="one")
            assert replicas.servers[name] is not draining
        *_, last = stream.read().split(b"\n\n")[:-1]
        assert last == b"data: [DONE]"
    draining.process.wait()
    name, _ = replicas.ask(session_id="one")
    assert replicas.servers[name] is not draining
