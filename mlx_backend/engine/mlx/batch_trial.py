"""Tries, when a network is loaded, whether several sequences in one run get the logits that each gets alone.

mlx-lm's networks are made for one sequence. Whether one can also run several packed (packed_forward.py), and the
replies among them as the rows of a batch, cannot be known from its caches: some raise, and some answer wrongly. Gemma 2
takes as many rows as it has key-value heads and spreads their masks over the heads. So a few short texts are run alone,
and then in every way in which sequences are run together: packed, merged, joined later, left by others, extracted, and
as many rows as there are key-value heads. Each step's logits are compared, row by row. It takes about forty runs of a
few tokens. Where merged rows are wrong because of their padding, packed runs of caches that are not merged are tried
last; where these are, too, replies are decoded one after the other. What was right is kept for the next load of the
same model (trial_results.py).

What a network does may change with a text's length: a window is full, there are more blocks than are attended, another
scale begins. MiniMax M3 counts its blocks from the start of the padding, and is wrong as soon as one is left out. Texts
of such lengths would take minutes, so a network is tried once more with short ones (`short_spans`): whatever its
modules and their settings call a window, block, chunk, stride, position or an index's top k is `SHORT_SPAN` then. It
runs the same code, with the same weights. Where each text alone then gets the very same logits, none of them matters
here, and that is left out.

Where a network with states is to have drafts (rewinding.py), it is also tried, with each text alone, whether tokens can
be taken back and others run in their place.

A run of a few tokens does not show that a device's kernels can take many. In a packed run each token is rotated by a
position of its own, and on an H200 MLX could not start that kernel for 160 tokens where 16 elements of a head are
rotated, though it could for 40 (cudaGraphAddKernelNode: invalid argument). So with `many_tokens` longer prompts are
packed too.
"""

from __future__ import annotations

import logging
import re
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass
from functools import partial
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.cache import ArraysCache

from mlx_backend.device.mlx import prepares_for_lengths
from mlx_backend.engine.mlx.arrays import as_ints, coarsest_dtype
from mlx_backend.engine.mlx.batch_caches import MAX_MERGED_LENGTH, BatchCaches
from mlx_backend.engine.mlx.kv_cache import alias, can_merge, can_rewind, kind_of
from mlx_backend.engine.mlx.mlx_lm_patches.packing import Packing, patch_for_packing
from mlx_backend.engine.mlx.mtp import DRAFTING, head_of, problem_of
from mlx_backend.engine.mlx.packed_forward import ForwardError, Segment, run_packed, run_rows, token_ids
from mlx_backend.engine.mlx.rewinding import RewindPoint, can_take_back, has_to_replay
from mlx_backend.engine.mlx.speculative import draft_layers
from mlx_backend.engine.mlx.trial_results import TrialResult, key_of, recall, remember
from mlx_backend.errors import EngineError, EngineStopped

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from mlx_backend.engine.mlx.collectives import MLXRanks
    from mlx_backend.engine.mlx.kv_cache import LayerCaches
    from mlx_backend.engine.mlx.loading import DraftNetwork, Networks
    from mlx_backend.models.engine_options import EngineOptions

    # The next token of each row and the rows' caches; returns the logits after them ([rows, vocabulary]).
    type Step = Callable[[Sequence[int], BatchCaches], mx.array]

log = logging.getLogger(__name__)

TEXTS = ((1, 2, 3, 4, 9, 8, 7), (5,), (2, 6, 4, 1))
"""Two are, with the next token, longer than `SHORT_SPAN` blocks of `SHORT_SPAN` tokens, and not whole blocks apart.

No run has more tokens than a model's first one (runtime.py): an NVIDIA GPU may need half a minute to compile for more.
"""
SHORT_SPAN = 2
FIRST, SECOND = (4, 7, 3), (6, 2, 5)
"""The two tokens that follow each text."""
TAKEN_BACK = (8, 1)
"""Tokens run after the first of those two, as rejected drafts would be."""
LONG_TEXT = (1, 2, 3, 4, 5, 6, 7, 8) * 16
"""The text of which two are packed."""
ROW_COUNTS = (3, 5)
MAX_ROWS = 8
"""The most rows of a batch that is tried: the caches of each row get room for 256 tokens."""

