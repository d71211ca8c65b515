"""The plugin's page in three languages: the forms it draws match the declarations, and every error it explains can
really be caused.
"""

from __future__ import annotations

import json
import re
import socket
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from conftest import ROOT
from daemon import PluginError
from dify_view import user
from fake_servers import mlx_backend
from raw_server import RawServer, at_an_unused_port

if TYPE_CHECKING:
    from collections.abc import Callable

    from conftest import Stub
    from daemon import PluginProcess

PAGES = {"en_US": "README.md", "ja_JP": "README_ja_JP.md", "zh_Hans": "README_zh_Hans.md"}
QUESTION = [user("What is the capital of France?")]


def page(language: str) -> str:
    return (ROOT / "readme" / PAGES[language]).read_text(encoding="utf-8")


def drawings(language: str) -> str:
    return "\n".join(re.findall(r"^```text\n(.*?)^```", page(language), re.M | re.S))


def explained(language: str) -> list[str]:
    """The errors quoted in the first column of the last table."""
    _, _, table = page(language).rpartition("|---|---|\n")
    return [
        quoted
        for row in table.splitlines()
        if row.startswith("| ")
        for quoted in re.findall(r"`([^`]+)`", row.split("|")[1])
    ]


@pytest.mark.parametrize("language", PAGES)
def test_the_forms_are_drawn_with_their_own_labels_and_defaults(language: str) -> None:
    provider = yaml.safe_load((ROOT / "provider_assets/mlx.yaml").read_text(encoding="utf-8"))
    drawn = drawings(language)
    for field in provider["provider_credential_schema"]["credential_form_schemas"]:
        line = re.findall(rf"^  {re.escape(field['label'][language])}(?: \*)? .*$", drawn, re.M)[0]
        options = {option["value"]: option["label"][language] for option in field.get("options", [])}
        default = field.get("default", "")
        assert options.get(default, default) in line
    for field in provider["model_credential_schema"]["credential_form_schemas"]:
        assert re.split(r" ?[(（]", field["label"][language])[0] in drawn, field["variable"]
    assert provider["model_credential_schema"]["model"]["label"][language] in drawn


def test_the_japanese_page_names_every_label_as_dify_shows_it() -> None:
    provider = yaml.safe_load((ROOT / "provider_assets/mlx.yaml").read_text(encoding="utf-8"))
    model = yaml.safe_load((ROOT / "provider_assets/llm/default.yaml").read_text(encoding="utf-8"))
    drawn = drawings("ja_JP")
    fields = provider["model_credential_schema"]["credential_form_schemas"]
    for each in [model, provider["model_credential_schema"]["model"], *fields, *model["parameter_rules"]]:
        japanese, english = each["label"]["ja_JP"], each["label"]["en_US"]
        next_to_it = rf"{re.escape(japanese)}(?: \*)?(?: +|（){re.escape(english)}"
        assert japanese == english or re.search(next_to_it, drawn), english


@pytest.mark.parametrize("language", PAGES)
def test_the_panel_is_drawn_with_every_setting(language: str) -> None:
    model = yaml.safe_load((ROOT / "provider_assets/llm/default.yaml").read_text(encoding="utf-8"))
    drawn = drawings(language)
    assert model["label"][language] in drawn
    for rule in model["parameter_rules"]:
        assert rule["label"][language] in drawn, rule["name"]
        for option in rule.get("options", []) if rule["required"] else []:
            assert option in re.split(r"\W+", drawn)


def test_the_page_of_docs_draws_parts_of_the_same_forms() -> None:
    guide = (ROOT / "docs/dify.md").read_text(encoding="utf-8")
    drawn = "".join(re.findall(r"^   ```text\n(.*?)^   ```", guide, re.M | re.S)).splitlines()
    assert len(drawn) > 12
    whole = drawings("en_US").splitlines()
    for line in (line.removeprefix("   ") for line in drawn):
        assert line.strip() == "…" or any(other.startswith(line) for other in whole), line


