"""Every architecture that the installed mlx-lm has: are our replies those of mlx-lm's own generation?

    python tests/benchmarks/architecture_matrix.py [NAME …] [--weights float32] [--jobs 2] [--write] [--saved]

Models are tiny and random (architectures.py). Each is checked in a process of its own (architecture_checks.py), with
limits of time and memory, so that one that crashes is a row of the table. Results are kept under .bench/, by the
versions of MLX and mlx-lm and by the code that matters: a run that was stopped goes on where it was. `--write` puts
the table into the README beside this file; `--saved` checks nothing and does so with what is saved, of whatever code.
The exit status is 1 if replies differ, a process crashed, or an architecture has no tiny model.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

sys.path.insert(0, str(Path(__file__).parents[1]))
from architecture_fields import OWN, SIZES, VARIANTS
from architectures import architectures, write

from mlx_backend.device.mlx import is_gpu

if TYPE_CHECKING:
    from collections.abc import Callable

TESTS: Final = Path(__file__).resolve().parents[1]
RESULTS: Final = TESTS.parent / ".bench" / "matrix"
CODE: Final = (
    *("mlx_backend/engine", "mlx_backend/layers", "mlx_backend/device", "mlx_backend/models"),
    *(
        "tests/architecture_checks.py",
        "tests/architectures.py",
        "tests/engine_models.py",
        "tests/engine_requests.py",
    ),
)
WEIGHTS: Final[dict[str, dict[str, Any]]] = {
    "float32": {},
    "float16": {"dtype": "float16"},
    "bfloat16": {"dtype": "bfloat16"},
    "4-bit": {"dtype": "bfloat16", "bits": 4},
    "8-bit": {"dtype": "bfloat16", "bits": 8},
}
MAX_SECONDS: Final = 600  # of processor time for one architecture; most take less than 20
MAX_WAIT: Final = 3600  # seconds, after which a process is stopped that does nothing any more
MAX_BYTES: Final = 12 << 30  # of addresses; libraries take several GB of them before anything runs
BUILD, GENERATE, LOAD = "building it", "mlx-lm's generation", "loading it"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="architectures and variants; all, if none is named"
    )
    parser.add_argument("--weights", choices=WEIGHTS, default="float32")
    parser.add_argument("--jobs", type=int, default=2, help="processes at once")
    parser.add_argument("--write", action="store_true", help="write the table into the README")
    parser.add_argument("--saved", action="store_true", help="check nothing: the table of what is saved")
    parser.add_argument("--check", type=Path, metavar="FILE", help=argparse.SUPPRESS)  # the process of one
    options = parser.parse_args()
    if options.check is not None:
        _check(options.names[0], options.weights, options.check)
        return 0
    names = options.names or [*architectures(), *VARIANTS]
    check = partial(_result, weights=options.weights, any_code=options.saved)
    with ThreadPoolExecutor(options.jobs) as pool:
        results = list(pool.map(check, names))
    from benchmarks.architecture_table import summary, write_table

    print(f"\n{summary(results)}")
    if (options.write or options.saved) and not options.names:
        write_table(results, options.weights)
    return int(any(is_wrong(each) for each in results))


def is_wrong(result: dict[str, Any]) -> bool:
    """Whether a result shows something to be mended: here, in mlx-lm or among the tiny models."""
    differs = any(_differs(cell) for cell in result["checks"].values())
    return differs or "crash" in result or "missing" in result


def _differs(cell: dict[str, Any]) -> bool:
    return "error" in cell or cell.get("differ", 0) > 0


def _result(name: str, weights: str, *, any_code: bool) -> dict[str, Any]:
    """Return what is saved of an architecture (with `any_code` from whatever code), or check it now."""
    key = _key(name)
    file = RESULTS / weights / f"{name.replace(' ', '-').replace(',', '')}.json"
    with suppress(OSError, ValueError):
        saved: dict[str, Any] = json.loads(file.read_text())
        if saved.get("finished") == key or (any_code and "finished" in saved):
            return saved
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"name": name, "stage": BUILD, "checks": {}}))
    started = time.monotonic()
    crash = _run([sys.executable, __file__, name, "--weights", weights, "--check", str(file)])
    result: dict[str, Any] = json.loads(file.read_text())
    if crash:
        result["crash"] = f"{crash} during {result['stage']}"
    result |= {"finished": key, "commit": _commit(), "seconds": round(time.monotonic() - started, 1)}
    file.write_text(json.dumps(result, indent=1))
    print(f"{name:28} {result['seconds']:6.1f} s  {_short(result)}", flush=True)
    return result


def _run(command: list[str]) -> str:
    """Run a process; return how it ended, if it did not end by itself."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        status = process.wait(MAX_WAIT)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return f"no end after {MAX_WAIT} s"
    if status == -signal.SIGXCPU:
        return f"no end after {MAX_SECONDS} s of processor time"
    if status < 0:
        return signal.Signals(-status).name
    return f"exit status {status}" if status else ""


