"""Replies as the model generated them, so that later prompts hold them token for token.

A client sends a reply back as it understood it, and a chat template writes it as it would have: arguments in another
layout, with defaults that the client has added, reasoning without its last blank, another order in a header. The
prompt then differs from what the model has generated, and nothing after that place is found in the prefix cache.

    before rendering    by a call's id     its arguments, and the reasoning before it
                        by what was said   the reasoning before an answer, where a template shows that again
    after tokenising    by its prompt      the reply's own tokens, where the prompt goes on as that reply's did

Tokens are taken over only in the prompt that they were generated for, as far as the text goes, and only if what is
written there is read as the same message: a reply that its client has changed, or of which the template leaves
something out, stays as the template writes it.

All of it belongs to who sent the request, for a bounded time and within a bounded number of bytes. Knows no API.
"""

from __future__ import annotations

import json
import re
import time
from array import array
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial, reduce
from hashlib import blake2b
from itertools import islice
from operator import itemgetter
from sys import getsizeof
from typing import TYPE_CHECKING, Any

from mlx_backend.byte_cache import ByteCache
from mlx_backend.chat.prompt import TAIL, Markers, PromptText, image_numbers, positions, unbroken
from mlx_backend.conversation.dialects.base import END_MARKERS
from mlx_backend.conversation.message_parts import REASONING_CONTENT, hash_of
from mlx_backend.conversation.parser import ChannelParser, fold
from mlx_backend.conversation.tools import ToolSet

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from mlx_backend.byte_cache import CacheBudget
    from mlx_backend.chat.prompt import Prompt
    from mlx_backend.chat.reply import FinishedReply
    from mlx_backend.conversation.dialects import Dialect
    from mlx_backend.conversation.events import Event, Message
    from mlx_backend.conversation.tool_names import ToolNames
    from mlx_backend.engine.base import Tokenizer

TIME_TO_LIVE = 24 * 3600.0
"""Seconds after which a reply is forgotten."""
MAX_REPLIES = 4096
"""Replies of all clients whose tokens are remembered."""
MAX_CANDIDATES = 64
"""Replies to one prompt, the latest, of which one is looked for where a prompt goes on."""
_ENDING = 512
"""Characters of a prompt's end that are compared before the whole of it; a generation prompt is shorter."""
_MAX_LEAD = 128
"""Tokens of a generation prompt after its last control token."""
_MAX_ENDS = 8
"""Markers that are tried as the end of a reply, where a template's form of it is not known yet."""
_MAX_GROWTH, _MARKUP = 6, 2048
"""How much longer a template may write a reply, as a factor (of escaped characters) and in characters."""
_ENTRY_BYTES = 2048
"""Of an entry, without its texts and tokens."""
_NO_MARKER = -1
_INT = "I"


@dataclass(frozen=True, slots=True)
class _Call:
    name: str
    arguments: str
    reasoning: str
    expires: float


@dataclass(slots=True, eq=False)
class _Reply:
    """A reply, and the prompt that it was generated for, by its text.

    `lead` are the prompt's tokens after its last control token. `written` is the reply as the template writes it, once
    that is known; `unlike` the hash of a text that is not this reply.
    """

    owner: str
    prompt: PromptText
    lead: Sequence[int]
    tokens: array[int]
    message: Message
    expires: float
    written: str | None = None
    unlike: int | None = None

    @property
    def key(self) -> tuple[str, bytes, bytes]:
        return self.owner, self.prompt.digest, blake2b(self.tokens, digest_size=16).digest()

    @property
    def num_characters(self) -> int:
        message = self.message
        calls = sum(len(call.name) + len(call.arguments) for call in message.tool_calls)
        return len(message.reasoning) + len(message.content) + calls


@dataclass(frozen=True, slots=True)
class Reading:
    """Whose prompt it is, and how the replies in it are read: with these tools, under the names for the model."""

    owner: str
    tools: ToolSet
    names: ToolNames


