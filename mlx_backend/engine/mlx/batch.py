"""The batch on MLX: prompts read in chunks, replies decoded together, prefixes reused, memory watched.

Runs on the engine thread only (see scheduler.py), where the model is loaded too: MLX's streams belong to
threads. Requests arrive here checked; nothing of them may raise inside a step.

A step reads at most one chunk of prompts and says one token for every reply, so a running stream never waits for
more than that chunk. Prompts that end in it are run together with the replies' next tokens where the network can do
that, so that whoever talks hardly notices who comes; a mistake in one of them is its own all the same.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from mlx_backend.device.lock import Turns
from mlx_backend.engine.base import TokenDelta
from mlx_backend.engine.batch import Ended, ModelFacts
from mlx_backend.engine.mlx.decode import Decoder
from mlx_backend.engine.mlx.packed_forward import NotRun
from mlx_backend.engine.mlx.prefill_queue import Prompts
from mlx_backend.engine.mlx.prefix_store import Keeping
from mlx_backend.engine.mlx.runtime import Machine
from mlx_backend.engine.mlx.sampling import Choice
from mlx_backend.engine.mlx.sequences import Row
from mlx_backend.errors import EngineError, EngineRefused

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence
    from pathlib import Path

    from mlx_backend.device.memory import Ledger
    from mlx_backend.engine.base import GenerationRequest
    from mlx_backend.engine.batch import Outcome
    from mlx_backend.engine.mlx.collectives import Ranks
    from mlx_backend.engine.mlx.loading import LoadedModel
    from mlx_backend.engine.mlx.prefill_plan import Reading
    from mlx_backend.engine.mlx.sequences import Said
    from mlx_backend.models.engine_options import EngineOptions

log = logging.getLogger(__name__)

DEVICE = Turns()  # one for all engines of the process
EXPECTED_TOKENS = 2048  # set aside for a reply whose length nobody knows
STEPS_BETWEEN_CLEANINGS = 512


class MLXBatch:
    """Implements the scheduler's `Batch`."""

    _ledger: Ledger  # these three while a model is loaded
    _keeping: Keeping
    _prompts: Prompts

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
        self._rows: dict[int, Row] = {}
        self._put_off: deque[Row] = deque()  # for want of memory, in the middle of their replies

    # -- the model -------------------------------------------------------------------------------------------

    def load(self, report: Callable[[float], None]) -> ModelFacts:
        """Load the model on this thread, warm it up, and see how much memory is left."""
        machine = self._machine = Machine(self._source, self._options, self._ranks, report)
        self._model, self._networks = machine.model, machine.networks
        self._ledger = machine.ledger
        on_disk = self._options.adapter or ""  # what most requests are about
        self._keeping = Keeping(machine.prefixes, machine.disk, machine.ledger, on_disk)
        self._prompts = Prompts(machine, self._keeping, self._forget, shared=self._ranks is not None)
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
            del self._ledger, self._keeping, self._prompts
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
        """Whether its caches fit beside those that are there.

        Raises EngineRefused if they never can, EngineBusy if other models leave no room for them even alone.
        """
        if request.max_tokens == 0 and not self._keeping.enabled:
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
            self._space(request),
        )
        row.memory = choice.memory_of(())
        row.drafter = self._machine.drafter()
        self._begin(row, _expected(request))

    @property
    def rate(self) -> float | None:
        """How many tokens of prompt a second this machine reads; None before it is known."""
        return self._prompts.pace.rate

    @rate.setter
    def rate(self, rate: float | None) -> None:
        self._prompts.pace.rate = rate

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
            due = (yield from self._read()) if self._prompts.waiting else []
            for space in dict.fromkeys([*self._decoders, *(each.row.space for each in due)]):
                here = [each for each in due if each.row.space == space and each in self._prompts.waiting]
                yield from self._decode(space, here)
            if due and not self._prompts.waiting:
                # With others waiting, their run is begun before these are said: the device does not rest.
                yield from self._begin_replies()
            self._keeping.declare()

    def remove(self, key: int) -> None:
        """Drop a request that nobody wants any more."""
        row = self._rows[key]
        if row in self._put_off:
            self._put_off.remove(row)
        else:
            self._take_out(row)
        self._forget(row)

    def _begin(self, row: Row, expected: int) -> None:
        self._ledger.reserve(row.key, expected, row.space)
        self._keeping.make_room()
        self._prompts.add(row)
        self._rows[row.key] = row

    def _forget(self, row: Row) -> None:
        self._rows.pop(row.key, None)
        self._ledger.release(row.key)

    def _space(self, request: GenerationRequest) -> str:
        return request.adapter or self._options.adapter or ""

    # -- replies ---------------------------------------------------------------------------------------------

    def _read(self) -> Generator[tuple[int, Outcome], None, list[Reading]]:
        """Read one chunk, and return the prompts of which only the last pieces are left, which are due now."""
        dealt = self._prompts.deal(talking=bool(self._decoders))
        if dealt.chunks:  # nobody's first word waits for those
            yield from self._begin_replies()
        yield from self._prompts.read(dealt)
        return dealt.due

    def _decode(self, space: str, due: Sequence[Reading]) -> Iterator[tuple[int, Outcome]]:
        """Say one token for everybody of a space, and let in those whose last pieces are due."""
        assert self._machine is not None
        if due and self._machine.packs:
            decoder = self._decoder(due[0].row)
            try:
                said = decoder.step([self._prompts.newcomer(reading) for reading in due])
            except NotRun as error:
                if not decoder.everybody and len(due) == 1:
                    yield self._prompts.give_up(due[0], error)
                    return
                self._prompts.complain(error)
            else:
                yield from self._come_in(space, decoder, due)
                yield from self._said(space, decoder, said)
                return
        for reading in due:
            decoder = self._decoder(reading.row)
            try:
                decoder.join([self._prompts.newcomer(reading)])
            except NotRun as error:
                yield self._prompts.give_up(reading, error)
            else:
                yield from self._come_in(space, decoder, [reading])
        for decoder in list(self._decoders.get(space, ())):
            if decoder.everybody:  # the one before may have had to put its only reply off
                yield from self._said(space, decoder, decoder.step())

    def _come_in(
        self, space: str, decoder: Decoder, readings: Sequence[Reading]
    ) -> Iterator[tuple[int, Outcome]]:
        for reading in readings:
            yield from self._prompts.come_in(reading)
        if decoder not in self._decoders.setdefault(space, []):
            self._decoders[space].append(decoder)

    def _begin_replies(self) -> Iterator[tuple[int, Outcome]]:
        """Say the first words of those who came in, which are still being computed."""
        for space, decoders in list(self._decoders.items()):
            for decoder in list(decoders):
                yield from self._said(space, decoder, decoder.begin())

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
        kept = decoder.leave([*ended, *broken], wanted=ended if self._keeping.enabled else ())
        for row in [*ended, *broken]:
            if row.key in kept:
                self._keeping.keep(row, row.tokens[: row.fed], kept.pop(row.key))
            self._forget(row)
        self._tidy(space)
        yield from self._make_room(decoder)

    def _make_room(self, decoder: Decoder) -> Iterator[tuple[int, Outcome]]:
        """Set more aside for replies that grow longer than expected, or put the least urgent off until it fits."""
        for row in list(decoder.rows):
            if row in self._put_off or len(row.tokens) < self._ledger.reserved(row.key):
                continue
            most = len(row.request.prompt) + row.request.max_tokens
            self._ledger.reserve(row.key, min(most, len(row.tokens) + EXPECTED_TOKENS), row.space)
            self._keeping.make_room()
            while self._ledger.used > self._ledger.room and row not in self._put_off:
                others = [other for other in self._rows.values() if other not in self._put_off]
                if len(others) > 1:
                    self._put_one_off(max(others, key=lambda other: (other.request.priority, other.key)))
                    continue
                if self._ledger.used > self._ledger.most_room:  # alone: this is as long as it can get
                    decoder.leave([row])
                    self._tidy(row.space)
                    self._forget(row)
                    yield row.key, Ended("length")
                break

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
        assert self._machine is not None
        row.drafter = self._machine.drafter()  # the old one has caches of its own
        self._put_off.append(row)

    def _bring_back(self) -> None:
        while self._put_off:
            row = self._put_off[0]
            tokens = len(row.tokens) + min(row.request.max_tokens - row.said, EXPECTED_TOKENS)
            alone = len(self._put_off) == len(self._rows)
            if not (alone or self._ledger.fits(tokens, row.space)):
                return
            self._begin(self._put_off.popleft(), tokens)

    def _take_out(self, row: Row) -> None:
        """Take a row out of wherever it is."""
        if self._prompts.take_out(row):
            return
        for decoder in self._decoders.get(row.space, ()):
            if row in decoder.everybody:
                decoder.leave([row])
        self._tidy(row.space)

    def _tidy(self, space: str) -> None:
        running = [decoder for decoder in self._decoders.pop(space, ()) if decoder.everybody]
        if running:
            self._decoders[space] = running

    def _decoder(self, row: Row) -> Decoder:
        """Return who decodes the row: those of its network who run, or a new one."""
        assert self._machine is not None
        decoders = self._decoders.get(row.space)
        if decoders and self._machine.together:
            return decoders[-1]
        drafts = self._options.draft_tokens if row.drafter is not None else 0
        agree = self._ranks.agree if self._ranks is not None else None
        return Decoder(self._networks[row.space], packs=self._machine.packs, drafts=drafts, agree=agree)


def _failure(row: Row) -> EngineError:
    return EngineError(f"Choosing the next token failed: {row.choice.error}")


def _expected(request: GenerationRequest) -> int:
    """Return how many tokens to set memory aside for."""
    reply = request.max_tokens
    if request.expected_tokens is not None:
        reply = min(reply, max(request.expected_tokens, 1))
    return len(request.prompt) + reply
