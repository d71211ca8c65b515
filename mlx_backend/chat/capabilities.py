"""What a model can do, for a client's settings page: of every model that is listed, in memory or not.

    a loaded model     from its tokenizer, its engine and its settings (`Service.description`)
    any other          from its folder (`FolderDescriber`), by the same rules: loading changes nothing

The capabilities are Ollama's words, and only those that apply here; `tool_choice` (calls can be required, and held to
their schemas) is ours. Knows no MLX and no HTTP.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Self

from mlx_backend.chat.effort_probe import DEFAULT_BUDGETS, probe_effort
from mlx_backend.chat.history_probe import probe_history
from mlx_backend.chat.infill import find_infill
from mlx_backend.chat.response_template import recognise
from mlx_backend.constraints import can_constrain, can_require_calls
from mlx_backend.conversation.template import TemplateTraits
from mlx_backend.engine.distributed import distributed_backend
from mlx_backend.engine.images import ImageSupport
from mlx_backend.engine.mlx.vision.families import ONE_AT_A_TIME, image_support, only_mlx_vlm_has
from mlx_backend.models import files as model_files
from mlx_backend.models.description import DEFAULT_TEMPERATURE, ModelDescription

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping
    from pathlib import Path

    from mlx_backend.chat.model_settings import ModelSettings
    from mlx_backend.conversation.dialects import Dialect, Recognition
    from mlx_backend.conversation.effort import EffortScale
    from mlx_backend.models.engine_options import EngineOptions

log = logging.getLogger(__name__)

MAX_FOLDERS = 1024
_FILES = (
    *("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"),
    *("chat_template.jinja", "chat_template.json", "processor_config.json"),
    "additional_chat_templates/tool_use.jinja",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What is known of a chat model without its settings, loaded or not; None and empty for what is not known.

    `advice` is its makers' for sampling. `infills` says whether it fills in text before a suffix, `sees_images` whether
    it is shown images here, `one_process` whether one process has the whole model: where several share it, no reply can
    be held to a grammar.
    """

    template: str | None
    response_template: Any = None
    control_tokens: Collection[str] = ()
    end_tokens: Collection[str] = ()
    vocabulary_size: int | None = None
    context_length: int | None = None
    advice: Mapping[str, float] = field(default_factory=dict)
    adapters: Collection[str] = ()
    infills: bool = False
    sees_images: bool = False
    one_process: bool = True


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """How a model wants and writes a conversation, as its template and its control tokens tell."""

    recognition: Recognition
    traits: TemplateTraits
    scale: EffortScale

    @property
    def dialect(self) -> Dialect:
        """How it writes."""
        return self.recognition.dialect

    @classmethod
    def of(
        cls,
        facts: ModelFacts,
        settings: ModelSettings,
        on_refused: Callable[[str], None] | None = None,
    ) -> Self:
        """Find it out. `on_refused` hears why a response template is not used."""
        template = facts.template
        found = recognise(template, facts.control_tokens, facts.response_template, on_refused=on_refused)
        dialect = found.dialect
        reasons = dialect.has_reasoning and (
            dialect.is_from_response_template or TemplateTraits.of(template).is_reasoning_model
        )
        budgets = dict(DEFAULT_BUDGETS) | dict(settings.effort_budgets or {})
        scale = probe_effort(template, reasons=reasons, budgets=tuple(budgets.items()))
        return cls(found, probe_history(template), scale)


