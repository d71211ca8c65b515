"""`mlx-backend render`: show the prompt that a model would get for a chat request, and the effort it is told.

Reads the body of a chat request (`messages`, `tools`, any field that states an effort, `chat_template_kwargs`) as JSON
on standard input, or one a line with `--jsonl`. The prompt is built as the server builds it, with the tokenizer of a
model's folder (`--model`; no weights are read) or with a chat template alone (`--template`; in lines also
`template_file`, which comes first). Without a tokenizer the template's `bos_token` and `eos_token` are empty.

    {"prompt": …, "template_kwargs": {…}, "effort": {"asked": …, "level": …, "source": …, "budget": …},
     "levels": […], "default": …, "dialect": …}

`asked` is the effort that was meant, null where nothing states one; `level` is which of the model's own `levels` it
comes to, `budget` how many tokens may be reasoning (null: as many as it likes). A line that cannot be used gives an
object with `error` in its place, and exit status 1.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from mlx_backend.commands.errors import WRONG_USAGE, CommandError
from mlx_backend.commands.json_lines import InputError, answer_input, chat_request, read_template
from mlx_backend.commands.local_models import LocalModels
from mlx_backend.conversation.json_values import json_type
from mlx_backend.errors import EngineError, EngineRefused
from mlx_backend.models import templates
from mlx_backend.models.templates import TemplateFault, TemplateOverrun

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Mapping, Sequence

    from mlx_backend.chat.capabilities import ChatFormat
    from mlx_backend.chat.chat_prompt import ChatPrompts
    from mlx_backend.chat.limits import ReplyLimits
    from mlx_backend.engine.base import Tokenizer


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.description = (
        "Read a chat request as JSON on standard input; print the prompt, and the effort that is told."
    )
    model = parser.add_mutually_exclusive_group()
    model.add_argument(
        "--model",
        metavar="MODEL",
        help="the model, by name or folder: its tokenizer is loaded, not its weights",
    )
    model.add_argument("--template", metavar="FILE", help="a chat template, for want of a model")
    parser.add_argument(
        "--jsonl", action="store_true", help="read one request a line, print one result a line"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print a result for every request on standard input; return 1 if any could not be used."""
    default: PromptedModel | None = None
    if arguments.model or arguments.template:
        try:
            default = _of_folder(arguments.model) if arguments.model else _of_template(arguments.template)
        except (InputError, EngineError) as error:
            raise CommandError(str(error), status=WRONG_USAGE) from None
    elif not arguments.jsonl:
        arguments.refuse("name a model's folder (--model) or a chat template (--template)")
    find = lru_cache(maxsize=64)(_of_template)
    return answer_input(_request, partial(_answer, default, find), by_lines=arguments.jsonl)


@dataclass(frozen=True)
class PromptedModel:
    """A model as far as prompts need it."""

    form: ChatFormat
    limits: ReplyLimits
    prompts: ChatPrompts
    tokenizer: Tokenizer

    @classmethod
    def of(cls, tokenizer: Tokenizer, context_length: int, effort: str | None = None) -> PromptedModel:
        """Make it as the server does for a model without settings of its own, whose name ends with that effort."""
        from mlx_backend.chat.capabilities import ChatFormat, ModelFacts
        from mlx_backend.chat.chat_prompt import ChatPrompts
        from mlx_backend.chat.generated_replies import GeneratedReplies
        from mlx_backend.chat.limits import ReplyLimits
        from mlx_backend.chat.model_settings import ModelSettings
        from mlx_backend.conversation.effort import parse_effort

        settings = ModelSettings(name_effort=None if effort is None else parse_effort(effort))
        limits = ReplyLimits(context_length=context_length, settings=settings)
        facts = ModelFacts(
            template=tokenizer.chat_template,
            response_template=tokenizer.response_template,
            control_tokens=tokenizer.special_tokens.values(),
        )
        form = ChatFormat.of(facts, limits.settings)
        replies = GeneratedReplies(tokenizer, form.dialect)
        return cls(form, limits, ChatPrompts(tokenizer, form, limits, replies), tokenizer)


# How control tokens are spelt: `<|im_end|>`, `<｜User｜>`, `<think>`, `<seed:tool_call>`, `[INST]`, `]~b]`.
_MARKER = re.compile(
    r"<[|｜][^<>\n]{1,60}>|</?[a-z][\w:|-]{1,60}>|\[/?[A-Z_]{3,30}\]|<[a-z_]{2,30}\|>|\]~\w*\]"
)


