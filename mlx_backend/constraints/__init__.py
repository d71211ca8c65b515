"""Replies constrained to a grammar: JSON, a JSON Schema, a regular expression, a choice, or a call to a tool.

    Grammars(tokenizer, dialect)   once per model
      .json_schema(…) | .tool_calls(…)   once per request: a Spec, or a GrammarError in words
        .start(opens_in)   once per reply: a Constraint, which the engine asks for every token's mask

A model reasons before it answers, so the grammar of an answer is not the grammar of a reply: the state machine of
its dialect (`machines`, `harmony`, `blocks`) knows where in a reply the answer stands, `compiler` what may stand there,
`json_schema` what a schema may ask for, `vocabulary` which tokens spell it. `reasoning_budget` limits how long a reply
may reason. Knows no HTTP and no MLX. The matchers are llguidance's, which is imported when the first one is made.
"""

from __future__ import annotations

from mlx_backend.constraints.errors import GrammarError
from mlx_backend.constraints.grammars import Grammars, Spec, can_constrain, can_require_calls

__all__ = ["GrammarError", "Grammars", "Spec", "can_constrain", "can_require_calls"]
