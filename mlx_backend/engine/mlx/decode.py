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
from mlx_backend.engine.mlx.packed_forward import NotRun, Part, run
from mlx_backend.engine.mlx.sampling import Place, choose

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from mlx_backend.engine.mlx.kv_cache import Layers
    from mlx_backend.engine.mlx.sequences import Newcomer, Row, Said


class Decoder:
    """Rows of one network, which `packs` or not. `drafts` is how many tokens a drafter may propose at once.

    `agree` makes one choice of those that several processes came to.
    """

    def __init__(
        self,
        network: Any,
        *,
        packs: bool = False,
        drafts: int = 0,
        agree: Callable[[mx.array], mx.array] | None = None,
    ) -> None:
        self.rows: list[Row] = []
        self._network = network
        self._packs = packs
        self._drafts = drafts
        self._agree = agree
        self._layers: Layers = []
        self._next: mx.array | None = None  # the tokens chosen last, one for each row, being computed
        self._arrived: Sequence[Newcomer] = ()  # whose caches are still their own
        self._first: mx.array | None = None  # the tokens chosen for those

    @property
    def everybody(self) -> list[Row]:
        """Those who are being decoded, and those who came in with the last step."""
        return [*self.rows, *(each.row for each in self._arrived)]

    def join(self, newcomers: Sequence[Newcomer]) -> None:
        """Let newcomers in, in a run of their own. After NotRun nothing has happened to the others."""
        self._settle()
        rows = [each.row for each in newcomers]
        logits = self._run((), newcomers)
        self._arrived = newcomers
        self._first = self._choose(logits, rows, [row.place() for row in rows])
        self._compute(rows, self._first)

    def begin(self) -> list[Said]:
        """Say the first tokens of those who came in, before they are fed. It waits for them.

        Whose reply ends with that is gone.
        """
        rows = [each.row for each in self._arrived]
        if not any(row.waits_to_say for row in rows):
            return []
        assert self._first is not None
        said = [row.say(token, row.report) for row, token in zip(rows, _listed(self._first), strict=True)]
        stay = [
            at for at, each in enumerate(said) if each.reason is None or rows[at].choice.error is not None
        ]
        if len(stay) < len(rows):
            self._arrived = [self._arrived[at] for at in stay]
            self._first = self._first[mx.array(stay)] if stay else None
        return said

    def step(self, newcomers: Sequence[Newcomer] = ()) -> list[Said]:
        """Let newcomers in, say the tokens that were chosen, and choose the next.

        Rows that end do not leave by themselves. After NotRun nothing has happened to rows that had newcomers.
        """
        self._settle()
        if newcomers:
            return self._advance(newcomers)
        if all(row.chosen == row.request.max_tokens for row in self.rows):
            return self._say_last()
        if len(self.rows) == 1 and self._drafts:
            [row] = self.rows
            # The token that was chosen last is free already; behind it and every draft another one is chosen.
            free = self._free_for(row) - 2
            if row.drafter is not None and free > 0:
                assert self._next is not None
                [token] = _listed(self._next)
                known = [*row.tokens, token] if row.waits_to_say else row.tokens
                left = row.request.max_tokens - (len(known) - len(row.request.prompt))
                most = min(self._drafts, left, free)
                drafts = row.drafter.propose(known, most) if most > 0 else []
                if drafts:
                    return self._try(row, token, drafts)
        return self._advance()

    def leave(self, gone: Collection[Row], wanted: Collection[Row] = ()) -> dict[int, Layers]:
        """Let rows go; return the caches of those that are wanted, by the row's key."""
        if not gone:
            return {}
        self._settle()
        gone = [row for row in self.rows if row in gone]
        wanted = [row for row in gone if row in wanted]
        at = {row.key: index for index, row in enumerate(self.rows)}
        kept = [row for row in self.rows if row not in gone]
        if len(self.rows) == 1:
            taken = {row.key: self._layers for row in wanted}
        else:
            taken = {row.key: [layer.extract(at[row.key]) for layer in self._layers] for row in wanted}
        if not kept:
            self._layers, self._next = [], None
        elif len(kept) < len(self.rows):
            indices = [at[row.key] for row in kept]
            assert self._next is not None
            self._next = self._next[mx.array(indices)]
            self._layers = _only(indices, self._layers)
        self.rows = kept
        return taken

    def _advance(self, newcomers: Sequence[Newcomer] = ()) -> list[Said]:
        fed, rows = self._next, self.rows
        waiting = [row.waits_to_say for row in rows]
        told = [row.report for row in rows]
        logits = self._run(rows, newcomers)
        tokens: list[int] | None = None
        if any(self._free_for(row) < 2 for row in rows):
            mx.async_eval(logits)  # type: ignore[no-untyped-call]  # the network runs while the tokens are read
            tokens = self._read(fed)
        places = [row.next_place(fed, at) for at, row in enumerate(rows) if fed is not None]
        places += [each.row.place() for each in newcomers]
        everybody = [*rows, *(each.row for each in newcomers)]
        chosen = self._choose(logits, everybody, places)
        self._compute(everybody, chosen)
        if newcomers:
            self._arrived, self._first = newcomers, chosen[len(rows) :]
            chosen = chosen[: len(rows)]
        self._next = chosen if rows else None
        if tokens is None:
            tokens = self._read(fed)
        return [
            row.say(token, report)
            for row, token, report, waits in zip(rows, tokens, told, waiting, strict=True)
            if waits
        ]

    def _say_last(self) -> list[Said]:
        """Say tokens behind which nothing else is wanted."""
        assert self._next is not None
        chosen = zip(self.rows, _listed(self._next), strict=True)
        return [row.say(token, row.report) for row, token in chosen if row.waits_to_say]

    def _run(self, rows: Sequence[Row], newcomers: Sequence[Newcomer]) -> mx.array:
        """Feed the tokens chosen last, if anybody's, and newcomers' last pieces; return each one's next logits."""
        parts: list[Part] = []
        if rows:
            assert self._next is not None
            parts.append(Part(self._next[:, None], self._layers))
        if not (newcomers or self._packs):
            logits: mx.array = self._network(parts[0].tokens, cache=self._layers)
            return logits[:, -1]
        parts += [Part(mx.array([list(each.tokens)]), each.layers) for each in newcomers]
        try:
            every = run(self._network, parts)
        except NotRun as error:
            if newcomers:
                raise
            raise error.__cause__ or error from None
        if not newcomers:
            return every
        ends = list(accumulate((len(each.tokens) for each in newcomers), initial=len(rows) - 1))[1:]
        return every[mx.array([*range(len(rows)), *ends])]

    def _settle(self) -> None:
        """Join the caches of those who came in, which have read all of their prompts, to those of the rows."""
        arrived, self._arrived = self._arrived, ()
        first, self._first = self._first, None
        if first is None:
            return
        texts = [each.layers for each in arrived]
        if len(self.rows) > 1:
            for ours, theirs in zip(self._layers, merged(texts), strict=True):
                ours.extend(theirs)
        else:
            texts = [self._layers, *texts] if self.rows else texts
            self._layers = merged(texts) if len(texts) > 1 else texts[0]
        self._next = first if self._next is None else mx.concatenate([self._next, first])
        self.rows = [*self.rows, *(each.row for each in arrived)]

    def _free_for(self, row: Row) -> int:
        """How many tokens may be chosen for a row before its constraint has to be asked."""
        if self._agree is not None and row.choice.constraint is not None:
            return 0  # the other processes cannot ask it, and have to take the same steps
        return row.choice.free_for()

    def _try(self, row: Row, token: int, drafts: Sequence[int]) -> list[Said]:
        fed = [token, *drafts]
        tokens = mx.array(fed)
        self._layers = [RewindableRotatingKVCache.of(layer) for layer in self._layers]
        logits = self._network(tokens[None], cache=self._layers)[0]
        before, waits = row.chosen, row.waits_to_say
        places = [row.next_place(tokens, at) for at in range(len(fed))]
        told = row.report
        chosen = self._choose(logits, [row] * len(fed), places)
        self._compute([row], chosen)
        choices = _listed(chosen)
        agreed = 0
        while agreed < len(drafts) and choices[agreed] == drafts[agreed]:
            agreed += 1
        report = row.report[0] if row.report is not None else None
        said = [row.say(token, told)] if waits else []
        read = 1  # as many of the tokens that were fed stand
        while read <= agreed and not (said and said[-1].reason):
            said.append(row.say(drafts[read - 1], (report, read - 1) if report is not None else None))
            read += 1
        for fed_token in fed[:read]:
            row.read(fed_token)
        if excess := len(fed) - read:
            for layer in self._layers:
                layer.trim(excess)
        row.chosen = before + read
        row.memory = places[read - 1].memory
        row.report = (report, read - 1) if report is not None else None
        self._next = chosen[read - 1 : read]
        return said

    def _read(self, fed: mx.array | None) -> list[int]:
        """Wait for the tokens that are fed, and let the rows' constraints read them."""
        tokens = _listed(fed) if fed is not None else []
        for row, token in zip(self.rows, tokens, strict=True):
            row.read(token)
        return tokens

    def _choose(self, logits: mx.array, rows: Sequence[Row], places: Sequence[Place]) -> mx.array:
        chosen, report = choose(logits, places)
        if self._agree is not None:
            chosen = self._agree(chosen)
        for at, row in enumerate(rows):
            row.report = (report, at) if report is not None and row.choice.logprobs is not None else None
        return chosen

    def _compute(self, rows: Sequence[Row], chosen: mx.array) -> None:
        """Begin to compute the choices, and all that would otherwise pile up uncomputed."""
        reports = {id(row.report[0]): row.report[0] for row in rows if row.report is not None}
        memories = [(row.memory.seen, row.memory.said) for row in rows if row.memory is not None]
        mx.async_eval(chosen, [report.arrays for report in reports.values()], memories)  # type: ignore[no-untyped-call]


def _only(rows: Sequence[int], layers: Layers) -> Layers:
    """Keep some rows of a batch's caches; one alone gets the model's own kind."""
    if len(rows) == 1:
        return [layer.extract(rows[0]) for layer in layers]
    for layer in layers:
        layer.filter(list(rows))
    return layers


def _listed(tokens: mx.array) -> list[int]:
    """Wait for the tokens and return them."""
    return tokens.tolist()  # type: ignore[return-value]