def test_every_language_explains_the_same_errors() -> None:
    assert explained("en_US")
    assert explained("ja_JP") == explained("zh_Hans") == explained("en_US")


class Causes:
    """Causes each error, and returns the message the user reads."""

    def __init__(self, plugin: PluginProcess, stub: Stub, credentials: dict[str, str]) -> None:
        self.plugin, self.stub, self.right = plugin, stub, credentials

    def ask(
        self, messages: Any = QUESTION, parameters: Any = None, model: str = "default", **form: str
    ) -> str:
        form = {**self.right, **form}
        with pytest.raises(PluginError) as caught:
            list(self.plugin.invoke(messages, credentials=form, parameters=parameters, model=model))
        return caught.value.message

    def ask_stub(self, *pieces: str, **script: Any) -> str:
        self.stub.will_send(*pieces, **script)
        return self.ask(**self.stub.credentials)

    def ask_refusing(self, error: dict[str, str], status: int = 400) -> str:
        return self.ask_stub(json.dumps({"error": error}), status=status, type="application/json")

    def ask_silence(self) -> str:
        with at_an_unused_port(socket.create_server) as listener:  # who connects is never accepted
            return self.ask(endpoint_url=f"http://127.0.0.1:{listener.getsockname()[1]}", timeout="0.5")

    def ask_closed_door(self) -> str:
        with RawServer([], chats_only=True) as server:
            return self.ask(endpoint_url=server.address)

    def save_with_version(self, version: str) -> str:
        with mlx_backend({"id": "m"}, version=version) as server:
            return self.save(endpoint_url=server.address)

    def save(self, model: str = "", **form: str) -> str:
        action = "validate_model_credentials" if model else "validate_provider_credentials"
        named = {"model": model, "model_type": "llm"} if model else {}
        with pytest.raises(PluginError) as caught:
            list(self.plugin.request(action, provider="mlx", credentials={**self.right, **form}, **named))
        return caught.value.message


