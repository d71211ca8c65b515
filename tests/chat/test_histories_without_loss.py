"""Whatever a request's history holds is found in the prompt of every family, in order: the real templates, and ours."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from chat_templates import GEMMA_3, qwen_xml
from scripted_engine import HARMONY_TEMPLATE

from mlx_backend.chat.request import ChatRequest
from mlx_backend.commands.render import PromptedModel, TemplateTokenizer
from mlx_backend.demo import MODEL_PATH

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
PLAIN = "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}[assistant]"
OURS = {"Gemma 3": GEMMA_3, "Qwen XML": qwen_xml(), "Harmony": HARMONY_TEMPLATE, "plain": PLAIN}
HISTORIES = 12
NAMES = ("weather", "get-time", "files.read")
TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "description": "Looks.", "parameters": {"type": "object"}},
    }
    for name in NAMES
]


def sources() -> list[Any]:
    """Every template there is."""
    real = sorted([*(DATA / "templates").glob("*.jinja"), *DATA.glob("*.jinja")])
    missing = [
        pytest.param("", id="real", marks=pytest.mark.skip(reason="the families' templates are not here"))
    ]
    shipped = MODEL_PATH / "chat_template.jinja"
    ours = [pytest.param(source, id=name) for name, source in OURS.items()]
    files = [*real, *([shipped] if shipped.exists() else [])]
    return [
        *ours,
        *(pytest.param(file.read_text("utf-8"), id=file.stem) for file in files),
    ] + ([] if real else missing)


class History:
    """A random history of finished turns and an open tool loop; `steps` are the words that have to come out.

    A step is (words, behind): each of the words stands behind the one before, and the first behind those of `behind`.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.messages: list[dict[str, Any]] = []
        self.steps: list[tuple[list[str], int]] = []
        self._count = 0
        if self.random.random() < 0.5:
            self.messages.append({"role": "system", "content": "Be brief."})
        for _ in range(self.random.randint(1, 3)):
            self._question()
            for _ in range(self.random.randint(0, 2)):
                self._round()
            self._say("assistant")
        self._question()
        for _ in range(self.random.randint(1, 2)):
            self._round()

    def word(self) -> str:
        """A word that stands nowhere else."""
        self._count += 1
        return f"w{self._count:03d}{self.random.choice('abcdef')}"

    def _say(self, role: str) -> None:
        word = self.word()
        self.messages.append({"role": role, "content": word})
        self.steps.append(([word], len(self.steps) - 1))

    def _question(self) -> None:
        self._say("user")

    def _round(self) -> None:
        """One to three calls and their results: in any order, with ids, without, or all with the same."""
        ids = self.random.choice(["own", "same", "none", "odd"])
        calls: list[dict[str, Any]] = []
        results: list[tuple[dict[str, Any], str]] = []
        content = self.word() if self.random.random() < 0.4 else ""
        before = len(self.steps) - 1
        if content:
            self.steps.append(([content], before))
            before += 1
        of_calls = []
        for at in range(self.random.randint(1, 3)):
            name = self.random.choice(NAMES)
            arguments, words = self._arguments()
            written = json.dumps(arguments) if self.random.random() < 0.7 else arguments
            identifier = {"own": f"call_{self._count}_{at}", "same": "call", "none": None, "odd": 7}[ids]
            call: dict[str, Any] = {"type": "function", "function": {"name": name, "arguments": written}}
            answer: dict[str, Any] = {"role": "tool", "content": self.word()}
            if identifier is not None:
                call["id"] = answer["tool_call_id"] = identifier
            calls.append(call)
            results.append((answer, answer["content"]))
            self.steps.append((words, before))
            of_calls.append(len(self.steps) - 1)
        self.messages.append({"role": "assistant", "content": content or None, "tool_calls": calls})
        if ids == "own":
            shuffled = self.random.sample(results, len(results))
            self.messages += [answer for answer, _ in shuffled]
        else:
            self.messages += [answer for answer, _ in results]
        for (_, text), call_step in zip(results, of_calls, strict=True):
            self.steps.append(([text], call_step))
        if ids == "own" and self.random.random() < 0.3:
            orphan = self.word()
            self.messages.append(
                {"role": "tool", "tool_call_id": f"lost_{orphan}", "name": "weather", "content": orphan}
            )
            self.steps.append(([orphan], len(self.steps) - 1))

    def _arguments(self) -> tuple[dict[str, Any], list[str]]:
        words = [self.word() for _ in range(self.random.randint(0, 4))]
        shapes: list[Any] = [
            {f"k{at}": word for at, word in enumerate(words)},
            {"list": words},
            {"deep": {"in": [{"k": word} for word in words]}},
            {"mixed": words, "number": 3, "nothing": None, "yes": True, "empty": {}},
        ]
        return self.random.choice(shapes), words


