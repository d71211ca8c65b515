"""`mlx-backend serve`: from the command line to a running server, and back down in order.

Start: see that the port is free and bind (before gigabytes are loaded), answer, load. Stop: refuse new requests, give
running replies some time to finish, then stop and join the engines' threads.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import secrets
import threading
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mlx_backend.commands.errors import INTERRUPTED, CommandError
from mlx_backend.commands.load_progress import LoadProgressDisplay
from mlx_backend.commands.options import ChosenOptions, add_options, unknown_variables
from mlx_backend.commands.output import logging_to_stderr, say
from mlx_backend.commands.running_server import RunningServer
from mlx_backend.commands.start_lines import reachable_url, start_lines
from mlx_backend.commands.stop_signals import StopSignals, ended_by_interrupts
from mlx_backend.declaration import variable_of
from mlx_backend.demo import MODEL_NAME, VISION_MODEL_NAME
from mlx_backend.device import this_device
from mlx_backend.device.host_memory import keep_little_free_memory
from mlx_backend.device.machine import this_machine
from mlx_backend.engine.distributed import distributed_backend
from mlx_backend.errors import EngineError
from mlx_backend.models.folders import read_model
from mlx_backend.models.spec import ModelSpec, is_repository
from mlx_backend.registry.errors import ConfigurationError, ModelError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from mlx_backend.models.engine_options import EngineOptions
    from mlx_backend.registry.base import ModelStatus
    from mlx_backend.registry.registry import MultiModelRegistry
    from mlx_backend.server.app import App
    from mlx_backend.server.limits import RequestsInFlight
    from mlx_backend.server.wsgi_server import Server
    from mlx_backend.settings import Settings

log = logging.getLogger(__name__)

_LOADED = _DRAINED = 0
_HTTP_ENDED = 255
"""What is posted with the numbers of signals, which begin at 1 and stay below 128."""

STOP_SECONDS = 5.0
LOADING_STOP_SECONDS = 1.0
"""Seconds for stopping, after the time for running replies. A load cannot be interrupted, and keeps nothing."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.usage = "mlx-backend [serve] [MODEL] [option …]"
    parser.description = (
        "Serve reasoning models on MLX with an OpenAI-compatible API. "
        f"Every option has an environment variable that sets it too: {variable_of('--max-tokens')} for "
        "--max-tokens, with true or false for an option without a value, and with commas between the values of a "
        "repeatable one. An option wins over its variable, the models file over both, a request over all."
    )
    parser.add_argument("named", metavar="MODEL", nargs="?", help="the same as --model MODEL")
    add_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal; return the exit status."""
    if getattr(arguments, "named", None) is not None:
        if hasattr(arguments, "model"):
            arguments.refuse("the model is named twice, with --model and without")
        arguments.model = arguments.named
    try:
        chosen = ChosenOptions.of(arguments)
    except ConfigurationError as error:
        return _failed(str(error))
    with logging_to_stderr(chosen.serve.log_level, chosen.serve.log_format) as status_line:
        return _run(chosen, LoadProgressDisplay(status_line))


def _run(chosen: ChosenOptions, progress: LoadProgressDisplay) -> int:
    try:
        for variable, cure in unknown_variables().items():
            log.warning("The environment variable %s has no effect. %s", variable, cure)
        if (refusal := this_machine().refusal()) is not None:
            return _failed(refusal)
        follow = _follower(chosen)
        if follow is not None:
            return follow()
        with ended_by_interrupts():
            return _serve(chosen, progress)
    except (ConfigurationError, EngineError, ModelError) as error:
        return _failed(str(error))
    except KeyboardInterrupt:
        return 130


def _serve(chosen: ChosenOptions, progress: LoadProgressDisplay) -> int:
    from mlx_backend.server.port_check import port_in_use

    settings = chosen.settings
    if in_use := port_in_use(settings.host, settings.port):  # first: what serves takes long to import
        return _failed(in_use)
    from mlx_backend.server.api_keys import check_exposure

    check_exposure(settings)
    keep_little_free_memory()
    models = _models(chosen, on_status=progress)
    try:
        app, server = _server(models, settings)
    except OSError as error:
        return _failed(_bind_failure(settings, error))
    except RuntimeError as error:
        return _failed(
            f"The system allows this user too few threads for {settings.max_requests} requests at once ({error}): "
            "raise its limit (`ulimit -u`), or lower --max-queue."
        )
    status = 1
    with StopSignals(on_hangup=_reloads(app, settings)) as signals:
        serving = threading.Thread(target=_serve_http, args=(server, signals), name="http")
        try:
            # Requests are accepted from now on: they wait for their model, and /health says how far it is.
            serving.start()
            url, remark = reachable_url(server.url, settings.host)
            say(f"Listening on {url}{remark}")
            failures: list[Exception] = []
            load = partial(_preload, models, signals, failures)
            threading.Thread(target=load, name="start", daemon=True).start()
            event = signals.wait()
            progress.clear()
            if event == _LOADED:
                if failures:
                    return _failed(str(failures[0]))
                is_mac = this_machine().is_mac
                say(*start_lines(url, models, settings, demo=chosen.demo_name, is_mac=is_mac))
                event = signals.wait()
            if event == _HTTP_ENDED:
                return status
            app.preparations.drain()
            _drain(app.in_flight, settings.drain_seconds, signals)
            status = 0
        finally:
            is_loading = any(each.state in ("downloading", "loading") for each in models.statuses())
            signals.end_process(after=LOADING_STOP_SECONDS if is_loading else STOP_SECONDS, status=status)
            app.preparations.stop()
            models.stop()  # ends replies that are still running, with an error to their clients
            server.stop()
            serving.join()
    return status


@contextmanager
def serving(source: str, *, max_queue: int = 8) -> Iterator[tuple[RunningServer, str]]:
    """Serve a model within the block, loaded, with a key that nobody else knows: yield the server and the model's name.

    The other models of this machine are there too. Raises CommandError.
    """
    options = {
        "host": "127.0.0.1",
        "port": 0,
        "api_key": secrets.token_urlsafe(),
        "hf_cache": True,
        "max_queue": max_queue,
    }

    def chosen(model: str) -> ChosenOptions:
        return ChosenOptions.of(argparse.Namespace(model=model, **options))

    with logging_to_stderr("warning") as status_line, ExitStack() as stack:
        if status_line is not None:
            status_line.show([f"Loading {source} …"])  # first what loads models, which takes seconds itself
        progress = LoadProgressDisplay(status_line)
        try:
            named = chosen(source)
            demos = [each for each in (MODEL_NAME, VISION_MODEL_NAME) if each != named.demo_name]
            more = [spec for each in demos if (spec := chosen(each).named_model()) is not None]
            models = _models(named, on_status=progress, more=more, is_pinned=False)
            stack.callback(models.stop)
            name = models.statuses()[0].name
            models.acquire(name, math.inf, is_reported=True).release()
            app, server = _server(models, named.settings)
        except (ConfigurationError, EngineError, ModelError, OSError) as error:
            raise CommandError(str(error)) from None
        except KeyboardInterrupt:  # a load cannot be interrupted, and keeps nothing
            os._exit(INTERRUPTED)
        finally:
            progress.clear()
        stack.callback(app.preparations.stop)
        thread = threading.Thread(target=server.serve, name="http")
        thread.start()
        stack.callback(thread.join)
        stack.callback(server.stop)
        yield stack.enter_context(closing(RunningServer(server.url, named.settings.api_key))), name


def _server(models: MultiModelRegistry, settings: Settings) -> tuple[App, Server]:
    """Return an application for models, and a server that listens for it. Raises what either does."""
    from mlx_backend.server.app import App
    from mlx_backend.server.connection_limits import ConnectionLimits
    from mlx_backend.server.wsgi_server import Server

    app = App(models, settings, memory=models.memory)
    limits = ConnectionLimits(max_body_bytes=settings.max_received_bytes, trusted_proxies=app.proxies)
    server = Server(settings.host, settings.port, app, requests=settings.max_requests, limits=limits)
    return app, server


def _serve_http(server: Server, signals: StopSignals) -> None:
    """Serve until the server is stopped; have the process end if it fails, so that what started it starts it again."""
    try:
        server.serve()
    except Exception:
        log.exception("The HTTP server has failed; the process ends")
    signals.post(_HTTP_ENDED)


def _reloads(app: App, settings: Settings) -> Callable[[], None]:
    """Return what SIGHUP does: read the file of keys again, of which a broken one keeps the old ones."""

    def reload() -> None:
        if settings.api_key_file is None:
            log.info("SIGHUP: there is nothing to read again, for that is the file of --api-key-file.")
            return
        try:
            app.api_keys.reload()
        except ConfigurationError as error:
            for line in str(error).splitlines():
                log.error("The API keys stay as they were: %s", line)
        else:
            log.info("The API keys have been read again.")

    return reload


def _drain(in_flight: RequestsInFlight, seconds: float, signals: StopSignals) -> None:
    """Admit no more requests, and wait until those that run have ended, the time is over, or a signal comes."""
    in_flight.drain()
    running = in_flight.count
    if not running:
        say("Stopping …")
        return
    replies = "a reply that is" if running == 1 else f"{running} replies that are"
    say(f"Stopping … ({replies} running may take up to {seconds:g} s; Ctrl-C again ends now)")

    def wait_for_replies() -> None:
        if in_flight.wait_until_idle(seconds):
            signals.post(_DRAINED)

    threading.Thread(target=wait_for_replies, name="drain", daemon=True).start()
    signals.wait(seconds)


def _follower(chosen: ChosenOptions) -> Callable[[], int] | None:
    """Return what this process does if it was launched to share a model and is not the first; None otherwise."""
    if distributed_backend() is None:
        return None
    from mlx_backend.engine.mlx import follow_engine, rank_and_count

    model = chosen.named_model()
    if model is None or chosen.names_other_models:
        raise ConfigurationError("Several processes share one model: name it with --model, and no others.")
    engine_options = replace(model.options(chosen.engine), allow_download=True)
    if rank_and_count(engine_options.blas)[0] == 0:
        return None
    return lambda: follow_engine(model.source, engine_options)


def _preload(models: MultiModelRegistry, signals: StopSignals, failures: list[Exception]) -> None:
    """Load the pinned models, and post an event when they are loaded or one cannot be."""
    try:
        models.preload()
    except Exception as error:
        failures.append(error)
    signals.post(_LOADED)


def _models(
    chosen: ChosenOptions,
    on_status: Callable[[ModelStatus], object],
    *,
    more: Sequence[ModelSpec] = (),
    is_pinned: bool = True,
) -> MultiModelRegistry:
    """Return the models that can be served, `more` among them; the first answers requests that name none.

    `is_pinned`: those that are named stay in memory, whatever others are asked for.
    """
    from mlx_backend.embedding.mlx import load_worker
    from mlx_backend.engine.mlx import load_engine
    from mlx_backend.registry import config_file
    from mlx_backend.registry.catalogue import Catalogue
    from mlx_backend.registry.registry import MultiModelRegistry

    options = chosen.serve
    if options.config is not None:
        configuration = config_file.read(options.config, ttl=options.ttl)
    else:
        others = ModelSpec(name="", source="", ttl=options.ttl or None)
        configuration = config_file.Configuration(others=others)
    named = [spec for spec in (chosen.named_model(), *more) if spec is not None]
    if not is_pinned:
        named = [replace(spec, pinned=False) for spec in named]
    embedders = chosen.embedding_and_rerank_models()
    specs = [*named, *configuration.models, *embedders]
    catalogue = Catalogue(
        specs,
        models_dirs=options.models_dir,
        hugging_face_cache=options.hf_cache,
        allow_download=options.allow_download,
        others=configuration.others,
        options=chosen.engine,
    )
    for spec in catalogue.pinned():
        for source in spec.sources:
            _check(source)
    names = [spec.name for spec in specs]
    if duplicates := sorted({spec.name for spec in embedders if names.count(spec.name) > 1}):
        raise ConfigurationError(
            f"There are two models called {duplicates[0]!r}; name one of them in the models file."
        )
    listed = specs or list(catalogue.models())
    if not listed:
        raise ConfigurationError("There is no model to serve: name one with --model, or in the models file.")
    engine_options = chosen.engine
    device = this_device(engine_options.memory_bytes, engine_options.wired, engine_options.blas)
    language_models = [spec for spec in (*listed, *catalogue.models()) if catalogue.model_type(spec) == "llm"]
    return MultiModelRegistry(
        catalogue,
        lambda spec, options, on_progress: load_engine(
            spec.source, options, device=device, model_id=spec.name, on_progress=on_progress
        ),
        engine_options,
        chosen.settings,
        memory=device.memory,
        ranks=_ranks(engine_options),
        default_name=(language_models or listed)[0].name,
        load_worker=lambda spec, kind, options, on_progress: load_worker(
            spec.source, kind, options, device=device, model_id=spec.name, on_progress=on_progress
        ),
        fetch=_fetch
        if distributed_backend() is None
        else None,  # ranks download side by side, when they load
        on_status=on_status,
    )


def _check(source: str) -> None:
    """Raise EngineError if it is seen before loading that a model's folder is none, or not whole."""
    folder = Path(source).expanduser()
    if folder.is_dir():
        read_model(folder, source)
    elif not is_repository(source):
        from mlx_backend.models.download import find_folder

        find_folder(source, allow_download=False)  # says what it is instead


def _ranks(options: EngineOptions) -> int:
    if distributed_backend() is None:
        return 1
    from mlx_backend.engine.mlx import rank_and_count

    return rank_and_count(options.blas)[1]


def _fetch(source: str, on_progress: Callable[[int, int], None]) -> None:
    """Download what of a model is not on this machine."""
    from mlx_backend.models.download import find_folder

    find_folder(source, allow_download=True, on_progress=on_progress)


def _bind_failure(settings: Settings, error: OSError) -> str:
    text = str(error)
    if "in use" in text:
        address = f"Port {settings.port} on {settings.host}"
        return f"{address} is in use: choose another with --port (0: any free one)."
    return f"Cannot listen on {settings.host}, port {settings.port}: {text.rpartition('] ')[2].rstrip(')')}."


def _failed(message: str) -> int:
    CommandError(message).show()
    return 1
