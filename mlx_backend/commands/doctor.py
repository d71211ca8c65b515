"""`mlx-backend doctor`: whether this machine can serve, what is wrong if not, and what a report of a problem needs.

Each check is a function that returns what it found, with a cure where something is to be done. MLX is imported in a
process of its own, which may crash. Changes nothing; the models' weights are not read.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import socket
import subprocess
import sys
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mlx_backend import __version__, version_and_commit
from mlx_backend.clients import KEY_VARIABLE, LOOPBACK, ServerAccess
from mlx_backend.commands.errors import CommandError
from mlx_backend.commands.running_server import RunningServer, add_server_options
from mlx_backend.commands.terminal import add_json_option, console, print_json, printable
from mlx_backend.device.machine import this_machine
from mlx_backend.device.memory import format_bytes
from mlx_backend.errors import first_line
from mlx_backend.models.folders import format_size

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from mlx_backend.commands.local_models import LocalModel
    from mlx_backend.device.machine import Machine

type State = Literal["ok", "warning", "failed"]

MARKS = {"ok": ("✓", "green"), "warning": ("⚠", "yellow"), "failed": ("✗", "red")}
PYTHONS = ((3, 12), (3, 15))
"""The first version that is served, and the first that is not any more."""
PACKAGES = (
    *("mlx", "mlx-metal", "mlx-cpu", "mlx-lm", "mlx-vlm", "transformers", "tokenizers", "huggingface-hub"),
    *("llguidance", "numpy", "werkzeug", "waitress", "pydantic"),
)
NEEDED = ("mlx", "mlx-lm", "transformers", "werkzeug", "waitress", "pydantic", "llguidance", "jinja2")
IMPORT_SECONDS = 120
"""Seconds for importing MLX: the first time, and on a busy machine, it takes many."""
LITTLE_SPACE, NO_SPACE = 20 << 30, 1 << 30
"""Free bytes of a disk below which a model may not fit, and nothing does."""
LITTLE_MEMORY = 8 << 30
IN_CONTAINERS = (Path("/.dockerenv"), Path("/run/.containerenv"))
"""Files that Docker and Podman put into containers."""

# What runs in a process of its own. A product that is wrong tells of a broken BLAS.
_MLX = """
import json
from mlx_backend.device.blas import use_fast_blas
blas = use_fast_blas()
from mlx_backend.device.importing import importing_mlx
with importing_mlx("auto"):
    import mlx.core as mx
    from mlx_backend.device import mlx as adapter
ones = mx.ones((64, 64))
print(json.dumps({
    "product": float((ones @ ones).sum()), "version": mx.__version__, "gpu": adapter.is_gpu(),
    "name": str(mx.device_info().get("device_name", "")), "memory": adapter.recommended_memory(),
    "wired": adapter.working_set_limit(), "blas": str(blas or ""), "slow": bool(blas and blas.is_slow),
}))
"""
_PRODUCT = 64.0**3
_INSTALL_AGAIN = "Install again, in the way it was"


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found, in a sentence, and what to do about it."""

    state: State
    found: str
    cure: str = ""
    about: str = ""


