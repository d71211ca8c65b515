"""One rank of a model that several processes share, driven by lines of JSON: run by tests, once for each rank.

Rank 0 says whether it has loaded, and then answers every line it reads with one. The others only follow.
"""

import json
import logging
import sys
from typing import Any

from mlx_backend.chat.prompt import Prompt
from mlx_backend.constraints.reasoning_budget import Budgets
from mlx_backend.conversation.dialects import DIALECTS
from mlx_backend.conversation.events import Channel
from mlx_backend.engine.base import Engine, Finished, Generation, GenerationRequest, Sampling, TokenDelta
from mlx_backend.engine.mlx import follow_engine, load_engine, rank
from mlx_backend.errors import EngineError


def main(model: str, options: dict[str, Any]) -> int:
    """Follow, or serve until the input ends."""
    logging.basicConfig(level="INFO", format="%(message)s", stream=sys.stderr)
    try:
        if rank():
            return follow_engine(model, **options)
        engine = load_engine(model, **options)
    except EngineError as error:
        answer({"failed": str(error)})
        return 1
    answer("ready")
    begun: list[Generation] = []
    for line in sys.stdin:
        match json.loads(line):
            case ["say", *requests]:
                generations = [engine.generate(read(engine, request)) for request in requests]
                answer([rest(generation) for generation in generations])
            case ["begin", *requests]:
                begun = [engine.generate(read(engine, request)) for request in requests]
                for generation in begun:
                    while not isinstance(generation.next(), TokenDelta):
                        pass
                answer("begun")
            case ["leave"]:
                for generation in begun:
                    generation.close()
                answer("left")
            case ["finish"]:
                answer([rest(generation) for generation in begun])
            case ["status"]:
                answer([engine.status().state, engine.status().detail, after(engine)])
    engine.stop()
    return 0


def read(engine: Engine, request: dict[str, Any]) -> GenerationRequest:
    """Read a request. With `thinking` its reply is reasoning from its first token, and that many tokens at most."""
    thinking = request.get("thinking")
    asked = {key: value for key, value in request.items() if key != "thinking"}
    constraint = None
    if thinking is not None:
        prompt = Prompt(tokens=tuple(asked["prompt"]), opens_in=Channel.ANALYSIS)
        budgets = Budgets(engine.tokenizer, DIALECTS["harmony"])
        constraint = budgets.begin(prompt, room=asked["max_tokens"], tokens=thinking)
    sampling = Sampling(**asked.get("sampling", {}))
    return GenerationRequest(**{**asked, "sampling": sampling, "constraint": constraint})


def rest(generation: Generation) -> Any:
    """Give the tokens that are left, and how many of the prompt were known; or the error."""
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


def after(engine: Engine) -> str:
    """Say how a new request is received."""
    try:
        engine.generate(GenerationRequest(prompt=[9], max_tokens=1)).close()
    except EngineError as error:
        return type(error).__name__
    return ""


def answer(words: object) -> None:
    """Write a line."""
    print(json.dumps(words), flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], json.loads(sys.argv[2])))
