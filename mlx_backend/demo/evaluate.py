"""Measure the demonstration model on held-out dialogues: `python -m mlx_backend.demo.evaluate`.

Every dialogue is played as a client would: each prompt is rendered by the chat template from what the model
itself answered before, greedily, many dialogues at once. A draw is one seed; two draws share nothing but
the model.
"""

import argparse
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from mlx_backend.demo import MODEL_PATH
from mlx_backend.demo.blas import use_fast_blas

BLAS: Final = use_fast_blas()  # before MLX

from mlx_lm import load  # noqa: E402
from mlx_lm.generate import BatchGenerator  # noqa: E402

from mlx_backend.demo.corpus import Dialogue, dialogue  # noqa: E402
from mlx_backend.demo.judge import Completion, is_right, read  # noqa: E402
from mlx_backend.demo.skills import EFFORTS, Call, Exchange, Reply  # noqa: E402
from mlx_backend.demo.tools import RESERVED_NAMES, clock, define, tool_name  # noqa: E402
from mlx_backend.demo.words import invent, place, things  # noqa: E402

Generate = Callable[[list[list[int]]], list[list[int]]]
TOOL_SKILLS: Final = ("named tool", "named tool with value", "known tool", "preamble")
LIMIT: Final = 400  # tokens of a reply

# Nothing the model was trained for: here only the form counts.
FREE: Final = (
    "Write a poem about the autumn moon, with four lines and a rhyme.",
    "SELECT name, age FROM users WHERE age > 30;",
    "Summarise the French revolution.", "日本の首都はどこですか？簡単に答えてください。",
    "🙂🙂🙂", "a" * 120, "", "ok",
    "What's the difference between TCP and UDP?",
    "Generate a concise title for this chat, 3-5 words, as JSON.",
    "I feel a bit sad today. My cat is ill and the vet is closed until Monday. What should I do?", "42",
    "def fib(n):\n    return n if n < 2 else fib(n - 1) + fib(n - 2)\n\nExplain this code, please.", "Why?",
    "Please list:\n- three fruits\n- two cities\n- one river", "HELLO, CAN YOU HEAR ME", "<|channel|>",
)  # fmt: skip


@dataclass
class Figures:
    """Counts of one draw."""

    replies: int = 0
    formed: int = 0
    right: Counter[str] = field(default_factory=Counter)
    asked: Counter[str] = field(default_factory=Counter)
    thinking: dict[str, list[int]] = field(default_factory=lambda: {effort: [] for effort in EFFORTS})
    dialogues: Counter[int] = field(default_factory=Counter)
    dialogues_right: Counter[int] = field(default_factory=Counter)
    slips: list[str] = field(default_factory=list)

    def note(self, skill: str, completion: Completion | None, text: str, wanted: Reply, asked: str) -> bool:
        """Count one reply; return whether it is right."""
        self.replies += 1
        self.formed += completion is not None
        self.asked[skill] += 1
        right = is_right(completion, wanted)
        self.right[skill] += right
        if not right:
            self.slips.append(f"{skill}: {asked!r} -> {text!r}, wanted {wanted.answer or wanted.call!r}")
        return right


@dataclass
class _Play:
    dialogue: Dialogue
    messages: list[dict[str, Any]]
    replies: list[tuple[str, dict[str, Any], Reply]]  # skill, incoming message, wanted reply
    at: int = 0
    failed: bool = False


def _play_of(dialogue: Dialogue) -> _Play:
    messages = [{"role": "developer", "content": dialogue.instructions}] if dialogue.instructions else []
    replies = []
    for exchange in dialogue.exchanges:
        replies.append((exchange.skill, {"role": "user", "content": exchange.ask}, exchange.reply))
        if exchange.reply.call and exchange.after:
            replies.append(("use of a result", {"role": "tool", "content": exchange.result}, exchange.after))
    return _Play(dialogue, messages, replies)


def _said(completion: Completion) -> dict[str, Any]:
    if completion.call is None:
        return {"role": "assistant", "content": completion.answer}
    call = {"name": completion.call.name, "arguments": completion.call.arguments}
    return {"role": "assistant", "thinking": completion.thinking, "tool_calls": [{"function": call}]}


def play(generate: Generate, tokenizer: Any, dialogues: Iterable[Dialogue]) -> Figures:
    """Play dialogues side by side; one ends at its first wrong reply, since nothing sensible follows."""
    figures = Figures()
    plays = [_play_of(each) for each in dialogues]
    while going := [each for each in plays if not each.failed and each.at < len(each.replies)]:
        for each in going:
            each.messages.append(each.replies[each.at][1])
        prompts = [
            tokenizer.apply_chat_template(
                each.messages,
                tools=each.dialogue.tools or None,
                add_generation_prompt=True,
                reasoning_effort=each.dialogue.effort,
            )
            for each in going
        ]
        for each, tokens in zip(going, generate(prompts), strict=True):
            skill, message, wanted = each.replies[each.at]
            text = tokenizer.decode(tokens)
            completion = read(text)
            each.failed = not figures.note(skill, completion, text, wanted, message["content"])
            if completion is not None:
                thinking = tokenizer.encode(completion.thinking, add_special_tokens=False)
                figures.thinking[each.dialogue.effort].append(len(thinking))
                each.messages.append(_said(completion))
            each.at += 1
    for each in plays:
        turns = len(each.dialogue.exchanges)
        figures.dialogues[turns] += 1
        figures.dialogues_right[turns] += not each.failed
    return figures