ok = partial(Finding, "ok")
warning = partial(Finding, "warning")
failed = partial(Finding, "failed")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.description = (
        "Look whether this machine can serve, and say what to do where it cannot. Ends with what a report of a problem "
        "needs; no key is in it. The exit status is 1 if something is wrong."
    )
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="look at this model too: a name, or its folder"
    )
    add_server_options(parser)
    add_json_option(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print what is found as it is found; return 1 if something is wrong."""
    findings: list[Finding] = []
    for finding in checks(arguments):
        findings.append(finding)
        if not arguments.json:
            _show(finding)
    if arguments.json:
        listed = [{name: without_secrets(text) for name, text in asdict(each).items()} for each in findings]
        print_json({"findings": listed, "report": problem_report(findings)})
    else:
        _show_end(findings)
    return 1 if any(finding.state == "failed" for finding in findings) else 0


def checks(arguments: argparse.Namespace) -> Iterator[Finding]:
    """Look at everything, in the order in which one thing needs another.

    What keeps a check from looking, such as a package that is missing, is found too.
    """
    machine = this_machine()
    mlx = cache(ask_mlx)
    server = cache(lambda: ServerState.of(arguments))
    in_container = any(map(Path.exists, IN_CONTAINERS))
    looks: dict[str, Callable[[], Finding | None]] = {
        "system": lambda: check_system(machine),
        "python": lambda: check_python(sys.version_info[:2]),
        "packages": check_packages,
        "mlx": lambda: check_mlx(mlx()),
        "memory": lambda: check_memory(machine, mlx()),
        "wired memory": lambda: check_wired(mlx()) if machine.is_mac else None,
        "cache": lambda: check_cache(hugging_face_cache()),
        "disk": lambda: check_disk(hugging_face_cache()),
        "images": check_vision,
        "variables": check_variables,
        "server": lambda: check_server(server()),
        "containers": lambda: check_containers(server(), is_mac=machine.is_mac, in_container=in_container),
        "key": lambda: check_key(server()),
        "model": lambda: check_model(arguments.model, mlx()) if arguments.model else None,
        "template": lambda: check_template(arguments.model) if arguments.model else None,
    }
    for about, look in looks.items():
        try:
            found = look()
        except Exception as error:
            reason = f"{type(error).__name__}: {first_line(error)}"
            found = failed(
                f"this could not be looked at ({reason})", f"{_INSTALL_AGAIN}: make setup, uv tool or pipx."
            )
        if found is not None:
            yield replace(found, about=about)


def check_system(machine: Machine) -> Finding:
    """Whether MLX runs on this kind of machine."""
    found = f"{machine.system} {platform.mac_ver()[0] or platform.release()} on {machine.processor}"
    if (refusal := machine.refusal()) is not None:
        return failed(found, refusal)
    return ok(found)


def check_python(version: tuple[int, int]) -> Finding:
    """Whether what is needed is built for this Python."""
    first, end = PYTHONS
    found = f"Python {platform.python_version()} ({sys.executable})"
    if not first <= version < end:
        needed = f"{first[0]}.{first[1]} to {end[0]}.{end[1] - 1}"
        return failed(found, f"Install with a Python of {needed}.")
    return ok(found)


def check_packages() -> Finding:
    """Whether all packages are there, in versions that this one was made for."""
    missing = [name for name in NEEDED if not version_of(name)]
    versions = (f"{name} {version_of(name) or 'missing'}" for name in ("mlx", "mlx-lm", "transformers"))
    found = f"mlx-backend {__version__}, {', '.join(versions)}"
    if missing:
        return failed(found, f"Missing: {', '.join(missing)}. {_INSTALL_AGAIN}: make setup, uv tool or pipx.")
    if unfit := _unfit():
        cure = f"Not in a version that was tried: {', '.join(unfit)}. Install again without other versions."
        return warning(found, cure)
    return ok(found)


def _unfit() -> list[str]:
    """Return what is installed in another version than the package asks for; nothing in a clone, which has a lock."""
    from packaging.requirements import Requirement

    try:
        required = [Requirement(text) for text in metadata.requires("dify-mlx-provider") or ()]
    except metadata.PackageNotFoundError:
        return []
    return [
        f"{each.name} {version} ({each.specifier})"
        for each in required
        if (each.marker is None or each.marker.evaluate())
        and (version := version_of(each.name))
        and not each.specifier.contains(version, prereleases=True)
    ]


def version_of(package: str) -> str:
    """Return the version that is installed; empty if none is."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def ask_mlx(program: str = _MLX) -> dict[str, Any]:
    """Return what MLX says of itself and the device; `error` if it cannot be imported."""
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", program],
            capture_output=True,
            text=True,
            check=False,
            timeout=IMPORT_SECONDS,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
    except subprocess.TimeoutExpired:
        return {"error": f"importing it was not done after {IMPORT_SECONDS} s"}
    try:
        said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        lines = done.stderr.strip().splitlines()
        return {"error": lines[-1] if lines else f"its process ended with status {done.returncode}"}
    return said


def check_mlx(mlx: Mapping[str, Any]) -> Finding:
    """Whether MLX can be imported, computes rightly, and on what."""
    if "error" in mlx:
        cure = f"{_INSTALL_AGAIN} (make setup, uv tool, pipx); on an NVIDIA GPU see docs/performance.md."
        return failed(f"MLX cannot be used: {mlx['error']}", cure)
    device = f"the GPU {mlx['name']}".rstrip() if mlx["gpu"] else "the CPU"
    found = f"MLX {mlx['version']} computes on {device}" + (f". {mlx['blas']}" if mlx["blas"] else "")
    if mlx["product"] != _PRODUCT:
        cure = "Products of matrices are wrong. Leave LD_PRELOAD out, or choose another BLAS with --blas."
        return failed(found, cure)
    if mlx["slow"]:
        cure = (
            "Prompts are many times slower so. Install an optimised BLAS (Debian and Ubuntu: apt install "
            "libopenblas0-pthread)."
        )
        return warning(found, cure)
    if not mlx["gpu"] and platform.system() == "Darwin":
        return warning(found, "Metal is not available: is this a virtual machine?")
    return ok(found)


def check_memory(machine: Machine, mlx: Mapping[str, Any]) -> Finding:
    """How much there is, and how much of it models may take."""
    from mlx_backend.device.machine import memory_pressure

    found = f"{format_bytes(machine.memory)} in all"
    if "error" not in mlx:
        found += f", of which models and their caches may take {format_bytes(mlx['memory'])} (--memory-gb)"
    if (pressure := memory_pressure()) != "none":
        cure = f"macOS is short of memory now ({pressure}): end programs that take much."
        return warning(found, cure)
    if machine.memory < LITTLE_MEMORY:
        cure = "That is enough for small models; `mlx-backend recommend` names some."
        return warning(found, cure)
    return ok(found)


def check_wired(mlx: Mapping[str, Any]) -> Finding:
    """How much memory macOS leaves to the GPU."""
    limit = mlx.get("wired")
    found = f"macOS leaves {format_bytes(limit)} to the GPU" if limit else "macOS names no limit for the GPU"
    return ok(f"{found} (iogpu.wired_limit_mb; docs/performance.md)")


def hugging_face_cache() -> Path:
    """Return where models are downloaded to."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def check_cache(folder: Path) -> Finding:
    """Whether models can be downloaded into the cache."""
    there = next(each for each in (folder, *folder.parents) if each.exists())
    count = sum(1 for each in folder.glob("models--*")) if there == folder else 0
    found = (
        f"{folder}, with {count} model{'s' * (count != 1)}" if there == folder else f"{folder} (not made yet)"
    )
    if not there.is_dir():
        return failed(found, f"{there} is no folder: move it away, or set HF_HOME to another folder.")
    if not os.access(there, os.W_OK | os.X_OK):
        cure = (
            f"Nothing can be written there: change the rights of {there}, or set HF_HOME to another folder."
        )
        return failed(found, cure)
    return ok(found)


def check_disk(folder: Path, usage: Callable[[Path], Any] = shutil.disk_usage) -> Finding:
    """How much more can be downloaded."""
    free = usage(next(each for each in (folder, *folder.parents) if each.exists())).free
    found = f"{format_size(free)} free where models are kept"
    if free < NO_SPACE:
        cure = "Make room (`mlx-backend rm MODEL`), or set HF_HOME to a folder of another disk."
        return failed(found, cure)
    if free < LITTLE_SPACE:
        cure = "A model of 20B parameters has 12 GB. `mlx-backend list` shows what is there, and `rm` removes it."
        return warning(found, cure)
    return ok(found)


def check_vision() -> Finding:
    """Whether models that see can be shown images."""
    from mlx_backend.engine.mlx.vision.families import is_installed

    if is_installed():
        return ok(f"mlx-vlm {version_of('mlx-vlm')}: models that see are shown images")
    return ok("not installed; only models that see need it (docs/images.md)")


def check_variables() -> Finding | None:
    """Variables of the environment that were meant for this, and have no effect."""
    from mlx_backend.commands.options import unknown_variables

    if not (unknown := unknown_variables()):
        return None
    found = ", ".join(f"${variable} has no effect" for variable in unknown)
    return warning(found, " ".join(dict.fromkeys(unknown.values())))


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerState:
    """What is at the server's address. `is_ours`: a server of ours; `is_elsewhere`: on another machine.

    `on_network` is whether it is reached by this machine's address in its network too; None where it has none.
    """

    url: str
    port: int
    is_ours: bool = False
    is_elsewhere: bool = False
    version: str = ""
    models: tuple[str, ...] = ()
    needs_key: bool = False
    has_key: bool = False
    key_is_right: bool = True
    in_use: str = ""
    on_network: bool | None = None

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> ServerState:
        """Ask it."""
        from urllib.parse import urlsplit

        from mlx_backend.commands.start_lines import own_address
        from mlx_backend.server.port_check import port_in_use

        with closing(RunningServer.of(arguments)) as server:
            url, health, problem = server.url, {}, ""
            try:
                health = server.health()
            except CommandError as error:
                problem = str(error)
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
        has_key = bool(arguments.key or os.environ.get(KEY_VARIABLE))
        known: dict[str, Any] = {
            "url": url,
            "port": port,
            "is_elsewhere": host not in LOOPBACK,
            "has_key": has_key,
        }
        if problem:
            return cls(**known, in_use=(port_in_use(host, port) or "") if host in LOOPBACK else problem)
        address = own_address(socket.AF_INET)
        return cls(
            **known,
            is_ours=True,
            version=str(health.get("version", "")),
            models=tuple(str(each["model"]) for each in health.get("models", ())),
            needs_key=_asks_for_key(url),
            key_is_right=not has_key or "models" in health,
            on_network=None if address is None else _is_reached(address, port),
        )


def _asks_for_key(url: str) -> bool:
    """Whether those who send no key learn less."""
    try:
        with closing(RunningServer(url)) as server:
            return "models" not in server.health()
    except CommandError:
        return False


def _is_reached(address: str, port: int) -> bool:
    try:
        with socket.create_connection((address, port), 1.0):
            return True
    except OSError:
        return False


def check_server(server: ServerState) -> Finding:
    """What is at the server's address."""
    if server.is_ours:
        named = f" with {', '.join(server.models[:3])}" if server.models else ""
        found = f"mlx-backend {server.version} answers at {server.url}{named}".replace("  ", " ")
        if server.version and server.version != __version__:
            cure = f"This command is of version {__version__}: start the server again."
            return warning(found, cure)
        return ok(found)
    if server.in_use:
        return warning(f"no server of ours at {server.url}", server.in_use)
    return ok(f"none runs; the port {server.port} is free for one")


def check_containers(server: ServerState, *, is_mac: bool, in_container: bool = False) -> Finding:
    """Whether a container on this machine, such as Dify's, reaches the server."""
    if in_container:
        found = f"this is a container: others reach what it publishes (-p {server.port}:{server.port}, --host 0.0.0.0)"
        return ok(found)
    seen = ServerAccess(url=server.url).container_url
    found = f"a container on this machine uses {seen}/v1"
    if server.is_elsewhere:
        return ok(found)
    hosts = "" if is_mac else ' and needs extra_hosts: ["host.docker.internal:host-gateway"]'
    if not server.is_ours:
        advice = "" if is_mac else ", if the server is started with --host 0.0.0.0 --api-key KEY"
        return ok(f"{found}{hosts}{advice}")
    if server.on_network is False and not is_mac:
        cure = "It answers on loopback alone, which no container reaches: start it with --host 0.0.0.0 --api-key KEY."
        return warning(f"{found}{hosts}", cure)
    return ok(f"{found}{hosts}")


def check_key(server: ServerState) -> Finding:
    """Whether the server wants a key, and has been given the right one. The key is not shown."""
    if not server.is_ours:
        given = f"${KEY_VARIABLE} is set" if server.has_key else "none is set"
        return ok(given)
    if server.needs_key and not server.has_key:
        cure = f"Give it with --key, or in ${KEY_VARIABLE}."
        return warning("the server wants one, and none is given", cure)
    if not server.key_is_right:
        cure = "The server does not know it: compare it with the server's --api-key or --api-key-file."
        return failed("a wrong one is given", cure)
    if not server.needs_key and server.on_network:
        cure = "Everyone who can reach this machine can use the server: start it with --api-key KEY."
        return warning("the server wants none", cure)
    return ok("the server wants one, and takes it" if server.needs_key else "the server wants none")


def _whole_model(name: str) -> LocalModel:
    """Find a model. Raises CommandError, saying why it cannot be served."""
    from mlx_backend.commands.local_models import LocalModels
    from mlx_backend.models.folders import problem_of

    model = LocalModels().find(name)
    if (problem := problem_of(model.folder, model.name)) != "":
        raise CommandError(problem or f"{model.folder} holds nothing of a model.")
    return model


def check_model(name: str, mlx: Mapping[str, Any]) -> Finding:
    """Whether a model's folder is whole, and whether it fits."""
    from mlx_backend.device.memory import room_for_weights

    try:
        model = _whole_model(name)
    except CommandError as error:
        return failed(f"{name} cannot be served", str(error))
    weights = model.files.weight_bytes
    found = f"the weights of {model.name} take {format_bytes(weights)} of memory"
    if "error" not in mlx and weights > room_for_weights(mlx["memory"]):
        cure = "They do not fit into the memory that models may take: `mlx-backend recommend` names models that do."
        return failed(found, cure)
    return ok(found)


def check_template(name: str) -> Finding | None:
    """How a model's template and tokens are understood; None for one that does not chat, or is not whole."""
    from mlx_backend.models.files import chat_template

    try:
        model = _whole_model(name)
    except CommandError:
        return None
    if (described := model.description).kind != "llm":
        return None
    found = (
        f"dialect {described.dialect}: {described.recognised_by}; efforts: "
        f"{', '.join(described.efforts) or 'none'}; context: {described.context_length or 'not known'}; "
        f"{', '.join(described.capabilities)}"
        f"{'; one reply at a time' if described.unbatched else ''}"
    )
    if chat_template(model.folder) is None:
        cure = "It has no chat template: a base model, which was not trained to chat, is for /v1/completions."
        return warning(found, cure)
    return ok(found)


def problem_report(findings: Sequence[Finding]) -> str:
    """Return what a report of a problem needs: what was found, versions of packages, and names of variables."""
    versions = [f"{name} {version}" for name in PACKAGES if (version := version_of(name))]
    variables = sorted(name for name in os.environ if name.startswith(("MLX_", "HF_")))
    lines = (
        f"mlx-backend {version_and_commit()}, Python {platform.python_version()}, {platform.platform()}",
        f"packages: {', '.join(versions)}",
        *(f"{MARKS[each.state][0]} {each.about}: {each.found}" for each in findings),
        f"variables that are set: {', '.join(variables) or 'none'}",
    )
    return without_secrets("\n".join(lines))


def without_secrets(text: str) -> str:
    """Take the home folder, the machine's name and the key out of a text."""
    for secret in (os.environ.get(KEY_VARIABLE), os.environ.get("HF_TOKEN")):
        if secret:
            text = text.replace(secret, "…")
    if len(name := socket.gethostname()) > 3:
        text = text.replace(name, "HOST")
    home = str(Path.home())
    return text if home == "/" else text.replace(f"{home}/", "~/")


def _show(finding: Finding) -> None:
    from rich.table import Table
    from rich.text import Text

    mark, colour = MARKS[finding.state]
    rows: list[tuple[str | Text, ...]] = [(Text(mark, colour), finding.about, finding.found)]
    if finding.cure:
        rows.append(("", "", Text(printable(f"→ {finding.cure}"), colour)))
    for row in rows:  # a table each, so that none is filled up to the width of the other
        lines = Table.grid(padding=(0, 1, 0, 0))
        for width in (1, 12, None):
            lines.add_column(min_width=width, overflow="fold")
        lines.add_row(*row)
        console().print(lines)


def _show_end(findings: Sequence[Finding]) -> None:
    wrong = sum(finding.state == "failed" for finding in findings)
    warnings = sum(finding.state == "warning" for finding in findings)
    said = f"{wrong} thing{'s are' if wrong != 1 else ' is'} wrong" if wrong else "Nothing is wrong"
    more = f", {warnings} to look at" if warnings else ""
    console().print(f"\n{said}{more}. For a report of a problem:\n")
    print(printable(f"```text\n{problem_report(findings)}\n```"))
