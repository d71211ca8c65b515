"""However a program exits, the engine thread ends first: no abort, no hang, and the exit status is the program's."""

import subprocess
import sys
from pathlib import Path

import pytest
from engine_models import write_model

START = """
import signal, sys
from mlx_backend.engine.base import GenerationRequest, TokenDelta
from mlx_backend.engine.mlx import load_engine
engine = load_engine(sys.argv[1])
generation = engine.generate(GenerationRequest(prompt=[9, 10, 11], max_tokens=900))
while not isinstance(generation.next(), TokenDelta):
    pass
"""
ENDINGS = {
    "after the generation": ("list(generation)", 0),
    "after stopping the engine": ("engine.stop()", 0),
    "in mid-generation, with a status": ("sys.exit(3)", 3),
    "with an exception": ("raise ValueError('ours')", 1),
    "by a signal": (
        "signal.signal(signal.SIGTERM, lambda *_: (engine.stop(), sys.exit(0)))\n"
        "signal.raise_signal(signal.SIGTERM)\n",
        0,
    ),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), eos_token_id=[])


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_program_exits_cleanly(model: Path, ending: str) -> None:
    code, status = ENDINGS[ending]
    done = subprocess.run(
        [sys.executable, "-c", START + code, str(model)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == status, done.stderr
    assert "terminate called" not in done.stderr
