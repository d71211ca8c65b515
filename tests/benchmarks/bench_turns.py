"""An agent's next turn over HTTP, of which all but some tokens are cached: our server and mlx_lm's, side by side.

    python tests/benchmarks/bench_turns.py [--lengths 8000 32000] [--rounds 5] [--model FOLDER]

Both servers serve the same model, with the same fast BLAS and their own prompt caches, each in a process of its own.
(With the BLAS of MLX's wheel for Linux, matrix products are most of a step.) mlx_lm's gets room for 100 prompts: its
default of 10 is too few for four agents. All agents begin with the same conversation of so many tokens. Each goes on
for one turn, which is not measured; then, in rounds that alternate between the servers, one of them or all four at once
send their next turns: all that they sent before, a reply (always of the same kind, whatever the model said), and a new
message. The first token is measured as the time of a reply of one token (for four at once: of all four), and a step as
what each further token takes. Beside the time there is the server's processor time (Linux, in ticks of 10 ms), which
other processes on the machine disturb less. `cached` is the smallest part of any prompt that the server had in its
cache.

Without --model it is a gpt_oss with random weights: two layers, one with a sliding window.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Final

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.timed_server import Figures, TimedServer
from engine_models import MARKERS, write_model

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.timed_server import Messages

WORDS: Final = ("the", "quick", "brown", "fox", "jumps", "over", "lazy", "dog", "one", "two", "three", "four")
END_TOKENS: Final = [MARKERS.index(name) for name in ("<|return|>", "<|call|>", "<|endoftext|>")]
MESSAGE_WORDS: Final = 400  # of each message of the history
NEW_WORDS: Final = 30  # of a reply, and of the message after it
AGENTS: Final = 4
DECODED: Final = 32


def main() -> None:
    """Start both servers and print what each takes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--lengths", type=int, nargs="+", default=[8_000, 32_000])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder = options.model or _write_model(scratch / "random")
        servers = [_server(name, folder) for name in ("mlx-backend", "mlx_lm.server")]
        for server in servers:
            stack.callback(server.stop)
        for server in servers:
            server.wait()
        for length in options.lengths:
            compare(servers, length, options.rounds)


def _write_model(folder: Path) -> Path:
    return write_model(
        folder,
        hidden_size=128,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        sliding_window=128,
        max_position_embeddings=131_072,
    )


class Agent:
    """A conversation that begins with about so many tokens, the same for all agents, and grows from turn to turn."""

    def __init__(self, tokens: int, number: int) -> None:
        self._random = random.Random(tokens)
        self._messages: Messages = [{"role": "system", "content": self._text(50)}]
        while sum(len(each["content"]) for each in self._messages) < 3.4 * tokens:
            self._messages.append({"role": "user", "content": self._text(MESSAGE_WORDS)})
            self._messages.append({"role": "assistant", "content": self._text(MESSAGE_WORDS)})
        self._random = random.Random(number)
        self._messages.append({"role": "user", "content": self._text(NEW_WORDS)})

    def turn(self) -> Messages:
        """Return the next turn's messages."""
        turn = list(self._messages)
        for role in ("assistant", "user"):
            self._messages.append({"role": role, "content": self._text(NEW_WORDS)})
        return turn

    def _text(self, words: int) -> str:
        return " ".join(self._random.choices(WORDS, k=words))


def _server(name: str, folder: Path) -> TimedServer:
    arguments = {
        "mlx-backend": ["mlx_backend", "--log-level", "error"],
        "mlx_lm.server": ["mlx_lm.server", "--log-level", "ERROR", "--prompt-cache-size", "100"],
    }[name]
    command = [*arguments, "--model", str(folder), "--port", "{port}"]
    model = {"mlx-backend": None, "mlx_lm.server": "default_model"}[name]
    return TimedServer(name, sys.executable, command, model, END_TOKENS)


def compare(servers: Sequence[TimedServer], length: int, rounds: int) -> None:
    """Print the figures of one length."""
    agents = {server.name: [Agent(length, number) for number in range(AGENTS)] for server in servers}
    for server in servers:
        for agent in agents[server.name]:
            tokens = server.reply(agent.turn(), 1)["prompt_tokens"]
    print(f"\n{tokens} tokens and more; {rounds} rounds", flush=True)
    for count in (1, AGENTS):
        firsts = {server.name: Figures() for server in servers}
        steps = {server.name: Figures() for server in servers}
        least = {server.name: 1.0 for server in servers}
        for number in range(rounds):
            for server in servers if number % 2 else servers[::-1]:
                name = server.name
                first = server.turns([agent.turn() for agent in agents[name][:count]], 1)
                reply = server.turns([agent.turn() for agent in agents[name][:count]], 1 + DECODED)
                firsts[name].add_first(first)
                steps[name].add_step(first, reply)
                least[name] = min(least[name], first.cached, reply.cached)
        for name in firsts:
            print(
                f"  {count} at once, {name:14} first token {firsts[name]}; a step {steps[name]}; "
                f"{least[name]:.1%} cached",
                flush=True,
            )


if __name__ == "__main__":
    main()
