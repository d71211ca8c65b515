"""An engine that replays transcripts, for tests that need no model.

It runs on the same scheduler as the real one and knows no MLX. A transcript is what a model would have written,
markers spelt out. It is split into tokens (a marker is one; other text is split every three bytes, so that non-Latin
characters are sometimes cut in two) and replayed one token a step. Where a request's constraint masks the next token,
the transcript continues at the next one that is allowed.
"""

from __future__ import annotations

import codecs
import re
import threading
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from mlx_backend.common_prefix import common_prefix_length
from mlx_backend.engine.base import Logprobs, Progress, TokenDelta
from mlx_backend.engine.batch import Ended, ModelInfo
from mlx_backend.engine.images import ImageSupport, PreparedImage, WrittenImage
from mlx_backend.engine.threaded import Engine
from mlx_backend.errors import EngineError, EngineRefused

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set

    import jinja2

    from mlx_backend.engine.base import Constraint, GenerationRequest, PromptStart
    from mlx_backend.engine.batch import Outcome
    from mlx_backend.engine.images import ImageProcessor
    from mlx_backend.images import Picture

HARMONY_MARKERS = (
    "<|startoftext|>",
    "<|endoftext|>",
    "<|return|>",
    "<|constrain|>",
    "<|channel|>",
    "<|start|>",
    "<|end|>",
    "<|message|>",
    "<|call|>",
)
END_MARKERS = ("<|return|>", "<|call|>", "<|endoftext|>", "<|im_end|>")

