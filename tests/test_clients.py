"""What clients are told: every snippet is whole in its language, whatever the server, the model and the key are."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
import tomllib
from typing import Any

import pytest
import yaml

from mlx_backend.clients import KEY_VARIABLE, ServerAccess, Snippet, known_clients

SNIPPETS = [
    pytest.param(snippet, id=f"{name}-{at}")
    for name, client in known_clients().items()
    for at, snippet in enumerate(client.snippets)
]
AWKWARD = """it's a "model" \\ of $HOME 模"""
SECRET = "a 'secret' \"key\""


def read(snippet: Snippet, text: str) -> str:
    """Read a text as its language has it, and return the values in it, as one text."""
    match snippet.language:
        case "toml":
            value: Any = tomllib.loads(text)
        case "json":
            value = json.loads(text)
        case "yaml":
            value = yaml.safe_load(text)
        case "python":
            nodes = ast.walk(ast.parse(text.replace("[…]", "[]")))
            value = [
                node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)
            ]
        case "sh":
            names = 'cline() { printf \'%s\\n\' "$@"; }; aider() { cline "$@"; }; qwen() { cline "$@"; }\n'
            value = subprocess.run(
                ["sh", "-uc", f"{names}{text}\nexport -p"],
                env={KEY_VARIABLE: "from the variable"},
                capture_output=True,
                check=True,
                encoding="utf-8",
            ).stdout
        case _:
            value = text
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


@pytest.mark.parametrize("secret", [None, "unused", SECRET], ids=["variable", "no key", "literal key"])
@pytest.mark.parametrize("snippet", SNIPPETS)
def test_a_snippet_is_whole_with_awkward_values(snippet: Snippet, secret: str | None) -> None:
    url = "http://192.0.2.7:8080"
    text = snippet.filled(ServerAccess(url=url, model=AWKWARD, context=65_536, secret=secret))
    for left in ("{{url", "{{model", "{{key", "secret}}", "{{con"):
        assert left not in text
    values = read(snippet, text)
    assert url in values or "{{url}}" not in snippet.text
    if snippet.language in ("toml", "json", "yaml", "python"):
        assert json.dumps(AWKWARD, ensure_ascii=False)[1:-1] in values or "{{model}}" not in snippet.text
    if "{{key}}" in snippet.text:
        names_variable = KEY_VARIABLE in text
        assert names_variable == (secret is None or (secret == SECRET and "secret}}" not in snippet.key))


@pytest.mark.parametrize("snippet", SNIPPETS)
def test_no_secret_stands_in_a_snippet_that_reads_a_variable(snippet: Snippet) -> None:
    assert "unused" not in snippet.filled(ServerAccess(secret=None))


def test_a_shell_is_given_the_model_as_one_word() -> None:
    [snippet] = known_clients()["aider"].snippets
    told = read(snippet, snippet.filled(ServerAccess(model=AWKWARD)))
    assert f"openai/{AWKWARD}" in told.splitlines()


@pytest.mark.parametrize(
    ("url", "seen"),
    [
        ("http://127.0.0.1:8080", "http://host.docker.internal:8080"),
        ("http://[::1]:8080", "http://host.docker.internal:8080"),
        ("http://localhost", "http://host.docker.internal"),
        ("http://192.0.2.7:8080", "http://192.0.2.7:8080"),
        ("https://models.example.org/mlx", "https://models.example.org/mlx"),
    ],
)
def test_a_container_reaches_loopback_by_the_name_of_its_host(url: str, seen: str) -> None:
    assert ServerAccess(url=url).container_url == seen


def test_javascript_is_whole() -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed")
    [snippet] = known_clients()["ai-sdk"].snippets
    text = snippet.filled(ServerAccess(model=AWKWARD, secret=SECRET))
    subprocess.run([node, "--input-type=module", "--check"], input=text, text=True, check=True)
