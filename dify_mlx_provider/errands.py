"""Dify's own errands: the title of a conversation, the questions it suggests after an answer.

Dify asks the model for them behind the user's back, with room for a few hundred tokens and none of the user's
settings, and wants JSON as the whole answer. A model that reasons at its usual effort spends that room thinking, and
the thinking block around the JSON makes Dify drop it; meanwhile the user's next question waits. So an errand is done
at low effort and its reasoning is not shown.

An errand is known by Dify's own words and by not being streamed. Someone who sends the same words by hand gets what
suits them too: a short answer, soon.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

TITLE = "You are asked to generate a concise chat title"
QUESTIONS = "Please help me predict the three most likely questions that human would ask"


def is_errand(texts: Sequence[str], *, stream: bool) -> bool:
    """Whether a request of these messages is one of Dify's errands."""
    return not stream and len(texts) == 1 and (texts[0].startswith(TITLE) or QUESTIONS in texts[0])


def quick(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters an errand is done with: where Dify's SDK filled in a default, the quick value instead."""
    settings = dict(parameters)
    if settings.get("reasoning_effort") == "medium":
        settings["reasoning_effort"] = "low"
    if settings.get("enable_thinking") is True:
        settings["enable_thinking"] = False
    return settings
