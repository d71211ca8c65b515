"""PyTorch is not imported with MLX where it is installed, and can be imported afterwards."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

SCRIPT = """
import sys
from mlx_backend.device.importing import importing_mlx
from mlx_backend.demo import MODEL_PATH
with importing_mlx("off"):
    import mlx.core
assert "torch" not in sys.modules
with importing_mlx("off"):
    from mlx_backend.engine.mlx.loading import load_tokenizer
load_tokenizer(MODEL_PATH)
assert "transformers" in sys.modules and "torch" not in sys.modules
import torch
print(torch.found)
"""


def test_torch_is_left_alone_until_a_models_own_code_imports_it(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("found = 'found'")
    (tmp_path / "torch-2.9.0.dist-info").mkdir()
    (tmp_path / "torch-2.9.0.dist-info/METADATA").write_text(
        "Metadata-Version: 2.1\nName: torch\nVersion: 2.9.0\n"
    )
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, env=environment
    )
    assert done.stdout.strip() == "found", done.stderr
