"""`mlx-backend connect`: what a client needs, and how it gets into files that people have."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import subprocess
import tomllib
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from running_server import running
from scripted_engine import ScriptedEngine
from server_process import COMMAND

from mlx_backend.cli import main
from mlx_backend.clients import KEY_VARIABLE, known_clients

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from running_server import RunningServer

WRITTEN = {
    name: file for name, client in known_clients().items() for each in client.snippets if (file := each.file)
}
LOADERS: dict[str, Any] = {"toml": tomllib.loads, "json": json.loads, "yaml": yaml.safe_load}


@pytest.fixture(scope="module")
def served() -> Iterator[RunningServer]:
    with running(ScriptedEngine([])) as server:
        yield server


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    return tmp_path


def connect(served: RunningServer, *words: str) -> int:
    return main(["connect", *words, "--url", served.url])


@pytest.mark.parametrize("name", known_clients())
def test_every_client_is_told_the_real_address_and_model(
    name: str, served: RunningServer, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert connect(served, name, "--json") == 0
    said = json.loads(capsys.readouterr().out)
    text = "".join(each["text"] for each in said["snippets"])
    assert served.url.rpartition(":")[2] in text
    assert said["model"] in text or all(
        "{{model}}" not in each.text for each in known_clients()[name].snippets
    )


@pytest.mark.parametrize(("name", "file"), WRITTEN.items())
def test_a_file_is_written_once_and_then_has_it(
    name: str, file: str, served: RunningServer, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert connect(served, name, "--write", "-y") == 0
    shown = capsys.readouterr().out
    path = home / file.removeprefix("~/")
    text = path.read_text()
    assert all(f"+{line}" in shown for line in text.splitlines())
    assert LOADERS[path.suffix[1:]](text)
    assert connect(served, name, "--write") == 0
    assert "has it already" in capsys.readouterr().out
    assert path.read_text() == text


CODEX = """\
# my own
model = "gpt-5"  # the big one

[model_providers.other]
name = "other"