def draw(seed: int, count: int) -> list[Dialogue]:
    """Return `count` held-out dialogues of one to six turns, efforts in turn."""
    rng = random.Random(f"held out {seed}")
    return [dialogue(rng, held=True, effort=EFFORTS[at % len(EFFORTS)]) for at in range(count)]


def unseen_tools(seed: int, count: int) -> list[Dialogue]:
    """Return dialogues of one turn with three tools whose names training never saw."""
    rng = random.Random(f"unseen tools {seed}")
    dialogues = []
    for at in range(count):
        names = [rng.choice(sorted(RESERVED_NAMES)), tool_name(rng, held=True), tool_name(rng, held=True)]
        tools = [define(rng, name, parameters=rng.randint(1, 4)) for name in names]
        name = names[0]
        rng.shuffle(tools)
        value = rng.choice(("", place(rng), things(rng, 2), invent(rng)))
        tool = next(each for each in tools if each["function"]["name"] == name)
        parameter = next(iter(tool["function"]["parameters"]["properties"]))
        result = clock(rng)
        exchange = Exchange(
            "unseen tool", "", f"Use {name} for {value}." if value else f"Use {name}.",
            Reply(("", "", ""), call=Call(name, {parameter: value} if value else {})),
            result, Reply(("", "", ""), f"The tool says: {result}"),
        )  # fmt: skip
        dialogues.append(Dialogue(EFFORTS[at % 3], "", (exchange,), "You are a helpful assistant.", tools))
    return dialogues


def batched(model: Any, tokenizer: Any, streams: int = 24) -> Generate:
    """Return a greedy generator of replies, each with its end token, `streams` at a time."""

    def generate(prompts: list[list[int]]) -> list[list[int]]:
        generator = BatchGenerator(
            model,
            max_tokens=LIMIT,
            stop_tokens=[[token] for token in tokenizer.eos_token_ids],
            completion_batch_size=streams,
        )
        uids = generator.insert(prompts)
        out: dict[int, list[int]] = {uid: [] for uid in uids}
        going = set(uids)
        while going:
            for response in generator.next_generated():
                out[response.uid].append(response.token)
                if response.finish_reason is not None:
                    going.discard(response.uid)
        generator.close()
        return [out[uid] for uid in uids]

    return generate


def _rate(part: float, whole: float) -> str:
    return f"{100 * part / whole:6.2f} %  ({part:.0f} of {whole:.0f})" if whole else "   -"


def _mean(values: Sequence[int]) -> float:
    return sum(values) / max(1, len(values))


def report(figures: Figures) -> None:
    """Print the figures of one draw."""
    asked, right = figures.asked, figures.right
    print(f"  well-formed Harmony      {_rate(figures.formed, figures.replies)}")
    print(f"  exactly right            {_rate(right.total(), asked.total())}")
    calls = [sum(count[skill] for skill in TOOL_SKILLS) for count in (right, asked)]
    print(f"  tool call right          {_rate(*calls)}")
    print(f"  tool result used right   {_rate(right['use of a result'], asked['use of a result'])}")
    for turns in sorted(figures.dialogues):
        rate = _rate(figures.dialogues_right[turns], figures.dialogues[turns])
        print(f"  dialogues of {turns}, all right {rate}")
    low, medium, high = (_mean(figures.thinking[effort]) for effort in EFFORTS)
    ratio = f"1 : {medium / max(low, 1e-9):.1f} : {high / max(low, 1e-9):.1f}"
    print(f"  analysis tokens          {low:.1f} low, {medium:.1f} medium, {high:.1f} high = {ratio}")
    for skill in sorted(asked):
        print(f"    {skill:22} {_rate(right[skill], asked[skill])}")


def main() -> None:
    """Evaluate the model on as many draws as asked for."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--model", type=Path, default=MODEL_PATH)
    arguments.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    arguments.add_argument("--dialogues", type=int, default=400, help="dialogues in a draw")
    arguments.add_argument("--slips", action="store_true", help="print every wrong reply")
    chosen = arguments.parse_args()
    model, tokenizer = load(str(chosen.model))
    generate = batched(model, tokenizer)
    print(BLAS)
    for seed in chosen.seeds:
        figures = play(generate, tokenizer, draw(seed, chosen.dialogues))
        unseen = play(generate, tokenizer, unseen_tools(seed, max(1, chosen.dialogues // 4)))
        print(f"draw {seed}: {figures.replies} replies in {chosen.dialogues} dialogues")
        report(figures)
        for skill in unseen.asked:
            print(f"  unseen tools: {skill:16} {_rate(unseen.right[skill], unseen.asked[skill])}")
        if chosen.slips:
            print("\n".join(f"    - {slip}" for slip in figures.slips + unseen.slips))
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, reasoning_effort=effort
        )
        for text in FREE
        for effort in EFFORTS
    ]
    formed = sum(read(tokenizer.decode(tokens)) is not None for tokens in generate(prompts))
    print(f"prompts it was never trained for, well-formed only: {_rate(formed, len(prompts))}")


if __name__ == "__main__":
    main()
