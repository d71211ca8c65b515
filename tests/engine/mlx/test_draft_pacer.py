"""How much is drafted: simulated replies on simulated devices, whose steps take known times.

What drafts take and save is compared with plain decoding, and with the best constant number of drafts.
"""

from collections.abc import Callable

import pytest
from draft_simulation import Costs, Reply, SimulatedDevice, Texts, best_share, share_of_plain

from mlx_backend.engine.mlx.draft_pacer import (
    ASSUMED_COSTS,
    MAX_REPLIES,
    MIN_TIMES,
    DraftCosts,
    DraftPacer,
    DraftRecord,
)

UNLIMITED = 1000  # tokens

Make = Callable[[Texts, int], Reply]


def by_model(right: float, prompt: int = 300) -> Make:
    return lambda texts, length: texts.for_model(prompt, length, right)


def quoting(part: float) -> Make:
    return lambda texts, length: texts.quoting(300, length, part)


def ask(users: int, replies: int, lengths: tuple[int, int], make: Make) -> list[list[Reply]]:
    texts = Texts()
    return [[make(texts, texts.chance.randint(*lengths)) for _ in range(replies)] for _ in range(users)]


SHORT, LONG = (20, 100), (300, 500)


@pytest.mark.parametrize("users", range(1, MAX_REPLIES + 1))
@pytest.mark.parametrize("lengths", [SHORT, LONG], ids=["short", "long"])
@pytest.mark.parametrize(
    ("make", "costs"),
    [
        (by_model(0.05), Costs()),
        (by_model(0.3), Costs(guess=3.0)),
        (by_model(0.95), Costs(reply=9.0, verified=10.0)),
        (by_model(0.05, prompt=3000), Costs()),
        (quoting(0.0), Costs()),
        (quoting(0.05), Costs(host=4.0)),
    ],
    ids=[
        "wrong drafts",
        "a slow draft model",
        "a device that is busy with one token",
        "long prompts",
        "texts of which nothing repeats itself",
        "a slow host",
    ],
)
def test_drafts_that_do_not_pay_take_no_time(
    users: int, lengths: tuple[int, int], make: Make, costs: Costs
) -> None:
    replies = 30 if lengths == SHORT else 4
    assert share_of_plain(ask(users, replies, lengths, make), costs) < 1.02


@pytest.mark.parametrize("users", range(1, MAX_REPLIES + 1))
@pytest.mark.parametrize("lengths", [SHORT, LONG], ids=["short", "long"])
@pytest.mark.parametrize(
    ("make", "costs"),
    [
        (by_model(0.9), Costs()),
        (by_model(0.95), Costs(verified=0.8, prefill=0.02)),
        (quoting(0.5), Costs()),
        (quoting(0.6), Costs(host=1.0, verified=1.0)),
    ],
    ids=["right drafts", "a CPU", "texts that repeat themselves", "a slow host"],
)
def test_drafts_that_pay_save_most_of_what_they_can(
    users: int, lengths: tuple[int, int], make: Make, costs: Costs
) -> None:
    asked = ask(users, 30 if lengths == SHORT else 4, lengths, make)
    assert 1 - share_of_plain(asked, costs) > 0.75 * (1 - best_share(asked, costs))


@pytest.mark.parametrize("users", [1, 4])
@pytest.mark.parametrize(
    "costs",
    [
        Costs(context=3.0),
        Costs(interrupted=0.03),
        Costs(noise=0.2),
        Costs(switch=8.0),
    ],
    ids=["a context that grows", "other work", "noise", "caches that are slowly merged"],
)
def test_what_changes_a_steps_time_does_not_change_what_pays(users: int, costs: Costs) -> None:
    wrong, right = (ask(users, 4, (400, 600), by_model(each)) for each in (0.05, 0.9))
    assert share_of_plain(wrong, costs) < 1.02
    assert share_of_plain(right, costs) < 0.8


@pytest.mark.parametrize("users", [1, 3])
@pytest.mark.parametrize("before", [0.05, 0.95], ids=["become right", "become wrong"])
def test_drafts_may_become_right_or_wrong_within_a_reply(users: int, before: float) -> None:
    after = 1.0 - before
    asked = ask(
        users,
        3,
        (800, 800),
        lambda texts, length: texts.for_model(300, length, lambda at: before if at < 400 else after),
    )
    assert share_of_plain(asked, Costs()) < 0.87


