"""What a request means: from a conversation to a running reply.

    request ─history─▶ messages ─effort─▶ one effort ─prompt─▶ tokens ─engine─▶ items ─parser─▶ events

Knows no HTTP and no MLX: it takes frozen requests, raises meaning, and answers with a `Reply` (reply.py).
"""

from __future__ import annotations

import logging
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mlx_backend.chat.capabilities import describe
from mlx_backend.chat.prompt import Prompt, PromptBuilder
from mlx_backend.chat.raw_text import RawText
from mlx_backend.chat.reasoning_store import ReasoningStore
from mlx_backend.chat.reply import Reply, ReplyPlan
from mlx_backend.chat.request import UNLIMITED, ChatRequest, CompletionRequest, ReplyRequest
from mlx_backend.constraints import GrammarError, Grammars
from mlx_backend.constraints.reasoning_budget import Both, Budgets
from mlx_backend.conversation import effort as efforts
from mlx_backend.conversation.dialects import detect
from mlx_backend.conversation.effort import Effort
from mlx_backend.conversation.history import sanitise
from mlx_backend.conversation.parser import ChannelParser
from mlx_backend.conversation.reasoning_fields import REASONING_CONTENT
from mlx_backend.conversation.template import TemplateTraits, for_template
from mlx_backend.engine.base import GenerationRequest, Sampling
from mlx_backend.engine.distributed.launch import distributed_backend
from mlx_backend.errors import RequestError
from mlx_backend.models.description import DEFAULT_TEMPERATURE, ModelDescription
from mlx_backend.models.spec import ModelDefaults

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mlx_backend.chat.reply import FinishedReply, Parser
    from mlx_backend.constraints import Spec
    from mlx_backend.conversation.effort import Resolution
    from mlx_backend.engine.base import Constraint, Engine, Generation

log = logging.getLogger(__name__)

EXPECTED_TOKENS = 2048  # of a reply whose length nobody has limited


