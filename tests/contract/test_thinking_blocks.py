"""Budgets of models that reason in blocks: random weights and a tokenizer like Qwen's, behind the real server."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from engine_models import write_qwen, write_tokenizer
from running_server import running
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from mlx_backend.engine.mlx import load_engine

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from running_server import RunningServer

_CHAT = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
)
_OFF = "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n"
TEMPLATES = {
    "always": _CHAT + "<think>\n{% endif %}",  # DeepSeek-R1
    "switched": _CHAT + _OFF + "{% else %}<think>\n{% endif %}{% endif %}",  # GLM
}
ROOM = 40


def tokenizer() -> Tokenizer:
    tokens = Tokenizer(models.BPE())
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens.decoder = decoders.ByteLevel()
    control = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=control, initial_alphabet=alphabet)
    tokens.train_from_iterator(["fox\n\nfox\n</think>\n\n"] * 4, trainer)  # so that `\n\n` is one token
    tokens.add_tokens([AddedToken("<think>", special=False), AddedToken("</think>", special=False)])
    return tokens


@contextmanager
def serving(folder: Path, template: str) -> Iterator[RunningServer]:
    write_tokenizer(write_qwen(folder), tokenizer(), eos_token="<|im_end|>")
    (folder / "chat_template.jinja").write_text(template)
    with load_engine(folder) as engine, running(engine) as server:
        yield server


@pytest.fixture(scope="module", params=TEMPLATES)
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    with serving(tmp_path_factory.mktemp("model"), TEMPLATES[request.param]) as server:
        yield server


@pytest.fixture(scope="module")
def letters(server: RunningServer) -> dict[str, Any]:
    """A bias under which the model says nothing but letters: each a token, and never what closes a block."""
    tokens = server.call("/v1/tokenize", {"prompt": "abcdegjlmpqrsuvwyz"})[1]["tokens"]
    return {"max_tokens": ROOM, "logit_bias": {str(token): 100 for token in tokens}}


def test_without_a_budget_it_reasons_until_max_tokens(server: RunningServer, letters: dict[str, Any]) -> None:
    reply = server.chat(**letters)
    [choice] = reply["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("length", "")
    assert len(choice["message"]["reasoning_content"]) == ROOM
    assert reply["usage"]["completion_tokens_details"]["reasoning_tokens"] == ROOM


@pytest.mark.parametrize("tokens", [0, 1, 2, 7, ROOM - 3])
@pytest.mark.parametrize("by", ["budget", "reserve"])
def test_the_block_is_closed_after_the_budget_whatever_the_bias(
    server: RunningServer, letters: dict[str, Any], tokens: int, by: str
) -> None:
    limit: dict[str, Any] = (
        {"thinking_budget": tokens} if by == "budget" else {"answer_reserve": max(1, ROOM - 3 - tokens)}
    )
    tokens = min(tokens, ROOM - 4) if by == "reserve" else tokens
    free = server.chat(**letters)["choices"][0]["message"]["reasoning_content"]
    reply = server.chat(**letters, **limit)
    [choice], usage = reply["choices"], reply["usage"]
    assert usage["completion_tokens_details"]["reasoning_tokens"] == tokens
    assert (usage["completion_tokens"], choice["finish_reason"]) == (ROOM, "length")
    assert (choice["message"].get("reasoning_content") or "") == free[:tokens]
    assert len(choice["message"]["content"]) == ROOM - tokens - 3, "a line's end, the closing, an empty line"
    raw = server.chat(**letters, **limit, reasoning_format="raw")["choices"][0]["message"]["content"]
    assert raw == f"{free[:tokens]}\n</think>\n\n{choice['message']['content']}"


@pytest.mark.parametrize("reserve", [ROOM, 10 * ROOM])
def test_a_reserve_larger_than_the_reply_leaves_no_reasoning(
    server: RunningServer, letters: dict[str, Any], reserve: int
) -> None:
    message = server.chat(**letters, answer_reserve=reserve)["choices"][0]["message"]
    assert not message.get("reasoning_content")
    assert len(message["content"]) == ROOM - 3


def test_effort_none_means_no_reasoning_whether_the_template_knows_it_or_not(
    server: RunningServer, letters: dict[str, Any]
) -> None:
    reply = server.chat(**letters, reasoning_effort="none")
    assert reply["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0
    assert len(reply["choices"][0]["message"]["content"]) >= ROOM - 3


@pytest.mark.parametrize("fields", [{"thinking_budget": 3}, {"reasoning_effort": "none"}], ids=str)
def test_the_answer_after_it_matches_its_format(
    server: RunningServer, letters: dict[str, Any], fields: dict[str, Any]
) -> None:
    [choice] = server.chat(**letters, guided_choice=["yes", "no"], **fields)["choices"]
    assert choice["message"]["content"] in ("yes", "no")
    assert choice["finish_reason"] == "stop"
