"""The form as people fill it in: what is understood, and which error the rest gets."""

from __future__ import annotations

import pytest

from dify_mlx_provider.upstream.credentials import (
    Credentials,
    CredentialsError,
    ServerKind,
    parse_api_key,
    parse_base_url,
)

ADDRESS = {"endpoint_url": "http://127.0.0.1:8080"}


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("http://host.docker.internal:8080/v1", "http://host.docker.internal:8080/v1"),
        ("http://127.0.0.1:8080", "http://127.0.0.1:8080/v1"),
        ("http://127.0.0.1:8080/", "http://127.0.0.1:8080/v1"),
        ("http://127.0.0.1:8080//v1//", "http://127.0.0.1:8080/v1"),
        ("127.0.0.1:8080", "http://127.0.0.1:8080/v1"),
        ("my-mac.local:8080/v1", "http://my-mac.local:8080/v1"),
        ("//my-mac.local:8080", "http://my-mac.local:8080/v1"),
        ("localhost", "http://localhost/v1"),
        ("HTTP://My-Mac.local:8080/V1x", "http://my-mac.local:8080/V1x"),
        ("https://mac.example/mlx", "https://mac.example/mlx"),
        ("https://mac.example/mlx/v1/", "https://mac.example/mlx/v1"),
        ("http://mac:8080/v1/chat/completions", "http://mac:8080/v1"),
        ("http://mac:8080/v1/models/", "http://mac:8080/v1"),
        ("http://mac:8080/v1/embeddings", "http://mac:8080/v1"),
        ("http://mac:8080/health", "http://mac:8080/v1"),
        ("http://mac:8080/v1#top", "http://mac:8080/v1"),
        ("http://[::1]:8080", "http://[::1]:8080/v1"),
        ("[::1]:8080/v1", "http://[::1]:8080/v1"),
        ("::1", "http://[::1]/v1"),
        ("http://fe80::1/v1", "http://[fe80::1]/v1"),
        ("  http://mac:8080/v1\n", "http://mac:8080/v1"),
        ("\u200bhttp://mac:8080/v1\ufeff", "http://mac:8080/v1"),
        ("ｈｔｔｐ：／／ｍａｃ：８０８０／ｖ１", "http://mac:8080/v1"),
        ('"http://mac:8080/v1"', "http://mac:8080/v1"),
        ("<http://mac:8080/v1>", "http://mac:8080/v1"),
        ("http://mac:/v1", "http://mac/v1"),
        ("http:/mac:8080/v1", "http://mac:8080/v1"),
        ("https//mac:8080/v1", "https://mac:8080/v1"),
        ("http:8080", "http://http:8080/v1"),
    ],
)
def test_an_address_is_understood_however_it_was_typed(typed: str, meant: str) -> None:
    assert parse_base_url(typed) == meant
    assert parse_base_url(meant) == meant


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("", "address is missing"),
        ("   ", "address is missing"),
        ("not a host", "'not a host' is not a server address"),
        ("ftp://mac:8080", "'ftp://mac:8080' is not a server address"),
        ("http://", "is not a server address"),
        ("http://mac:port", "is not a server address"),
        ("http://mac:99999", "is not a server address"),
        ("http://mac:0", "is not a server address"),
        ("http://[::1", "is not a server address"),
        ("http://a..b:8080", "is not a server address"),
        ("x" * 3000, r"x{199}…' is not a server address"),
        ("http://mac:8080/v1?api-version=1", "part after a question mark"),
    ],
)
def test_an_unusable_address_is_refused_with_an_example(typed: str, words: str) -> None:
    with pytest.raises(CredentialsError, match=words) as caught:
        parse_base_url(typed)
    assert "http://host.docker.internal:8080/v1" in str(caught.value)


