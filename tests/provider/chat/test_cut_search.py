"""The smallest cut that fits is found exactly, in few counts, whatever the estimates are worth."""

from __future__ import annotations

import math
import random

from dify_mlx_provider.chat.long_chats import MAX_GUESSES, smallest_cut


class Server:
    """Counts prompts: the estimated sizes in a proportion of its own, and not evenly."""

    def __init__(self, rng: random.Random, sizes: list[int], ratio: float) -> None:
        shares = [rng.uniform(0.7, 1.3) for _ in sizes]
        differences = [a - b for a, b in zip(sizes, [*sizes[1:], 0], strict=True)]
        rest = 0.0
        self.tokens: list[int] = []
        for difference, share in zip(reversed(differences), reversed(shares), strict=True):
            rest += difference * share * ratio
            self.tokens.append(round(rest))
        self.tokens.reverse()
        self.asked: list[int] = []

    def count(self, cut: int) -> int:
        self.asked.append(cut)
        return self.tokens[cut]


def random_sizes(rng: random.Random, count: int) -> list[int]:
    size = rng.randrange(10, 2000)
    sizes = [size]
    for _ in range(count - 1):
        size += rng.randrange(1, 500)
        sizes.append(size)
    return sizes[::-1]


def test_the_smallest_cut_that_fits_is_found() -> None:
    for seed in range(300):
        rng = random.Random(seed)
        sizes = random_sizes(rng, rng.choice((1, 2, 3, 10, 100, 1000)))
        server = Server(rng, sizes, rng.uniform(0.3, 4))
        limit = rng.randrange(1, 2 * sizes[0])
        found = smallest_cut(sizes, limit, server.count)
        expected = next((cut for cut, tokens in enumerate(server.tokens) if tokens <= limit), len(sizes) - 1)
        assert found == expected, seed
        most = MAX_GUESSES + math.ceil(math.log2(len(sizes) + 1))
        assert len(server.asked) == len(set(server.asked)) <= most, seed


def test_three_counts_are_usually_enough() -> None:
    counts = []
    for seed in range(200):
        rng = random.Random(seed)
        sizes = random_sizes(rng, 200)
        server = Server(rng, sizes, rng.uniform(0.8, 1.5))
        smallest_cut(sizes, sizes[150], server.count)
        counts.append(len(server.asked))
    assert sorted(counts)[len(counts) // 2] <= 3
    assert max(counts) <= MAX_GUESSES + 8


def test_a_prompt_that_fits_whole_is_counted_once() -> None:
    server = Server(random.Random(1), [1000, 800, 600], 1.0)
    assert smallest_cut([1000, 800, 600], 5000, server.count) == 0
    assert server.asked == [0]


def test_a_server_that_cannot_count_leaves_it_to_the_estimates() -> None:
    sizes = [1000, 800, 600, 400]
    assert smallest_cut(sizes, 700, lambda _: None) == 2
    assert smallest_cut(sizes, 700, lambda _: None, ratio=2.0) == 3
    assert smallest_cut(sizes, 5000, lambda _: None) == 0
    assert smallest_cut(sizes, 5, lambda _: None) == 3  # there is no larger one


def test_a_count_that_fails_halfway_leaves_what_is_known() -> None:
    counts = iter([1200, None])
    assert smallest_cut([1000, 800, 600, 400], 1000, lambda _: next(counts)) == 1


def test_estimates_that_mislead_cost_no_more_than_halving() -> None:
    """What the oldest turns hold counts for nothing, so that each prediction is just one cut ahead."""
    sizes = list(range(4000, 0, -1))
    asked: list[int] = []

    def count(cut: int) -> int:
        asked.append(cut)
        return 3001 if cut < 3900 else 10

    assert smallest_cut(sizes, 3000, count) == 3900
    assert len(asked) <= MAX_GUESSES + 12
