"""Saving a form: each error says what is wrong and what to do about it."""

from __future__ import annotations

import shutil
import ssl
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import pytest
from conftest import listening
from daemon import PluginError
from fake_servers import CannedServer, FakeServer, listed, lm_studio, mlx_backend, mlx_lm, ollama
from raw_server import at_an_unused_port, status

from dify_mlx_provider.servers.mlx_backend import incompatibility
from dify_mlx_provider.upstream.errors import unknown_host

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from daemon import PluginProcess

NOBODY = "http://127.0.0.1:9"


def save(plugin: PluginProcess, address: str, model: str | None = None, **form: str) -> None:
    """Save a form in Dify: the provider's, or with a model's name that model's."""
    form = {"endpoint_url": address, **form}
    if model is None:
        request = plugin.request("validate_provider_credentials", provider="mlx", credentials=form)
    else:
        request = plugin.request(
            "validate_model_credentials", provider="mlx", model_type="llm", model=model, credentials=form
        )
    (answer,) = request
    assert answer["result"] is True


def refusal(plugin: PluginProcess, address: str, model: str | None = None, **form: str) -> str:
    with pytest.raises(PluginError) as caught:
        save(plugin, address, model, **form)
    assert caught.value.kind == "CredentialsValidateFailedError"
    assert "Traceback" not in caught.value.message
    return caught.value.message


# -- the server --------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", [lambda: mlx_backend({"id": "m"}), mlx_lm, lm_studio, ollama])
def test_a_server_of_any_make_is_accepted(plugin: PluginProcess, start: Any) -> None:
    with start() as server:
        save(plugin, server.address)


def test_without_a_server_the_error_says_how_to_start_one(plugin: PluginProcess) -> None:
    words = refusal(plugin, NOBODY)
    assert words.startswith(
        "No server at http://127.0.0.1:9/v1: start it with `mlx-backend`, or, if it runs,"
    )
    assert "if the container still cannot connect, start the server with --host 0.0.0.0" in words
    assert "host.docker.internal" in words
    assert "127.0.0.1 is the container itself" in words


@pytest.mark.parametrize(
    ("host", "advice"),
    [
        ("host.docker.internal", 'extra_hosts: ["host.docker.internal:host-gateway"]'),
        ("my-mac.local", "enter an IP address"),
    ],
)
def test_an_unknown_host_is_reported_with_advice(host: str, advice: str) -> None:
    words = str(unknown_host(f"http://{host}:8080/v1"))
    assert f"the name {host} is not known where Dify runs" in words
    assert advice in words


def test_a_web_page_at_the_port_is_named_by_its_title(plugin: PluginProcess) -> None:
    page = b"<!doctype html><html><head><title>Open WebUI &amp; more</title></head></html>"
    with CannedServer(status("200 OK", page, "Content-Type: text/html")) as server:
        words = refusal(plugin, server.address)
    assert "is not an OpenAI-compatible server but a web page, 'Open WebUI & more'" in words
    assert "Check the port" in words


def test_a_page_is_asked_without_the_key_because_what_it_says_is_shown(plugin: PluginProcess) -> None:
    with FakeServer({"/": b"<title>A page</title>"}) as server:
        assert "a web page, 'A page'" in refusal(plugin, server.address, api_key="secret-key")
    keys = dict(zip(server.paths, server.keys, strict=True))
    assert keys["/v1/models"] == "Bearer secret-key"
    assert keys["/"] is None


def test_another_service_at_the_port_is_named_by_its_header(plugin: PluginProcess) -> None:
    with CannedServer(status("404 Not Found", b"", "Server: nginx/1.27.1")) as server:
        assert "another service (nginx/1.27.1)" in refusal(plugin, server.address)


@pytest.mark.parametrize(("typed", "there"), [("/mlx", "/mlx/v1"), ("/v1", "/api/v1"), ("/v2", "/v1")])
def test_a_wrong_path_is_reported_with_the_right_one(plugin: PluginProcess, typed: str, there: str) -> None:
    with FakeServer({f"{there}/models": listed({"id": "m"})}) as server:
        words = refusal(plugin, server.address + typed)
        assert words.endswith(f"but at {server.address}{there}. Enter {server.address}{there}")
        save(plugin, server.address + there)


