"""How long chunks are, by what the machine was measured to do, and how much of the time they get next to replies."""

from collections.abc import Iterator

import pytest

from mlx_backend.engine.mlx.chunk_cost import (
    CHUNK_SIZES,
    MAX_SPARE_TOKENS,
    PADDED_SIZES,
    RUN_OVERHEAD,
    padded_sizes,
)
from mlx_backend.engine.mlx.prefill_pacer import (
    MAX_CREDIT,
    MAX_DEBT,
    MAX_STALL_SECONDS,
    PrefillPacer,
)


def chunks(pacer: PrefillPacer, start: int, end: int, *, others_wait: bool = True) -> list[int]:
    """Return the sizes of the chunks from one position to another."""
    sizes = []
    while start < end:
        sizes.append(min(end - start, pacer.chunk_size(start, others_wait=others_wait)))
        start += sizes[-1]
    return sizes


@pytest.mark.parametrize("rate", [1, 300, 1_000, 1_500, 4_000, 1e9])
def test_chunks_have_sizes_of_a_short_list_whatever_the_rate(rate: float) -> None:
    *full, _ = chunks(PrefillPacer(None, rate), 0, 10_000)
    assert len(set(full)) == 1
    assert full[0] in CHUNK_SIZES


@pytest.mark.parametrize("rate", [1, 1_000, 10_000])
def test_behind_a_cached_prefix_of_any_length_chunks_soon_end_at_multiples_of_their_size(rate: float) -> None:
    for start in range(300):
        pacer, at, sizes = PrefillPacer(None, rate), start, []
        full = pacer.chunk_size(0, others_wait=True)
        while at < 20_000:
            sizes.append(pacer.chunk_size(at, others_wait=True))
            at += sizes[-1]
        assert min(sizes) >= full // 2
        assert max(sizes[1:]) == full
        assert sizes[0] < full + 32
        assert sizes.count(full) >= len(sizes) - 6
        assert at % full == 0


def test_chunks_are_as_long_as_fits_into_the_longest_stall() -> None:
    pacer = PrefillPacer(None, 1_150)  # tokens a second, measured on an H200
    assert pacer.chunk_size(0, others_wait=True) == 256
    assert pacer.chunk_size(0, others_wait=False) == 1024


def test_one_chunk_that_took_very_long_changes_nothing_and_two_do() -> None:
    pacer = PrefillPacer(None, 1_150)
    before = pacer.rate
    pacer.record(256, 30.0)  # the device prepared for a length it had not seen
    assert pacer.rate == before
    pacer.record(256, 0.25)
    assert pacer.chunk_size(0, others_wait=True) == 256
    for _ in range(2):
        pacer.record(256, 2.0)
    assert pacer.chunk_size(0, others_wait=True) == CHUNK_SIZES[0]


def test_the_size_grows_again_once_chunks_are_fast() -> None:
    pacer = PrefillPacer(None, 10)
    seconds = {size: (size + RUN_OVERHEAD) / 2_000 for size in CHUNK_SIZES}
    sizes = []
    for _ in range(8):
        sizes.append(pacer.chunk_size(0, others_wait=True))
        pacer.record(sizes[-1], seconds[sizes[-1]])
    assert sizes[0] == CHUNK_SIZES[0]
    assert sizes[-1] == 512


def test_a_given_chunk_is_taken_as_it_is() -> None:
    assert chunks(PrefillPacer(100, 5.0), 0, 350) == [100, 100, 100, 50]


def test_padded_chunks_hold_their_tokens_and_less_than_a_run_costs_in_addition() -> None:
    for tokens in range(1, 3 * CHUNK_SIZES[-1]):
        sizes = padded_sizes(tokens)
        assert {*sizes} <= {*PADDED_SIZES}
        assert tokens <= sum(sizes) < tokens + MAX_SPARE_TOKENS
        assert sum(sizes[:-1]) < tokens


