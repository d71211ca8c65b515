"""The engine on MLX: the same tokens alone, in a batch and from cached prefixes; and no request harms another."""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlx_lm
import pytest
from engine_models import write_model
from engine_requests import reply_tokens, together
from tolerances import check_replies

from mlx_backend.demo import MODEL_PATH
from mlx_backend.device import Device
from mlx_backend.engine.base import Finished, GenerationRequest, Progress, Sampling, TokenDelta
from mlx_backend.engine.mlx import load_engine
from mlx_backend.engine.mlx.batch import MLXBatch
from mlx_backend.engine.threaded import Engine
from mlx_backend.errors import EngineError, EngineRefused, EngineStopped
from mlx_backend.models.engine_options import EngineOptions

SOON = 60
QUESTIONS = [
    "What is the capital of France?",
    "What is 3 plus 4?",
    "Count to 12.",
    "Say hello.",
    "Repeat: apple river stone.",
    "What sound does a cow make?",
]


@pytest.fixture(scope="module")
def demo() -> Iterator[Engine]:
    with load_engine(MODEL_PATH) as engine:
        yield engine


@pytest.fixture(scope="module")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that generates nonsense without end, so that a stream can have any length."""
    return write_model(tmp_path_factory.mktemp("random"), eos_token_id=[])


@pytest.fixture(scope="module")
def endless(random_model: Path) -> Iterator[Engine]:
    with load_engine(random_model, cache_bytes=0) as engine:
        yield engine


def request_for(engine: Engine, question: str, **options: Any) -> GenerationRequest:
    text = engine.tokenizer.render([{"role": "user", "content": question}], None, reasoning_effort="low")
    tokens = engine.tokenizer.encode(text, control_tokens=True)
    return GenerationRequest(prompt=tokens, **({"max_tokens": 200} | options))


# -- the same tokens in every way ----------------------------------------------------------------------------


def test_the_engine_generates_what_mlx_lm_generates(demo: Engine) -> None:
    model, tokenizer = mlx_lm.load(str(MODEL_PATH))
    for question in QUESTIONS[:3]:
        request = request_for(demo, question)
        plain = [
            response.token
            for response in mlx_lm.stream_generate(model, tokenizer, list(request.prompt), max_tokens=200)
        ]
        assert reply_tokens(demo, request) == plain


def test_requests_in_a_batch_generate_what_each_would_alone(demo: Engine) -> None:
    requests = [request_for(demo, question) for question in QUESTIONS]
    alone = [reply_tokens(demo, request) for request in requests]
    check_replies(demo, requests, together(demo, requests), alone)


def test_an_answer_ends_with_its_end_token_and_the_text_of_its_marker(demo: Engine) -> None:
    *_, last_token, finished = demo.generate(request_for(demo, QUESTIONS[0]))
    assert isinstance(last_token, TokenDelta)
    assert last_token.text == "<|return|>" == demo.tokenizer.special_tokens[last_token.token]
    assert isinstance(finished, Finished)
    assert finished.reason == "stop"


def test_the_text_of_a_stream_is_the_text_of_its_tokens(demo: Engine) -> None:
    items = [item for item in demo.generate(request_for(demo, QUESTIONS[2])) if isinstance(item, TokenDelta)]
    assert "".join(item.text for item in items) == demo.tokenizer.decode([item.token for item in items])


def test_a_seed_gives_the_same_text_alone_and_among_others(endless: Engine) -> None:
    def seeded(seed: int | None) -> GenerationRequest:
        sampling = Sampling(temperature=1.0, top_p=0.95, top_k=50, min_p=0.01, seed=seed)
        return request_for(endless, "one two", max_tokens=30, sampling=sampling)

    alone = reply_tokens(endless, seeded(7))
    assert reply_tokens(endless, seeded(7)) == alone
    others = [seeded(8), seeded(None), request_for(endless, "three four five", max_tokens=30)]
    first, *rest = together(endless, [seeded(7), *others])
    assert first == alone
    assert alone not in rest


def test_without_a_seed_no_two_answers_are_the_same(endless: Engine) -> None:
    request = request_for(endless, "one two", max_tokens=30, sampling=Sampling(temperature=1.0))
    answers = [*together(endless, [request, request]), reply_tokens(endless, request)]
    assert len({tuple(answer) for answer in answers}) == 3


def test_a_bias_can_force_a_token_and_a_penalty_can_forbid_repeating_it(endless: Engine) -> None:
    word = endless.tokenizer.encode("fox", control_tokens=False)[0]
    forced = Sampling(logit_bias=((word, 100.0),))
    assert set(reply_tokens(endless, request_for(endless, "x", max_tokens=5, sampling=forced))) == {word}
    fresh = Sampling(frequency_penalty=1000.0)
    replies = reply_tokens(endless, request_for(endless, "x", max_tokens=40, sampling=fresh))
    texts = [token for token in replies if token not in endless.tokenizer.special_tokens]
    assert len(set(texts)) == len(texts), "every text token was generated once"


# -- reuse ---------------------------------------------------------------------------------------------------


def chat(engine: Engine, turns: Sequence[str]) -> list[tuple[list[int], int, int]]:
    """Hold a conversation; return each turn's generated tokens, number of cached tokens and length of the prompt."""
    messages: list[dict[str, str]] = []
    replies = []
    for turn in turns:
        messages.append({"role": "user", "content": turn})
        history = engine.tokenizer.render(messages, None, add_generation_prompt=False)
        prompt = engine.tokenizer.encode(engine.tokenizer.render(messages, None), control_tokens=True)
        checkpoint = len(engine.tokenizer.encode(history, control_tokens=True))
        *items, last = engine.generate(
            GenerationRequest(prompt=prompt, max_tokens=200, checkpoints=(10, checkpoint))
        )
        assert isinstance(last, Finished)
        tokens = [item.token for item in items if isinstance(item, TokenDelta)]
        replies.append((tokens, last.cached_tokens, last.prompt_tokens))
        answer = engine.tokenizer.decode(tokens).rpartition("<|message|>")[2].removesuffix("<|return|>")
        messages.append({"role": "assistant", "content": answer})
    return replies


