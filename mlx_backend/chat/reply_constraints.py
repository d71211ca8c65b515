"""What a chat reply is constrained to: the grammar of its answer and tool calls, and its thinking budget.

Chooses constraints for a request; what they mask is constraints/'s. Knows no HTTP and no engine.
"""

from __future__ import annotations

import copy
import logging
from typing import TYPE_CHECKING, Any

from mlx_backend.constraints import GrammarError, Grammars
from mlx_backend.constraints.lark_regex import lark_to_regex
from mlx_backend.constraints.reasoning_budget import CombinedConstraint, ReasoningBudgets
from mlx_backend.errors import RequestError

if TYPE_CHECKING:
    from mlx_backend.byte_cache import CacheBudget
    from mlx_backend.chat.chat_prompt import Conversation
    from mlx_backend.chat.limits import ReplyLimits
    from mlx_backend.chat.prompt import Prompt
    from mlx_backend.chat.request import AnswerFormat, ChatRequest, ToolChoice
    from mlx_backend.constraints import Spec
    from mlx_backend.conversation.dialects import Dialect
    from mlx_backend.engine.base import Constraint, Tokenizer

log = logging.getLogger(__name__)


class ReplyConstraints:
    """The constraints of one model's replies. Safe to use from several threads."""

    def __init__(
        self, tokenizer: Tokenizer, dialect: Dialect, limits: ReplyLimits, caches: CacheBudget | None = None
    ) -> None:
        self._grammars = Grammars(tokenizer, dialect, caches)
        self._budgets = ReasoningBudgets(tokenizer, dialect)
        self._limits = limits

    def with_limits(self, limits: ReplyLimits) -> ReplyConstraints:
        """Return these with other limits."""
        changed = copy.copy(self)
        changed._limits = limits
        return changed

    def prepare(self) -> None:
        """Build what the first constrained reply would have to wait for. Raises GrammarError."""
        self._grammars.prepare()

    def can_forbid_calls(self) -> bool:
        """Whether the model can be told of tools that it is kept from calling."""
        try:
            self._grammars.no_calls()
        except GrammarError:
            return False
        return True

    def grammar(self, request: ChatRequest) -> Spec | None:
        """Compile what the request asks for. Raises the RequestError that names the field that cannot be met."""
        calls = self._calls(request)
        answer = self._answer(request.answer_format) if request.answer_format is not None else None
        grammar = answer | calls if answer and calls else answer or calls
        if grammar is not None and grammar.ignored:
            log.info("not constrained: %s", "; ".join(grammar.ignored))
        return grammar

    def start(
        self, request: ChatRequest, grammar: Spec | None, conversation: Conversation, prompt: Prompt
    ) -> Constraint | None:
        """Return the constraint of one reply, None if there is nothing to constrain. Raises RequestError."""
        limits = self._limits
        max_tokens = limits.max_tokens_of(request, len(prompt.tokens))
        budget = limits.thinking_budget_of(request, conversation.resolution)
        constraint = self._start_grammar(request, grammar, conversation, prompt)
        budget_constraint = self._budgets.start(
            prompt.tokens,
            prompt.opens_in,
            room=max_tokens,
            tokens=budget,
            reserve=limits.answer_reserve_of(request, max_tokens),
            message=limits.thinking_budget_message_of(request),
            tools=() if request.tool_choice.forbidden else request.tools,
        )
        if constraint is None or budget_constraint is None:
            return constraint or budget_constraint
        return CombinedConstraint(constraint, budget_constraint)

    def _calls(self, request: ChatRequest) -> Spec | None:
        choice = request.tool_choice
        if choice.forbidden:
            return self._grammars.no_calls() if request.tools and request.answer_format is None else None
        # A constrained answer alone would forbid calls.
        has_both = request.answer_format is not None and request.tools
        is_held = choice.required or choice.name is not None or choice.strict or choice.input_grammars
        if not (is_held or choice.allowed is not None or has_both):
            return None
        allowed = [
            (at, self._held(tool, choice))
            for at, tool in enumerate(request.tools)
            if choice.allowed is None or tool["function"]["name"] in choice.allowed
        ]
        try:
            return self._grammars.tool_calls(
                [tool for _, tool in allowed],
                required=choice.required,
                name=choice.name,
                parallel=request.parallel_tool_calls,
            )
        except GrammarError as error:
            if not is_held:
                log.info("The answer is held to its format, and there will be no calls: %s", error)
                return None
            field = "tool_choice"
            if error.tool is not None:
                at, tool = allowed[error.tool]
                grammar = choice.input_grammars.get(tool["function"]["name"])
                paths = request.tool_paths
                path = paths[at] if paths else f"tools[{at}].function"
                field = grammar.field if grammar is not None else f"{path}.parameters"
            raise RequestError(str(error), field) from None

    def _answer(self, answer_format: AnswerFormat) -> Spec:
        grammars, value = self._grammars, answer_format.value
        try:
            match answer_format.kind:
                case "json_object":
                    return grammars.json_object()
                case "json_schema":
                    return grammars.json_schema(value, strict=answer_format.strict)
                case "regex":
                    return grammars.regex(value)
                case "choice":
                    return grammars.choice(value)
        except GrammarError as error:
            raise RequestError(str(error), answer_format.field) from None

    def _held(self, tool: Any, choice: ToolChoice) -> dict[str, Any]:
        """Return a tool with what its calls are held to. Raises the RequestError for a grammar that cannot be used."""
        function = tool["function"]
        name = function["name"]
        grammar = choice.input_grammars.get(name)
        if grammar is None:
            return {**tool, "function": {**function, "strict": name in choice.strict}}
        pattern = grammar.definition
        try:
            if grammar.syntax == "lark":
                pattern = lark_to_regex(pattern)
            else:
                self._grammars.regex(pattern)  # by itself: between brackets "a)|(b" would be one, too
        except GrammarError as error:
            raise RequestError(str(error), grammar.field) from None
        parameters = {
            "type": "object",
            "properties": {grammar.parameter: {"type": "string", "pattern": f"^(?:{pattern})$"}},
            "required": [grammar.parameter],
            "additionalProperties": False,
        }
        return {**tool, "function": {**function, "parameters": parameters, "strict": True}}

    @staticmethod
    def _start_grammar(
        request: ChatRequest, grammar: Spec | None, conversation: Conversation, prompt: Prompt
    ) -> Constraint | None:
        if grammar is None:
            return None
        try:
            return grammar.start(prompt.opens_in, begun=conversation.begun_answer)
        except GrammarError as error:
            field = request.answer_format.field if request.answer_format else "tool_choice"
            raise RequestError(str(error), field) from None
