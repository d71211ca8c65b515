"""The shipped model: it loads with plain mlx_lm.load and does what its README says, on a small held-out draw."""

import json
import socket
import subprocess
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from training.chat.evaluate import Figures
from training.chat.exchange import EFFORTS
from training.chat.judge import parse_completion
from training.chat.process import ChattingProcess
from training.chat.tokens import SPECIAL, STOPS

from mlx_backend.demo import MODEL_NAME, MODEL_PATH


@pytest.fixture(scope="module")
def loaded() -> Iterator[tuple[Any, Any]]:
    from mlx_lm import load

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("error")
        patch.setattr(socket, "getaddrinfo", lambda *_, **__: pytest.fail("loading uses the network"))
        yield load(str(MODEL_PATH))


@pytest.fixture(scope="module")
def model() -> Iterator[ChattingProcess]:
    process = ChattingProcess()
    yield process
    process.close()


@pytest.fixture(scope="module")
def figures(model: ChattingProcess) -> Figures:
    return model.play(seed=11, count=14)


def test_it_loads_offline_without_warnings_and_with_harmonys_end_tokens(loaded: tuple[Any, Any]) -> None:
    model, tokenizer = loaded
    assert model.model_type == "gpt_oss"
    assert tokenizer.eos_token_ids == {tokenizer.convert_tokens_to_ids(name) for name in STOPS}
    assert MODEL_NAME == "mlx-demo"


def test_every_harmony_marker_is_one_token_and_no_other_text_makes_one(loaded: tuple[Any, Any]) -> None:
    tokenizer = loaded[1]
    for name in SPECIAL:
        assert tokenizer.encode(name, add_special_tokens=False) == [tokenizer.convert_tokens_to_ids(name)]
    config = json.loads((MODEL_PATH / "config.json").read_text(encoding="utf-8"))
    assert max(tokenizer.get_vocab().values()) < config["vocab_size"]


@pytest.mark.parametrize(
    "text", ["Zürich 日本 🙂", "a  b\n\n\tc", "10:00:00 is 2026-11-21", '{"a": "b"} snake_case CamelCase']
)
def test_any_text_survives_the_tokenizer(loaded: tuple[Any, Any], text: str) -> None:
    tokenizer = loaded[1]
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_held_out_dialogues_are_well_formed_and_correct(figures: Figures) -> None:
    assert figures.replies >= 35
    assert figures.well_formed >= 0.97 * figures.replies, figures.mistakes
    assert figures.correct.total() >= 0.95 * figures.replies, figures.mistakes


def test_replies_that_are_foreseen_are_those_that_are_decoded(
    loaded: tuple[Any, Any], model: ChattingProcess, figures: Figures
) -> None:
    faster, decoded = model.play_foreseen(seed=11, count=14)
    assert (faster.correct, faster.total, faster.mistakes) == (
        figures.correct,
        figures.total,
        figures.mistakes,
    )
    assert decoded < 0.3 * faster.replies
    tokenizer = loaded[1]
    wrong = tokenizer.encode("The capital of Italy is Rome.", add_special_tokens=False)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hello!"}], add_generation_prompt=True
    )
    assert model.foresee([prompt, prompt], [model.generate([prompt])[0], wrong]) == [True, False]


def test_more_effort_is_more_analysis(figures: Figures) -> None:
    low, medium, high = (sum(figures.analysis[each]) / len(figures.analysis[each]) for each in EFFORTS)
    assert medium >= 3 * low
    assert high >= 8 * low


def test_an_unseen_tool_is_called_and_its_result_repeated(model: ChattingProcess) -> None:
    figures = model.play_unseen_tools(seed=11, count=6)
    assert figures.correct.total() >= 0.9 * figures.replies, figures.mistakes


def test_without_reasoning_it_calls_a_tool_where_one_is_wanted(model: ChattingProcess) -> None:
    figures = model.play_unreasoned(seed=11, count=3)
    assert figures.well_formed == figures.replies
    assert figures.total["unseen tool"] == 3
    assert figures.correct.total() >= 0.9 * figures.replies, figures.mistakes


def test_more_effort_gives_a_longer_analysis_and_the_same_answer(
    loaded: tuple[Any, Any], model: ChattingProcess
) -> None:
    tokenizer = loaded[1]
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompts = [
        tokenizer.apply_chat_template(question, add_generation_prompt=True, reasoning_effort=effort)
        for effort in EFFORTS
    ]
    completions = [parse_completion(tokenizer.decode(reply)) for reply in model.generate(prompts)]
    low, medium, high = (completion for completion in completions if completion is not None)
    assert {each.answer for each in (low, medium, high)} == {"The capital of France is Paris."}
    assert len(low.analysis) < len(medium.analysis) < len(high.analysis)


def test_its_configuration_is_read_without_a_warning() -> None:
    code = f"from transformers import AutoConfig; AutoConfig.from_pretrained({str(MODEL_PATH)!r})"
    read = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert [line for line in read.stderr.splitlines() if "PyTorch was not found" not in line] == []