def describe(facts: ModelFacts, settings: ModelSettings) -> ModelDescription:
    """Describe what a chat model can do. Its template tells whether it reasons and takes tools."""
    form = ChatFormat.of(facts, settings)
    dialect, traits, scale = form.dialect, form.traits, form.scale
    has_calls = (
        dialect.calls.is_taught_by(facts.template or "")
        if dialect.calls
        else dialect.is_from_response_template
    )
    has_grammar = facts.one_process and can_constrain(
        dialect, facts.control_tokens, facts.end_tokens, facts.vocabulary_size
    )
    # Others are told of tools, too, if a request has some; but nothing says that they were trained to call any.
    has_tools = dialect.tool_prompt is not None or (traits.has_tools and has_calls)
    capabilities = {
        "completion": True,
        "thinking": bool(scale.levels),
        "tools": has_tools,
        "tool_choice": has_tools and has_grammar and can_require_calls(dialect),
        "structured_output": has_grammar,
        "vision": facts.sees_images,
        "insert": facts.infills,
    }
    wanted = settings.name_effort or settings.reasoning_effort or scale.default
    default = scale.level_of(wanted) if wanted else None
    return ModelDescription(
        context_length=facts.context_length,
        dialect=dialect.name,
        recognised_by=form.recognition.told,
        capabilities=tuple(name for name, has in capabilities.items() if has),
        efforts=scale.efforts,
        effort_budgets=scale.budgets,
        default_effort=default.effort if default else None,
        lists_efforts=bool(settings.list_efforts),
        preserves_reasoning=bool(scale.levels) and traits.may_keep_answered_reasoning(dialect.history),
        sampling={"temperature": DEFAULT_TEMPERATURE, **facts.advice, **settings.sampling},
        default_max_tokens=settings.max_tokens,
        adapters=tuple(facts.adapters),
    )


@dataclass(slots=True)
class _Files:
    """What a folder's files say about its model."""

    advice: Mapping[str, float]
    config: Mapping[str, Any] = field(default_factory=dict)
    template: str | None = None
    response_template: Any = None
    tokens: Mapping[str, bool] = field(default_factory=dict)
    end_tokens: Collection[str] = ()


type _Stamp = tuple[tuple[int, int] | None, ...]


class FolderDescriber:
    """Describes models that are not in memory. A folder is read once, and again when one of its files has changed.

    Safe to use from several threads: two that need the same folder at once both read it.
    """

    def __init__(self) -> None:
        self._cache: dict[Path, tuple[_Stamp, _Files]] = {}

    def describe(self, folder: Path, options: EngineOptions, settings: ModelSettings) -> ModelDescription:
        """Describe the model in a folder, as far as its files can be read."""
        files, one_process = self._files(folder), distributed_backend() is None
        template = files.template if options.chat_template is None else options.chat_template
        facts = ModelFacts(
            template=template,
            response_template=files.response_template,
            control_tokens=model_files.control_tokens(files.tokens, template),
            end_tokens=files.end_tokens,
            vocabulary_size=model_files.vocabulary_size(files.config),
            context_length=options.context_length or model_files.context_length(files.config),
            advice=files.advice,
            adapters=options.adapters,
            infills=find_infill(files.tokens.__contains__) is not None,
            sees_images=one_process and image_support(files.config) is ImageSupport.AVAILABLE,
            one_process=one_process,
        )
        runs_alone = one_process and only_mlx_vlm_has(files.config)
        return replace(describe(facts, settings), unbatched=ONE_AT_A_TIME if runs_alone else "")

    def _files(self, folder: Path) -> _Files:
        stamp = tuple(_stamp(folder / name) for name in _FILES)
        cached = self._cache.get(folder)
        if cached is not None and cached[0] == stamp:
            return cached[1]
        files = _read(folder)
        while len(self._cache) >= MAX_FOLDERS:
            self._cache.pop(next(iter(self._cache)), None)
        self._cache[folder] = (stamp, files)
        return files


def _read(folder: Path) -> _Files:
    """Read the files that can be read, and log the error of the first that cannot."""
    files = _Files(model_files.sampling_advice(folder))
    try:
        files.config = model_files.read_json(folder / "config.json")
        files.template = model_files.chat_template(folder)
        files.response_template = model_files.response_template(folder)
        files.tokens = model_files.added_tokens(folder)
        files.end_tokens = model_files.end_tokens(folder)
    except (OSError, ValueError) as error:
        log.warning("%s is listed with incomplete information: %s.", folder, error)
    return files


def _stamp(file: Path) -> tuple[int, int] | None:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size
