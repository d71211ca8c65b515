"""Server, demo models and plugin together, the plugin driven exactly as Dify's daemon drives it.

`make demo` runs this. It starts the server on the demo models, builds the plugin package, runs the plugin from the
unpacked package in a process of its own, and speaks the daemon's JSON lines to it: one question with low, medium and
high effort, a second turn with the history as Dify sends it back, a tool call with its result, two questions about
a picture, and a search in a knowledge base. Then the server keeps running for you to try; with `--once` it stops.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import subprocess
import sys
import tempfile
import time
import zipfile
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from math import sumprod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image, ImageDraw
from tokenizers import Tokenizer

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "provider"))

from daemon import PluginProcess as PluginProcess

from mlx_backend.demo import EMBEDDING_MODEL_NAME, MODEL_NAME, MODEL_PATH, VISION_MODEL_NAME

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

QUESTION = "What is the capital of France?"
ABOUT_A_PICTURE = ("What is in this picture?", "Which shape is blue?")
MODELS = "".join(
    f'[models.{name}]\nmodel = "{name}"\npinned = true\ntemperature = 0\n'
    for name in (MODEL_NAME, VISION_MODEL_NAME)
)
MODELS += f'[models.{EMBEDDING_MODEL_NAME}]\nmodel = "{EMBEDDING_MODEL_NAME}"\n'
PASSAGES = (
    "Employees have 25 days of paid vacation a year.",
    "The printer is on the second floor, next to the kitchen.",
    "Passwords are changed every six months.",
)
SEARCHES = ("How often do I need a new password?", "休暇は何日ありますか？", "打印机在哪里？")
CLOCK = {
    "name": "current_time",
    "description": "A tool for getting the current time.",
    "parameters": {
        "type": "object",
        "properties": {"timezone": {"type": "string", "description": "The timezone, for example Tokyo."}},
        "required": [],
    },
}


@dataclass
class Answer:
    """What Dify gets from one `invoke_llm`: the text as shown, and the tool calls."""

    text: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)

    @property
    def thinking(self) -> str:
        """The text of the thinking block."""
        head, _, _ = self.text.partition("</think>")
        return head.strip().removeprefix("<think>").strip() if "</think>" in self.text else ""

    @property
    def visible(self) -> str:
        """The text below the thinking block."""
        return self.text.rpartition("</think>")[2].strip()


@contextmanager
def server(*options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run `mlx-backend` with these options on a free port; yield the process and its address."""
    command = [sys.executable, "-m", "mlx_backend", "--port", "0", "--log-level", "warning", *options]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        address = ""
        for line in process.stdout:
            if line.startswith("Listening on "):
                address = line.split()[2]
            if line.startswith("  Try: "):  # the last line, when the models are loaded
                yield process, address
                return
        raise SystemExit("The server did not start; its own message is above.")
    finally:
        process.terminate()
        process.communicate()


def unpacked_package(folder: Path) -> Path:
    """Build the .difypkg and unpack it as the daemon would; return the plugin's root."""
    subprocess.run(
        [
            sys.executable,
            "-m",
            "dify_mlx_provider.packaging.package",
            "--output",
            str(folder / "plugin.difypkg"),
        ],
        cwd=ROOT,
        check=True,
        stdout=subprocess.DEVNULL,
    )
    with zipfile.ZipFile(folder / "plugin.difypkg") as package:
        package.extractall(folder / "plugin")
    return folder / "plugin"


class Dify:
    """Calls the plugin as Dify does, and keeps the history as Dify does: with the reasoning inside."""

    def __init__(self, plugin: PluginProcess, address: str) -> None:
        self.plugin = plugin
        self.credentials = {"endpoint_url": f"{address}/v1", "api_key": ""}

    def invoke(
        self,
        messages: list[dict[str, Any]],
        effort: str = "",
        tools: list[dict[str, Any]] | None = None,
        *,
        model: str = "default",
    ) -> Answer:
        """Send one streamed `invoke_llm` and join its chunks."""
        answer = Answer()
        parameters = {"reasoning_effort": effort} if effort else {}
        for chunk in self.plugin.invoke(
            messages, credentials=self.credentials, parameters=parameters, tools=tools, model=model
        ):
            delta = chunk["delta"]
            answer.text += delta["message"]["content"]
            answer.tool_calls += delta["message"]["tool_calls"] or []
            answer.usage = delta["usage"] or answer.usage
        return answer

    def embed(self, texts: Sequence[str], kind: str) -> list[list[float]]:
        """Send one `invoke_text_embedding`; return the vectors, of length 1."""
        (answer,) = self.plugin.request(
            "invoke_text_embedding",
            provider="mlx",
            model=EMBEDDING_MODEL_NAME,
            model_type="text-embedding",
            credentials=self.credentials,
            texts=list(texts),
            input_type=kind,
        )
        vectors: list[list[float]] = answer["embeddings"]
        return vectors


def user(text: str, *parts: dict[str, Any]) -> dict[str, Any]:
    """A user message as Dify writes it."""
    content = [{"type": "text", "data": text}, *parts] if parts else text
    return {"role": "user", "content": content, "name": ""}


