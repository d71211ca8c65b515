"""The rows that are being decoded: one step, one token for each; with drafts, several.

A row alone is decoded on the model's own caches, which is the fastest way there is; rows together on caches
merged from theirs. They are merged when a second row joins and taken apart when one is left, so nobody has to
choose. The step is a pipeline: while a token is read here, the next one is being computed already.

Newcomers bring the last piece of their prompts. It is run together with everybody's next token, or by itself where
the network cannot be run packed (packing.py), and their first token is then one like all others.

With a drafter a row alone is decoded several tokens at a time: the drafts are run through the model in one
step, what the model itself would have chosen behind each of them is compared, and the caches are rewound to
where they part. Choices depend on nothing but text, seed and place, so drafts never change what is said.

A constraint has to read a token before it can say what may follow, so a row that has one is chosen for only when
the token before is known, and gets no drafts; unless the constraint has promised to leave the next tokens alone.

Knows nothing of queues, prefixes, or how prompts come to their last piece.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from mlx_backend.engine.mlx.kv_cache import RewindableRotatingKVCache, merged
from mlx_backend.engine.mlx.packed_forward import ForwardError, Segment, run
from mlx_backend.engine.mlx.sampling import SamplePosition, choose

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from mlx_backend.engine.mlx.kv_cache import LayerCaches
    from mlx_backend.engine.mlx.sequences import DecodingSequence, GeneratedToken, PrefilledSequence


class Decoder:
    """Rows of one network, which `packs` or not. `drafts` is how many tokens a drafter may propose at once.

    `agree` makes one choice of those that several processes came to.
    """

    def __init__(
        self,
        network: Any,
        *,
        can_pack: bool = False,
        drafts: int = 0,
        agree: Callable[[mx.array], mx.array] | None = None,
    ) -> None:
        self.sequences: list[DecodingSequence] = []
        self._network = network
        self._can_pack = can_pack
        self._drafts = drafts
        self._agree = agree
        self._layers: LayerCaches = []
        self._next: mx.array | None = None  # the tokens chosen last, one for each row, being computed
        self._arrived: Sequence[PrefilledSequence] = ()  # whose caches are still their own
        self._first: mx.array | None = None  # the tokens chosen for those

    @property
    def all_sequences(self) -> list[DecodingSequence]:
        """Those who are being decoded, and those who came in with the last step."""
        return [*self.sequences, *(each.sequence for each in self._arrived)]

    def join(self, prefilled: Sequence[PrefilledSequence]) -> None:
        """Let newcomers in, in a run of their own. After NotRun nothing has happened to the others."""
        self._merge_arrived()
        sequences = [each.sequence for each in prefilled]
        logits = self._run((), prefilled)
        self._arrived = prefilled
        self._first = self._choose(logits, sequences, [sequence.place() for sequence in sequences])
        self._compute(sequences, self._first)

    def begin(self) -> list[GeneratedToken]:
        """Say the first tokens of those who came in, before they are fed. It waits for them.

        Whose reply ends with that is gone.
        """
        sequences = [each.sequence for each in self._arrived]
        if not any(sequence.has_pending_token for sequence in sequences):
            return []
        assert self._first is not None
        said = [
            sequence.say(token, sequence.report)
            for sequence, token in zip(sequences, _listed(self._first), strict=True)
        ]
        stay = [
            at
            for at, each in enumerate(said)
            if each.reason is None or sequences[at].choice.error is not None
        ]
        if len(stay) < len(sequences):
            self._arrived = [self._arrived[at] for at in stay]
            self._first = self._first[mx.array(stay)] if stay else None
        return said

    def step(self, prefilled: Sequence[PrefilledSequence] = ()) -> list[GeneratedToken]:
        """Let newcomers in, say the tokens that were chosen, and choose the next.

        Rows that end do not leave by themselves. After NotRun nothing has happened to rows that had newcomers.
        """
        self._merge_arrived()
        if prefilled:
            return self._advance(prefilled)
        if all(sequence.chosen == sequence.request.max_tokens for sequence in self.sequences):
            return self._say_last()
        if len(self.sequences) == 1 and self._drafts:
            [sequence] = self.sequences
            # The token that was chosen last is free already; behind it and every draft another one is chosen.
            free = self._unconstrained_tokens(sequence) - 2
            if sequence.drafter is not None and free > 0:
                assert self._next is not None
                [token] = _listed(self._next)
                known = [*sequence.tokens, token] if sequence.has_pending_token else sequence.tokens
                left = sequence.request.max_tokens - (len(known) - len(sequence.request.prompt))
                most = min(self._drafts, left, free)
                drafts = sequence.drafter.propose(known, most) if most > 0 else []
                if drafts:
                    return self._try(sequence, token, drafts)
        return self._advance()

    def remove(
        self, gone: Collection[DecodingSequence], wanted: Collection[DecodingSequence] = ()
    ) -> dict[int, LayerCaches]:
        """Let rows go; return the caches of those that are wanted, by the row's key."""
        if not gone:
            return {}
        self._merge_arrived()
        gone = [sequence for sequence in self.sequences if sequence in gone]
        wanted = [sequence for sequence in gone if sequence in wanted]
        at = {sequence.key: index for index, sequence in enumerate(self.sequences)}
        kept = [sequence for sequence in self.sequences if sequence not in gone]
        if len(self.sequences) == 1:
            taken = {sequence.key: self._layers for sequence in wanted}
        else:
            taken = {
                sequence.key: [layer.extract(at[sequence.key]) for layer in self._layers]
                for sequence in wanted
            }
        if not kept:
            self._layers, self._next = [], None
        elif len(kept) < len(self.sequences):
            indices = [at[sequence.key] for sequence in kept]
            assert self._next is not None
            self._next = self._next[mx.array(indices)]
            self._layers = _only(indices, self._layers)
        self.sequences = kept
        return taken

    def _advance(self, prefilled: Sequence[PrefilledSequence] = ()) -> list[GeneratedToken]:
        fed, sequences = self._next, self.sequences
        waiting = [sequence.has_pending_token for sequence in sequences]
        told = [sequence.report for sequence in sequences]
        logits = self._run(sequences, prefilled)
        tokens: list[int] | None = None
        if any(self._unconstrained_tokens(sequence) < 2 for sequence in sequences):
            mx.async_eval(logits)  # type: ignore[no-untyped-call]  # the network runs while the tokens are read
            tokens = self._read(fed)
        places = [
            sequence.position_after(fed, at) for at, sequence in enumerate(sequences) if fed is not None
        ]
        places += [each.sequence.place() for each in prefilled]
        all_sequences = [*sequences, *(each.sequence for each in prefilled)]
        chosen = self._choose(logits, all_sequences, places)
        self._compute(all_sequences, chosen)
        if prefilled:
            self._arrived, self._first = prefilled, chosen[len(sequences) :]
            chosen = chosen[: len(sequences)]
        self._next = chosen if sequences else None
        if tokens is None:
            tokens = self._read(fed)
        return [
            sequence.say(token, report)
            for sequence, token, report, waits in zip(sequences, tokens, told, waiting, strict=True)
            if waits
        ]

    def _say_last(self) -> list[GeneratedToken]:
        """Say tokens behind which nothing else is wanted."""
        assert self._next is not None
        chosen = zip(self.sequences, _listed(self._next), strict=True)
        return [
            sequence.say(token, sequence.report) for sequence, token in chosen if sequence.has_pending_token
        ]

    def _run(self, sequences: Sequence[DecodingSequence], prefilled: Sequence[PrefilledSequence]) -> mx.array:
        """Feed the tokens chosen last, if anybody's, and newcomers' last pieces; return each one's next logits."""
        parts: list[Segment] = []
        if sequences:
            assert self._next is not None
            parts.append(Segment(self._next[:, None], self._layers))
        if not (prefilled or self._can_pack):
            logits: mx.array = self._network(parts[0].tokens, cache=self._layers)
            return logits[:, -1]
        parts += [Segment(mx.array([list(each.tokens)]), each.layers) for each in prefilled]
        try:
            every = run(self._network, parts)
        except ForwardError as error:
            if prefilled:
                raise
            raise error.__cause__ or error from None
        if not prefilled:
            return every
        ends = list(accumulate((len(each.tokens) for each in prefilled), initial=len(sequences) - 1))[1:]
        return every[mx.array([*range(len(sequences)), *ends])]

    def _merge_arrived(self) -> None:
        """Join the caches of those who came in, which have read all of their prompts, to those of the rows."""
        arrived, self._arrived = self._arrived, ()
        first, self._first = self._first, None
        if first is None:
            return
        texts = [each.layers for each in arrived]
        if len(self.sequences) > 1:
            for ours, theirs in zip(self._layers, merged(texts), strict=True):
                ours.extend(theirs)
        else:
            texts = [self._layers, *texts] if self.sequences else texts
            self._layers = merged(texts) if len(texts) > 1 else texts[0]
        self._next = first if self._next is None else mx.concatenate([self._next, first])
        self.sequences = [*self.sequences, *(each.sequence for each in arrived)]

    def _unconstrained_tokens(self, sequence: DecodingSequence) -> int:
        """How many tokens may be chosen for a row before its constraint has to be asked."""
        if self._agree is not None and sequence.choice.constraint is not None:
            return 0  # the other processes cannot ask it, and have to take the same steps
        return sequence.choice.unconstrained_tokens()

    def _try(self, sequence: DecodingSequence, token: int, drafts: Sequence[int]) -> list[GeneratedToken]:
        fed = [token, *drafts]
        tokens = mx.array(fed)
        self._layers = [RewindableRotatingKVCache.of(layer) for layer in self._layers]
        logits = self._network(tokens[None], cache=self._layers)[0]
        before, waits = sequence.chosen, sequence.has_pending_token
        places = [sequence.position_after(tokens, at) for at in range(len(fed))]
        told = sequence.report
        chosen = self._choose(logits, [sequence] * len(fed), places)
        self._compute([sequence], chosen)
        choices = _listed(chosen)
        agreed = 0
        while agreed < len(drafts) and choices[agreed] == drafts[agreed]:
            agreed += 1
        report = sequence.report[0] if sequence.report is not None else None
        said = [sequence.say(token, told)] if waits else []
        read = 1  # as many of the tokens that were fed stand
        while read <= agreed and not (said and said[-1].reason):
            said.append(sequence.say(drafts[read - 1], (report, read - 1) if report is not None else None))
            read += 1
        for fed_token in fed[:read]:
            sequence.read(fed_token)
        if excess := len(fed) - read:
            for layer in self._layers:
                layer.trim(excess)
        sequence.chosen = before + read
        sequence.memory = places[read - 1].memory
        sequence.report = (report, read - 1) if report is not None else None
        self._next = chosen[read - 1 : read]
        return said

    def _read(self, fed: mx.array | None) -> list[int]:
        """Wait for the tokens that are fed, and let the rows' constraints read them."""
        tokens = _listed(fed) if fed is not None else []
        for sequence, token in zip(self.sequences, tokens, strict=True):
            sequence.read(token)
        return tokens

    def _choose(
        self, logits: mx.array, sequences: Sequence[DecodingSequence], places: Sequence[SamplePosition]
    ) -> mx.array:
        chosen, report = choose(logits, places)
        if self._agree is not None:
            chosen = self._agree(chosen)
        for at, sequence in enumerate(sequences):
            sequence.report = (
                (report, at) if report is not None and sequence.choice.logprobs is not None else None
            )
        return chosen

    def _compute(self, sequences: Sequence[DecodingSequence], chosen: mx.array) -> None:
        """Begin to compute the choices, and all that would otherwise pile up uncomputed."""
        reports = {
            id(sequence.report[0]): sequence.report[0]
            for sequence in sequences
            if sequence.report is not None
        }
        memories = [
            (sequence.memory.seen, sequence.memory.said)
            for sequence in sequences
            if sequence.memory is not None
        ]
        mx.async_eval(chosen, [report.arrays for report in reports.values()], memories)  # type: ignore[no-untyped-call]


def _only(sequences: Sequence[int], layers: LayerCaches) -> LayerCaches:
    """Keep some rows of a batch's caches; one alone gets the model's own kind."""
    if len(sequences) == 1:
        return [layer.extract(sequences[0]) for layer in layers]
    for layer in layers:
        layer.filter(list(sequences))
    return layers


def _listed(tokens: mx.array) -> list[int]:
    """Wait for the tokens and return them."""
    return tokens.tolist()  # type: ignore[return-value]
