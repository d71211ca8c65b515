"""The answers in which servers describe their models, read leniently: from each make's wire format to `ModelInfo`.

Unknown keys are ignored, and a field of a wrong type counts as not sent: no answer of a server raises anything.
Knows no network; which server sent an answer is for `discovery` to find out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, WrapValidator

from dify_mlx_provider.upstream.effort_levels import LEVELS, SWITCH
from dify_mlx_provider.upstream.server_info import ModelInfo

if TYPE_CHECKING:
    from pydantic_core.core_schema import ValidatorFunctionWrapHandler


def _none_if_invalid(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
    try:
        return validate(value)
    except ValidationError:
        return None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and -1e9 < value < 1e9


def _only_strings(value: Any) -> Any:
    return [entry for entry in value if isinstance(entry, str)] if isinstance(value, list) else value


_LENIENT = WrapValidator(_none_if_invalid)
_Word = Annotated[Annotated[str, Field(strict=True, min_length=1)] | None, _LENIENT]
_Size = Annotated[Annotated[int, Field(strict=True, gt=0)] | None, _LENIENT]
_Words = Annotated[tuple[str, ...] | None, BeforeValidator(_only_strings), _LENIENT]


class _Answer(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class Health(_Answer):
    """mlx-backend's /health."""

    version: _Word = None


class TokenCount(_Answer):
    """mlx-backend's /v1/tokenize."""

    count: int = Field(strict=True, ge=0)


class TokenCounts(_Answer):
    """The same for several texts, in their order."""

    count: list[Annotated[int, Field(strict=True, ge=0)]]


class _Reasoning(_Answer):
    efforts: _Words = None
    default: _Word = None
    preserved: Annotated[Annotated[bool, Field(strict=True)] | None, _LENIENT] = None


class _LlamaCppMeta(_Answer):
    n_ctx: _Size = None
    n_ctx_train: _Size = None


class ListedModel(_Answer):
    """An entry of /v1/models: OpenAI's `id` and `owned_by`, and what the makes of servers add to them."""

    id: str = Field(strict=True)
    owned_by: _Word = None
    max_model_len: _Size = None  # vLLM
    meta: Annotated[_LlamaCppMeta | None, _LENIENT] = None
    # mlx-backend
    type: _Word = None
    state: _Word = None
    context_length: _Size = None
    max_output_tokens: _Size = None
    default_max_tokens: _Size = None
    capabilities: _Words = None
    reasoning: Annotated[_Reasoning | None, _LENIENT] = None
    sampling_defaults: Annotated[dict[str, Any] | None, _LENIENT] = None

    def mlx_backend_info(self) -> ModelInfo:
        """Return what mlx-backend says of the model."""
        capabilities = (
            frozenset(self.capabilities or ()) or None
        )  # none at all: not known before it is downloaded
        efforts = self.reasoning.efforts if self.reasoning else None
        if efforts is None and capabilities is not None:
            efforts = ()  # a server that says what a model can do says it of reasoning too
        return ModelInfo(
            name=self.id,
            type=self.type,
            state=self.state,
            context_size=self.context_length or self.max_model_len,
            max_output_tokens=self.max_output_tokens,
            default_max_tokens=self.default_max_tokens,
            capabilities=capabilities,
            efforts=efforts,
            default_effort=self.reasoning.default if self.reasoning else None,
            preserves_reasoning=bool(self.reasoning and self.reasoning.preserved),
            sampling={
                name: value for name, value in (self.sampling_defaults or {}).items() if _is_number(value)
            },
        )

    def info(self) -> ModelInfo:
        """Return what any other server says of the model: its context size, if that."""
        meta = self.meta or _LlamaCppMeta()
        return ModelInfo(name=self.id, context_size=self.max_model_len or meta.n_ctx or meta.n_ctx_train)


class LmStudioModel(_Answer):
    """An entry of LM Studio's /api/v0/models."""

    id: str = Field(strict=True)
    type: _Word = None
    state: _Word = None
    loaded_context_length: _Size = None
    max_context_length: _Size = None
    capabilities: _Words = None

    def info(self) -> ModelInfo:
        """Return what LM Studio says of the model. The list does not mention reasoning: nothing is concluded of it."""
        capabilities: frozenset[str] | None = None
        if self.capabilities is not None:
            capabilities = frozenset({"completion", "structured_output"})
            capabilities |= {"tools"} if "tool_use" in self.capabilities else set()
            capabilities |= {"vision"} if self.type == "vlm" else set()
        return ModelInfo(
            name=self.id,
            type={"llm": "llm", "vlm": "llm", "embeddings": "embedding"}.get(self.type or ""),
            state=self.state,
            context_size=self.loaded_context_length or self.max_context_length,
            capabilities=capabilities,
        )


class _OllamaDetails(_Answer):
    family: _Word = None


class OllamaModel(_Answer):
    """Ollama's /api/show of one model."""

    capabilities: _Words = None
    parameters: _Word = None
    details: Annotated[_OllamaDetails | None, _LENIENT] = None

    def info(self, listed: ModelInfo) -> ModelInfo:
        """Return the listed model with what Ollama says of it."""
        # Ollama does not always allow what the model could read: only a size that was set is certain.
        size = re.search(r"^num_ctx\s+(\d+)", self.parameters or "", re.MULTILINE)
        return replace(
            listed,
            type="embedding" if self.capabilities == ("embedding",) else "llm",
            context_size=int(size[1]) if size else None,
            capabilities=None
            if self.capabilities is None
            else frozenset({*self.capabilities, "structured_output"}),
            efforts=self._efforts(),
        )

    def _efforts(self) -> tuple[str, ...] | None:
        if self.capabilities is None:
            return None
        if "thinking" not in self.capabilities:
            return ()
        family = (self.details.family if self.details else None) or ""
        return LEVELS if "gptoss" in family.replace("-", "") else SWITCH


def parse_entries[M: BaseModel](body: Any, entry: type[M]) -> list[M]:
    """Return the entries of a list in OpenAI's shape; those that name no model are left out."""
    listed = body.get("data") if isinstance(body, Mapping) else None
    entries: list[M] = []
    for each in listed if isinstance(listed, list) else ():
        try:
            entries.append(entry.model_validate(each))
        except ValidationError:
            continue
    return entries
