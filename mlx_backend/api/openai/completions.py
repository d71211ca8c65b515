"""POST /v1/completions: a text goes to the model as it is, and comes back as it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field

from mlx_backend.api.errors import refuse
from mlx_backend.api.fields import Refusals, is_empty, is_one_of
from mlx_backend.api.openai.generation_body import (
    LIMIT_NAMES,
    REFUSED,
    GenerationBody,
    as_count_of_logprobs,
)
from mlx_backend.api.openai.objects import DescribedAs, Prompts
from mlx_backend.api.openai.stream import ChoiceWriter, Chunk, ChunkWriter, ReplyForm, TextLogprobs
from mlx_backend.api.reply_fields import as_limit
from mlx_backend.api.sent import Sent
from mlx_backend.chat.reply import ContentLogprobs, EchoedPrompt
from mlx_backend.chat.request import CompletionRequest
from mlx_backend.conversation.events import ContentDelta, ReasoningDelta, StreamEnd
from mlx_backend.engine.base import PromptLogprobs

if TYPE_CHECKING:
    from mlx_backend.chat.reply import Reply, ReplyEvent
    from mlx_backend.chat.reply_group import ReplyGroup
    from mlx_backend.chat.service import Service
    from mlx_backend.engine.base import QueueClient


_FORMATS = ("guided_json", "guided_regex", "guided_choice", "json_schema", "regex", "structured_outputs")
_NO_FORMAT = "the answers of /v1/chat/completions can be held to a format"


class CompletionBody(GenerationBody):
    """POST /v1/completions: the text goes to the model as it is, and comes back as it is.

    No chat template, no channels: a Harmony model's markers are control tokens in the prompt and are part of the
    reply. Only the token that ends the reply is left out.
    """

    refused: ClassVar[Refusals] = {
        **REFUSED,
        "response_format": (is_one_of({"type": "text"}), _NO_FORMAT),
        **dict.fromkeys(_FORMATS, (is_empty, _NO_FORMAT)),
        "prompt_embeds": (is_empty, "send the text, or its tokens"),
    }

    prompt: Annotated[Any, DescribedAs(Prompts)]
    suffix: str | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None
    max_tokens: Annotated[Annotated[int, Field(ge=0)] | None, BeforeValidator(as_limit)] = None
    logprobs: Annotated[Annotated[int, Field(ge=0, le=20)] | None, BeforeValidator(as_count_of_logprobs)] = (
        None
    )

    @property
    def prompts(self) -> list[str | tuple[int, ...]]:
        """The texts, or their tokens."""
        if isinstance(self.prompt, list) and self.prompt and isinstance(self.prompt[0], str | list):
            return [_prompt(each) for each in Sent(self.prompt, "prompt").entries()]
        return [_prompt(Sent(self.prompt, "prompt"))]

    def request(self, prompt: str | tuple[int, ...]) -> CompletionRequest:
        """Return the request for the chat service for one of the prompts."""
        if self.suffix and self.echo:
            raise refuse("echo: a prompt with a suffix cannot be repeated; send one of the two.", "echo")
        return CompletionRequest(
            prompt=prompt,
            suffix=self.suffix or "",
            echo=bool(self.echo),
            sampling=self.sampling(),
            adapter=self.adapters,
            priority=self.priority,
            bos=self.add_special_tokens is not False,
            max_tokens=self.setting(*LIMIT_NAMES),
            max_repeated_tokens=self.setting("max_repeated_tokens"),
            stop=self.stop,
            logprobs=self.logprobs,
        )


def _prompt(sent: Sent) -> str | tuple[int, ...]:
    match sent.value:
        case str() as text if text:
            return text
        case [*tokens] if tokens and all(type(token) is int for token in tokens):
            return tuple(tokens)
        case written if is_empty(written):
            raise sent.refusal("must not be empty.")
    raise sent.unlike("a string or a list of token ids")


def start(
    body: CompletionBody, service: Service, client: QueueClient
) -> tuple[Reply | ReplyGroup, ChunkWriter]:
    """Continue a text."""
    prompts = body.prompts
    reply = service.complete_replies(body.request(prompts[0]), prompts, body.num_choices, client)
    bytes_of, has_logprobs = service.engine.tokenizer.bytes_of, body.logprobs is not None
    choices = [TextWriter(logprobs=TextLogprobs(bytes_of) if has_logprobs else None) for _ in reply.replies]
    return reply, ChunkWriter(FORM, service.model_id, choices, **body.stream_fields(reply))


FORM = ReplyForm("cmpl-", "text_completion", "text_completion")


class TextWriter(ChoiceWriter):
    """Writes one completion of a text."""

    _logprobs: TextLogprobs | None

    def opening(self) -> list[Chunk]:
        """Return nothing: the first chunk is text."""
        return []

    def chunks(self, event: ReplyEvent) -> list[Chunk]:
        """Return the chunks of an event."""
        match event:
            case EchoedPrompt(text):
                return [Chunk({"text": text}, None if self._logprobs is None else self._logprobs.echo(event))]
            case PromptLogprobs() if self._logprobs is not None:
                return [Chunk(logprobs=self._logprobs.prompt(event))]
            case ContentLogprobs(tokens):
                self._tokens = tokens
            case ContentDelta(text) | ReasoningDelta(text):
                return [Chunk({"text": text}, self.take_logprobs())]
            case StreamEnd(finish):
                return [self.ending(finish)]
        return []

    def choice(self, delta: dict[str, Any]) -> dict[str, Any]:
        """Return a choice's text."""
        return {"text": delta.get("text", "")}

    def whole_choice(self, deltas: dict[str, list[Any]]) -> dict[str, Any]:
        """Return a choice's text, joined."""
        return {"text": "".join(deltas.get("text", ()))}
