"""The settings of a reply and of the server: each declared once, with its limits and its help.

`SamplingSettings` and `ReplySettings` exist three times over: as a request sends them, as a model's own, and as the
server's. None always means "not set": the next of these decides, and last the model itself.

Knows nothing of argparse, HTTP or MLX; the standard library and the shared core are enough.
"""

import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from mlx_backend.conversation.effort import Effort, parse_effort
from mlx_backend.conversation.message_parts import REASONING_CONTENT
from mlx_backend.declaration import (
    Kind,
    Network,
    SettingError,
    declare,
    declared,
    declaring,
    network,
    number,
    one_of,
    path,
    seconds,
    size,
    switch,
    text,
    whole,
)

type NamedKeys = tuple[tuple[str, str], ...]


def key_name(value: object) -> str:
    """Return the name of an API key, which is written to logs and metrics. Raises SettingError."""
    if not isinstance(value, str) or not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", value):
        raise SettingError("must be 1 to 64 letters, digits, dots, hyphens or underscores")
    return value


def check_key(key: str) -> str:
    """Return an API key that a header can hold. Raises SettingError."""
    if not key.strip():
        raise SettingError("is empty (an unset variable?)")
    if key != key.strip() or not key.isprintable():
        raise SettingError("must be on one line, without blanks at either end")
    return key


def _named_keys(value: str) -> NamedKeys:
    """Return the keys in alice=KEY,bob=KEY. The errors repeat none of them."""
    pairs = [part.strip().partition("=") for part in value.split(",") if part.strip()]
    for position, (name, equals, key) in enumerate(pairs, 1):
        if not equals or not key:
            raise SettingError(f"key {position} is not written NAME=KEY")
        try:
            key_name(name)
        except SettingError as error:
            raise SettingError(f"the name of key {position} {error}") from None
        try:
            check_key(key)
        except SettingError as error:
            raise SettingError(f"key {position} {error}") from None
    if not pairs:
        raise SettingError("is empty (an unset variable?)")
    return tuple((name, key) for name, _, key in pairs)


API_KEY = Kind(words="a key", metavar="KEY", type=str, parse=check_key, show=lambda _: "…")
NAMED_KEYS = Kind(
    words="names with a key each, such as alice=KEY,bob=KEY",
    metavar="NAME=KEY,…",
    type=tuple[tuple[str, str], ...],
    parse=_named_keys,
    show=lambda _: "…",
)

