"""What is known of a server and of its models, as plain values. Knows no network and no server's wire format."""

from __future__ import annotations

from collections.abc import Mapping  # noqa: TC003  # pydantic reads the annotations when a description is kept
from dataclasses import dataclass, field

from dify_mlx_provider.upstream.server_kinds import ServerKind


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What a server says of one of its models; None is what it does not say. Sizes are tokens.

    `default_max_tokens` limits an answer for which a request sets no limit. `preserves_reasoning`: the server wants the
    reasoning of answered turns back, and knows which of it the model is to see.
    """

    name: str
    type: str | None = None
    state: str | None = None
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

    `answered` is whether it describes itself now. `reached` is false only where nobody ever answered: the kind is
    unknown then, while OTHER is a server that answers and is none of those that can be told apart.
    """

    kind: ServerKind = ServerKind.OTHER
    version: str = ""
    models: tuple[ModelInfo, ...] = ()
    answered: bool = False
    reached: bool = False

    def model(self, name: str, kind: str = "llm") -> ModelInfo | None:
        """Return the model of a name; the last part of its name will do, as it does for servers.

        `default` is the first model of a kind, or the first that states no kind. mlx-backend lists its default
        first; of other servers' models, one that is in memory goes before the rest.
        """
        if name == "default":
            fit = self.models_of_kind(kind)
            ready = [model for model in fit if model.state in (None, "ready", "loaded")]
            return next(iter(fit if self.kind is ServerKind.MLX_BACKEND else ready or fit), None)
        for normalise in (str, _last_part, _without_tag):
            for model in self.models:
                if normalise(model.name) == normalise(name):
                    return model
        return None

    def models_of_kind(self, kind: str) -> list[ModelInfo]:
        """Return the models of a kind; if there are none, those that state no kind."""
        return [model for model in self.models if model.type == kind] or [
            model for model in self.models if model.type is None
        ]

    def names(self, kind: str = "llm") -> list[str]:
        """Return the names of the models of a kind, as `models_of_kind` does."""
        return [model.name for model in self.models_of_kind(kind)]


def _last_part(name: str) -> str:
    return name.rstrip("/").rpartition("/")[2]


def _without_tag(name: str) -> str:
    return _last_part(name).removesuffix(":latest")
