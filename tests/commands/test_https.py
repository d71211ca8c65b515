"""`mlx-backend serve` with a certificate, as a process: spoken to in HTTPS and in plain HTTP, and renewed by SIGHUP."""

from __future__ import annotations

import http.client
import json
import shutil
import signal
import ssl
import subprocess
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from server_process import ended, server_process

if TYPE_CHECKING:
    from server_process import ServerProcess

pytestmark = pytest.mark.skipif(
    shutil.which("openssl") is None, reason="certificates are made by the command openssl"
)
NAMES = "subjectAltName=DNS:localhost,IP:127.0.0.1"
USE = "keyUsage=critical,digitalSignature,keyCertSign"


def self_signed(folder: Path) -> tuple[Path, Path]:
    """A new certificate for localhost and 127.0.0.1 that nobody else has signed, and its key."""
    certificate, key = folder / "cert.pem", folder / "key.pem"
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    about = ("-subj", "/CN=localhost", "-days", "2", "-addext", NAMES, "-addext", USE)
    subprocess.run(
        ["openssl", "req", "-x509", *curve, *about, "-keyout", key, "-out", certificate],
        check=True,
        capture_output=True,
    )
    return certificate, key


def answer(server: ServerProcess, trusted: Path) -> Any:
    """What the model says to a client that trusts this certificate and no other."""
    body = {"messages": [{"role": "user", "content": "What is the capital of France?"}]}
    request = urllib.request.Request(f"{server.url}/v1/chat/completions", json.dumps(body).encode())
    context = ssl.create_default_context(cafile=trusted)
    with urllib.request.urlopen(request, timeout=60, context=context) as response:
        return json.load(response)["choices"][0]["message"]["content"]


def told_plainly(server: ServerProcess, body: bytes) -> tuple[int, str]:
    """Status and message for a client that speaks HTTP without TLS."""
    connection = http.client.HTTPConnection(server.url.partition("://")[2], timeout=60)
    try:
        connection.request("POST", "/v1/chat/completions", body)
        response = connection.getresponse()
        return response.status, json.load(response)["error"]["message"]
    finally:
        connection.close()


def test_a_server_with_a_certificate_speaks_https_and_takes_the_next_one_on_sighup(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "new").mkdir()
    old, new = self_signed(tmp_path / "old"), self_signed(tmp_path / "new")
    certificate, key = (Path(shutil.copy(file, tmp_path)) for file in old)
    with server_process("--tls-cert", str(certificate), "--tls-key", str(key)) as server:
        assert server.url.startswith("https://127.0.0.1:")
        assert f"curl {server.url}/v1/chat/completions" in server.printed
        assert "Paris" in answer(server, old[0])
        for body in (b"{}", b"x" * 3_000_000):
            said = "This server speaks HTTPS: begin its address with https://."
            assert told_plainly(server, body) == (400, said)

        shutil.copy(new[0], certificate)  # and not yet its key
        server.send(signal.SIGHUP)
        assert "they do not belong together" in server.logged("The certificate and its key stay as they were")
        assert "Paris" in answer(server, old[0])

        shutil.copy(new[1], key)
        server.send(signal.SIGHUP)
        server.logged("The certificate and its key have been read again")
        assert "Paris" in answer(server, new[0])
        with pytest.raises(urllib.error.URLError, match="certificate verify failed"):
            answer(server, old[0])

        certificate.unlink()
        server.send(signal.SIGHUP)
        server.logged("The certificate and its key stay as they were: There is no file")
        assert "Paris" in answer(server, new[0])
        server.send(signal.SIGTERM)
        assert server.process.wait(60) == 0
        log = server.log_to_end()
    assert "Traceback" not in log
    assert "PRIVATE KEY" not in log


@pytest.mark.parametrize("name", ["nowhere.pem", "", "x" * 300])
def test_a_certificate_that_cannot_be_read_is_one_sentence_at_the_start(tmp_path: Path, name: str) -> None:
    _, key = self_signed(tmp_path)
    path = tmp_path / name
    started = ended("--tls-cert", str(path), "--tls-key", str(key), "--port", "0")
    assert started.returncode == 1
    reasons = {
        "nowhere.pem": f"There is no file {str(path)!r}.",
        "": f"{path} cannot be read: Is a directory.",
    }
    said = reasons.get(name, f"{path} cannot be read: File name too long.")
    assert started.stderr == f"mlx-backend: {said}\n"
    assert started.stdout == ""
