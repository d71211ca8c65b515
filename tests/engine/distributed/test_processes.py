"""One model, two processes, one machine: what one process says, with errors for all when one of them is lost."""

import json
import os
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from time import monotonic
from typing import Any, Self

import pytest
from engine_models import write_model, write_random

from mlx_backend.engine.base import GenerationRequest, Sampling, TokenDelta
from mlx_backend.engine.mlx import load_engine

SOON = 90
PROGRAM = Path(__file__).parents[2] / "rank_process.py"
GREEDY: dict[str, Any] = {"prompt": [9, 10, 11], "max_tokens": 20}
SEEDED: dict[str, Any] = {
    "prompt": [9, 10, 12],
    "max_tokens": 20,
    "sampling": {"temperature": 1.0, "seed": 5},
}
BIASED: dict[str, Any] = {
    "prompt": [9, 10, 13],
    "max_tokens": 20,
    "sampling": {"repetition_penalty": 1.3, "logit_bias": [[20, 5.0]]},
}
LONG: dict[str, Any] = {"prompt": [9, 10, 14], "max_tokens": 900}


class Group:
    """Processes that share a model; rank 0 is talked to."""

    def __init__(self, folder: Path, model: Path, size: int = 2, **options: Any) -> None:
        hosts = folder / "hosts.json"
        hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in free_ports(size)]))
        self._logs = [folder / f"rank{rank}.log" for rank in range(size)]
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.processes: list[subprocess.Popen[str]] = []
        for rank, log in enumerate(self._logs):
            with log.open("w") as errors:
                self.processes.append(
                    subprocess.Popen(
                        [sys.executable, str(PROGRAM), str(model), json.dumps(options)],
                        env=os.environ | {"MLX_RANK": str(rank), "MLX_HOSTFILE": str(hosts)},
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=errors,
                        text=True,
                    )
                )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def hear(self) -> Any:
        """Wait for what rank 0 says."""
        try:
            return json.loads(self._lines.get(timeout=SOON))
        except queue.Empty:
            raise AssertionError(f"Rank 0 is silent. {self.logs()}") from None

    def ask(self, *words: Any) -> Any:
        """Ask rank 0 something."""
        assert self.processes[0].stdin is not None
        print(json.dumps(words), file=self.processes[0].stdin, flush=True)
        return self.hear()

    def end(self) -> list[int]:
        """Have rank 0 stop, and return what all the processes return."""
        assert self.processes[0].stdin is not None
        self.processes[0].stdin.close()
        return self.statuses()

    def statuses(self) -> list[int]:
        """Wait for all the processes."""
        return [process.wait(SOON) for process in self.processes]

    def logs(self) -> str:
        """Return what all of them logged."""
        return "\n".join(log.read_text() for log in self._logs)

    def _read(self) -> None:
        assert self.processes[0].stdout is not None
        for line in self.processes[0].stdout:
            self._lines.put(line)
        self._lines.put('"the end"')

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.wait(SOON)
        self._reader.join(SOON)
        for process in self.processes:
            for pipe in (process.stdin, process.stdout):
                if pipe is not None and not pipe.closed:
                    pipe.close()


def free_ports(count: int) -> list[int]:
    with ExitStack() as open_sockets:
        sockets = [open_sockets.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in sockets]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), eos_token_id=[])


def said_alone(model: Path) -> list[list[int]]:
    """What one process says to the three requests."""
    with load_engine(model) as engine:
        requests = [
            GenerationRequest(**{**request, "sampling": Sampling(**request.get("sampling", {}))})
            for request in (GREEDY, SEEDED, BIASED)
        ]
        return [
            [item.token for item in engine.generate(request) if isinstance(item, TokenDelta)]
            for request in requests
        ]


@pytest.fixture(scope="module")
def alone(model: Path) -> list[list[int]]:
    return said_alone(model)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Group]:
    """Two ranks, for the tests in their order; the last of them stops it."""
    with Group(tmp_path_factory.mktemp("pair"), model) as pair:
        assert pair.hear() == "ready", pair.logs()
        yield pair


def said(answers: Any) -> list[list[int]]:
    return [answer["tokens"] for answer in answers]


def test_two_ranks_say_what_one_process_says(pair: Group, alone: list[list[int]]) -> None:
    assert [said(pair.ask("say", request))[0] for request in (GREEDY, SEEDED, BIASED)] == alone


def test_two_ranks_say_the_same_to_several_at_once(pair: Group, alone: list[list[int]]) -> None:
    assert said(pair.ask("say", GREEDY, SEEDED, BIASED)) == alone


