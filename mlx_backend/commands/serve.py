"""`mlx-backend serve`: from the command line to a running server, and back down in order.

Start: bind (a port in use is known before gigabytes are loaded), load, serve. Stop: no new connections, a few
seconds for what is running, then the engine's thread is stopped and joined.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import socket
import sys
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from mlx_backend.demo import MODEL_NAME, MODEL_PATH
from mlx_backend.settings import ReasoningField, ReasoningFormat, Settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mlx_backend.engine.base import Engine
    from mlx_backend.server.serving import Server

API_KEY_VARIABLE = "MLX_BACKEND_API_KEY"
A_REAL_MODEL = "mlx-community/gpt-oss-20b-MXFP4-Q8"
_MEBI, _GIBI = 1 << 20, 1 << 30


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command and its options."""
    parser = subparsers.add_parser(
        "serve",
        usage="mlx-backend [serve] [option …]",
        description="Serve a reasoning model on MLX behind OpenAI's API.",
        epilog="Other commands: `mlx-backend parse` shows what a model's raw output means, `mlx-backend sanitise` "
        "what a model gets of a history; `mlx-backend --version` prints the version.",
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=34),
    )
    parser.set_defaults(run=run)
    model = parser.add_argument_group("model")
    model.add_argument(
        "--model",
        type=_not_empty,
        metavar="PATH_OR_REPO",
        help="model folder or Hugging Face repository (default: the demo)",
    )
    model.add_argument("--model-id", metavar="NAME", help="name clients use (default: the model's own)")
    model.add_argument(
        "--context-length", type=_count, metavar="N", help="a limit below the model's own context"
    )
    model.add_argument(
        "--cache-gb",
        type=_gibibytes,
        default=2.0,
        metavar="GB",
        help="memory for reusable prompts (default: 2)",
    )
    network = parser.add_argument_group("network")
    network.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    network.add_argument(
        "--port",
        type=_port,
        default=8080,
        help="port to listen on, 0 for any free one (default: %(default)s)",
    )
    network.add_argument(
        "--api-key",
        type=_not_empty,
        metavar="KEY",
        help=f"key that clients must send (default: ${API_KEY_VARIABLE}, if set; others cannot see that one in `ps`)",
    )
    network.add_argument(
        "--cors-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="web page that may use the server; repeatable",
    )
    replies = parser.add_argument_group("replies, where a request does not say")
    replies.add_argument(
        "--reasoning-effort",
        type=_effort,
        metavar="E",
        help="none, minimal, low, medium, high or xhigh (default: medium)",
    )
    replies.add_argument(
        "--reasoning-format",
        choices=[name.value for name in ReasoningFormat],
        default=ReasoningFormat.SEPARATE.value,
        help="where the reasoning goes (default: %(default)s)",
    )
    replies.add_argument(
        "--reasoning-field",
        choices=[name.value for name in ReasoningField],
        default=ReasoningField.REASONING_CONTENT.value,
        help="the field of separate reasoning (default: %(default)s)",
    )
    replies.add_argument(
        "--max-tokens", type=_count, metavar="N", help="longest reply (default: what the context holds)"
    )
    replies.add_argument(
        "--temperature",
        type=_temperature,
        metavar="T",
        help="0 is greedy (default: 1, and 0 for the demo model)",
    )
    limits = parser.add_argument_group("limits")
    limits.add_argument(
        "--max-concurrent",
        type=_count,
        default=16,
        metavar="N",
        help="requests generated at once (default: %(default)s)",
    )
    limits.add_argument(
        "--max-queue",
        type=_count,
        default=128,
        metavar="N",
        help="requests that may wait (default: %(default)s)",
    )
    limits.add_argument(
        "--max-body-mb", type=_count, default=8, metavar="MB", help="largest request (default: %(default)s)"
    )
    parser.add_argument(
        "--log-level",
        choices=["debug", "info", "warning", "error"],
        default="info",
        help="default: %(default)s",
    )


