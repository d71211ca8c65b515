"""Replies of the model, as the evaluation gets them: greedily, many at once, with or without reasoning.

Knows the model and its tokens, and nothing of dialogues.
"""

from collections.abc import Callable
from typing import Any, Final

import mlx.core as mx
import numpy as np
from mlx_lm.generate import BatchGenerator

from training.chat import forward

Generate = Callable[[list[list[int]]], list[list[int]]]
Foresee = Callable[[list[list[int]], list[list[int]]], list[bool]]
MAX_REPLY_TOKENS: Final = 600


def batched(model: Any, tokenizer: Any, streams: int = 24) -> Generate:
    """Return a function that generates replies greedily, `streams` at a time, each with its end token."""

    def generate(prompts: list[list[int]]) -> list[list[int]]:
        generator = BatchGenerator(
            model,
            max_tokens=MAX_REPLY_TOKENS,
            stop_tokens=[[token] for token in tokenizer.eos_token_ids],
            completion_batch_size=streams,
        )
        uids = generator.insert(prompts)
        out: dict[int, list[int]] = {uid: [] for uid in uids}
        unfinished = set(uids)
        while unfinished:
            for response in generator.next_generated():
                out[response.uid].append(response.token)
                if response.finish_reason is not None:
                    unfinished.discard(response.uid)
        generator.close()
        return [out[uid] for uid in uids]

    return generate


def foreseen(model: Any, window: int, tokens: int = 8_192) -> Foresee:
    """Return a function that checks replies in passes of about `tokens` tokens; `window` is the sliding layers'."""

    def foresee(prompts: list[list[int]], wanted: list[list[int]]) -> list[bool]:
        rows = [(prompt + reply, len(reply)) for prompt, reply in zip(prompts, wanted, strict=True)]
        order = sorted(range(len(rows)), key=lambda i: len(rows[i][0]))
        out = [False] * len(rows)
        while order:
            length = -(-len(rows[order[0]][0]) // window) * window
            part = [i for i in order if len(rows[i][0]) <= length][: max(1, tokens // length)]
            order = [i for i in order if i not in part]
            ids = np.zeros((len(part), length), np.int32)
            for row, i in enumerate(part):
                ids[row, : len(rows[i][0])] = rows[i][0]
            states = forward.hidden_states(model, mx.array(ids))
            for row, i in enumerate(part):
                (end, count), whole = (len(rows[i][0]), rows[i][1]), rows[i][0]
                choices = mx.argmax(model.lm_head(states[row, end - count - 1 : end - 1]), axis=-1)
                out[i] = choices.tolist() == whole[end - count :]
        return out

    return foresee


def unreasoned(model: Any, tokenizer: Any, generate: Generate) -> Generate:
    """Return a function that generates replies as a server does at effort `none`: it chooses of two channels."""
    channel, *words = tokenizer.convert_tokens_to_ids(["<|channel|>", "final", "commentary"])

    def opening(prompt: list[int]) -> list[int]:
        logits = model(mx.array([[*prompt, channel]]))[0, -1]
        scores = np.array(logits[mx.array(words)])
        return [channel, words[int(scores.argmax())]]

    def generate_directly(prompts: list[list[int]]) -> list[list[int]]:
        openings = [opening(prompt) for prompt in prompts]
        bodies = generate([prompt + begun for prompt, begun in zip(prompts, openings, strict=True)])
        return [begun + body for begun, body in zip(openings, bodies, strict=True)]

    return generate_directly
