"""What mlx-lm's tokenizer wraps.

Conversations are rendered by templates, but for some models by a Python function of mlx-lm's, which its wrapper has
in `_chat_template`, or by the tokenizer's own method, which the class of its `_tokenizer` tells.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from mlx_lm.tokenizer_utils import TokenizerWrapper


def wrapped_tokenizer(wrapper: TokenizerWrapper) -> Any:
    """Return the tokenizer of transformers."""
    return wrapper._tokenizer


def python_template(wrapper: TokenizerWrapper) -> Callable[..., str] | None:
    """Return the function that renders conversations in place of a chat template; None if the model has none."""
    render: Callable[..., str] | None = wrapper._chat_template
    return render