def run(arguments: argparse.Namespace) -> int:
    """Serve until told to stop; return the exit status."""
    logging.basicConfig(
        level=arguments.log_level.upper(), format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr
    )
    for chatty in ("httpx", "httpcore", "urllib3", "filelock", "fsspec"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    settings = _settings(arguments)
    from mlx_backend.server.serving import Server

    server = Server(
        settings.host,
        settings.port,
        None,
        requests=settings.max_concurrent + settings.max_queue,
        shutdown_seconds=settings.shutdown_seconds + 2,
    )
    try:
        server.prepare()
    except OSError as error:
        return _failed(_why_not_bound(settings, error))
    try:
        return _load_and_serve(server, settings, arguments)
    except KeyboardInterrupt:
        return 130
    finally:
        server.stop()


def _load_and_serve(server: Server, settings: Settings, arguments: argparse.Namespace) -> int:
    from mlx_backend.engine.base import EngineError
    from mlx_backend.engine.mlx import load_engine
    from mlx_backend.server.app import App
    from mlx_backend.service import Service

    try:
        engine = load_engine(
            arguments.model or MODEL_PATH,
            model_id=arguments.model_id or (None if arguments.model else MODEL_NAME),
            context_length=arguments.context_length,
            max_concurrent=settings.max_concurrent,
            max_waiting=settings.max_queue,
            cache_bytes=int(arguments.cache_gb * _GIBI),
        )
    except EngineError as error:
        return _failed(str(error))
    try:
        service = Service(engine, effort=settings.reasoning_effort, max_tokens=settings.max_tokens)
        server.wsgi_app = App(service, settings)
        _announce(server.url, engine.model_id, settings, demo=not arguments.model)
        _serve_until_told(server, engine, settings)
    finally:
        engine.stop()
    return 0


def _serve_until_told(server: Server, engine: Engine, settings: Settings) -> None:
    serving = threading.Thread(target=server.serve, name="http")
    with _signals() as told:
        serving.start()
        told.recv(1)
        print("Stopping …", flush=True)

        def lose_patience() -> None:
            told.settimeout(settings.shutdown_seconds)
            with suppress(TimeoutError):  # told twice: wait for nobody
                told.recv(1)
            engine.stop()  # replies that are still running are cut, and their clients told so

        patience = threading.Thread(target=lose_patience, name="patience")
        patience.start()
        server.stop()
        told.shutdown(socket.SHUT_RD)  # nobody is left to be patient with
        patience.join()
        serving.join()


@contextmanager
def _signals() -> Iterator[socket.socket]:
    """Give a socket that a byte comes out of with every SIGINT and SIGTERM.

    A handler in Python would not do: the system may hand a signal to any thread, and then nothing wakes the
    main thread, which alone runs handlers.
    """
    told, teller = socket.socketpair()
    teller.setblocking(False)
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda *_: None) for number in numbers}
    descriptor = signal.set_wakeup_fd(teller.fileno())
    try:
        yield told
    finally:
        signal.set_wakeup_fd(descriptor)
        for number, handler in before.items():
            signal.signal(number, handler)
        told.close()
        teller.close()


def _announce(url: str, model_id: str, settings: Settings, *, demo: bool) -> None:
    effort = settings.reasoning_effort or "medium"
    port = url.rpartition(":")[2]
    lines = [f"Model {model_id}, reasoning effort {effort} where nobody says otherwise"]
    if demo:
        lines += [
            "  This is a demonstration model, not an assistant: it knows a few toy skills and nothing else.",
            f"  Start a real one with: mlx-backend --model {A_REAL_MODEL}",
        ]
    if settings.host not in ("127.0.0.1", "localhost", "::1"):
        if settings.api_key is None:
            lines.append(
                f"  Everyone who can reach {settings.host} can use it: set --api-key or ${API_KEY_VARIABLE}."
            )
        hint = ""
    else:
        hint = " (start with --host 0.0.0.0 so that containers can reach it)"
    key = ' -H "Authorization: Bearer $KEY"' if settings.api_key else ""
    lines += [
        f"Listening on {url}",
        f"  Dify in Docker: http://host.docker.internal:{port}/v1{hint}",
        f"  Try: curl {url}/v1/chat/completions{key} -H 'Content-Type: application/json' "
        """-d '{"messages": [{"role": "user", "content": "What is the capital of France?"}]}'""",
    ]
    print("\n".join(lines), flush=True)


def _settings(arguments: argparse.Namespace) -> Settings:
    temperature = arguments.temperature
    if temperature is None:
        temperature = 1.0 if arguments.model else 0.0
    return Settings(
        host=arguments.host,
        port=arguments.port,
        api_key=arguments.api_key or os.environ.get(API_KEY_VARIABLE) or None,
        reasoning_effort=arguments.reasoning_effort,
        reasoning_format=ReasoningFormat(arguments.reasoning_format),
        reasoning_field=ReasoningField(arguments.reasoning_field),
        temperature=temperature,
        max_tokens=arguments.max_tokens,
        max_concurrent=arguments.max_concurrent,
        max_queue=arguments.max_queue,
        max_body_bytes=arguments.max_body_mb * _MEBI,
        cors_origins=tuple(arguments.cors_origin),
    )


def _why_not_bound(settings: Settings, error: OSError) -> str:
    text = str(error)
    if "in use" in text:
        place = f"Port {settings.port} on {settings.host}"
        return f"{place} is in use: choose another with --port (0: any free one)."
    return f"Cannot listen on {settings.host}, port {settings.port}: {text.rpartition('] ')[2].rstrip(')')}."


def _failed(message: str) -> int:
    print(f"mlx-backend: {message}", file=sys.stderr)
    return 1


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


def _effort(text: str) -> object:
    from mlx_backend.conversation.effort import EffortError, parse

    try:
        return parse(text)
    except EffortError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
