"""Pictures over HTTP: our server and mlx-vlm's side by side, and ours with as many tokens of text instead.

    python tests/benchmarks/peer_environments.py mlx-vlm      # once
    python tests/benchmarks/bench_images.py [--rounds 7] [--width 640] [--height 480]

Both servers serve a Qwen2.5-VL with random weights, with the same fast BLAS, each in a process of its own. Rounds
alternate between the servers and what they are asked: a new picture, the next turn about it (the same picture, the
reply, and a new question), and four clients at once, each with a new picture; ours also gets text of as many tokens
instead of the picture. The first token is measured as the time of a reply of one token, and a step as what each further
token takes. Beside the time there is the server's processor time (Linux), which other processes disturb less.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.peer_environments import installed, python_of
from benchmarks.timed_server import Figures, TimedServer
from picture_files import data_uri, encoded
from PIL import Image
from vision_models import write_qwen2_5_vl

if TYPE_CHECKING:
    from benchmarks.timed_server import Messages

TEMPLATE: Final = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}{%- for part in message.content -%}
{%- if part.type == 'text' -%}{{ part.text }}
{%- else -%}<|vision_start|><|image_pad|><|vision_end|>{%- endif -%}
{%- endfor -%}{% endif %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}
"""
END_TOKENS: Final = (0, 1)
CLIENTS: Final = 4
DECODED: Final = 32


def main() -> None:
    """Start the servers and print what each takes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--width", type=int, default=640)
    parser.add_argument("--height", type=int, default=480)
    options = parser.parse_args()
    pictures = _Pictures(options.width, options.height)
    with ExitStack() as stack:
        folder = _write_model(Path(stack.enter_context(tempfile.TemporaryDirectory())))
        ours = ["mlx_backend", "--log-level", "error", "--model", str(folder), "--port", "{port}"]
        servers = [TimedServer("mlx-backend", sys.executable, ours, None, END_TOKENS)]
        if installed("mlx-vlm"):
            theirs = ["mlx_vlm.server", "--model", str(folder), "--host", "127.0.0.1", "--port", "{port}"]
            servers.append(TimedServer("mlx-vlm", python_of("mlx-vlm"), theirs, str(folder), END_TOKENS))
        else:
            print("mlx-vlm is not installed: skipped (peer_environments.py installs it)")
        for server in servers:
            stack.callback(server.stop)
        for server in servers:
            server.wait()
        compare(servers, pictures, options.rounds)


def _write_model(folder: Path) -> Path:
    write_qwen2_5_vl(
        folder,
        text_sizes={
            "hidden_size": 256,
            "intermediate_size": 512,
            "max_position_embeddings": 32_768,
            "rope_scaling": {"type": "mrope", "mrope_section": [8, 12, 12]},
        },
        vision_sizes={
            "patch_size": 14,
            "spatial_patch_size": 14,
            "window_size": 112,
            "hidden_size": 128,
            "intermediate_size": 256,
            "out_hidden_size": 256,
            "depth": 4,
            "fullatt_block_indexes": [3],
        },
        max_pixels=1 << 20,
    )
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


class _Pictures:
    """Pictures that no server has seen, as parts of a message."""

    def __init__(self, width: int, height: int) -> None:
        self._size = (width, height)
        self._random = random.Random(0)

    def new(self) -> dict[str, Any]:
        image = Image.frombytes("RGB", (8, 8), self._random.randbytes(192)).resize(self._size)
        return {"type": "image_url", "image_url": {"url": data_uri(encoded(image, "JPEG", quality=90))}}


def _question(*parts: dict[str, Any]) -> Messages:
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "What is on it?"}]}]


def compare(servers: list[TimedServer], pictures: _Pictures, rounds: int) -> None:
    """Print the figures."""
    usage = servers[0].reply(_question(pictures.new()), 1)
    seen = usage["prompt_tokens_details"]["image_tokens"]
    print(f"{seen} tokens of a picture, {usage['prompt_tokens']} of a prompt; {rounds} rounds", flush=True)
    firsts: dict[tuple[str, str], Figures] = defaultdict(Figures)
    steps: dict[tuple[str, str], Figures] = defaultdict(Figures)
    least: dict[tuple[str, str], float] = defaultdict(lambda: 1.0)

    def measure(server: TimedServer, what: str, turns: list[Messages], longer: list[Messages]) -> None:
        key = (what, server.name)
        first, reply = server.turns(turns, 1), server.turns(longer, 1 + DECODED)
        firsts[key].add_first(first)
        steps[key].add_step(first, reply)
        least[key] = min(least[key], first.cached, reply.cached)

    for number in range(rounds + 1):
        if number == 1:  # what happens once is not measured
            firsts.clear()
            steps.clear()
            least.clear()
        for server in servers if number % 2 else servers[::-1]:
            turns = [_question(pictures.new()), _question(pictures.new())]
            measure(server, "a new picture", turns[:1], turns[1:])
            following = [
                [*turn, {"role": "assistant", "content": "A map."}, {"role": "user", "content": "Of what?"}]
                for turn in turns
            ]
            measure(server, "the next turn about it", following[:1], following[1:])
            crowd = [_question(pictures.new()) for _ in range(2 * CLIENTS)]
            measure(server, f"{CLIENTS} new pictures at once", crowd[:CLIENTS], crowd[CLIENTS:])
            if server is servers[0]:
                words = [
                    [{"role": "user", "content": f"{number:08}{at} " + "x" * seen}] for at in range(2)
                ]  # a token of this tokenizer is a byte
                measure(server, "as many tokens of text", words[:1], words[1:])
    for key, first in sorted(firsts.items()):
        what, name = key
        print(f"  {what}, {name}: first token {first}; a step {steps[key]}; {least[key]:.1%} cached")


if __name__ == "__main__":
    main()