# The layout of Harmony in its shortest form: enough for a person to read a transcript's prompt.
HARMONY_TEMPLATE = """\
{%- set thinking = {"low": "low", "high": "high"}.get(reasoning_effort, "medium") -%}
<|start|>system<|message|>Reasoning: {{ thinking }}<|end|>
{%- if tools -%}
<|start|>developer<|message|># Tools
{%- for tool in tools %} functions.{{ tool.function.name }}{% endfor %}<|end|>
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == "tool" -%}
<|start|>functions.{{ message.name }} to=assistant<|channel|>commentary<|message|>{{ message.content }}<|end|>
{%- elif message.role == "assistant" -%}
{%- if message.thinking -%}
<|start|>assistant<|channel|>analysis<|message|>{{ message.thinking }}<|end|>
{%- endif -%}
{%- for call in message.tool_calls or [] -%}
<|start|>assistant to=functions.{{ call.function.name }}<|channel|>commentary json<|message|>
{{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson -}}
<|call|>
{%- endfor -%}
{%- if message.content and not message.tool_calls -%}
<|start|>assistant<|channel|>final<|message|>{{ message.content }}<|end|>
{%- endif -%}
{%- else -%}
{%- set role = "developer" if message.role == "system" else message.role -%}
<|start|>{{ role }}<|message|>{{ message.content }}<|end|>
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcript:
    """One reply: `prefill` Progress items, the text, and then an end or a failure.

    An EngineError as `failure` fails this request alone; any other exception breaks the engine.
    """

    text: str
    prefill: int = 0
    failure: Exception | None = None


type Script = str | Transcript


@lru_cache(maxsize=64)
def _compiled(source: str) -> jinja2.Template:
    """Compile a template, which takes a hundred times as long as rendering it."""
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda _form: "2026-01-31"
    return environment.from_string(source)


class ScriptedTokenizer:
    """A vocabulary of all strings of one to three bytes, and then the markers."""

    PIECE = 3
    _SIZES = (256, 256**2, 256**3)

    def __init__(
        self, markers: Sequence[str] = HARMONY_MARKERS, chat_template: str | None = HARMONY_TEMPLATE
    ):
        first = sum(self._SIZES)
        self._special = {first + index: marker for index, marker in enumerate(markers)}
        self._ids = {marker: token for token, marker in self._special.items()}
        self._split = re.compile("|".join(f"({re.escape(marker)})" for marker in markers) or r"(?!)")
        self._chat_template = chat_template

    @property
    def chat_template(self) -> str | None:
        """The Jinja source that this was made with."""
        return self._chat_template

    @property
    def response_template(self) -> Any:
        """A script has none."""
        return None

    @property
    def special_tokens(self) -> Mapping[int, str]:
        """Every marker: id -> its text."""
        return self._special

    @property
    def end_tokens(self) -> Set[int]:
        """Those of its markers that end a reply."""
        return frozenset(self._ids[marker] for marker in END_MARKERS if marker in self._ids)

    @property
    def vocabulary_size(self) -> int:
        """Valid token ids are 0 … vocabulary_size - 1."""
        return sum(self._SIZES) + len(self._special)

    @property
    def bos_tokens(self) -> Sequence[int]:
        """A scripted prompt needs no BOS token."""
        return ()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        *,
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> str:
        """Render the template to text. Raises EngineRefused if the template rejects the conversation."""
        from jinja2 import TemplateError

        if self._chat_template is None:
            raise EngineRefused("This model has no chat template.")
        values = {"messages": messages, "tools": tools, "add_generation_prompt": add_generation_prompt}
        try:
            return _compiled(self._chat_template).render(values | template_kwargs)
        except TemplateError as error:
            raise EngineRefused(f"The model's chat template refused the conversation: {error}") from error

    def encode(self, text: str, *, control_tokens: bool) -> list[int]:
        """Tokenise. With control_tokens False a marker spelt in the text becomes ordinary text tokens."""
        if not control_tokens:
            return self._encode_plain(text)
        return [
            token
            for part in self._split.split(text)
            if part
            for token in ([self._ids[part]] if part in self._ids else self._encode_plain(part))
        ]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, special tokens included."""
        return b"".join(map(self.bytes_of, tokens)).decode("utf-8", "replace")

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes of a token."""
        if token in self._special:
            return self._special[token].encode()
        for length, size in enumerate(self._SIZES, 1):
            if token < size:
                return token.to_bytes(length)
            token -= size
        raise EngineRefused(f"Token id {token} is not in the vocabulary.")

    def _encode_plain(self, text: str) -> list[int]:
        data = text.encode("utf-8", "replace")  # JSON can hold half a surrogate pair
        pieces = [data[at : at + self.PIECE] for at in range(0, len(data), self.PIECE)]
        return [sum(self._SIZES[: len(piece) - 1]) + int.from_bytes(piece) for piece in pieces]


IMAGE_MARKERS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
"""What the tokenizer must have among its markers."""


@dataclass(frozen=True, slots=True)
class ScriptedImageProcessor:
    """Implements `ImageProcessor`: an image takes a token for every `side` by `side` pixels, begun ones included."""

    tokenizer: ScriptedTokenizer
    side: int = 28

    @property
    def pad_token(self) -> int:
        """The token of its pad marker."""
        return self.tokenizer.encode(IMAGE_MARKERS[1], control_tokens=True)[0]

    @property
    def part(self) -> str:
        """Qwen's."""
        return "".join(IMAGE_MARKERS)

    def prepare(self, picture: Picture, earlier: Sequence[PreparedImage] = ()) -> PreparedImage:
        """Return the picture's size in tokens; its pixels are the only input."""
        places = -(-picture.height // self.side) * -(-picture.width // self.side)
        before, pad, after = IMAGE_MARKERS
        written = WrittenImage(before + pad * places + after, 1, (self.pad_token,) * places, 1)
        return PreparedImage(picture.digest, written, {"rgb": memoryview(picture.rgb)})


@dataclass(slots=True, eq=False)
class ScriptedRequest:
    """A request that the engine has started. `ended` is set when it has ended; `cancelled` too if it was cancelled.

    `written` are the reply's tokens so far; `repeated` is how many of the prompt's first tokens an earlier request had,
    in its prompt and reply together: what a prefix cache that forgets nothing would have of it.
    """

    request: GenerationRequest
    prompt: str
    repeated: int = 0
    written: list[int] = field(default_factory=list)
    cancelled: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)


