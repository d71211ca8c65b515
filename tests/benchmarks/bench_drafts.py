"""What drafts take and save in real time: the same engine with and without them, on models that draft well or badly.

    python tests/benchmarks/bench_drafts.py [--layers 8] [--width 512] [--replies 1 3] [--tokens 200] [--rounds 5]
    python tests/benchmarks/bench_drafts.py --architecture qwen3_5 --layers 12 --replies 1
    python tests/benchmarks/bench_drafts.py --with-head FOLDER [--replies 1 4]

The model is a gpt_oss with random weights, whose layers behind the first two add nothing. So a model of these two
drafts what it says itself (*right drafts*), in a fraction of the time; one of two other layers never does (*wrong
drafts*). Drafts from the text are tried on greedy replies, which come to repeat themselves, and on sampled ones, which
do not. With `--architecture` it is one of another architecture, such as one with states, four layers stand for those
two, and nothing comes of what mixes tokens, though it is computed: else no greedy reply would repeat itself.

With `--with-head` it is a model in a folder that has an MTP head, such as big_model.py writes: without it, with it as
it is used, and with one to three drafts in every step.

Engines alternate in one process, one more round is not counted; each line has the median ratio of the time of a round
to that without drafts, of the same replies, and how many of the drafted tokens were accepted.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

sys.path.insert(0, str(Path(__file__).parents[1]))
from architecture_fields import LAYERS
from architectures import write as write_other
from engine_models import write_model

from mlx_backend.device.blas import use_fast_blas

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from mlx_backend.engine.base import GenerationRequest
    from mlx_backend.engine.threaded import Engine

DRAFTING: Final = 2  # layers of a draft model
MIXED: Final = ("o_proj", "out_proj")  # what a layer adds comes from these,
OUTPUTS: Final = (*MIXED, "down_proj")  # and this
KINDS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "without drafts": ("target", {}),
    "right drafts": ("target", {"draft_model": "right"}),
    "wrong drafts": ("target", {"draft_model": "wrong"}),
    "from the text": ("target", {"draft_from_text": True}),
}

ALWAYS: Final = (1, 2, 3)  # drafts in every step, whether that pays or not
MAX_WARM_UP: Final = 300  # seconds for which what a GPU prepares in the background is waited for


def main() -> None:
    """Write the models and compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--architecture", help="of mlx-lm; without it a gpt_oss")
    parser.add_argument("--with-head", type=Path, help="folder of a model that has an MTP head")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--replies", type=int, nargs="+", default=[1, 3], help="at once")
    parser.add_argument("--tokens", type=int, default=200, help="of each reply")
    parser.add_argument("--prompt", type=int, default=200, help="tokens of each prompt")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument(
        "--processor-time",
        action="store_true",
        help="of this process, where others work too; drafts are paced by it",
    )
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    print(use_fast_blas() or "MLX's own matrix products", file=sys.stderr)
    if options.with_head is not None:
        compare(
            {
                "without drafts": Kind(options.with_head, {"draft_tokens": 0}),
                "MTP head": Kind(options.with_head),
                **{f"{number} in a step": Kind(options.with_head, always=number) for number in ALWAYS},
            },
            options,
        )
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_models(folder, options)
        kinds = dict[str, Kind]()
        for name, (model, named) in KINDS.items():
            draft = {"draft_model": str(folder / named["draft_model"])} if "draft_model" in named else {}
            kinds[name] = Kind(folder / model, named | draft)
        compare(kinds, options)


