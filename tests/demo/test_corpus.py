"""The corpus: reproducible, strictly split, labelled where the assistant writes, rendered as by the chat template."""

import random

import pytest
from transformers import PreTrainedTokenizerFast

from mlx_backend.demo import MODEL_PATH, corpus, encode
from mlx_backend.demo.exchange import EFFORTS, Dialogue, held_out
from mlx_backend.demo.judge import is_correct, parse_completion
from mlx_backend.demo.tools import KNOWN_NAMES, RESERVED_NAMES


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(MODEL_PATH)


def dialogues(seed: int, count: int, held: bool = False) -> list[Dialogue]:
    rng = random.Random(seed)
    return [corpus.dialogue(rng, held=held) for _ in range(count)]


def test_the_same_seed_gives_the_same_dialogues() -> None:
    assert dialogues(3, 40) == dialogues(3, 40)
    assert dialogues(3, 40) != dialogues(4, 40)


def test_training_and_evaluation_share_no_turn_and_no_tool_name() -> None:
    def keys(held: bool) -> set[str]:
        exchanges = [each for one in dialogues(5, 600, held) for each in one.exchanges]
        return {f"{each.skill}:{each.split_key}" for each in exchanges if each.split_key}

    def names(held: bool) -> set[str]:
        return {
            tool["function"]["name"] for one in dialogues(6, 600, held) for tool in one.tools
        } - KNOWN_NAMES

    assert keys(True).isdisjoint(keys(False))
    assert names(True).isdisjoint(names(False))
    assert not (names(False) | names(True)) & RESERVED_NAMES
    assert all(held_out(key) for key in keys(True))


def test_more_effort_continues_the_same_analysis() -> None:
    for dialogue in dialogues(7, 60):
        for exchange in dialogue.exchanges:
            low, medium, high = (exchange.reply.analysis(effort) for effort in EFFORTS)
            assert medium.startswith(low)
            assert high.startswith(medium)


def test_what_is_learned_is_well_formed_correct_and_ends_the_turn(tokenizer: PreTrainedTokenizerFast) -> None:
    for dialogue in dialogues(8, 60):
        example = encode.encode(tokenizer, dialogue, random.Random(1))
        last = dialogue.exchanges[-1]
        expected = last.final_reply if last.reply.call and last.final_reply else last.reply
        ids = [
            label if label != encode.IGNORED else token
            for token, label in zip(example.ids, example.labels, strict=True)
        ]
        text = tokenizer.decode(ids).rpartition("<|start|>user")[2]
        start = text.index("<|end|><|start|>assistant") + len("<|end|><|start|>assistant")
        if last.reply.call and last.final_reply:
            start = text.index("<|start|>assistant", text.index("to=assistant")) + len("<|start|>assistant")
        assert is_correct(parse_completion(text[start:]), expected)


def test_a_history_is_encoded_as_the_template_renders_it(tokenizer: PreTrainedTokenizerFast) -> None:
    seen = 0
    for dialogue in dialogues(9, 200):
        first, *rest = dialogue.exchanges
        if len(rest) != 1 or first.reply.call:
            continue
        messages = [
            {"role": "user", "content": first.message},
            {"role": "assistant", "content": first.reply.answer},
            {"role": "user", "content": rest[0].message},
        ]
        expected = encode.prompt(tokenizer, dialogue, messages)
        texts = {
            tokenizer.decode(encode.encode(tokenizer, dialogue, random.Random(seed)).ids) for seed in range(8)
        }
        seen += any(text.startswith(expected) for text in texts)
        assert any(text.startswith(expected) for text in texts)
    assert seen > 10


def test_prompts_are_not_learned(tokenizer: PreTrainedTokenizerFast) -> None:
    for dialogue in dialogues(10, 30):
        example = encode.encode(tokenizer, dialogue, random.Random(1))
        prompt = encode.prompt(
            tokenizer, dialogue, [{"role": "user", "content": dialogue.exchanges[0].message}]
        )
        length = len(tokenizer.encode(prompt, add_special_tokens=False))
        assert set(example.labels[:length]) == {encode.IGNORED}