class _TranscriptPlayback:
    """One transcript, item by item."""

    def __init__(
        self, started: ScriptedRequest, transcript: Transcript, tokenizer: ScriptedTokenizer
    ) -> None:
        self.started = started
        self._items = self._replay(transcript, tokenizer)

    def next(self) -> Outcome:
        try:
            return next(self._items)
        except EngineError as error:
            return error

    def _replay(self, transcript: Transcript, tokenizer: ScriptedTokenizer) -> Iterator[Outcome]:
        request = self.started.request
        total = len(request.prompt)
        if self.started.repeated:
            yield Progress(self.started.repeated, total, self.started.repeated)
        for chunk in range(1, transcript.prefill + 1):
            yield Progress(total * chunk // transcript.prefill, total, self.started.repeated)
        characters = codecs.getincrementaldecoder("utf-8")("replace")
        tokens = tokenizer.encode(transcript.text, control_tokens=True)
        for count, token in enumerate(_constrained(tokens, request.constraint), 1):
            text = tokenizer.special_tokens.get(token) or characters.decode(tokenizer.bytes_of(token))
            self.started.written.append(token)
            yield TokenDelta(token, text, None if request.logprobs is None else Logprobs(-0.5))
            if text in END_MARKERS:
                break
            if count == request.max_tokens:
                yield Ended("length")
        if transcript.failure is not None:
            if not isinstance(transcript.failure, EngineError):
                raise transcript.failure
            yield transcript.failure
        yield Ended("stop")


def _constrained(tokens: Sequence[int], constraint: Constraint | None) -> Iterator[int]:
    """Yield the tokens that are allowed; where none of the rest is, the lowest id that is."""
    if constraint is None:
        yield from tokens
        return
    at = 0
    while at < len(tokens):
        token, mask = tokens[at], _call(constraint.allowed_mask)
        if mask is not None:
            allowed = (position for position in range(at, len(tokens)) if _is_set(mask, tokens[position]))
            if (found := next(allowed, None)) is not None:
                at, token = found, tokens[found]
            else:
                at, token = at - 1, _lowest(mask)
        yield token
        at += 1
        _call(constraint.advance, token)


def _call[**P, R](method: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call a constraint's method; what it raises fails its own request alone."""
    try:
        return method(*args, **kwargs)
    except Exception as error:
        raise EngineError(f"Choosing the next token failed: {error}") from error


def _is_set(mask: Sequence[int], token: int) -> bool:
    return bool(mask[token // 32] >> token % 32 & 1)


def _lowest(mask: Sequence[int]) -> int:
    at, word = next((at, word) for at, word in enumerate(mask) if word)
    return 32 * at + (word & -word).bit_length() - 1


class _ScriptedBatch:
    def __init__(
        self,
        info: ModelInfo,
        tokenizer: ScriptedTokenizer,
        scripts: Callable[[str], Script],
        *,
        caches: bool,
    ) -> None:
        self._info = info
        self._caches = caches
        self._tokenizer = tokenizer
        self._scripts = scripts
        self._playing: dict[int, _TranscriptPlayback] = {}
        self._warming: dict[int, GenerationRequest] = {}
        self.started: list[ScriptedRequest] = []
        self.prewarmed: list[tuple[int, ...]] = []
        self.permits: threading.Semaphore | None = None  # one is needed for each step

    def load(self, on_progress: Callable[[float], None]) -> ModelInfo:
        on_progress(1.0)
        return replace(self._info, is_ready=self._is_ready)

    def admits(self, request: GenerationRequest) -> bool:
        return True

    def insert(self, key: int, request: GenerationRequest) -> None:
        if not request.max_tokens:
            self._warming[key] = request
            return
        repeated = self._repeated(tuple(request.prompt)) if self._caches else 0
        started = ScriptedRequest(request, self._tokenizer.decode(request.prompt), repeated)
        self.started.append(started)
        script = self._scripts(started.prompt)
        transcript = Transcript(text=script) if isinstance(script, str) else script
        self._playing[key] = _TranscriptPlayback(started, transcript, self._tokenizer)

    def _repeated(self, prompt: tuple[int, ...]) -> int:
        """How much of it is cached: all but its last token, which has to be computed, at the most."""
        earlier = [(*other.request.prompt, *other.written) for other in self.started] + self.prewarmed
        return min(max((common_prefix_length(prompt, each) for each in earlier), default=0), len(prompt) - 1)

    def _is_ready(self) -> bool:
        return self.permits is None or self.permits.acquire(blocking=False)

    def step(self) -> Iterable[tuple[int, Outcome]]:
        for key, warmup in list(self._warming.items()):
            del self._warming[key]
            self.prewarmed.append(tuple(warmup.prompt))
            yield key, Ended("length")
        for key, playback in list(self._playing.items()):
            outcome = playback.next()
            if not isinstance(outcome, TokenDelta | Progress):
                del self._playing[key]
                playback.started.ended.set()
            yield key, outcome

    def remove(self, key: int) -> None:
        if self._warming.pop(key, None) is not None:
            return
        started = self._playing.pop(key).started
        started.cancelled.set()
        started.ended.set()

    def unload(self) -> None:
        for key in [*self._playing, *self._warming]:
            self.remove(key)

    def close(self) -> None:
        pass


class ScriptedEngine(Engine):
    """Replays transcripts through the real scheduler.

    `transcripts` is a list, the next one for each request, or a function from the prompt's text to one. A `tokenizer`
    stands for the one that `markers` and `chat_template` would make. Without an `image_processor` it sees no images;
    `image_support` says why.
    With `caches` it reports as cached what a request repeats of earlier ones, and of prompts that it was told to
    prewarm; otherwise it only records those.
    With `gated` the engine takes no steps by itself: `advance` allows a number of them, each of one token for every
    running request.
    """

    def __init__(
        self,
        transcripts: Iterable[Script] | Callable[[str], Script],
        *,
        model_id: str = "scripted",
        context_length: int = 131_072,
        markers: Sequence[str] = HARMONY_MARKERS,
        chat_template: str | None = HARMONY_TEMPLATE,
        tokenizer: ScriptedTokenizer | None = None,
        image_processor: ImageProcessor | None = None,
        image_support: ImageSupport = ImageSupport.NONE,
        caches: bool = False,
        gated: bool = False,
        max_concurrent: int = 32,
        max_waiting: int = 256,
    ) -> None:
        tokenizer = tokenizer or ScriptedTokenizer(markers, chat_template)
        info = ModelInfo(
            model_id=model_id,
            context_length=context_length,
            tokenizer=tokenizer,
            image_processor=image_processor,
            image_support=image_support if image_processor is None else ImageSupport.AVAILABLE,
            caches_prompts=caches,
        )
        self._batch = _ScriptedBatch(info, tokenizer, _as_function(transcripts), caches=caches)
        if gated:
            self._batch.permits = threading.Semaphore(0)
        self.warmups: list[Callable[[], PromptStart | None]] = []
        super().__init__(self._batch, max_concurrent=max_concurrent, max_waiting=max_waiting)

    @property
    def requests(self) -> Sequence[ScriptedRequest]:
        """Every request that was started, in that order."""
        return self._batch.started

    @property
    def cancelled(self) -> Sequence[ScriptedRequest]:
        """Those that were cancelled while they ran."""
        return [request for request in self._batch.started if request.cancelled.is_set()]

    def prewarm(self, make_start: Callable[[], PromptStart | None], adapter: str | None = None) -> None:
        """Record it in `warmups`, and do it if this has something to warm up."""
        self.warmups.append(make_start)
        super().prewarm(make_start, adapter)

    def advance(self, steps: int = 1) -> None:
        """Let a gated engine take this many more steps."""
        if self._batch.permits is None:
            raise ValueError("Only a gated engine can be advanced.")
        self._batch.permits.release(steps)
        self._scheduler.wake()


def _as_function(transcripts: Iterable[Script] | Callable[[str], Script]) -> Callable[[str], Script]:
    if callable(transcripts):
        return transcripts
    scripts = iter(transcripts)

    def next_script(_prompt: str) -> Script:
        try:
            return next(scripts)
        except StopIteration:
            raise EngineError("The scripted engine has no transcript left.") from None

    return next_script