_FRACTION = number(0, 1)
_PENALTY = number(-2, 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSettings:
    """How the next token is chosen, by the names of the engine's `Sampling`."""

    temperature: float | None = declare(
        None,
        number(0, 2),
        help="randomness of sampling; 0 always takes the most likely token",
        default="what the model's makers recommend, or 1; 0 for the demo model",
    )
    top_p: float | None = declare(
        None, _FRACTION, help="choose among the most likely tokens that together have this probability"
    )
    top_k: int | None = declare(
        None,
        whole(0, words="a whole number, or 0 for all"),
        help="choose among this many of the most likely tokens; 0: all",
    )
    min_p: float | None = declare(
        None,
        _FRACTION,
        help="leave out tokens whose probability is below this fraction of the most likely one's",
    )
    seed: int | None = declare(
        None,
        whole(0, (1 << 63) - 1, words="a whole number from 0 up"),
        help="the same seed gives the same reply to the same request",
        default="a new one for each reply",
    )
    repetition_penalty: float | None = declare(
        None, number(0, 10, above=True), help="above 1, recent tokens become less likely"
    )
    presence_penalty: float | None = declare(
        None, _PENALTY, help="above 0, tokens that have been used become less likely"
    )
    frequency_penalty: float | None = declare(
        None, _PENALTY, help="above 0, tokens become less likely each time they are used"
    )
    xtc_probability: float | None = declare(
        None, _FRACTION, help="how often the most likely tokens are excluded (XTC sampling)"
    )
    xtc_threshold: float | None = declare(
        None,
        number(0, 0.5),
        help="XTC excludes all tokens above this probability except the least likely of them",
    )

    @property
    def sampling(self) -> dict[str, Any]:
        """Those that are set, by name."""
        return {name: value for name in SAMPLING if (value := getattr(self, name)) is not None}


SAMPLING = tuple(declared(SamplingSettings))


class ReasoningFormat(StrEnum):
    """Where the reasoning goes in a reply.

    To a field of its own; to the start of the content, as <think>…</think> or as <details type="reasoning">…</details>;
    or nowhere, though it is generated and counted. RAW is the model's own text, markers and all, as content.
    """

    SEPARATE = "separate"
    THINK = "think"
    DETAILS = "details"
    HIDDEN = "hidden"
    RAW = "raw"


class ReasoningField(StrEnum):
    """The name of that field of its own."""

    REASONING_CONTENT = REASONING_CONTENT
    REASONING = "reasoning"
    BOTH = "both"


_EFFORT = Kind(
    words=f"one of {', '.join(Effort)}",
    metavar="{" + ",".join(Effort) + "}",
    type=Effort,
    parse=parse_effort,
    convert=parse_effort,
)


type EffortBudgets = tuple[tuple[Effort, int], ...]
_MAX_BUDGET = 1 << 24


def _effort_budgets(value: object) -> EffortBudgets:
    """Return the budgets in a text (low=1024,medium=4096) or in a file's table."""
    pairs: list[tuple[str, object]] = []
    match value:
        case str():
            pairs = [(name, tokens) for name, _, tokens in (part.partition("=") for part in value.split(","))]
        case dict():
            pairs = list(value.items())
    budgets: dict[Effort, int] = {}
    for name, tokens in pairs:
        effort, count = parse_effort(name), int(tokens) if isinstance(tokens, str) else tokens
        if type(count) is not int or not 1 <= count <= _MAX_BUDGET or effort in (Effort.NONE, Effort.MAX):
            raise ValueError
        budgets[effort] = count
    if not budgets:
        raise ValueError
    return tuple(budgets.items())


_EFFORT_BUDGETS = Kind(
    words="efforts with a number of tokens each, such as low=1024,medium=4096",
    metavar="EFFORT=N,…",
    type=tuple[tuple[Effort, int], ...],
    parse=_effort_budgets,
    convert=_effort_budgets,
    show=lambda budgets: ",".join(f"{effort}={tokens}" for effort, tokens in budgets),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplySettings(SamplingSettings):
    """What a reply is like."""

    reasoning_effort: Effort | None = declare(
        None, _EFFORT, help="how much the model reasons before it answers", default="the model's own default"
    )
    reasoning_format: ReasoningFormat | None = declare(
        None, one_of(*ReasoningFormat), help="how the reasoning is sent", default="separate"
    )
    max_tokens: int | None = declare(
        None, whole(1), help="most tokens in a reply, reasoning included", default="what the context holds"
    )
    thinking_budget: int | None = declare(
        None,
        whole(0, words="a whole number of tokens, 0 for no reasoning"),
        help="most tokens of reasoning before the answer begins; 0: no reasoning",
        default="no limit",
    )
    thinking_budget_message: str | None = declare(
        None,
        text(),
        help="sentence with which the reasoning ends when its budget is used up, before the answer",
        default="none",
    )
    effort_budgets: EffortBudgets | None = declare(
        None,
        _EFFORT_BUDGETS,
        help="most tokens of reasoning at these efforts, for models whose template knows no scale of effort; "
        "the effort above them has no limit",
        default="low=1024,medium=4096",
    )
    answer_reserve: int | None = declare(
        None,
        whole(0, words="a whole number of tokens, 0 for none"),
        help="how many of max_tokens are kept for the answer; at most half of them, unless the request sets it",
        default="none",
    )
    max_repeated_tokens: int | None = declare(
        None,
        whole(0, 1 << 16, words="a whole number of tokens up to 65536, 0 for no limit"),
        help="end a reply when its last tokens, as many as this, are one run of tokens over and over; 0: never",
        default="8192",
    )
    background_detection: bool | None = declare(
        None,
        switch(),
        help="recognise the titles, tags and follow-ups that chat pages request by themselves, and answer them "
        "at the lowest effort, after users' own messages",
        option="--no-background-detection",
        default="on",
    )
    list_efforts: bool | None = declare(
        None,
        switch(),
        help="list a model under NAME:EFFORT too, for each of its efforts, so that a client can choose one by name",
        default="off",
    )


_of_network, _of_limits, _of_images = (declaring(group=group) for group in ("network", "limits", "images"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(ReplySettings):
    """The server's own settings: defaults for replies, addresses and limits."""

    host: str = _of_network("127.0.0.1", text("HOST"), help="address to listen on")
    port: int = _of_network(
        8080,
        whole(0, 65535, words="a port (0 to 65535)"),
        help="port to listen on; 0: any free one",
    )
    api_key: str | None = _of_network(
        None,
        API_KEY,
        help="key that clients must send; other users of the machine can see an option in `ps`, "
        "but not an environment variable",
        default="none",
        is_secret=True,
    )
    api_keys: NamedKeys | None = _of_network(
        None,
        NAMED_KEYS,
        help="a key of its own for each person or program, by names that the log shows",
        default="none",
        is_secret=True,
    )
    api_key_file: Path | None = _of_network(
        None,
        path("FILE", "a file"),
        help="keys with their limits, models and priorities, in TOML; read again on SIGHUP",
        default="none",
    )
    auth: bool = _of_network(
        True,
        switch(),
        help="demand a key before listening where other machines can connect",
        option="--no-auth",
        default="on",
    )
    trusted_proxies: tuple[Network, ...] = _of_network(
        (),
        network(),
        help="address or network of a reverse proxy, whose X-Forwarded-For says where requests come from",
        option="--trusted-proxy",
        repeatable=True,
    )
    cors_origins: tuple[str, ...] = _of_network(
        (),
        text("ORIGIN"),
        help="origin of web pages that may use the server",
        option="--cors-origin",
        repeatable=True,
    )
    allowed_hosts: tuple[str, ...] = _of_network(
        (),
        text("NAME"),
        help="name under which the server may be called, in addition to addresses and local names; '*': any. "
        "Not needed with an API key",
        option="--allowed-host",
        repeatable=True,
    )

    page: bool = _of_network(
        True,
        switch(),
        help="have a page for browsers at /, for chatting and looking after the models, and the API's at /docs",
        option="--no-page",
        default="on",
    )

    reasoning_format: ReasoningFormat = ReasoningFormat.SEPARATE
    background_detection: bool = True
    max_repeated_tokens: int = 8192
    reasoning_field: ReasoningField = declare(
        ReasoningField.REASONING_CONTENT,
        one_of(*ReasoningField),
        help="name of the field for separate reasoning",
        group="replies",
    )

    max_concurrent: int = _of_limits(32, whole(1), help="requests that are generated at the same time")
    max_queue: int = _of_limits(256, whole(1), help="requests that may wait in the queue")
    queue_seconds: float = _of_limits(
        600.0,
        seconds(),
        help="how long a request may wait until it is prepared for its model, and then in the queue",
    )
    load_seconds: float = _of_limits(
        300.0, seconds(), help="how long a request may wait for its model to load"
    )
    max_body_bytes: int = _of_limits(
        8 << 20,
        size(1 << 20, "MB", "megabytes", above=True),
        help="largest body of a request without its images, in megabytes",
        option="--max-body-mb",
    )
    max_messages: int = _of_limits(20_000, whole(1), help="messages that a request may have")
    max_choices: int = _of_limits(
        128, whole(1), help="replies that a request may have: its n for each of its prompts"
    )
    max_tools: int = _of_limits(1_000, whole(1), help="tools that a request may have")
    prepare_seconds: float = _of_limits(
        30.0,
        number(0, 1e6, above=True, words="a number of seconds above 0", metavar="S"),
        help="how long a request may be prepared for its model: its conversation rendered, its schemas compiled",
    )
    allow_image_urls: bool = _of_images(
        False,
        switch(),
        help="fetch images from http(s) addresses that requests name; those of private networks and of this "
        "machine only if --image-host names them",
        default="off",
    )
    image_hosts: tuple[str, ...] = _of_images(
        (),
        text("HOST"),
        help="host, address or network (10.0.0.0/8) from which images may be fetched although it is private",
        option="--image-host",
        repeatable=True,
    )
    image_seconds: float = _of_images(
        10.0,
        number(0, 1e6, above=True, words="a number of seconds above 0", metavar="S"),
        help="how long fetching one image may take",
    )
    max_images: int = _of_images(32, whole(1), help="images that a request may have")
    max_image_bytes: int = _of_images(
        20 << 20,
        size(1 << 20, "MB", "megabytes", above=True),
        help="largest file of an image, in megabytes",
        option="--max-image-mb",
    )
    max_images_bytes: int = _of_images(
        64 << 20,
        size(1 << 20, "MB", "megabytes"),
        help="most that all images in a request's body take there, in megabytes",
        option="--max-images-mb",
    )
    max_image_pixels: int = _of_images(
        50_000_000,
        whole(1),
        help="most pixels of an image, before it is shrunk for the model",
    )
    drain_seconds: float = _of_limits(
        30.0, seconds(), help="time for running replies to finish when the server is stopped"
    )
    prewarm: bool = declare(
        True,
        switch(),
        help="process the start of the next turn's prompt while idle",
        group="memory and speed",
        option="--no-prewarm",
    )
    keepalive_seconds: float = 5.0

    @property
    def max_requests(self) -> int:
        """Requests that an engine holds at the same time: those that are generated and those in its queue."""
        return self.max_concurrent + self.max_queue

    @property
    def max_received_bytes(self) -> int:
        """The largest body of a request, with its images."""
        return self.max_body_bytes + self.max_images_bytes