LOADING = {"message": "The model 'm' is being loaded (40 %); try again in 900 s.", "code": "model_loading"}
FETCHING = {
    "message": "The model 'm' is being downloaded (40 %); try again in 900 s.",
    "code": "model_loading",
}
BUSY = {"message": "The server is busy: 272 requests are running or waiting already.", "code": "queue_full"}
LIMITED = {
    "message": "This API key has reached its limit of 60 requests per minute; try again in 900 s.",
    "code": "rate_limit_exceeded",
}
NO_EXTRA = {
    "message": "This model can see images, but this server was installed without what that needs. Remove the image.",
    "code": "vision_not_installed",
}
NO_FAMILY = {"message": "This server does not support images for models of this family yet, only text."}
NO_ADDRESSES = {
    "message": "This server fetches no images from addresses. Send the image itself, as a data URI."
}
LARGE = {"message": "The request is larger than 8 MB, which is this server's limit (--max-body-mb)."}
BROKEN = {
    "message": "The image is empty: its data URI holds nothing behind the comma.",
    "code": "invalid_image",
}
CUT = 'data: {{"choices": [{{"index": 0, "delta": {}, "finish_reason": "length"}}]}}\n\ndata: [DONE]\n\n'
LONG_TEXT = {"type": "object", "properties": {"n": {"type": "string", "minLength": 400}}, "required": ["n"]}
PICTURE = {"type": "image", "format": "png", "mime_type": "image/png", "base64_data": "aaaa"}
CAUSES: dict[str, list[Callable[[Causes], str]]] = {
    "no server at …: start it with": [
        lambda cause: cause.ask(endpoint_url="http://127.0.0.1:9/v1"),
        lambda cause: cause.save(endpoint_url="http://127.0.0.1:9/v1"),
    ],
    "no server at …: the name … is not known": [
        lambda cause: cause.ask(endpoint_url="http://my-mac.invalid:8080"),
        lambda cause: cause.save(endpoint_url="http://my-mac.invalid:8080"),
    ],
    "no answer at …: the connection was closed": [
        lambda cause: cause.ask_closed_door(),
    ],
    "what answers at … is not an OpenAI-compatible server": [
        lambda cause: cause.ask_stub("<html>It works!</html>", type="text/html"),
    ],
    "no secure connection to …": [
        lambda cause: cause.ask(endpoint_url=cause.right["endpoint_url"].replace("http:", "https:")),
    ],
    "… redirects": [lambda cause: cause.ask_stub("", status=302)],
    "… is not a server address": [
        lambda cause: cause.save(endpoint_url="my server"),
        lambda cause: cause.ask(endpoint_url="my server"),
    ],
    "refused the API key": [
        lambda cause: cause.save(api_key="wrong"),
        lambda cause: cause.ask(api_key="wrong"),
    ],
    "The server is mlx-backend …": [
        lambda cause: cause.save_with_version("0.0.9"),
        lambda cause: cause.save_with_version("7.0.0"),
    ],
    "the server at … does not have the model": [
        lambda cause: cause.save("gpt-oss-20b"),
        lambda cause: cause.ask(model="gpt-oss-20b"),
    ],
    "The model … is being loaded": [
        lambda cause: cause.ask_stub(json.dumps({"error": LOADING}), status=503, type="application/json"),
    ],
    "downloaded": [
        lambda cause: cause.ask_stub(json.dumps({"error": FETCHING}), status=503, type="application/json"),
    ],
    "The server is busy: …": [
        lambda cause: cause.ask_stub(json.dumps({"error": BUSY}), status=503, type="application/json"),
    ],
    "This API key has reached its limit …": [
        lambda cause: cause.ask_stub(json.dumps({"error": LIMITED}), status=429, type="application/json"),
    ],
    "The prompt has … tokens; the context holds …": [
        lambda cause: cause.ask([user("What is the capital of France? " * 3000)]),
    ],
    "sent nothing for … seconds": [lambda cause: cause.ask_silence()],
    "broke off. Its log says why.": [
        lambda cause: cause.ask_stub('data: {"choices": [{"index": 0, "delta": {"content": "Pa"}}]}\n\n'),
    ],
    "the model had spent all of its tokens thinking": [
        lambda cause: cause.ask_stub(CUT.format('{"reasoning_content": "why"}')),
    ],
    "the answer was to be JSON, and it was cut off": [
        lambda cause: cause.ask(parameters={"json_schema": json.dumps(LONG_TEXT), "max_tokens": 40}),
    ],
    "cannot see images": [
        lambda cause: cause.ask([{"role": "user", "content": [PICTURE]}]),
        lambda cause: cause.ask([{"role": "user", "content": [PICTURE]}], vision="supported"),
    ],
    "installed without what that needs": [lambda cause: cause.ask_refusing(NO_EXTRA)],
    "does not support images for models of this family yet": [lambda cause: cause.ask_refusing(NO_FAMILY)],
    "fetches no images from addresses": [lambda cause: cause.ask_refusing(NO_ADDRESSES)],
    "The request is larger than …": [lambda cause: cause.ask_refusing(LARGE, 413)],
    "The image …": [lambda cause: cause.ask_refusing(BROKEN)],
    "reasoning_effort should be one of …": [
        lambda cause: cause.ask(parameters={"reasoning_effort": "banana"}),
    ],
}


def test_every_explained_error_has_a_cause_here() -> None:
    assert sorted(explained("en_US")) == sorted(CAUSES)


@pytest.mark.parametrize(
    ("quoted", "cause"), [(quoted, cause) for quoted, causes in CAUSES.items() for cause in causes]
)
def test_every_explained_error_has_these_words(
    plugin: PluginProcess,
    stub: Stub,
    credentials: dict[str, str],
    quoted: str,
    cause: Callable[[Causes], str],
) -> None:
    message = cause(Causes(plugin, stub, credentials))
    words = ".*".join(re.escape(part) for part in quoted.split("…"))
    assert re.search(words, message, re.IGNORECASE | re.DOTALL), message
    assert "Traceback" not in message
    assert "secret-key" not in message
