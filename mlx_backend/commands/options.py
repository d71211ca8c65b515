"""The options of `mlx-backend serve`, and what they come to: settings, models, engine options.

Knows argparse and the plain data it fills; starts nothing.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_backend.demo import MODEL_NAME, MODEL_PATH
from mlx_backend.models.engine_options import EngineOptions
from mlx_backend.models.spec import ModelDefaults, ModelSpec
from mlx_backend.registry.config_file import is_repository
from mlx_backend.registry.errors import ConfigurationError
from mlx_backend.settings import ReasoningField, ReasoningFormat, Settings

if TYPE_CHECKING:
    from collections.abc import Callable

    from mlx_backend.models.model_type import ModelType

API_KEY_VARIABLE = "MLX_BACKEND_API_KEY"
_MEBI, _GIBI = 1 << 20, 1 << 30


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add all options of the command."""
    _add_models(parser.add_argument_group("model"))
    _add_several(parser.add_argument_group("several models"))
    _add_memory(parser.add_argument_group("memory and speed"))
    _add_network(parser.add_argument_group("network"))
    _add_replies(parser.add_argument_group("replies, where a request does not say"))
    _add_limits(parser.add_argument_group("limits"))
    parser.add_argument(
        "--log-level",
        choices=["debug", "info", "warning", "error"],
        default="info",
        help="default: %(default)s",
    )


def _add_models(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--model",
        type=_not_empty,
        metavar="PATH_OR_REPO",
        help="model folder or Hugging Face repository (default: the demo)",
    )
    add("--model-id", type=_not_empty, metavar="NAME", help="name clients use (default: the model's own)")
    add("--context-length", type=_count, metavar="N", help="a limit below the model's own context")
    add(
        "--adapter-path",
        action="append",
        default=[],
        type=_adapter,
        metavar="[NAME=]PATH",
        help="LoRA adapter; without a name it is always on, with one a request asks for it; repeatable",
    )
    add(
        "--draft-model",
        type=_not_empty,
        metavar="PATH_OR_REPO",
        help="smaller model that drafts for this one",
    )
    add("--draft-from-text", action="store_true", help="draft what stood in the text before")
    add(
        "--num-draft-tokens",
        type=_number(int, 1, 64, "a number from 1 to 64"),
        default=4,
        metavar="N",
        help="tokens of a draft (default: %(default)s)",
    )
    add("--chat-template", type=_template, metavar="FILE_OR_TEXT", help="in place of the model's own")
    add(
        "--chat-template-args",
        type=_object,
        default={},
        metavar="JSON",
        help="what the template is given besides, such as '{\"enable_thinking\": false}'",
    )
    add("--trust-remote-code", action="store_true", help="run Python code that comes with a model")


