"""The batch on MLX: prompts read in chunks, replies decoded together, prefixes reused, memory watched.

Runs on the engine thread only (see scheduler.py), where the model is loaded too: MLX's streams belong to
threads. Requests arrive here checked; nothing of them may raise inside a step.

A step reads at most one chunk of prompts and says one token for every reply, so a running stream never waits for
more than that chunk. Prompts that end in it are run together with the replies' next tokens where the network can do
that, so that whoever talks hardly notices who comes; a mistake in one of them is its own all the same.
"""

from __future__ import annotations

import logging
from bisect import insort
from collections import deque
from time import perf_counter
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from ..base import EngineError, EngineRefused, Progress, TokenDelta
from ..batch import Ended, ModelFacts
from ..turns import Turns
from .caches import PrefixCache, alias
from .decoding import Decoder, Newcomer, Row
from .machine import Machine
from .packing import NotRun
from .prefill import passed, read
from .reading import Pace, Reading, deal, waits_for
from .sampling import Choice

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence
    from pathlib import Path

    from ..base import GenerationRequest
    from ..batch import Outcome
    from ..options import EngineOptions
    from .decoding import Layers, Said
    from .disk import DiskCheckpoints
    from .distributed import Ranks
    from .loading import LoadedModel

log = logging.getLogger(__name__)

DEVICE = Turns()  # one for all engines of the process
EXPECTED_TOKENS = 2048  # set aside for a reply whose length nobody knows
OVERTAKEN = 32  # requests that a prompt of the next better priority may come later and still be read first
WORTH_KEEPING = 64  # tokens of a prompt that was given up half-way
STEPS_BETWEEN_CLEANINGS = 512


