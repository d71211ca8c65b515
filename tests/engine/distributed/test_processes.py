"""One model, two processes, one machine: the tokens of a single process, and errors for all when a rank is lost."""

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from time import monotonic
from typing import Any, Self

import pytest
from engine_models import write_model, write_random
from free_ports import free_port

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
    """Processes that share a model; tests talk to rank 0."""

    def __init__(self, folder: Path, model: Path, size: int = 2, **options: Any) -> None:
        hosts = folder / "hosts.json"
        hosts.write_text(json.dumps([[f"127.0.0.1:{free_port()}"] for _ in range(size)]))
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

    def answer(self) -> Any:
        """Wait for rank 0's next answer."""
        try:
            return json.loads(self._lines.get(timeout=SOON))
        except queue.Empty:
            raise AssertionError(f"Rank 0 does not answer. {self.logs()}") from None

    def send(self, *command: Any) -> Any:
        """Send rank 0 a command, and return its answer."""
        assert self.processes[0].stdin is not None
        print(json.dumps(command), file=self.processes[0].stdin, flush=True)
        return self.answer()

    def stop(self) -> list[int]:
        """Have rank 0 stop, and return the exit statuses of all the processes."""
        assert self.processes[0].stdin is not None
        self.processes[0].stdin.close()
        return self.statuses()

    def statuses(self) -> list[int]:
        """Wait for all the processes, and return their exit statuses."""
        return [process.wait(SOON) for process in self.processes]

    def logs(self) -> str:
        """Return what all of them logged."""
        return "\n".join(log.read_text() for log in self._logs)

    def _read(self) -> None:
        assert self.processes[0].stdout is not None
        for line in self.processes[0].stdout:
            self._lines.put(line)
        self._lines.put('"end of output"')

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


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), eos_token_id=[])


def tokens_of_one_process(model: Path) -> list[list[int]]:
    """What one process generates for the three requests."""
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
    return tokens_of_one_process(model)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Group]:
    """Two ranks, for the tests in their order; the last of them stops it."""
    with Group(tmp_path_factory.mktemp("pair"), model) as pair:
        assert pair.answer() == "ready", pair.logs()
        yield pair


def tokens_of(answers: Any) -> list[list[int]]:
    return [answer["tokens"] for answer in answers]


def test_two_ranks_generate_what_one_process_does(pair: Group, alone: list[list[int]]) -> None:
    assert [tokens_of(pair.send("generate", request))[0] for request in (GREEDY, SEEDED, BIASED)] == alone


def test_so_they_do_for_several_requests_at_once(pair: Group, alone: list[list[int]]) -> None:
    assert tokens_of(pair.send("generate", GREEDY, SEEDED, BIASED)) == alone


def test_a_reasoning_budget_applies_on_all_ranks(pair: Group, alone: list[list[int]]) -> None:
    closing = [3, 2]  # <|end|>, <|start|>
    cases = [(GREEDY, alone[0]), (SEEDED, alone[1])]
    for request, free in cases:
        [limited] = tokens_of(pair.send("generate", {**request, "thinking": 4}))
        assert limited[:6] == [*free[:4], *closing]
        assert len(limited) == 20
    together = tokens_of(pair.send("generate", {**GREEDY, "thinking": 4}, SEEDED, {**BIASED, "thinking": 90}))
    assert together[0][:6] == [*alone[0][:4], *closing]
    assert together[1:] == alone[1:]


def test_a_request_cancelled_in_mid_stream_is_removed_on_all_ranks(
    pair: Group, alone: list[list[int]]
) -> None:
    assert pair.send("start", LONG, {**LONG, "prompt": [9, 20]}) == "started"
    assert pair.send("cancel") == "cancelled"
    assert tokens_of(pair.send("generate", GREEDY, SEEDED, BIASED)) == alone


def test_prefixes_are_reused_on_all_ranks(pair: Group) -> None:
    system = list(range(9, 109))
    request = {"prompt": [*system, 7, 8], "max_tokens": 5, "checkpoints": [100]}
    first = pair.send("generate", request)[0]
    again = pair.send("generate", request)[0]
    other = pair.send("generate", {"prompt": [*system, 200, 201], "max_tokens": 5})[0]
    assert again["tokens"] == first["tokens"]
    assert (again["cached"], other["cached"]) == (101, 100)


def test_an_idle_follower_sleeps(pair: Group) -> None:
    tasks = Path(f"/proc/{pair.processes[1].pid}/task")
    if not tasks.is_dir():
        pytest.skip("only Linux shows what the threads of another process do")
    until = monotonic() + SOON
    while not is_still(tasks):  # the last token may be on its way
        assert monotonic() < until, "a follower that waits keeps a core busy"


def is_still(tasks: Path) -> bool:
    """Whether no thread has a core, or is given one, while they are looked at a hundred times."""
    before = switches(tasks)
    return not any(
        switches(tasks) != before or any(state_of(task) == "R" for task in tasks.iterdir())
        for _ in range(100)
    )


def state_of(task: Path) -> str:
    return task.joinpath("stat").read_text().rpartition(")")[2].split()[0]


def switches(tasks: Path) -> list[str]:
    """Return how often each thread was given a core or gave it back."""
    lines = [line for task in tasks.iterdir() for line in (task / "status").read_text().splitlines()]
    return [line for line in lines if "ctxt_switches" in line]


def test_a_group_that_is_stopped_exits_cleanly(pair: Group) -> None:
    assert pair.stop() == [0, 0], pair.logs()
    assert "Rank 1 ends: rank 0 has stopped." in pair.logs()


def test_layers_are_divided_where_heads_cannot_be_and_every_request_hears_of_a_lost_rank(
    tmp_path: Path,
) -> None:
    model = write_layered(tmp_path / "model")
    expected = tokens_of_one_process(model)
    with Group(tmp_path, model) as pair:
        assert pair.answer() == "ready", pair.logs()
        assert "This rank has layers 2 to 3 of 4." in pair.logs()
        assert tokens_of(pair.send("generate", GREEDY, SEEDED, BIASED)) == expected
        assert pair.send("start", LONG, LONG) == "started"
        pair.processes[1].kill()
        for answer in pair.send("finish"):
            assert answer["failed"].startswith("EngineStopped: Rank 1 was lost"), answer
        state, detail, after = pair.send("status")
        assert (state, after) == ("stopped", "EngineStopped")
        assert "start them again" in detail
        # 1 if MLX's thread never came out of the sum it was in: then it is abandoned, in order.
        assert pair.stop() in ([0, -9], [1, -9]), pair.logs()
        assert "terminate called" not in pair.logs()


def write_layered(folder: Path) -> Path:
    """Write a qwen3_next of four layers: an architecture that mlx-lm can divide by layers only."""
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
    with Group(tmp_path, model, size=3) as three:
        refusal = three.answer()["failed"]
        assert "cannot be divided among 3 processes: it has 4 attention heads and 2 key-value" in refusal
        assert "Possible are 1 or 2 processes." in refusal
        assert three.statuses() == [1, 1, 1]