MAX_DIFFERENCE = {mx.float32: 0.01, mx.float16: 0.05, mx.bfloat16: 0.08}
"""Between a row of logits and the same ones alone, relative to their norm, by the least precise weights.

Measured on tiny random models. A right batch is off by no more than its rounding; all rounding of a network together,
against the same weights in float32, made 0.007 in float16 (0.013 with weights of 4 bits), 0.036 in bfloat16 (0.077 with
4 or 8 bits; Mamba 2 0.054 to 0.145). Mistakes are larger, in every format: AFM 0.18 to 0.26, Gemma 2 0.77 to 0.95,
padding that is attended 0.26 to 1.1, rows rotated by the longest row's length 0.19 to 0.6. What is off without a
mistake is chance: rounding chose another expert (0.04 to 0.57, in half of the mixtures in bfloat16). A mistake is one
with every text, so only a row that is off with all of them counts.
"""
MAX_NOISE = 0.25
"""Up to which rounding excuses more than that.

In a deep mixture of many experts it chooses others somewhere in every text: gpt-oss-20b's shapes with random weights
were off by 0.14 on an H200. Then the same texts alone, token by token, are as far off from those run at once. What
three of four of such rows keep to, each row of a batch has to keep to with one text.
"""
MAX_ERROR_LENGTH = 120
"""Characters of an error that are repeated."""
_SPAN = re.compile(
    r"(?:^|_)(?:windows?|blocks?|blocksparse|chunks?|segments?|spans?|strides?|compress(?:ion)?|positions?|context|seq"
    r"|len|length|floor|threshold|topk)(?:_|$)|._top_k$"
)
"""In the names of settings that are numbers of tokens, or of parts of a text."""
_NO_SPAN = re.compile(r"(?:^|_)(?:pattern|group|moe|experts?|layers?|conv|dim|multiple)(?:_|$)")
"""In the names of others."""
USUAL_RUNS = 15
"""Texts and comparisons of a network that is right at once, and does the same with short lengths."""
MAX_ATTEMPTS = 6
ATTEMPT_STRIDE = 10
"""Distance between the token ids of two attempts."""


class BatchTrialError(Exception):
    """Sequences run together do not get the logits that each gets alone. The text says what went wrong."""


@dataclass(frozen=True, slots=True)
class _Reference:
    """A text run alone: its logits and those after each of the two next tokens, and the caches before those."""

    text: mx.array  # [1, tokens]
    first: int
    second: int
    layers: LayerCaches
    logits: mx.array  # [tokens, vocabulary]
    after_first: mx.array  # [vocabulary]
    after_second: mx.array


