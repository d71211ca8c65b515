"""The names under which servers and clients send reasoning. Order is preference: the first that holds text counts."""

from __future__ import annotations

REASONING_CONTENT = "reasoning_content"
"""The canonical name: histories are brought to it, and replies use it unless a setting says otherwise."""

MESSAGE_FIELDS = (REASONING_CONTENT, "reasoning", "thinking")
"""Fields of a message whose value is reasoning, as a text or something that holds one."""

DELTA_FIELDS = (*MESSAGE_FIELDS, "reasoning_text", "thinking_blocks", "reasoning_details")
"""Fields of a streamed delta."""

TEMPLATE_KEYS = ("thinking", REASONING_CONTENT, "reasoning")
"""Message keys from which chat templates render reasoning (gpt-oss's reads `thinking`)."""

PART_TYPES = ("thinking", "reasoning", "reasoning_text", "reasoning.text", "reasoning.summary")
"""Types of content parts that are reasoning."""

SEALED_PART_TYPES = ("redacted_thinking", "reasoning.encrypted")
"""Types of parts whose reasoning only their maker can read."""