class Machine:
    """Prefills `rate` tokens a second and decodes steps of so many seconds, by a clock of its own."""

    def __init__(self, rate: float, step: float, *, fixed: int | None = None) -> None:
        self.now, self.step_seconds, self.rate = 0.0, step, rate
        self.pacer = PrefillPacer(fixed, rate, clock=lambda: self.now)

    def step(
        self, *, prompts: int = 0, decodes: bool = True, number: int = 0, remaining: int = 100_000
    ) -> float:
        """Take a step while so many prompts wait, or only one of that number; return how long it prefilled."""
        self.pacer.start_step()
        chunk = 0.0
        if prompts:
            self.pacer.note_waiting(number if prompts == 1 else None, remaining)
        if prompts and (not decodes or self.pacer.may_prefill):
            size = min(remaining, self.pacer.chunk_size(0, others_wait=decodes or prompts > 1))
            if decodes:
                self.pacer.spend()
            chunk = (size + RUN_OVERHEAD) / self.rate
        self.now += chunk + self.step_seconds * decodes
        self.pacer.end_step(prefilled=bool(prompts), decoded=decodes)
        return chunk

    def prefill(self, tokens: int, number: int = 0) -> float:
        """Prefill a prompt that waits by itself; return the seconds until it is done."""
        began = self.now
        while tokens > 0:
            if chunk := self.step(prompts=1, number=number, remaining=tokens):
                tokens -= round(chunk * self.rate) - RUN_OVERHEAD
        return self.now - began

    def chunks(self, seconds: float, prompts: int) -> Iterator[tuple[float, float]]:
        """Yield when each chunk begins and how long it takes."""
        end = self.now + seconds
        while (began := self.now) < end:
            if chunk := self.step(prompts=prompts):
                yield began, chunk


RATES_AND_STEPS = [(500, 0.05), (4_000, 0.004), (12_000, 0.01), (20_000, 0.002)]


@pytest.mark.parametrize("fixed", [None, 64])
@pytest.mark.parametrize(("rate", "step"), RATES_AND_STEPS)
def test_steady_arrivals_get_their_share_of_every_second_and_no_more(
    rate: float, step: float, fixed: int | None
) -> None:
    machine = Machine(rate, step, fixed=fixed)
    for _ in range(20):
        machine.step()
    list(machine.chunks(5.0, 8))
    chunks = list(machine.chunks(10.0, 8))
    longest = max(chunk for _, chunk in chunks)
    assert longest <= MAX_STALL_SECONDS
    assert longest <= max(5 * step, (128 + RUN_OVERHEAD) / rate)
    for start in (chunks[0][0] + each / 4 for each in range(32)):
        seconds = sum(chunk for began, chunk in chunks if start <= began < start + 1)
        assert seconds == pytest.approx(1 / 4, abs=longest)


@pytest.mark.parametrize(("rate", "step"), RATES_AND_STEPS)
def test_several_prompts_that_come_at_once_are_prefilled_at_once_for_half_a_second(
    rate: float, step: float
) -> None:
    machine = Machine(rate, step)
    for _ in range(20):
        machine.step()
    first = sum(chunk for _, chunk in machine.chunks(2.0, 8))
    steady = 2.0 / 4
    assert steady < first <= steady + MAX_CREDIT / 3 + MAX_STALL_SECONDS