def test_https_for_a_server_without_a_certificate_is_reported(plugin: PluginProcess) -> None:
    with mlx_backend({"id": "m"}) as server:
        address = server.address.replace("http://", "https://")
        words = refusal(plugin, address, api_key="secret")
        assert f"speaks http, not https. Enter {server.address}/v1" in words
        assert server.keys == [None]  # what was to be encrypted is not sent in the clear


@pytest.fixture
def encrypted(tmp_path: Path) -> Iterator[str]:
    """A server with a self-signed certificate, as `host:port`."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("no openssl here to make a certificate with")
    made = [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    subprocess.run([*made, "-keyout", "key", "-out", "cert"], cwd=tmp_path, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "cert", tmp_path / "key")

    class Server(ThreadingHTTPServer):
        def finish_request(self, request: Any, address: Any) -> None:
            with context.wrap_socket(request, server_side=True) as wrapped:
                super().finish_request(wrapped, address)

        def handle_error(self, request: Any, address: Any) -> None:
            pass

    with at_an_unused_port(lambda address: Server(address, BaseHTTPRequestHandler)) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_http_for_a_server_with_a_certificate_is_reported(plugin: PluginProcess, encrypted: str) -> None:
    words = refusal(plugin, f"http://{encrypted}")
    assert f"speaks https, not http. Enter https://{encrypted}/v1" in words


def test_an_untrusted_certificate_is_reported(plugin: PluginProcess, encrypted: str) -> None:
    assert "certificate is not trusted" in refusal(plugin, f"https://{encrypted}")


def test_a_redirect_at_validation_is_reported_with_its_target(plugin: PluginProcess) -> None:
    with CannedServer(status("302 Found", b"", "Location: https://mac.example/login")) as server:
        assert "https://mac.example/login" in refusal(plugin, server.address)


def test_a_wrong_key_is_reported_and_not_repeated(plugin: PluginProcess, real_server: str) -> None:
    words = refusal(plugin, real_server, api_key="wrong-secret")
    assert "refused the API key" in words
    assert "wrong-secret" not in words


@pytest.mark.parametrize(
    "body",
    [b'{"error": {"message": "Loading model", "code": 503}}', b'{"error": {"message": "40 % loaded"}}'],
)
def test_a_server_that_is_still_loading_is_accepted(plugin: PluginProcess, body: bytes) -> None:
    with CannedServer(status("503 Service Unavailable", body)) as server:
        save(plugin, server.address)
        save(plugin, server.address, "m")


def test_a_server_that_fails_for_another_reason_is_refused(plugin: PluginProcess) -> None:
    with CannedServer(
        status("500 Internal Server Error", b'{"error": {"message": "out of disk"}}')
    ) as server:
        assert refusal(plugin, server.address) == "Out of disk"


def test_saving_a_form_clears_what_was_cached(plugin: PluginProcess) -> None:
    with mlx_backend({"id": "old"}) as server:
        assert "It has: old." in refusal(plugin, server.address, "new")
        server.answers["/v1/models"] = listed({"id": "new", "owned_by": "mlx-backend"})
        save(plugin, server.address, "new")


# -- the model ---------------------------------------------------------------------------------------


def test_a_missing_model_is_reported_with_those_served(plugin: PluginProcess) -> None:
    with mlx_backend({"id": "mlx-community/gpt-oss-20b-MXFP4-Q8"}, {"id": "b"}) as server:
        words = refusal(plugin, server.address, "mlx-community/gpt-oss-20b-MXFP4-Q4")
    assert words == (
        f"The server at {server.address}/v1 does not have the model 'mlx-community/gpt-oss-20b-MXFP4-Q4'. Did you mean "
        "'mlx-community/gpt-oss-20b-MXFP4-Q8'? It has: mlx-community/gpt-oss-20b-MXFP4-Q8, b. Enter one of these names."
    )


def test_a_long_list_of_models_is_cut(plugin: PluginProcess) -> None:
    with mlx_backend(*({"id": f"model-{number}"} for number in range(40))) as server:
        words = refusal(plugin, server.address, "gpt-4o")
    assert "model-11, and 28 more." in words
    assert "model-12" not in words


def test_a_long_name_is_shortened_and_stays_on_its_line(plugin: PluginProcess) -> None:
    with mlx_backend({"id": "a" * 5_000}, {"id": "two\nlines"}) as server:
        words = refusal(plugin, server.address, "x" * 5_000)
    assert len(words) < 600
    assert "\n" not in words


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("llm", "has these models: mlx-community/gpt-oss-20b-MXFP4-Q8, qwen."),
        ("text-embedding", "has these embedding models: bge-m3."),
        ("rerank", "lists no rerank models."),
    ],
)
@pytest.mark.parametrize("mark", ["?", "？", " ? "])
def test_a_question_mark_for_a_name_is_answered_with_the_list(
    plugin: PluginProcess, kind: str, words: str, mark: str
) -> None:
    models: list[dict[str, str]] = [
        {"id": "mlx-community/gpt-oss-20b-MXFP4-Q8", "type": "llm"},
        {"id": "bge-m3", "type": "embedding"},
        {"id": "qwen", "type": "llm"},
    ]
    with mlx_backend(*models) as server, pytest.raises(PluginError) as caught:
        list(
            plugin.request(
                "validate_model_credentials",
                provider="mlx",
                model_type=kind,
                model=mark,
                credentials={"endpoint_url": server.address},
            )
        )
    assert caught.value.kind == "CredentialsValidateFailedError"
    ending = "" if kind == "rerank" else " Enter one of these names."
    assert caught.value.message == f"The server at {server.address}/v1 {words}{ending}"


def test_a_server_without_a_list_of_its_own_kinds_answers_a_question_mark_too(plugin: PluginProcess) -> None:
    with mlx_lm() as server:
        assert "has these models: mlx-community/some-model." in refusal(plugin, server.address, "?")


@pytest.mark.parametrize(
    "name", ["org/model", "model", "default", " org/model "], ids=["whole", "last part", "default", "blanks"]
)
def test_a_model_is_found_by_its_name_or_the_last_part_of_it(plugin: PluginProcess, name: str) -> None:
    with mlx_backend({"id": "org/model"}) as server:
        save(plugin, server.address, name)


def test_a_model_that_is_not_in_memory_yet_is_accepted(plugin: PluginProcess) -> None:
    for state in ("loading", "unloaded", "failed"):
        with mlx_backend({"id": "m", "state": state, "type": "llm"}) as server:
            save(plugin, server.address, "m")


def test_a_model_of_another_type_is_reported_with_its_type(plugin: PluginProcess) -> None:
    with mlx_backend({"id": "bge-m3", "type": "embedding"}) as server:
        words = refusal(plugin, server.address, "bge-m3")
    assert words == "'bge-m3' does not chat. Add it as a model of the type Text Embedding."


def test_mlx_lm_server_may_have_more_than_it_lists(plugin: PluginProcess) -> None:
    with mlx_lm() as server:
        save(plugin, server.address, "mlx-community/not-listed")


# -- versions ----------------------------------------------------------------------------------------


def test_an_incompatible_version_is_reported_with_what_to_update(plugin: PluginProcess) -> None:
    with mlx_backend({"id": "m"}, version="7.0.0") as server:
        words = refusal(plugin, server.address)
    assert words.startswith("The server is mlx-backend 7.0.0, newer than this plugin")
    assert words.endswith("Update the plugin in Dify.")


def test_mlx_backend_sends_its_version_where_the_plugin_looks_for_it(plugin: PluginProcess) -> None:
    start = "import sys, mlx_backend; mlx_backend.__version__ = '0.0.9'\n"
    start += "from mlx_backend.cli import main; sys.exit(main(['--port', '0']))"
    with listening([sys.executable, "-c", start]) as address:
        words = refusal(plugin, address)
    assert words.startswith("The server is mlx-backend 0.0.9")
    assert words.endswith("Update the server.")


@pytest.mark.parametrize(
    ("server", "plugin_version", "oldest", "words"),
    [
        ("0.1.0", "0.1.0", (0, 1), None),
        ("0.9.0", "0.1.0", (0, 1), None),  # it only learnt more
        ("0.1.9", "0.3.0", (0, 2), "Update the server"),
        ("0.2.0", "0.3.0", (0, 2), None),
        ("1.0.0", "0.9.0", (0, 2), "Update the plugin"),
        ("1.0.0", "2.0.0", (1, 0), None),
        ("1.5.2", "2.0.0", (2, 0), "Update the server"),
        ("", "0.1.0", (0, 1), None),
        ("from the sources", "0.1.0", (0, 1), None),
    ],
)
def test_versions_are_compared_by_major_and_oldest(
    server: str, plugin_version: str, oldest: tuple[int, int], words: str | None
) -> None:
    sentence = incompatibility(server, plugin=plugin_version, oldest=oldest)
    assert (sentence is None) if words is None else (sentence is not None and words in sentence)