class GeneratedReplies:
    """The replies of one model. Safe to use from several threads; `clock` returns seconds."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        dialect: Dialect,
        caches: CacheBudget | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._dialect = dialect
        self._markers = Markers(special := tokenizer.special_tokens)
        self._special = special
        known = END_MARKERS | dialect.ends
        self._ends = {
            token
            for token, text in special.items()
            if text and (token in tokenizer.end_tokens or text in known)
        }
        texts = sorted((special[token] for token in self._ends), key=len, reverse=True)
        self._end = re.compile("|".join(map(re.escape, texts)) or r"(?!)")
        self._calls: ByteCache[tuple[str, str | int], _Call] = ByteCache(caches, owner_of=itemgetter(0))
        self._replies: ByteCache[tuple[str, bytes, bytes], _Reply] = ByteCache(
            caches, max_entries=MAX_REPLIES, owner_of=itemgetter(0)
        )
        self._clock = clock

    def put(
        self,
        owner: str,
        messages: Sequence[Mapping[str, Any]],
        prompt: Prompt,
        finished: FinishedReply,
        images: Sequence[int] = (),
    ) -> None:
        """Remember a client's reply to a prompt, which was made of this canonical history.

        `images` are hashes of those that it numbers.
        """
        expires, message = self._clock() + TIME_TO_LIVE, finished.message
        # As a client's own would be read: the prompt must not depend on who has remembered it.
        reasoning = message.reasoning.strip()
        complete = (call for call in message.tool_calls if call.complete)
        known: list[tuple[str | int, str, str]] = [
            (call_id, call.name, call.arguments)
            for call_id, call in zip(finished.call_ids, complete, strict=True)
        ]
        if not known and reasoning and message.content.strip():
            said = reduce(partial(_said_after, images), messages, 0)
            known = [(_answer_to(said, message.content), "", "")]
        for key, name, arguments in known:
            nbytes = sum(map(getsizeof, (owner, key, name, arguments, reasoning))) + _ENTRY_BYTES
            self._calls.put((owner, key), _Call(name, arguments, reasoning, expires), nbytes)
        lead = self._lead(prompt.tokens)
        if prompt.text is None or lead is None or not finished.tokens:
            return
        tokens = array(_INT, finished.tokens)
        if tokens[-1] in self._ends:
            tokens.pop()
        reply = _Reply(owner, prompt.text, lead, tokens, message, expires)
        # With the text as the template writes it, which comes later, and at 4 bytes a character at most.
        nbytes = 8 * reply.num_characters + getsizeof(tokens) + _ENTRY_BYTES
        self._replies.put(reply.key, reply, nbytes)

    def _lead(self, tokens: Sequence[int]) -> Sequence[int] | None:
        for at in range(len(tokens) - 1, max(len(tokens) - _MAX_LEAD, 0) - 1, -1):
            if tokens[at] in self._special:
                return tokens[at + 1 :]
        return None

    # -- before rendering ------------------------------------------------------------------------

    def restored(
        self,
        owner: str,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        images: Sequence[int] = (),
        *,
        everywhere: bool,
    ) -> list[dict[str, Any]]:
        """Return a canonical history with its calls as they were generated, and reasoning that the client has lost.

        That comes back in the turn that has no answer yet; `everywhere`, in all of them, and before answers. `images`
        are hashes of those that the history numbers.
        """
        known = ToolSet(tools)
        last_user = max((at for at, message in enumerate(messages) if message["role"] == "user"), default=-1)
        restored = [dict(message) for message in messages]
        said = 0
        for at, message in enumerate(restored):
            first: _Call | None = None
            if calls := message.get("tool_calls"):
                found = [self._find(owner, call["id"]) for call in calls]
                message["tool_calls"] = [
                    _as_generated(call, each, known) for call, each in zip(calls, found, strict=True)
                ]
                first = found[0] if everywhere or at > last_user else None
            elif everywhere and message["role"] == "assistant" and at < last_user:
                first = self._find(owner, _answer_to(said, message["content"]))
            if first is not None and first.reasoning and not message.get(REASONING_CONTENT):
                message[REASONING_CONTENT] = first.reasoning
            said = _said_after(images, said, message)
        return restored

    def _find(self, owner: str, key: str | int) -> _Call | None:
        found = self._calls.find((owner, key))
        return found if found is not None and found.expires >= self._clock() else None

    # -- after tokenising ------------------------------------------------------------------------

    def taken_over(self, prompt: Prompt, text: str, sentinel: str | None, reading: Reading) -> Prompt:
        """Return a prompt with the replies in it as they were generated. `text` is what its tokens were made of."""
        edits: list[tuple[int, int, Sequence[int]]] = []
        places = _MarkerPlaces(text, prompt.tokens, self._markers.ids)
        whole = _Digest(text)
        end = 0
        for at, replies in self._known_in(text, reading.owner, whole):
            openers = [*self._markers.pattern.finditer(text, max(end, at - _ENDING), at)]
            if (
                not openers
                or at < end
                or (found := self._find_in(text, at, replies, sentinel, reading)) is None
            ):
                continue
            reply, closer = found
            first = places.of(openers[-1].group(), openers[-1].start())
            last = places.of(closer.group(), end := closer.start())
            if first is not None and last is not None:
                edits.append((first + 1, last, [*reply.lead, *reply.tokens]))
        return replace(prompt.edited(edits), text=whole.until(len(text)))

    def _known_in(self, text: str, owner: str, whole: _Digest) -> Iterator[tuple[int, list[_Reply]]]:
        """Yield the places in a text to which there were replies, and these, the latest first."""
        found: defaultdict[int, list[_Reply]] = defaultdict(list)
        now = self._clock()
        for reply in reversed(self._replies.values()):
            prompt = reply.prompt
            if (
                reply.owner == owner
                and reply.expires >= now
                and prompt.length < len(text)
                # Nearly all that are not in this text are told apart by how their prompts end.
                and text.startswith(prompt.ending, prompt.length - len(prompt.ending))
            ):
                found[prompt.length].append(reply)
        for length in sorted(found):
            digest = whole.until(length).digest
            if replies := [reply for reply in found[length] if reply.prompt.digest == digest]:
                del replies[MAX_CANDIDATES:]
                for reply in replies:
                    self._replies.find(reply.key)  # which counts as a use
                yield length, replies

    def _find_in(
        self, text: str, at: int, replies: Sequence[_Reply], sentinel: str | None, reading: Reading
    ) -> tuple[_Reply, re.Match[str]] | None:
        """Return which reply begins at a place in a text, and the marker that ends it; None: another message does."""
        longest = max(reply.num_characters for reply in replies)
        ends = self._end.finditer(text, at, at + _MAX_GROWTH * longest + _MARKUP)
        read: list[tuple[re.Match[str], Message]] = []

        def written() -> Iterator[tuple[re.Match[str], Message]]:
            """Yield what is written there up to each marker, which is read once for all replies."""
            yield from read
            for end in islice(ends, _MAX_ENDS - len(read)):
                read.append((end, self._read(text, at, end.end(), sentinel, reading)))
                yield read[-1]

        for reply in replies:
            if (
                reply.written is not None
                and text.startswith(reply.written, at)
                and (known_end := self._end.match(text, at + len(reply.written))) is not None
            ):
                return reply, known_end
            limit = at + _MAX_GROWTH * reply.num_characters + _MARKUP
            if (unlike := hash(text[at:limit])) == reply.unlike:
                continue
            for end, message in written():
                if end.end() > limit:
                    break
                if _is_same(reply.message, message, reading):
                    reply.written = text[at : end.start()]
                    return reply, end
            reply.unlike = unlike
        return None

    def _read(self, text: str, start: int, end: int, sentinel: str | None, reading: Reading) -> Message:
        """Return the message that a part of a prompt's text is."""
        parser = ChannelParser(
            self._dialect,
            tools=reading.tools,
            opens_in=self._dialect.opens_in(text[max(0, start - TAIL) : start]),
            special_tokens=self._special,
        )
        events: list[Event] = []
        for part in self._markers.split(text[start:end]):
            token = self._markers.ids.get(part, _NO_MARKER)
            events += parser.feed(part if token >= 0 else unbroken(part, sentinel), token)
        events += parser.close()
        return fold(reading.names.restored(events))