@pytest.mark.parametrize("lengths", [SHORT, LONG], ids=["short", "long"])
@pytest.mark.parametrize(
    ("make", "costs"),
    [
        (by_model(0.05), Costs(replays=True)),
        (by_model(0.4), Costs(replays=True, verified=2.5)),
        (quoting(0.0), Costs(replays=True)),
        (quoting(0.2), Costs(replays=True, verified=8.0)),
    ],
    ids=["wrong drafts", "wrong drafts on a CPU", "nothing repeats itself", "little repeats itself on a CPU"],
)
def test_what_runs_again_after_wrong_drafts_takes_no_time_where_they_do_not_pay(
    lengths: tuple[int, int], make: Make, costs: Costs
) -> None:
    assert share_of_plain(ask(1, 30 if lengths == SHORT else 4, lengths, make), costs) < 1.02


@pytest.mark.parametrize("lengths", [SHORT, LONG], ids=["short", "long"])
@pytest.mark.parametrize(
    ("make", "costs"),
    [
        (by_model(0.9), Costs(replays=True)),
        (by_model(0.7), Costs(replays=True)),
        (by_model(0.8), Costs(replays=True, verified=2.0)),
        (by_model(0.4), Costs(replays=True, verified=0.2)),
        (quoting(0.5), Costs(replays=True, verified=1.0)),
    ],
    ids=["right drafts", "half of the drafts", "most on a CPU", "a few", "texts that repeat themselves"],
)
def test_drafts_that_pay_although_some_tokens_run_again_save_most_of_what_they_can(
    lengths: tuple[int, int], make: Make, costs: Costs
) -> None:
    asked = ask(1, 30 if lengths == SHORT else 4, lengths, make)
    assert 1 - share_of_plain(asked, costs) > 0.66 * (1 - best_share(asked, costs))


def test_fewer_tokens_are_drafted_where_those_before_a_wrong_one_run_again() -> None:
    def planned(*, replays: bool, to_replay: int = 0) -> int:
        reply = DraftRecord(to_replay=to_replay)
        [count] = DraftPacer(16, None, replays=replays).plan([reply], [UNLIMITED], 0, is_drafting=True)
        return count

    assert planned(replays=False) == 5, "2/3 of those that are right so far, of which each costs 0.1"
    assert planned(replays=True) == 4
    assert 0 < planned(replays=True, to_replay=6) < 4, "these would run a third time"
    assert planned(replays=True, to_replay=40) == 0


def test_a_long_prompt_is_prefilled_for_drafts_only_if_they_save_more() -> None:
    asked = ask(1, 30, SHORT, by_model(0.9, prompt=4000))
    assert share_of_plain(asked, Costs(prefill=0.2)) < 1.02, "each prefill takes as long as 80 tokens"
    assert share_of_plain(asked, Costs(prefill=0.01)) < 0.8


def test_the_first_replies_of_all_take_hardly_more_time() -> None:
    assert share_of_plain(ask(1, 1, (60, 60), by_model(0.05)), Costs()) < 1.05
    assert share_of_plain(ask(1, 1, (300, 300), by_model(0.05)), Costs()) < 1.025
    assert share_of_plain(ask(1, 1, (60, 60), by_model(0.95)), Costs()) < 0.55


def test_a_device_that_checks_each_draft_in_a_whole_step_is_found_out_at_once() -> None:
    costs = Costs(verified=12.0, prefill=0.0)
    assert share_of_plain(ask(1, 1, (60, 60), by_model(0.8)), costs) < 1.08


def test_replies_that_join_and_leave_are_drafted_for() -> None:
    texts = Texts()

    def asked(right: float) -> list[list[Reply]]:
        long = [[texts.for_model(300, 700, right) for _ in range(2)] for _ in range(2)]
        return [*long, *([texts.for_model(100, 30, right) for _ in range(30)] for _ in range(2))]

    assert share_of_plain(asked(0.05), Costs()) < 1.02
    assert share_of_plain(asked(0.9), Costs()) < 0.8


