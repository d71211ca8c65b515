"""Every command, request and program on the README and the pages of docs/ is run here, against one server.

What differs from a reader's machine: the port is a free one, and there is no network. So a model that would have to be
downloaded must end in the sentence that the server has for that, and the embedding models are tiny ones under the names
of the real ones.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from docs_reference import commands_reference, settings_reference
from embedding_models import write_qwen_embedding, write_ranking_roberta
from readme_blocks import Command, blocks, commands, differences
from tour import server

from mlx_backend.commands.start_lines import HINT_ELSEWHERE, HINT_ON_A_MAC
from mlx_backend.demo import MODEL_PATH
from mlx_backend.device.machine import this_machine
from mlx_backend.registry import config_file
from mlx_backend.server import api_keys

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
RUN = [README, *sorted((ROOT / "docs").glob("*.md"))]
READ = [
    *RUN,
    *sorted((ROOT / "readme").glob("*.md")),
    ROOT / "tests/e2e/README.md",
    ROOT / "tests/e2e/MAC.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
]
WRITTEN_ADDRESS = "http://127.0.0.1:8080"


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def on_pages(language: str) -> list[Any]:
    """A parameter for each block in this language, on every page that is run."""
    return [
        pytest.param(block, id=f"{name(page)}-{at}")
        for page in RUN
        for at, block in enumerate(blocks(page, language), 1)
    ]


def commands_that(start: str) -> list[Any]:
    """A parameter for each command that begins like this, on every page that is run."""
    return [
        pytest.param(command, id=f"{name(page)}-{at}")
        for page in RUN
        for at, command in enumerate(commands(page), 1)
        if re.match(start, command.line)
    ]


def run(line: str) -> subprocess.CompletedProcess[str]:
    path = f"{ROOT / '.venv/bin'}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "HF_HUB_OFFLINE": "1", "KEY": "secret"}
    return subprocess.run(
        line, shell=True, cwd=ROOT, env=environment, check=False, capture_output=True, text=True
    )


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server with the demo models, and tiny ones in place of those that the pages name."""
    folder = tmp_path_factory.mktemp("models")
    models = folder / "models.toml"
    models.write_text(
        f'[models.mlx-demo]\nmodel = "{MODEL_PATH}"\npinned = true\ntemperature = 0\n'
        '[models.mlx-demo-vision]\nmodel = "mlx-demo-vision"\ntemperature = 0\n'
        '[models.mlx-demo-embedding]\nmodel = "mlx-demo-embedding"\n'
        f'[models."Qwen/Qwen3-Embedding-0.6B"]\nmodel = "{write_qwen_embedding(folder / "embedding")}"\n'
        f'[models."BAAI/bge-reranker-v2-m3"]\nmodel = "{write_ranking_roberta(folder / "rerank")}"\n'
    )
    with server("--config", str(models)) as (_, address):
        yield address


def test_every_command_is_known_to_these_tests() -> None:
    known = r"(make |mlx-backend\b|curl |printf |echo |export MLX_BACKEND_API_KEYS?=)"
    assert [c.line for page in RUN for c in commands(page) if not re.match(known, c.line)] == []


@pytest.mark.parametrize("command", commands_that("make "))
def test_each_make_command_is_there(command: Command) -> None:
    done = run(command.line.replace("make ", "make --dry-run ", 1))
    assert done.returncode == 0, done.stderr


def test_the_server_starts_and_says_what_the_page_says() -> None:
    (expected,) = [c.output.splitlines() for c in commands(README) if c.line == "mlx-backend"]
    command = [str(ROOT / ".venv/bin/mlx-backend"), "--port", "0"]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert process.stdout is not None
        said = [process.stdout.readline().rstrip("\n") for _ in expected]
    finally:
        process.terminate()
        process.communicate()
    port = re.search(r"Listening on http://127\.0\.0\.1:(\d+)", "\n".join(said))
    assert port is not None
    if not this_machine().is_mac:  # the page is for Macs
        expected = [line.replace(HINT_ON_A_MAC, HINT_ELSEWHERE) for line in expected]
    assert [line.replace(port[1], "8080") for line in said] == expected


def test_naming_a_model_that_cannot_be_downloaded_ends_in_a_sentence() -> None:
    line = next(c.line for c in commands(README) if c.line.startswith("mlx-backend --model"))
    done = run(f"{line} --port 0")
    assert done.returncode == 1
    assert "mlx-community/gpt-oss-20b-MXFP4-Q8" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", commands_that("mlx-backend -"))
def test_each_way_to_start_the_server_has_options_that_are_right(command: Command) -> None:
    done = run(f"{command.line} --help")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", commands_that("curl "))
def test_each_curl_is_answered_as_printed(command: Command, address: str) -> None:
    done = run(command.line.replace(WRITTEN_ADDRESS, address))
    assert done.returncode == 0, done.stderr
    assert command.output
    assert differences(command.output, done.stdout) == []