@pytest.mark.parametrize("source", sources())
def test_everything_of_a_history_is_in_the_prompt_and_in_order(source: str) -> None:
    model = PromptedModel.of(TemplateTokenizer(source), 1 << 30)
    for seed in range(HISTORIES):
        history = History(seed)
        request = ChatRequest(messages=history.messages, tools=TOOLS)
        built = model.prompts.prompt(request, model.prompts.conversation(request))
        prompt = model.tokenizer.decode(built.tokens)
        ends: list[int] = []
        for words, behind in history.steps:
            at = ends[behind] if behind >= 0 else 0
            for word in words:
                found = prompt.find(word, at)
                where = f"{word} of seed {seed} is {'not in its place' if word in prompt else 'missing'} in\n{prompt}"
                assert found >= 0, where
                assert prompt.count(word) == 1, f"{word} of seed {seed} comes twice in\n{prompt}"
                at = found + len(word)
            ends.append(at)


UNUSUAL = [
    ({"text": 'quotes " and \\ and <tags> & ünïcödé 東京 🎉'}, ["ünïcödé", "東京"]),
    ({"lines": "one\n\ntwo\n"}, ["one", "two"]),
    ({"number": 12345678901234567890, "float": 1.5}, ["12345678901234567890", "1.5"]),
    ({"城市": "巴黎"}, ["城市", "巴黎"]),
    ({}, []),
]


@pytest.mark.parametrize("source", sources())
@pytest.mark.parametrize(("arguments", "words"), UNUSUAL, ids=range(len(UNUSUAL)))
def test_unusual_arguments_and_results_keep_their_characters(
    source: str, arguments: dict[str, Any], words: list[str]
) -> None:
    model = PromptedModel.of(TemplateTokenizer(source), 1 << 30)
    written = json.dumps(arguments, ensure_ascii=False)
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "Question?"},
        {
            "role": "assistant",
            "tool_calls": [{"id": "c1", "function": {"name": "weather", "arguments": written}}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": f"result: {written}"},
    ]
    request = ChatRequest(messages=messages, tools=TOOLS)
    prompt = model.tokenizer.decode(model.prompts.prompt(request, model.prompts.conversation(request)).tokens)
    behind = prompt.partition("Question?")[2]
    call, found, result = behind.partition("result: ")
    assert found, prompt
    for part in (call, result):
        for word in words:
            escaped = json.dumps(word)[1:-1]
            assert word in part or escaped in part, f"{word} is missing in {part}"


@pytest.mark.parametrize("source", sources())
@pytest.mark.parametrize(
    "rest", [{}, {"description": None}, {"parameters": {}}], ids=["", "no words", "no schema"]
)
def test_a_tool_of_which_little_more_than_the_name_is_given_is_told(
    source: str, rest: dict[str, Any]
) -> None:
    model = PromptedModel.of(TemplateTokenizer(source), 1 << 30)
    tools = [{"type": "function", "function": {"name": "current_time", **rest}}]
    request = ChatRequest(messages=[{"role": "user", "content": "Question?"}], tools=tools)
    prompt = model.tokenizer.decode(model.prompts.prompt(request, model.prompts.conversation(request)).tokens)
    assert "current_time" in prompt