def test_a_conversation_from_cached_prefixes_is_word_for_word_the_one_from_none() -> None:
    turns = ["My name is Ada.", "What is the capital of France?", "What is my name?"]
    with load_engine(MODEL_PATH) as warm, load_engine(MODEL_PATH, cache_bytes=0) as cold:
        once, again, fresh = chat(warm, turns), chat(warm, turns), chat(cold, turns)
    assert [turn[0] for turn in once] == [turn[0] for turn in again] == [turn[0] for turn in fresh]
    assert [turn[1] for turn in fresh] == [0, 0, 0]
    first, second, third = once
    assert first[1] == 0
    assert second[1] >= first[2] - 2, "all of the first prompt but the head of the answer"
    assert third[1] >= second[2] - 2
    for _, cached, length in again:
        assert cached == length - 1, "a prompt that is asked again is read again only in its last token"


def test_prefixes_are_reused_across_a_sliding_window_and_from_checkpoints_alone(random_model: Path) -> None:
    with (
        load_engine(random_model, prefill_chunk=16) as warm,
        load_engine(random_model, cache_bytes=0) as cold,
    ):
        ids = warm.tokenizer.encode("the quick brown fox jumps over the lazy dog " * 12, control_tokens=True)
        assert len(ids) > 80  # the window is 32
        tails = [warm.tokenizer.encode(tail, control_tokens=True) for tail in ("one", "two three", "four")]
        requests = [
            GenerationRequest(prompt=ids + tail, max_tokens=40, checkpoints=(20, len(ids))) for tail in tails
        ]
        plain = [reply_tokens(cold, request) for request in requests]
        assert reply_tokens(warm, requests[0]) == plain[0]
        assert together(warm, requests) == plain
        *_, last = warm.generate(requests[1])
        assert isinstance(last, Finished)
        assert last.cached_tokens == len(requests[1].prompt) - 1
        elsewhere = GenerationRequest(prompt=ids[:20] + ids[:20], max_tokens=40)
        progress, *_ = items = list(warm.generate(elsewhere))
        assert isinstance(progress, Progress)
        assert progress.cached == 20
        assert [item.token for item in items if isinstance(item, TokenDelta)] == reply_tokens(cold, elsewhere)


# -- requests and their neighbours ---------------------------------------------------------------------------


def test_a_request_that_arrives_during_a_stream_is_answered_during_it(endless: Engine) -> None:
    long = endless.generate(request_for(endless, "one", max_tokens=900))
    while not isinstance(long.next(SOON), TokenDelta):
        pass
    short = request_for(endless, "two three", max_tokens=5)
    assert len(reply_tokens(endless, short)) == 5
    *_, last = long
    assert isinstance(last, Finished)
    assert last.reason == "length"