def test_what_open_webui_is_told_has_documents_embedded_and_ranked(address: str) -> None:
    [block] = [text for text in blocks(ROOT / "docs/open-webui.md", "sh") if "RAG_" in text]
    told = dict(line.split("=", 1) for line in block.splitlines())
    there = ("http://host.docker.internal:8080", address)

    def post(url: str, **body: Any) -> Any:
        posted = ["curl", "-s", "--fail-with-body", url.replace(*there), "-d", json.dumps(body)]
        return json.loads(subprocess.run(posted, check=True, capture_output=True, text=True).stdout)

    passages, question = (
        ["Paris is the capital of France.", "Bread is baked in an oven."],
        "capital of France",
    )
    field, model = told["RAG_EMBEDDING_PREFIX_FIELD_NAME"], told["RAG_EMBEDDING_MODEL"]
    url = told["RAG_OPENAI_API_BASE_URL"] + "/embeddings"
    stored = post(url, input=passages, model=model, **{field: told["RAG_EMBEDDING_CONTENT_PREFIX"]})["data"]
    asked = post(url, input=[question], model=model, **{field: told["RAG_EMBEDDING_QUERY_PREFIX"]})["data"][0]
    near, far = (
        sum(a * b for a, b in zip(asked["embedding"], each["embedding"], strict=True)) for each in stored
    )
    assert near > far
    ranking = {"query": question, "documents": passages, "top_n": 2}
    ranked = post(told["RAG_EXTERNAL_RERANKER_URL"], model=told["RAG_RERANKING_MODEL"], **ranking)
    assert {each["index"] for each in ranked["results"]} == {0, 1}
    assert all("relevance_score" in each for each in ranked["results"])


@pytest.mark.parametrize("fields", on_pages("json"))
def test_each_request_is_understood_with_all_its_fields(fields: str, address: str) -> None:
    body = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 60}
    body |= json.loads(fields)
    posted = ["curl", "-s", "-i", f"{address}/v1/chat/completions", "-d", json.dumps(body)]
    reply = subprocess.run(posted, check=True, capture_output=True, text=True).stdout
    assert reply.startswith("HTTP/1.1 200"), reply
    assert "x-mlx-backend-ignored" not in reply


@pytest.mark.parametrize("program", on_pages("python"))
def test_each_program_prints_what_its_comments_say(program: str, address: str) -> None:
    python = [str(ROOT / ".venv/bin/python"), "-c", program.replace(WRITTEN_ADDRESS, address)]
    done = subprocess.run(python, check=True, capture_output=True, text=True)
    expected = re.findall(r"^print\(.*\)  # (.*)$", program, re.MULTILINE)
    assert done.stdout.splitlines() == expected


@pytest.mark.parametrize("text", on_pages("toml"))
def test_each_file_of_models_or_keys_is_one(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for folder in re.findall(r'"~/([^"]+)"', text):
        (tmp_path / folder).mkdir(parents=True)
    if "[keys" in text:
        assert api_keys.parse(text)
    else:
        assert config_file.parse(text, folder=tmp_path).models


@pytest.mark.parametrize("command", commands_that("printf |echo "))
def test_the_debugging_commands_print_what_the_page_says(command: Command) -> None:
    done = run(command.line)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == json.loads(command.output)


@pytest.fixture(scope="module")
def options() -> set[str]:
    """Every option of `mlx-backend` and its commands."""
    told = commands_reference() + settings_reference()
    return set(re.findall(r"--[a-z][a-z-]+", told)) | {"--version", "--help"}


@pytest.mark.parametrize("page", READ, ids=name)
def test_a_page_names_only_options_and_make_commands_that_there_are(page: Path, options: set[str]) -> None:
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    started = re.findall(r"^[$ ]*(?:\.venv/bin/)?mlx-backend (.*)", text, re.MULTILINE)
    named = {option for command in started for option in re.findall(r"(?<!\S)--[a-z][a-z-]+", command)}
    named |= set(re.findall(r"`(--[a-z][a-z-]+)(?: [A-Z]+| [\d.]+)?`", text))
    assert named - options == set()
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    assert set(re.findall(r"(?:^\$ |`|^)make ([a-z-]+)", text, re.MULTILINE)) - targets == set()


@pytest.mark.parametrize("page", READ, ids=name)
def test_every_link_leads_to_a_file_and_a_heading_that_there_are(page: Path) -> None:
    text = re.sub(r"^( *)```.*?^\1```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    links = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'<img src="([^"]+)"', text)
    for link in links:
        if link.startswith(("http://", "https://")):
            continue
        path, _, heading = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        if heading:
            titles = re.findall(r"^#+ (.*)", target.read_text(encoding="utf-8"), re.MULTILINE)
            assert heading in {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_every_file_that_contributing_names_is_there() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = [
        path
        for path in re.findall(r"`([\w./-]+\.(?:py|md|toml|yaml)|[\w./-]+/)`", text)
        if "NAME" not in path
    ]
    rooms = (
        ROOT,
        ROOT / "mlx_backend",
        ROOT / "mlx_backend/api/openai",
        ROOT / "mlx_backend/conversation/dialects",
    )
    tests = ROOT / "tests"
    assert len(named) > 20
    assert [path for path in named if not any((room / path).exists() for room in (*rooms, tests))] == []


def test_the_readme_stays_short_and_leads_to_every_page_of_docs() -> None:
    text = README.read_text(encoding="utf-8")
    assert len(text.splitlines()) < 200
    assert [page.name for page in RUN[1:] if f"(docs/{page.name})" not in text] == []


def test_the_steps_for_a_real_dify_play_every_flow_there_is() -> None:
    page = (ROOT / "tests/e2e/README.md").read_text(encoding="utf-8")
    flows = {path.name for path in (ROOT / "tests/graphon/flows").glob("*.yaml")}
    assert set(re.findall(r"`(\w+\.yaml)`", page)) == flows
