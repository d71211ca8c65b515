"""What is known of a server and of its models, as plain values, and what each kind of server gives to know it by.

A kind of server is a profile, in `mlx_backend` or in `kinds`, with how it is recognised by its answers and how it
describes its models. Those answers are read leniently: unknown keys are ignored, and a field of a wrong type counts as
not sent, so that no answer of a server raises anything. Knows no connections and no Dify.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping  # noqa: TC003  # pydantic reads the annotations when a description is kept
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, WrapValidator

from dify_mlx_provider.servers.efforts import LEVELS
from dify_mlx_provider.upstream.credentials import ServerKind

if TYPE_CHECKING:
    from pydantic_core.core_schema import ValidatorFunctionWrapHandler

    from dify_mlx_provider.servers.probe import Probe, ProbeResponse

MAX_UNREAD_TOKENS = 32_768
"""Tokens of an answer for which no limit was set.

When a user presses Stop, Dify does not tell its plugins: what is not read must end by itself, even where the model
repeats itself and its context is large. Dify itself gives a call up after 600 seconds (PLUGIN_DAEMON_TIMEOUT); a server
that is to reach this limit within that time has to write 55 tokens a second.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerProfile:
    """What a kind of server is known by, what it expects of a request, and what it can do.

    `owner` is whom it says that its models belong to, `header` how its header `Server` begins; `recognise` takes their
    place where they do not tell. `entry` is what it lists of a model; `describe_model` asks it for more of one.

    `effort_fields` are sent together; `efforts` are the words they may hold. `thinking_budget_field` is "" where there
    is none. `own_fields` are hints that no other kind reads: without them another server's answer is as right.
    `ignored_fields` have no effect there. `default_max_tokens` limits an answer for which no limit was set;
    None where a limit that does not fit after the prompt is refused: there the rest of the context is the default.
    A server that does not refuse prompts longer than the context cuts them, or runs the model beyond it.
    `default_model` is its name for the model it was started with; without one, the first listed is meant. With
    `always_has_default` that is sure to be a chat model, if it has any. Without `lists_all_models` it has more.
    Where `structured_output` is unknown every format is sent, and none is promised. With `separates_reasoning` an
    answer's reasoning and its calls never stand in its text, and stop words are looked for there only; for the others
    the plugin looks for them. With `calls_have_one_text` a turn that calls tools may not have reasoning and a text.
    With `calls_in_logprobs` an answer may lack a call, which is found among its tokens, if these are asked for. With
    `has_one_seed` answers to one question are all the same where no seed is sent. With `truncates_texts` it cuts a text
    that is too long to be embedded, when asked. `remedy` says what to do where it has no vectors or rankings.
    """

    kind: ServerKind
    display_name: str
    owner: str = ""
    header: str = ""
    entry: type[ListedModel] | None = None
    recognise: Callable[[Listing], ServerInfo | None] | None = None
    describe_model: Callable[[Probe, ServedModel], ServedModel | None] | None = None
    effort_fields: tuple[str, ...] = ("reasoning_effort",)
    efforts: tuple[str, ...] = ("none", *LEVELS)
    structured_output: Literal["formats", "schemas", "prompt", "unknown"] = "formats"
    reasoning_fields: tuple[str, ...] = ("reasoning_content",)
    calls_have_one_text: bool = False
    calls_in_logprobs: bool = False
    has_one_seed: bool = False
    thinking_budget_field: str = ""
    renamed_fields: Mapping[str, str] = field(default_factory=dict)
    own_fields: frozenset[str] = frozenset()
    ignored_fields: frozenset[str] = frozenset()
    refuses_long_prompts: bool = True
    default_model: str = ""
    always_has_default: bool = False
    lists_all_models: bool = True
    default_max_tokens: int | None = MAX_UNREAD_TOKENS
    counts_tokens: bool = False
    separates_reasoning: bool = False
    vector_encoding: Literal["float", "base64"] = "float"
    truncates_texts: bool = False
    remedy: str = "mlx-backend does: start it with a model for this."

    def answer_limit(self, max_output: int | None = None) -> int | None:
        """Return the limit for answers for which none was set; None if this kind of server is to decide.

        `max_output` is the most the model can write, if the form says it.
        """
        default = self.default_max_tokens
        return default and min(max_output or default, MAX_UNREAD_TOKENS)


