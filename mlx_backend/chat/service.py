"""What a request means: from a conversation to a running reply.

    request ─chat_prompt─▶ tokens ─engine─▶ items ─reply─▶ events
       └─limits, reply_constraints─┘

Knows no HTTP and no MLX: it takes frozen requests, raises errors that name a field, and returns a `Reply`.
"""

from __future__ import annotations

import copy
import json
import logging
import threading
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple

from mlx_backend.byte_cache import CacheBudget
from mlx_backend.chat.capabilities import ChatFormat, ModelFacts, describe
from mlx_backend.chat.chat_prompt import ChatPrompts
from mlx_backend.chat.generated_replies import GeneratedReplies
from mlx_backend.chat.infill import infill_format, infill_of
from mlx_backend.chat.limits import ReplyLimits, TextSize
from mlx_backend.chat.model_settings import ModelSettings
from mlx_backend.chat.prompt import Prompt
from mlx_backend.chat.recent_prompts import RecentPrompts, SentPrompt, said
from mlx_backend.chat.reply import EchoedPrompt, RawText, Reply, ReplySetup
from mlx_backend.chat.reply_constraints import ReplyConstraints
from mlx_backend.chat.reply_group import start_replies
from mlx_backend.chat.request import CompletionRequest, ToolChoice, recognised
from mlx_backend.chat.request_images import RequestImages
from mlx_backend.chat.superseded import SupersededReplies
from mlx_backend.chat.tool_lists import ToolLists
from mlx_backend.constraints import GrammarError
from mlx_backend.conversation.json_arguments import is_json_object
from mlx_backend.conversation.json_values import excerpt
from mlx_backend.conversation.parser import ChannelParser
from mlx_backend.conversation.tools import ToolSet
from mlx_backend.engine.base import ANYONE, GenerationRequest, Sampling
from mlx_backend.engine.distributed import distributed_backend
from mlx_backend.errors import RequestError
from mlx_backend.models.description import DEFAULT_TEMPERATURE, ModelDescription
from mlx_backend.preparation import Preparation

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from mlx_backend.chat.chat_prompt import Conversation
    from mlx_backend.chat.reply import FinishedReply, Parser
    from mlx_backend.chat.reply_group import ReplyGroup, ReplyStart
    from mlx_backend.chat.request import ChatRequest, ReplyRequest
    from mlx_backend.chat.request_images import SeenImages
    from mlx_backend.conversation.effort import Effort
    from mlx_backend.conversation.events import ToolCall
    from mlx_backend.conversation.tool_names import ToolNames
    from mlx_backend.engine.base import Constraint, PromptStart, QueueClient
    from mlx_backend.engine.jobs import Generation
    from mlx_backend.engine.threaded import Engine
    from mlx_backend.images.loader import ImageLoader

log = logging.getLogger(__name__)

PREWARM_SECONDS = 5.0
"""How long making the text of a prompt may take that is only likely to come."""

MAX_PROMPT_LOGPROBS = 1 << 21
"""Log probabilities of prompts' tokens in one request: they are held until the response has been sent."""

EXPECTED_TOKENS = 2048
"""Tokens that a reply is expected to have if its client sets no limit."""


class _TextPrompt(NamedTuple):
    """The tokens of a bare text, and what ends its continuation."""

    tokens: tuple[int, ...]
    stop: tuple[str, ...]


