"""The page for browsers as it is served: who gets it, under which headers, in which languages, and what it may load.

What it does in a browser is tried in tests/page (`make test-page`).
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, get_args

import pytest
from scripted_engine import ScriptedEngine
from scripted_server import ANSWER, USER, answered, client_of
from served_models import app_of_every_type
from werkzeug.test import Client

from mlx_backend.conversation.effort import Effort
from mlx_backend.conversation.events import FinishReason
from mlx_backend.models.files import ModelType
from mlx_backend.registry.base import ModelState
from mlx_backend.server.page.files import FOLDERS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

STATIC, VENDOR = FOLDERS
FILES = sorted(path for folder in FOLDERS for path in folder.iterdir())
OURS = {path.name: path.read_text(encoding="utf-8") for path in STATIC.iterdir()}
SCRIPTS = "".join(text for name, text in OURS.items() if name.endswith(".js") and name != "words.js")
WORDS: dict[str, list[str]] = json.loads(OURS["words.js"].partition("WORDS = ")[2].rstrip().rstrip(";"))
BROWSERS = {
    "Chrome": "text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,image/webp,*/*;q=0.8",
    "Safari": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8",
    "lynx": "text/html, text/plain, text/sgml, text/css, */*;q=0.01",
}
PROGRAMS = {
    "curl": "*/*",
    "nothing": "",
    "openai": "application/json",
    "axios": "application/json, text/plain, */*",
}


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with ScriptedEngine(lambda _: ANSWER) as engine:
        yield client_of(engine)


def test_the_page_is_small_enough_to_be_read() -> None:
    own = [*STATIC.iterdir(), *STATIC.parent.glob("*.py")]
    assert sum(len(path.read_text(encoding="utf-8").splitlines()) for path in own) <= 1500


@pytest.mark.parametrize("accept", BROWSERS.values(), ids=BROWSERS)
def test_a_browser_gets_the_page(client: Client, accept: str) -> None:
    response = client.get("/", headers={"Accept": accept})
    assert (response.status_code, response.mimetype) == (200, "text/html")
    assert "Accept" in response.vary


@pytest.mark.parametrize("accept", PROGRAMS.values(), ids=PROGRAMS)
def test_every_other_client_gets_json_as_before(client: Client, accept: str) -> None:
    response = client.get("/", headers={"Accept": accept} if accept else {})
    assert response.get_json()["name"] == "mlx-backend"
    assert "Accept" in response.vary


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_file_says_what_it_is_and_that_nothing_comes_from_elsewhere(client: Client, path: Path) -> None:
    response = client.get(f"/page/{path.name}")
    assert response.data == path.read_bytes()
    kinds = {".js": "text/javascript", ".css": "text/css", ".html": "text/html", ".svg": "image/svg+xml"}
    assert response.mimetype == kinds.get(path.suffix, response.mimetype)
    assert response.headers["X-Content-Type-Options"] == "nosniff"
    policy = dict(
        part.strip().split(" ", 1) for part in response.headers["Content-Security-Policy"].split(";")
    )
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert {policy[f"{kind}-src"] for kind in ("script", "style", "connect")} == {"'self'"}
    assert "http" not in str(policy)
    assert "unsafe" not in str(policy)
    again = client.get(f"/page/{path.name}", headers={"If-None-Match": response.headers["ETag"]})
    assert (again.status_code, again.data) == (304, b"")


def test_an_address_with_a_slash_too_many_leads_to_the_one_without(client: Client) -> None:
    response = client.get("/docs/")
    assert (response.status_code, response.headers["Location"]) == (308, "../docs")


@pytest.mark.parametrize(
    "name", ["nothing.js", "../__init__.py", "..%2ffiles.py", "static/app.js", "%00", "a" * 300]
)
def test_what_is_not_one_of_the_files_is_a_404(client: Client, name: str) -> None:
    response = client.get(f"/page/{name}")
    assert (response.status_code, "error" in response.get_json()) == (404, True)


@pytest.mark.parametrize("name", OURS)
def test_nothing_of_ours_names_another_server(name: str) -> None:
    named = set(re.findall(r"https?://[^\s\"'`]+", OURS[name]))
    assert named <= {"http://www.w3.org/2000/svg"}


@pytest.mark.parametrize("name", [name for name in OURS if name.endswith(".html")])
def test_html_has_no_scripts_styles_or_handlers_in_it(name: str) -> None:
    assert re.findall(r"<script(?![^>]*\bsrc=)|<style|\bstyle=|\bon\w+=|javascript:", OURS[name]) == []


def test_no_script_makes_elements_of_a_text() -> None:
    assert re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", SCRIPTS) == []


def test_every_file_that_a_file_names_is_there() -> None:
    names = {path.name for path in FILES}
    imported = set(re.findall(r"(?:from|import|\?|:)\s*\(?\s*\"\./([^\"]+)\"", SCRIPTS))
    linked = {
        each
        for name, text in OURS.items()
        if name.endswith(".html")
        for each in re.findall(r"page/([^\"]+)", text)
    }
    assert {"marked.js", "dompurify.js", "highlight.js"} <= imported
    assert imported | linked <= names


def test_every_text_is_there_in_all_languages_with_the_same_parts() -> None:
    for key, texts in WORDS.items():
        assert len(texts) == 3, key
        assert all(texts), key
        assert len({frozenset(re.findall(r"{\w+}", text)) for text in texts}) == 1, key


def test_every_text_that_is_shown_is_there_and_every_one_is_shown() -> None:
    named = set(re.findall(r"\bt\(\"([\w.]+)\"", SCRIPTS))
    assert named - WORDS.keys() == set()
    quoted = set(re.findall(r"[\"'`]([\w.]+)[\"'`]|\b(\w+): \[", SCRIPTS))
    known = {word for pair in quoted for word in pair} | named
    composed = re.compile(r"(outcome|type|can|source)\.[\w ]+|\w+(Hint|Percent)")
    said = {
        *Effort,
        *get_args(ModelState.__value__),
        "structured_output",
        "thinking",
        "tools",
        "tool_choice",
        "vision",
    }
    assert [key for key in WORDS if key not in known | said and not composed.fullmatch(key)] == []


def test_what_the_server_says_in_a_word_has_a_text() -> None:
    states = {*get_args(ModelState.__value__)}
    outcomes = {
        *get_args(FinishReason.__value__),
        "answered",
        "refused",
        "error",
        "client_left",
        "superseded",
    }
    kinds = get_args(ModelType.__value__)
    wanted = {
        *Effort,
        *states,
        *(f"outcome.{each}" for each in outcomes),
        *(f"type.{each}" for each in kinds),
    }
    assert wanted - WORDS.keys() == set()


def test_without_the_page_nothing_of_it_is_served() -> None:
    with ScriptedEngine(lambda _: ANSWER) as engine:
        client = client_of(engine, page=False)
        html = {"Accept": BROWSERS["Chrome"]}
        assert client.get("/", headers=html).get_json()["name"] == "mlx-backend"
        for path in ("/docs", "/page/app.js", "/page/clients.json"):
            assert client.get(path, headers=html).status_code == 404
            assert path not in client.get("/openapi.json").get_json()["paths"]


# -- /activity -----------------------------------------------------------------------------------------------------


def test_the_last_replies_are_listed_with_what_they_cost_and_nothing_that_was_written() -> None:
    with ScriptedEngine(lambda _: ANSWER) as engine:
        client = client_of(engine)
        usage = answered(client, reasoning_effort="low").get_json()["usage"]
        client.post("/v1/chat/completions", json={"messages": []}).close()
        response = client.get("/activity")
        refused, reply = response.get_json()["requests"]
    assert (refused["status"], refused["outcome"]) == (400, "refused")
    assert (reply["outcome"], reply["effort"], reply["model"]) == ("stop", "low", "scripted")
    assert reply["completion_tokens"] == usage["completion_tokens"]
    assert {"at", "first_token_seconds", "tokens_per_second"} <= reply.keys()
    text = response.get_data(as_text=True)
    assert str(USER["content"]) not in text
    assert "Paris" not in text


def test_a_key_sees_its_own_requests_and_the_models_it_may_use(tmp_path: Path) -> None:
    keys = '[keys]\nalice = "sk-alice"\n[keys.bob]\nkey = "sk-bob"\nmodels = ["chat"]\n'
    (tmp_path / "keys.toml").write_text(keys)
    alice, bob = ({"Authorization": f"Bearer sk-{name}"} for name in ("alice", "bob"))
    with app_of_every_type(tmp_path, api_key_file=tmp_path / "keys.toml", max_tokens=50) as app:
        client = Client(app)
        for path in ("/activity", "/page/clients.json"):
            assert client.get(path).status_code == 401
        for headers in (alice, alice, bob):
            body: dict[str, Any] = {"model": "chat", "messages": [USER]}
            assert client.post("/v1/chat/completions", json=body, headers=headers).status_code == 200
        seen = [client.get("/activity", headers=headers).get_json() for headers in (alice, bob)]
        assert [[each["key"] for each in activity["requests"]] for activity in seen] == [
            ["alice"] * 2,
            ["bob"],
        ]
        assert {each["model"] for each in seen[1]["models"]} <= {"chat"}
        assert {"embedder", "ranker"} <= {each["model"] for each in seen[0]["models"]}
        # The page itself tells nothing, and is there before the key is.
        assert client.get("/", headers={"Accept": BROWSERS["Chrome"]}).mimetype == "text/html"


# -- how clients are set up ----------------------------------------------------------------------------------------


def test_clients_are_told_the_address_the_page_has_and_the_model_that_was_chosen(client: Client) -> None:
    clients = client.get("/page/clients.json?url=http://192.0.2.7:8080&model=scripted").get_json()
    [codex] = [each for each in clients if each["name"] == "codex"]
    assert 'base_url = "http://192.0.2.7:8080/v1"' in codex["snippets"][0]["text"]
    assert 'model = "scripted"' in codex["snippets"][0]["text"]


def test_a_model_that_is_not_there_is_refused(client: Client) -> None:
    response = client.get("/page/clients.json?model=nobody")
    assert (response.status_code, response.get_json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize("url", ["http://localhost:port", "http://[", "http://localhost:99999"])
def test_an_address_that_is_none_is_refused_by_name(client: Client, url: str) -> None:
    response = client.get("/page/clients.json", query_string={"url": url})
    assert (response.status_code, response.get_json()["error"]["param"]) == (400, "url")


def test_where_a_key_is_needed_clients_read_it_from_a_variable_and_none_is_shown() -> None:
    with ScriptedEngine(lambda _: ANSWER) as engine:
        client = client_of(engine, api_key="sesame")
        text = client.get("/page/clients.json", headers={"x-api-key": "sesame"}).get_data(as_text=True)
    assert "MLX_BACKEND_API_KEY" in text
    assert "sesame" not in text