def test_cancelling_one_of_three_leaves_the_other_two_unchanged(endless: Engine) -> None:
    requests = [request_for(endless, "fox " * count, max_tokens=60) for count in (1, 5, 9)]
    expected = [reply_tokens(endless, request) for request in requests]
    first, second, third = (endless.generate(request) for request in requests)
    while not isinstance(second.next(SOON), TokenDelta):
        pass
    second.close()
    assert [item.token for item in first if isinstance(item, TokenDelta)] == expected[0]
    assert [item.token for item in third if isinstance(item, TokenDelta)] == expected[2]


class FailingConstraint:
    """Allows anything for a while and then raises, or returns a broken mask."""

    never_raises = False

    def __init__(
        self, *, mask_at: int = 1000, read_at: int = 1000, mask: Sequence[int] | None = None
    ) -> None:
        self._masks = iter(range(mask_at))
        self._reads = iter(range(read_at))
        self._mask = mask

    def unconstrained_tokens(self) -> int:
        return 0

    def allowed_mask(self) -> Sequence[int] | None:
        if next(self._masks, None) is None:
            if self._mask is not None:
                return self._mask
            raise ZeroDivisionError("sabotage")
        return None

    def advance(self, token: int) -> None:
        if next(self._reads, None) is None:
            raise ZeroDivisionError("sabotage")


@pytest.mark.parametrize(
    "failures",
    [{"mask_at": 0}, {"mask_at": 4}, {"read_at": 0}, {"read_at": 6}, {"mask_at": 2, "mask": ["what", "is"]}],
    ids=str,
)
def test_a_request_whose_grammar_raises_fails_alone(endless: Engine, failures: dict[str, Any]) -> None:
    innocents = [request_for(endless, "fox " * count, max_tokens=30) for count in (1, 3)]
    expected = [reply_tokens(endless, request) for request in innocents]
    guilty = request_for(endless, "dog", max_tokens=30, constraint=FailingConstraint(**failures))
    before, sabotaged, after = (endless.generate(each) for each in (innocents[0], guilty, innocents[1]))
    with pytest.raises(EngineError, match=r"Choosing the next token failed"):
        list(sabotaged)
    assert [item.token for item in before if isinstance(item, TokenDelta)] == expected[0]
    assert [item.token for item in after if isinstance(item, TokenDelta)] == expected[1]
    assert endless.is_healthy()


