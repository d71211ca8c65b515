"""The requests to a chat service: frozen, with fields that are already parsed and of the right type.

api/ and the tests make them and know nothing of prompts; service.py answers them and knows nothing of HTTP.

A request that a client makes by itself (a title, follow-ups) is answered cheaply, and after users' own:

    effort          the model's lowest                        unless the request states one
    priority        after users' turns                        unless the request has one, or a user's turn awaits it
    max_tokens      enough for a brief answer                 unless the request has a limit, or a lower one holds
    answer_reserve  most of those tokens are for the answer   unless the request limits its reasoning itself

conversation/background_requests.py knows which requests these are; the effort is applied where efforts are decided
(chat_prompt.py).
"""

from __future__ import annotations

from collections.abc import Mapping  # noqa: TC003 (read at run time)
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from mlx_backend.conversation.background_requests import (
    MAX_TOKENS,
    answer_reserve,
    find_background_prompt,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mlx_backend.conversation.background_requests import BackgroundPrompt
    from mlx_backend.images import ImageSource


UNLIMITED = -1
"""A thinking budget that limits nothing, whatever the model's or the server's is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerFormat:
    """What the answer must match; `field` is the request's field that says so.

    `value` is a schema, a regular expression or a list of texts; None for any JSON object. `name` and `description` are
    the client's words for a schema.
    """

    kind: Literal["json_object", "json_schema", "regex", "choice"]
    value: Any = None
    strict: bool = False
    field: str = "response_format"
    name: str = ""
    description: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputGrammar:
    """What one text parameter of a tool must match; `field` is the request's field that says so."""

    parameter: str
    syntax: Literal["lark", "regex"]
    definition: str
    field: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolChoice:
    """Which tool a reply must call: any if `required`, the one that is named, or none.

    With `forbidden` it may call none, although its prompt tells of the tools as it does where they may be called.
    """

    forbidden: bool = False
    required: bool = False
    name: str | None = None
    allowed: frozenset[str] | None = None
    """The tools of the prompt that may be called; None for all of them."""
    input_grammars: Mapping[str, InputGrammar] = field(default_factory=dict)
    """By the names of tools. Calls of these match their parameters, too."""
    strict: frozenset[str] = frozenset()
    """Tools whose calls must match their parameters in any case."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyRequest:
    """What any reply may be asked for. `sampling` has the names of `Sampling`.

    A lower `priority` goes first; None is 0, or what a background request gets. None of `max_repeated_tokens` is the
    model's setting.
    """

    sampling: Mapping[str, Any] = field(default_factory=dict)
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    adapter: str | None = None
    priority: int | None = None
    max_repeated_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest(ReplyRequest):
    """A conversation to answer.

    `tool_paths` are the request's fields that describe the tools, where these are not `tools[i].function`;
    `deferred_tools` are defined in the conversation and not told to the template. `fields` are the others of the body
    as the client wrote it: effort is looked up there. In messages, an image is a part
    {"type": "image", "image": its place in `images`}. `thinking_budget` is the most tokens of reasoning, or UNLIMITED,
    and `thinking_budget_message` what it ends with then; `answer_reserve` how many tokens of the reply are kept for the
    answer. `background_detection` says whether to look for a client's own prompt (None: as configured), `background` is
    the one this was recognised as. `owner` is whose request it is: what is remembered of replies is each client's own.
    A last message of the assistant's is continued with `continue_last`; with `is_last_complete` only if it is no more
    than reasoning, which is over.
    """

    messages: Sequence[Mapping[str, Any]]
    images: Sequence[ImageSource] = ()
    image_hashes: Sequence[int] = ()
    """Of what the images say: they tell conversations apart when the images themselves are gone."""
    tools: Sequence[Mapping[str, Any]] = ()
    tool_paths: Sequence[str] = ()
    deferred_tools: frozenset[str] = frozenset()
    fields: Mapping[str, Any] = field(default_factory=dict)
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    role_mapping: Mapping[str, str] | None = None
    answer_format: AnswerFormat | None = None
    tool_choice: ToolChoice = ToolChoice()
    parallel_tool_calls: bool = True
    continue_last: bool = True
    is_last_complete: bool = False
    add_generation_prompt: bool = True
    raw: bool = False
    reserves_reply: bool = False
    """Whether a prompt is refused that leaves little room for the reply: its client can shorten it, as agents do."""
    thinking_budget: int | None = None
    thinking_budget_message: str | None = None
    answer_reserve: int | None = None
    background_detection: bool | None = None
    background: BackgroundPrompt | None = None
    owner: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest(ReplyRequest):
    """A text or token ids to continue, without a template. Markers in a text are control tokens here.

    A text begins with the BOS token of a model that needs one, unless `bos` is False. With a `suffix` the model fills
    in what stands before that. `echo` begins the reply with the prompt; `logprobs` then has those of its tokens too,
    and with `max_tokens` 0 nothing else is wanted.
    """

    prompt: str | tuple[int, ...]
    bos: bool = True
    suffix: str = ""
    echo: bool = False


BACKGROUND_PRIORITY = 1


def recognised(request: ChatRequest, default_max_tokens: int | None) -> ChatRequest:
    """Return the request as it is answered: itself, unless it is a background request."""
    prompt = find_background_prompt(request.messages, stream=request.fields.get("stream") is True)
    if prompt is None:
        return request
    priority, max_tokens, reserve = request.priority, request.max_tokens, request.answer_reserve
    if priority is None and not prompt.is_awaited:
        priority = BACKGROUND_PRIORITY
    if max_tokens is None and prompt.is_brief:
        # Some models never end a list; the page shows that it is busy until they do.
        max_tokens = min(MAX_TOKENS, default_max_tokens or MAX_TOKENS)
    if max_tokens is not None and reserve is None and request.thinking_budget is None:
        reserve = answer_reserve(max_tokens)
    return replace(
        request, background=prompt, priority=priority, max_tokens=max_tokens, answer_reserve=reserve
    )
