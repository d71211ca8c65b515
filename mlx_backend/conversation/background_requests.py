"""Requests that clients make by themselves: titles, tags, follow-up questions, search queries.

On the wire they look like any other chat request; only the words of the client's own prompt tell them apart. A client
is one row of `PROMPTS` for each purpose, with a few words that its versions share and people rarely write. They are
looked for in the last message and at the start of a short conversation, near the beginning and the end of the text
alone: however long a request is, this takes a few milliseconds at most.

Clients let their users edit these prompts, and an edited one may not be recognised; a user who sends such words by
hand gets what suits them as well: a short answer, soon. What is done about a request is decided by the server and the
plugin; this module knows words and messages, and nothing of efforts, queues or tokens beyond `answer_reserve`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MAX_CHARACTERS = 4096
"""How far from either end of a text the words are looked for."""

MAX_PARTS = 8
"""How many parts of a message's content are looked at, from either end."""

MAX_MESSAGES = 3
"""In a conversation of more messages than this, the words count in the last one only."""

# Whose text is looked at: a tool's result may quote anything.
_ROLES = ("user", "system", "developer")

MAX_TOKENS = 1000
"""Enough for a brief answer with a little reasoning before it; Open WebUI sets the same limit for its titles."""

DIFY = "Dify"
OPEN_WEBUI = "Open WebUI"
_NEVER_STREAMED = (DIFY, OPEN_WEBUI)
"""Clients that have the answers to their own prompts sent whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackgroundPrompt:
    """A prompt of a client's own, known by any of its `words`.

    `is_awaited`: the user's turn goes on only when the answer is there, so it is quick, but does not wait for other
    turns. `is_brief`: the answer is a line or a list.
    """

    client: str
    purpose: str
    words: tuple[str, ...]
    is_awaited: bool = False
    is_brief: bool = True

    def __str__(self) -> str:
        return f"{self.client}, {self.purpose}"


def _row(client: str, purpose: str, *words: str, **traits: bool) -> BackgroundPrompt:
    return BackgroundPrompt(client=client, purpose=purpose, words=words, **traits)


PROMPTS: tuple[BackgroundPrompt, ...] = (
    # 0.12 words title and follow-ups differently from the versions before it.
    _row(
        OPEN_WEBUI,
        "title",
        "Generate a concise title summarizing the chat history",
        "3-5 word title with an emoji",
    ),
    _row(OPEN_WEBUI, "tags", "Generate 1-3 broad tags categorizing the main themes"),
    _row(
        OPEN_WEBUI,
        "follow-ups",
        "Predict 3-5 useful messages this user might naturally send next",
        "Suggest 3-5 relevant follow-up questions",
    ),
    _row(OPEN_WEBUI, "emoji", "reflect the speaker's likely facial expression"),
    _row(OPEN_WEBUI, "autocompletion", "You are an autocompletion system. Continue the text in"),
    _row(
        OPEN_WEBUI, "search queries", "determine the necessity of generating search queries", is_awaited=True
    ),
    _row(
        OPEN_WEBUI, "image prompt", "Generate a detailed prompt for am image generation task", is_awaited=True
    ),
    _row(
        OPEN_WEBUI, "choice of tools", "choose and return the correct tool(s) from the list", is_awaited=True
    ),
    _row(DIFY, "title", "You are asked to generate a concise chat title"),
    _row(DIFY, "follow-ups", "predict the three most likely questions that human would ask"),
    _row(
        DIFY,
        "generator",
        "Generate code based on the following instructions",
        "create a high-quality prompt template for",
        "I need to extract the following information from the input text",
        "Identify the purpose of the chatbot from the variable",
        "Generate a Question and Answer pairs only using the knowledge",
        "convert simple user descriptions into properly formatted JSON Schema definitions",
        "Both your input and output should be in JSON format",
        is_brief=False,
    ),
    _row(
        "LibreChat",
        "title",
        "Provide a concise, 5-word-or-less title for the conversation",
        "A concise title in the detected language",
    ),
    _row("LobeChat", "title", "You are a professional conversation summarizer. Generate a concise title"),
    _row(
        "Cherry Studio",
        "title",
        "summarize the user's conversation into a title within 10 words",
        "Summarize the conversation into a title in",
        "总结给出的会话，将其总结为语言为",
    ),
    _row("NextChat", "title", "generate a four to five word title summarizing our conversation"),
    _row("Chatbox", "title", "Based on the chat history, give this conversation a name."),
    _row("Zed", "title", "Generate a concise 3-7 word title for this conversation"),
    _row("Continue", "title", "please reply with a title for the chat that is 3-4 words"),
    _row(
        "Claude Code",
        "title",
        "sentence-case title (3-7 words) that captures the main topic",
        "Analyze if this message indicates a new conversation topic",
        "Please write a 5-10 word title for the following conversation",
    ),
    _row("Jan", "title", "-word Title. Give the title only. Here is the message"),
    _row("opencode", "title", "You are a title generator. You output ONLY a thread title"),
    _row("goose", "title", "provide a concise description of this session in 4 words or less"),
)


def find_background_prompt(messages: Sequence[Mapping[str, Any]], *, stream: bool) -> BackgroundPrompt | None:
    """Return which client's own prompt these messages are, if any. They may be malformed; `stream`: as requested."""
    for text in _texts(messages):
        for prompt in PROMPTS:
            if not (stream and prompt.client in _NEVER_STREAMED) and any(
                words in text for words in prompt.words
            ):
                return prompt
    return None


def answer_reserve(max_tokens: int) -> int:
    """Return how many of a background request's tokens to keep for its answer: most, because the rest is not read."""
    return max(1, max_tokens * 3 // 5)


def _texts(messages: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the texts in which the words may stand."""
    looked_at = [*messages[-1:], *(messages[:-1] if len(messages) <= MAX_MESSAGES else ())]
    for message in looked_at:
        if not isinstance(message, Mapping) or message.get("role") not in _ROLES:
            continue
        content = message.get("content")
        if isinstance(content, str):
            yield _ends(content)
        elif isinstance(content, list):
            parts = content if len(content) <= 2 * MAX_PARTS else content[:MAX_PARTS] + content[-MAX_PARTS:]
            for part in parts:
                if isinstance(part, Mapping) and isinstance(part.get("text"), str):
                    yield _ends(part["text"])


def _ends(text: str) -> str:
    if len(text) <= 2 * MAX_CHARACTERS:
        return text
    return f"{text[:MAX_CHARACTERS]}\n{text[-MAX_CHARACTERS:]}"