class Alternating:
    """Allows two tokens alternately."""

    never_raises = False

    def __init__(self, one: int, other: int) -> None:
        self._words = [one, other]
        self.read: list[int] = []

    def unconstrained_tokens(self) -> int:
        return 0

    def allowed_mask(self) -> Sequence[int]:
        words = [0] * 16
        next_token = self._words[len(self.read) % 2]
        words[next_token // 32] = 1 << next_token % 32
        return words

    def advance(self, token: int) -> None:
        self.read.append(token)


def test_a_grammar_constrains_its_own_reply_and_no_other(endless: Engine) -> None:
    free = request_for(endless, "fox", max_tokens=20)
    expected = reply_tokens(endless, free)
    held = [
        request_for(
            endless, "dog", max_tokens=20, constraint=Alternating(70, 301), sampling=Sampling(temperature=t)
        )
        for t in (0, 1)
    ]
    first, second, third = together(endless, [held[0], free, held[1]])
    assert first == third == [70, 301] * 10
    assert second == expected


# -- what is refused -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"prompt": [5000]}, "token id 5000; the model's ids are 0 to 511"),
        ({"prompt": [1, 512]}, "token id 512"),
        ({"prompt": [-1]}, "token id -1"),
        ({"prompt": []}, "prompt is empty"),
        ({"prompt": [1] * 1024}, "1024 tokens; the model's context holds 1024"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, not 0"),
        ({"sampling": Sampling(logit_bias=((600, 1.0),))}, "logit_bias holds token id 600"),
        ({"sampling": Sampling(logit_bias=((6, 1e9),))}, "logit_bias must be between -100 and 100"),
        ({"sampling": Sampling(temperature=-1)}, "temperature must be a number from 0 up, not -1"),
        ({"sampling": Sampling(temperature=float("nan"))}, "temperature must be"),
        ({"sampling": Sampling(temperature=float("inf"))}, "temperature must be"),
        ({"sampling": Sampling(top_p=7)}, "top_p must be between 0 and 1, not 7"),
        ({"sampling": Sampling(top_k=-1)}, "top_k must be 0"),
        ({"sampling": Sampling(min_p=2)}, "min_p must be between 0 and 1"),
        ({"sampling": Sampling(repetition_penalty=0)}, "repetition_penalty must be a number above 0"),
        ({"sampling": Sampling(presence_penalty=float("inf"))}, "presence_penalty must be a number"),
        ({"sampling": Sampling(xtc_probability=2)}, "xtc_probability must be between 0 and 1, not 2"),
        ({"logprobs": 21}, "logprobs must be between 0 and 20, not 21"),
        ({"adapter": "pirate"}, "There is no adapter 'pirate' here; there are: none"),
    ],
)
def test_what_could_harm_the_engine_is_refused_by_name(
    endless: Engine, change: dict[str, Any], words: str
) -> None:
    fields: dict[str, Any] = {"prompt": [1, 2, 3, 4], "max_tokens": 5} | change
    with pytest.raises(EngineRefused, match=words):
        endless.generate(GenerationRequest(**fields))
    assert endless.is_healthy()


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1e-300),
        Sampling(temperature=1e300),
        Sampling(temperature=1, top_p=0),
        Sampling(temperature=1, top_p=1e-9),
        Sampling(temperature=1, top_k=1),
        Sampling(temperature=1, top_k=10**6),
        Sampling(temperature=1, min_p=1),
        Sampling(temperature=1, seed=-1),
        Sampling(temperature=1, seed=2**80),
        Sampling(repetition_penalty=1e30),
        Sampling(presence_penalty=-1e30, frequency_penalty=1e30),
        Sampling(logit_bias=((3, -100.0), (3, 100.0))),
    ],
)
def test_odd_but_valid_sampling_still_answers(endless: Engine, sampling: Sampling) -> None:
    tokens = reply_tokens(endless, request_for(endless, "x", max_tokens=4, sampling=sampling))
    assert len(tokens) == 4
    assert all(0 <= token < 512 for token in tokens)


def test_an_answer_is_clipped_to_the_context(endless: Engine) -> None:
    *_, last = endless.generate(GenerationRequest(prompt=[9] * 1000, max_tokens=10**9))
    assert isinstance(last, Finished)
    assert (last.reason, last.completion_tokens) == ("length", 24)
    *_, last = endless.generate(GenerationRequest(prompt=[9] * 1023, max_tokens=10))
    assert isinstance(last, Finished)
    assert last.completion_tokens == 1


# -- the end -------------------------------------------------------------------------------------------------


def test_stopping_during_streams_ends_each_with_an_error_and_leaves_no_thread(random_model: Path) -> None:
    before = set(threading.enumerate())
    engine = load_engine(random_model)
    generations = [engine.generate(request_for(engine, "fox", max_tokens=900)) for _ in range(3)]
    generations[0].next(SOON)
    engine.stop()
    engine.stop()
    for generation in generations:
        with pytest.raises(EngineStopped):
            list(generation)
    left = {each.name for each in set(threading.enumerate()) - before}
    assert left <= {"time-limits"}  # one for the whole process


def test_an_urgent_prompt_is_prefilled_before_others_that_arrived_a_little_earlier(
    random_model: Path,
) -> None:
    def keys_by_first_token(*priorities: int) -> list[int]:
        """Return the keys in the order of their first tokens."""
        batch = MLXBatch(random_model, EngineOptions(cache_bytes=0, prefill_chunk=16), device=Device(8 << 30))
        batch.load(lambda _part: None)
        try:
            for key, priority in enumerate(priorities):
                batch.insert(key, GenerationRequest(prompt=[9 + key] * 60, max_tokens=1, priority=priority))
                list(batch.step())  # the one before is being prefilled already
            first: list[int] = []
            while len(first) < len(priorities):
                first += [key for key, outcome in batch.step() if isinstance(outcome, TokenDelta)]
            return first
        finally:
            batch.unload()
            batch.close()

    for priorities, order in (((0, 0, 0), [0, 1, 2]), ((1, 0, -1), [2, 1, 0])):
        with ThreadPoolExecutor(1) as thread:  # MLX's streams belong to threads
            assert thread.submit(keys_by_first_token, *priorities).result() == order