# -- what is known -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """What a server says of one of its models; None is what it does not say. Sizes are tokens.

    `default_max_tokens` limits an answer for which a request sets no limit. `preserves_reasoning`: the server wants the
    reasoning of answered turns back, and knows which of it the model is to see.
    """

    name: str
    type: str | None = None
    context_size: int | None = None
    max_output_tokens: int | None = None
    default_max_tokens: int | None = None
    capabilities: frozenset[str] | None = None
    efforts: tuple[str, ...] | None = None
    default_effort: str | None = None
    preserves_reasoning: bool = False
    sampling: Mapping[str, float] = field(default_factory=dict, hash=False)

    def has(self, capability: str) -> bool | None:
        """Whether the model can do something; None if nothing is said of what it can do."""
        return None if self.capabilities is None else capability in self.capabilities


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerInfo:
    """What answers at an address, or answered there last. `version` is mlx-backend's.

    `models` begin with the one that answers for the name `default`.

    `answered` is whether it describes itself now. `reached` is false only where nothing ever answered: the kind is
    unknown then, while OTHER is a server that answers and is none of those that can be told apart.
    """

    kind: ServerKind = ServerKind.OTHER
    version: str = ""
    models: tuple[ServedModel, ...] = ()
    answered: bool = False
    reached: bool = False

    def model(self, name: str, kind: str = "llm") -> ServedModel | None:
        """Return the model of a name; the last part of its name will do, as it does for servers.

        `default` is the first model of a kind, or the first that states no kind. A model whose list has its efforts
        is called with one of them, too: `NAME:high` has it as its default.
        """
        if name == "default":
            return next(iter(self.models_of_kind(kind)), None)
        if (found := self._named(name)) is not None:
            return found
        base, _, effort = name.rpartition(":")
        found, effort = self._named(base), effort.lower()
        if found is None or effort not in (found.efforts or ()):
            return None
        return replace(found, name=f"{found.name}:{effort}", default_effort=effort)

    def _named(self, name: str) -> ServedModel | None:
        for normalise in (str, last_part, _without_tag):
            for model in self.models:
                if normalise(model.name) == normalise(name):
                    return model
        return None

    def models_of_kind(self, kind: str) -> list[ServedModel]:
        """Return the models of a kind; if there are none, those that state no kind."""
        return [model for model in self.models if model.type == kind] or [
            model for model in self.models if model.type is None
        ]

    def names(self, kind: str = "llm") -> list[str]:
        """Return the names of the models of a kind, as `models_of_kind` does."""
        return [model.name for model in self.models_of_kind(kind)]


def last_part(name: str) -> str:
    """Return a model's name without its owner or its folder."""
    return name.rstrip("/").rpartition("/")[2]


def _without_tag(name: str) -> str:
    return last_part(name).removesuffix(":latest")


# -- what a server answers -----------------------------------------------------------------------------------


def _none_if_invalid(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
    try:
        return validate(value)
    except ValidationError:
        return None


def _only_strings(value: Any) -> Any:
    return [entry for entry in value if isinstance(entry, str)] if isinstance(value, list) else value


LENIENT = WrapValidator(_none_if_invalid)
"""Makes None of what does not fit an annotation."""

type Word = Annotated[Annotated[str, Field(strict=True, min_length=1)] | None, LENIENT]
type Size = Annotated[Annotated[int, Field(strict=True, gt=0)] | None, LENIENT]
type Words = Annotated[tuple[str, ...] | None, BeforeValidator(_only_strings), LENIENT]


class ServerAnswer(BaseModel):
    """An answer of a server, or a part of one."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class _LlamaCppMeta(ServerAnswer):
    n_ctx: Size = None
    n_ctx_train: Size = None


class ListedModel(ServerAnswer):
    """An entry of /v1/models: OpenAI's `id` and `owned_by`, and the sizes that vLLM and llama.cpp add to them."""

    id: str = Field(strict=True)
    owned_by: Word = None
    max_model_len: Size = None
    meta: Annotated[_LlamaCppMeta | None, LENIENT] = None

    @property
    def is_default(self) -> bool:
        """Whether it answers for the name `default`, as far as its entry tells."""
        return True

    def described(self) -> ServedModel:
        """Return what most servers say of a model: its context size, if that."""
        meta = self.meta or _LlamaCppMeta()
        return ServedModel(name=self.id, context_size=self.max_model_len or meta.n_ctx or meta.n_ctx_train)


@dataclass(frozen=True)
class Listing:
    """The answer to the question for the models; `probe` asks the same server more."""

    response: ProbeResponse
    probe: Probe

    @cached_property
    def entries(self) -> list[ListedModel]:
        """What most servers say of each model."""
        return parse_entries(self.response.json, ListedModel)

    def names(self, profile: ServerProfile) -> bool:
        """Whether the header or the models' owner is that of a kind of server."""
        return has_header(profile, self.response) or bool(profile.owner and profile.owner in self.owners)

    @property
    def owners(self) -> set[str | None]:
        """Who the models are said to belong to, which often is the make of the server."""
        return {entry.owned_by for entry in self.entries}

    def server(self, profile: ServerProfile, version: str = "") -> ServerInfo:
        """Return a server of a kind, with what its list says of its models."""
        entries = parse_entries(self.response.json, profile.entry or ListedModel)
        entries.sort(key=lambda entry: not entry.is_default)
        return recognised(profile.kind, [entry.described() for entry in entries], version)


def has_header(profile: ServerProfile, response: ProbeResponse) -> bool:
    """Whether an answer's header `Server` is that of a kind of server."""
    return bool(profile.header) and response.server_header.startswith(profile.header)


def recognised(kind: ServerKind, models: list[ServedModel], version: str = "") -> ServerInfo:
    """Return what is known of a server that has just described itself."""
    return ServerInfo(kind=kind, version=version, models=tuple(models), answered=True, reached=True)


def parse_entries[M: BaseModel](body: Any, entry: type[M]) -> list[M]:
    """Return the entries of a list in OpenAI's shape; those that name no model are left out."""
    listed = body.get("data") if isinstance(body, dict) else None
    entries: list[M] = []
    for each in listed if isinstance(listed, list) else ():
        try:
            entries.append(entry.model_validate(each))
        except ValidationError:
            continue
    return entries