class _Digest:
    """The digests of a text's beginnings. Ask for longer and longer ones."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._length = 0
        self._hash = blake2b(digest_size=16)

    def until(self, length: int) -> PromptText:
        self._hash.update(self._text[self._length : length].encode("utf-8", "surrogatepass"))
        self._length = length
        return PromptText(length, self._hash.digest(), self._text[max(0, length - _ENDING) : length])


class _MarkerPlaces:
    """Where the markers of a text are among its tokens. Ask for them in their order."""

    def __init__(self, text: str, tokens: Sequence[int], ids: Mapping[str, int]) -> None:
        self._text, self._tokens, self._ids = text, tokens, ids
        self._counted: dict[str, tuple[list[int], int, int]] = {}

    def of(self, marker: str, position: int) -> int | None:
        """Return where the marker at a position is; None where the tokenizer adds or merges some."""
        if marker not in self._counted:
            found = positions(self._tokens, self._ids[marker])
            self._counted[marker] = found if len(found) == self._text.count(marker) else [], 0, 0
        found, count, since = self._counted[marker]
        count += self._text.count(marker, since, position)
        self._counted[marker] = found, count, position
        return found[count] if count < len(found) else None


def _said_after(images: Sequence[int], said: int, message: Mapping[str, Any]) -> int:
    shown = tuple(images[number] for number in image_numbers([message])) if images else ()
    return hash((said, hash_of(message), shown))


def _answer_to(said: int, content: str) -> int:
    return hash((said, content.strip()))


def _as_generated(call: Mapping[str, Any], found: _Call | None, tools: ToolSet) -> Mapping[str, Any]:
    """Return a call with the arguments that the model wrote, if the client has only written them anew."""
    function = call["function"]
    if found is None or function["name"] != found.name:
        return call
    if not is_same_call(found.arguments, function["arguments"], tools.parameters(found.name)):
        return call
    return {**call, "function": {**function, "arguments": found.arguments}}


def _is_same(reply: Message, written: Message, reading: Reading) -> bool:
    """Whether a message says what a reply said, no less and no more."""
    if len(reply.tool_calls) != len(written.tool_calls):
        return False
    for one, other in zip(reply.tool_calls, written.tool_calls, strict=True):
        if (one.name, one.complete) != (other.name, other.complete):
            return False
        schema = reading.tools.parameters(reading.names.for_model(one.name))
        if not is_same_call(one.arguments, other.arguments, schema):
            return False
    said, read = ((m.reasoning.strip(), m.content.strip()) for m in (reply, written))
    if said == read:
        return True
    # A template without a place for what is said before a call shows it as reasoning.
    return bool(reply.tool_calls) and "\n\n".join(filter(None, said)) == "\n\n".join(filter(None, read))


def is_same_call(generated: str, sent: str, schema: Mapping[str, Any]) -> bool:
    """Whether arguments that came back are those that were generated, apart from defaults that the client has added."""
    if generated == sent:
        return True
    try:
        return _is_same_value(json.loads(generated), json.loads(sent), schema)
    except (ValueError, RecursionError):
        return False


def _is_same_value(generated: Any, sent: Any, schema: Any) -> bool:
    match generated, sent:
        case dict(), dict():
            described = schema.get("properties") if isinstance(schema, Mapping) else None
            described = described if isinstance(described, Mapping) else {}
            return all(
                _is_same_value(generated[key], sent[key], described.get(key))
                if key in generated and key in sent
                else generated[key] is None  # languages that know `undefined` leave it out
                if key in generated
                else _is_default(sent[key], described.get(key))
                for key in {**generated, **sent}
            )
        case list(), list():
            items = schema.get("items") if isinstance(schema, Mapping) else None
            return len(generated) == len(sent) and all(
                _is_same_value(one, other, items) for one, other in zip(generated, sent, strict=True)
            )
        case (bool(), _) | (_, bool()):
            return generated is sent
        case _:
            return bool(generated == sent)


def _is_default(value: Any, schema: Any) -> bool:
    """Whether a value that a client has added changes nothing: the schema's default, or else nothing."""
    if isinstance(schema, Mapping) and "default" in schema:
        return _is_same_value(schema["default"], value, None)
    return value is None or value is False or value in ("", [], {})