class TemplateTokenizer:
    """Implements the `Tokenizer` protocol for a chat template without a model, of which no vocabulary is known.

    A token is a character, or one of the template's markers. Raises EngineRefused for one that cannot be parsed.
    """

    chat_template: Final[str]
    response_template: Final = None
    end_tokens: Final[frozenset[int]] = frozenset()
    bos_tokens: Final = ()

    def __init__(self, source: str) -> None:
        markers = sorted(set(_MARKER.findall(source)), key=len, reverse=True)
        self.chat_template = source
        self.special_tokens = dict(enumerate(markers, start=sys.maxunicode + 1))
        self.vocabulary_size = sys.maxunicode + 1 + len(markers)
        self._ids = {marker: token for token, marker in self.special_tokens.items()}
        self._pieces = re.compile("|".join([*map(re.escape, markers), "."]), re.DOTALL)
        try:
            templates.examined(source)
        except TemplateOverrun as overrun:
            raise EngineRefused(f"The chat template cannot be used: {overrun}.") from overrun
        except TemplateFault as fault:
            raise EngineRefused(f"The chat template cannot be parsed: {fault}") from fault

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        *,
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> str:
        """Render the template to text. Raises EngineRefused if the template rejects the conversation."""
        try:
            return templates.render(
                self.chat_template,
                messages,
                template_kwargs,
                tools=tools or None,
                add_generation_prompt=add_generation_prompt,
            )
        except TemplateOverrun as overrun:
            raise EngineRefused(f"The chat template cannot render this conversation: {overrun}.") from overrun
        except TemplateFault as fault:
            raise EngineRefused(f"The model's chat template refused the conversation: {fault}") from fault

    def encode(self, text: str, *, control_tokens: bool) -> list[int]:
        """Tokenise. With control_tokens False a marker spelt in the text becomes the tokens of its characters."""
        if not control_tokens:
            return [ord(character) for character in text]
        return [self._ids.get(piece) or ord(piece) for piece in self._pieces.findall(text)]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, markers included."""
        return "".join(self.special_tokens.get(token) or chr(token) for token in tokens)

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes of a token."""
        return self.decode([token]).encode("utf-8", "replace")


_NO_CONTEXT_LENGTH = 1 << 30
"""Tokens: a template does not say how many there may be."""


def _of_template(file: str) -> PromptedModel:
    return PromptedModel.of(TemplateTokenizer(read_template(Path(file))), _NO_CONTEXT_LENGTH)


def _of_folder(folder: str) -> PromptedModel:
    from mlx_backend.device.importing import importing_mlx

    with importing_mlx("off"):  # a tokenizer multiplies no matrices
        from mlx_backend.engine.mlx.loading import load_tokenizer

    models = LocalModels()
    _, effort = models.without_effort(folder)
    return PromptedModel.of(*load_tokenizer(models.folder(folder)), effort)


def _request(line: bytes) -> dict[str, Any]:
    from mlx_backend.api.errors import ApiError
    from mlx_backend.api.json_text import decode_json

    try:
        return chat_request(decode_json(line))
    except ApiError as error:
        raise InputError(error.message) from error


def _answer(
    default: PromptedModel | None, find: Callable[[str], PromptedModel], request: dict[str, Any]
) -> dict[str, Any]:
    """Return the result for one request. `find` makes the model of its own `template_file`. Raises InputError."""
    from mlx_backend.api.errors import ApiError, as_api_error
    from mlx_backend.conversation.effort import EffortError
    from mlx_backend.conversation.history import HistoryError
    from mlx_backend.errors import RequestError

    try:
        return _rendered(request, _model_of(request, default, find))
    except (ApiError, RequestError, HistoryError, EffortError, EngineError) as error:
        refused = as_api_error(error)
        raise InputError(refused.message, refused.param) from error


def _model_of(
    request: dict[str, Any], default: PromptedModel | None, find: Callable[[str], PromptedModel]
) -> PromptedModel:
    file = request.get("template_file")
    if isinstance(file, str) and file:
        return find(file)
    if file is not None:
        what = "an empty text" if file == "" else json_type(file)
        raise InputError(f"template_file: a path is expected, not {what}", "template_file")
    if default is None:
        raise InputError("the line names no template_file, and neither --model nor --template was given")
    return default


def _rendered(request: dict[str, Any], model: PromptedModel) -> dict[str, Any]:
    from mlx_backend.api.openai.chat_body import ChatBody
    from mlx_backend.chat.request import recognised
    from mlx_backend.conversation.effort_sources import DEFAULT

    chat = recognised(ChatBody.parse(request).request(), None)
    conversation = model.prompts.conversation(chat)
    prompt = model.prompts.prompt(chat, conversation)
    decided = conversation.resolution
    return {
        "prompt": model.tokenizer.decode(prompt.tokens),
        "template_kwargs": model.prompts.template_kwargs(chat, conversation),
        "effort": {
            "asked": None if decided.source == DEFAULT else decided.effort.value,
            "level": decided.level.effort.value if decided.level else None,
            "source": decided.source,
            "budget": model.limits.thinking_budget_of(chat, decided),
        },
        "levels": [effort.value for effort in model.form.scale.efforts],
        "default": model.form.scale.default.value if model.form.scale.default else None,
        "dialect": model.form.dialect.name,
    }
