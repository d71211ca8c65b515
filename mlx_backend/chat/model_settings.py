"""The settings of one model's replies: what is set for the model, over what the server sets for all of them.

This is the only place that lays the one over the other. A request's own settings come last, where each is used.
"""

from __future__ import annotations

from collections.abc import Mapping  # noqa: TC003 (dataclasses look at the annotations)
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Self

from mlx_backend.settings import ReplySettings, Settings

if TYPE_CHECKING:
    from mlx_backend.conversation.effort import Effort
    from mlx_backend.models.spec import ModelDefaults


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings(Settings):
    """The server's settings as they hold for one model. None still means "not set": the model's files decide.

    Three efforts are kept apart, since a reply says whose it follows: that of the name by which the model was called
    (`NAME:high`), the model's, and the server's.
    """

    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    name_effort: Effort | None = None
    model_effort: Effort | None = None
    server_effort: Effort | None = None

    @classmethod
    def of(cls, model: ModelDefaults | None = None, server: Settings | None = None) -> Self:
        """Lay a model's own settings over the server's."""
        server = server or Settings()
        values = {each.name: getattr(server, each.name) for each in fields(Settings)}
        if model is None:
            return cls(**values, server_effort=server.reasoning_effort)
        own = {each.name: getattr(model, each.name) for each in fields(ReplySettings)}
        return cls(
            **values | {name: value for name, value in own.items() if value is not None},
            template_kwargs=model.template_kwargs,
            model_effort=model.reasoning_effort,
            server_effort=server.reasoning_effort,
        )
