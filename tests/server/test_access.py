"""Who may call: the API key, and web pages of other origins."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from scripted_engine import ScriptedEngine
from scripted_server import ANSWER, CHAT, USER, client_of

from mlx_backend.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from werkzeug.test import Client


@pytest.fixture
def engine() -> Iterator[ScriptedEngine]:
    with ScriptedEngine(lambda _: ANSWER) as engine:
        yield engine


@pytest.fixture
def client(engine: ScriptedEngine) -> Client:
    return client_of(engine)


@pytest.mark.parametrize(
    "headers",
    [{}, {"Authorization": "Bearer wrong-key"}, {"Authorization": "sesame"}, {"x-api-key": "wrong-key"}],
)
def test_a_wrong_key_is_a_401_that_repeats_no_key(engine: ScriptedEngine, headers: dict[str, str]) -> None:
    client = client_of(engine, api_key="sésame")
    for response in (client.get("/v1/models", headers=headers), client.post(CHAT, headers=headers)):
        assert response.status_code == 401
        assert response.get_json()["error"]["code"] == "invalid_api_key"
        assert "wrong-key" not in response.get_data(as_text=True)
    assert client.get("/health").status_code == 200


@pytest.mark.parametrize("header", ["Authorization", "x-api-key"])
def test_the_right_key_is_accepted(engine: ScriptedEngine, header: str) -> None:
    on_the_wire = "sésame".encode().decode("latin-1")
    value = f"Bearer {on_the_wire}" if header == "Authorization" else on_the_wire
    assert client_of(engine, api_key="sésame").get("/v1/models", headers={header: value}).status_code == 200


def test_without_the_key_a_server_says_that_it_is_there_and_nothing_of_its_models(
    engine: ScriptedEngine,
) -> None:
    client = client_of(engine, api_key="sesame")
    assert client.get("/health").get_json() == {"status": "ok", "server": "mlx-backend"}
    assert client.get("/").get_json() == {"name": "mlx-backend"}
    assert client.get("/health", headers={"x-api-key": "sesame"}).get_json()["models"]


LOCAL_NAMES = [
    "localhost:8080",
    "api.localhost",
    "host.docker.internal:8080",
]
NEIGHBOURS = ["mlx", "mac.local", "MAC.Local.:1"]
ADDRESSES = ["127.0.0.1:8080", "[::1]:8080", "192.168.1.20"]


@pytest.mark.parametrize("host", [*LOCAL_NAMES, *ADDRESSES])
def test_addresses_and_names_that_nobody_can_register_are_answered(client: Client, host: str) -> None:
    assert client.get("/v1/models", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("host", NEIGHBOURS)
def test_a_name_that_any_neighbour_can_take_is_answered_where_neighbours_reach_the_server(
    engine: ScriptedEngine, host: str
) -> None:
    status = {
        address: client_of(engine, host=address, auth=False)
        .get("/health", headers={"Host": host})
        .status_code
        for address in ("127.0.0.1", "localhost", "::1", "0.0.0.0", "192.168.1.20", "")
    }
    assert status == {
        "127.0.0.1": 403,
        "localhost": 403,
        "::1": 403,
        "0.0.0.0": 200,
        "192.168.1.20": 200,
        "": 200,
    }


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8080", "127.0.0.1.evil.example", "localhost.evil.example"]
)
def test_a_name_that_a_stranger_may_have_pointed_here_is_refused(client: Client, host: str) -> None:
    for path in ("/v1/models", "/health", "/"):
        response = client.get(path, headers={"Host": host, "Origin": f"http://{host}"})
        assert response.status_code == 403
    name = host.partition(":")[0]
    assert response.get_json()["error"]["message"] == (
        f"This server does not answer to the name {name!r}: start it with --allowed-host {name}, or use its address."
    )


@pytest.mark.parametrize(
    "settings", [{"allowed_hosts": ("mlx.example",)}, {"allowed_hosts": ("*",)}, {"api_key": "k"}]
)
def test_a_name_that_is_allowed_is_answered_and_so_is_any_where_a_key_is_needed(
    engine: ScriptedEngine, settings: dict[str, Any]
) -> None:
    client = client_of(engine, **settings)
    assert client.get("/v1/models", headers={"Host": "MLX.example:443", "x-api-key": "k"}).status_code == 200


def test_a_key_may_have_an_equals_sign_inside(engine: ScriptedEngine) -> None:
    client = client_of(engine, api_key="sk-a=b==")
    assert client.get("/v1/models", headers={"Authorization": "Bearer sk-a=b=="}).status_code == 200


def test_the_key_is_not_in_the_repr_of_settings() -> None:
    assert "sesame" not in repr(Settings(api_key="sesame"))


PAGE = {"Origin": "http://page.test"}


def test_a_web_page_of_another_origin_is_refused(client: Client) -> None:
    response = client.post(CHAT, json={"messages": [USER]}, headers=PAGE)
    assert response.status_code == 403
    assert "--cors-origin" in response.get_json()["error"]["message"]
    assert "Access-Control-Allow-Origin" not in response.headers
    own = client.post(CHAT, json={"messages": [USER]}, headers={"Origin": "http://localhost"})
    assert own.status_code == 200


@pytest.mark.parametrize("origin", ["null", "", "http://[", "http://localhost.evil.test", "localhost"])
@pytest.mark.parametrize("host", ["localhost", "a b"])
def test_an_origin_that_is_none_is_not_this_servers(client: Client, origin: str, host: str) -> None:
    response = client.post(CHAT, json={"messages": [USER]}, headers={"Origin": origin, "Host": host})
    assert response.status_code == 403


@pytest.mark.parametrize(("allowed", "expected"), [("http://page.test", "http://page.test"), ("*", "*")])
def test_a_web_page_of_an_allowed_origin_is_served(
    engine: ScriptedEngine, allowed: str, expected: str
) -> None:
    client = client_of(engine, cors_origins=(allowed,))
    headers = {**PAGE, "Access-Control-Request-Headers": "authorization,x-stainless-os"}
    preflight = client.options(CHAT, headers=headers)
    assert preflight.status_code == 204
    assert preflight.headers["Access-Control-Allow-Origin"] == expected
    assert preflight.headers["Access-Control-Allow-Headers"] == "authorization, x-stainless-os"
    assert "POST" in preflight.headers["Access-Control-Allow-Methods"]
    response = client.post(CHAT, json={"messages": [USER]}, headers=PAGE)
    assert response.status_code == 200
    assert response.headers["Access-Control-Allow-Origin"] == expected
    assert "Access-Control-Allow-Origin" not in client.get("/health").headers
