"""What Ollama's and LM Studio's clients learn of the models: names, what they can do, how long they stay in memory."""

from __future__ import annotations

from datetime import UTC, datetime
from itertools import product
from typing import TYPE_CHECKING, Any

import ollama
import pytest
from served_models import app_of_every_type
from werkzeug.test import Client

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

USER = {"role": "user", "content": "hello"}


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    with app_of_every_type(tmp_path, max_tokens=50) as app:
        yield Client(app)


def running(client: Client) -> dict[str, float]:
    """The models in memory, and the seconds that they have left."""
    listed = client.get("/api/ps").get_json()
    ollama.ProcessResponse(**listed)
    now = datetime.now(UTC)
    return {
        each["name"]: (datetime.fromisoformat(each["expires_at"]) - now).total_seconds()
        for each in listed["models"]
    }


def test_every_name_is_listed_with_a_tag_and_aliases_share_a_digest(client: Client) -> None:
    listed = client.get("/api/tags").get_json()
    ollama.ListResponse(**listed)
    digests = {each["model"]: each["digest"] for each in listed["models"]}
    assert digests.keys() == {"chat:latest", "other:latest", "embedder:latest"}
    assert digests["chat:latest"] == digests["other:latest"] != digests["embedder:latest"]


def test_a_model_is_shown_under_any_of_its_names(client: Client) -> None:
    client.post("/v1/models/chat/load")
    for field, name in product(("model", "name"), ("chat", "chat:latest", "other", "chat:high")):
        shown = client.post("/api/show", json={field: name}).get_json()
        parsed = ollama.ShowResponse(**shown)
        assert parsed.capabilities == ["completion", "tools", "thinking"], name
        assert parsed.modelinfo
        assert parsed.modelinfo["general.architecture"] == "gpt_oss"
        assert parsed.modelinfo["gpt_oss.context_length"] == 131_072
        assert ".Suffix" not in shown["template"]


def test_an_embedding_model_embeds_here_too(client: Client) -> None:
    assert client.post("/api/show", json={"model": "embedder"}).get_json()["capabilities"] == ["embedding"]
    expected = [
        each["embedding"]
        for each in client.post("/v1/embeddings", json={"input": ["one", "two"]}).get_json()["data"]
    ]
    many = client.post("/api/embed", json={"model": "embedder:latest", "input": ["one", "two"]}).get_json()
    assert many["embeddings"] == expected
    assert many["prompt_eval_count"] > 0
    assert many["total_duration"] >= many["load_duration"] >= 0
    one = client.post("/api/embeddings", json={"model": "embedder", "prompt": "one"}).get_json()
    assert one["embedding"] == pytest.approx(expected[0], abs=1e-6)
    long = {"model": "embedder", "input": "word " * 5000}
    assert client.post("/api/embed", json=long).status_code == 200
    assert client.post("/api/embed", json={**long, "truncate": False}).status_code == 400


@pytest.mark.parametrize("path", ["/api/chat", "/api/embed", "/api/show", "/api/pull"])
def test_a_model_that_is_not_here_is_a_404_in_a_sentence(client: Client, path: str) -> None:
    body = {"model": "gpt-oss:20b", "messages": [USER], "input": "a"}
    response = client.post(path, json=body)
    assert response.status_code == 404
    assert response.get_json().keys() == {"error"}
    if path == "/api/pull":
        assert "download it, and restart the server with --model" in response.get_json()["error"]


def test_what_is_here_is_pulled_at_once(client: Client) -> None:
    for name in ("chat", "chat:latest", "embedder"):
        response = client.post("/api/pull", json={"model": name})
        assert response.get_json() == {"status": "success"}
    assert running(client) == {}


def test_a_request_says_how_long_its_model_stays(client: Client) -> None:
    def chat(**fields: Any) -> None:
        response = client.post("/api/chat", json={"model": "chat", "messages": [USER], **fields})
        assert response.status_code == 200
        assert "x-mlx-backend-ignored" not in response.headers
        response.close()

    chat()
    assert running(client)["chat:latest"] > 365 * 86_400  # as configured: it stays
    chat(keep_alive="1h")
    assert 3500 < running(client)["chat:latest"] <= 3600
    chat()
    assert 3500 < running(client)["chat:latest"] <= 3600  # what was said holds
    chat(keep_alive=-1)
    assert running(client)["chat:latest"] > 365 * 86_400
    client.post("/api/generate", json={"model": "chat", "keep_alive": 0})
    while client.get("/v1/models/chat").get_json()["state"] != "unloaded":
        pass  # a thread of its own does it
    assert running(client) == {}


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/api/create"),
        ("POST", "/api/push"),
        ("POST", "/api/copy"),
        ("DELETE", "/api/delete"),
        ("POST", "/api/blobs/sha256:00"),
    ],
)
def test_what_is_not_done_here_says_what_to_do_instead(client: Client, method: str, path: str) -> None:
    response = client.open(path, method=method, json={"model": "chat"})
    assert response.status_code == 400
    assert response.get_json()["error"].startswith("This server cannot ")


def test_an_address_that_is_not_here_is_told_as_everything_else(client: Client) -> None:
    for response in (client.get("/api/nowhere"), client.get("/api/chat")):
        assert response.status_code in (404, 405)
        assert isinstance(response.get_json()["error"], str)


@pytest.mark.parametrize("path", ["/", "/api/hello", "/api/version"])
def test_whether_the_server_is_there_can_be_seen(client: Client, path: str) -> None:
    assert client.head(path).status_code == client.get(path).status_code == 200


def test_lm_studios_list_has_the_lengths_of_contexts(client: Client) -> None:
    listed = client.get("/api/v0/models").get_json()["data"]
    assert [(each["id"], each["type"], each["state"]) for each in listed] == [
        ("chat", "llm", "not-loaded"),
        ("other", "llm", "not-loaded"),
        ("embedder", "embeddings", "not-loaded"),
    ]
    client.post("/v1/models/chat/load")
    model = client.get("/api/v0/models/other").get_json()
    assert (model["arch"], model["state"], model["capabilities"]) == ("gpt_oss", "loaded", ["tool_use"])
    assert model["max_context_length"] == model["loaded_context_length"] == 131_072
