"""The real server on a real socket, with a model that writes what a test says and templates of two families.

What the model writes is raw text in its family's own markup; what it is told is rendered as for real models. Tokens are
bytes and markers, so that every mask of a real model is there too. Requests and replies are recorded, and of each
prompt how much of it the server had.
"""

from __future__ import annotations

import io
import json
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from byte_tokenizer import ByteTokenizer
from families.tiny_models import FAMILIES as TINY_FAMILIES
from harmony_data import GPT_OSS_TEMPLATE, HARMONY_DATA
from running_server import running
from scripted_engine import ScriptedEngine

from mlx_backend.demo import MODEL_PATH
from mlx_backend.errors import EngineRefused
from mlx_backend.models import templates
from mlx_backend.server.app import App

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from _typeshed.wsgi import StartResponse, WSGIEnvironment
    from running_server import RunningServer
    from scripted_engine import Script, ScriptedRequest

MODEL = "scripted"
TITLE = "A title"
"""What the model writes where it is offered no tools and the test says nothing else."""


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a tool. `arguments` may be the text itself, for a tool that takes text."""

    name: str
    arguments: Mapping[str, Any] | str

    @property
    def text(self) -> str:
        if isinstance(self.arguments, str):
            return self.arguments
        return json.dumps(self.arguments, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class Harmony:
    """gpt-oss. A turn holds one call."""

    template: str = (MODEL_PATH / "chat_template.jinja").read_text(encoding="utf-8")
    markers: tuple[str, ...] = TINY_FAMILIES["harmony"].tokens

    def says(self, text: str, thinking: str = "") -> str:
        return f"{self._analysis(thinking)}<|channel|>final<|message|>{text}<|return|>"

    def calls(self, *calls: Call, thinking: str = "") -> str:
        written = [
            f"<|channel|>commentary to=functions.{call.name} <|constrain|>json<|message|>{call.text}<|call|>"
            for call in calls
        ]
        return self._analysis(thinking) + "<|start|>assistant".join(written)

    def offers_tools(self, prompt: str) -> bool:
        return "namespace functions {" in prompt

    def _analysis(self, thinking: str) -> str:
        return f"<|channel|>analysis<|message|>{thinking}<|end|><|start|>assistant" if thinking else ""


# Qwen3's layout in its shortest form: reasoning stays since the last question, and results stand in a user's turn.
HERMES_TEMPLATE = """\
{%- set asked = namespace(at=-1) -%}
{%- for m in messages -%}{%- if m.role == "user" -%}{%- set asked.at = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- if tools -%}
{{- "<|im_start|>system\n" -}}
{{- messages[0].content + "\n\n" if messages[0].role == "system" -}}
{%- for tool in tools -%}{{- "\n" + (tool | tojson) -}}{%- endfor -%}
{{- '\nWrite <tool_call>\n{"name": NAME, "arguments": OBJECT}\n</tool_call><|im_end|>\n' -}}
{%- elif messages[0].role == "system" -%}
{{- "<|im_start|>system\n" + messages[0].content + "<|im_end|>\n" -}}
{%- endif -%}
{%- for m in messages -%}
{%- if m.role == "user" or (m.role == "system" and not loop.first) -%}
{{- "<|im_start|>" + m.role + "\n" + m.content + "<|im_end|>\n" -}}
{%- elif m.role == "assistant" -%}
{{- "<|im_start|>assistant\n" -}}
{%- if m.reasoning_content and loop.index0 > asked.at -%}
{{- "<think>\n" + m.reasoning_content + "\n</think>\n\n" -}}
{%- endif -%}
{{- m.content -}}
{%- for call in m.tool_calls or [] -%}
{{- "\n" if m.content or not loop.first -}}
{{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' -}}
{{- (call.function.arguments if call.function.arguments is string else call.function.arguments | tojson) -}}
{{- "}\n</tool_call>" -}}
{%- endfor -%}
{{- "<|im_end|>\n" -}}
{%- elif m.role == "tool" -%}
{{- "<|im_start|>user" if loop.first or messages[loop.index0 - 1].role != "tool" -}}
{{- "\n<tool_response>\n" + m.content + "\n</tool_response>" -}}
{{- "<|im_end|>\n" if loop.last or messages[loop.index0 + 1].role != "tool" -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- "<|im_start|>assistant\n" -}}
{{- "<think>\n\n</think>\n\n" if enable_thinking is defined and not enable_thinking -}}
{%- endif -%}
"""


@dataclass(frozen=True, slots=True)
class Hermes:
    """Qwen3 and many others. A turn holds any number of calls."""

    template: str = HERMES_TEMPLATE
    markers: tuple[str, ...] = TINY_FAMILIES["hermes-json"].tokens

    def says(self, text: str, thinking: str = "") -> str:
        return f"{self._reasoning(thinking)}{text}<|im_end|>"

    def calls(self, *calls: Call, thinking: str = "") -> str:
        written = [
            f'<tool_call>\n{{"name": "{call.name}", "arguments": {call.text}}}\n</tool_call>'
            for call in calls
        ]
        return self._reasoning(thinking) + "\n".join(written) + "<|im_end|>"

    def offers_tools(self, prompt: str) -> bool:
        return '{"type": "function"' in prompt

    def _reasoning(self, thinking: str) -> str:
        return f"<think>\n{thinking}\n</think>\n\n" if thinking else ""


type ModelFamily = Harmony | Hermes
FAMILIES: Mapping[str, ModelFamily] = {"harmony": Harmony(), "hermes": Hermes()}
PUBLISHED: Mapping[str, tuple[str, Path]] = {
    name: (family, template)
    for name, family, template in (
        ("gpt-oss", "harmony", GPT_OSS_TEMPLATE),
        ("qwen3", "hermes", HARMONY_DATA / "templates" / "Qwen-Qwen3-0.6B.jinja"),
    )
    if template.exists()
}
"""The families with templates that are no data of ours, where they are there."""


def family_of(name: str) -> ModelFamily:
    """A family, by its name or that of a published template."""
    if name in FAMILIES:
        return FAMILIES[name]
    family, template = PUBLISHED[name]
    return replace(FAMILIES[family], template=template.read_text(encoding="utf-8"))


class _Tokenizer(ByteTokenizer):
    """Renders as the tokenizer of a real model does: in the process that runs templates."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        *,
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> str:
        try:
            return templates.render(
                self.chat_template or "",
                messages,
                template_kwargs,
                tools=tools or None,
                add_generation_prompt=add_generation_prompt,
            )
        except templates.TemplateFault as error:
            raise EngineRefused(f"The model's chat template refused the conversation: {error}") from error


@dataclass(slots=True)
class Exchange:
    """A request as it came, and the reply as it went."""

    method: str
    path: str
    query: str
    headers: dict[str, str]
    body: bytes
    status: int = 0
    reply_headers: dict[str, str] = field(default_factory=dict)
    reply: bytearray = field(default_factory=bytearray)

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def shown(self) -> str:
        return f"{self.method} {self.path} {self.status}"


class _RecordingApp(App):
    """The server's application, which also records."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.exchanges: list[Exchange] = []

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        body = environ["wsgi.input"].read()
        environ["wsgi.input"] = io.BytesIO(body)
        headers = {
            name.removeprefix("HTTP_").replace("_", "-").lower(): value
            for name, value in environ.items()
            if name.startswith("HTTP_") or name == "CONTENT_TYPE"
        }
        exchange = Exchange(
            environ["REQUEST_METHOD"], environ["PATH_INFO"], environ["QUERY_STRING"], headers, body
        )
        self.exchanges.append(exchange)

        def start(status: str, reply_headers: list[tuple[str, str]], *rest: Any) -> Any:
            exchange.status = int(status.split()[0])
            exchange.reply_headers = {name.lower(): value for name, value in reply_headers}
            return start_response(status, reply_headers, *rest)

        return _RecordedReply(super().__call__(environ, start), exchange)


class _RecordedReply:
    def __init__(self, pieces: Iterable[bytes], exchange: Exchange) -> None:
        self._pieces = pieces
        self._exchange = exchange

    def __iter__(self) -> Iterator[bytes]:
        for piece in self._pieces:
            self._exchange.reply += piece
            yield piece

    def close(self) -> None:
        if (close := getattr(self._pieces, "close", None)) is not None:
            close()


@dataclass(frozen=True)
class ScriptedServer:
    """The server, what it was asked, and what its model was told."""

    server: RunningServer
    engine: ScriptedEngine
    family: ModelFamily
    exchanges: list[Exchange]

    @property
    def url(self) -> str:
        return self.server.url

    @property
    def prompts(self) -> Sequence[ScriptedRequest]:
        """What the model was told, in that order."""
        return self.engine.requests

    @property
    def agent_prompts(self) -> list[ScriptedRequest]:
        """Those that offer tools: an agent's turns, and no titles."""
        return [each for each in self.prompts if self.family.offers_tools(each.prompt)]

    @property
    def shares(self) -> list[float]:
        """Of each of an agent's prompts after the first, the share that the server had."""
        return [each.repeated / len(each.request.prompt) for each in self.agent_prompts[1:]]

    def misses(self, below: float = 0.99) -> str:
        """For people: where the prompts part from what the server had that have a smaller share."""
        lines = []
        for at, (share, asked) in enumerate(zip(self.shares, self.agent_prompts[1:], strict=True), 1):
            if share < below:
                told = asked.prompt.encode()[_bytes_of(self.engine, asked) :]
                lines.append(f"{at}: {share:.4f}, and then: {told[:300].decode(errors='replace')!r}")
        return "\n".join(lines)

    def requests(self, path: str) -> list[Exchange]:
        """Those to an address."""
        return [exchange for exchange in self.exchanges if exchange.path == path]


def _bytes_of(engine: ScriptedEngine, asked: ScriptedRequest) -> int:
    tokenizer = engine.tokenizer
    return len(tokenizer.decode(asked.request.prompt[: asked.repeated]).encode())


def average_share(server: ScriptedServer) -> float:
    """The share of all of an agent's prompts but the first, by tokens."""
    asked = server.agent_prompts[1:]
    return sum(each.repeated for each in asked) / sum(len(each.request.prompt) for each in asked)


@contextmanager
def scripted_server(
    script: Iterable[Script] | Callable[[str], Script],
    family: str = "harmony",
    *,
    without_tools: Callable[[str], Script] | Script | None = None,
    context_length: int = 524_288,
    **settings: Any,
) -> Iterator[ScriptedServer]:
    """Serve a model that writes the script.

    A list is of replies to prompts that offer tools, the next one for each; prompts without tools (titles, summaries)
    get `without_tools`. A function is asked for every prompt.
    """
    chosen = family_of(family)
    lock = threading.Lock()
    replies = None if callable(script) else iter(script)

    def reply(prompt: str) -> Script:
        if replies is None:
            assert callable(script)
            return script(prompt)
        if not chosen.offers_tools(prompt):
            if callable(without_tools):
                return without_tools(prompt)
            return chosen.says(TITLE) if without_tools is None else without_tools
        with lock:
            return next(replies, chosen.says("The script has ended."))

    engine = ScriptedEngine(
        reply,
        model_id=MODEL,
        context_length=context_length,
        tokenizer=_Tokenizer(chosen.markers, chosen.template),
        caches=True,
    )
    with running(engine, app_type=_RecordingApp, **settings) as server:
        assert isinstance(server.app, _RecordingApp)
        yield ScriptedServer(server, engine, chosen, server.app.exchanges)
