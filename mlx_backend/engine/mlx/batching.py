"""The batch on MLX: prompts read in chunks, replies decoded together, prefixes reused, memory watched.

Runs on the engine thread only (see scheduler.py), where the model is loaded too: MLX's streams belong to
threads. Requests arrive here checked; nothing of them may raise inside a step.

A step reads one chunk of prompts and then says one token for every reply, so a running stream never waits for
more than that chunk. Short prompts are read in one run; a mistake in one of them is its own all the same.
"""

from __future__ import annotations

import logging
from bisect import insort
from collections import deque
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from ..base import EngineError, EngineRefused, Progress, TokenDelta
from ..batch import Ended, ModelFacts
from ..turns import Turns
from .caches import PrefixCache, alias
from .decoding import Decoder, Row
from .machine import Machine
from .prefill import read_alone, read_together
from .reading import Pace, Reading, alike, shares, waits_for
from .sampling import Choice

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from ..base import GenerationRequest
    from ..batch import Outcome
    from ..options import EngineOptions
    from .decoding import Layers
    from .disk import DiskCheckpoints
    from .distributed import Ranks
    from .loading import LoadedModel

log = logging.getLogger(__name__)

DEVICE = Turns()  # one for all engines of the process
EXPECTED_TOKENS = 2048  # set aside for a reply whose length nobody knows
OVERTAKEN = 32  # requests that a prompt of the next better priority may come later and still be read first
SOON_READ = 256  # tokens that another's first word may wait for
WORTH_KEEPING = 64  # tokens of a prompt that was given up half-way
STEPS_BETWEEN_CLEANINGS = 512


