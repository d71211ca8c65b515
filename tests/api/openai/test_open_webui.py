"""What is said to Open WebUI about a model: only where the page's own defaults would not suit it."""

from typing import Any

import pytest

from mlx_backend.api.openai.models import MIN_CONTEXT, page_info
from mlx_backend.models.description import ModelDescription

TEXT = ("completion", "tools")


@pytest.mark.parametrize(
    ("context", "capabilities", "off"),
    [
        (MIN_CONTEXT, TEXT, {"vision"}),
        (MIN_CONTEXT - 1, TEXT, {"vision", "builtin_tools"}),
        (None, TEXT, {"vision"}),
        (131_072, ("completion",), {"vision", "builtin_tools"}),
        (131_072, (*TEXT, "vision"), set()),
        (4096, (), set()),  # not downloaded yet: nothing is known of it
        (4096, (*TEXT, "vision"), {"builtin_tools"}),
    ],
)
def test_what_a_model_cannot_use_is_turned_off(
    context: int | None, capabilities: tuple[str, ...], off: set[str]
) -> None:
    info = page_info(ModelDescription(context_length=context, capabilities=capabilities))
    expected: dict[str, Any] = {"meta": {"capabilities": dict.fromkeys(off, False)}}
    assert info == (expected if off else None)


@pytest.mark.parametrize("kind", ["embedding", "rerank"])
def test_models_that_do_not_chat_are_not_offered_for_it(kind: Any) -> None:
    assert page_info(ModelDescription(kind=kind)) == {"meta": {"hidden": True}}
