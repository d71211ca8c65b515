"""One rank of a model that several processes share, driven by lines of JSON: tests run it once for each rank.

Rank 0 reports that it has loaded, and then answers each line it reads with one line. The others only follow.
"""

import json
import logging
import sys
from typing import Any

from mlx_backend.constraints.reasoning_budget import ReasoningBudgets
from mlx_backend.conversation.dialects import DIALECTS
from mlx_backend.conversation.events import Channel
from mlx_backend.engine.base import Finished, GenerationRequest, Sampling, TokenDelta
from mlx_backend.engine.jobs import Generation
from mlx_backend.engine.mlx import follow_engine, load_engine, rank_and_count
from mlx_backend.engine.threaded import Engine
from mlx_backend.errors import EngineError


def main(model: str, options: dict[str, Any]) -> int:
    """Follow, or generate until the input ends."""
    logging.basicConfig(level="INFO", format="%(message)s", stream=sys.stderr)
    try:
        if rank_and_count()[0]:
            return follow_engine(model, **options)
        engine = load_engine(model, **options)
    except EngineError as error:
        answer({"failed": str(error)})
        return 1
    answer("ready")
    started: list[Generation] = []
    for line in sys.stdin:
        match json.loads(line):
            case ["generate", *requests]:
                generations = [engine.generate(to_request(engine, request)) for request in requests]
                answer([result_of(generation) for generation in generations])
            case ["start", *requests]:
                started = [engine.generate(to_request(engine, request)) for request in requests]
                for generation in started:
                    while not isinstance(generation.next(), TokenDelta):
                        pass
                answer("started")
            case ["cancel"]:
                for generation in started:
                    generation.close()
                answer("cancelled")
            case ["finish"]:
                answer([result_of(generation) for generation in started])
            case ["status"]:
                answer([engine.status().state, engine.status().detail, error_of_a_request(engine)])
    engine.stop()
    return 0


def to_request(engine: Engine, request: dict[str, Any]) -> GenerationRequest:
    """Build a request. With `thinking`, its reply begins with reasoning of at most that many tokens."""
    thinking = request.get("thinking")
    fields = {key: value for key, value in request.items() if key != "thinking"}
    constraint = None
    if thinking is not None:
        budgets = ReasoningBudgets(engine.tokenizer, DIALECTS["harmony"])
        constraint = budgets.start(
            fields["prompt"], Channel.ANALYSIS, room=fields["max_tokens"], tokens=thinking
        )
    sampling = Sampling(**fields.get("sampling", {}))
    return GenerationRequest(**{**fields, "sampling": sampling, "constraint": constraint})


def result_of(generation: Generation) -> Any:
    """Return the remaining tokens, and how many of the prompt were cached; or the error."""
    tokens: list[int] = []
    cached = 0
    try:
        for item in generation:
            if isinstance(item, TokenDelta):
                tokens.append(item.token)
            elif isinstance(item, Finished):
                cached = item.cached_tokens
    except EngineError as error:
        return {"failed": f"{type(error).__name__}: {error}"}
    return {"tokens": tokens, "cached": cached}


def error_of_a_request(engine: Engine) -> str:
    """Return the name of the error that a new request gets, "" for none."""
    try:
        engine.generate(GenerationRequest(prompt=[9], max_tokens=1)).close()
    except EngineError as error:
        return type(error).__name__
    return ""


def answer(value: object) -> None:
    """Write a line of JSON."""
    print(json.dumps(value), flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], json.loads(sys.argv[2])))
