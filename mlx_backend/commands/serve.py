"""`mlx-backend serve`: from the command line to a running server, and back down in order.

Start: bind (a port in use is known before gigabytes are loaded), answer, load. Stop: nobody new, some time for
those who are being answered, then the engines' threads are stopped and joined.
"""

from __future__ import annotations

import argparse
import logging
import signal
import socket
import sys
import threading
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from mlx_backend.commands.options import (
    API_KEY_VARIABLE,
    add_options,
    engine_options_of,
    model_of,
    readers_of,
    settings_of,
)
from mlx_backend.device import Device
from mlx_backend.engine.distributed.launch import distributed_backend
from mlx_backend.errors import EngineError
from mlx_backend.registry.errors import ConfigurationError, ModelError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mlx_backend.embedding.embedding_config import EmbeddingOptions
    from mlx_backend.embedding.worker import Worker
    from mlx_backend.engine.base import Engine
    from mlx_backend.models.engine_options import EngineOptions
    from mlx_backend.models.model_type import ModelType
    from mlx_backend.models.spec import ModelSpec
    from mlx_backend.registry.registry import MultiModelRegistry
    from mlx_backend.settings import Settings

A_REAL_MODEL = "mlx-community/gpt-oss-20b-MXFP4-Q8"
_QUESTION = "What is the capital of France?"
_TRY: dict[ModelType, tuple[str, str]] = {
    "llm": ("/v1/chat/completions", f'{{"messages": [{{"role": "user", "content": "{_QUESTION}"}}]}}'),
    "embedding": ("/v1/embeddings", f'{{"input": "{_QUESTION}"}}'),
    "rerank": ("/v1/rerank", f'{{"query": "{_QUESTION}", "documents": ["Paris.", "Rome."]}}'),
}
_LOADED, _LEFT = b"\0", b"\0"  # what is told beside signals, whose numbers begin at 1


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command and its options."""
    parser = subparsers.add_parser(
        "serve",
        usage="mlx-backend [serve] [option …]",
        description="Serve reasoning models on MLX behind OpenAI's API.",
        epilog="Other commands: `mlx-backend parse` shows what a model's raw output means, `mlx-backend sanitise` "
        "what a model gets of a history; `mlx-backend --version` prints the version.",
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=34),
    )
    parser.set_defaults(run=run)
    add_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Serve until told to stop; return the exit status."""
    logging.basicConfig(
        level=arguments.log_level.upper(), format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr
    )
    for chatty in ("httpx", "httpcore", "urllib3", "filelock", "fsspec"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    settings = settings_of(arguments)
    try:
        follow = _follower(arguments)
        return follow() if follow is not None else _serve(settings, arguments)
    except (ConfigurationError, EngineError, ModelError) as error:
        return _failed(str(error))
    except KeyboardInterrupt:
        return 130


def _serve(settings: Settings, arguments: argparse.Namespace) -> int:
    from mlx_backend.server.app import App
    from mlx_backend.server.wsgi_server import Server

    models = _models(settings, arguments)
    app = App(models, settings)
    requests = settings.max_concurrent + settings.max_queue
    server = Server(settings.host, settings.port, app, requests=requests, shutdown_seconds=2)
    try:
        server.prepare()
    except OSError as error:
        return _failed(_why_not_bound(settings, error))
    serving = threading.Thread(target=server.serve, name="http")
    try:
        with _signals() as (told, teller):
            # Requests are answered from now on: they wait for their model, and /health says how far it is.
            serving.start()
            loading = _Loading(models, teller)
            loading.start()
            if told.recv(1) == _LOADED:
                if loading.failure is not None:
                    return _failed(str(loading.failure))
                _announce(server.url, models, settings, demo=_is_demo(arguments))
                told.recv(1)
            print("Stopping …", flush=True)
            app.in_flight.drain()

            def see_them_off() -> None:
                if app.in_flight.wait_until_idle(settings.drain_seconds):
                    with suppress(OSError):  # told twice: nobody listens any more
                        teller.send(_LEFT)

            threading.Thread(target=see_them_off, name="drain", daemon=True).start()
            told.settimeout(settings.drain_seconds)
            with suppress(TimeoutError):
                told.recv(1)  # the last has left, or told twice: wait for nobody
        return 0
    finally:
        models.stop()  # replies that are still running are cut, and their clients told so
        server.stop()
        serving.join()


def _follower(arguments: argparse.Namespace) -> Callable[[], int] | None:
    """Where several processes were launched to share one model, return what all but the first of them do."""
    if distributed_backend() is None:
        return None
    from mlx_backend.engine.mlx import follow_engine, rank

    model = model_of(arguments)
    others = arguments.config or arguments.models_dir or arguments.hf_cache
    if model is None or others or arguments.embedding_model or arguments.rerank_model:
        raise ConfigurationError("Several processes share one model: name it with --model, and no others.")
    if rank() == 0:
        return None
    options = replace(model.options(engine_options_of(arguments)), allow_download=True)
    return lambda: follow_engine(model.source, options)


class _Loading(threading.Thread):
    """Loads what is to be there from the start, and tells when it is or cannot be."""

    def __init__(self, models: MultiModelRegistry, teller: socket.socket) -> None:
        super().__init__(name="start", daemon=True)
        self.failure: Exception | None = None
        self._models = models
        self._teller = teller

    def run(self) -> None:
        try:
            self._models.preload()
        except Exception as error:
            self.failure = error
        with suppress(OSError):  # stopped meanwhile
            self._teller.send(_LOADED)


def _models(settings: Settings, arguments: argparse.Namespace) -> MultiModelRegistry:
    """Put together what can be served; the first is for requests that name none."""
    from mlx_backend.registry import config_file
    from mlx_backend.registry.catalogue import Catalogue
    from mlx_backend.registry.registry import MultiModelRegistry

    read = config_file.read(arguments.config) if arguments.config else config_file.Configuration()
    named = model_of(arguments)
    readers = readers_of(arguments)
    specs = [*([named] if named is not None else []), *read.models, *readers]
    others = read.others
    if arguments.ttl is not None:
        specs = [replace(spec, ttl=spec.ttl if spec.ttl is not None else arguments.ttl) for spec in specs]
        others = replace(others, ttl=others.ttl if others.ttl is not None else arguments.ttl)
    catalogue = Catalogue(
        specs,
        models_dirs=arguments.models_dir,
        hugging_face_cache=arguments.hf_cache,
        allow_download=arguments.allow_download,
        others=others,
    )
    names = [spec.name for spec in specs]
    if twice := sorted({spec.name for spec in readers if names.count(spec.name) > 1}):
        raise ConfigurationError(
            f"There are two models called {twice[0]!r}; name one of them in the models file."
        )
    listed = specs or list(catalogue.models())
    if not listed:
        raise ConfigurationError("There is no model to serve: name one with --model, or in the models file.")
    options = engine_options_of(arguments)
    device = Device(options.memory_bytes or _recommended_memory)
    several = len(catalogue.models()) > 1
    talking = [spec for spec in (*listed, *catalogue.models()) if catalogue.model_type(spec) == "llm"]
    return MultiModelRegistry(
        catalogue,
        partial(_load, device),
        options,
        settings,
        memory_limit=device.memory.limit if several or options.memory_bytes is not None else None,
        default_name=(talking or listed)[0].name,
        load_worker=partial(_load_reader, device),
    )


def _recommended_memory() -> int:
    from mlx_backend.device.mlx import recommended_memory

    return recommended_memory()


def _load(
    device: Device, spec: ModelSpec, options: EngineOptions, on_progress: Callable[[float], None]
) -> Engine:
    """Load a language model and show on a terminal how far it is."""
    from mlx_backend.engine.mlx import load_engine

    return load_engine(
        spec.source, options, device=device, model_id=spec.name, on_progress=_shown(spec, on_progress)
    )


def _load_reader(
    device: Device,
    spec: ModelSpec,
    kind: ModelType,
    options: EmbeddingOptions,
    on_progress: Callable[[float], None],
) -> Worker:
    """Load a model that makes vectors or ranks, and show on a terminal how far it is."""
    from mlx_backend.embedding.mlx import load_worker

    return load_worker(
        spec.source, kind, options, device=device, model_id=spec.name, on_progress=_shown(spec, on_progress)
    )


def _shown(spec: ModelSpec, on_progress: Callable[[float], None]) -> Callable[[float], None]:
    shown = -1

    def show(part: float) -> None:
        nonlocal shown
        on_progress(part)
        if sys.stderr.isatty() and int(part * 100) != shown:
            shown = int(part * 100)
            ending = "\n" if part >= 1 else ""
            print(f"\rLoading {spec.name} … {shown} %", end=ending, file=sys.stderr, flush=True)

    return show


def _is_demo(arguments: argparse.Namespace) -> bool:
    named = model_of(arguments)
    return arguments.model is None and named is not None


@contextmanager
def _signals() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Give a socket that a byte comes out of with every SIGINT and SIGTERM, and the one to put others into.

    A handler in Python would not do: the system may hand a signal to any thread, and then nothing wakes the
    main thread, which alone runs handlers.
    """
    told, teller = socket.socketpair()
    teller.setblocking(False)
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda *_: None) for number in numbers}
    descriptor = signal.set_wakeup_fd(teller.fileno())
    try:
        yield told, teller
    finally:
        signal.set_wakeup_fd(descriptor)
        for number, handler in before.items():
            signal.signal(number, handler)
        told.close()
        teller.close()


def _announce(url: str, models: MultiModelRegistry, settings: Settings, *, demo: bool) -> None:
    first, *others = models.statuses()
    port = url.rpartition(":")[2]
    lines = [f"Model {first.name}"]
    address, body = _TRY[models.model_type(first.name)]
    if models.model_type(first.name) == "llm":
        effort = models.configured_effort(first.name) or settings.reasoning_effort or "medium"
        lines = [f"{lines[0]}, reasoning effort {effort} where nobody says otherwise"]
    if others:
        lines.append(f"  Also served: {', '.join(status.name for status in others[:20])}")
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
        f"  Try: curl {url}{address}{key} -H 'Content-Type: application/json' -d '{body}'",
    ]
    print("\n".join(lines), flush=True)


def _why_not_bound(settings: Settings, error: OSError) -> str:
    text = str(error)
    if "in use" in text:
        place = f"Port {settings.port} on {settings.host}"
        return f"{place} is in use: choose another with --port (0: any free one)."
    return f"Cannot listen on {settings.host}, port {settings.port}: {text.rpartition('] ')[2].rstrip(')')}."


def _failed(message: str) -> int:
    print(f"mlx-backend: {message}", file=sys.stderr)
    return 1