@dataclass(frozen=True, slots=True)
class _Run:
    """Prompts that were read together, or one that failed; with tokens, the first ones of their replies."""

    readings: list[Reading]
    layers: Layers | None = None
    tokens: mx.array | None = None
    error: EngineError | None = None


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
        """Read one chunk of the prompts that wait, then say one token for everybody.

        In this order, because newcomers are let in between two steps: their first token does not wait for one
        more of the others'.
        """
        with DEVICE:
            self.steps += 1
            if self.steps % STEPS_BETWEEN_CLEANINGS == 0:
                mx.clear_cache()
            self._bring_back()
            if self._readings:
                yield from self._read()
            for space in list(self._decoders):
                for decoder in self._decoders.get(space, ()):
                    yield from self._decode(space, decoder)
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

    def _space(self, request: GenerationRequest) -> str:
        return request.adapter or self._options.adapter or ""

    # -- replies ---------------------------------------------------------------------------------------------

    def _decode(self, space: str, decoder: Decoder) -> Iterator[tuple[int, Outcome]]:
        ended: list[Row] = []
        for said in decoder.step():
            row = said.row
            if row.choice.error is not None:
                continue
            yield row.key, TokenDelta(said.token, row.text.push(said.token), said.logprobs)
            if said.reason is not None:
                ended.append(row)
                yield row.key, Ended(said.reason)
        broken = [row for row in decoder.rows if row.choice.error is not None]
        for row in broken:
            yield row.key, _failure(row)
        kept = decoder.leave([*ended, *broken], wanted=ended if self._keeps else ())
        for row in [*ended, *broken]:
            if row.key in kept:
                self._keep(row, row.tokens, kept[row.key])
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
            if row in decoder.rows:
                decoder.leave([row])
        self._tidy(space)

    def _tidy(self, space: str) -> None:
        running = [decoder for decoder in self._decoders.pop(space, ()) if decoder.rows]
        if running:
            self._decoders[space] = running

    # -- prompts ---------------------------------------------------------------------------------------------

    def _read(self) -> Iterator[tuple[int, Outcome]]:
        """Read one chunk, of several prompts if they are short."""
        # A warm-up is read in small pieces: whoever comes should not wait for it.
        warmup = self._readings[0].row.request.max_tokens == 0
        left = self._pace.chunk(others=bool(self._decoders) or len(self._readings) > 1 or warmup)
        groups = shares(
            list(self._readings),
            left,
            to_read=self._to_read,
            at_most=self._at_most,
            together=self._together,
            waits=self._waits,
        )
        started, read = perf_counter(), 0
        begun: _Run | None = None  # replies whose first tokens are being computed
        for group in groups:
            if begun is not None and sum(share for _, share in group) > SOON_READ:
                yield from self._begin_replies(begun)
                begun = None
            read -= sum(reading.done for reading, _ in group)
            for run in self._run(group):
                if begun is not None:  # said only now that the device has the next prompt to do
                    yield from self._begin_replies(begun)
                    begun = None
                for reading in run.readings:
                    read += reading.done
                    row = reading.row
                    if run.error is None and not row.said:
                        yield row.key, Progress(reading.done, len(row.tokens), row.cached)
                    if run.error is None and reading.left:
                        continue
                    self._readings.remove(reading)
                    if run.tokens is None:
                        self._forget(row)
                        yield row.key, run.error or Ended("length")
                if run.tokens is not None:
                    begun = run
        if begun is not None:
            yield from self._begin_replies(begun)
        self._pace.measured(read, perf_counter() - started)

    def _run(self, group: Sequence[tuple[Reading, int]]) -> Iterator[_Run]:
        """Read prompts in one run of the network if there are several, or else each by itself."""
        assert self._machine is not None
        rewinds, most_logits = self._machine.rewinds, self._machine.most_logits
        readings = [reading for reading, _ in group]
        network = self._networks[self._space(readings[0].row.request)]
        keep = self._keep_read if self._keeps else None
        if len(group) > 1:
            try:
                layers, logits = read_together(network, readings, most_logits=most_logits, keep=keep)
            except Exception:
                if self._ranks is not None:  # the others know nothing of it
                    raise
                log.exception("Prompts could not be read together; each is read by itself.")
            else:
                yield self._chosen(readings, layers, logits)
                return
        for reading, share in group:
            until = reading.done + share
            try:
                last = read_alone(
                    network, reading, until, rewinds=rewinds, most_logits=most_logits, keep=keep
                )
            except Exception as error:
                if self._ranks is not None:
                    raise
                log.exception("A prompt could not be read.")
                yield _Run([reading], error=EngineError(f"The prompt could not be read: {error}"))
            else:
                assert reading.layers is not None
                yield _Run([reading]) if last is None else self._chosen([reading], reading.layers, last)

    def _chosen(self, readings: list[Reading], layers: Layers, logits: mx.array) -> _Run:
        rows = [reading.row for reading in readings]
        return _Run(readings, layers, self._decoder(rows[0]).first(rows, logits))

    def _to_read(self, reading: Reading) -> int:
        if reading.layers is None:
            self._find_prefix(reading)
        return reading.left

    def _together(self, group: Sequence[Reading], other: Reading) -> bool:
        assert self._machine is not None
        return self._machine.together and self._machine.rewinds and alike(group, other)

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
        return Decoder(self._networks[space], drafts=drafts, agree=agree)

    def _begin_replies(self, run: _Run) -> Iterator[tuple[int, Outcome]]:
        """Say replies' first tokens, now; the rest is decoded with the others'."""
        assert run.layers is not None
        assert run.tokens is not None
        rows = [reading.row for reading in run.readings]
        space = self._space(rows[0].request)
        decoder = self._decoder(rows[0])
        for said in decoder.join(rows, run.layers, run.tokens):
            row = said.row
            if row.choice.error is not None:
                yield row.key, _failure(row)
            else:
                yield row.key, TokenDelta(said.token, row.text.push(said.token), said.logprobs)
                if said.reason is None:
                    continue
                yield row.key, Ended(said.reason)
            self._forget(row)
        if decoder.rows and decoder not in self._decoders.setdefault(space, []):
            self._decoders[space].append(decoder)
        self._tidy(space)

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


def _failure(row: Row) -> EngineError:
    return EngineError(f"Choosing the next token failed: {row.choice.error}")


def _expected(request: GenerationRequest) -> int:
    """Return how many tokens to set memory aside for."""
    reply = request.max_tokens
    if request.expected_tokens is not None:
        reply = min(reply, max(request.expected_tokens, 1))
    return len(request.prompt) + reply