def _short(result: dict[str, Any]) -> str:
    for what in ("crash", "missing", "unavailable"):
        if what in result:
            return f"{what}: {result[what]}"
    cells = result["checks"].items()
    return ", ".join(f"{check} {cell}" for check, cell in cells if _differs(cell)) or "equal"


def _key(name: str) -> str:
    """Return what a result depends on, as a digest: versions, the code that runs and the model's configuration."""
    digest = hashlib.sha256(f"{version('mlx')} {version('mlx-lm')} {version('transformers')}".encode())
    for path in CODE:
        root = TESTS.parent / path
        for file in sorted(root.rglob("*.py")) if root.is_dir() else [root]:
            digest.update(file.read_bytes())
    architecture, changes = VARIANTS.get(name, (name, {}))
    own = [SIZES, OWN.get(architecture), changes]  # config_of() would import the architecture
    digest.update(json.dumps(own, sort_keys=True).encode())
    return digest.hexdigest()


def _commit() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, cwd=TESTS, capture_output=True, text=True, check=False).stdout.strip()


def _check(name: str, weights: str, file: Path) -> None:
    """Check one architecture, and write down what is known after each step, in case this process does not live."""
    resource.setrlimit(resource.RLIMIT_CPU, (MAX_SECONDS, MAX_SECONDS + 60))
    if sys.platform == "linux" and not is_gpu():  # whose driver reserves more addresses
        resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    result: dict[str, Any] = {"name": name, "stage": BUILD, "checks": {}}

    def save(**what: Any) -> None:
        result.update(what)
        file.write_text(json.dumps(result))

    with tempfile.TemporaryDirectory() as scratch:
        try:
            folders = [
                write(Path(scratch) / str(seed), name, seed=seed, **WEIGHTS[weights]) for seed in (3, 4)
            ]
        except (ImportError, SystemExit) as error:
            save(unavailable=f"mlx-lm cannot import it: {_line(error)}")
        except Exception as error:
            save(missing=_line(error))
        else:
            _check_model(folders, save)


def _check_model(folders: list[Path], save: Callable[..., None]) -> None:
    from architecture_checks import CHECKS, Model, requests

    checks: dict[str, Any] = {}
    save(stage=GENERATE)
    try:
        model = Model(*folders)
        model.expected(requests())
    except Exception as error:
        needs_gpu = "No Metal back-end" in str(error)
        save(**{"unavailable" if needs_gpu else "missing": _line(error)})
        return
    with model:
        save(stage=LOAD)
        try:
            save(batching=model.batching())
        except Exception as error:
            save(crash=f"it cannot be loaded: {_line(error)}")
            return
        for name, check in CHECKS.items():
            save(stage=name)
            checks[name] = _cell(model, check)
            save(checks=checks)


def _cell(model: Any, check: Any) -> dict[str, Any]:
    """Run one check; return how many replies are equal, differ only by a tie, and differ."""
    from architecture_checks import NotStored

    from mlx_backend.errors import EngineError

    try:
        replies = check(model)
        apart = [each for each in replies if each.found != each.expected]
        ties = sum(model.is_tie(each) for each in apart)
    except NotStored as error:
        return {"refused": _line(error)}
    except EngineError as error:
        return {"refused" if "not possible" in str(error) else "error": _line(error)}
    except Exception as error:
        return {"error": _line(error)}
    return {"equal": len(replies) - len(apart), "ties": ties, "differ": len(apart) - ties}


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.exit(main())