class MLXBatch:
    """Implements the scheduler's `Batch`."""

    def __init__(
        self,
        model: str | Path,
        options: EngineOptions,
        *,
        model_id: str | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        if options.prefill_chunk is not None and options.prefill_chunk < 1:
            raise EngineError(f"A prefill chunk of {options.prefill_chunk} tokens is too small.")
        self._source = model
        self._options = options
        self._model_id = model_id
        self._ranks = ranks  # the processes that share the model
        self._machine: Machine | None = None
        self.steps = 0
        self._reset()

    def _reset(self) -> None:
        self._model: LoadedModel | None = None
        self._networks: dict[str, Any] = {}
        self._decoders: dict[str, list[Decoder]] = {}
        self._readings: list[Reading] = []
        self._rows: dict[int, Row] = {}
        self._put_off: deque[Row] = deque()  # for want of memory, in the middle of their replies
        self._prefixes = PrefixCache(0)
        self._disk: DiskCheckpoints | None = None
        self._reads_ahead = False

    # -- the model -------------------------------------------------------------------------------------------

    def load(self, report: Callable[[float], None]) -> ModelFacts:
        """Load the model on this thread, warm it up, and see how much memory is left."""
        machine = self._machine = Machine(self._source, self._options, self._ranks, report)
        self._model, self._networks = machine.model, machine.networks
        self._ledger, self._prefixes, self._disk = machine.ledger, machine.prefixes, machine.disk
        self._pace = Pace(self._options.prefill_chunk)
        return ModelFacts(
            model_id=self._model_id or machine.model.name,
            context_length=self._options.context_length or machine.model.context_length,
            tokenizer=machine.model.tokenizer,
            sampling_defaults=machine.model.sampling_defaults,
            adapters=tuple(self._options.adapters),
        )

    def unload(self) -> None:
        """Give the memory back."""
        machine, self._machine = self._machine, None
        self._reset()
        if machine is not None:
            machine.close()
        mx.clear_cache()

    def close(self) -> None:
        """Leave MLX's streams of this thread in order.

        A thread that used MLX and ends without this aborts the process when the interpreter exits.
        """
        mx.synchronize()
        mx.clear_streams()

    # -- requests --------------------------------------------------------------------------------------------

    def admits(self, request: GenerationRequest) -> bool:
        """Whether its caches fit beside those that are there; raises EngineRefused if they never can."""
        if request.max_tokens == 0 and not self._keeps:
            raise EngineRefused("Nothing is kept here, so there is nothing to warm up.")
        tokens = _expected(request)
        reply = tokens - len(request.prompt)
        self._ledger.check(tokens, f"{len(request.prompt)} tokens of prompt and {reply} of reply")
        if self._put_off:
            return False
        return not self._rows or self._ledger.fits(tokens, self._space(request))

    def insert(self, key: int, request: GenerationRequest) -> None:
        """Begin a request."""
        assert self._machine is not None
        assert self._model is not None
        choice = Choice(request, self._machine.text)
        row = Row(
            key,
            request,
            choice,
            self._model.tokenizer.text_stream(),
            list(request.prompt),
            self._model.end_tokens,
        )
        row.memory = choice.memory_of(())
        row.drafter = self._machine.drafter()
        self._begin(row, _expected(request))

    @property
    def rate(self) -> float | None:
        """How many tokens of prompt a second this machine reads; None before it is known."""
        return self._pace.rate

    @rate.setter
    def rate(self, rate: float | None) -> None:
        self._pace.rate = rate

    def ready(self) -> bool:
        """There is always a token or a chunk to compute."""
        return True

    def step(self) -> Iterator[tuple[int, Outcome]]:
        """Read one chunk of the prompts that wait, let those in that were read, and say one token for everybody.

        In this order, because newcomers come between two steps: their first token does not wait for one more of
        the others'.
        """
        with DEVICE:
            self.steps += 1
            if self.steps % STEPS_BETWEEN_CLEANINGS == 0:
                mx.clear_cache()
            self._bring_back()
            due = (yield from self._read()) if self._readings else []
            for space in dict.fromkeys([*self._decoders, *map(self._space_of, due)]):
                here = [each for each in due if self._space_of(each) == space and each in self._readings]
                yield from self._decode(space, here)
            if (
                due and not self._readings
            ):  # if others wait, their run is begun first: the device does not rest
                yield from self._begin_replies()
            self._ledger.keeps(self._prefixes.nbytes)

    def remove(self, key: int) -> None:
        """Drop a request that nobody wants any more."""
        row = self._rows[key]
        if row in self._put_off:
            self._put_off.remove(row)
        else:
            self._take_out(row)
        self._forget(row)

    def _begin(self, row: Row, expected: int) -> None:
        self._ledger.reserve(row.key, expected, self._space(row.request))
        self._shrink_prefixes()
        end = len(row.tokens)
        marks = {*row.request.checkpoints, end - 1} if self._keeps else {end - 1}
        if row.request.max_tokens == 0:  # to be kept whole, and nothing said behind it
            marks = set()
        reading = Reading(row, tuple(sorted({mark for mark in marks if mark > 0} | {end})))
        insort(self._readings, reading, key=_turn)
        self._rows[row.key] = row

    def _shrink_prefixes(self) -> None:
        self._prefixes.shrink(max(0, self._ledger.room - self._ledger.used))

    def _forget(self, row: Row) -> None:
        self._rows.pop(row.key, None)
        self._ledger.release(row.key)

    def _space_of(self, reading: Reading) -> str:
        return self._space(reading.row.request)

    def _space(self, request: GenerationRequest) -> str:
        return request.adapter or self._options.adapter or ""

    # -- replies ---------------------------------------------------------------------------------------------

    def _decode(self, space: str, due: Sequence[Reading]) -> Iterator[tuple[int, Outcome]]:
        """Say one token for everybody of a space, and let in those whose last pieces are due."""
        assert self._machine is not None
        if due and self._machine.packs:
            decoder = self._decoder(due[0].row)
            try:
                said = decoder.step([_newcomer(reading) for reading in due])
            except NotRun as error:
                if not decoder.everybody and len(due) == 1:
                    yield self._unread(due[0], error)
                    return
                self._complain(error)
            else:
                yield from self._come_in(space, decoder, due)
                yield from self._said(space, decoder, said)
                return
        for reading in due:
            decoder = self._decoder(reading.row)
            try:
                decoder.join([_newcomer(reading)])
            except NotRun as error:
                yield self._unread(reading, error)
            else:
                yield from self._come_in(space, decoder, [reading])
        for decoder in list(self._decoders.get(space, ())):
            yield from self._said(space, decoder, decoder.step())

    def _come_in(
        self, space: str, decoder: Decoder, readings: Sequence[Reading]
    ) -> Iterator[tuple[int, Outcome]]:
        for reading in readings:
            row = reading.row
            self._readings.remove(reading)
            passed(reading, reading.marks[-1], self._keep_read if self._keeps else None)
            if not row.said:
                yield row.key, Progress(reading.done, len(row.tokens), row.cached)
        if decoder not in self._decoders.setdefault(space, []):
            self._decoders[space].append(decoder)

    def _said(self, space: str, decoder: Decoder, said: Sequence[Said]) -> Iterator[tuple[int, Outcome]]:
        """Report what was said, and let those go who are done."""
        ended: list[Row] = []
        for each in said:
            row = each.row
            if row.choice.error is not None:
                continue
            yield row.key, TokenDelta(each.token, row.text.push(each.token), each.logprobs)
            if each.reason is not None:
                ended.append(row)
                yield row.key, Ended(each.reason)
        broken = [row for row in decoder.rows if row.choice.error is not None]
        for row in broken:
            yield row.key, _failure(row)
        kept = decoder.leave([*ended, *broken], wanted=ended if self._keeps else ())
        for row in [*ended, *broken]:
            if row.key in kept:
                self._keep(row, row.tokens[: row.fed], kept[row.key])
            self._forget(row)
        self._tidy(space)
        yield from self._make_room(decoder)

    def _make_room(self, decoder: Decoder) -> Iterator[tuple[int, Outcome]]:
        """Set more aside for replies that grow longer than expected, or put the least urgent off until it fits."""
        for row in list(decoder.rows):
            if row in self._put_off or len(row.tokens) < self._ledger.reserved(row.key):
                continue
            space = self._space(row.request)
            most = len(row.request.prompt) + row.request.max_tokens
            self._ledger.reserve(row.key, min(most, len(row.tokens) + EXPECTED_TOKENS), space)
            self._shrink_prefixes()
            while self._ledger.used > self._ledger.room:
                others = [other for other in self._rows.values() if other not in self._put_off]
                if len(others) == 1:  # alone, and still no room: this is as long as it can get
                    decoder.leave([row])
                    self._tidy(space)
                    self._forget(row)
                    yield row.key, Ended("length")
                    break
                self._put_one_off(max(others, key=lambda other: (other.request.priority, other.key)))

    def _put_one_off(self, row: Row) -> None:
        """Take a reply out; it is read again, from its prompt to its last word, when there is room."""
        log.info("Memory is short: a reply of %d tokens so far has to wait.", row.said)
        self._take_out(row)
        self._ledger.release(row.key)
        if row.said and not row.waits_to_say:  # said and not fed: the grammar has not read it
            row.choice.advance(row.tokens[-1])
        row.chosen = row.said
        row.memory = row.choice.memory_of(row.tokens[len(row.request.prompt) :])
        row.report = None
        self._put_off.append(row)

    def _bring_back(self) -> None:
        while self._put_off:
            row = self._put_off[0]
            tokens = len(row.tokens) + min(row.request.max_tokens - row.said, EXPECTED_TOKENS)
            alone = len(self._put_off) == len(self._rows)
            if not (alone or self._ledger.fits(tokens, self._space(row.request))):
                return
            self._begin(self._put_off.popleft(), tokens)

    def _take_out(self, row: Row) -> None:
        """Take a row out of wherever it is."""
        for reading in self._readings:
            if reading.row is row:
                self._readings.remove(reading)
                if reading.layers is not None and reading.done - row.cached >= WORTH_KEEPING:
                    self._keep(row, row.tokens[: reading.done], reading.layers)
                return
        space = self._space(row.request)
        for decoder in self._decoders.get(space, ()):
            if row in decoder.everybody:
                decoder.leave([row])
        self._tidy(space)

    def _tidy(self, space: str) -> None:
        running = [decoder for decoder in self._decoders.pop(space, ()) if decoder.everybody]
        if running:
            self._decoders[space] = running

    # -- prompts ---------------------------------------------------------------------------------------------

    def _read(self) -> Generator[tuple[int, Outcome], None, list[Reading]]:
        """Read one chunk, and return the prompts of which only the last pieces are left, which are due now."""
        assert self._machine is not None
        # A warm-up is read in small pieces: whoever comes should not wait for it.
        others = bool(self._decoders) or len(self._readings) > 1 or not self._readings[0].replies
        chunk = self._pace.chunk(others=others)
        dealt = deal(
            list(self._readings), chunk, to_read=self._to_read, at_most=self._at_most, waits=self._waits
        )
        due = [reading for reading, share in dealt if share == reading.left and reading.replies]
        most_logits = self._machine.most_logits
        if sum(reading.left for reading in due) > most_logits:
            most_logits = 0
        ahead: dict[str, list[tuple[Reading, int]]] = {}
        for reading, share in dealt:
            until = reading.done + share
            stops = reading.stops(until, rewinds=self._machine.rewinds, most_logits=most_logits)
            if reading not in due:
                yield from self._read_chunk(reading, stops)
            elif self._machine.packs:
                for stop in stops[:-1]:
                    ahead.setdefault(self._space_of(reading), []).append((reading, stop))
            else:
                for stop in stops[:-1]:
                    yield from self._read_ahead([(reading, stop)])
        for pieces in ahead.values():
            yield from self._read_ahead(pieces)
        return due

    def _read_chunk(self, reading: Reading, stops: Sequence[int]) -> Iterator[tuple[int, Outcome]]:
        """Read pieces of one prompt that does not end in them, or of which nothing but the caches is wanted."""
        yield from self._begin_replies()  # their first words do not wait for this
        row, started, read_before = reading.row, perf_counter(), reading.done
        try:
            for stop in stops:
                mx.eval(self._pieces([(reading, stop)]))
                mx.clear_cache()
        except Exception as error:
            yield self._unread(reading, error)
            return
        self._pace.measured(reading.done - read_before, perf_counter() - started)
        if not row.said:
            yield row.key, Progress(reading.done, len(row.tokens), row.cached)
        if not reading.left:
            self._readings.remove(reading)
            self._forget(row)
            yield row.key, Ended("length")

    def _begin_replies(self) -> Iterator[tuple[int, Outcome]]:
        """Say the first words of those who came in, which are still being computed."""
        for space, decoders in list(self._decoders.items()):
            for decoder in list(decoders):
                yield from self._said(space, decoder, decoder.begin())

    def _read_ahead(self, pieces: list[tuple[Reading, int]]) -> Iterator[tuple[int, Outcome]]:
        """Read prompts up to their last pieces, without waiting until that is computed."""
        try:
            mx.async_eval(self._pieces(pieces))  # type: ignore[no-untyped-call]
        except NotRun as error:
            if len(pieces) == 1:
                yield self._unread(pieces[0][0], error)
                return
            self._complain(error)
            for piece in pieces:
                yield from self._read_ahead([piece])

    def _pieces(self, pieces: Sequence[tuple[Reading, int]]) -> list[mx.array]:
        network = self._networks[self._space_of(pieces[0][0])]
        return read(network, pieces, self._keep_read if self._keeps else None)

    def _complain(self, error: Exception) -> None:
        if self._ranks is not None:  # the others know nothing of it
            raise error.__cause__ or error
        log.warning(
            "Prompts could not be read together: each is read by itself. %r", error.__cause__ or error
        )

    def _unread(self, reading: Reading, error: Exception) -> tuple[int, Outcome]:
        """Give up a prompt that cannot be read even by itself."""
        cause = error.__cause__ or error
        if self._ranks is not None:
            raise cause
        log.error("A prompt could not be read.", exc_info=cause)
        self._readings.remove(reading)
        self._forget(reading.row)
        return reading.row.key, EngineError(f"The prompt could not be read: {cause}")

    def _to_read(self, reading: Reading) -> int:
        if reading.layers is None:
            self._find_prefix(reading)
        return reading.left

    def _waits(self, group: Sequence[Reading], other: Reading) -> bool:
        return self._keeps and waits_for(group, other, len(other.row.tokens) - self._at_most(other))

    def _at_most(self, reading: Reading) -> int:
        if reading.layers is not None:
            return reading.left
        return reading.left - self._prefixes.covered(reading.row.tokens, self._space(reading.row.request))

    def _find_prefix(self, reading: Reading) -> None:
        """Begin with the longest prefix that is known, here or on disk."""
        assert self._machine is not None
        row = reading.row
        space, most = self._space(row.request), reading.marks[-2] if len(reading.marks) > 1 else 0
        if row.request.max_tokens == 0:
            most = reading.marks[-1]
        known, layers = self._prefixes.longest(row.tokens[:most], space)
        if self._disk is not None and not space:
            stored = self._disk.longest(row.tokens[:most], beyond=known)
            if stored is not None and (read := self._disk.read(stored)) is not None:
                known, layers = stored.length, read
                self._prefixes.keep(row.tokens[:known], layers, space)
        reading.layers = layers if layers is not None else self._machine.fresh_layers(space)
        reading.done = row.cached = known

    def _decoder(self, row: Row) -> Decoder:
        """Return who decodes the row: those of its network who run, or a new one."""
        assert self._machine is not None
        space = self._space(row.request)
        decoders = self._decoders.get(space)
        if decoders and self._machine.together:
            return decoders[-1]
        drafts = self._options.draft_tokens if row.drafter is not None else 0
        agree = self._ranks.agree if self._ranks is not None else None
        return Decoder(self._networks[space], packs=self._machine.packs, drafts=drafts, agree=agree)

    # -- prefixes --------------------------------------------------------------------------------------------

    @property
    def _keeps(self) -> bool:
        return self._prefixes.enabled or self._disk is not None

    def _keep(self, row: Row, tokens: list[int], layers: Layers, *, persist: bool = False) -> None:
        if not self._keeps:
            return
        space = self._space(row.request)
        self._prefixes.keep(tokens, layers, space)
        self._shrink_prefixes()
        if persist and self._disk is not None and not space and not self._disk.has(tokens):
            mx.eval([layer.state for layer in layers])  # another thread writes them
            self._disk.write(tokens, [alias(layer) for layer in layers])

    def _keep_read(self, reading: Reading, mark: int, layers: Layers) -> None:
        row = reading.row
        self._keep(row, row.tokens[:mark], layers, persist=self._outlives(row.request, mark))

    def _outlives(self, request: GenerationRequest, position: int) -> bool:
        """Whether a checkpoint is worth a place on disk: what others begin with, and what is likely to come.

        Where nothing is read ahead, the end of a prompt's history has to do for the latter.
        """
        if request.max_tokens == 0:
            self._reads_ahead = True
            return True
        return position in (request.checkpoints[:1] if self._reads_ahead else request.checkpoints)


def _turn(reading: Reading) -> int:
    """Whose prompt is read first. Time has no part in it: it would differ between processes that share a model."""
    row = reading.row
    return row.key + OVERTAKEN * row.request.priority


def _newcomer(reading: Reading) -> Newcomer:
    assert reading.layers is not None
    return Newcomer(reading.row, reading.row.tokens[reading.done :], reading.layers)


def _failure(row: Row) -> EngineError:
    return EngineError(f"Choosing the next token failed: {row.choice.error}")


def _expected(request: GenerationRequest) -> int:
    """Return how many tokens to set memory aside for."""
    reply = request.max_tokens
    if request.expected_tokens is not None:
        reply = min(reply, max(request.expected_tokens, 1))
    return len(request.prompt) + reply