class Service:
    """One chat model: its engine, and what a conversation with it means. Safe to use from several threads.

    `images` loads those of requests (None: the model is shown none). `caches` bounds the bytes of what is cached here.
    """

    def __init__(
        self,
        engine: Engine,
        settings: ModelSettings | None = None,
        *,
        images: ImageLoader | None = None,
        caches: CacheBudget | None = None,
    ) -> None:
        self.engine = engine
        self.model_id = engine.model_id
        self.settings = settings = settings or ModelSettings.of()
        caches = caches or CacheBudget()
        tokenizer = engine.tokenizer
        self._images = RequestImages(engine, images)
        form = ChatFormat.of(
            self._facts(),
            settings,
            on_refused=partial(
                log.warning, "%s is read without the response template of its tokenizer: %s.", engine.model_id
            ),
        )
        self._dialect, self._scale = form.dialect, form.scale
        self._limits = ReplyLimits(context_length=engine.context_length, settings=settings)
        self._size = TextSize.of_prompts(tokenizer, self._limits)
        self._tokenized_size = TextSize.of_tokenized(tokenizer, engine.context_length)
        self._replies = GeneratedReplies(tokenizer, form.dialect, caches)
        self._recent_prompts = RecentPrompts(caches)
        self._tool_lists = ToolLists(caches)
        self._superseded = SupersededReplies(engine.model_id)
        self._constraints = ReplyConstraints(tokenizer, form.dialect, self._limits, caches)
        self._prompts = ChatPrompts(tokenizer, form, self._limits, self._replies, caches)

    @property
    def efforts(self) -> Sequence[Effort]:
        """The levels of the model's scale."""
        return self._scale.efforts

    def named(self, name: str, settings: ModelSettings) -> Service:
        """Return this model under another name, with settings of its own; engine, caches and stores are the same."""
        other = copy.copy(self)
        other.model_id, other.settings = name, settings
        if settings.effort_budgets != self.settings.effort_budgets:
            other._scale = ChatFormat.of(self._facts(), settings).scale
        other._limits = replace(self._limits, settings=settings)
        other._constraints = self._constraints.with_limits(other._limits)
        other._prompts = self._prompts.with_settings(other._limits, other._scale)
        return other

    def prepare(self) -> None:
        """Build in the background what the first constrained reply would have to wait for; log what efforts mean."""
        description = self.description()
        log.info(
            "%s writes in the dialect %s: %s.",
            self.engine.model_id,
            description.dialect,
            description.recognised_by,
        )
        if budgets := description.effort_budgets:
            log.info(
                "The reasoning of %s is held to budgets of tokens: %s.",
                self.engine.model_id,
                ", ".join(f"{effort} {tokens:,}" for effort, tokens in budgets.items()),
            )
        if "structured_output" in description.capabilities:
            # Not a daemon, as a thread of the loader's would be: the interpreter has to wait for foreign code.
            threading.Thread(target=self._prepare, name="grammars", daemon=False).start()

    def _prepare(self) -> None:
        try:
            self._constraints.prepare()
        except GrammarError as error:  # raised again for every request that needs it
            log.info("Replies of %s cannot be constrained: %s", self.engine.model_id, error)
        except Exception:
            log.exception("Constraints for %s could not be prepared.", self.engine.model_id)

    def description(self) -> ModelDescription:
        """Return what this model can do."""
        return describe(self._facts(), self.settings)

    def _facts(self) -> ModelFacts:
        engine, tokenizer = self.engine, self.engine.tokenizer
        special = tokenizer.special_tokens
        return ModelFacts(
            template=tokenizer.chat_template,
            response_template=tokenizer.response_template,
            control_tokens=special.values(),
            end_tokens=[text for token, text in special.items() if token in tokenizer.end_tokens],
            vocabulary_size=tokenizer.vocabulary_size,
            context_length=engine.context_length,
            advice=engine.sampling_defaults,
            infills=infill_of(tokenizer) is not None,
            sees_images=self._images.are_seen,
            one_process=distributed_backend() is None,
        )

    def chat(self, request: ChatRequest, client: QueueClient = ANYONE) -> Reply:
        """Start a client's reply. Raises RequestError, HistoryError, EffortError or an EngineError."""
        return self._chat(request, client, 1)(0)

    def chat_replies(self, request: ChatRequest, n: int, client: QueueClient = ANYONE) -> Reply | ReplyGroup:
        """Start n replies to one conversation. Raises what `chat` raises."""
        self._limits.check_choices(n)
        return start_replies([self._chat(request, client, n)], n)

    def _chat(self, request: ChatRequest, client: QueueClient, n: int) -> ReplyStart:
        """Build the prompt; return what starts each of n replies to it."""
        self._limits.check(request)
        request = self._accepted(request, client)
        if (with_tools := self._with_tools_of_session(request)) is not None:
            with suppress(RequestError):  # it may have room only as it was sent
                return self._start(with_tools, client, n)
        return self._start(request, client, n)

    def _start(self, request: ChatRequest, client: QueueClient, n: int) -> ReplyStart:
        conversation = self._prompts.conversation(request)
        # Before rendering: what cannot be met is refused at once.
        self._limits.check_messages(conversation.messages)
        names = self._prompts.tool_names(request)
        renamed = _with_names(request, names)
        grammar = self._constraints.grammar(renamed)
        images = self._images.seen(request.images, conversation.messages)
        request = replace(request, images=())  # their files would live as long as the reply
        prompt = self._prompts.prompt(request, conversation, images=images, size=self._size)
        self._check_length(request, conversation, prompt, images)
        unread = self._prompts.unread(request)
        sent = SentPrompt.of(
            (request.owner, request.adapter),
            conversation.messages,
            request.tools,
            self._prompts.template_kwargs(request, conversation),
            prompt.tokens,
            _session_of(request),
        )
        match = self._recent_prompts.match(sent)
        seen = images.known() if images is not None else None

        def start(index: int) -> Reply:
            constraint = self._constraints.start(renamed, grammar, conversation, prompt)
            setup = ReplySetup(
                parser=self._parser(renamed, prompt, is_continued=conversation.is_continued),
                tool_names=names if names.differ else None,
                prompt_tokens=len(prompt.tokens),
                image_tokens=prompt.image_tokens,
                match=match,
                special_tokens=self.engine.tokenizer.special_tokens,
                effort=conversation.resolution,
                priority=request.priority or 0,
                thinking_budget=self._limits.thinking_budget_of(request, conversation.resolution),
                stop=request.stop,
                max_repeated_tokens=self._limits.max_repeated_tokens_of(request),
                is_constrained=grammar is not None,
                parallel_tool_calls=request.parallel_tool_calls,
                unread=unread,
                # Of several replies it is not known with which the conversation goes on.
                on_finished=lambda finished: self._on_finished(
                    request, conversation, prompt, sent, seen, finished, goes_on=n == 1
                ),
                running=self._superseded.reply_to(request),
            )
            generation = self._generate(prompt, request, client, constraint, index=index, n=n)
            return Reply(generation, setup)

        return start

    def complete(self, request: CompletionRequest, client: QueueClient = ANYONE) -> Reply:
        """Start a client's completion of a bare text. Raises RequestError or an EngineError."""
        return self._complete(request, self._completion_prompt(request), client, 1)(0)

    def complete_replies(
        self,
        request: CompletionRequest,
        prompts: Sequence[str | tuple[int, ...]],
        n: int,
        client: QueueClient = ANYONE,
    ) -> Reply | ReplyGroup:
        """Start n completions of each prompt, as the request says it of one. Raises what `complete` raises."""
        self._limits.check_choices(n, len(prompts))
        requests = [replace(request, prompt=prompt) for prompt in prompts]
        texts = [self._completion_prompt(each) for each in requests]
        _check_echoed(requests, texts, n)
        starts = [self._complete(each, text, client, n) for each, text in zip(requests, texts, strict=True)]
        return start_replies(starts, n)

    def _complete(
        self,
        request: CompletionRequest,
        prompt: _TextPrompt,
        client: QueueClient,
        n: int,
    ) -> ReplyStart:
        """Return what starts each of n completions of a prompt."""
        tokenizer, tokens = self.engine.tokenizer, prompt.tokens
        self._limits.max_tokens_of(request, len(tokens))  # before any is started
        echo = None
        if request.echo:
            text = request.prompt if isinstance(request.prompt, str) else tokenizer.decode(tokens)
            echo = EchoedPrompt(text, tokens)
        prompt_only = request.max_tokens == 0
        asked = replace(request, max_tokens=1) if prompt_only else request

        def start(index: int) -> Reply:
            setup = ReplySetup(
                parser=RawText(tokenizer.special_tokens),
                prompt_tokens=len(tokens),
                special_tokens=tokenizer.special_tokens,
                priority=request.priority or 0,
                stop=prompt.stop,
                max_repeated_tokens=self._limits.max_repeated_tokens_of(request),
                echo=echo,
                prompt_only=prompt_only,
            )
            generation = self._generate(Prompt(tokens=tokens), asked, client, index=index, n=n)
            return Reply(generation, setup)

        return start

    def _completion_prompt(self, request: CompletionRequest) -> _TextPrompt:
        if isinstance(request.prompt, str):
            self._size.check(request.prompt, "prompt")
            tokens = self.text_tokens(request.prompt, bos=request.bos and not request.suffix)
        else:
            tokens = request.prompt
            self._check_tokens("prompt[{}]", "prompt", tokens)
        if not request.suffix:
            return _TextPrompt(tokens, request.stop)
        tokenizer = self.engine.tokenizer
        infill = infill_format(tokenizer, self.engine.model_id)
        self._size.check(request.suffix, "suffix")
        after = self.text_tokens(request.suffix, bos=False)
        first = tokenizer.bos_tokens if request.bos else ()
        tokens = (*first, *infill.tokens(tokenizer, tokens, after))
        return _TextPrompt(tokens, (*request.stop, *infill.ends))

    def prompt(self, request: ChatRequest, client: QueueClient = ANYONE) -> Prompt:
        """Build the prompt that `chat` would have the engine continue. Raises what `chat` raises about it."""
        self._limits.check(request)
        request = self._accepted(request, client)
        request = self._with_tools_of_session(request) or request
        conversation = self._prompts.conversation(request)
        images = self._images.seen(request.images, conversation.messages)
        return self._prompts.prompt(request, conversation, images=images, size=self._tokenized_size)

    def check_tokenizable(self, texts: Sequence[str]) -> None:
        """Raise the RequestError for texts that are too long to be tokenised in one request."""
        self._tokenized_size.check("".join(texts), "prompt")

    def text_tokens(self, text: str, *, bos: bool = True) -> tuple[int, ...]:
        """Tokenise a bare text: markers in it are control tokens, and with `bos` it begins as every prompt does."""
        tokenizer = self.engine.tokenizer
        tokens = tuple(tokenizer.encode(text, control_tokens=True))
        first = tuple(tokenizer.bos_tokens) if bos else ()
        return tokens if tokens[: len(first)] == first else first + tokens

    def _accepted(self, request: ChatRequest, client: QueueClient) -> ChatRequest:
        """Return a client's request as it is answered."""
        request = self._images.visible(self._recognised(request))
        image_hashes = tuple(hash(image.url) for image in request.images)
        request = replace(request, owner=client.name, image_hashes=image_hashes)
        if request.tool_choice.forbidden and not self._can_forbid_calls:
            return replace(request, tools=(), tool_paths=(), tool_choice=ToolChoice())
        return self._tool_lists.as_first_sent(request)

    def _with_tools_of_session(self, request: ChatRequest) -> ChatRequest | None:
        """Return a request that goes on with a conversation, but without its tools, with these, none to be called.

        Agents send such a one to have the conversation summarised: without tools all of it would be prefilled anew.
        Only where the client names the conversation, and says in so many words that there are no tools.
        """
        session = _session_of(request)
        if not session or request.fields.get("tools") != [] or not self._can_forbid_calls:
            return None
        earlier = self._recent_prompts.of_session((request.owner, request.adapter), session)
        if earlier is None:
            return None
        tools = json.loads(earlier.definitions)
        request = replace(request, tools=tools, tool_choice=ToolChoice(forbidden=True))
        messages = self._prompts.conversation(request).messages
        return request if said(messages[: len(earlier.said)]) == earlier.said else None

    @cached_property
    def _can_forbid_calls(self) -> bool:
        """Whether a prompt may hold tools that the reply must not call."""
        return "tool_choice" in self.description().capabilities and self._constraints.can_forbid_calls()

    def _recognised(self, request: ChatRequest) -> ChatRequest:
        wanted = request.background_detection
        if not (self.settings.background_detection if wanted is None else wanted):
            return request
        return recognised(request, self.settings.max_tokens)

    def _check_length(
        self, request: ChatRequest, conversation: Conversation, prompt: Prompt, images: SeenImages | None
    ) -> None:
        """Raise the RequestError for a prompt that is too long; it says how many of the tokens are tools."""
        length, reserved = len(prompt.tokens), self._limits.reserved_of(request)
        if self._limits.has_room_after(length, reserved):
            return
        tool_tokens = 0
        if request.tools:
            without_tools = self._prompts.prompt(replace(request, tools=()), conversation, images=images)
            tool_tokens = length - len(without_tools.tokens)
        raise self._limits.too_long(
            "messages", length, reserved=reserved, tools=len(request.tools), tool_tokens=tool_tokens
        )

    def _parser(self, request: ChatRequest, prompt: Prompt, *, is_continued: bool) -> Parser:
        """Make the parser; `request` has the names of tools for the model."""
        if request.raw:
            return RawText()
        # Not where the answer is JSON, and not where calls must match schemas: only their own form is held to them.
        choice = request.tool_choice
        unwrapped = not (is_continued or request.answer_format or choice.strict)
        return ChannelParser(
            self._dialect,
            tools=ToolSet(() if choice.forbidden else request.tools, unwrapped=unwrapped),
            opens_in=prompt.opens_in,
            special_tokens=self.engine.tokenizer.special_tokens,
        )

    def _generate(
        self,
        prompt: Prompt,
        request: ReplyRequest,
        client: QueueClient,
        constraint: Constraint | None = None,
        *,
        index: int,
        n: int,
    ) -> Generation:
        """Start the choice with this index, of which each prompt has n."""
        max_tokens = self._limits.max_tokens_of(request, len(prompt.tokens))
        sampling = self.sampling_of(request)
        if sampling.seed is not None:
            sampling = replace(sampling, seed=sampling.seed + index % n)
        is_echoed = isinstance(request, CompletionRequest) and request.echo
        self._check_tokens("logit_bias", "logit_bias", [token for token, _ in sampling.logit_bias])
        return self.engine.generate(
            GenerationRequest(
                prompt=prompt.tokens,
                max_tokens=max_tokens,
                checkpoints=prompt.checkpoints,
                sampling=sampling,
                # A client that sets a limit expects a reply about as long.
                expected_tokens=None if request.max_tokens else EXPECTED_TOKENS,
                logprobs=request.logprobs,
                prompt_logprobs=request.logprobs if is_echoed else None,
                constraint=constraint,
                adapter=request.adapter,
                # Where one has begun, the others are worth waiting for.
                queue_timeout=self.settings.queue_seconds if index == 0 else None,
                priority=client.priority_of(request.priority or 0),
                client=client.name,
                images=prompt.images,
            )
        )

    def sampling_of(self, request: ReplyRequest) -> Sampling:
        """Return the request's settings over the model's over what its makers recommend."""
        return Sampling(
            **{
                "temperature": DEFAULT_TEMPERATURE,
                **self.engine.sampling_defaults,
                **self.settings.sampling,
                **request.sampling,
            }
        )

    def _check_tokens(self, where: str, field: str, tokens: Iterable[int]) -> None:
        """Raise the RequestError for the first token id that is not in the vocabulary."""
        size = self.engine.tokenizer.vocabulary_size
        for index, token in enumerate(tokens):
            if not 0 <= token < size:
                raise RequestError(
                    f"{where.format(index)}: {token} is not a token id of this model (0 to {size - 1})", field
                )

    def _on_finished(
        self,
        request: ChatRequest,
        conversation: Conversation,
        prompt: Prompt,
        sent: SentPrompt,
        images: SeenImages | None,
        finished: FinishedReply,
        *,
        goes_on: bool,
    ) -> None:
        """Remember the reply for the prompts that hold it again, and prewarm what may follow."""
        _log_broken(finished.message.tool_calls)
        self._replies.put(request.owner, conversation.messages, prompt, finished, request.image_hashes)
        if goes_on:
            self._recent_prompts.put(sent, finished.tokens)
        if goes_on and not finished.is_cut:
            self._prewarm_next_turn(request, sent, finished.as_history(), images)

    def _prewarm_next_turn(
        self, request: ChatRequest, sent: SentPrompt, answer: Mapping[str, Any], images: SeenImages | None
    ) -> None:
        """Have the engine prefill the history that the next turn will begin with, once it is idle."""
        last = request.messages[-1]
        is_continued = isinstance(last, dict) and last.get("role") == "assistant"
        # A background request (a title) has no next turn, and must not displace the user's own.
        is_background = request.background is not None or (request.priority or 0) > 0
        if self.settings.prewarm and not (request.raw or is_continued or is_background):
            self.engine.prewarm(lambda: self._next_turn(request, sent, answer, images), request.adapter)

    def _next_turn(
        self, request: ChatRequest, sent: SentPrompt, answer: Mapping[str, Any], images: SeenImages | None
    ) -> PromptStart | None:
        """Return the beginning of the next turn's prompt, None if that turn has come. Raises if it takes long."""
        if not self._recent_prompts.has(sent):
            return None
        with Preparation(PREWARM_SECONDS).running():
            return self._prompts.next_turn(request, answer, images)


