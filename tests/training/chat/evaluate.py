"""Evaluate the demonstration model on held-out dialogues: `python -m training.chat.evaluate`.

Every dialogue is played as a client would play it: each prompt is rendered by the chat template from what the model
itself answered before, greedily, many dialogues at once. A draw is one seed; two draws share nothing but the model.

Where every token of the right reply is the model's first choice after those before it, greedy decoding writes just
that reply: one pass over prompt and reply shows it, and only the other replies are decoded.
"""

import argparse
import functools
import os
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from mlx_backend.demo import MODEL_PATH
from mlx_backend.device.blas import use_fast_blas

BLAS: Final = use_fast_blas() or "MLX's own matrix products"  # before MLX
os.environ.setdefault("MLX_ENABLE_TF32", "0")  # matrix products as exact on a GPU as on a CPU

from mlx_lm import load

from training.chat.corpus import dialogue, long_dialogue, paste, program, single
from training.chat.encode import call_text
from training.chat.exchange import EFFORTS, Call, Dialogue, Exchange, Reply
from training.chat.json_answers import KINDS as JSON_KINDS
from training.chat.judge import Completion, is_correct, parse_completion
from training.chat.programs import KINDS as PROGRAM_KINDS
from training.chat.replies import Foresee, Generate, batched, foreseen, unreasoned
from training.chat.results import random_time, result_reply
from training.chat.skills import SIMPLE_SKILLS
from training.chat.tools import RESERVED_NAMES, call_analyses, define, tool_name
from training.chat.words import invent, place, things

TOOL_SKILLS: Final = ("named tool", "named tool with value", "known tool", "preamble")
CHARACTERS_A_TOKEN: Final = 2.5  # estimate for a long dialogue
LONG_SIZES: Final = (4_000, 8_000, 12_000, 15_000)  # tokens
UNREASONED: Final = "without reasoning"

