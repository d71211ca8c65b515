"""The settings of a reply and of the server: each declared once, with its limits and its help.

`SamplingSettings` and `ReplySettings` exist three times over: as a request sends them, as a model's own, and as the
server's. None always means "not set": the next of these decides, and last the model itself.

Knows nothing of argparse, HTTP or MLX; the standard library and the shared core are enough.
"""

import re
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

from mlx_backend.conversation.effort import Effort, parse_effort
from mlx_backend.conversation.message_parts import REASONING_CONTENT
from mlx_backend.declaration import (
    Kind,
    Network,
    Setting,
    SettingError,
    declared,
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

    temperature: Annotated[
        float | None,
        Setting(
            kind=number(0, 2),
            help="randomness of sampling; 0 always takes the most likely token",
            default="what the model's makers recommend, or 1; 0 for the demo model",
        ),
    ] = None
    top_p: Annotated[
        float | None,
        Setting(
            kind=_FRACTION, help="choose among the most likely tokens that together have this probability"
        ),
    ] = None
    top_k: Annotated[
        int | None,
        Setting(
            kind=whole(0, words="a whole number, or 0 for all"),
            help="choose among this many of the most likely tokens; 0: all",
        ),
    ] = None
    min_p: Annotated[
        float | None,
        Setting(
            kind=_FRACTION,
            help="leave out tokens whose probability is below this fraction of the most likely one's",
        ),
    ] = None
    seed: Annotated[
        int | None,
        Setting(
            kind=whole(0, (1 << 63) - 1, words="a whole number from 0 up"),
            help="the same seed gives the same reply to the same request",
            default="a new one for each reply",
        ),
    ] = None
    repetition_penalty: Annotated[
        float | None,
        Setting(kind=number(0, 10, above=True), help="above 1, recent tokens become less likely"),
    ] = None
    presence_penalty: Annotated[
        float | None,
        Setting(kind=_PENALTY, help="above 0, tokens that have been used become less likely"),
    ] = None
    frequency_penalty: Annotated[
        float | None,
        Setting(kind=_PENALTY, help="above 0, tokens become less likely each time they are used"),
    ] = None
    xtc_probability: Annotated[
        float | None,
        Setting(kind=_FRACTION, help="how often the most likely tokens are excluded (XTC sampling)"),
    ] = None
    xtc_threshold: Annotated[
        float | None,
        Setting(
            kind=number(0, 0.5),
            help="XTC excludes all tokens above this probability except the least likely of them",
        ),
    ] = None

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

    reasoning_effort: Annotated[
        Effort | None,
        Setting(
            kind=_EFFORT,
            help="how much the model reasons before it answers",
            default="the model's own default",
        ),
    ] = None
    reasoning_format: Annotated[
        ReasoningFormat | None,
        Setting(kind=one_of(ReasoningFormat), help="how the reasoning is sent", default="separate"),
    ] = None
    max_tokens: Annotated[
        int | None,
        Setting(
            kind=whole(1), help="most tokens in a reply, reasoning included", default="what the context holds"
        ),
    ] = None
    thinking_budget: Annotated[
        int | None,
        Setting(
            kind=whole(0, words="a whole number of tokens, 0 for no reasoning"),
            help="most tokens of reasoning before the answer begins; 0: no reasoning",
            default="no limit",
        ),
    ] = None
    thinking_budget_message: Annotated[
        str | None,
        Setting(
            kind=text(),
            help="sentence with which the reasoning ends when its budget is used up, before the answer",
            default="none",
        ),
    ] = None
    effort_budgets: Annotated[
        EffortBudgets | None,
        Setting(
            kind=_EFFORT_BUDGETS,
            help="most tokens of reasoning at these efforts, for models whose template knows no scale of effort; "
            "the effort above them has no limit",
            default="low=1024,medium=4096",
        ),
    ] = None
    answer_reserve: Annotated[
        int | None,
        Setting(
            kind=whole(0, words="a whole number of tokens, 0 for none"),
            help="how many of max_tokens are kept for the answer; at most half of them, unless the request sets it",
            default="none",
        ),
    ] = None
    max_repeated_tokens: Annotated[
        int | None,
        Setting(
            kind=whole(0, 1 << 16, words="a whole number of tokens up to 65536, 0 for no limit"),
            help="end a reply when its last tokens, as many as this, are one run of tokens over and over; 0: never",
            default="8192",
        ),
    ] = None
    background_detection: Annotated[
        bool | None,
        Setting(
            kind=switch(),
            help="recognise the titles, tags and follow-ups that chat pages request by themselves, and answer them "
            "at the lowest effort, after users' own messages",
            option="--no-background-detection",
            default="on",
        ),
    ] = None
    list_efforts: Annotated[
        bool | None,
        Setting(
            kind=switch(),
            help="list a model under NAME:EFFORT too, for each of its efforts, so that a client can choose one by name",
            default="off",
        ),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(ReplySettings):
    """The server's own settings: defaults for replies, addresses and limits."""

    host: Annotated[str, Setting(kind=text("HOST"), help="address to listen on", group="network")] = (
        "127.0.0.1"
    )
    port: Annotated[
        int,
        Setting(
            kind=whole(0, 65535, words="a port (0 to 65535)"),
            help="port to listen on; 0: any free one",
            group="network",
        ),
    ] = 8080
    api_key: Annotated[
        str | None,
        Setting(
            kind=API_KEY,
            help="key that clients must send; other users of the machine can see an option in `ps`, "
            "but not an environment variable",
            group="network",
            default="none",
        ),
    ] = field(default=None, repr=False)
    api_keys: Annotated[
        NamedKeys | None,
        Setting(
            kind=NAMED_KEYS,
            help="a key of its own for each person or program, by names that the log shows",
            group="network",
            default="none",
        ),
    ] = field(default=None, repr=False)
    api_key_file: Annotated[
        Path | None,
        Setting(
            kind=path("FILE", "a file"),
            help="keys with their limits, models and priorities, in TOML; read again on SIGHUP",
            group="network",
            default="none",
        ),
    ] = None
    auth: Annotated[
        bool,
        Setting(
            kind=switch(),
            help="demand a key before listening where other machines can connect",
            group="network",
            option="--no-auth",
            default="on",
        ),
    ] = True
    trusted_proxies: Annotated[
        tuple[Network, ...],
        Setting(
            kind=network(),
            help="address or network of a reverse proxy, whose X-Forwarded-For says where requests come from",
            group="network",
            option="--trusted-proxy",
            repeatable=True,
        ),
    ] = ()
    cors_origins: Annotated[
        tuple[str, ...],
        Setting(
            kind=text("ORIGIN"),
            help="origin of web pages that may use the server",
            group="network",
            option="--cors-origin",
            repeatable=True,
        ),
    ] = ()
    allowed_hosts: Annotated[
        tuple[str, ...],
        Setting(
            kind=text("NAME"),
            help="name under which the server may be called, in addition to addresses and local names; '*': any. "
            "Not needed with an API key",
            group="network",
            option="--allowed-host",
            repeatable=True,
        ),
    ] = ()

    page: Annotated[
        bool,
        Setting(
            kind=switch(),
            help="have a page for browsers at /, for chatting and looking after the models, and the API's at /docs",
            group="network",
            option="--no-page",
            default="on",
        ),
    ] = True

    reasoning_format: ReasoningFormat = ReasoningFormat.SEPARATE
    background_detection: bool = True
    max_repeated_tokens: int = 8192
    reasoning_field: Annotated[
        ReasoningField,
        Setting(
            kind=one_of(ReasoningField),
            help="name of the field for separate reasoning",
            group="replies",
        ),
    ] = ReasoningField.REASONING_CONTENT

    max_concurrent: Annotated[
        int,
        Setting(kind=whole(1), help="requests that are generated at the same time", group="limits"),
    ] = 32
    max_queue: Annotated[
        int, Setting(kind=whole(1), help="requests that may wait in the queue", group="limits")
    ] = 256
    queue_seconds: Annotated[
        float,
        Setting(
            kind=seconds(),
            help="how long a request may wait until it is prepared for its model, and then in the queue",
            group="limits",
        ),
    ] = 600.0
    load_seconds: Annotated[
        float,
        Setting(kind=seconds(), help="how long a request may wait for its model to load", group="limits"),
    ] = 300.0
    max_body_bytes: Annotated[
        int,
        Setting(
            kind=size(1 << 20, "MB", "a number of megabytes above 0", above=True),
            help="largest body of a request without its images, in megabytes",
            group="limits",
            option="--max-body-mb",
        ),
    ] = 8 << 20
    max_messages: Annotated[
        int, Setting(kind=whole(1), help="messages that a request may have", group="limits")
    ] = 20_000
    max_choices: Annotated[
        int,
        Setting(
            kind=whole(1),
            help="replies that a request may have: its n for each of its prompts",
            group="limits",
        ),
    ] = 128
    max_tools: Annotated[
        int, Setting(kind=whole(1), help="tools that a request may have", group="limits")
    ] = 1_000
    prepare_seconds: Annotated[
        float,
        Setting(
            kind=number(0, 1e6, above=True, words="a number of seconds above 0", metavar="S"),
            help="how long a request may be prepared for its model: its conversation rendered, its schemas compiled",
            group="limits",
        ),
    ] = 30.0
    allow_image_urls: Annotated[
        bool,
        Setting(
            kind=switch(),
            help="fetch images from http(s) addresses that requests name; those of private networks and of this "
            "machine only if --image-host names them",
            group="images",
            default="off",
        ),
    ] = False
    image_hosts: Annotated[
        tuple[str, ...],
        Setting(
            kind=text("HOST"),
            help="host, address or network (10.0.0.0/8) from which images may be fetched although it is private",
            group="images",
            option="--image-host",
            repeatable=True,
        ),
    ] = ()
    image_seconds: Annotated[
        float,
        Setting(
            kind=number(0, 1e6, above=True, words="a number of seconds above 0", metavar="S"),
            help="how long fetching one image may take",
            group="images",
        ),
    ] = 10.0
    max_images: Annotated[
        int, Setting(kind=whole(1), help="images that a request may have", group="images")
    ] = 32
    max_image_bytes: Annotated[
        int,
        Setting(
            kind=size(1 << 20, "MB", "a number of megabytes above 0", above=True),
            help="largest file of an image, in megabytes",
            group="images",
            option="--max-image-mb",
        ),
    ] = 20 << 20
    max_images_bytes: Annotated[
        int,
        Setting(
            kind=size(1 << 20, "MB", "a number of megabytes"),
            help="most that all images in a request's body take there, in megabytes",
            group="images",
            option="--max-images-mb",
        ),
    ] = 64 << 20
    max_image_pixels: Annotated[
        int,
        Setting(
            kind=whole(1), help="most pixels of an image, before it is shrunk for the model", group="images"
        ),
    ] = 50_000_000
    drain_seconds: Annotated[
        float,
        Setting(
            kind=seconds(),
            help="time for running replies to finish when the server is stopped",
            group="limits",
        ),
    ] = 30.0
    prewarm: Annotated[
        bool,
        Setting(
            kind=switch(),
            help="process the start of the next turn's prompt while idle",
            group="memory and speed",
            option="--no-prewarm",
        ),
    ] = True
    keepalive_seconds: float = 5.0

    @property
    def max_requests(self) -> int:
        """Requests that an engine holds at the same time: those that are generated and those in its queue."""
        return self.max_concurrent + self.max_queue

    @property
    def max_received_bytes(self) -> int:
        """The largest body of a request, with its images."""
        return self.max_body_bytes + self.max_images_bytes