def _session_of(request: ChatRequest) -> str:
    """Return the client's own name for the conversation, "" if it has none."""
    name = request.fields.get("prompt_cache_key")
    return name if isinstance(name, str) else ""


def _log_broken(calls: Iterable[ToolCall]) -> None:
    """Log once which calls of a reply went out with arguments that clients cannot read."""
    names = {call.name for call in calls if call.complete and not is_json_object(call.arguments)}
    if names:
        log.warning(
            "The model called %s with arguments that are no JSON object and cannot be repaired. They were sent as it "
            "wrote them.",
            ", ".join(map(excerpt, sorted(names))),
        )


def _check_echoed(requests: Sequence[CompletionRequest], prompts: Sequence[_TextPrompt], n: int) -> None:
    """Raise the RequestError for more log probabilities of prompts' tokens than are held for one request."""
    total = sum(
        n * len(prompt.tokens) * (1 + request.logprobs)
        for request, prompt in zip(requests, prompts, strict=True)
        if request.echo and request.logprobs is not None
    )
    if total > MAX_PROMPT_LOGPROBS:
        raise RequestError(
            f"The tokens of the prompts and the likeliest in their places have {total} log probabilities; at most "
            f"{MAX_PROMPT_LOGPROBS} are sent for one request. Send fewer prompts in it, or a smaller 'logprobs'.",
            "logprobs",
        )


def _with_names(request: ChatRequest, names: ToolNames) -> ChatRequest:
    """Return the request with the names of tools for the model."""
    if not names.differ:
        return request
    choice = request.tool_choice
    name = names.for_model(choice.name) if choice.name is not None else None
    return replace(
        request,
        tools=names.definitions(request.tools),
        tool_choice=replace(
            choice,
            name=name,
            strict=frozenset(map(names.for_model, choice.strict)),
            allowed=None if choice.allowed is None else frozenset(map(names.for_model, choice.allowed)),
            input_grammars={names.for_model(each): held for each, held in choice.input_grammars.items()},
        ),
    )
