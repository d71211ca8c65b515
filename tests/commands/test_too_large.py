"""`mlx-backend` with a model that is too large: one sentence, and nothing is downloaded."""

import os
import subprocess
import sys
from pathlib import Path

from hub_server import hub

from mlx_backend.demo import MODEL_PATH

LARGE = "maker/large"


def run_to_end(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mlx_backend", "--port", "0", *arguments]
    kept = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    return subprocess.run(command, capture_output=True, text=True, env=kept | environment, timeout=120)


def test_a_repository_is_refused_by_its_listing(tmp_path: Path) -> None:
    with hub({LARGE: {"config.json": 900, "model.safetensors": 1 << 42}}) as server:
        done = run_to_end("--model", LARGE, HF_ENDPOINT=server.url, HF_HOME=str(tmp_path))
        assert server.requests_for(LARGE) == [f"GET /api/models/{LARGE}"]
    assert done.returncode == 1
    assert (
        f"mlx-backend: The model '{LARGE}' needs 4096 GB of memory for its weights alone, and models may use "
        in done.stderr
    )
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.rglob("*.safetensors"))


def test_a_folder_is_refused_with_the_limit_that_was_given() -> None:
    done = run_to_end("--model", str(MODEL_PATH), "--memory-gb", "0.001")
    assert done.returncode == 1
    assert (
        "--memory-gb 0.001 leaves 996 KB for weights. If there is more memory, --memory-gb 1 raises the limit."
        in done.stderr
    )