class Service:
    """One engine, and what a conversation with it means. Safe to use from several threads."""

    def __init__(
        self,
        engine: Engine,
        *,
        defaults: ModelDefaults | None = None,
        effort: Effort | None = None,
        max_tokens: int | None = None,
        thinking_budget: int | None = None,
        answer_reserve: int | None = None,
        queue_seconds: float | None = None,
        prewarm: bool = True,
    ) -> None:
        self.engine = engine
        self.defaults = defaults or ModelDefaults()
        tokenizer = engine.tokenizer
        self._effort = effort
        self._max_tokens = self.defaults.max_tokens or max_tokens
        own_budget = self.defaults.thinking_budget
        self._thinking_budget = thinking_budget if own_budget is None else own_budget
        self._answer_reserve = self.defaults.answer_reserve or answer_reserve
        self._queue_seconds = queue_seconds
        self._prewarm = prewarm
        self._dialect = detect(tokenizer.chat_template, tokenizer.special_tokens.values())
        self._traits = TemplateTraits.of(tokenizer.chat_template)
        self._prompts = PromptBuilder(tokenizer, self._dialect)
        self._grammars = Grammars(tokenizer, self._dialect)
        self._budgets = Budgets(tokenizer, self._dialect)
        self._thoughts = ReasoningStore()

    def prepare(self) -> None:
        """Make in the background what the first reply that is held to a schema would have to wait for."""
        if "structured_output" in self.description().capabilities:
            # No daemon: the interpreter is to wait for it, not to end in the middle of foreign code.
            threading.Thread(target=self._prepare, name="grammars").start()

    @property
    def prepared(self) -> bool:
        """Whether that is there."""
        return self._grammars.prepared

    def _prepare(self) -> None:
        try:
            self._grammars.prepare()
        except GrammarError as error:  # said again to whoever asks for it
            log.info("Replies of %s cannot be held: %s", self.engine.model_id, error)
        except Exception:
            log.exception("What replies are held with could not be made ready.")

    def description(self) -> ModelDescription:
        """What this model can do."""
        engine, tokenizer = self.engine, self.engine.tokenizer
        return describe(
            template=tokenizer.chat_template,
            control_tokens=tokenizer.special_tokens.values(),
            vocabulary_size=tokenizer.vocabulary_size,
            context_length=engine.context_length,
            advice=engine.sampling_defaults,
            defaults=self.defaults,
            server_effort=self._effort,
            one_process=distributed_backend() is None,
        )

    def chat(self, request: ChatRequest) -> Reply:
        """Begin a reply. Raises RequestError, HistoryError, EffortError or an EngineError."""
        messages, resolution = self._understood(request)
        grammar = self._grammar(request)  # what cannot be is known before anything is rendered
        prompt = self._chat_prompt(request, messages, resolution.effort)
        names = [tool["function"]["name"] for tool in request.tools]
        parser: Parser
        if request.raw:
            parser = RawText()
        else:
            parser = ChannelParser(
                self._dialect,
                tools=names,
                opens_in=prompt.opens_in,
                special_tokens=self.engine.tokenizer.special_tokens,
            )
        constraint = self._start(request, grammar, prompt, messages) if grammar is not None else None
        most, room = self._budget_of(request, resolution.effort), self._room(prompt, request)
        budget = self._budgets.begin(
            prompt,
            room=room,
            tokens=None if most == UNLIMITED else most,
            reserve=self._reserve_of(request, room),
            tools=names,
        )
        if budget is not None:
            constraint = Both(constraint, budget) if constraint is not None else budget
        open_calls = _open_calls(messages)
        plan = ReplyPlan(
            parser=parser,
            prompt_tokens=len(prompt.tokens),
            special_tokens=self.engine.tokenizer.special_tokens,
            effort=resolution,
            stop=request.stop,
            parallel_tool_calls=request.parallel_tool_calls,
            on_finished=lambda finished: self._on_finished(request, open_calls, finished),
        )
        return Reply(self._generate(prompt, request, constraint), plan)

    def prompt(self, request: ChatRequest) -> Prompt:
        """Build the prompt that `chat` would have answered. Raises what `chat` does, if it is about the prompt."""
        messages, resolution = self._understood(request)
        return self._chat_prompt(request, messages, resolution.effort)

    def text_tokens(self, text: str, *, opening: bool = True) -> tuple[int, ...]:
        """Tokenise the prompt of a bare text: markers in it are control tokens, and it gets what opens every prompt."""
        tokenizer = self.engine.tokenizer
        tokens = tuple(tokenizer.encode(text, control_tokens=True))
        first = tuple(tokenizer.bos_tokens) if opening else ()
        return tokens if tokens[: len(first)] == first else first + tokens

    def complete(self, request: CompletionRequest) -> Reply:
        """Begin a completion of a bare text. Raises RequestError or an EngineError."""
        special = self.engine.tokenizer.special_tokens
        text = request.prompt
        tokens = self.text_tokens(text) if isinstance(text, str) else text
        plan = ReplyPlan(
            parser=RawText(special), prompt_tokens=len(tokens), special_tokens=special, stop=request.stop
        )
        return Reply(self._generate(Prompt(tokens=tokens), request), plan)

    def _grammar(self, request: ChatRequest) -> Spec | None:
        """Read what the reply is to be held to; raise the RequestError that names what cannot be."""
        grammars, choice, answer, calls = self._grammars, request.tool_choice, None, None
        field = "tool_choice"
        try:
            # An answer that is held alone would forbid calls.
            held = request.answer_format is not None and request.tools
            if choice.required or choice.name is not None or choice.strict or held:
                tools = [
                    {
                        **tool,
                        "function": {**tool["function"], "strict": tool["function"]["name"] in choice.strict},
                    }
                    for tool in request.tools
                ]
                calls = grammars.tool_calls(
                    tools, required=choice.required, name=choice.name, parallel=request.parallel_tool_calls
                )
            if (form := request.answer_format) is not None:
                field = form.field
                match form.kind:
                    case "json_object":
                        answer = grammars.json_object()
                    case "json_schema":
                        answer = grammars.json_schema(form.value, strict=form.strict)
                    case "regex":
                        answer = grammars.regex(form.value)
                    case "choice":
                        answer = grammars.choice(form.value)
        except GrammarError as error:
            raise RequestError(str(error), field) from None
        spec = answer | calls if answer and calls else answer or calls
        if spec is not None and spec.ignored:
            log.info("not held to: %s", "; ".join(spec.ignored))
        return spec

    def _start(
        self, request: ChatRequest, grammar: Spec, prompt: Prompt, messages: Sequence[Mapping[str, Any]]
    ) -> Constraint:
        begun = messages[-1]["content"] if self._continues(request, messages) else ""
        try:
            return grammar.start(prompt.opens_in, begun=begun)
        except GrammarError as error:
            field = request.answer_format.field if request.answer_format else "tool_choice"
            raise RequestError(str(error), field) from None

    def _understood(self, request: ChatRequest) -> tuple[list[dict[str, Any]], Resolution]:
        """Read the history and the effort."""
        messages = sanitise(request.messages, tools=list(request.tools) or None, policy=self._dialect.history)
        resolution = efforts.resolve(
            request.fields, messages, model_default=self.defaults.effort, server_default=self._effort
        )
        return self._with_thoughts(resolution.messages), resolution

    def _on_finished(self, request: ChatRequest, open_calls: Sequence[str], finished: FinishedReply) -> None:
        """Remember the reasoning behind tool calls, forget it with the turn's answer, and prewarm the next turn."""
        if finished.call_ids:
            self._thoughts.put(finished.call_ids, finished.message.reasoning)
        elif finished.message.finish == "stop":
            self._thoughts.drop(open_calls)
        if not finished.is_cut:
            self._prewarm_next_turn(request, finished.as_history())

    def _prewarm_next_turn(self, request: ChatRequest, answer: Mapping[str, Any]) -> None:
        """Have the engine prefill the history that the next turn will begin with, once it is idle."""
        last = request.messages[-1]
        continued = isinstance(last, dict) and last.get("role") == "assistant"
        # A background request (a title) has no next turn, and must not displace the user's own.
        is_background = request.priority > 0
        if self._prewarm and not (request.raw or continued or is_background):
            self.engine.prewarm(lambda: self._next_prompt(request, answer), request.adapter)

    def _next_prompt(self, request: ChatRequest, answer: Mapping[str, Any]) -> Sequence[int]:
        """Return how the next turn begins: what two different ones have in common."""
        prompts = []
        for word in ("a", "1"):
            replies: list[Mapping[str, Any]] = [
                {"role": "tool", "tool_call_id": call["id"], "content": word}
                for call in answer.get("tool_calls", ())
            ] or [{"role": "user", "content": word}]
            following = replace(request, messages=[*request.messages, answer, *replies])
            messages, resolution = self._understood(following)
            prompts.append(self._chat_prompt(following, messages, resolution.effort).tokens)
        return prompts[0][: _same(*prompts)]

    def _chat_prompt(self, request: ChatRequest, messages: list[dict[str, Any]], effort: Effort) -> Prompt:
        if self.engine.tokenizer.chat_template is None:
            if request.role_mapping is None:
                raise RequestError(
                    "This model has no chat template. Start the server with --chat-template, send a "
                    "role_mapping, or use /v1/completions.",
                    "messages",
                )
            return self._prompts.mapped(
                messages, request.role_mapping, add_generation_prompt=request.add_generation_prompt
            )
        kwargs: dict[str, Any] = {
            **self._told_budget(request, effort),
            **self.defaults.template_kwargs,
            **request.template_kwargs,
            **efforts.template_kwargs(effort, self._traits),
        }
        tools = list(request.tools) or None
        if not self._continues(request, messages):
            return self._prompts.build(
                for_template(messages, self._traits),
                tools,
                kwargs,
                add_generation_prompt=request.add_generation_prompt,
            )
        last = messages[-1]
        # Templates do not render nothing: an answer without a question gets an empty one.
        earlier = messages[:-1] or [{"role": "user", "content": ""}]
        return self._prompts.continued(
            for_template(earlier, self._traits),
            tools,
            kwargs,
            reasoning=last.get(REASONING_CONTENT, ""),
            content=last["content"],
        )

    @staticmethod
    def _continues(request: ChatRequest, messages: Sequence[Mapping[str, Any]]) -> bool:
        """Whether the reply goes on where the last message ends."""
        last = messages[-1]
        return request.continue_last and last["role"] == "assistant" and not last.get("tool_calls")

    def _with_thoughts(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Give the calls of an unfinished turn the reasoning back that the client has lost."""
        filled = [dict(message) for message in messages]
        for message in _unfinished_turn(filled):
            if message.get("tool_calls") and not message.get(REASONING_CONTENT):
                thought = self._thoughts.get(message["tool_calls"][0]["id"])
                if thought:
                    message[REASONING_CONTENT] = thought
        return filled

    def _budget_of(self, request: ChatRequest, effort: Effort) -> int | None:
        """How many tokens may be reasoning: none at effort none, also where the model cannot be told so."""
        if effort is Effort.NONE:
            return 0
        return self._thinking_budget if request.thinking_budget is None else request.thinking_budget

    def _reserve_of(self, request: ChatRequest, room: int) -> int | None:
        """How much of the reply is kept for the answer; unless the request says so itself, at most half of it."""
        if request.answer_reserve is not None or self._answer_reserve is None:
            return request.answer_reserve
        return min(self._answer_reserve, room // 2)

    def _told_budget(self, request: ChatRequest, effort: Effort) -> dict[str, int]:
        """Return what a template is told of the budget, if it is one that asks (Seed-OSS)."""
        budget = self._budget_of(request, effort)
        asks = "thinking_budget" in (self.engine.tokenizer.chat_template or "")
        return {"thinking_budget": budget} if asks and budget is not None else {}

    def _room(self, prompt: Prompt, request: ReplyRequest) -> int:
        """How many tokens the reply may have."""
        length, holds = len(prompt.tokens), self.engine.context_length
        if length >= holds:
            raise RequestError(
                f"The prompt has {length} tokens; the context holds {holds}, and the reply needs room too.",
                "prompt" if isinstance(request, CompletionRequest) else "messages",
                "context_length_exceeded",
                numbers={"prompt_tokens": length, "max_model_len": holds},
            )
        return min(request.max_tokens or self._max_tokens or holds, holds - length)

    def _generate(
        self,
        prompt: Prompt,
        request: ReplyRequest,
        constraint: Constraint | None = None,
    ) -> Generation:
        room = self._room(prompt, request)
        size = self.engine.tokenizer.vocabulary_size
        sampling = self._sampling(request)
        for token, _ in sampling.logit_bias:
            if not 0 <= token < size:
                raise RequestError(
                    f"logit_bias: {token} is not a token id of this model (0 to {size - 1})", "logit_bias"
                )
        if isinstance(request, CompletionRequest):
            for at, token in enumerate(prompt.tokens):
                if not 0 <= token < size:
                    raise RequestError(
                        f"prompt[{at}]: {token} is not a token id of this model (0 to {size - 1})", "prompt"
                    )
        return self.engine.generate(
            GenerationRequest(
                prompt=prompt.tokens,
                max_tokens=room,
                checkpoints=prompt.checkpoints,
                sampling=sampling,
                # A limit that the client chose is what it expects; else nobody knows.
                expected_tokens=None if request.max_tokens else EXPECTED_TOKENS,
                logprobs=request.logprobs,
                constraint=constraint,
                adapter=request.adapter,
                queue_timeout=self._queue_seconds,
                priority=request.priority,
            )
        )

    def _sampling(self, request: ReplyRequest) -> Sampling:
        """The request's own wishes, then the model's defaults, then what its makers advise."""
        return Sampling(
            **{
                "temperature": DEFAULT_TEMPERATURE,
                **self.engine.sampling_defaults,
                **self.defaults.sampling,
                **request.sampling,
            }
        )


def _unfinished_turn(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the assistant messages after the last user message."""
    turn: list[dict[str, Any]] = []
    for message in reversed(messages):
        if message["role"] == "user":
            break
        if message["role"] == "assistant":
            turn.append(message)
    return turn


def _open_calls(messages: Sequence[dict[str, Any]]) -> list[str]:
    return [call["id"] for message in _unfinished_turn(messages) for call in message.get("tool_calls") or ()]


def _same(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many tokens two prompts begin with together."""
    pairs = zip(one, other, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
