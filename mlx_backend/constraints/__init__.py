"""Replies held to a grammar: JSON, a JSON Schema, a regular expression, or a call to a tool.

    Grammars(tokenizer, dialect)   once a model
      .json_schema(…) | .tool_calls(…)   once a request: a Spec, or a GrammarError for people
        .start(opens_in)   once a reply: a Constraint, which the engine asks for every token's mask

A model reasons before it answers, so the grammar of an answer is not the grammar of a reply: `turns` knows where
in a turn of a dialect the answer stands, `compiling` what may stand there, `schema` what a schema may ask for,
`vocabulary` which tokens spell it. Knows no HTTP, no engine and no MLX. The grammars themselves are llguidance's,
which is imported when the first of them is made.
"""

from __future__ import annotations

from mlx_backend.constraints.errors import GrammarError
from mlx_backend.constraints.grammars import Grammars, Spec, can_hold

__all__ = ["GrammarError", "Grammars", "Spec", "can_hold"]