def test_a_password_in_the_address_is_refused_without_repeating_it() -> None:
    for typed in ("http://me:hunter2@mac:8080/v1", "me:hunter2@mac:8080", "https://hunter2@mac"):
        with pytest.raises(CredentialsError, match="before the @") as caught:
            parse_base_url(typed)
        assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("secret", "secret"),
        ("  secret\n", "secret"),
        ("a key of my own", "a key of my own"),
        ("Bearer secret", "secret"),
        ("\u200bsecret", "secret"),
        ("", ""),
    ],
)
def test_a_key_is_cleaned_of_what_was_copied_with_it(typed: str, meant: str) -> None:
    assert parse_api_key(typed) == meant


@pytest.mark.parametrize("typed", ["鍵", "se\ncret", "ｓｅｃｒｅｔ", "se\x00cret"])
def test_an_impossible_key_is_refused_without_repeating_it(typed: str) -> None:
    with pytest.raises(CredentialsError, match="Copy it again") as caught:
        parse_api_key(typed)
    assert typed not in str(caught.value)


def test_an_empty_form_leaves_everything_to_the_server() -> None:
    read = Credentials.from_form(
        {**ADDRESS, "api_key": None, "context_size": "", "reasoning": "auto", "vision": " "}
    )
    assert read == Credentials(base_url="http://127.0.0.1:8080/v1")
    assert (read.context_size, read.reasoning, read.vision, read.server_kind) == (None, None, None, None)
    assert (read.timeout, read.connect_timeout) == (600.0, 10.0)


@pytest.mark.parametrize(
    ("typed", "tokens"),
    [("131072", 131_072), ("128k", 131_072), ("131,072", 131_072), ("４０９６", 4_096), ("Auto", None)],
)
def test_a_context_size_is_understood_as_people_write_it(typed: str, tokens: int | None) -> None:
    assert Credentials.from_form({**ADDRESS, "context_size": typed}).context_size == tokens


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("timeout", "soon", "Timeout must be a positive number, not 'soon'"),
        ("timeout", "0", "Timeout must be a positive number, not '0'"),
        ("timeout", "nan", "Timeout must be a positive number"),
        ("connect_timeout", "-1", "Connection timeout must be a positive number"),
        ("context_size", "0.5", "Context size must be a positive number"),
        ("context_size", "9999999999", "Context size must be a positive number of less than ten digits"),
        ("max_output_tokens", "1e12", "Maximum output tokens must be"),
        ("reasoning", "maybe", "Reasoning must be auto, effort, switch or none"),
        ("tool_calling", "yes", "Tool calling must be auto, supported or unsupported"),
        ("server_kind", "apache", "mlx_lm.server, mlx-vlm, rapid-mlx, lm-studio"),
        (
            "effort",
            "banana",
            "Default reasoning effort must be auto, none, low, medium or high, not 'banana'",
        ),
    ],
)
def test_an_unusable_field_is_named_with_its_value(field: str, value: str, words: str) -> None:
    with pytest.raises(CredentialsError, match=words):
        Credentials.from_form({**ADDRESS, field: value})


def test_lenient_parsing_takes_unusable_fields_as_empty() -> None:
    form = {
        **ADDRESS, "api_key": "two\nlines", "timeout": "soon", "context_size": "64k", "reasoning": "maybe"
    }  # fmt: skip
    assert Credentials.from_form_leniently(form) == Credentials.from_form({**ADDRESS, "context_size": "64k"})
    assert Credentials.from_form_leniently(
        {"endpoint_url": "my server", "vision": "supported"}
    ) == Credentials(vision=True)
    assert Credentials.from_form_leniently({}) == Credentials()
    right = {**ADDRESS, "api_key": "k", "timeout": "5", "effort": "high", "query_prefix": "query:"}
    assert Credentials.from_form_leniently(right) == Credentials.from_form(right)


def test_choices_are_parsed() -> None:
    form = {"tool_calling": "supported", "vision": "unsupported", "effort": "高", "server_kind": "lm-studio"}
    read = Credentials.from_form({**ADDRESS, **form})
    assert (read.tool_calling, read.vision, read.effort) == (True, False, "high")
    assert read.server_kind is ServerKind.LM_STUDIO


def test_a_key_is_not_in_the_repr() -> None:
    assert "sesame" not in repr(Credentials.from_form({**ADDRESS, "api_key": "sesame"}))