# The model was trained for none of these; only the form of the reply is judged.
UNTRAINED_PROMPTS: Final = (
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
    """The counts of one draw, by skill, effort or number of turns."""

    replies: int = 0
    well_formed: int = 0
    correct: Counter[str] = field(default_factory=Counter)
    total: Counter[str] = field(default_factory=Counter)
    analysis: dict[str, list[int]] = field(default_factory=lambda: {effort: [] for effort in EFFORTS})
    dialogues: Counter[int] = field(default_factory=Counter)
    dialogues_right: Counter[int] = field(default_factory=Counter)
    mistakes: list[str] = field(default_factory=list)

    def record(
        self, skill: str, completion: Completion | None, text: str, expected: Reply, message: str
    ) -> bool:
        """Count one reply; return whether it is correct."""
        self.replies += 1
        self.well_formed += completion is not None
        self.total[skill] += 1
        correct = is_correct(completion, expected)
        self.correct[skill] += correct
        if not correct:
            self.mistakes.append(
                f"{skill}: {message!r} -> {text!r}, expected {expected.answer or expected.call!r}"
            )
        return correct


@dataclass
class _Playback:
    dialogue: Dialogue
    messages: list[dict[str, Any]]
    replies: list[tuple[str, dict[str, Any], Reply]]  # skill, incoming message, wanted reply
    position: int = 0
    failed: bool = False


def _playback(dialogue: Dialogue) -> _Playback:
    messages = [{"role": "developer", "content": dialogue.instructions}] if dialogue.instructions else []
    messages += dialogue.history
    replies = []
    for exchange in dialogue.exchanges:
        if not exchange.learned:
            answer = {"role": "assistant", "content": exchange.reply.answer}
            messages += [{"role": "user", "content": exchange.message}, answer]
            continue
        replies.append((exchange.skill, {"role": "user", "content": exchange.message}, exchange.reply))
        if exchange.reply.call and exchange.final_reply:
            replies.append(
                ("use of a result", {"role": "tool", "content": exchange.result}, exchange.final_reply)
            )
    return _Playback(dialogue, messages, replies)


def _assistant_message(completion: Completion) -> dict[str, Any]:
    if completion.call is None:
        return {"role": "assistant", "content": completion.answer}
    call = {"name": completion.call.name, "arguments": completion.call.arguments}
    return {"role": "assistant", "thinking": completion.analysis, "tool_calls": [{"function": call}]}


def _expected_text(reply: Reply, effort: str) -> str:
    next_message = "<|end|><|start|>assistant"
    text = f"<|channel|>analysis<|message|>{reply.analysis(effort)}{next_message}"
    if reply.call is None:
        return f"{text}<|channel|>final<|message|>{reply.answer}<|return|>"
    if reply.preamble:
        text += f"<|channel|>commentary<|message|>{reply.preamble}{next_message}"
    return text + "".join(call_text(reply))


def _replies(
    generate: Generate, foresee: Foresee | None, prompts: list[list[int]], wanted: list[list[int]]
) -> list[list[int]]:
    if foresee is None:
        return generate(prompts)
    replies = [
        reply if is_foreseen else None
        for reply, is_foreseen in zip(wanted, foresee(prompts, wanted), strict=True)
    ]
    decoded = iter(
        generate([prompt for prompt, reply in zip(prompts, replies, strict=True) if reply is None])
    )
    return [next(decoded) if reply is None else reply for reply in replies]


def play(
    generate: Generate, tokenizer: Any, dialogues: Iterable[Dialogue], foresee: Foresee | None = None
) -> Figures:
    """Play dialogues in parallel; each ends at its first wrong reply, since nothing sensible can follow.

    `foresee` tells of which prompts the wanted reply is what `generate` would return; it is not asked for those.
    """
    figures = Figures()
    playbacks = [_playback(each) for each in dialogues]
    while unfinished := [each for each in playbacks if not each.failed and each.position < len(each.replies)]:
        for each in unfinished:
            each.messages.append(each.replies[each.position][1])
        prompts = [
            tokenizer.apply_chat_template(
                each.messages,
                tools=each.dialogue.tools or None,
                add_generation_prompt=True,
                reasoning_effort=each.dialogue.effort,
            )
            for each in unfinished
        ]
        wanted = [
            tokenizer.encode(
                _expected_text(each.replies[each.position][2], each.dialogue.effort), add_special_tokens=False
            )
            for each in unfinished
        ]
        replies = _replies(generate, foresee, prompts, wanted)
        for each, tokens in zip(unfinished, replies, strict=True):
            skill, message, expected = each.replies[each.position]
            text = tokenizer.decode(tokens)
            completion = parse_completion(text)
            each.failed = not figures.record(skill, completion, text, expected, message["content"])
            if completion is not None:
                analysis = tokenizer.encode(completion.analysis, add_special_tokens=False)
                figures.analysis[each.dialogue.effort].append(len(analysis))
                each.messages.append(_assistant_message(completion))
            each.position += 1
    for each in playbacks:
        turns = len(each.dialogue.exchanges)
        figures.dialogues[turns] += 1
        figures.dialogues_right[turns] += not each.failed
    return figures


def draw(seed: int, count: int) -> list[Dialogue]:
    """Return `count` held-out dialogues of one to six turns, alternating efforts."""
    return _drawn(dialogue, f"held out {seed}", count)


def draw_questions(seed: int, count: int) -> list[Dialogue]:
    """Return `count` held-out dialogues of one turn for each skill that needs no tools."""
    return [
        each
        for skill, _ in SIMPLE_SKILLS
        for each in _drawn(functools.partial(single, skill=skill), f"questions {seed}", count)
    ]


def draw_programs(seed: int, count: int) -> list[Dialogue]:
    """Return `count` held-out dialogues for each way of asking for JSON and each program, and as many pasted texts."""
    kinds = (*JSON_KINDS[:-1], *PROGRAM_KINDS)
    makers: list[Callable[..., Dialogue]] = [functools.partial(program, make=make) for make, _ in kinds]
    return [each for make in (*makers, paste) for each in _drawn(make, f"programs {seed}", count)]


def draw_long(seed: int, count: int, size: int) -> list[Dialogue]:
    """Return `count` held-out dialogues of about `size` tokens, at most, of which the last turn is judged."""
    characters = int(size * CHARACTERS_A_TOKEN)
    drawn = _drawn(functools.partial(long_dialogue, size=characters), f"long {seed} {size}", count)
    return [replace(each, exchanges=_only_last_learned(each.exchanges)) for each in drawn]


def _only_last_learned(exchanges: tuple[Exchange, ...]) -> tuple[Exchange, ...]:
    told = (
        exchange for exchange in exchanges[:-1] if exchange.reply.call is None
    )  # calls have results of their own
    return (*(replace(exchange, learned=False) for exchange in told), exchanges[-1])


def _drawn(make: Callable[..., Dialogue], seed: str, count: int) -> list[Dialogue]:
    rng = random.Random(seed)
    return [make(rng, held=True, effort=EFFORTS[i % len(EFFORTS)]) for i in range(count)]


def draw_unreasoned(seed: int, count: int) -> list[Dialogue]:
    """Return `count` held-out dialogues and as many with unseen tools, with the prompt of effort `none`."""
    drawn = (*_drawn(dialogue, f"unreasoned {seed}", count), *unseen_tools(seed, count))
    return [replace(each, effort=EFFORTS[0]) for each in drawn]


def _first_type(tool: dict[str, Any]) -> str:
    first: dict[str, str] = next(iter(tool["function"]["parameters"]["properties"].values()))
    return first["type"]


def unseen_tools(seed: int, count: int) -> list[Dialogue]:
    """Return dialogues of one turn with three tools whose names were never in training."""
    rng = random.Random(f"unseen tools {seed}")
    dialogues = []
    for i in range(count):
        names = [rng.choice(sorted(RESERVED_NAMES)), tool_name(rng, held=True), tool_name(rng, held=True)]
        tools = [define(rng, name, parameters=rng.randint(1, 4)) for name in names]
        name = names[0]
        while _first_type(tools[0]) != "string":  # the value is a text
            tools[0] = define(rng, name, parameters=rng.randint(1, 4))
        rng.shuffle(tools)
        value = rng.choice(("", place(rng), things(rng, 2), invent(rng)))
        tool = next(each for each in tools if each["function"]["name"] == name)
        parameter = next(iter(tool["function"]["parameters"]["properties"]))
        result = random_time(rng)
        exchange = Exchange(
            "unseen tool", "", f"Use {name} for {value}." if value else f"Use {name}.",
            Reply(call_analyses(name, parameter, value), call=Call(name, {parameter: value} if value else {})),
            result, result_reply("The tool says: ", result),
        )  # fmt: skip
        dialogues.append(Dialogue(EFFORTS[i % 3], "", (exchange,), "You are a helpful assistant.", tools))
    return dialogues


def _rate(part: float, whole: float) -> str:
    return f"{100 * part / whole:6.2f} %  ({part:.0f} of {whole:.0f})" if whole else "   -"


def _mean(values: Sequence[int]) -> float:
    return sum(values) / max(1, len(values))


def report(figures: Figures) -> None:
    """Print the figures of one draw."""
    total, correct = figures.total, figures.correct
    print(f"  well-formed Harmony      {_rate(figures.well_formed, figures.replies)}")
    print(f"  exactly right            {_rate(correct.total(), total.total())}")
    calls = [sum(count[skill] for skill in TOOL_SKILLS) for count in (correct, total)]
    print(f"  tool call right          {_rate(*calls)}")
    print(f"  tool result used right   {_rate(correct['use of a result'], total['use of a result'])}")
    for turns in sorted(figures.dialogues):
        rate = _rate(figures.dialogues_right[turns], figures.dialogues[turns])
        print(f"  dialogues of {turns}, all right {rate}")
    low, medium, high = (_mean(figures.analysis[effort]) for effort in EFFORTS)
    ratio = f"1 : {medium / max(low, 1e-9):.1f} : {high / max(low, 1e-9):.1f}"
    print(f"  analysis tokens          {low:.1f} low, {medium:.1f} medium, {high:.1f} high = {ratio}")
    for skill in sorted(total):
        print(f"    {skill:22} {_rate(correct[skill], total[skill])}")


def main() -> None:
    """Evaluate the model on each seed's draw."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--model", type=Path, default=MODEL_PATH)
    arguments.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    arguments.add_argument(
        "--dialogues",
        type=int,
        default=400,
        help="dialogues in a draw",
    )
    arguments.add_argument(
        "--long", type=int, default=0, help="dialogues of each long size; slow without a GPU"
    )
    arguments.add_argument("--each", type=int, default=100, help="more for each skill and each program")
    arguments.add_argument("--streams", type=int, default=24, help="replies generated at once")
    arguments.add_argument("--slips", action="store_true", help="print every wrong reply")
    chosen = arguments.parse_args()
    model, tokenizer = load(str(chosen.model))
    generate = batched(model, tokenizer, chosen.streams)
    foresee = foreseen(model, model.args.sliding_window)
    directly = unreasoned(model, tokenizer, generate)
    print(BLAS)
    for seed in chosen.seeds:
        drawn = {
            "dialogues": draw(seed, chosen.dialogues),
            "questions": draw_questions(seed, chosen.each),
            "programs": draw_programs(seed, chosen.each),
            "unseen tools": unseen_tools(seed, 2 * chosen.each),
        }
        for size in LONG_SIZES if chosen.long else ():
            drawn[f"about {size:,} tokens"] = draw_long(seed, chosen.long, size)
        drawn[UNREASONED] = draw_unreasoned(seed, chosen.each)
        for name, dialogues in drawn.items():
            how = (directly, None) if name == UNREASONED else (generate, foresee)
            figures = play(how[0], tokenizer, dialogues, how[1])
            print(f"draw {seed}, {name}: {figures.replies} replies in {len(dialogues)} dialogues", flush=True)
            report(figures)
            if chosen.slips:
                print("\n".join(f"    - {slip}" for slip in figures.mistakes))
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, reasoning_effort=effort
        )
        for text in UNTRAINED_PROMPTS
        for effort in EFFORTS
    ]
    well_formed = sum(parse_completion(tokenizer.decode(tokens)) is not None for tokens in generate(prompts))
    print(f"prompts it was never trained for, well-formed only: {_rate(well_formed, len(prompts))}")


if __name__ == "__main__":
    main()