[mcp_servers.demo]
command = "demo"
"""


def test_what_else_is_in_a_toml_file_stays_with_its_comments(served: RunningServer, home: Path) -> None:
    file = home / ".codex/config.toml"
    file.parent.mkdir()
    file.write_text(CODEX)
    file.chmod(0o640)
    assert connect(served, "codex", "--write", "-y") == 0
    text = file.read_text()
    assert text.startswith("# my own\n")
    assert "# the big one" in text
    values = tomllib.loads(text)
    assert set(values["model_providers"]) == {"other", "mlx"}
    assert values["mcp_servers"] == {"demo": {"command": "demo"}}
    assert values["model_provider"] == "mlx"
    assert file.stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize(
    "name", [name for name, file in WRITTEN.items() if file.endswith((".toml", ".json"))]
)
def test_a_server_that_gets_a_key_later_leaves_nothing_of_before(name: str, home: Path) -> None:
    file = home / WRITTEN[name].removeprefix("~/")
    with running(ScriptedEngine([])) as open_server:
        assert connect(open_server, name, "--write", "-y") == 0
        url = open_server.url
    with running(ScriptedEngine([]), api_key="s3cret") as served:
        assert connect(served, name, "--write", "-y", "--key", "s3cret") == 0
        merged = file.read_text()
        file.unlink()
        assert connect(served, name, "--write", "-y", "--key", "s3cret") == 0
        load = LOADERS[file.suffix[1:]]
        assert load(merged) == load(file.read_text())
        assert url not in merged or url == served.url


@pytest.mark.parametrize("indent", [4, "\t"])
def test_what_else_is_in_a_json_file_stays_in_its_order_and_indentation(
    indent: int | str, served: RunningServer, home: Path
) -> None:
    mine = {"theme": "Größe", "language_models": {"openai_compatible": {"b": {"x": []}}}, "fonts": ["a", 1.5]}
    file = home / WRITTEN["zed"].removeprefix("~/")
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps(mine, indent=indent, ensure_ascii=False) + "\n")
    assert connect(served, "zed", "--write", "-y") == 0
    written = json.loads(file.read_text())
    added = written["language_models"]["openai_compatible"].pop("mlx")
    assert added["api_url"] == f"{served.url}/v1"
    assert json.dumps(written) == json.dumps(mine)
    lines = file.read_text().splitlines()
    assert (
        sum(line not in lines for line in json.dumps(mine, indent=indent, ensure_ascii=False).splitlines())
        <= 1
    )


def test_a_table_of_a_list_is_known_by_its_name(served: RunningServer, home: Path) -> None:
    file = home / ".vibe/config.toml"
    file.parent.mkdir()
    file.write_text('[[providers]]\nname = "mlx"\napi_base = "http://old/v1"\n\n[[providers]]\nname = "b"\n')
    assert connect(served, "vibe", "--write", "-y") == 0
    providers = tomllib.loads(file.read_text())["providers"]
    assert [each["name"] for each in providers] == ["mlx", "b"]
    assert providers[0]["api_base"] == f"{served.url}/v1"


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("opencode", "{'a': 1}", "is no JSON"),
        ("opencode", '{"a":' * 100_000, "is no JSON"),
        ("opencode", "[1]", "is no JSON object"),
        ("zed", '// Zed settings\n{\n  "theme": "One Dark",\n}\n', "comments, which would be lost"),
        ("codex", "= broken", "it is no TOML"),
        ("codex", "model_providers = {a = {}}", "cannot"),
        ("codex", 'model_providers.a = {name = "a"}', "cannot be kept"),
        ("continue", "name: mine\n", "what is in it cannot be kept"),
    ],
)
def test_a_file_that_cannot_be_merged_stays_and_what_to_add_is_shown(
    name: str, text: str, why: str, served: RunningServer, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = home / WRITTEN[name].removeprefix("~/")
    file.parent.mkdir(parents=True)
    file.write_text(text)
    assert connect(served, name, "--write", "-y") == 1
    printed = capsys.readouterr()
    assert why in printed.err
    assert served.url in printed.out
    assert file.read_text() == text


def test_nothing_is_written_where_nobody_can_be_asked(
    served: RunningServer, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert connect(served, "codex", "--write") == 1
    assert "Say -y to agree" in capsys.readouterr().err
    assert not (home / ".codex").exists()


def test_line_ends_stay_those_of_the_file(served: RunningServer, home: Path) -> None:
    file = home / ".pi/agent/models.json"
    file.parent.mkdir(parents=True)
    file.write_bytes(b'{\r\n  "a": 1\r\n}\r\n')
    assert connect(served, "pi", "--write", "-y") == 0
    written = file.read_bytes()
    assert written.count(b"\n") == written.count(b"\r\n") > 3


@pytest.mark.parametrize(("answer", "is_written"), [("y", True), ("n", False), ("", False)])
def test_on_a_terminal_it_shows_the_change_and_asks(
    answer: str, is_written: bool, served: RunningServer, home: Path
) -> None:
    master, slave = pty.openpty()
    command = [*COMMAND, "connect", "codex", "--write", "--url", served.url]
    with subprocess.Popen(
        command, stdin=slave, stdout=slave, stderr=slave, env=os.environ | {"TERM": "xterm", "NO_COLOR": "1"}
    ) as process:
        os.close(slave)
        shown = b""
        while b"[y/N]" not in shown:
            shown += os.read(master, 4096)
        os.write(master, f"{answer}\n".encode())
        with contextlib.suppress(OSError):  # Linux's way of saying that the other side is closed
            while os.read(master, 4096):
                pass
    os.close(master)
    assert b"+model_provider" in shown
    assert b"\x1b[" not in shown
    assert (home / ".codex/config.toml").exists() == is_written
    assert process.returncode == (0 if is_written else 1)


def test_a_key_is_written_only_when_that_is_asked_for(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with running(ScriptedEngine([]), api_key="s3cret") as served:
        for name, file in WRITTEN.items():
            assert connect(served, name, "--write", "-y", "--key", "s3cret") == 0
            assert "s3cret" not in (home / file.removeprefix("~/")).read_text()
        assert "s3cret" not in capsys.readouterr().out
        assert connect(served, "codex", "--write", "-y", "--key", "s3cret", "--literal-key") == 0
        config = home / ".codex/config.toml"
        provider = tomllib.loads(config.read_text())["model_providers"]["mlx"]
        assert provider["experimental_bearer_token"] == "s3cret"
        assert config.stat().st_mode & 0o077 == 0


def test_a_command_that_prints_the_key_prints_any_key_as_it_is(home: Path) -> None:
    key = """it's "a" \\n $HOME key"""
    with running(ScriptedEngine([]), api_key=key) as served:
        assert connect(served, "claude-code", "--write", "-y", "--key", key, "--literal-key") == 0
    helper = json.loads((home / ".claude/settings.json").read_text())["apiKeyHelper"]
    assert subprocess.run(["sh", "-c", helper], capture_output=True, text=True, check=True).stdout == key


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["codx"], "did you mean codex?"),
        (["open"], "did you mean opencode or open-webui or openai or openai-agents?"),
        (["zzz"], "`mlx-backend connect` lists them all"),
        (["codex", "--model", "nope"], "has no model 'nope'"),
    ],
)
def test_a_wrong_name_is_refused(
    words: list[str], message: str, served: RunningServer, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert connect(served, *words) in (1, 2)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", ["Claude Code", "claude", "CODEX", "codex-cli", "webui"])
def test_clients_are_known_by_what_people_call_them(name: str, served: RunningServer, home: Path) -> None:
    assert connect(served, name) == 0


def test_a_client_can_be_given_a_model_with_an_effort(
    served: RunningServer, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = served.call("/v1/models")[1]["data"][0]["id"]
    assert connect(served, "codex", "--model", f"{model}:high") == 0
    assert f'model = "{model}:high"' in capsys.readouterr().out


def test_the_list_has_coding_agents_first_and_sdks_last(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["connect"]) == 0
    kinds = re.findall("coding agent|app(?=  )|SDK", capsys.readouterr().out)
    assert kinds == sorted(kinds, key=["coding agent", "app", "SDK"].index)
    assert len(kinds) == len(known_clients())


def test_without_a_server_it_says_so_and_writes_nothing_without_a_model(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["connect", "codex", "--url", "http://127.0.0.1:9"]) == 0
    assert "No server answers" in capsys.readouterr().err
    assert main(["connect", "codex", "--url", "http://127.0.0.1:9", "--write", "-y"]) == 1
    assert not (home / ".codex").exists()
