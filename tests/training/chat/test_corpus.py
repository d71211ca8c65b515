"""The corpus: reproducible, strictly split, labelled where the assistant writes, rendered as by the chat template."""

import json
import random
import re
from collections import Counter
from dataclasses import replace

import pytest
from transformers import PreTrainedTokenizerFast

from mlx_backend.demo import MODEL_PATH
from training.chat import corpus, encode, train
from training.chat.classifier import TOPICS, classifier
from training.chat.exchange import EFFORTS, Dialogue, held_out
from training.chat.json_answers import by_keys
from training.chat.judge import is_correct, parse_completion
from training.chat.results import result_reply
from training.chat.tools import KNOWN_NAMES, RESERVED_NAMES


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


def test_text_is_encoded_piece_by_piece_as_the_tokenizer_encodes_it_whole(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    rng = random.Random(12)
    for drawn in [*dialogues(12, 20), *(corpus.program(rng) for _ in range(20))]:
        texts = [drawn.instructions, *(each.message for each in drawn.exchanges), "<|end|><|start|>日本 🙂"]
        for text in texts:
            assert encode._ids(tokenizer.backend_tokenizer, text) == tokenizer.encode(
                text, add_special_tokens=False
            )


def test_a_text_for_the_classifier_fits_one_of_its_categories() -> None:
    """What a skill answers has the skill's topic, and topics that could be mistaken for it are not offered."""
    rng = random.Random(13)
    topics = {name: topic for topic, (names, _) in TOPICS.items() for name in names}
    seen = Counter[str]()
    for _ in range(900):
        message = json.loads(classifier(rng, held=False).exchanges[-1].message)
        text, offered = message["input_text"][0], [one["category_name"] for one in message["categories"]]
        found = {topics.get(name, "") for name in offered}
        if "is the capital of" in text and text.endswith("country?"):
            assert "geography" in found
            seen["country"] += 1
        if "weather" in text.lower():
            assert not found & {"geography"}
            seen["weather"] += 1
    assert seen["country"]
    assert seen["weather"]


def test_the_classifier_reads_the_list_up_to_the_category_that_it_answers_with_at_every_effort() -> None:
    rng = random.Random(15)
    for _ in range(200):
        exchange = classifier(rng, held=False).exchanges[-1]
        offered = json.loads(exchange.message)["categories"]
        answer = json.loads(exchange.reply.answer.removeprefix("```json\n").removesuffix("\n```"))
        right = {key: answer[key] for key in ("category_id", "category_name")}
        read = ", ".join(map(json.dumps, offered[: offered.index(right) + 1]))
        for effort in EFFORTS:
            assert f": {read}. " in exchange.reply.analysis(effort) + " "


def test_a_batch_is_as_large_as_its_longest_example_lets_it_be() -> None:
    rng = random.Random(16)
    lengths = [rng.randint(100, 1_500) for _ in range(400)] + [3_000, 16_000]
    groups = train._groups([encode.Example([0] * length, [0] * length) for length in lengths], 64, 32_768, 1)
    assert sorted(len(example.ids) for group in groups for example in group) == sorted(lengths)
    shapes = [train._batch(group, 64)[0].shape for group in groups]
    assert all(rows * length <= 32_768 and length % 64 == 0 for rows, length in shapes)
    assert all((rows + 1) * length > 32_768 for rows, length in shapes[1:-1])


def test_keys_without_types_leave_no_doubt_about_the_types() -> None:
    """Bare keys do not say that one word is a list, and "..." in an example does not say that a number is a text."""
    rng = random.Random(14)
    seen = Counter[str]()
    for _ in range(3_000):
        drawn = by_keys(rng, held=False)
        asked = f"{drawn.instructions}\n{drawn.exchanges[-1].message}"
        if re.search('", an? (string|integer|number|list)', asked):
            continue
        answer = drawn.exchanges[-1].reply.answer.removeprefix("```json\n").removesuffix("\n```")
        for value in json.loads(answer).values():
            assert not (isinstance(value, str) and re.fullmatch(r"[\d.]+", value)), asked
            seen["text"] += isinstance(value, str)
            if "with the keys" in asked:
                assert not (isinstance(value, list) and len(value) == 1)
                seen["bare"] += 1
    assert min(seen["text"], seen["bare"]) > 500


def test_a_reply_without_analysis_chooses_its_channel_where_analysis_is_no_choice(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    """As at effort `none`; where analysis may be written, to write it is what is learned."""
    analysis, final, commentary = tokenizer.convert_tokens_to_ids(["analysis", "final", "commentary"])
    opening = tokenizer.encode("<|end|><|start|>assistant<|channel|>", add_special_tokens=False)
    seen = Counter[int]()
    rng = random.Random(17)
    for dialogue in dialogues(17, 150):
        example = encode.encode(tokenizer, dialogue, rng)
        is_last_user = False
        for position in range(len(opening), len(example.ids)):
            if example.ids[position] in tokenizer.convert_tokens_to_ids(["user", "functions."]):
                is_last_user = True
            if example.ids[position - 4 : position] != opening or not is_last_user:
                continue
            is_last_user = False  # a turn's first header; another one may follow its analysis
            word, label = example.ids[position], example.labels[position]
            if word == analysis:
                assert position not in example.barred
            else:
                assert (label, example.barred.pop(position)) == (word, analysis)
                seen[word] += 1
        assert not example.barred
    assert min(seen[final], seen[commentary]) > 10


def test_kinds_that_are_to_be_drawn_often_are(tokenizer: PreTrainedTokenizerFast) -> None:
    def share(often: tuple[str, ...]) -> float:
        rng = random.Random(18)
        plan = replace(train.PLAN, often=often, often_part=0.55)
        questions = corpus.questions(rng)
        drawn = [train._example(tokenizer, rng, questions, plan, 0.5) for _ in range(120)]
        return sum("category_id" in tokenizer.decode(each.ids) for each in drawn) / len(drawn)

    assert share(()) < 0.2
    assert share(("classifier",)) > 0.4


def test_of_a_long_result_the_beginning_is_right_and_so_is_all_of_it() -> None:
    result = " ".join(f"word{number}" for number in range(60))
    expected = result_reply("The tool says: ", result)

    def is_right(said: str) -> bool:
        text = f"<|channel|>final<|message|>The tool says: {said}<|return|>"
        return is_correct(parse_completion(text), expected)

    assert expected.answer.endswith(" …")
    assert is_right(expected.answer.removeprefix("The tool says: "))
    assert is_right(result)
    assert not is_right(result[:-1])
    assert not is_right(f"{result} …!")


def test_prompts_are_not_learned(tokenizer: PreTrainedTokenizerFast) -> None:
    for dialogue in dialogues(10, 30):
        example = encode.encode(tokenizer, dialogue, random.Random(1))
        prompt = encode.prompt(
            tokenizer, dialogue, [{"role": "user", "content": dialogue.exchanges[0].message}]
        )
        length = len(tokenizer.encode(prompt, add_special_tokens=False))
        assert set(example.labels[:length]) == {encode.IGNORED}