def picture() -> dict[str, Any]:
    """A red circle next to a blue square, as Dify sends an image."""
    image = Image.new("RGB", (320, 160), "white")
    draw = ImageDraw.Draw(image)
    draw.ellipse((30, 30, 130, 130), fill=(220, 30, 30))
    draw.rectangle((190, 30, 290, 130), fill=(30, 60, 220))
    file = io.BytesIO()
    image.save(file, "PNG")
    data = base64.b64encode(file.getvalue()).decode()
    return {"type": "image", "format": "png", "mime_type": "image/png", "base64_data": data}


def show(title: str, answer: Answer, tokenizer: Tokenizer) -> None:
    """Print one answer: token counts, the thinking block, and what is below it."""
    reasoning_tokens = len(tokenizer.encode(answer.thinking).ids)
    print(
        f"\n{title}: {reasoning_tokens} tokens of thinking, {answer.usage.get('completion_tokens', 0)} in all"
    )
    if answer.thinking:
        print("  ┌ thinking")
        for line in answer.thinking.splitlines():
            print(f"  │ {line}")
        print("  └")
    for line in answer.visible.splitlines():
        print(f"  {line}")
    for call in answer.tool_calls:
        print(f"  calls {call['function']['name']}({call['function']['arguments']})")


def converse(dify: Dify, tokenizer: Tokenizer) -> None:
    """The tour: effort, second turn, tool call."""
    print(f"\n● {QUESTION}")
    efforts = {effort: dify.invoke([user(QUESTION)], effort) for effort in ("low", "medium", "high")}
    for effort, answer in efforts.items():
        show(effort, answer, tokenizer)

    follow_up = "What is the capital of Italy?"
    print(f"\n● {follow_up}  (second turn; Dify sends the thinking block back, the plugin takes it out)")
    echoed = {"role": "assistant", "content": efforts["medium"].text, "name": "", "tool_calls": []}
    show("medium", dify.invoke([user(QUESTION), echoed, user(follow_up)], "medium"), tokenizer)

    request = "Use current_time."
    print(f"\n● {request}  (with Dify's tool of that name)")
    first = dify.invoke([user(request)], "medium", [CLOCK])
    show("medium", first, tokenizer)
    if not first.tool_calls:
        raise SystemExit("The model did not call the tool.")
    result = time.strftime("%Y-%m-%d %H:%M:%S")
    print(f"  the tool answers {result}")
    round_two = [
        user(request),
        {"role": "assistant", "content": first.text, "name": "", "tool_calls": first.tool_calls},
        {
            "role": "tool",
            "content": result,
            "name": "current_time",
            "tool_call_id": first.tool_calls[0]["id"],
        },
    ]
    show("medium", dify.invoke(round_two, "medium", [CLOCK]), tokenizer)


def look(dify: Dify) -> None:
    """The rest of the tour: two turns about a picture."""
    first, second = ABOUT_A_PICTURE
    shown = user(first, picture())
    print(f"\n● {first}  (a red circle next to a blue square, shown to {VISION_MODEL_NAME})\n")
    answer = dify.invoke([shown], model=VISION_MODEL_NAME)
    print(f"  {answer.visible}")
    print(f"\n● {second}  (second turn; Dify sends the picture again, and the server has it in its cache)\n")
    said = {"role": "assistant", "content": answer.text, "name": "", "tool_calls": []}
    print(f"  {dify.invoke([shown, said, user(second)], model=VISION_MODEL_NAME).visible}")


def search(dify: Dify) -> None:
    """The end of the tour: the passage of a knowledge base that is nearest to a question."""
    print(f"\n● A knowledge base of {len(PASSAGES)} English passages, searched with {EMBEDDING_MODEL_NAME}\n")
    passages = dify.embed(PASSAGES, "document")
    for question, vector in zip(SEARCHES, dify.embed(SEARCHES, "query"), strict=True):
        _, found = max(zip((sumprod(vector, each) for each in passages), PASSAGES, strict=True))
        print(f"  {question}\n    {found}")


def main() -> int:
    """Run the tour; keep the server running unless --once."""
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    arguments.add_argument("--once", action="store_true", help="stop after the tour")
    once = arguments.parse_args().once
    tokenizer = Tokenizer.from_file(str(MODEL_PATH / "tokenizer.json"))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (folder / "models.toml").write_text(MODELS, encoding="utf-8")
        process, address = stack.enter_context(server("--config", str(folder / "models.toml")))
        root = unpacked_package(folder)
        print(f"Server  {address}/v1  with the demonstration models, which are not assistants")
        with PluginProcess(root, python=sys.executable) as plugin:
            print("Plugin  from the built package, driven with the JSON lines of Dify's daemon")
            dify = Dify(plugin, address)
            converse(dify, tokenizer)
            look(dify)
            search(dify)
        if not once:
            body = json.dumps(
                {"messages": [{"role": "user", "content": QUESTION}], "reasoning_effort": "high"}
            )
            print(f"\nThe server keeps running at {address}/v1; Ctrl-C stops it. Try:\n")
            print(f"curl {address}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'")
            try:
                process.wait()
            except KeyboardInterrupt:
                print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