def write_models(folder: Path, options: argparse.Namespace) -> None:
    """Write the model, and the two that draft for it."""
    import mlx.core as mx

    drafting = DRAFTING if options.architecture is None else LAYERS

    def write(name: str, layers: int, seed: int) -> Path:
        if options.architecture is not None:
            sizes = {
                "vocab_size": options.vocabulary,
                "max_position_embeddings": 16_384,
                "num_hidden_layers": layers,
                "hidden_size": options.width,
                "intermediate_size": 2 * options.width,
            }
            return write_other(
                folder / name, options.architecture, seed=seed, dtype=options.dtype, sizes=sizes
            )
        return write_model(
            folder / name,
            seed=seed,
            dtype=options.dtype,
            num_hidden_layers=layers,
            layer_types=["sliding_attention", "full_attention"] * (layers // 2),
            hidden_size=options.width,
            intermediate_size=options.width,
            num_attention_heads=4 * max(1, options.width // 256),
            num_key_value_heads=max(1, options.width // 256),
            head_dim=64,
            sliding_window=128,
            num_local_experts=8,
            vocab_size=options.vocabulary,
            max_position_embeddings=16_384,
            eos_token_id=[],
        )

    target, right = write("target", options.layers, 3), write("right", drafting, 3)
    write("wrong", drafting, 4)
    weights: dict[str, mx.array] = mx.load(str(target / "model.safetensors"))  # type: ignore[assignment]  # of this format, a dict
    nothing = () if options.architecture is None else MIXED
    for name, value in weights.items():
        if any(output in name for output in (OUTPUTS if _layer(name) >= drafting else nothing)):
            weights[name] = mx.zeros_like(value)
    first = {name: value for name, value in weights.items() if _layer(name) < drafting}
    mx.save_safetensors(str(right / "model.safetensors"), first)
    mx.eval(weights)
    mx.save_safetensors(str(target / "part.safetensors"), weights)
    (target / "part.safetensors").replace(target / "model.safetensors")


def _layer(name: str) -> int:
    """Return which layer a weight belongs to; -1: none."""
    at = name.split(".")
    return int(at[at.index("layers") + 1]) if "layers" in at else -1


@dataclass(frozen=True)
class Kind:
    """A model with engine options, and how many tokens are `always` drafted; None: as pays."""

    model: Path
    named: dict[str, Any] = field(default_factory=dict)
    always: int | None = None


class Loaded:
    """The engine of a model with options, whose drafts can be paced otherwise."""

    def __init__(self, kind: Kind, clock: Callable[[], float]) -> None:
        from mlx_backend.device import this_device
        from mlx_backend.engine.mlx.batch import MLXBatch
        from mlx_backend.engine.threaded import Engine
        from mlx_backend.models.engine_options import EngineOptions

        started = time.perf_counter()
        chosen = EngineOptions(cache_bytes=0, **kind.named)
        self._batch = MLXBatch(kind.model, chosen, device=this_device(1 << 38, chosen.wired, chosen.blas))
        self.engine = Engine(self._batch)
        self._pacer = self._batch.draft_pacer
        self._pacer.clock = clock
        while self.engine.status().detail and time.perf_counter() - started < MAX_WARM_UP:
            time.sleep(0.1)
        print(
            f"{kind.named}: loaded in {time.perf_counter() - started:.0f} s. {self.engine.status().drafts}",
            flush=True,
        )

    def pace(self, always: int | None) -> Engine:
        """Have so many tokens drafted in every step; None: as many as pay."""
        from mlx_backend.engine.mlx.draft_pacer import DraftPacer

        fixed = DraftPacer(always or 0, None, lengths=repeat(always or 0))
        self._batch.draft_pacer = self._pacer if always is None else fixed
        return self.engine


def compare(kinds: dict[str, Kind], options: argparse.Namespace) -> None:
    """Print what each kind of drafts takes, greedily and sampled."""
    loaded: dict[str, Loaded] = {}
    clock = time.process_time if options.processor_time else time.perf_counter
    for kind in kinds.values():
        if (key := f"{kind.model} {kind.named}") not in loaded:
            loaded[key] = Loaded(kind, clock)
    engines = {
        name: partial(loaded[f"{kind.model} {kind.named}"].pace, kind.always) for name, kind in kinds.items()
    }
    for temperature in options.temperatures:
        for replies in options.replies:
            _compare(engines, replies, temperature, options)
    for each in loaded.values():
        each.engine.stop()


def _compare(
    engines: Mapping[str, Callable[[], Engine]], replies: int, temperature: float, options: argparse.Namespace
) -> None:
    times: dict[str, list[float]] = {name: [] for name in engines}
    first: dict[str, float] = {}  # of the round that is not counted: whether drafts pay is not known yet
    clock = time.process_time if options.processor_time else time.perf_counter
    drafts = {name: [0, 0, 0] for name in engines}  # drafted, accepted, replies as those without drafts
    for round_number in range(options.rounds + 1):
        said: dict[str, list[list[int]]] = {}
        in_order = list(engines.items())
        at = round_number % len(in_order)
        for name, engine in in_order[at:] + in_order[:at]:
            asked = list(_requests(round_number, replies, temperature, options))
            started = clock()
            done = _replies(engine(), asked)
            took = clock() - started
            if not round_number:
                first[name] = took
            else:
                times[name].append(took)
                drafts[name][0] += sum(each[1] for each in done)
                drafts[name][1] += sum(each[2] for each in done)
            said[name] = [each[0] for each in done]
        for name, texts in said.items():
            drafts[name][2] += sum(
                own == plain for own, plain in zip(texts, said["without drafts"], strict=True)
            )
    plain = times["without drafts"]
    print(
        f"\n{replies} at once, {f'sampled at {temperature}' if temperature else 'greedy'}: without drafts "
        f"{statistics.median(plain) / options.tokens * 1e3:.2f} ms a step",
        flush=True,
    )
    for name in [*engines][1:]:
        ratios = [own / base for own, base in zip(times[name], plain, strict=True)]
        drafted, accepted, same = drafts[name]
        print(
            f"  {name:14} {statistics.median(ratios):.3f} ({min(ratios):.2f}-{max(ratios):.2f}), at first "
            f"{first[name] / first['without drafts']:.2f}, accepted "
            f"{accepted} of {drafted}; the same replies: {same} of {replies * (options.rounds + 1)}",
            flush=True,
        )


def _requests(
    seed: int, replies: int, temperature: float, options: argparse.Namespace
) -> Iterator[GenerationRequest]:
    import random

    from mlx_backend.engine.base import GenerationRequest, Sampling

    rng = random.Random(seed)
    for number in range(replies):
        yield GenerationRequest(
            prompt=rng.choices(range(300, 500), k=options.prompt),
            max_tokens=options.tokens,
            sampling=Sampling(temperature=temperature, seed=100 * seed + number),
        )


def _replies(engine: Engine, asked: list[GenerationRequest]) -> list[tuple[list[int], int, int]]:
    """Return each reply's tokens, how many were drafted for it, and how many of those were accepted."""
    from mlx_backend.engine.base import Finished, TokenDelta

    results: dict[int, tuple[list[int], int, int]] = {}

    def run(number: int, request: GenerationRequest) -> None:
        tokens: list[int] = []
        for item in engine.generate(request):
            if isinstance(item, TokenDelta):
                tokens.append(item.token)
            elif isinstance(item, Finished):
                results[number] = (tokens, item.drafted_tokens, item.accepted_tokens)

    threads = [threading.Thread(target=run, args=each) for each in enumerate(asked)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[number] for number in range(len(asked))]


if __name__ == "__main__":
    main()