class BatchTrial:
    """Tries one network. `make_caches` makes empty caches; `on_run` is called after each text and each comparison."""

    def __init__(
        self,
        network: Any,
        make_caches: Callable[[], LayerCaches],
        on_run: Callable[[], None] = lambda: None,
    ) -> None:
        # The largest of all rows that were compared, each with the text that suits it best.
        self.difference = 0.0
        self.packing = Packing()
        # Whether rows' caches are merged; if not, each keeps its own.
        self.merges = True
        self._network = network
        self._make_caches = make_caches
        self._on_run = on_run
        self._max_difference = MAX_DIFFERENCE[coarsest_dtype(network)]
        self._references: list[list[_Reference]] = []  # of each attempt
        # Of each row of the last attempt: sequences at once, and by how much it is off.
        self._compared: list[tuple[int, float]] = []

    def try_packing(self, *, packs_replies: bool = True, many_tokens: bool = False) -> None:
        """Patch the network and try packed runs, with `many_tokens` also of long prompts. Raises BatchTrialError.

        Without `packs_replies` replies by themselves are rows of a batch, as mlx-lm runs them. It is tried again as
        long as modules are found that have to run segment by segment.
        """
        self.packing = packing = patch_for_packing(self._network)
        step = self._step_packed if packs_replies else self._step_rows
        while True:
            number = len(packing.by_segment)
            try:
                self._try(self._pack_prompts, lambda alone: self._run_together(alone, step))
                if many_tokens:
                    self._try_texts(lambda _: self._pack_long_prompts())
            except BatchTrialError:
                if len(packing.by_segment) == number:
                    raise
            else:
                packing.settle(self._network)
                return

    def restore(self, result: TrialResult) -> None:
        """Have the network run as in a trial that found it right. Raises KeyError if it has other modules."""
        self.packing = patch_for_packing(self._network)
        self.packing.restore(self._network, result.by_segment, result.with_states)
        self.merges = result.merges

    def try_rewinding(self) -> None:
        """Try taking tokens back and running others in their place. Raises BatchTrialError."""
        self._try(self._rewind)

    def _try(self, *comparisons: Callable[[Sequence[_Reference]], None]) -> None:
        """Compare with the network as it is set, and with short lengths if it computes anything else with them."""
        self._references.clear()
        for compare in comparisons:
            self._try_texts(compare)
        before = self._run_alone(0)
        with short_spans(self._network, self._run_first) as are_short:
            if are_short and not all(map(_same_logits, before, self._run_alone(0))):
                for compare in comparisons:
                    self._try_texts(compare)

    def _try_texts(self, compare: Callable[[Sequence[_Reference]], None]) -> None:
        """Compare, with other texts again if logits differ: in half precision rounding may choose other experts."""
        least: list[float] = []  # of each row, by how much it is off with the text that suits it best
        noise: list[float] = []
        allowed = self._max_difference
        for attempt in range(MAX_ATTEMPTS):
            self._compared = []
            alone = self._run_alone(attempt)
            try:
                compare(alone)
            except EngineStopped:
                raise
            except Exception as error:
                off = [each for each in self._compared if not each[1] <= self._max_difference]
                cause = error.__cause__ if isinstance(error, ForwardError) else error
                text = f"several at once raise {type(cause).__name__}: {_first_line(cause)}"
                raise BatchTrialError(_off_by(*off[0]) if off else text) from error
            found = [difference for _, difference in self._compared]
            least = [min(pair) for pair in zip(least, found, strict=True)] if least else found
            self.difference = max(least, default=0.0)
            if self.difference <= self._max_difference:
                return
            noise += self._noise(alone)
            allowed = max(self._max_difference, min(MAX_NOISE, sorted(noise)[len(noise) * 3 // 4]))
            if self.difference <= allowed:
                log.debug("Logits are off by %.0f %%, as they are alone.", 100 * self.difference)
                return
            if not self.difference < float("inf"):
                break
        rows = zip(self._compared, least, strict=True)
        raise BatchTrialError(next(_off_by(count, each) for (count, _), each in rows if not each <= allowed))

    def _noise(self, alone: Sequence[_Reference]) -> list[float]:
        """Return by how much rounding alone changes logits: of texts run token by token, against those run at once."""
        noise: list[float] = []
        for each in alone:
            if each.text.size == 1:  # which is the same run
                continue
            layers = self._make_caches()
            tokens = [*as_ints(each.text[0]), each.first, each.second]
            singly = mx.stack([self._network(token_ids([[token]]), cache=layers)[0, -1] for token in tokens])
            at_once = mx.concatenate([each.logits, each.after_first[None], each.after_second[None]])
            noise += differences(singly, at_once)
        return noise

    def _run_first(self) -> None:
        """Run the first attempt's texts alone, as what they returned before was with other lengths."""
        self._references.clear()
        self._run_alone(0)

    def _run_alone(self, attempt: int) -> list[_Reference]:
        if attempt == len(self._references):
            shift = attempt * ATTEMPT_STRIDE
            self._references.append(
                [
                    self._run_one([token + shift for token in text], first + shift, second + shift)
                    for text, first, second in zip(TEXTS, FIRST, SECOND, strict=True)
                ]
            )
        return self._references[attempt]

    def _run_one(self, tokens: Sequence[int], first: int, second: int) -> _Reference:
        text, layers = token_ids([tokens]), self._make_caches()
        logits = self._network(text, cache=layers)[0]
        before = _copies(layers)
        after_first = self._network(token_ids([[first]]), cache=layers)[0, -1]
        after_second = self._network(token_ids([[second]]), cache=layers)[0, -1]
        mx.eval(logits, after_first, after_second)
        self._on_run()
        return _Reference(text, first, second, before, logits, after_first, after_second)

    def _rewind(self, alone: Sequence[_Reference]) -> None:
        """Run tokens as drafts are run, take back all but the first, and run another one after it."""
        for each in alone:
            layers, run = _copies(each.layers), [each.first, *TAKEN_BACK]
            point = RewindPoint(layers)
            logits = self._network(token_ids([run]), cache=layers)[0]
            mx.eval(logits)
            self._compare(logits[:1], [each.after_first], 1)
            again = run[: point.rewind(len(TAKEN_BACK), len(run))]
            logits = self._network(token_ids([[*again, each.second]]), cache=layers)[0]
            self._compare(logits[-1:], [each.after_second], 1)

    def _pack_prompts(self, alone: Sequence[_Reference]) -> None:
        """Run prompts together, one with the replies to others, and replies on caches of their own."""
        one, other, late = alone
        layers = [self._make_caches() for _ in alone]
        prompts = [Segment(each.text, own) for each, own in zip(alone, layers, strict=True)]
        packed = run_packed(self._network, prompts[:2])
        self._compare(packed, [*one.logits, *other.logits], 2)
        replies = self._batch(layers[:2]).segments(token_ids([[one.first, other.first]])[0])
        packed = run_packed(self._network, [*replies, prompts[2]])
        self._compare(packed, [one.after_first, other.after_first, *late.logits], 3)
        own = [Segment(token_ids([[each.first]]), _copies(each.layers)) for each in alone[:2]]
        self._compare(run_packed(self._network, own), [one.after_first, other.after_first], 2)

    def _pack_long_prompts(self) -> None:
        """Run two prompts of many tokens together: whether the device can is all that is asked."""
        texts = [token_ids([LONG_TEXT]), token_ids([LONG_TEXT[::-1]])]
        mx.eval(run_packed(self._network, [Segment(text, self._make_caches()) for text in texts]))

    def _run_together(self, alone: Sequence[_Reference], step: Step) -> None:
        """Run two texts, let a third join them and the first two leave; then as many rows as may matter."""
        one, other, late = alone
        caches = self._batch([_copies(each.layers) for each in (one, other)])
        logits = step([one.first, other.first], caches)
        self._compare(logits, [one.after_first, other.after_first], 2)
        caches.add([_copies(late.layers)])
        caches.merge([0] * 3)
        logits = step([one.second, other.second, late.first], caches)
        self._compare(logits, [one.after_second, other.after_second, late.after_first], 3)
        caches.keep([1, 2])
        caches.keep([1])
        logits = self._network(token_ids([[late.second]]), cache=caches.extract(0))[:, -1]
        self._compare(logits, [late.after_second], 3)
        for count in sorted({*ROW_COUNTS, *_head_counts(one.layers)}):
            rows = list(islice(cycle(alone), count))
            caches = self._batch([_copies(each.layers) for each in rows])
            self._compare(
                step([each.first for each in rows], caches), [each.after_first for each in rows], count
            )

    def _batch(self, layers: Sequence[LayerCaches]) -> BatchCaches:
        caches = BatchCaches(max_merged_length=None if self.merges else -1)
        caches.add(layers)
        caches.merge([0] * len(layers))
        return caches

    def _step_rows(self, tokens: Sequence[int], caches: BatchCaches) -> mx.array:
        [segment] = caches.segments(token_ids([tokens])[0])
        return run_rows(self._network, segment)

    def _step_packed(self, tokens: Sequence[int], caches: BatchCaches) -> mx.array:
        return run_packed(self._network, caches.segments(token_ids([tokens])[0]))

    def _compare(self, found: mx.array, expected: Sequence[mx.array], sequences: int) -> None:
        """Note by how much each row of logits ([rows, vocabulary]) is not what is expected."""
        self._compared += [(sequences, each) for each in differences(found, mx.stack(list(expected)))]
        self._on_run()


@dataclass(frozen=True, slots=True, kw_only=True)
class Abilities:
    """What a model's networks can do, as far as their caches and trials tell.

    `can_rewind` says whether the caches can take back all tokens of a step but the first. `unbatched` says why prompts
    and replies cannot run together without padding (packed_forward.py), but only one after the other; it is empty if
    they can. With `packs_replies` replies whose caches are merged are run so without prompts, too. Caches are merged up
    to `max_merged_length` (BatchCaches). `can_draft` says whether replies can get drafts, `drafts` for people what a
    model's MTP head does or why there is none, and `can_pack_drafts` whether the draft model drafts for several at
    once. With `replays_drafts` the right tokens before a wrong draft have to run again (rewinding.py).
    """

    can_rewind: bool = False
    packs_replies: bool = False
    max_merged_length: int | None = 0
    unbatched: str
    can_draft: bool = False
    drafts: str = ""
    can_pack_drafts: bool = False
    replays_drafts: bool = False

    @property
    def can_pack(self) -> bool:
        """Whether prompts and replies can run together."""
        return not self.unbatched


def try_networks(
    networks: Networks, ranks: MLXRanks | None, on_progress: Callable[[float], None] = lambda _share: None
) -> Abilities:
    """Try what a model's networks can do; ranks agree on what all of them can.

    `on_progress` gets the share that is done, of as many trials as most networks need; EngineStopped ends them. Raises
    EngineError if a draft model is named and drafts are not possible.
    """
    layers = networks.fresh_layers()
    # In a pipeline of ranks, one that failed in a trial would leave the others waiting.
    is_pipeline = ranks is not None and not hasattr(networks.model.network, "shard")
    expected, done = USUAL_RUNS * len(networks.by_adapter), 0

    def count_run() -> None:
        nonlocal done
        done += 1
        on_progress(min(1.0, done / expected))

    trials = [
        BatchTrial(network, partial(networks.fresh_layers, adapter), count_run)
        for adapter, network in networks.by_adapter.items()
        if not is_pipeline
    ]
    always_packs = prepares_for_lengths() or ranks is not None  # ranks might find different ways right
    unbatched = _packing_refusal(layers, networks.options, is_pipeline=is_pipeline)
    merges, key, before = False, "", None
    if not unbatched:
        if ranks is None:
            key, before = _known(networks, trials)
        if before is not None:
            merges = before.merges
        else:
            can_be_merged = all(map(can_merge, layers))
            merges, unbatched = _try_packing(trials, can_be_merged=can_be_merged, always_packs=always_packs)
    rewinds = before is not None and before.rewinds
    can_draft, problem = _try_drafts(trials, layers, networks, rewinds=rewinds)
    if key and not unbatched:
        found = TrialResult(merges, rewinds or can_draft, *trials[0].packing.kinds)
        if found != before:
            remember(key, found)
    drafts = networks.model.drafts
    if head_of(networks.model.network) is not None:
        drafts = problem or DRAFTING
    max_merged_length = _max_merged_length(trials, layers) if merges else 0
    if ranks is not None:
        everyone = ranks.all_gather([unbatched, can_draft, max_merged_length])
        unbatched = next((reason for reason, *_ in everyone if reason), "")
        can_draft = all(each for _, each, _ in everyone)
        max_merged_length = min((each for *_, each in everyone if each is not None), default=None)
    return Abilities(
        can_rewind=all(map(can_rewind, layers)),
        packs_replies=always_packs and not unbatched,
        max_merged_length=max_merged_length,
        unbatched=unbatched,
        can_draft=can_draft,
        drafts=drafts,
        can_pack_drafts=not unbatched and _can_pack_drafts(networks.draft),
        replays_drafts=has_to_replay(layers),
    )


def _known(networks: Networks, trials: Sequence[BatchTrial]) -> tuple[str, TrialResult | None]:
    """Return what a network's results are kept by, and the one of an earlier load, by which it then runs.

    Empty: none is kept, of several networks that are tried together.
    """
    model, options = networks.model, networks.options
    if len(trials) > 1 or networks.draft is not None:
        return "", None
    key = key_of(model.folder, options, has_head=head_of(model.network) is not None)
    result = recall(key)
    if result is not None:
        try:
            trials[0].restore(result)
            log.debug("That several sequences can be run together was found in an earlier load.")
        except KeyError:
            result = None
    return key, result


def _max_merged_length(trials: Sequence[BatchTrial], layers: LayerCaches) -> int | None:
    if any(trial.packing.repeats_recurrence for trial in trials):
        return None  # on caches of their own the weights of such layers would be read for each
    return None if all(isinstance(layer, ArraysCache) for layer in layers) else MAX_MERGED_LENGTH


def _packing_refusal(layers: LayerCaches, options: EngineOptions, *, is_pipeline: bool) -> str:
    """Return why packed runs need not be tried; "" if they are to be."""
    if not options.packing:
        return "--no-packing was given"
    if is_pipeline:
        return "its layers are divided among the processes"
    if others := sorted({kind_of(layer) for layer in layers if not can_take_back(layer)}):
        return f"its {', '.join(others)} cannot be packed"
    return ""


def _try_packing(
    trials: Sequence[BatchTrial], *, can_be_merged: bool, always_packs: bool
) -> tuple[bool, str]:
    """Return whether caches are to be merged, and why packed runs are wrong either way, if they are.

    Replies by themselves are packed, too, where they always are or cannot be rows of a batch.
    """
    problem = ""
    for merges in (True, False) if can_be_merged else (False,):
        problem = _problem(trials, merges=merges, packs_replies=always_packs or not merges)
        if not problem:
            return merges, ""
        log.debug("Prompts and replies cannot be packed: %s.", problem)
    return False, problem


def _problem(trials: Sequence[BatchTrial], *, merges: bool, packs_replies: bool) -> str:
    """Return what goes wrong with any of the networks; "" if nothing does."""
    try:
        for trial in trials:
            trial.merges = merges
            trial.try_packing(packs_replies=packs_replies, many_tokens=prepares_for_lengths())
    except BatchTrialError as error:
        return str(error)
    return ""


def _try_drafts(
    trials: Sequence[BatchTrial], layers: LayerCaches, networks: Networks, *, rewinds: bool
) -> tuple[bool, str]:
    """Try whether the networks can do what drafts need; return whether replies can get any, and why not.

    Keys and values can always be trimmed. States cannot (rewinding.py), so networks that have them are tried, unless it
    is known that each `rewinds`; without trials a model with states gets no drafts.
    """
    options, draft = networks.options, networks.draft
    has_head = head_of(networks.model.network) is not None
    if draft is None and not has_head and not options.draft_from_text:
        return False, ""
    reason = ""
    if not (rewinds or _can_take_back(layers, trials)):
        reason = f"Drafts are not possible with this model: its {_unrewindable(layers)} cannot be rewound."
    elif has_head and (problem := problem_of(networks.model.network, networks.fresh_layers())):
        reason = f"The model's MTP head is not used: {problem}."
    if reason:
        if options.draft_model is not None:
            raise EngineError(reason)
        log.warning("%s It runs without.", reason)
        return False, reason
    if draft is not None:
        own, make_caches = draft_layers(draft.network), partial(draft_layers, draft.network)
        if not _can_take_back(own, [BatchTrial(draft.network, make_caches)]):
            raise EngineError(
                f"{options.draft_model!r} cannot draft: its {_unrewindable(own)} cannot be rewound."
            )
    return True, ""


def _unrewindable(layers: LayerCaches) -> str:
    """Return the kinds of caches that cannot be trimmed."""
    return ", ".join(sorted({type(layer).__name__ for layer in layers if not can_rewind(layer)}))


def _can_take_back(layers: LayerCaches, trials: Sequence[BatchTrial]) -> bool:
    if all(map(can_rewind, layers)):
        return True
    if not trials or not all(map(can_take_back, layers)):
        return False
    try:
        for trial in trials:
            trial.try_rewinding()
    except BatchTrialError as error:
        log.debug("Tokens cannot be taken back: %s.", error)
        return False
    return True


def _can_pack_drafts(draft: DraftNetwork | None) -> bool:
    """Return whether the draft model can be run packed, and so can draft for several replies at once."""
    if draft is None or not all(map(can_rewind, draft_layers(draft.network))):
        return False
    try:
        trial = BatchTrial(draft.network, partial(draft_layers, draft.network))
        trial.merges = False  # as a draft model's caches never are
        trial.try_packing(many_tokens=prepares_for_lengths())
    except BatchTrialError as error:
        log.debug("The draft model cannot be run packed: %s.", error)
        return False
    return True


@contextmanager
def short_spans(network: Any, run: Callable[[], object]) -> Iterator[bool]:
    """Make all numbers of tokens short by which a network is set; one with which it cannot `run` then stays.

    Yields whether any is short. The network counts with them when it runs or makes caches. What was made of them when
    it was built stays as well.
    """
    spans = [
        (settings, name, value)
        for settings in _settings(network)
        for name, value in settings.items()
        if type(value) is int and value > SHORT_SPAN and is_span(name)
    ]
    names = sorted({name for _, name, _ in spans})
    try:
        for staying in (None, *names) if spans else ():
            for settings, name, value in spans:
                settings[name] = value if name == staying else SHORT_SPAN
            try:
                run()
            except EngineStopped:
                raise
            except Exception as error:
                log.debug("A network cannot run with short lengths: %r", error)
            else:
                yield True
                return
        yield False
    finally:
        for settings, name, value in spans:
            settings[name] = value


def is_span(name: str) -> bool:
    """Whether a setting of this name says how many tokens, or parts of a text, something spans."""
    return bool(_SPAN.search(name)) and not _NO_SPAN.search(name)


def _settings(network: Any) -> Iterator[dict[str, Any]]:
    """Yield what holds the settings of a network's modules, which may share one."""
    # A module is itself a dictionary, of its parts and of what it was given that is one.
    waiting, seen = [each for module in network.modules() for each in (vars(module), module)], set[int]()
    while waiting:
        if id(settings := waiting.pop()) not in seen:
            seen.add(id(settings))
            yield settings
            values = [vars(value) if is_dataclass(value) else value for value in settings.values()]
            waiting += [value for value in values if type(value) is dict]


def _same_logits(one: _Reference, other: _Reference) -> bool:
    pairs = zip(
        (one.logits, one.after_first, one.after_second),
        (other.logits, other.after_first, other.after_second),
        strict=True,
    )
    return all(bool(mx.array_equal(*pair, equal_nan=True)) for pair in pairs)


def _off_by(sequences: int, difference: float) -> str:
    wrong = "wrong" if difference == float("inf") else f"off by {difference:.0%}"
    if sequences == 1:
        return f"the logits of a sequence from which tokens were taken back are {wrong}"
    return f"with {sequences} sequences at once the logits of one are {wrong}"


def _first_line(error: BaseException | None) -> str:
    return str(error).partition("\n")[0][:MAX_ERROR_LENGTH].rstrip(".")


def _copies(layers: LayerCaches) -> LayerCaches:
    return [alias(layer) for layer in layers]


def _head_counts(layers: LayerCaches) -> set[int]:
    """Return how many key-value heads layers have, where a batch that is tried may have as many rows."""
    arrays = [value for _, value in tree_flatten([layer.state for layer in layers])]
    counts = {value.shape[1] for value in arrays if isinstance(value, mx.array) and value.ndim == 4}
    return {count for count in counts if 1 < count <= MAX_ROWS}


def differences(found: mx.array, expected: mx.array) -> list[float]:
    """Return by how much each row is off, relative to its norm; what all logits have in common does not count.

    Tokens that a network rules out, by logits of minus infinity, must be the same ones: else it is infinite.
    """
    if found.shape != expected.shape:
        return [float("inf")] * expected.shape[0]
    found, expected = found.astype(mx.float32), expected.astype(mx.float32)
    is_possible = expected > -mx.inf
    is_wrong = mx.any(~is_possible & (found != expected), axis=-1)
    count = is_possible.sum(axis=-1, keepdims=True)
    found, expected = (mx.where(is_possible, each, 0.0) for each in (found, expected))
    found, expected = (
        mx.where(is_possible, each - each.sum(axis=-1, keepdims=True) / count, 0.0)
        for each in (found, expected)
    )
    relative = mx.linalg.norm(found - expected, axis=-1) / mx.linalg.norm(expected, axis=-1)
    is_wrong |= mx.isnan(relative)
    found_differences: list[float] = mx.where(is_wrong, mx.inf, relative).tolist()  # type: ignore[assignment]  # an array of one axis is a list of numbers
    return found_differences
