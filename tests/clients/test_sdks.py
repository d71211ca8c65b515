"""The SDKs that people write programs with, against the real server.

Each file in sdks/ holds the tests of one, and runs in an environment that has it: not all of them fit together.
"""

from __future__ import annotations

import base64
import io
import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from PIL import Image
from running_server import running
from scripted_engine import ScriptedEngine, Transcript
from server_process import server_process

from clients.client_process import CLIENTS
from mlx_backend.errors import EngineBusy, EngineError

if TYPE_CHECKING:
    from collections.abc import Iterator

FOLDER = Path(__file__).parent / "sdks"
ENVIRONMENTS = {
    "newest": (
        *("openai", "anthropic", "ollama", "litellm"),
        *("langchain", "pydantic_ai", "openai_agents"),
    ),
    "openai2": ("instructor", "llama_index"),
    "llm": ("llm",),
}
KEY = "sesame"
MODELS = """
[models.mlx-demo]
model = "mlx-demo"
aliases = ["gpt-5"]
[models.mlx-demo-vision]
model = "mlx-demo-vision"
"""
ANSWER = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>"


class FailingModel:
    """Does what stands in the prompt: break off, be busy the first time, or go on and on."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def __call__(self, prompt: str) -> Transcript:
        if "Break off." in prompt:
            return Transcript(text=f"{ANSWER}Half an answ", failure=EngineError("The device is gone."))
        if "Be busy" in prompt and prompt not in self._seen:
            self._seen.add(prompt)
            return Transcript(text="", failure=EngineBusy("All are busy."))
        return Transcript(text=f"{ANSWER}{'word ' * 20_000 if 'Go on.' in prompt else 'Done.'}<|return|>")


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A server with the demonstration models, and one with a model that fails."""
    models = tmp_path_factory.mktemp("models") / "models.toml"
    models.write_text(MODELS)
    engine = ScriptedEngine(FailingModel(), context_length=8192)
    with (
        server_process("--config", str(models), MLX_BACKEND_API_KEY=KEY) as server,
        running(engine, api_key=KEY) as scripted,
    ):
        yield {"SERVER_URL": server.url, "SCRIPTED_URL": scripted.url, "SERVER_KEY": KEY}


def red_square() -> str:
    picture = Image.new("RGB", (96, 96), "white")
    picture.paste((255, 0, 0), (24, 24, 72, 72))
    data = io.BytesIO()
    picture.save(data, "PNG")
    return base64.b64encode(data.getvalue()).decode()


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("environment", "sdk"),
    [(name, sdk) for name, sdks in ENVIRONMENTS.items() for sdk in sdks],
    ids=[sdk for sdks in ENVIRONMENTS.values() for sdk in sdks],
)
def test_an_sdk_does_what_its_users_do(
    servers: dict[str, str], tmp_path: Path, environment: str, sdk: str
) -> None:
    python = CLIENTS / environment / "bin" / "python"
    if not python.exists():
        pytest.skip("not installed: `make test-clients` installs it")
    arguments = [
        "-q",
        "-rs",
        "--import-mode=importlib",
        "-p",
        "no:cacheprovider",
        "--confcutdir",
        str(FOLDER),
    ]
    ended = subprocess.run(
        [python, "-m", "pytest", "-c", os.devnull, "--rootdir", FOLDER, *arguments, FOLDER / f"use_{sdk}.py"],
        env={
            "PATH": os.environ.get("PATH", os.defpath),
            "HOME": str(tmp_path),
            "RED_SQUARE": red_square(),
            # Each of these would call its makers at home.
            "LITELLM_LOCAL_MODEL_COST_MAP": "true",
            "OPENAI_AGENTS_DISABLE_TRACING": "1",
            **servers,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=800,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout
