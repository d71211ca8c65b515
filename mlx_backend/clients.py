"""How each client is set up to use this server: what `connect`, docs/clients.md and the server's page show.

A snippet is a text with placeholders: `{{url}}` (without /v1), `{{container_url}}` (the same, as a container sees it),
`{{model}}`, `{{context}}`, `{{output}}`, `{{sees}}` and `{{key}}`. Data and their filling; writes no
files and asks no server.
"""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from collections.abc import Mapping

type Language = Literal["sh", "toml", "json", "yaml", "python", "javascript", "text"]

type Kind = Literal["agent", "app", "sdk"]

KINDS: Final[Mapping[Kind, str]] = {"agent": "coding agent", "app": "app", "sdk": "SDK"}
"""Every kind of client, in the order of lists, in words."""
KEY_VARIABLE: Final = "MLX_BACKEND_API_KEY"
UNUSED: Final = "unused"
"""What clients that ask for a key are given where the server has none."""
MAX_OUTPUT: Final = 32_000
"""Tokens that clients are told to leave for an answer."""
LOOPBACK: Final = ("127.0.0.1", "localhost", "::1")
_PLACEHOLDER = re.compile(r"\{\{(url|container_url|model|context|output|sees|key|secret|shell_secret)\}\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerAccess:
    """What a client is to use. `secret` is written where a key goes; None: clients read it from KEY_VARIABLE."""

    url: str = "http://127.0.0.1:8080"
    model: str = "mlx-demo"
    context: int = 131_072
    sees: bool = False
    """Whether the model is shown images."""
    secret: str | None = UNUSED

    @property
    def container_url(self) -> str:
        """The address as a container on the server's machine sees it."""
        parts = urlsplit(self.url)
        if parts.hostname not in LOOPBACK:
            return self.url
        port = f":{parts.port}" if parts.port else ""
        return f"{parts.scheme}://host.docker.internal{port}{parts.path}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Snippet:
    """A piece of configuration or code. `file`: where it belongs, if it is a file's that every user has in one place.

    `key` is what stands for `{{key}}` with a literal key: `{{secret}}` in it, or `{{shell_secret}}` for a word of a
    shell; `key_variable` where the client reads the variable.
    """

    language: Language
    text: str
    file: str = ""
    key: str = '"{{secret}}"'
    key_variable: str = ""

    def filled(self, access: ServerAccess) -> str:
        """Return the text for a server; values are quoted as its language has it, inside the quotes that are there."""
        secret = access.secret
        # Some files take no literal key, only a variable's name.
        is_literal = secret is not None and (secret == UNUSED or "secret}}" in self.key)
        text = self.text.replace("{{key}}", self.key if is_literal else self.key_variable)
        if "os.environ[" in text:
            text = f"import os\n\n{text}"
        return _fill(text, access, self.language)


def _fill(text: str, access: ServerAccess, language: Language = "text") -> str:
    values = {
        "url": access.url,
        "container_url": access.container_url,
        "model": access.model,
        "context": str(access.context),
        "output": str(min(MAX_OUTPUT, access.context // 4)),
        "sees": "true" if access.sees else "false",
        "secret": access.secret or "",
        "shell_secret": shlex.quote(access.secret or ""),
    }
    return _PLACEHOLDER.sub(lambda found: _quoted(values[found[1]], language), text)


def _quoted(value: str, language: Language) -> str:
    if language == "sh":
        return shlex.quote(value)
    return value if language == "text" else json.dumps(value, ensure_ascii=False)[1:-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientSetup:
    """One program or library. `about` and `more` are Markdown, before and after the snippets.

    `apis`, `tried` and `seen_before` are the cells of the table of clients; `page` is its own page in docs/.
    """

    title: str
    kind: Kind = "agent"
    version: str = ""
    apis: str = ""
    tried: str = ""
    seen_before: str = ""
    page: str = ""
    about: str = ""
    snippets: tuple[Snippet, ...]
    more: str = ""

    def description(self, access: ServerAccess) -> str:
        """Return `about`, filled."""
        return _fill(self.about, access)

    def remarks(self, access: ServerAccess) -> str:
        """Return `more`, filled."""
        return _fill(self.more, access)


def _sdk(
    title: str,
    version: str,
    text: str,
    more: str,
    *,
    language: Language = "python",
    key: str = '"{{secret}}"',
    key_variable: str = f'os.environ["{KEY_VARIABLE}"]',
) -> ClientSetup:
    snippet = Snippet(language=language, text=text, key=key, key_variable=key_variable)
    return ClientSetup(title=title, kind="sdk", version=version, snippets=(snippet,), more=more)


_BEARER: Final = '"Bearer {{secret}}"'
_BEARER_VARIABLE: Final = f"f\"Bearer {{os.environ['{KEY_VARIABLE}']}}\""
_SH_KEY: Final[Mapping[str, str]] = {"key": "{{secret}}", "key_variable": f'"${KEY_VARIABLE}"'}

CLIENTS: Final[Mapping[str, ClientSetup]] = {
    "codex": ClientSetup(
        title="Codex",
        version="0.169.0",
        apis="responses",
        tried="tasks, MCP, `apply_patch`, `view_image`, efforts in its picker, compaction, WebSockets",
        seen_before="0.989 to 0.996",
        about="With `supports_websockets = true` next to `wire_api` it keeps a connection, and sends only what is new.",
        snippets=(
            Snippet(
                language="toml",
                file="~/.codex/config.toml",
                text="""\
model = "{{model}}"
model_provider = "mlx"

[model_providers.mlx]
name = "mlx-backend"
base_url = "{{url}}/v1"
model_catalog_url = "{{url}}/v1/models"
{{key}}
wire_api = "responses"
""",
                key='experimental_bearer_token = "{{secret}}"',
                key_variable=f'env_key = "{KEY_VARIABLE}"',
            ),
        ),
    ),
    "claude-code": ClientSetup(
        title="Claude Code",
        version="2.1.332",
        apis="messages",
        tried="tasks, MCP, thinking, compaction",
        seen_before="0.998 on average",
        about="For one terminal, then `claude`; or for all of them, in its settings.",
        snippets=(
            Snippet(
                language="sh",
                text="""\
export ANTHROPIC_BASE_URL={{url}}   # without /v1
export ANTHROPIC_AUTH_TOKEN={{key}}
export ANTHROPIC_MODEL={{model}} ANTHROPIC_DEFAULT_HAIKU_MODEL={{model}}
export CLAUDE_CODE_MAX_CONTEXT_TOKENS={{context}} CLAUDE_CODE_MAX_OUTPUT_TOKENS={{output}}
""",
                **_SH_KEY,
            ),
            Snippet(
                language="json",
                file="~/.claude/settings.json",
                text="""\
{
  "env": {
    "ANTHROPIC_BASE_URL": "{{url}}",
    "ANTHROPIC_MODEL": "{{model}}",
    "ANTHROPIC_DEFAULT_HAIKU_MODEL": "{{model}}",
    "CLAUDE_CODE_MAX_CONTEXT_TOKENS": "{{context}}",
    "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "{{output}}"
  },
  "apiKeyHelper": {{key}}
}
""",
                key='"printf %s {{shell_secret}}"',
                key_variable=f'"printenv {KEY_VARIABLE}"',
            ),
        ),
        more="Without CLAUDE_CODE_MAX_CONTEXT_TOKENS it takes a context of 200,000 tokens for granted. Its own "
        "instructions and tools are 12,000 tokens.",
    ),
    "opencode": ClientSetup(
        title="OpenCode",
        version="1.18.33",
        apis="chat, responses, messages",
        tried="tasks, MCP, parallel calls, long thinking, compaction, a second task, a reply that breaks",
        seen_before="0.986 to 0.998",
        about="In `opencode.json`, of a project or in `~/.config/opencode/`; then `opencode --model mlx/{{model}}`. "
        "`npm` chooses the API: `@ai-sdk/openai-compatible` (chat), `@ai-sdk/openai` (responses) or "
        "`@ai-sdk/anthropic` (messages). With all three reasoning comes back to the model within a task. "
        "`limit` makes it compact in time.",
        snippets=(
            Snippet(
                language="json",
                file="~/.config/opencode/opencode.json",
                text="""\
{
  "provider": {
    "mlx": {
      "npm": "@ai-sdk/openai-compatible",
      "options": {"baseURL": "{{url}}/v1", "apiKey": {{key}}},
      "models": {
        "{{model}}": {"reasoning": true, "tool_call": true, "limit": {"context": {{context}}, "output": {{output}}}}
      }
    }
  }
}
""",
                key_variable=f'"{{env:{KEY_VARIABLE}}}"',
            ),
        ),
    ),
    "cline": ClientSetup(
        title="Cline",
        version="3.0.65",
        apis="chat",
        tried="a task of its CLI",
        seen_before="0.985 to 0.995",
        snippets=(
            Snippet(
                language="sh",
                text="""\
cline auth -p openai -k {{key}} -m {{model}} -b {{url}}/v1
cline -P openai -m {{model}} "…"
""",
                **_SH_KEY,
            ),
        ),
        more="In the editor: *API Provider* OpenAI Compatible, with the same address.",
    ),
    "continue": ClientSetup(
        title="Continue",
        version="1.5.47",
        apis="chat, messages",
        tried="a task of `cn`",
        seen_before="0.94 to 0.99",
        about="For the editors and for `cn`. `provider: anthropic` works as well.",
        snippets=(
            Snippet(
                language="yaml",
                file="~/.continue/config.yaml",
                text="""\
name: local
version: 1.0.0
schema: v1
models:
  - name: "{{model}}"
    provider: openai
    model: "{{model}}"
    apiBase: "{{url}}/v1"
    apiKey: {{key}}
    roles: [chat, edit, apply]
    capabilities: [tool_use]
""",
                key_variable=f"${{{{ secrets.{KEY_VARIABLE} }}}}",
            ),
        ),
        more=f"It looks for a key of that form (`${{{{ secrets.{KEY_VARIABLE} }}}}`) in `~/.continue/.env`.",
    ),
    "qwen-code": ClientSetup(
        title="Qwen Code",
        version="0.24.4",
        apis="chat",
        tried="a task",
        seen_before="0.996 to 0.999",
        snippets=(
            Snippet(
                language="sh",
                text="qwen --auth-type openai --openai-base-url {{url}}/v1 --openai-api-key {{key}} "
                "--model {{model}}\n",
                **_SH_KEY,
            ),
        ),
    ),
    "pi": ClientSetup(
        title="Pi",
        version="0.73.1",
        apis="chat, responses, messages",
        tried="a task",
        seen_before="0.975 to 0.99",
        about="Then `pi --provider mlx --model {{model}}`. `api` may also be `openai-responses`, or "
        "`anthropic-messages` with a `baseUrl` without `/v1`.",
        snippets=(
            Snippet(
                language="json",
                file="~/.pi/agent/models.json",
                text="""\
{
  "providers": {
    "mlx": {
      "baseUrl": "{{url}}/v1",
      "api": "openai-completions",
      "apiKey": {{key}},
      "models": [{"id": "{{model}}", "reasoning": true, "contextWindow": {{context}}, "maxTokens": {{output}}}]
    }
  }
}
""",
                key_variable=f'"{KEY_VARIABLE}"',
            ),
        ),
    ),
    "vibe": ClientSetup(
        title="Mistral Vibe",
        version="2.2.1",
        apis="chat",
        tried="a task",
        seen_before="0.994 to 0.996",
        snippets=(
            Snippet(
                language="toml",
                file="~/.vibe/config.toml",
                text="""\
active_model = "local"

[[providers]]
name = "mlx"
api_base = "{{url}}/v1"
api_key_env_var = {{key}}
api_style = "openai"
backend = "generic"

[[models]]
name = "{{model}}"
provider = "mlx"
alias = "local"
""",
                key='""',
                key_variable=f'"{KEY_VARIABLE}"',
            ),
        ),
    ),
    "aider": ClientSetup(
        title="aider",
        version="0.86.2",
        apis="chat",
        tried="an edit; it shows the reasoning",
        snippets=(
            Snippet(
                language="sh",
                text="aider --model openai/{{model}} --openai-api-base {{url}}/v1 --openai-api-key {{key}}\n",
                **_SH_KEY,
            ),
        ),
    ),
    "zed": ClientSetup(
        title="Zed",
        apis="chat",
        tried="nothing: it needs a screen, and this is from its documentation",
        about="The key goes into *Agent → Settings → LLM Providers*, or into the variable `MLX_API_KEY`.",
        snippets=(
            Snippet(
                language="json",
                file="~/.config/zed/settings.json",
                text="""\
{
  "language_models": {
    "openai_compatible": {
      "mlx": {
        "api_url": "{{url}}/v1",
        "available_models": [
          {
            "name": "{{model}}",
            "max_tokens": {{context}},
            "capabilities": {"tools": true, "images": {{sees}}, "parallel_tool_calls": true}
          }
        ]
      }
    }
  }
}
""",
            ),
        ),
    ),
    "librechat": ClientSetup(
        title="LibreChat",
        kind="app",
        apis="chat",
        tried="nothing: this is from its documentation",
        about="In `librechat.yaml`; here as it is in Docker.",
        snippets=(
            Snippet(
                language="yaml",
                text="""\
endpoints:
  custom:
    - name: "mlx-backend"
      apiKey: {{key}}
      baseURL: "{{container_url}}/v1"
      models:
        default: ["{{model}}"]
        fetch: true
      titleConvo: true
      titleModel: "current_model"
""",
                key_variable=f'"${{{KEY_VARIABLE}}}"',
            ),
        ),
    ),
    "open-webui": ClientSetup(
        title="Open WebUI",
        kind="app",
        version="0.12.4",
        apis="chat",
        tried="a page of its own",
        page="open-webui.md",
        about="*Settings → Admin → Connections*, the + next to *Manage OpenAI API Connections*; then *Save*.",
        snippets=(
            Snippet(
                language="text",
                text="""\
URL       {{url}}/v1
          {{container_url}}/v1 if Open WebUI runs in Docker
Key       {{key}}
API Type  Chat Completions
""",
                key="{{secret}}",
                key_variable=f"the value of {KEY_VARIABLE}",
            ),
        ),
    ),
    "dify": ClientSetup(
        title="Dify",
        kind="app",
        apis="chat, embeddings, rerank",
        tried="a page of its own",
        page="dify.md",
        about="With the plugin installed: *Settings → Model Provider → MLX → Setup*.",
        snippets=(
            Snippet(
                language="text",
                text="""\
Server URL  {{container_url}}/v1
API key     {{key}}
""",
                key="{{secret}}",
                key_variable=f"the value of {KEY_VARIABLE}",
            ),
        ),
        more="That is the address for a Dify in Docker, where `localhost` would be the container itself. On Linux the "
        "server needs `--host 0.0.0.0` and a key for it.",
    ),
    "ollama-api": ClientSetup(
        title="Clients of Ollama's API",
        kind="app",
        apis="Ollama's",
        tried="answers, reasoning, streams, calls of tools and structured output",
        snippets=(
            Snippet(
                language="sh",
                text="""\
export OLLAMA_HOST={{url}}   # without /v1; as base_url, baseUrl or apiBase elsewhere
export OLLAMA_API_KEY={{key}}
""",
                **_SH_KEY,
            ),
        ),
        more="Tried with `ollama` (Python 0.6.3, JavaScript 0.6.4), langchain-ollama 1.1.0 and @langchain/ollama "
        "1.3.0, litellm 1.110.2 (`ollama_chat/`, `ollama/`), llama-index-llms-ollama 0.11.0, llm-ollama 0.19.1 and the "
        "AI SDK's ollama-ai-provider-v2 3.6.0; and the start of `codex --oss --local-provider ollama`, and of "
        "`lmstudio`, with `CODEX_OSS_BASE_URL={{url}}/v1`. `num_ctx` is the model's.",
    ),
    "openai": _sdk(
        "openai",
        "3.57",
        'from openai import OpenAI\n\nclient = OpenAI(base_url="{{url}}/v1", api_key={{key}})\n',
        'effort: `reasoning={"effort": "high", "summary": "auto"}` in responses, `reasoning_effort` in chat. The '
        "reasoning of chat is `message.reasoning_content`. `responses.connect()` works, too",
    ),
    "anthropic": _sdk(
        "anthropic",
        "2.14",
        'from anthropic import Anthropic\n\nclient = Anthropic(base_url="{{url}}", api_key={{key}})\n',
        'effort: `output_config={"effort": "high"}`. The answer is the last block, since thinking stands before it: '
        '`message.content[-1].text`; with `thinking={"type": "disabled"}` it is the only one',
    ),
    "ollama": _sdk(
        "ollama",
        "0.6",
        'from ollama import Client\n\nclient = Client(host="{{url}}", headers={"Authorization": {{key}}})\n',
        'effort: `think="high"`',
        key=_BEARER,
        key_variable=_BEARER_VARIABLE,
    ),
    "litellm": _sdk(
        "litellm",
        "1.110",
        "from litellm import completion\n\n"
        'completion(model="openai/{{model}}", api_base="{{url}}/v1", api_key={{key}}, messages=[…])\n',
        "also `openai/responses/`, `hosted_vllm/`, `anthropic/` and `ollama_chat/` (these two without `/v1`). By "
        "`anthropic/` it refuses `reasoning_effort` for names that are not Anthropic's: send `output_config`. By "
        "`openai/responses/` it shows no reasoning",
    ),
    "langchain-openai": _sdk(
        "langchain-openai",
        "1.7",
        "from langchain_openai import ChatOpenAI\n\n"
        'model = ChatOpenAI(base_url="{{url}}/v1", api_key={{key}}, model="{{model}}")\n',
        "with `use_responses_api=True` or `reasoning={…}` it shows reasoning; over chat it does not read it",
    ),
    "langchain-anthropic": _sdk(
        "langchain-anthropic",
        "1.7",
        "from langchain_anthropic import ChatAnthropic\n\n"
        'model = ChatAnthropic(base_url="{{url}}", api_key={{key}}, model="{{model}}")\n',
        "with `thinking` it leaves `tool_choice` out: an agent with `response_format=` then may ask for ever. Leave "
        "`thinking` away, or use `ProviderStrategy`",
    ),
    "langchain-ollama": _sdk(
        "langchain-ollama",
        "1.1",
        "from langchain_ollama import ChatOllama\n\n"
        'model = ChatOllama(base_url="{{url}}", model="{{model}}", reasoning="high", '
        'client_kwargs={"headers": {"Authorization": {{key}}}})\n',
        "`client_kwargs` is for a server that has keys",
        key=_BEARER,
        key_variable=_BEARER_VARIABLE,
    ),
    "llama-index": _sdk(
        "llama-index-llms-openai-like",
        "0.8",
        "from llama_index.llms.openai_like import OpenAILike\n\n"
        'llm = OpenAILike(api_base="{{url}}/v1", api_key={{key}}, model="{{model}}", is_chat_model=True, '
        "is_function_calling_model=True, context_window={{context}})\n",
        'also `OpenAILikeResponses`. Effort: `additional_kwargs={"reasoning_effort": "high"}`. Its `OpenAI` class '
        "takes only names of OpenAI's models",
    ),
    "pydantic-ai": _sdk(
        "pydantic-ai",
        "2.68",
        "from pydantic_ai.models.openai import OpenAIResponsesModel\n"
        "from pydantic_ai.providers.openai import OpenAIProvider\n\n"
        'model = OpenAIResponsesModel("{{model}}", provider=OpenAIProvider(base_url="{{url}}/v1", api_key={{key}}))\n',
        "also `OpenAIChatModel`, and `AnthropicModel` with `AnthropicProvider`. Effort: `openai_reasoning_effort` in "
        "the settings; its `thinking` is not sent for names that it does not know. `NativeOutput` needs one of "
        "OpenAI's two",
    ),
    "openai-agents": _sdk(
        "openai-agents",
        "0.24",
        "from agents import set_default_openai_client, set_tracing_disabled\n"
        "from openai import AsyncOpenAI\n\n"
        "set_tracing_disabled(True)  # or it sends traces to OpenAI\n"
        'set_default_openai_client(AsyncOpenAI(base_url="{{url}}/v1", api_key={{key}}), use_for_tracing=False)\n',
        "and `set_tracing_disabled(True)`, or it sends traces to OpenAI. Hosted tools are left out",
    ),
    "instructor": _sdk(
        "instructor",
        "1.17",
        "from instructor import Mode, from_openai\nfrom openai import OpenAI\n\n"
        'client = from_openai(OpenAI(base_url="{{url}}/v1", api_key={{key}}), mode=Mode.TOOLS)\n',
        "and `from_anthropic(Anthropic(…), mode=…)`. The modes TOOLS, JSON, MD_JSON, JSON_SCHEMA, RESPONSES_TOOLS, "
        "ANTHROPIC_TOOLS and ANTHROPIC_JSON were tried",
    ),
    "ai-sdk": _sdk(
        "@ai-sdk/openai-compatible",
        "",
        'import { createOpenAICompatible } from "@ai-sdk/openai-compatible";\n\n'
        'const mlx = createOpenAICompatible({name: "mlx", baseURL: "{{url}}/v1", apiKey: {{key}}});\n',
        "`@ai-sdk/openai` and `@ai-sdk/anthropic` take the same `baseURL`; as in OpenCode, whose tests they are",
        language="javascript",
        key_variable=f"process.env.{KEY_VARIABLE}",
    ),
    "llm": ClientSetup(
        title="llm",
        kind="sdk",
        version="0.36",
        about="In the file `extra-openai-models.yaml`, in the folder of `llm logs path`.",
        snippets=(
            Snippet(
                language="yaml",
                text="""\
- model_id: mlx
  model_name: "{{model}}"
  api_base: "{{url}}/v1"
  api_key_name: mlx
  reasoning: true
  supports_tools: true
  supports_schema: true
""",
            ),
        ),
        more="a key: `llm keys set mlx`. llm-anthropic: `ANTHROPIC_BASE_URL={{url}} llm anthropic refresh`, then "
        "`llm -m anthropic/{{model}}`; llm-ollama: `OLLAMA_HOST`",
    ),
}
"""By the name that `connect` takes."""