def _add_several(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    for kind, what in (("embedding", "makes vectors (/v1/embeddings)"), ("rerank", "ranks (/v1/rerank)")):
        add(
            f"--{kind}-model",
            action="append",
            default=[],
            type=_not_empty,
            metavar="PATH_OR_REPO",
            help=f"model that {what}, loaded when it is asked for; repeatable",
        )
    add("--config", type=Path, metavar="FILE", help="models and what each is set to, in TOML")
    add(
        "--models-dir",
        action="append",
        default=[],
        type=Path,
        metavar="DIR",
        help="folder whose models requests may name; repeatable",
    )
    add("--hf-cache", action="store_true", help="serve what is in the Hugging Face cache, too")
    add("--allow-download", action="store_true", help="download a repository that a request names")
    add(
        "--ttl",
        type=_seconds,
        metavar="S",
        help="unload models that nobody asked for so long (default: never; not the one named with --model)",
    )
    add(
        "--load-seconds",
        type=_seconds,
        default=300.0,
        metavar="S",
        help="how long a request waits for its model to be loaded (default: %(default)g)",
    )


def _add_memory(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--memory-gb",
        type=_number(float, 1e-6, 1 << 20, "a number of gigabytes above 0"),
        metavar="GB",
        help="for models, caches and kept prompts together (default: 90 %% of what the device recommends)",
    )
    add(
        "--cache-gb",
        type=_gibibytes,
        metavar="GB",
        help="of it for prompts that are kept for later (default: a quarter of what the model leaves)",
    )
    add("--prompt-cache-dir", type=Path, metavar="DIR", help="keep prompts across restarts, in this folder")
    add(
        "--prompt-cache-dir-gb",
        type=_gibibytes,
        default=20.0,
        metavar="GB",
        help="how large that folder may get (default: %(default)g)",
    )
    add("--no-prewarm", action="store_true", help="do not read ahead for the next turn while idle")
    add(
        "--prefill-chunk",
        type=_count,
        metavar="N",
        help="tokens of prompt between two tokens of a running reply (default: adapts to the machine)",
    )
    add(
        "--no-packing",
        action="store_true",
        help="run prompts and replies separately, with mlx-lm's attention as it is",
    )
    add(
        "--kv-bits",
        type=_number(int, 2, 8, "a number of bits from 2 to 8"),
        metavar="N",
        help="quantise the caches, where the model allows it; replies then take turns",
    )
    add(
        "--kv-group-size",
        type=int,
        choices=[32, 64, 128],
        default=64,
        help="its group size (default: %(default)s)",
    )
    add(
        "--max-kv-size",
        type=_count,
        metavar="N",
        help="let the context slide over so many tokens, where the model allows it",
    )


def _add_network(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    add(
        "--port",
        type=_port,
        default=8080,
        help="port to listen on, 0 for any free one (default: %(default)s)",
    )
    add(
        "--api-key",
        type=_not_empty,
        metavar="KEY",
        help=f"key that clients must send (default: ${API_KEY_VARIABLE}, if set; others cannot see that one in `ps`)",
    )
    add(
        "--cors-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="web page that may use the server; repeatable",
    )


def _add_replies(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--reasoning-effort",
        type=_effort,
        metavar="E",
        help="none, minimal, low, medium, high or xhigh (default: medium)",
    )
    add(
        "--reasoning-format",
        choices=[name.value for name in ReasoningFormat],
        default=ReasoningFormat.SEPARATE.value,
        help="where the reasoning goes (default: %(default)s)",
    )
    add(
        "--reasoning-field",
        choices=[name.value for name in ReasoningField],
        default=ReasoningField.REASONING_CONTENT.value,
        help="the field of separate reasoning (default: %(default)s)",
    )
    add(
        "--thinking-budget",
        type=_number(int, 0, 1 << 40, "a whole number from 0 up"),
        metavar="N",
        help="most tokens of reasoning; the answer follows at once (default: no limit)",
    )
    add(
        "--answer-reserve",
        type=_count,
        metavar="N",
        help="tokens of a reply, at most half of them, that are kept for the answer (default: none)",
    )
    add("--max-tokens", type=_count, metavar="N", help="longest reply (default: what the context holds)")
    add(
        "--temperature",
        type=_temperature,
        metavar="T",
        help="0 is greedy (default: what the model's makers advise, or 1; 0 for the demo model)",
    )


def _add_limits(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--max-concurrent",
        type=_count,
        default=32,
        metavar="N",
        help="requests generated at once (default: %(default)s)",
    )
    add(
        "--max-queue",
        type=_count,
        default=256,
        metavar="N",
        help="requests that may wait (default: %(default)s)",
    )
    add(
        "--queue-seconds",
        type=_seconds,
        default=600.0,
        metavar="S",
        help="how long one may wait for its turn (default: %(default)g)",
    )
    add("--max-body-mb", type=_count, default=8, metavar="MB", help="largest request (default: %(default)s)")
    add(
        "--drain-seconds",
        type=_seconds,
        default=30.0,
        metavar="S",
        help="what running replies get to finish when the server is stopped (default: %(default)g)",
    )


def settings_of(arguments: argparse.Namespace) -> Settings:
    """Read the server's settings."""
    return Settings(
        host=arguments.host,
        port=arguments.port,
        api_key=arguments.api_key or os.environ.get(API_KEY_VARIABLE) or None,
        reasoning_effort=arguments.reasoning_effort,
        reasoning_format=ReasoningFormat(arguments.reasoning_format),
        reasoning_field=ReasoningField(arguments.reasoning_field),
        temperature=arguments.temperature,
        max_tokens=arguments.max_tokens,
        thinking_budget=arguments.thinking_budget,
        answer_reserve=arguments.answer_reserve,
        max_concurrent=arguments.max_concurrent,
        max_queue=arguments.max_queue,
        max_body_bytes=arguments.max_body_mb * _MEBI,
        cors_origins=tuple(arguments.cors_origin),
        queue_seconds=arguments.queue_seconds,
        load_seconds=arguments.load_seconds,
        drain_seconds=arguments.drain_seconds,
        prewarm=not arguments.no_prewarm,
    )


def engine_options_of(arguments: argparse.Namespace) -> EngineOptions:
    """Read what all models' engines have in common."""
    return EngineOptions(
        trust_remote_code=arguments.trust_remote_code,
        max_concurrent=arguments.max_concurrent,
        max_waiting=arguments.max_queue,
        prefill_chunk=arguments.prefill_chunk,
        packing=not arguments.no_packing,
        memory_bytes=_bytes(arguments.memory_gb),
        cache_bytes=_bytes(arguments.cache_gb),
        cache_folder=arguments.prompt_cache_dir,
        cache_folder_bytes=_bytes(arguments.prompt_cache_dir_gb) or 0,
    )


def model_of(arguments: argparse.Namespace) -> ModelSpec | None:
    """Read the model that is named on the command line: the demo, unless a file or a folder names others."""
    if arguments.model is None and (arguments.config or arguments.models_dir or arguments.hf_cache):
        return None
    names = [name for name, _ in arguments.adapter_path]
    if arguments.model is None and (arguments.embedding_model or arguments.rerank_model):
        return None
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigurationError(
            f"--adapter-path: there are two adapters called {twice[0]!r}; give each a name of its own (NAME=PATH)."
        )
    demo = arguments.model is None
    source = str(MODEL_PATH) if demo else arguments.model
    folder = Path(source).expanduser()
    own_name = MODEL_NAME if demo else folder.resolve().name if folder.is_dir() else source
    engine: dict[str, Any] = {
        "context_length": arguments.context_length,
        "adapters": dict(arguments.adapter_path),
        "adapter": _ALWAYS_ON if _ALWAYS_ON in dict(arguments.adapter_path) else None,
        "draft_model": arguments.draft_model,
        "draft_from_text": arguments.draft_from_text,
        "draft_tokens": arguments.num_draft_tokens,
        "chat_template": arguments.chat_template,
        "kv_bits": arguments.kv_bits,
        "kv_group_size": arguments.kv_group_size,
        "max_kv_size": arguments.max_kv_size,
    }
    return ModelSpec(
        name=arguments.model_id or own_name,
        source=source,
        pinned=True,
        named_on_command_line=True,
        defaults=ModelDefaults(
            template_kwargs=arguments.chat_template_args, temperature=0.0 if demo else None
        ),
        engine=engine,
    )


def readers_of(arguments: argparse.Namespace) -> list[ModelSpec]:
    """Read the models for vectors and rankings that are named on the command line."""
    specs: list[ModelSpec] = []
    named: list[tuple[ModelType, list[str]]] = [
        ("embedding", arguments.embedding_model),
        ("rerank", arguments.rerank_model),
    ]
    for kind, sources in named:
        for source in sources:
            folder = Path(source).expanduser()
            if not folder.is_dir() and not is_repository(source):
                raise ConfigurationError(
                    f"--{kind}-model {source}: there is no such folder, and a repository is written owner/name."
                )
            name = folder.resolve().name if folder.is_dir() else source
            specs.append(ModelSpec(name=name, source=source, type=kind, named_on_command_line=True))
    return specs


_ALWAYS_ON = "default"


def _bytes(gigabytes: float | None) -> int | None:
    return None if gigabytes is None else int(gigabytes * _GIBI)


def _number[T: (int, float)](
    kind: Callable[[str], T], low: float, high: float, what: str
) -> Callable[[str], T]:
    def read(text: str) -> T:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
        return value

    return read


def _not_empty(text: str) -> str:
    if not text.strip():
        raise argparse.ArgumentTypeError("is empty (an unset variable?)")
    return text


_count = _number(int, 1, 1 << 40, "a whole number from 1 up")
_port = _number(int, 0, 65535, "a port (0 to 65535)")
_temperature = _number(float, 0, 2, "a temperature (0 to 2)")
_gibibytes = _number(float, 0, 1 << 20, "a number of gigabytes")
_seconds = _number(float, 0, 1e9, "a number of seconds")


def _adapter(text: str) -> tuple[str, Path]:
    name, equals, path = text.partition("=")
    if not equals:
        name, path = _ALWAYS_ON, text
    if not name.strip() or not path.strip():
        raise argparse.ArgumentTypeError(f"{text!r} is not PATH or NAME=PATH")
    return name, Path(path)


def _template(text: str) -> str:
    if "{" in text or "\n" in text:
        return text
    try:
        return Path(text).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither a template nor a file with one: {error}"
        ) from None


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return value


def _effort(text: str) -> object:
    from mlx_backend.conversation.effort import EffortError, parse

    try:
        return parse(text)
    except EffortError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