@pytest.mark.parametrize("tokens", [8192, 100_000])
@pytest.mark.parametrize(("rate", "step"), RATES_AND_STEPS)
def test_a_long_prompt_that_waits_by_itself_is_prefilled_in_every_step(
    rate: float, step: float, tokens: int
) -> None:
    machine = Machine(rate, step)
    for _ in range(20):
        machine.step()
    chunks = -(-tokens // machine.pacer.max_chunk)
    own = (tokens + chunks * RUN_OVERHEAD) / rate
    assert machine.prefill(tokens) == pytest.approx(own + chunks * step, rel=0.01)


@pytest.mark.parametrize("tokens", [300, 3000])
@pytest.mark.parametrize(("rate", "step"), RATES_AND_STEPS)
def test_prompts_that_come_one_after_the_other_get_half_of_the_time(
    rate: float, step: float, tokens: int
) -> None:
    machine = Machine(rate, step)
    list(machine.chunks(5.0, 8))  # what had been saved up is spent
    began, count = machine.now, 40
    for number in range(count):
        machine.prefill(tokens, number)
    chunks = -(-tokens // machine.pacer.max_chunk)
    own = (tokens + chunks * RUN_OVERHEAD) / rate
    assert own * count / (machine.now - began) < 0.6


@pytest.mark.parametrize(("rate", "step"), RATES_AND_STEPS)
def test_a_long_prompt_that_comes_a_while_after_another_takes_no_longer(rate: float, step: float) -> None:
    machine = Machine(rate, step)
    for _ in range(20):
        machine.step()
    first = machine.prefill(8192)
    end = machine.now + first
    while machine.now < end:
        machine.step()
    assert machine.prefill(8192, 1) == pytest.approx(first, rel=0.01)


def test_a_long_prompt_goes_on_in_every_step_once_those_that_came_meanwhile_are_done() -> None:
    machine = Machine(4_000, 0.004)
    full = [machine.step(prompts=1) for _ in range(30)][-1]
    assert not all(machine.step(prompts=2) for _ in range(30))
    assert [machine.step(prompts=1) for _ in range(30)] == [full] * 30


def test_what_one_prompt_took_does_not_slow_down_others_for_more_than_half_a_minute() -> None:
    machine = Machine(500, 0.05)
    machine.prefill(100_000)
    end = machine.now + MAX_DEBT
    while machine.now < end:
        machine.step()
    assert all(machine.step(prompts=1, number=1) for _ in range(20))


def test_while_nobody_decodes_prompts_get_all_of_the_time_and_credit_is_saved_up() -> None:
    machine = Machine(4_000, 0.01)
    list(machine.chunks(5.0, 8))
    before = machine.pacer.credit
    assert all(machine.step(prompts=8, decodes=False) for _ in range(5))
    assert machine.pacer.credit > before
    for _ in range(100):
        machine.step(prompts=8, decodes=False)
    assert machine.step(prompts=8, decodes=False) == (1024 + RUN_OVERHEAD) / 4_000


def test_what_has_passed_while_the_engine_slept_is_saved_up_for_half_a_second_of_prefill() -> None:
    machine = Machine(1_000, 0.01)
    list(machine.chunks(5.0, 8))
    machine.now += 3600
    machine.step()
    assert machine.pacer.credit == MAX_CREDIT


def test_a_step_in_which_something_was_compiled_does_not_keep_prompts_waiting() -> None:
    machine = Machine(4_000, 0.01)
    for _ in range(20):
        machine.step()
    machine.pacer.start_step()
    machine.pacer.note_waiting(None)
    machine.pacer.spend()
    machine.now += 60.0
    machine.pacer.end_step(prefilled=True, decoded=True)
    waited = machine.now
    while not machine.step(prompts=8):
        pass
    assert machine.now - waited < 3 * MAX_STALL_SECONDS + 0.1


def test_processes_that_share_a_model_decide_alike_however_long_each_slept() -> None:
    leader, other = Machine(4_000, 0.01), Machine(700, 0.3)
    for prompts in (0, 0, 0, 1, 8, 8, 0, 8):
        leader.step(prompts=prompts)
        other.step(prompts=prompts)
    leader.pacer.is_full = True  # no prompt waits for room at the others, which have no queue of requests
    other.pacer.pace = leader.pacer.pace
    leader.now += 1.0
    other.now += 0.001
    for machine in (leader, other):
        machine.pacer.start_step()
        machine.pacer.note_waiting(9, 100_000)
    assert other.pacer.pace == leader.pacer.pace
    assert other.pacer.may_prefill == leader.pacer.may_prefill
    assert other.pacer.chunk_size(0, others_wait=True) == leader.pacer.chunk_size(0, others_wait=True)


def test_a_prompt_that_others_should_precede_has_short_chunks_whether_or_not_replies_decode() -> None:
    pacer = PrefillPacer(None, 12_000)
    for others_wait in (False, True):
        assert pacer.chunk_size(0, others_wait=others_wait, is_background=True) == 512