def test_a_budget_holds_the_reply_of_all_ranks(pair: Group, alone: list[list[int]]) -> None:
    closing = [3, 2]  # <|end|>, <|start|>
    cases = [(GREEDY, alone[0]), (SEEDED, alone[1])]
    for request, free in cases:
        [held] = said(pair.ask("say", {**request, "thinking": 4}))
        assert held[:6] == [*free[:4], *closing]
        assert len(held) == 20
    together = said(pair.ask("say", {**GREEDY, "thinking": 4}, SEEDED, {**BIASED, "thinking": 90}))
    assert together[0][:6] == [*alone[0][:4], *closing]
    assert together[1:] == alone[1:]


def test_who_leaves_in_mid_stream_leaves_on_all_ranks(pair: Group, alone: list[list[int]]) -> None:
    assert pair.ask("begin", LONG, {**LONG, "prompt": [9, 20]}) == "begun"
    assert pair.ask("leave") == "left"
    assert said(pair.ask("say", GREEDY, SEEDED, BIASED)) == alone


def test_prefixes_are_reused_on_all_ranks(pair: Group) -> None:
    system = list(range(9, 109))
    asked = {"prompt": [*system, 7, 8], "max_tokens": 5, "checkpoints": [100]}
    first = pair.ask("say", asked)[0]
    again = pair.ask("say", asked)[0]
    other = pair.ask("say", {"prompt": [*system, 200, 201], "max_tokens": 5})[0]
    assert again["tokens"] == first["tokens"]
    assert (again["cached"], other["cached"]) == (101, 100)


def test_a_follower_with_nothing_to_do_does_nothing(pair: Group) -> None:
    tasks = Path(f"/proc/{pair.processes[1].pid}/task")
    if not tasks.is_dir():
        pytest.skip("only Linux shows what the threads of another process do")
    until = monotonic() + SOON
    while any(state_of(task) == "R" for task in tasks.iterdir()):  # the last token may be on its way
        assert monotonic() < until, "A follower that waits keeps a core busy."
    before = switches(tasks)
    assert [switches(tasks) for _ in range(100)] == [before] * 100


def state_of(task: Path) -> str:
    return task.joinpath("stat").read_text().rpartition(")")[2].split()[0]


def switches(tasks: Path) -> list[str]:
    """How often each thread was given a core or gave it back."""
    lines = [line for task in tasks.iterdir() for line in (task / "status").read_text().splitlines()]
    return [line for line in lines if "ctxt_switches" in line]


def test_a_group_that_is_stopped_ends_in_order(pair: Group) -> None:
    assert pair.end() == [0, 0], pair.logs()
    assert "Rank 1 ends: rank 0 has stopped." in pair.logs()


def test_layers_are_shared_where_heads_cannot_be_and_a_lost_rank_is_named_to_all(tmp_path: Path) -> None:
    model = write_layered(tmp_path / "model")
    expected = said_alone(model)
    with Group(tmp_path, model) as pair:
        assert pair.hear() == "ready", pair.logs()
        assert "This rank has layers 2 to 3 of 4." in pair.logs()
        assert said(pair.ask("say", GREEDY, SEEDED, BIASED)) == expected
        assert pair.ask("begin", LONG, LONG) == "begun"
        pair.processes[1].kill()
        for answer in pair.ask("finish"):
            assert answer["failed"].startswith("EngineStopped: Rank 1 was lost"), answer
        state, detail, after = pair.ask("status")
        assert (state, after) == ("stopped", "EngineStopped")
        assert "start them again" in detail
        # 1 if MLX's thread never came back from the sum it was in: then it is left behind, in order.
        assert pair.end() in ([0, -9], [1, -9]), pair.logs()
        assert "terminate called" not in pair.logs()


def write_layered(folder: Path) -> Path:
    """Write a qwen3_next of four layers: an architecture that mlx-lm can only divide by layers."""
    config = {
        "model_type": "qwen3_next",
        "num_hidden_layers": 4,
        "full_attention_interval": 2,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000,
        "partial_rotary_factor": 0.5,
        "eos_token_id": [],
    }
    return write_random(folder, config, seed=4)


def test_a_count_of_ranks_that_does_not_divide_the_heads_is_refused(model: Path, tmp_path: Path) -> None:
    with Group(tmp_path, model, size=4) as four:
        refusal = four.hear()["failed"]
        assert "cannot be divided among 4 processes: it has 4 attention heads and 2 key-value" in refusal
        assert "Possible are 1 or 2 processes." in refusal
        assert four.statuses() == [1, 1, 1, 1]
