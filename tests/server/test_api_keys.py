"""The file of API keys: what it means, that every mistake in it is named, and that no key is ever repeated."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import pytest

from mlx_backend.registry.errors import ConfigurationError
from mlx_backend.server.api_keys import ApiKeys, check_exposure, parse
from mlx_backend.settings import Settings

if TYPE_CHECKING:
    from pathlib import Path

DIGEST = hashlib.sha256(b"sk-of-bob").hexdigest()


def mistakes(text: str) -> list[str]:
    with pytest.raises(ConfigurationError) as caught:
        parse(text, name="k.toml")
    return [line.removeprefix("k.toml: ") for line in str(caught.value).splitlines()]


def test_a_file_with_everything_becomes_keys() -> None:
    carol, alice, bob = parse(f"""
        [defaults]
        requests_per_minute = 60
        tokens_per_minute = 1000

        [keys]
        carol = "sk-of-carol"

        [keys.alice]
        key = "sk-of-alice"
        tokens_per_minute = 200_000
        models = ["gpt-oss", "mlx-community/*"]
        priority = 1

        [keys.bob]
        key_sha256 = "{DIGEST}"
    """)
    assert [carol.name, alice.name, bob.name] == ["carol", "alice", "bob"]
    assert [each.requests_per_minute for each in (carol, alice, bob)] == [60, 60, 60]
    assert [each.tokens_per_minute for each in (carol, alice, bob)] == [1000, 200_000, 1000]
    assert (alice.models, alice.priority) == (("gpt-oss", "mlx-community/*"), 1)
    assert bob.digest == hashlib.sha256(b"sk-of-bob").digest()
    assert "sk-of" not in repr([carol, alice, bob])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[key]\nalice = "sk-1"', ["key is not a table of this file; did you mean 'keys'?"]),
        ('keys = ["sk-1"]', ['keys must be tables: [keys."name"].']),
        ("[keys]\nalice = 1", ["keys.alice: must be a key in quotes, or a table: [keys.alice]."]),
        (
            '[keys]\n"a b" = "sk-1"',
            ['keys."a b": the name must be 1 to 64 letters, digits, dots, hyphens or underscores.'],
        ),
        ("[keys.alice]\npriority = 1", ["keys.alice needs a key or key_sha256."]),
        (
            f'[keys.alice]\nkey = "sk-1"\nkey_sha256 = "{DIGEST}"',
            ["keys.alice needs a key or key_sha256, not both."],
        ),
        (
            '[keys.alice]\nkey = " sk-1"',
            ["keys.alice.key: must be on one line, without blanks at either end."],
        ),
        (
            '[keys.alice]\nkey_sha256 = "sk-1"',
            ["keys.alice.key_sha256: must be the 64 hexadecimal digits of a SHA-256, in quotes."],
        ),
        (
            '[keys.alice]\nkey = "sk-1"\nrequests_per_minute = 0\npriority = "high"\nmodels = []\nlimit = 1',
            [
                "keys.alice.requests_per_minute = 0: must be a whole number from 1 up.",
                'keys.alice.priority = "high": must be a whole number from -100 to 100.',
                'keys.alice.models = []: must be a list of names: ["one", "owner/*"].',
                "keys.alice.limit is not a setting of a key; known are key, key_sha256, models, priority, "
                "requests_per_minute, tokens_per_minute.",
            ],
        ),
        (
            '[defaults]\nkey = "sk-1"',
            ['defaults.key = "…": belongs to one key: write it below its [keys."name"].'],
        ),
    ],
)
def test_every_mistake_is_named_and_no_key_repeated(text: str, said: list[str]) -> None:
    found = mistakes(text)
    assert found == said
    assert "sk-1" not in "".join(found)


def test_keys_of_all_sources_hold_and_none_may_have_the_name_or_the_key_of_another(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text('[keys]\nalice = "sk-1"')
    keys = ApiKeys(Settings(api_key="sk-2", api_keys=(("bob", "sk-3"),), api_key_file=file))
    found = [keys.find(each) for each in (b"sk-1", b"sk-2", b"sk-3")]
    assert [key.name if key else None for key in found] == ["alice", "default", "bob"]
    assert keys.find(b"sk-4") is None
    assert keys.find(b"") is None
    with pytest.raises(ConfigurationError, match=r"^There are two API keys called 'alice'; give each a name"):
        ApiKeys(Settings(api_keys=(("alice", "sk-5"),), api_key_file=file))
    with pytest.raises(ConfigurationError, match=r"^The API keys 'bob' and 'alice' are the same; give each"):
        ApiKeys(Settings(api_keys=(("bob", "sk-1"),), api_key_file=file))


def test_a_file_that_has_lost_its_keys_lets_nobody_in(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text('[keys]\nalice = "sk-1"')
    keys = ApiKeys(Settings(api_key_file=file))
    file.write_text("")
    keys.reload()
    assert keys.are_required
    assert keys.find(b"sk-1") is None


def test_a_file_that_is_broken_when_it_is_read_again_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text('[keys]\nalice = "sk-1"')
    keys = ApiKeys(Settings(api_key_file=file))
    for broken in ('[keys]\nbob = "sk-2', "[keys]\nbob = 2"):
        file.write_text(broken)
        with pytest.raises(ConfigurationError):
            keys.reload()
        assert keys.find(b"sk-1") is not None
        assert keys.find(b"sk-2") is None
    file.unlink()
    with pytest.raises(ConfigurationError, match="There is no file"):
        keys.reload()
    assert keys.find(b"sk-1") is not None


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.20", "mac.local", ""])
def test_where_other_machines_can_connect_a_key_is_demanded_or_no_auth_said(host: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        check_exposure(Settings(host=host))
    assert "--api-key" in str(caught.value)
    assert "--no-auth" in str(caught.value)
    for settings in (Settings(host=host, auth=False), Settings(host=host, api_keys=(("a", "b"),))):
        check_exposure(settings)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_on_loopback_no_key_is_demanded(host: str) -> None:
    check_exposure(Settings(host=host))


def test_no_auth_beside_a_key_is_a_contradiction() -> None:
    with pytest.raises(ConfigurationError, match="--no-auth lets everybody in, but a key is set too"):
        check_exposure(Settings(api_key="k", auth=False))
