"""The command llm, with models of its own file and of its plugin for Anthropic."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

MODELS = """
- model_id: mlx
  model_name: mlx-demo
  api_base: {url}/v1
  api_key_name: mlx
  reasoning: true
  supports_tools: true
  supports_schema: true
- model_id: mlx-vision
  model_name: mlx-demo-vision
  api_base: {url}/v1
  api_key_name: mlx
  vision: true
"""
FUNCTION = """
def get_weather(city: str) -> str:
    "The weather in a city"
    return "-3 C in " + city
"""
FAIR = "Alice and Bob are going to a science fair on Friday."


class Llm:
    """The command, with a folder of its own."""

    def __init__(self, folder: Path, url: str) -> None:
        self._environment = {**os.environ, "LLM_USER_PATH": str(folder), "ANTHROPIC_BASE_URL": url}

    def __call__(self, *arguments: str) -> str:
        command = [sys.executable, "-m", "llm", *arguments]
        ended = subprocess.run(
            command,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        assert ended.returncode == 0, ended.stderr
        return ended.stdout.strip()


@pytest.fixture
def llm(tmp_path: Path, url: str, key: str) -> Llm:
    (tmp_path / "extra-openai-models.yaml").write_text(MODELS.format(url=url))
    command = Llm(tmp_path, url)
    command("keys", "set", "mlx", "--value", key)
    command("keys", "set", "anthropic", "--value", key)
    command("anthropic", "refresh")  # asks the server which models it has
    return command


@pytest.fixture(params=["mlx", "anthropic/mlx-demo"])
def model(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def test_a_conversation_of_two_turns(llm: Llm, model: str) -> None:
    assert llm("-m", model, "What is the capital of France?").endswith("The capital of France is Paris.")
    assert llm("-m", model, "-c", "And of Italy?").endswith("The capital of Italy is Rome.")


def test_a_tool(llm: Llm, model: str) -> None:
    assert "-3 C in Oslo" in llm("-m", model, "--functions", FUNCTION, "What is the weather in Oslo?")


def test_an_answer_is_held_to_a_schema(llm: Llm, model: str) -> None:
    assert '"date": "Friday"' in llm("-m", model, "--schema", "name, date, participants", FAIR)


@pytest.mark.parametrize("model", ["mlx-vision", "anthropic/mlx-demo-vision"])
def test_images_are_seen(llm: Llm, model: str, tmp_path: Path, red_square: str) -> None:
    import base64

    picture = tmp_path / "picture.png"
    picture.write_bytes(base64.b64decode(red_square))
    assert "red" in llm("-m", model, "-a", str(picture), "What colour is the shape?")