def test_a_reply_with_wrong_drafts_gets_none_beside_one_with_right_ones() -> None:
    texts = Texts()
    right, wrong = texts.for_model(100, 600, 0.95), texts.for_model(100, 600, 0.02)
    pacer = DraftPacer(4, None)
    device = SimulatedDevice(Costs(), lambda _: pacer)
    records = [device.start(each).drafts for each in (right, wrong)]
    while device.has_replies:
        device.step()
    assert records[0].accepted > 400
    assert records[1].proposed < 0.35 * records[0].proposed


def test_more_replies_than_drafts_are_for_get_none() -> None:
    own = DraftPacer(4, None)

    def plan(count: int) -> list[int]:
        replies = [DraftRecord() for _ in range(count)]
        return own.plan(replies, [UNLIMITED] * count, 0, is_drafting=False)

    assert plan(MAX_REPLIES) == [2] * MAX_REPLIES
    assert plan(MAX_REPLIES + 1) == [0] * (MAX_REPLIES + 1)


def test_processes_that_share_a_model_decide_by_what_was_accepted_alone() -> None:
    good, bad = DraftRecord(), DraftRecord()
    own = DraftPacer(4, None)
    for _ in range(40):
        counts = own.plan([good, bad], [UNLIMITED, UNLIMITED], 0, is_drafting=True)
        good.record(counts[0], counts[0])
        if counts[1]:
            bad.record(counts[1], 0)
    assert good.accepted > 150
    assert bad.proposed < good.proposed / 5


def test_as_many_tokens_are_drafted_as_are_likely_to_be_right() -> None:
    proposed = []
    for right in (95, 50):
        own, reply = DraftPacer(16, None), DraftRecord()
        chance = Texts().chance
        for _ in range(500):
            [count] = own.plan([reply], [UNLIMITED], 0, is_drafting=True)
            accepted = 0
            while accepted < count and chance.randrange(100) < right:
                accepted += 1
            if count:
                reply.record(count, accepted)
        proposed.append(reply.proposed / 500)
    likely, unlikely = proposed
    assert likely > 10
    assert 0 < unlikely < 6


def test_wrong_drafts_are_tried_again_unless_it_is_known_how_they_would_fare() -> None:
    found = []
    for reply in (DraftRecord(), DraftRecord(is_rehearsed=True)):
        own = DraftPacer(4, None)
        for _ in range(30):
            reply.learn(4, 0)
        found.append([own.plan([reply], [UNLIMITED], 0, is_drafting=False)[0] for _ in range(300)])
    assert found[0][0] == 0 < found[0][-1]
    assert not any(found[1])


def costs_of(overhead: float, per_token: float, per_replayed: float) -> DraftCosts:
    costs = DraftCosts(2)
    for _ in range(MIN_TIMES):
        costs.record_plain(0, 0.02)
    for at in range(300):
        drafted, replayed = 1 + at % 4, at % 3
        beyond = overhead + per_token * drafted + per_replayed * replayed
        costs.record_drafted(0, drafted, replayed, 0.02 * (1 + beyond))
    return costs


def test_what_drafting_costs_at_all_is_told_from_what_each_token_costs_that_is_drafted_or_runs_again() -> (
    None
):
    costs = costs_of(0.3, 0.2, 0.05)
    assert costs.of(0) == pytest.approx(0.3, abs=0.02)
    assert costs.of(1) - costs.of(0) == pytest.approx(0.2, abs=0.02)
    assert costs.of(0, 1) - costs.of(0) == pytest.approx(0.05, abs=0.02)


def test_a_step_that_took_far_too_long_says_little() -> None:
    costs = costs_of(0.0, 0.1, 0.1)
    costs.record_drafted(0, 1, 0, 2.0)
    assert costs.of(1) < 1


def test_a_plain_step_is_known_for_texts_of_about_the_same_length_only() -> None:
    costs = costs_of(0.3, 0.05, 0.05)
    assert costs.plain_step(100) == 0.02
    assert costs.plain_step(10_000) is None


def test_high_costs_are_forgotten_over_many_plain_steps() -> None:
    costs = costs_of(9.0, 0.5, 0.1)
    for _ in range(20_000):
        costs.record_plain(0, 0.02)
    assert costs.of(1) == pytest.approx(sum(ASSUMED_COSTS[:2]), abs=0.01)
